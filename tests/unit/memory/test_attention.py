"""First gradients through attention whose rows are fully masked by a large finite number.

PyTorch's fused kernel on the processor takes softmax anew from a log-sum-exp that has no digits left there.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff._core import _versions
from tests.support.callers import CALLERS, SCALE, Caller
from tests.support.differences import relative_error

D = torch.float64
LOW = torch.finfo(D).min
HALVES = (torch.bfloat16, torch.float16)


def written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention from its definition."""
    logits = q @ k.mT / q.shape[-1] ** 0.5
    return (logits if mask is None else logits + mask).softmax(-1) @ v


def masked(row: float, dtype: torch.dtype = D, size: int = 6) -> Tensor:
    return torch.zeros(size, size, dtype=dtype).index_fill(0, torch.tensor([2]), row)


def given(dtype: torch.dtype = D, seed: int = 0) -> Tensor:
    return torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(seed), dtype=D).to(dtype)


class Counted:
    """A function that knows how often it was called."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: object) -> Tensor:
        self.calls += 1
        return self.function(*args)


FORMS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "query": lambda t: (t, given(t.dtype, 1), given(t.dtype, 2)),
    "key": lambda t: (given(t.dtype, 1), t, given(t.dtype, 2)),
    "value": lambda t: (given(t.dtype, 1), given(t.dtype, 2), t),
    "all": lambda t: (t, t.sin(), t.cos()),
}


@pytest.mark.parametrize("dtype", [torch.float32, D, *HALVES], ids=str)
@pytest.mark.parametrize("row", [-torch.inf, -1.0, -1e4, -1e9, "min"])
@pytest.mark.parametrize("form", FORMS)
def test_the_first_gradient_is_that_of_the_definition(form: str, row: float | str, dtype: torch.dtype) -> None:
    if row == -1e9 and dtype == torch.float16:
        pytest.skip("-1e9 is -inf there")
    mask = masked(torch.finfo(dtype).min if row == "min" else row, dtype)
    low = mask
    f = Counted(lambda t: F.scaled_dot_product_attention(*FORMS[form](t), attn_mask=low).sin().sum())

    def by_hand(t: Tensor) -> Tensor:
        q, k, v = FORMS[form](t)
        if row == -torch.inf:  # such rows are 0
            return written(q, k, v, torch.zeros_like(mask))[..., [0, 1, 3, 4, 5], :].sin().sum()
        return written(q, k, v, mask).sin().sum()

    x = given(dtype)
    leaf = x.to(torch.float32 if dtype in HALVES else dtype).requires_grad_()  # in which the kernel adds up
    mask = mask.to(leaf.dtype)
    (expected,) = torch.autograd.grad(by_hand(leaf), leaf)
    bound = {torch.float32: 2e-6, D: 1e-14, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
    assert relative_error(hodiff.grad(f, x).to(D), expected.to(D)) < bound
    assert f.calls == 1


@pytest.mark.parametrize("row", [-1e9, LOW])
def test_higher_orders(row: float) -> None:
    mask, x, u = masked(row), given(), given(seed=3)
    f = lambda t: F.scaled_dot_product_attention(*FORMS["all"](t), attn_mask=mask).sin().sum()
    by_hand = lambda t: written(*FORMS["all"](t), mask).sin().sum()
    assert relative_error(hodiff.hvp(f, x, u), hodiff.hvp(by_hand, x, u)) < 1e-13
    third = lambda g: hodiff.grad(lambda t: (hodiff.hvp(g, t, u) * u).sum(), x)
    assert relative_error(third(f), third(by_hand)) < 1e-12


def entrywise(z: Tensor, *rest: Tensor, attention: Callable[..., Tensor]) -> Tensor:
    """Each entry is a sequence of two tokens, of which the second is masked in full."""
    q = torch.stack([z.reshape(-1), z.reshape(-1).sin()], -1)[:, None, :, None]
    mask = torch.zeros(2, 2, dtype=D).index_fill(0, torch.tensor([1]), LOW)
    found = attention(q, q + 1, SCALE * q.cos(), mask)
    return found.sum((1, 2, 3)).reshape(z.shape)


NOT_COMPARED = {
    "check_derivatives": "differences do not see logits beside finfo.min: they are rounded away, also by hand",
    "jets.report": "holds no number",
}


@pytest.mark.parametrize("caller", [caller for caller in CALLERS if caller.name not in NOT_COMPARED], ids=repr)
def test_every_name_that_takes_a_function(caller: Caller) -> None:
    x = torch.tensor([[0.3, -0.7, 1.1], [0.4, 0.9, -0.2]], dtype=D)
    fused = caller(lambda z, *r: entrywise(z, *r, attention=F.scaled_dot_product_attention), x)
    plain = caller(lambda z, *r: entrywise(z, *r, attention=written), x)
    assert len(fused) == len(plain) > 0
    for found, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_attention_that_no_mode_of_functions_sees() -> None:
    """Inside of PyTorch's own layers, by the parameters."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=D)
    inputs, mask = torch.randn(3, 6, 8, dtype=D), masked(LOW)
    loss = Counted(lambda m: m(inputs, src_mask=mask).sin().sum())
    found = hodiff.grad(loss, layer)
    assert loss.calls == 1
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.autograd.grad(layer(inputs, src_mask=mask).sin().sum(), [*layer.parameters()])
    for part, right in zip(found.values(), expected, strict=True):
        assert relative_error(part, right) < 1e-12


