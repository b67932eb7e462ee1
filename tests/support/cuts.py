"""Programs with one planted fault each, their clean twins, and others that only look as if they were cut.

They are made of kinds x places x what surrounds them. Each is a file of its own, so that lines are lines; the one
that a report must name ends with ``# here``. A program defines ``f``, and its point ``X``.
"""

import importlib.util
import itertools
import linecache
from pathlib import Path
from typing import NamedTuple

HERE = "  # here"


class Kind(NamedTuple):
    """How ``c`` is computed from ``h``, cut, and as it should be; an expression where it can stand in one."""

    cut: tuple[str, ...]
    clean: tuple[str, ...]
    head: tuple[str, ...] = ()
    names: str = "cut"

    @property
    def is_expression(self) -> bool:
        return len(self.cut) == 1 and self.cut[0].startswith("c = ")


def _expression(cut: str, clean: str) -> Kind:
    return Kind((f"c = {cut}" + HERE,), (f"c = {clean}",))


def _under(block: str) -> Kind:
    return Kind((f"with {block}:", "    c = torch.tanh(h)" + HERE, "c = c.clone()"), ("c = torch.tanh(h)",))


FUNCTION = (
    "class Cube(torch.autograd.Function):",
    "    @staticmethod",
    "    def forward(ctx, x):",
    "        ctx.save_for_backward(x)",
    "        return x**3",
    "",
    "    @staticmethod",
    "    def backward(ctx, g):",
    "        (x,) = ctx.saved_tensors",
    "        return g * {}",
)


def _function(backward: str) -> Kind:
    head = tuple(line.format(backward) for line in FUNCTION)
    wrong = tuple(line + HERE if "def backward" in line else line for line in head)
    right = tuple(line.format("3 * x**2") for line in FUNCTION)
    return Kind(("c = Cube.apply(h)",), ("c = Cube.apply(h)",), (*wrong, "|", *right), "function")


KINDS = {
    "detach": _expression("torch.tanh(h).detach()", "torch.tanh(h)"),
    "torch.detach": _expression("torch.detach(h.square())", "h.square()"),
    "data": _expression("torch.tanh(h).data", "torch.tanh(h)"),
    "inside a sum": _expression("h.exp() * h.sin().detach() + h", "h.exp() * h.sin() + h"),
    "item": _expression("h.square().sum().item()", "h.square().sum()"),
    "float": _expression("float(h.square().sum().detach())", "h.square().sum()"),
    "tolist": _expression("torch.tensor(h.sin().tolist(), dtype=h.dtype)", "h.sin()"),
    "numpy": _expression("torch.from_numpy(np.tanh(h.detach().numpy()))", "torch.tanh(h)"),
    "no_grad": _under("torch.no_grad()"),
    "inference_mode": _under("torch.inference_mode()"),
    "set_grad_enabled": _under("torch.set_grad_enabled(False)"),
    "detach_": Kind(("c = torch.tanh(h)", "c.detach_()" + HERE), ("c = torch.tanh(h)",)),
    "buffer": Kind(
        ("c = torch.zeros_like(h)", "with torch.no_grad():", "    c.copy_(h.cos())" + HERE), ("c = h.cos().clone()",)
    ),
    "element": Kind(
        ("c = torch.zeros_like(h)", "with torch.no_grad():", "    c[..., 0] = h[..., 1]" + HERE),
        ("c = torch.zeros_like(h)", "c[..., 0] = h[..., 1]"),
    ),
    "gradient": Kind(
        ("(c,) = torch.autograd.grad(h.pow(3).sum(), h)" + HERE,),
        ("(c,) = torch.autograd.grad(h.pow(3).sum(), h, create_graph=True)",),
    ),
    "hook": Kind(("c = torch.tanh(h)", "c.register_hook(lambda g: 2 * g)" + HERE), ("c = torch.tanh(h)",), (), "hook"),
    "wrong backward": _function("2.9 * x**2"),
    "constant backward": _function("3 * x.data ** 2"),
}

