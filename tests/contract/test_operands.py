"""Operands whose numbers are not what their memory holds: zero tensors, which have none, and lazy views.

A kernel that is handed one where PyTorch does not replace it reads address 0, and the process is gone; or it reads the
wrong numbers. So every kind goes through every public function, every tracer and every mode, in a process of its own.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.masked import masked_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import hodiff
from hodiff._core._lending import NormalTensors
from hodiff._core._settings import DispatchMode, on
from hodiff._core._substitutes import ExactNorms
from hodiff.curvature import _memory
from hodiff.sparse import _rules, _tracer
from tests.support.callers import CALLERS, SCALE, D, tensors
from tests.support.releases import LACKING, marked, since

X = torch.tensor([[0.3, -0.8, 1.4], [0.9, 0.2, -0.5]], dtype=D)
Y = torch.tensor([1.0, 2.0, 3.0], dtype=D)
ROOT = Path(__file__).parents[2]


def _complex(shape: tuple[int, ...]) -> Tensor:
    size = torch.Size(shape).numel()
    parts = torch.linspace(-1, 1.5, size, dtype=D), torch.linspace(0.4, 2, size, dtype=D)
    return torch.complex(*parts).reshape(shape)


KINDS: dict[str, Callable[..., Tensor]] = {
    "zero": lambda *shape: torch._efficientzerotensor(shape, dtype=D),
    "conjugate": lambda *shape: _complex(shape).conj(),
    "negative": lambda *shape: _complex(shape).conj().imag,
}


def resolved(operand: Tensor) -> Tensor:
    """The same numbers, in memory."""
    if operand._is_zerotensor():
        return torch.zeros(operand.shape, dtype=operand.dtype)
    return operand.resolve_conj().resolve_neg()


def entrywise(operand: Tensor) -> Callable[..., Tensor]:
    """A function that an operation of any kind meets the operand in: elementwise, linear, copied, as a view."""

    def g(z: Tensor, *rest: Any) -> Tensor:
        weighed = z.sin() * (1 + 0.1 * operand) * (0.1 * operand.expand(2, 3) - 1) + z**2 * operand.mT.exp().mT / 9
        return weighed.real * SCALE + z**3 + z * operand.to(torch.complex128).imag

    return g


def by_forward_mode(operand: Tensor) -> Callable[..., Tensor]:
    """A function in which PyTorch makes zero tensors itself, for what has no tangent."""

    def g(z: Tensor, *rest: Any) -> Tensor:
        inner = lambda t: ((t**2 + z) * (operand * t)).real * SCALE / 9
        return torch.func.jvp(inner, (z,), (torch.ones_like(z),))[1]

    return g


def _normed(operand: Tensor) -> Any:
    f = lambda z: F.layer_norm(z * (1 + operand.real), (3,), operand.real[0], operand.real[1]).sin().sum()
    return hodiff.grad(lambda z: hodiff.hvp(f, z, X.cos()).pow(2).sum(), X)


def _attended(operand: Tensor) -> Any:
    def f(z: Tensor) -> Tensor:
        k, mask = operand.real[..., :8], operand.real[0, 0]
        return F.scaled_dot_product_attention(z + 0.1 * k, k, 2 * z + k, mask).pow(2).sum()

    z = torch.linspace(-1, 1, 2 * 512 * 8, dtype=D).reshape(1, 2, 512, 8)
    with hodiff.twice_differentiable():
        return hodiff.hvp(f, z, z.cos())


def _entropy(operand: Tensor) -> Any:
    z = torch.linspace(-1, 1, 512 * 512, dtype=D).reshape(512, 512)
    f = lambda z: F.cross_entropy(z + operand.real[0], operand.real[1])
    return hodiff.hvp(f, z, z.cos())


def _checkpointed(operand: Tensor) -> Any:
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    for p in block.parameters():
        nn.init.constant_(p, 0.3)
    f = lambda block: (block(X * operand.real + 1) * (1 + operand)).real.pow(2).sum()
    return hodiff.hvp(f, block, {n: torch.ones_like(p) for n, p in block.named_parameters()}, checkpoint="1")


def _watched(operand: Tensor) -> Any:
    x = X.clone().requires_grad_()
    with hodiff.graph.watch():
        return torch.autograd.grad(entrywise(operand)(x).sum(), x)[0]


def _saved(operand: Tensor) -> Any:
    x = X.clone().requires_grad_()
    loss = entrywise(operand)(x).sin().sum()
    return [len(hodiff.graph.inspect(loss).nodes) * 0, *torch.autograd.grad(loss, x)]


PLACES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]] = {
    "norms": ((2, 3), _normed),
    "attention": ((1, 2, 512, 512), _attended),
    "cross-entropy": ((2, 512, 512), _entropy),
    **({} if LACKING else {"a checkpoint": ((2, 3), _checkpointed)}),
    "a watch": ((2, 3), _watched),
    "a look at the graph": ((2, 3), _saved),
}

NO_VALUE = ("sparse.sparsity_pattern", "jets.report")


def battery(operand: Tensor) -> list[Tensor]:
    """Operations below PyTorch's care for operands: numbers, views, products, and a pass through forward mode."""
    found = [1 + operand, 2 * operand, operand - 1, operand.mT @ X.to(operand.dtype), operand.to(torch.complex64)]
    found += [(operand.conj() + 2) * (1 + operand), torch.einsum("ij,kj->ik", operand, operand), operand.exp()]
    x = X[0].clone().requires_grad_()
    value = torch.func.jacfwd(lambda t: t**2 * x + t * Y)(x).square().sum() * (x * operand.real).sum()
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    return [*found, operand.expand(4, 2, 3) + 1, *torch.autograd.grad(gradient, x, torch.ones_like(x))]


