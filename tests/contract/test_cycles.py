"""What a call leaves to Python's collector holds no tensor: training loops switch it off, and memory would grow."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hodiff
from tests.support.callers import CALLERS, PLAIN, D
from tests.support.releases import LACKING

Run = Callable[[Tensor], Any]
X = torch.tensor([[0.3, -0.8, 1.4], [0.9, 0.2, -0.5]], dtype=D)
SCALE = torch.tensor(1.3, dtype=D, requires_grad=True)


def wave(z: Tensor) -> Tensor:
    return SCALE * z.sin() * z


RUNS: dict[str, Run] = {
    **{caller.name: lambda x, c=caller: c.run(c.shaped(wave), x, ()) for caller in CALLERS},
    **PLAIN,
    "sparse_jacobian, of entries that move": lambda x: hodiff.sparse_jacobian(lambda z: z[..., 1:] - z[..., :-1], x),
    "sparse_hessian, of a chain": lambda x: hodiff.sparse_hessian(lambda z: (z * z.roll(1, -1)).square().sum(), x),
}


def left_by(call: Callable[[], object]) -> list[Any]:
    """The unreachable objects that reference counts have not freed."""
    call()  # first calls fill caches
    gc.collect()
    gc.disable()
    try:
        call()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [*gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.filterwarnings("ignore")  # of functions that are constant
@pytest.mark.parametrize("name", RUNS)
def test_no_tensor_is_left_in_a_cycle(name: str) -> None:
    found = left_by(lambda: RUNS[name](X))
    assert not [item for item in found if isinstance(item, Tensor)], {type(item).__name__ for item in found}


def test_every_public_function_is_looked_at() -> None:
    named = {name for name in hodiff.__all__ if not name.endswith(("Error", "Warning"))}
    assert named - LACKING <= {name.partition(",")[0] for name in RUNS}


CLASSES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "hvp": lambda f, x: hodiff.hvp(lambda z: f(z).sum(), x, x),
    "laplacian": lambda f, x: hodiff.laplacian(lambda z: f(z).sum(-1), x, method="reverse"),
    "graph.inspect": lambda f, x: hodiff.graph.inspect(f(x.clone().requires_grad_()).sum()),
    "graph.predict": lambda f, x: hodiff.graph.predict(f(x.clone().requires_grad_()).sum()),
    "sparse_hessian": lambda f, x: hodiff.sparse_hessian(lambda z: f(z).sum(), x),
    "check_derivatives": lambda f, x: hodiff.check_derivatives(lambda z: f(z).sum(), x),
}


@pytest.mark.filterwarnings("ignore")  # of Functions whose second derivative is what their backward makes it
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_functions_is_forgotten_with_its_last_user(name: str) -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, *g: Tensor) -> Tensor:
            return 3 * ctx.saved_tensors[0] ** 2 * g[0]

    known = weakref.ref(Cube)
    CLASSES[name](Cube.apply, X)
    del Cube
    gc.collect()
    assert known() is None


def test_a_tensor_in_a_cycle_is_seen() -> None:
    def make() -> None:
        ring: list[Any] = [torch.ones(2)]
        ring.append(ring)

    assert [item for item in left_by(make) if isinstance(item, Tensor)]


def test_no_reference_cycle_keeps_an_error_s_tensors() -> None:
    """After the error is handled its graph must be gone with the next collection, or a retry runs out of memory."""

    def failing() -> weakref.ref:
        holder, bags = torch.nn.Linear(2, 2).double(), torch.tensor([[0, 1], [2, 2]])
        try:
            hodiff.hvp(
                lambda x: torch.nn.functional.embedding_bag(bags, holder(x)).exp().sum(),
                X.reshape(3, 2),
                X.reshape(3, 2),
            )
        except hodiff.GraphError:
            return weakref.ref(holder)
        pytest.fail("embedding_bag has no second derivative")

    reference = failing()
    gc.collect()
    assert reference() is None