HARMLESS = {
    "maximum subtracted": (
        "m = h.amax(-1, keepdim=True).detach()",
        "c = (h - m).exp() / (h - m).exp().sum(-1, keepdim=True)",
    ),
    "value logged": ("seen = h.detach().norm().item()", "c = h * 1.0"),
    "branch on a value": ("c = h if float(h.detach().sum()) > -1e6 else -h",),
    "statistic under no_grad": ("with torch.no_grad():", "    size = h.abs().max()", "c = torch.tanh(h)"),
    "sorted by values": ("c = h.gather(-1, h.detach().argsort(-1))",),
    "largest": ("c = h.max(-1, keepdim=True).values",),
    "dropout": ("c = nn.functional.dropout(h, 0.3)",),
    "checkpoint": ("c = checkpoint(torch.tanh, h, use_reentrant=False)",),
    "in place": ("c = h.clone().mul_(2).add_(h)",),
    "gradient inside": ("c = hodiff.grad(lambda z: z.pow(3).sum(), h)",),
    "relu": ("c = torch.relu(h)",),
    "where": ("c = torch.where(h.detach() > -5.0, h.sin(), h)",),
    "constant detached": ("c = h * torch.ones_like(h).detach() + h.shape[0]",),
    "scaled and unscaled": ("s = h.detach().norm()", "c = (h * s) / s"),
}
"""Statements that are right, though values leave the graph, pieces meet, or numbers are drawn."""

PLACES = {
    "in the function": "def f(x):\n    h = {h}\n    {c}\n    return {y}\n",
    "in a helper": (
        "def helper(h):\n    {c}\n    return c\n\n\ndef f(x):\n    h = {h}\n    c = helper(h)\n    return {y}\n"
    ),
    "two helpers down": (
        "def inner(h):\n    {c}\n    return c\n\n\ndef outer(h):\n    return inner(h)\n\n\n"
        "def f(x):\n    h = {h}\n    c = outer(h)\n    return {y}\n"
    ),
    "in a closure": (
        "def make(scale):\n    def inner(h):\n        {c}\n        return c * scale\n\n    return inner\n\n\n"
        "helper = make(1.5)\n\n\ndef f(x):\n    h = {h}\n    c = helper(h)\n    return {y}\n"
    ),
    "in a loop": (
        "def f(x):\n    total = 0\n    for scale in (1.0, 0.5, 2.0):\n        h = scale * ({h})\n        {c}\n"
        "        total = total + {y}\n    return total\n"
    ),
    "in a module": (
        "class Layer(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.linear = nn.Linear(3, 3).double()\n\n    def forward(self, x):\n        h = self.linear({h})\n"
        "        {c}\n        return {y}\n\n\nf = Layer()\n"
    ),
    "in a submodule": (
        "class Gate(nn.Module):\n    def forward(self, h):\n        {c}\n        return c\n\n\n"
        "class Layer(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.body = nn.Sequential(nn.Linear(3, 3), Gate()).double()\n\n    def forward(self, x):\n"
        "        h = {h}\n        c = self.body(h)\n        return {y}\n\n\nf = Layer()\n"
    ),
    "in a method": (
        "class Energy:\n    def gate(self, h):\n        {c}\n        return c\n\n    def __call__(self, x):\n"
        "        h = {h}\n        c = self.gate(h)\n        return {y}\n\n\nf = Energy()\n"
    ),
    "in a forward hook": (
        "def gate(module, args, h):\n    {c}\n    return c\n\n\nlayer = nn.Linear(3, 3).double()\n"
        "layer.register_forward_hook(gate)\n\n\ndef f(x):\n    h = {h}\n    c = layer(h)\n    return {y}\n"
    ),
    "in a generator": (
        "def gates(hs):\n    for h in hs:\n        {c}\n        yield h, c\n\n\n"
        "def f(x):\n    return sum({y} for h, c in gates([{h}, x + 1]))\n"
    ),
    "in a lambda": "gate = lambda h: {e}\n\n\ndef f(x):\n    h = {h}\n    c = gate(h)\n    return {y}\n",
    "in a comprehension": (
        "def f(x):\n    gates = [\n        {e}\n        for h in ({h}, x + 1)\n    ]\n"
        "    h, c = {h}, gates[0] + gates[1]\n    return {y}\n"
    ),
    "in an argument": "def f(x):\n    h = {h}\n    c = torch.add(\n        h,\n        {e}\n    )\n    return {y}\n",
}
"""``{h}`` is computed from x; ``{c}`` stands for the statements under test, ``{e}`` for an expression; ``{y}`` ends."""