def _mode(make: Callable[[], Any]) -> Callable[[Tensor], Any]:
    def run(operand: Tensor) -> list[Tensor]:
        with on(make()):
            return battery(operand)

    return run


class Computing(DispatchMode):
    """A mode that computes with its operands itself, where PyTorch replaces none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul.Tensor and isinstance(args[1], Tensor):
            with on(self):
                return (args[0].conj() / args[1].conj().reciprocal()).conj()
        return func(*args, **(kwargs or {}))


MODES: dict[type, Callable[[], Any]] = {
    _tracer.Tracer: lambda: _tracer.Tracer(_rules.find, []),
    _memory.LiveBytes: _memory.LiveBytes,
    Computing: Computing,
    ExactNorms: ExactNorms,
    NormalTensors: NormalTensors,
}
"""Those that see each operation, ours and one of this test."""


def same(found: Any, right: Any) -> str:
    found, right = ([t.detach() for t in tensors(each)] for each in (found, right))
    if len(found) != len(right):
        return f"{len(found)} results for {len(right)}"
    for one, other in zip(found, right, strict=True):
        try:
            torch.testing.assert_close(one, other)
        except AssertionError as error:
            return str(error).replace("\n", " ")[:300]
    return ""


def compared(run: Callable[[], Any], right: Callable[[], Any]) -> str:
    try:
        return same(run(), right())
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def in_modes(kind: str) -> dict[str, str]:
    """What is wrong with an operand of a kind, by the mode, or by the place where hodiff has a kernel or a record."""
    modes = {mode.__name__: ((2, 3), _mode(make), battery) for mode, make in MODES.items()}
    places = {name: (shape, run, run) for name, (shape, run) in PLACES.items()}
    return {
        name: compared(partial(run, KINDS[kind](*shape)), partial(right, resolved(KINDS[kind](*shape))))
        for name, (shape, run, right) in {**places, **modes}.items()
    }


def in_calls(kind: str) -> dict[str, str]:
    """What is wrong with a function that has such an operand, by the public name that is given it."""
    operand, result = KINDS[kind](2, 3), {}
    for made, plain in ((entrywise, entrywise), (by_forward_mode, _differentiated)):
        for caller in CALLERS:
            if made is by_forward_mode and caller.name == "jet":  # which has no other route
                continue
            run, right = partial(caller, made(operand), X), partial(caller, plain(resolved(operand)), X)
            valued = caller.name not in NO_VALUE
            result[f"{caller}, {made.__name__}"] = compared(run, right if valued else run)
    return result


def _differentiated(operand: Tensor) -> Callable[..., Tensor]:
    """What `by_forward_mode` is, written out: (t^2 + z) w t has the derivative (3 t^2 + z) w at t = z."""
    return lambda z, *rest: (3 * z**2 + z) * operand.real * SCALE / 9


PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
from tests.contract import test_operands
print(json.dumps(getattr(test_operands, sys.argv[1])(sys.argv[2])))
"""