def test_random_numbers_are_the_same_in_both_runs() -> None:
    mask, x = masked(LOW), given()

    def f(t: Tensor, attention: Callable[..., Tensor] = F.scaled_dot_product_attention) -> Tensor:
        return (attention(t, t, t, mask) * torch.rand(8, dtype=D)).sum()

    torch.manual_seed(0)
    found, after = hodiff.grad(f, x), torch.rand(1)
    torch.manual_seed(0)
    expected = hodiff.grad(lambda t: f(t, written), x)
    assert relative_error(found, expected) < 1e-13 and torch.equal(after, torch.rand(1))


def test_a_tensor_is_refused_by_name() -> None:
    x = given().requires_grad_()
    loss = lambda row: F.scaled_dot_product_attention(x, x, x, attn_mask=masked(row)).sum()
    for call in (lambda row: hodiff.grad(loss(row), x), lambda row: hodiff.multi_grad([loss(row)], x)):
        with pytest.raises(hodiff.GraphError, match=r"fused attention.* fully masked by a large finite number"):
            call(LOW)
        call(-1.0)
    beside = x.detach().clone().requires_grad_()
    hodiff.grad(loss(LOW) + beside.sum(), beside)  # nothing of it on the way to what is asked for
    with sdpa_kernel(SDPBackend.MATH):
        plain = loss(LOW)
    hodiff.grad(plain, x)


def test_a_function_that_chooses_the_kernel() -> None:
    def f(t: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(t, t, t, attn_mask=masked(LOW)).sum()

    expected = hodiff.grad(lambda t: written(t, t, t, masked(LOW)).sum(), given())
    assert relative_error(hodiff.grad(f, given()), expected) < 1e-13


def test_losses_with_a_shared_trunk() -> None:
    x = given()
    head = lambda p, t: F.scaled_dot_product_attention(t, t, t, attn_mask=masked(LOW)).sum()
    by_hand = lambda p, t: written(t, t, t, masked(LOW)).sum()
    (found,), (expected,) = (hodiff.multi_grad([h], x, shared=torch.sin) for h in (head, by_hand))
    assert relative_error(found, expected) < 1e-13


def test_a_checkpoint_hides_the_mask() -> None:
    """In a function it is computed plainly then; of a tensor all that can be done is to say so."""
    x = given()
    block = lambda t, mask: F.scaled_dot_product_attention(t, t, t, attn_mask=mask).sin()
    f = Counted(lambda t: checkpoint(block, t, masked(LOW), use_reentrant=False).sum())
    expected = hodiff.grad(lambda t: written(t, t, t, masked(LOW)).sin().sum(), x)
    assert relative_error(hodiff.grad(f, x), expected) < 1e-13 and f.calls == 1
    leaf = x.clone().requires_grad_()
    with pytest.warns(hodiff.HodiffWarning, match="an activation checkpoint .* hides"):
        hodiff.grad(checkpoint(block, leaf, masked(LOW), use_reentrant=False).sum(), leaf)
    unmasked = Counted(lambda t: checkpoint(block, t, None, use_reentrant=False).sum())
    hodiff.grad(unmasked, x)
    assert unmasked.calls == 1


def test_no_switch_stays() -> None:
    before = torch.backends.cuda.flash_sdp_enabled()
    hodiff.grad(lambda t: F.scaled_dot_product_attention(t, t, t, attn_mask=masked(LOW)).sum(), given())
    assert torch.backends.cuda.flash_sdp_enabled() is before is True


def test_torch_is_still_wrong() -> None:
    """Should this fail one day, on every supported release, `rounds_rows` can go."""
    x = given().requires_grad_()
    (found,) = torch.autograd.grad(F.scaled_dot_product_attention(x, x, x, attn_mask=masked(LOW)).sin().sum(), x)
    (expected,) = torch.autograd.grad(written(x, x, x, masked(LOW)).sin().sum(), x)
    assert relative_error(found, expected) > 0.5
    assert _versions.LARGEST == 1e3
