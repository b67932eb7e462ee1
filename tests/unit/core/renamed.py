"""A program: hodiff on a PyTorch that calls names otherwise, each in a process of its own. Prints what its doors give.

PyTorch itself stays as it is: hodiff's sources are loaded with another name in its place.
"""

import importlib
import importlib.machinery
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

SOURCE = Path(__file__).resolve().parents[3] / "src" / "hodiff"
DOUBLE = {"dtype": torch.float64}


class Loader(importlib.machinery.SourceFileLoader):
    gone = ""

    def get_code(self, fullname: str) -> Any:
        text = Path(self.path).read_text("utf-8")
        renamed = re.sub(rf"(?<!\w)({self.gone})(?!\w)", r"\1_as_of_now", text)
        return super().get_code(fullname) if renamed == text else compile(renamed, self.path, "exec", dont_inherit=True)


class Finder:
    """Puts the loader in the place of Python's, for modules of hodiff."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "hodiff":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path or [str(SOURCE.parent)])
        if spec is not None and spec.origin is not None:
            spec.loader = Loader(fullname, spec.origin)
        return spec


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()


def loss(m: torch.nn.Module) -> torch.Tensor:
    return m(torch.ones(4, 2, **DOUBLE)).square().mean()


def cube(x: torch.Tensor) -> torch.Tensor:
    return x.pow(3).sum()


def squares(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum(-1)


def attended(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x).sum()


def by_hand(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.hvp(f, x, torch.ones_like(x))[1]


def doors(hodiff: Any) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """One call of each part: what it gives, and what is right."""
    x = torch.tensor([0.5, -0.25], **DOUBLE)
    ones, net, tokens = torch.ones_like(x), model(), torch.linspace(-1, 1, 24, **DOUBLE).view(1, 1, 6, 4)

    def operator() -> tuple[Any, Any]:
        return hodiff.HessianOperator(cube, x) @ ones, 6 * x

    def modules() -> tuple[Any, Any]:
        loss(net).backward()
        return hodiff.grad(loss, net)["0.weight"], net[0].weight.grad

    def checkpointed() -> tuple[Any, Any]:
        along = {name: torch.ones_like(parameter) for name, parameter in net.named_parameters()}
        right = hodiff.hvp(loss, net, along)["0.weight"]
        return hodiff.hvp(loss, net, along, checkpoint="*")["0.weight"], right

    def attention() -> tuple[Any, Any]:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            right = by_hand(attended, tokens)
        return hodiff.hvp(attended, tokens, torch.ones_like(tokens)), right

    def explained() -> tuple[Any, Any]:
        y = (x.clone().requires_grad_() * 2).sin().sum()
        before = hodiff.graph.predict(y).verdict
        y.backward()
        return (before, hodiff.graph.predict(y).verdict), ("ok", "fail")

    def watched() -> tuple[Any, Any]:
        with hodiff.graph.watch():
            leaf = x.clone().requires_grad_()
            optimizer = torch.optim.SGD([leaf], lr=0.5)
            cube(leaf).backward()
            optimizer.step()
        return leaf.detach(), x - 1.5 * x * x

    def failing() -> tuple[Any, Any]:
        try:
            hodiff.grad(lambda z: z.detach().sum(), x)
        except hodiff.GraphError as error:
            return "carries no graph" in str(error), True
        return None, True

    def stepped() -> tuple[Any, Any]:
        step = hodiff.compile_step(lambda m: hodiff.laplacian(m, x[None]).sum(), net, backend="replay")
        return step().detach(), hodiff.laplacian(net, x[None]).sum().detach()

    return {
        "grad": lambda: (hodiff.grad(cube, x), 3 * x * x),
        "hvp": lambda: (hodiff.hvp(cube, x, ones), 6 * x),
        "hessian": lambda: (hodiff.hessian(cube, x), (6 * x).diag()),
        "modules": modules,
        "penalty": lambda: (hodiff.r1_penalty(squares, x[None], gamma=2.0), (4 * x * x).sum()),
        "per_sample_grad": lambda: (hodiff.per_sample_grad(lambda z, b: b * z.sum(), x, ones), ones.expand(2, 2)),
        "laplacian": lambda: (hodiff.laplacian(squares, x[None]), torch.tensor([4.0], **DOUBLE)),
        "attention": attention,
        "checkpoint=": checkpointed,
        "operator": operator,
        "sparse_hessian": lambda: (hodiff.sparse_hessian(cube, x).to_dense(), (6 * x).diag()),
        "implicit": lambda: (hodiff.implicit.root(lambda z: z**3 - 8, 2 * ones), 2 * ones),
        "explain": explained,
        "watch": watched,
        "an error": failing,
        "compile_step": stepped,
    }  # fmt: skip


def outcome(door: Callable[[], tuple[Any, Any]]) -> str:
    """ "right", or what was raised or warned; and otherwise what came out."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result, right = door()
        except Exception as error:  # each is a sentence of ours, or the test fails
            return f"{type(error).__name__}: {error}"
    same = torch.allclose(result, right, rtol=1e-9) if isinstance(right, torch.Tensor) else result == right
    said = " ".join(str(each.message) for each in caught)
    return f"right {said}".rstrip() if same else f"{result}, not {right}; {said}"


def report(name: str, at: list[str]) -> dict[str, str]:
    """What these doors give, or all of them; or what the import does."""
    Loader.gone = name
    try:
        import hodiff
    except ImportError as error:
        return {"import": f"ImportError: {error}"}
    return {part: outcome(door) for part, door in doors(hodiff).items() if not at or part in at}


def main(names: dict[str, list[str]]) -> None:
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    torch.set_num_threads(1)
    if not all(names.values()):  # seconds, which all processes then share
        importlib.import_module("torch._dynamo.backends.registry")
    for name, at in names.items():
        ours, theirs = os.pipe()
        if not (child := os.fork()):
            os.write(theirs, json.dumps(report(name, at)).encode())
            os._exit(0)
        os.close(theirs)
        with os.fdopen(ours) as pipe:
            print(json.dumps([name, pipe.read()]), flush=True)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
