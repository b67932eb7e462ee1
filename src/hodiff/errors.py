"""The errors and warnings of hodiff, and how to catch them.

```text
HodiffError
├── InputError(ValueError)         an argument is not what the call needs
├── GraphError(RuntimeError)       the autograd graph cannot give what was asked
└── DerivativeError(AssertionError) a checked derivative is wrong

HodiffWarning(UserWarning)
├── CustomFunctionWarning          a second derivative through a Python Function is not confirmed
├── BatchMixingWarning             samples of a batch are not independent
├── ConvergenceWarning             an estimate or a solution did not reach its tolerance
└── RandomnessWarning              an operator is that of one random draw
```

Each error also derives from the built-in class that PyTorch would have raised, so existing
`except` clauses keep working. Every message names the argument, what was got, what was
expected, and the way out.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple, Self

__all__ = [
    "BatchMixingWarning",
    "ConvergenceWarning",
    "CustomFunctionWarning",
    "DerivativeError",
    "GraphError",
    "HodiffError",
    "HodiffWarning",
    "InputError",
    "RandomnessWarning",
]


def printable(text: str) -> str:
    """Return a text without what steers a terminal: a user's names may hold control characters."""
    return "".join(
        sign if sign.isprintable() or sign in "\n\t" else repr(sign)[1:-1] for sign in text
    )


class _Shown(BaseException):
    """A message in printable signs, whatever names it says."""

    def __str__(self) -> str:
        return printable(super().__str__())


class HodiffError(_Shown, Exception):
    """Base class of hodiff's errors.

    Examples:
        >>> import hodiff
        >>> issubclass(hodiff.GraphError, hodiff.HodiffError)
        True
    """


class InputError(HodiffError, ValueError):
    """An argument has the wrong kind, structure, shape, dtype or device.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.grad(torch.sum, torch.arange(3))
        Traceback (most recent call last):
            ...
        hodiff.errors.InputError: x has dtype torch.int64; derivatives need a real floating-point
        tensor. ...
    """


Kind = Literal["", "freed", "changed", "released"]
"""What happened to a graph, where the engine refused it."""


class Facts(NamedTuple):
    """The subject of an error about a graph, for `hodiff.graph` to find the place: data, which no
    sentence is asked for.

    Attributes:
        kind: What the engine met.
        stem: The message without its general advice.
        advice: The general advice, which gives way to what can be said of the very case.
        operations: Pieces of the names of the nodes concerned, in lower case, without underscores.
        functions: The names of the `autograd.Function`s concerned.
    """

    kind: Kind = ""
    stem: str = ""
    advice: str = ""
    operations: frozenset[str] = frozenset()
    functions: frozenset[str] = frozenset()

    def blame(self, name: str, is_function: bool) -> bool:
        """Whether the error is about the nodes of a class, forward or backward,
        by the class's name.
        """
        if is_function and name.removesuffix("Backward") in self.functions:
            return True
        key = name.lower().replace("_", "")
        return any(piece in key for piece in self.operations)


class GraphError(HodiffError, RuntimeError):
    """The autograd graph is missing, freed or cut, or cannot be differentiated again.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.grad(lambda x: x.detach().sum(), torch.ones(3))
        Traceback (most recent call last):
            ...
        hodiff.errors.GraphError: the output of f carries no graph: ...
    """

    _facts: Facts = Facts()

    @classmethod
    def about(
        cls,
        message: str,
        *,
        kind: Kind = "",
        advice: str = "",
        operations: Iterable[str] = (),
        functions: Iterable[str] = (),
    ) -> Self:
        """One that carries what it is about; not by `__init__`,
        which `torch.compile` could not trace.
        """
        error = cls(f"{message} {advice}" if advice else message)
        error._facts = Facts(kind, message, advice, frozenset(operations), frozenset(functions))
        return error


class DerivativeError(HodiffError, AssertionError):
    """A derivative disagrees with finite differences; `.report` holds the figures.

    Examples:
        >>> import hodiff
        >>> issubclass(hodiff.DerivativeError, AssertionError)
        True
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class HodiffWarning(_Shown, UserWarning):
    """Base class of hodiff's warnings; filter it to silence all of them.

    Examples:
        >>> import hodiff
        >>> issubclass(hodiff.HodiffWarning, UserWarning)
        True
    """


class CustomFunctionWarning(HodiffWarning):
    """A second derivative passes through a Python `torch.autograd.Function` that could not be
    confirmed.

    The Function's `backward` alone determines its value, which hodiff compares once with central
    differences of the gradient. The warning is given where that cannot be done or tells nothing;
    and for a differentiable result (a loss) where they contradict, with both numbers. Elsewhere
    that is a `GraphError`. It is given once for each line of your code.
    `hodiff.check_derivatives` verifies the derivative numerically.

    Examples:
        >>> import hodiff
        >>> issubclass(hodiff.CustomFunctionWarning, hodiff.HodiffWarning)
        True
    """


class BatchMixingWarning(HodiffWarning):
    """An operation in `f` mixes the samples of a batch, although `batch_ndim` says that they are
    independent.

    Examples:
        >>> import hodiff
        >>> issubclass(hodiff.BatchMixingWarning, hodiff.HodiffWarning)
        True
    """


class ConvergenceWarning(HodiffWarning):
    """An eigenpair, an estimate or a solution did not reach its tolerance; the record states its
    accuracy.

    Examples:
        >>> import hodiff
        >>> issubclass(hodiff.ConvergenceWarning, hodiff.HodiffWarning)
        True
    """


class RandomnessWarning(HodiffWarning):
    """The function of an operator draws random numbers (dropout); the operator is that of one fixed
    draw.

    Examples:
        >>> import hodiff
        >>> issubclass(hodiff.RandomnessWarning, hodiff.HodiffWarning)
        True
    """
