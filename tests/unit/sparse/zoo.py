"""Functions of a vector, for patterns: each with a length, and what it is there for."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hodiff._core._versions import RELEASE
from tests.support.modules import Cube

D = torch.float64
Scalar = Callable[[Tensor], Tensor]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


A = torch.randn(12, 12, dtype=D, generator=generator())
BAND = torch.where((torch.arange(12)[:, None] - torch.arange(12)).abs() <= 1, A, 0.0)
MASK = (torch.arange(12) % 3 > 0).to(D)
INDEX = torch.tensor([3, 3, 0, 7, 11, 5])
POINTS = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double().requires_grad_(False)
NORMED = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.SiLU(), nn.Linear(4, 2)).double()
CONV = nn.Conv1d(1, 2, 3, padding=1).double()
KERNEL = torch.tensor([[[[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]]]], dtype=D)


class Sheared(torch.autograd.Function):
    """Its backward adds a product to what it was given, in one operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + BAND @ x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.addmv(g, BAND.T, g)


class ByNumPy(torch.autograd.Function):
    """Its forward leaves torch, and what it saves comes from there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.from_numpy(x.detach().numpy()[::-1] ** 2)
        ctx.save_for_backward(x)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.flip(0) * 2 * ctx.saved_tensors[0]


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[1:4] = y[4:7].clone() * x[1:4]
    y[0] = x[5] ** 2
    y[6:].add_(x[:6] ** 3)
    y[8:10].zero_()
    return (y.clone() ** 3).sum()


def steps(x: Tensor) -> Tensor:
    state, total = x[:2], x.new_zeros(())
    for k in range(5):
        state = state + 0.1 * torch.stack([state[1], -torch.sin(state[0]) + x[2 + k]])
        total = total + state.square().sum()
    return total


def views_written(x: Tensor) -> Tensor:
    y = x.clone().view(3, 4)
    y[:, ::2] = x[:6].reshape(3, 2) ** 2
    y.t()[1].mul_(x[9:])
    y.diagonal().copy_(x[3:6] * x[6:9])
    y.as_strided((2, 3), (5, 1)).add_(x[:6].reshape(2, 3))
    return (y**3).sum()


def complex_written(x: Tensor) -> Tensor:
    z = torch.complex(x[:6], x[6:]) * 1
    torch.view_as_real(z)[:, 0].mul_(x[6:])
    return z.abs().pow(2).sum()


def sorted_part(x: Tensor) -> Tensor:
    return (x[:6].sort().values * torch.arange(6.0, dtype=D)).pow(2).sum() + x[6] * x[7]


def rows(x: Tensor) -> Tensor:
    return x.reshape(3, 4)


def hooked(y: Tensor) -> Tensor:
    """The backward of this is not what its forward says."""
    if y.requires_grad:
        y.register_hook(lambda g: g * (torch.arange(12) % 3))
    return (y**2).sum()


def grid_energy(x: Tensor) -> Tensor:
    u = F.pad(x.reshape(3, 4), (1, 1, 1, 1))
    return (1 + (u[1:, :-1] - u[:-1, :-1]) ** 2 + (u[:-1, 1:] - u[:-1, :-1]) ** 2).sqrt().sum()


ZOO: dict[str, Scalar] = {
    "linear": lambda x: (x * A[0]).sum(),
    "square": lambda x: (x**2).sum(),
    "chain": lambda x: (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum(),
    "arrow": lambda x: x[0] * (x[1:] ** 2).sum(),
    "full": lambda x: x.sum() ** 3,
    "norm": lambda x: (x.square().sum() + 1).sqrt(),
    "blocks": lambda x: x.reshape(4, 3).prod(1).sum(),
    "logsumexp": lambda x: x.reshape(3, 4).logsumexp(1).sum(),
    "softmax": lambda x: (x.reshape(3, 4).softmax(0) * A[:3, :4]).square().sum(),
    "log_softmax": lambda x: -x.reshape(3, 4).log_softmax(1)[:, 0].sum(),
    "cross entropy": lambda x: F.cross_entropy(x.reshape(3, 4), torch.tensor([0, 3, 1])),
    "quadratic form": lambda x: x @ A @ x,
    "band matrix": lambda x: (BAND @ x).sin().sum(),
    "sparse matrix": lambda x: torch.sparse.mm(BAND.to_sparse(), x[:, None]).pow(3).sum(),
    "mask": lambda x: (x * MASK).pow(3).sum() + (x * (1 - MASK)).sum() * x[0],
    "stacked products": lambda x: torch.bmm(x.reshape(2, 2, 3), x.reshape(2, 3, 2)).tanh().sum(),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x.reshape(3, 4), A[:5, :4]).sin().sum(),
    "outer": lambda x: torch.outer(x[:3], x[3:6]).exp().sum(),
    "cumsum": lambda x: x.cumsum(0)[:4].pow(3).sum(),
    "cumprod": lambda x: x[:4].cumprod(0).sum(),
    "gather": lambda x: x[INDEX].pow(3).sum() + (x[INDEX] * x[INDEX.flip(0)]).sum(),
    "scatter": lambda x: x.new_zeros(4).index_add(0, torch.tensor([0, 1, 1, 3, 0, 2]), x[:6]).pow(3).sum(),
    "index_put": lambda x: torch.zeros(8, dtype=D).index_put((INDEX[:3],), x[:3], accumulate=True).pow(3).sum(),
    "scatter along": lambda x: x.new_zeros(3, 4).scatter_add(1, INDEX.reshape(3, 2) % 4, x[:6].view(3, 2)).exp().sum(),
    "masked scatter": lambda x: x.new_zeros(3, 8).masked_scatter(A[:3, :8] > 0, x).diff().pow(4).sum(),
    "masked scatter by values": lambda x: x.new_zeros(12).masked_scatter(x > 0, x.flip(0) ** 3).sum() * x[0],
    "pooling without a batch": lambda x: F.avg_pool2d(x.reshape(1, 3, 4), 2, 1).pow(3).sum(),
    "masked select": lambda x: (x[A[0] > 0].diff() ** 3).sum(),
    "roll and flip": lambda x: (x * x.roll(1)).sum() + (x.flip(0) * x).pow(2).sum(),
    "pad": grid_energy,
    "reflect": lambda x: F.pad(x.reshape(1, 1, 12), (2, 2), mode="reflect").diff().pow(4).sum(),
    "unfold": lambda x: x.unfold(0, 3, 2).prod(1).sum(),
    "cat and stack": lambda x: torch.stack([torch.cat([x[:3], x[6:9]]), x[3:9]]).prod(0).sum(),
    "where": lambda x: torch.where(x > 0, x**3, x[0] * x).sum(),
    "relu": lambda x: (x.relu() * x.roll(2)).sum(),
    "clamp": lambda x: (x.clamp(-0.5, 0.5) ** 2 * x).sum(),
    "maximum": lambda x: torch.maximum(x[:6] ** 2, x[6:] ** 3).sum(),
    "max over rows": lambda x: (x.reshape(3, 4).max(1).values ** 3).sum(),
    "amax": lambda x: (x.reshape(3, 4).amax(0) ** 3).sum(),
    "sort": sorted_part,
    "topk": lambda x: (x.reshape(3, 4).topk(2, dim=1).values ** 3).sum(),
    "median": lambda x: x[:5].median() ** 3 + (x**2).sum(),
    "index by value": lambda x: (x[x.argsort()[:3]] ** 3).sum(),
    "gather by value": lambda x: (x.reshape(3, 4).gather(0, x.reshape(3, 4).argsort(0)[:2, :3]) ** 3).sum(),
    "select by value": lambda x: (x.reshape(3, 4).index_select(1, x[:4].argsort()[:2]) ** 3).sum(),
    "scatter by value": lambda x: (rows(0 * x).scatter(1, rows(x).argsort(1)[:2, :3], x[:6].view(2, 3)) ** 3).sum(),
    "add by value": lambda x: (rows(0 * x).index_add(1, x[:3].argsort(), rows(x)[:, :3] ** 2) * rows(x)).sum(),
    "put by value": lambda x: (torch.zeros_like(x).index_put((x.argsort(),), x**2) * x).sum(),
    "scatter products": lambda x: x[6:10].scatter_reduce(0, INDEX % 4, x[:6], "prod").pow(2).sum(),
    "in place": in_place,
    "views written": views_written,
    "complex written": complex_written,
    "transposed convolution": lambda x: F.conv_transpose1d(x.reshape(1, 2, 6), A[:2, None, :3], stride=2).pow(3).sum(),
    "grouped convolution": lambda x: F.conv1d(x.reshape(1, 2, 6), A[:4, None, :3], groups=2, dilation=2).pow(3).sum(),
    "convolution by itself": lambda x: F.conv1d(x[:8].reshape(1, 2, 4), x[8:].reshape(1, 2, 2)).pow(2).sum(),
    "grid sample": lambda x: F.grid_sample(x[:9].view(1, 1, 3, 3), x[9:11].view(1, 1, 1, 2), align_corners=True).sum(),
    "fold": lambda x: F.fold(x.reshape(1, 4, 3), (2, 4), (2, 2)).pow(3).sum(),
    "replicate": lambda x: F.pad(x.reshape(1, 1, 3, 4), (1, 2, 1, 0), mode="replicate").diff().pow(4).sum(),
    "padded words": lambda x: F.embedding(torch.tensor([0, 1, 3]), x.reshape(4, 3), padding_idx=1).pow(3).sum(),
    "triangles": lambda x: (x[:9].reshape(3, 3).tril() @ x[3:].reshape(3, 3).triu(1)).sum(),
    "mapped": lambda x: torch.vmap(torch.func.grad(lambda row: row.prod()))(x.reshape(4, 3)).sum(),
    "a hook": lambda x: hooked(x * 1),
    "steps": steps,
    "points of a network": lambda x: POINTS(x.reshape(4, 3)).pow(2).sum(),
    "layer norm": lambda x: NORMED(x.reshape(4, 3)).pow(2).sum(),
    "group norm": lambda x: F.group_norm(x.reshape(2, 6, 1), 2).pow(3).sum(),
    "convolution": lambda x: CONV(x.reshape(1, 1, 12)).pow(3).sum(),
    "stencil": lambda x: (F.conv2d(x.reshape(1, 1, 3, 4), KERNEL, padding=1) ** 3).sum(),
    "average pooling": lambda x: F.avg_pool2d(x.reshape(1, 3, 2, 2), 2).pow(3).sum(),
    "max pooling": lambda x: F.max_pool1d(x.reshape(1, 1, 12), 3).pow(3).sum(),
    "upsampling": lambda x: F.interpolate(x.reshape(1, 1, 12), scale_factor=2, mode="linear").pow(3).sum(),
    "embedding": lambda x: F.embedding(torch.tensor([0, 2, 2, 1]), x.reshape(4, 3)).prod(0).sum(),
    "fft": lambda x: torch.fft.rfft(x.reshape(3, 4)).abs().pow(4).sum(),
    "complex": lambda x: torch.view_as_complex(x.reshape(6, 2)).pow(3).real.sum(),
    "conjugate": lambda x: (torch.complex(x[:6], x[6:]).conj() ** 3).imag.sum(),
    "solve": lambda x: torch.linalg.solve(A[:3, :3] + torch.diag_embed(x.reshape(4, 3)), A[:3, 0]).pow(2).sum(),
    "determinants": lambda x: torch.linalg.det(x.reshape(3, 2, 2)).pow(2).sum(),
    "cholesky": lambda x: torch.linalg.cholesky(torch.eye(2, dtype=D) * 9 + x[:2] * x[:2, None]).sum() + x[3] ** 3,
    "kron": lambda x: torch.kron(x[:2], x[2:5]).pow(2).sum(),
    "cdist": lambda x: torch.cdist(x[:6].reshape(3, 2), A[:2, :2], compute_mode="use_mm_for_euclid_dist").sum(),
    "vmap": lambda x: torch.vmap(lambda row: row.prod())(x.reshape(4, 3)).sum(),
    "detach": lambda x: (x.detach().roll(1) * x**2).sum(),
    "checkpoint": lambda x: checkpoint(lambda y: y.sin() * y.roll(1), x, use_reentrant=False).sum(),
    "a Function": lambda x: (Cube.apply(x) * x.roll(1)).sum(),
    "a Function that adds a product": lambda x: Sheared.apply(x).pow(3).sum(),
    "a Function in NumPy": lambda x: (ByNumPy.apply(x) * x).sum(),
    "attention": lambda x: F.scaled_dot_product_attention(*x.reshape(3, 1, 2, 2)).pow(2).sum(),
    "strided": lambda x: (x.as_strided((5, 4), (2, 1)).prod(1)).sum(),
    "transposed": lambda x: (x.reshape(3, 4).T.contiguous().view(-1) * x).pow(2).sum(),
    "var": lambda x: x.reshape(3, 4).var(1).pow(2).sum(),
    "trapezoid": lambda x: torch.trapezoid(x**3).sum(),
    "a value as a number": lambda x: (x * float(x[0].detach() > 5)).pow(2).sum() + x[1] ** 3,
}  # fmt: skip
if RELEASE < (2, 12):
    del ZOO["grid sample"]  # which has no second derivative there
