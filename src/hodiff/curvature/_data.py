"""The data contract: re-iterable batches, whose function gives a sum with its weight.

A loss over data is the quotient of two sums, over all batches, of `(sum, weight)`. So averages are
exact for ragged, masked and class-weighted batches, where a mean of means is not.
"""

from __future__ import annotations

import inspect
import math
import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from hodiff._core import _arguments, _tree, _versions
from hodiff._core._call import refuse_tangent
from hodiff.errors import GraphError, HodiffWarning, InputError

DataReduction = Literal["mean", "sum"]
"""What a sum over batches is divided by: by their weights, or by nothing."""


BatchWeight = Callable[[Any], Any] | Literal["equal"] | None

NONE: Any = object()
"""The one batch of a function that takes no data."""


class Batches:
    """The batches of `data=`, in passes.

    Attributes:
        fixed: Whether every pass gives the same batches in the same order.
        count: How many there are; None while that is unknown.
        given: Whether there are data at all.
        shared: Whether they are this process's share, and others have theirs.
        muted: Whether the one at hand has weight zero.
    """

    muted = False

    def __init__(
        self,
        data: Any,
        device: torch.device,
        *,
        keep: bool = False,
        progress: bool = False,
        shared: bool = False,
    ) -> None:
        check_data(data)
        self._data, self.given = data, data is not None
        self._device = device
        self._progress = progress
        self.shared = shared
        self._kept: list[Any] | None = None
        listed = isinstance(data, Sequence) and not isinstance(data, str)
        self._keep = keep and not listed
        self.fixed = data is None or keep or listed
        self.count: int | None = 1 if data is None else _length(data)

    def __iter__(self) -> Iterator[Any]:
        if self._data is None:
            yield NONE
            return
        batches = self._data if self._kept is None else self._kept
        if self._progress:
            from tqdm import tqdm

            batches = tqdm(batches, total=self.count, desc="hodiff: batches", leave=False)
        if self._kept is not None:
            yield from batches
            return
        kept, count = [], 0
        for batch in batches:
            count += 1
            moved = _tree.tree_map(self._move, batch)
            if self._keep:
                kept.append(moved)
            yield moved
        if not count and not self.shared:
            raise InputError(
                "data gave no batch. (Is it an exhausted iterator? Give a list or a DataLoader.)"
            )
        self.count = count
        if self._keep:
            self._kept = kept

    def check_items(self, shape_of: ShapeOf) -> None:
        """Raise where the items of a Dataset are samples, as a stack of two gives two outputs."""
        if (
            not self.count
            or not isinstance(self._data, Dataset)
            or isinstance(self._data, IterableDataset)
        ):
            return
        item = _tree.tree_map(self._move, self._data[0])
        if is_sample(item, shape_of) and shape_of(_tree.tree_map(_twice, item))[:1] == (2,):
            raise InputError(
                f"data: the items of this {type(self._data).__name__} are single samples, "
                "without a batch dimension, and would be taken for batches. Give batches: "
                "data=torch.utils.data.DataLoader(data, batch_size=...)."
            )

    def check_first(
        self,
        batch: Any,
        weight: float | None,
        shape: tuple[int, ...],
        shape_of: ShapeOf,
        *,
        by_samples: bool,
    ) -> None:
        """Warn of the rows of a list; where each output counts as a sample's (`by_samples`),
        raise.
        """
        tensors = [leaf for leaf in _tree.flatten(batch)[0] if isinstance(leaf, Tensor)]
        wide = any(leaf.ndim > 1 and leaf.shape[:1] == shape for leaf in tensors)
        rows = (
            isinstance(self._data, Sequence) and (self.count or 0) > 1 and weight not in (None, 1)
        )
        if len(shape) != 1 or wide or not (rows or by_samples) or not is_sample(batch, shape_of):
            return
        said = "data: a batch gives outputs of one dimension, and looks like a single sample. "
        if by_samples:
            raise InputError(
                f"{said}kind='empirical' would take its {shape[0]} outputs for {shape[0]} "
                "samples. Give batches, "
                f"with the samples in the leading dimension: a DataLoader, or x[None]."
            )
        warnings.warn(
            f"{said}The weight {weight:g} would count it as {weight:g} samples. Give batches, "
            "with the samples in the leading dimension (a DataLoader, or [(x, "
            "y)] for all of them); or return the weight 1.",
            HodiffWarning,
            stacklevel=_arguments.outside(),
        )

    def _move(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf if leaf.device == self._device else leaf.to(self._device, non_blocking=True)
        if (
            self._device.type != "cpu"
            and callable(getattr(leaf, "to", None))
            and not isinstance(leaf, nn.Module)
        ):
            return leaf.to(self._device)
        return leaf


ShapeOf = Callable[[Any], tuple[int, ...]]
"""The shape of the outputs that a batch gives; `()` where it is not taken."""


def is_sample(batch: Any, shape_of: ShapeOf) -> bool:
    """Whether a batch is a single sample: the first row of its first tensor is no batch of one."""
    first = next((leaf for leaf in _tree.flatten(batch)[0] if isinstance(leaf, Tensor)), None)
    if first is None or not first.ndim:
        return False

    def row(leaf: Any) -> Any:
        return (
            leaf[:1] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == len(first) else leaf
        )

    return shape_of(_tree.tree_map(row, batch))[:1] != (1,)


def _twice(leaf: Any) -> Any:
    return (
        torch.stack([torch.as_tensor(leaf)] * 2)
        if isinstance(leaf, (Tensor, numbers.Number))
        else leaf
    )


def check_data(data: Any) -> None:
    """Raise unless `data` can be iterated again and again, batch by batch."""
    if data is None:
        return
    of_tensors = isinstance(data, tuple) and data and all(isinstance(item, Tensor) for item in data)
    if of_tensors or isinstance(data, (Tensor, str, Mapping)):
        what = _arguments.kind(data) + (" tensors" if of_tensors else "")
        raise InputError(
            f"data: got {what}, which looks like one batch; expected several: data=[batch]."
        )
    scalar = getattr(data, "ndim", None) == 0  # one of NumPy's has `__getitem__`
    if scalar or (not hasattr(data, "__iter__") and not hasattr(data, "__getitem__")):
        raise InputError(
            f"data: got {_arguments.kind(data)}, expected batches: a list or a DataLoader."
        )
    if inspect.isgenerator(data) or iter(data) is data:
        raise InputError(
            f"data: got a one-shot iterator ({type(data).__name__}), so the second product would "
            f"see no data and be zero. Give an iterable that can be iterated again: a list, a "
            f"DataLoader."
        )


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


class Weighted:
    """Turns what a user's function returns for a batch into `(sum, weight)`."""

    def __init__(
        self,
        batches: Batches,
        batch_weight: BatchWeight,
        name: str = "f",
        *,
        bare: bool = True,
        reduction: DataReduction = "mean",
    ) -> None:
        if not (
            batch_weight is None
            or callable(batch_weight)
            or (isinstance(batch_weight, str) and batch_weight == "equal")
        ):
            raise InputError(
                f"batch_weight: got {batch_weight!r}, expected a function of the batch (its number "
                f'of samples), or "equal".'
            )
        if batch_weight is not None and not batches.given:
            raise InputError("batch_weight: got weights for batches, but no data=.")
        self._batches = batches
        self._weight = batch_weight
        self._name = name
        self._bare = bare
        self._summed = reduction == "sum"
        self._warned, self._units = False, 0

    def __call__(self, returned: Any, batch: Any, number: int) -> tuple[Any, Any]:
        """`(sum, weight)` of batch `number`."""
        if isinstance(returned, (tuple, list)):
            return self._pair(returned, batch, number)
        if callable(self._weight):
            weight = _checked(self._weight(batch), "batch_weight")
            return returned * weight, weight
        if not self._bare:
            raise InputError(
                f"{self._name} returned one value, which does not say how many samples it "
                f"averages, so each sample's own gradient is unknown. Return (sum, weight), or "
                f"give batch_weight=lambda batch: len(batch[1])."
            )
        if self._weight == "equal" or not self._batches.given:
            return returned, 1.0
        if number or (self._batches.count or 1) > 1 or self._batches.shared:
            raise InputError(
                f"{self._name} returned one value, but there are several batches (or processes): "
                "a mean of means is not the mean if batches are ragged, masked or weighted. "
                "Return the sum and the number to divide it by:\n    total = "
                "F.cross_entropy(model(inputs), targets, reduction='sum')\n    return total, "
                "len(targets)\nor give each batch's weight: batch_weight=lambda batch: "
                "len(batch[1]), or batch_weight='equal'."
            )
        return returned, 1.0

    def _pair(self, returned: Sequence[Any], batch: Any, number: int) -> tuple[Any, Any]:
        if len(returned) != 2 or not self._batches.given:
            wanted = (
                "(sum, weight)"
                if self._batches.given
                else "one element; the pair (sum, weight) goes with data=[...]"
            )
            raise InputError(
                f"{self._name} returned {_arguments.kind(returned)}, expected {wanted}."
            )
        if self._weight is not None:
            raise InputError(
                f"batch_weight: {self._name} already returns a weight, in (sum, weight); "
                "leave it out."
            )
        value, weight = returned[0], _checked(returned[1], f"{self._name}: the weight")
        if not self._warned and isinstance(value, Tensor):
            self._look(value, weight, batch, number)
        return value, weight

    def _look(self, value: Tensor, weight: float, batch: Any, number: int) -> None:
        """Warn, once, of the two slips that this contract invites,
        where the last operation shows them.
        """
        how, shape = _versions.reduction(value)
        if how == "mean" and weight > 1:
            self._warn(
                f"{self._name} returned a mean with the weight {weight:g}, where the sum over the "
                f"batch belongs, so the result is about {weight:g} times too small. Return the "
                f"sum, reduction='sum', or the mean alone, with batch_weight=lambda batch: "
                f"len(batch[1])."
            )
        slip = how == "sum" and weight == 1 and not self._summed
        samples = _samples(batch) if slip and number == self._units < 2 else 1
        if samples > 1 and (shape is None or shape[:1] == (samples,)):
            self._units += 1
            if self._units == 2:
                self._warn(
                    f"{self._name} returned a sum over {samples} samples with the weight 1 for "
                    f"several batches, so the result is the sum over all data divided by the "
                    f"number of batches. For the mean, return (sum, number of samples); for the "
                    f'sum over all data, pass reduction="sum"; if each batch is one unit, return '
                    f'the sum alone, with batch_weight="equal".'
                )

    def _warn(self, text: str) -> None:
        self._warned = True
        warnings.warn(text, HodiffWarning, stacklevel=_arguments.outside())


def _samples(batch: Any) -> int:
    """The number of samples in a batch, as all of its tensors say; 1 where they do not agree."""
    lengths = {leaf.shape[:1] for leaf in _tree.flatten(batch)[0] if isinstance(leaf, Tensor)}
    return max(lengths.pop(), default=1) if len(lengths) == 1 else 1


def _checked(weight: Any, name: str) -> Any:
    if isinstance(weight, Tensor):
        refuse_tangent(weight, name)
        if weight.requires_grad:
            raise InputError(
                f"{name} depends on the parameters, so sum / weight has further derivatives, which "
                f"would be missing; detach it if it is a constant. The pair is (sum, weight), in "
                f"this order."
            )
        if weight.numel() != 1:
            raise InputError(f"{name} has shape {tuple(weight.shape)}, expected one number.")
        weight = float(weight)
    if (
        isinstance(weight, bool)
        or not isinstance(weight, numbers.Real)
        or not 0 <= float(weight) < math.inf
    ):
        raise InputError(f"{name} is {_arguments.shown(weight)}, expected a number of at least 0.")
    return float(weight)


def check_total(weight: float) -> None:
    """Raise where there is nothing to divide by."""
    if not weight > 0:
        raise GraphError(
            f"the weights of all batches add up to {weight}, so there is nothing to average over."
        )


# --- whether a user's function takes what it will be called with ----------------------------------


def check_signature(
    function: Any,
    name: str,
    names: Sequence[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    given: str = "",
) -> None:
    """Raise unless the function can be called with these arguments, `names` and then `args`."""
    callee = function.forward if isinstance(function, nn.Module) else function
    try:
        signature = inspect.signature(callee)
    except (TypeError, ValueError):  # built in: who calls it will see
        return
    try:
        signature.bind(*names, *args, **(kwargs or {}))
    except TypeError as error:
        given = given or (
            "with data=, once for each batch" if "batch" in names else "without data="
        )
        called = ", ".join([*names, *(type(arg).__name__ for arg in args)])
        raise InputError(
            f"{name} is called as {name}({called}) {given}, which its signature {signature} does "
            f"not allow ({error})."
        ) from error


def check_predict(predict: Any, has_data: bool) -> None:
    """Raise unless `predict` is a function of the point, and of a batch if there are data."""
    names = ("where", "batch") if has_data else ("where",)
    called = f"predict({', '.join(names)})"
    if isinstance(predict, nn.Module):
        inputs = (
            "lambda model, batch: model(batch[0])" if has_data else "lambda model: model(inputs)"
        )
        raise InputError(
            f"predict: got the module {type(predict).__name__} itself, expected a function "
            f"{called} that returns the outputs; the module goes to where: {inputs}."
        )
    if not callable(predict) or isinstance(predict, type):
        got = _arguments.kind(predict)
        raise InputError(
            f"predict: got {got}, expected a function {called} that returns the outputs."
        )
    check_signature(predict, "predict", names)


def add_batch(error: Exception, name: str, batch: Any) -> None:
    """Add to an error of the user's function what hodiff called it with:
    targets are not the whole batch.
    """
    if batch is not NONE:
        got = (
            _tree.describe(_tree.flatten(batch)[2])
            if _tree.is_container(batch)
            else _arguments.kind(batch)
        )
        error.add_note(f"hodiff called {name} with this batch: {got}.")
