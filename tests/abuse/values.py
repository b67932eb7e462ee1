"""What people, and worse, pass where a tensor, a number, a function or a container is expected."""

import fractions
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

D = torch.float64


class Subclass(Tensor):
    """A tensor of somebody's own class."""


def _nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls them a prototype
        return torch.nested.nested_tensor([torch.ones(2, dtype=D), torch.ones(3, dtype=D)], layout=layout)


def _quantised() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.quint8)


def _csr() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3, dtype=D).to_sparse_csr()


def _of_inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(2, 3, dtype=D)


def _endless() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    return endless


def _deep() -> Any:
    deep: Any = torch.ones(2, dtype=D)
    for _ in range(300):
        deep = [deep]
    return deep


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "1": lambda: 1,
    "-1": lambda: -1,
    "2**70": lambda: 2**70,
    "0.0": lambda: 0.0,
    "1.5": lambda: 1.5,
    "-2.5": lambda: -2.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1j": lambda: 1j,
    "a fraction": lambda: fractions.Fraction(1, 3),
    "a word": lambda: "word",
    "no word": lambda: "",
    "bytes": lambda: b"bytes",
    "()": lambda: (),
    "[]": lambda: [],
    "{}": lambda: {},
    "a set": lambda: {1, 2},
    "a list of numbers": lambda: [1.0, 2.0, 3.0],
    "a list of words": lambda: ["a", "b"],
    "a list of None": lambda: [None],
    "a dict of numbers": lambda: {"a": 1.0},
    "a dict of a tensor": lambda: {3: torch.ones(2, 3, dtype=D)},
    "a list in itself": _endless,
    "a deep list": _deep,
    "a tuple of tensors": lambda: (torch.ones(2, 3, dtype=D), torch.ones(2, dtype=D)),
    "a generator": lambda: (number for number in (1, 2)),
    "a range": lambda: range(3),
    "an object": lambda: object(),
    "a class": lambda: int,
    "a function of nothing": lambda: lambda: None,
    "a function to None": lambda: lambda *_: None,
    "a function to a number": lambda: lambda *_: 1.0,
    "a module": lambda: nn.Linear(3, 3, dtype=D),
    "a module without parameters": lambda: nn.Tanh(),
    "a class of modules": lambda: nn.Linear,
    "an exception": lambda: ValueError("here"),
    "a dtype": lambda: torch.float32,
    "a device": lambda: torch.device("cpu"),
    "a generator of numbers": lambda: torch.Generator(),
    "an array": lambda: np.ones((2, 3)),
    "an array of words": lambda: np.array(["a", "b"]),
    "a number of numpy": lambda: np.float64(1.5),
    "an integer of numpy": lambda: np.int64(2),
    "empty": lambda: torch.empty(0, dtype=D),
    "no rows": lambda: torch.empty(0, 3, dtype=D),
    "no columns": lambda: torch.empty(2, 0, dtype=D),
    "zero-dim": lambda: torch.tensor(0.5, dtype=D),
    "one entry": lambda: torch.ones(1, dtype=D),
    "a vector": lambda: torch.ones(3, dtype=D),
    "a long vector": lambda: torch.ones(7, dtype=D),
    "a wide matrix": lambda: torch.ones(2, 5, dtype=D),
    "eight dimensions": lambda: torch.ones(1, 1, 1, 1, 1, 1, 2, 3, dtype=D),
    "int64": lambda: torch.ones(2, 3, dtype=torch.int64),
    "uint8": lambda: torch.ones(2, 3, dtype=torch.uint8),
    "bool": lambda: torch.ones(2, 3, dtype=torch.bool),
    "complex": lambda: torch.ones(2, 3, dtype=torch.complex128),
    "half": lambda: torch.ones(2, 3, dtype=torch.float16),
    "bfloat16": lambda: torch.ones(2, 3, dtype=torch.bfloat16),
    "float8": lambda: torch.ones(2, 3).to(torch.float8_e4m3fn),
    "single": lambda: torch.ones(2, 3),
    "a tensor of nan": lambda: torch.full((2, 3), float("nan"), dtype=D),
    "a tensor of inf": lambda: torch.full((2, 3), float("inf"), dtype=D),
    "a tensor of 1e308": lambda: torch.full((2, 3), 1e308, dtype=D),
    "meta": lambda: torch.ones(2, 3, dtype=D, device="meta"),
    "sparse": lambda: torch.eye(3, dtype=D).to_sparse(),
    "sparse rows": _csr,
    "nested": lambda: _nested(torch.strided),
    "nested, jagged": lambda: _nested(torch.jagged),
    "quantised": _quantised,
    "of mkldnn": lambda: torch.ones(2, 3).to_mkldnn(),
    "10^12 entries": lambda: torch.ones((), dtype=D).expand(10**6, 10**6),
    "10^12 rows": lambda: torch.ones((), dtype=D).expand(10**12, 1),
    "with a graph": lambda: torch.ones(2, 3, dtype=D, requires_grad=True) * 2,
    "a frozen parameter": lambda: nn.Parameter(torch.ones(2, 3, dtype=D), requires_grad=False),
    "of inference mode": _of_inference,
}


class Dual:
    """Values that live inside a level of forward mode."""

    def __enter__(self) -> Tensor:
        self._level = forward_ad.dual_level()
        self._level.__enter__()
        return forward_ad.make_dual(torch.full((2, 3), 0.5, dtype=D), torch.ones(2, 3, dtype=D))

    def __exit__(self, *exc: Any) -> None:
        self._level.__exit__(*exc)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed in memory": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0) if t.ndim else t,
    "every second entry": lambda t: t.repeat_interleave(2, -1)[..., ::2] if t.ndim else t,
    "with an offset": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "expanded": lambda t: t[:1].expand(t.shape) if t.ndim else t,
    "overlapping": lambda t: torch.linspace(-1, 1.4, t.numel() + 1, dtype=t.dtype).as_strided(t.shape, (1,) * t.ndim),
    "a subclass": lambda t: t.clone().as_subclass(Subclass),
    "a parameter": lambda t: nn.Parameter(t.clone()),
    "requires grad": lambda t: t.clone().requires_grad_(),
    "of inference mode": lambda t: _inference(t),
    "a negative view": lambda t: torch._neg_view(-t),
    "pinned by nobody": lambda t: t.detach(),
}
"""The same numbers otherwise laid out: the answer is that of a plain tensor with these numbers."""


def _inference(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone()