def told(part: Callable[[str], dict[str, str]], kind: str) -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", PROGRAM, part.__name__, kind]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    assert len(found) > 8
    assert not {name: fault for name, fault in found.items() if fault}


@pytest.mark.wide
@pytest.mark.table(plain=1)
@pytest.mark.parametrize("kind", KINDS)
def test_no_mode_hands_a_kernel_what_has_no_memory(kind: str) -> None:
    told(in_modes, kind)


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_every_public_function_takes_such_operands(kind: str) -> None:
    told(in_calls, kind)


def test_every_mode_is_in_the_table() -> None:
    """Also those that see operations by another base class would hand operands on: there is none."""
    ours = {mode for mode in _below(TorchDispatchMode) if mode.__module__.startswith("hodiff.")}
    assert ours == {DispatchMode} | {mode for mode in MODES if issubclass(mode, DispatchMode)} - {Computing}


def _below(base: type) -> set[type]:
    return {each for below in base.__subclasses__() for each in (below, *_below(below))}


# --- tensors of classes that compute by themselves, of PyTorch and of other libraries ---------------------------------


class Wrapped(Tensor):
    """A tensor without memory, which hands each operation to the one that it holds."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Wrapped":
        made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)  # type: ignore[attr-defined]
        made.held = held
        return made

    def __repr__(self, **kwargs: Any) -> str:
        return f"Wrapped({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = tree_map(lambda each: each.held if isinstance(each, Wrapped) else each, (args, kwargs or {}))
        return tree_map(lambda each: Wrapped(each) if isinstance(each, Tensor) else each, func(*held[0], **held[1]))


def functional(held: Tensor) -> Tensor:
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(held)


STRANGE: dict[str, Callable[[Tensor], Tensor]] = {
    "FakeTensor": lambda held: FakeTensorMode().from_tensor(held),
    "FunctionalTensor": functional,
    "MaskedTensor": lambda held: masked_tensor(held, held > 0),
    "Wrapped": Wrapped,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", marked(STRANGE, since((2, 13), "it answers nothing without its mode"), ["FunctionalTensor"])
)
@pytest.mark.parametrize("caller", CALLERS, ids=str)
@pytest.mark.table(wide=60)
def test_a_point_of_such_a_class_is_refused(caller: Any, kind: str) -> None:
    if caller.name == "jet" and kind in ("MaskedTensor", "FunctionalTensor"):
        pytest.skip("its directions cannot be made")
    with pytest.raises(hodiff.InputError, match=f"got an? {kind}, a tensor whose class computes by itself"):
        caller(lambda z, *rest: z.sin() * SCALE + z**3, STRANGE[kind](X))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["MaskedTensor", "Wrapped"])
@pytest.mark.parametrize("caller", [each for each in CALLERS if each.name != "jets.report"], ids=str)
@pytest.mark.table(wide=60)
def test_a_result_of_such_a_class_is_refused(caller: Any, kind: str) -> None:
    with pytest.raises(hodiff.InputError, match=f"f\\(x\\).* got a {kind}, a tensor whose class computes by itself"):
        caller(lambda z, *rest: (z.sin() * SCALE + z**3) * STRANGE[kind](X), X)


VECTORS: dict[str, Callable[[Any], Any]] = {
    "hvp": lambda v: hodiff.hvp(lambda z: z.sin().sum(), X, v),
    "jvp": lambda v: hodiff.jvp(torch.sin, X, v),
    "vjp": lambda v: hodiff.vjp(torch.sin, X, v),
    "HessianOperator": lambda v: hodiff.HessianOperator(lambda z: z.sin().sum(), X) @ v,
    "solve": lambda v: hodiff.solve(hodiff.HessianOperator(lambda z: z.square().sum(), X), v),
    "in a container": lambda v: hodiff.hvp(lambda z: z["a"].sin().sum(), {"a": X}, {"a": v}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", VECTORS)
def test_a_vector_of_such_a_class_is_refused(name: str, kind: str) -> None:
    with pytest.raises(hodiff.InputError, match=f"got an? {kind}, a tensor whose class computes by itself"):
        VECTORS[name](STRANGE[kind](X))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["MaskedTensor", "Wrapped"])
def test_a_parameter_of_such_a_class_is_refused(kind: str) -> None:
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(STRANGE[kind](X)))
    with pytest.raises(hodiff.InputError, match="computes by itself"):
        hodiff.grad(lambda m: m.w.sin().sum(), module)


def test_a_stand_in_goes_through_while_pytorch_traces() -> None:
    held = X[0]
    with FakeTensorMode() as mode:
        found = hodiff.hessian(lambda z: z.sin().sum(), mode.from_tensor(held))
    assert found.shape == (3, 3)


BY_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "hvp": lambda x: hodiff.hvp(lambda z: z.sin().sum(), x, torch.stack([X[0], X[1]])),
    "hessian": lambda x: hodiff.hessian(lambda z: z.sin().sum(), x),
    "jacobian": lambda x: hodiff.jacobian(torch.sin, x, chunk_size=2),
    "hessian_diagonal": lambda x: hodiff.hessian_diagonal(lambda z: z.sin().sum(), x),
    "per_sample_grad": lambda x: hodiff.per_sample_grad(lambda w, b: (w * b).sin().sum(1), x, X),
    "laplacian": lambda x: hodiff.laplacian(lambda z: z.sin().sum(), x, batch_ndim=0),
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_a_functional_tensor_goes_through_while_pytorch_traces(name: str) -> None:
    """Unit vectors were written by a view that PyTorch cannot follow."""
    with FunctionalTensorMode() as mode:
        found = BY_ROWS[name](FunctionalTensor.to_functional(X[0]))
    assert isinstance(found, FunctionalTensor)
    torch._sync(found)
    with mode:
        torch.testing.assert_close(torch._from_functional_tensor(found.elem), BY_ROWS[name](X[0]))


def test_a_class_without_operations_of_its_own_is_a_tensor() -> None:
    class Named(Tensor):
        pass

    found = hodiff.hvp(lambda z: z.sin().sum(), X.as_subclass(Named), X)
    torch.testing.assert_close(found.as_subclass(Tensor), -X.sin() * X)


FOLLOWED: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "sparse_hessian": lambda f: hodiff.sparse_hessian(lambda z: f(z).sum(), X),
    "sparse_jacobian": lambda f: hodiff.sparse_jacobian(f, X),
    "sparsity_pattern": lambda f: hodiff.sparse.sparsity_pattern(f, X, order=1),
    "plan_hessian": lambda f: hodiff.sparse.plan_hessian(lambda z: f(z).sum(), X),
    "plan_jacobian": lambda f: hodiff.sparse.plan_jacobian(f, X),
}


class Passed(torch.autograd.Function):
    """Through a tensor of such a class and out of it, as `DTensor.from_local` and `full_tensor` do."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Any:
        return (Wrapped(z.detach()) * 2).held

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return 2 * g


@pytest.mark.parametrize("name", FOLLOWED)
def test_no_pattern_is_found_behind_such_a_class(name: str) -> None:
    """Entries that went through one were missing, silently."""
    with pytest.raises(hodiff.InputError, match=r"pattern of f\(x\) cannot be followed: got a Wrapped.* Give pattern="):
        FOLLOWED[name](lambda z: Passed.apply(z).flip(0) * z + z)