STARTS = ("x.sin() + 0.3 * x", "torch.cumsum(x, -1) / 2", "NET(x)", "x * 1.0")
ENDS = (
    "(h * c).sum()",
    "(h + c).pow(3).mean()",
    "NET(h * c).square().sum()",
    "(torch.softmax(h, -1) * c).exp().sum()",
    "(nn.functional.layer_norm(h, h.shape[-1:]) * c).tanh().sum()",
)

HEAD = """\
import hodiff
import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
X = torch.randn(2, 3, dtype=torch.float64)


"""


class Program(NamedTuple):
    """A program by its name, its text, the kind of cause that it has, and what it was made of."""

    name: str
    text: str
    kind: str
    of: str

    @property
    def line(self) -> int:
        """The number of the line to be named; 0 of a clean program."""
        lines = self.text.splitlines()
        return next((number for number, line in enumerate(lines, 1) if line.endswith(HERE)), 0)

    def load(self, folder: Path):
        """Write the program to a file, and run it: its module."""
        path = folder / f"{self.name}.py"
        path.write_text(self.text, encoding="utf-8")
        linecache.checkcache(str(path))
        spec = importlib.util.spec_from_file_location(self.name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def _written(name: str, of: str, place: str, kind: Kind, start: str, end: str, clean: bool) -> Program:
    statements = kind.clean if clean else kind.cut
    head = "\n".join(kind.head)
    if kind.head:
        wrong, _, right = head.partition("\n|\n")
        head = (right if clean else wrong) + "\n\n\n"
    lines = []
    for line in PLACES[place].splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if "{c}" in line:
            lines += [indent + statement for statement in statements]
        elif "{e}" in line:  # the comment goes to the end of the line
            expression, mark, _ = statements[0].removeprefix("c = ").partition(HERE)
            lines.append(line.replace("{e}", expression) + mark)
        else:
            lines.append(line.replace("{h}", start).replace("{y}", end))
    return Program(name, HEAD + head + "\n".join(lines) + "\n", kind.names, of)


def _combinations() -> list[tuple[str, str, str, str]]:
    """Every kind at every place where it can stand, in a surrounding that differs from one to the next."""
    pairs = [(k, p) for k, p in itertools.product(KINDS, PLACES) if "{e}" not in PLACES[p] or KINDS[k].is_expression]
    surroundings = itertools.cycle(itertools.product(STARTS, ENDS))
    return [(kind, place, *next(surroundings)) for kind, place in pairs]


def _programs(clean: bool) -> list[Program]:
    what = "clean" if clean else "cut"
    return [
        _written(f"{what}_{number:03d}", kind, place, KINDS[kind], start, end, clean)
        for number, (kind, place, start, end) in enumerate(_combinations())
    ]


def _look_alikes() -> list[Program]:
    places = [place for place, text in PLACES.items() if "{e}" not in text]
    surroundings = itertools.cycle(itertools.product(STARTS, ENDS))
    return [
        _written(f"harmless_{number:03d}", name, place, Kind((), statements), *next(surroundings), clean=True)
        for number, ((name, statements), place) in enumerate(itertools.product(HARMLESS.items(), places))
    ]


CUTS = _programs(clean=False)
CLEAN = [*_programs(clean=True), *_look_alikes()]
