"""The rule of each operator by itself, in the backward pass of a Function: what it couples, and no more."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.sparse import _rules, sparsity_pattern
from tests.unit.sparse.zoo import D, generator

pytestmark = pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
aten: Any = torch.ops.aten
C = torch.randn(64, dtype=D, generator=generator()) + 2.0
HOLES = torch.where((torch.arange(64) * 7) % 5 < 2, C, 0.0)
KEPT = HOLES > 0
g34 = lambda g: g.reshape(3, 4)
c = lambda *shape: C[: torch.Size(shape).numel()].reshape(shape)
holes = lambda *shape: HOLES[: torch.Size(shape).numel()].reshape(shape)
kept = lambda *shape: KEPT[: torch.Size(shape).numel()].reshape(shape)
SPD = torch.eye(3, dtype=D) * 9 + c(3, 3, 3)
SMALL = torch.eye(2, dtype=D) * 9
LU = torch.linalg.lu_factor(SPD[:2])
POINTS = [torch.randn(12, dtype=D, generator=generator()).roll(n) for n in range(3)]

Map = Callable[[Tensor], Any]

ROWS: Map = lambda g: g34(g).sum(1)
COLUMNS: Map = lambda g: g34(g).sum(0)
OVER_ROWS: Map = lambda g: g34(g).sum(1, keepdim=True).expand(3, 4)
OVER_COLUMNS: Map = lambda g: g34(g).sum(0).expand(3, 4)


def each(*shapes: tuple[int, ...]) -> Map:
    """Matrices of a stack, each of which all of its result depends on."""
    count, rows = shapes[0][0], 12 // shapes[0][0]
    return lambda g: [
        g.reshape(count, rows).sum(1, keepdim=True).expand(count, torch.Size(s[1:]).numel()) for s in shapes
    ]


LINEAR: dict[str, Map] = {
    "addmm": lambda g: torch.addmm(g34(g), c(3, 3), g34(g)),
    "addmm of a row and holes": lambda g: torch.addmm(g[8:], holes(3, 2), g[:8].reshape(2, 4)),
    "addmv": lambda g: torch.addmv(g[:4], holes(4, 6), g[6:]),
    "baddbmm": lambda g: torch.baddbmm(g.reshape(2, 3, 2), c(2, 3, 3), g.reshape(2, 3, 2)),
    "_sparse_addmm": lambda g: torch.sparse.addmm(g34(g), holes(3, 3).to_sparse(), g34(g)),
    "dot": lambda g: holes(12).dot(g),
    "vdot": lambda g: torch.vdot(holes(12), g),
    "mv": lambda g: g34(g).mv(holes(4)),
    "mm": lambda g: holes(5, 3) @ g34(g),
    "bmm": lambda g: torch.bmm(g.reshape(2, 2, 3), holes(2, 3, 2)),
    "sum": ROWS,
    "nansum": lambda g: g34(g).nansum(0),
    "mean": lambda g: g34(g).mean(1, keepdim=True),
    "take": lambda g: g34(g).take(torch.tensor([[5, 0], [11, 5]])),
    "rot90": lambda g: g34(g).rot90(),
    "repeat": lambda g: g34(g).repeat(2, 1),
    "flip": lambda g: g34(g).flip(1),
    "roll": lambda g: g34(g).roll(1, 0),
    "stack": lambda g: torch.stack([g[:6], g[6:]], 1),
    "constant_pad_nd": lambda g: F.pad(g34(g), (1, 0, 2, 1), value=3.0),
    "reflection_pad1d": lambda g: F.pad(g34(g)[None], (2, 1), mode="reflect"),
    "reflection_pad2d": lambda g: F.pad(g34(g)[None], (2, 1, 1, 2), mode="reflect"),
    "reflection_pad3d": lambda g: F.pad(g.reshape(1, 1, 3, 2, 2), (1, 1, 0, 1, 2, 1), mode="reflect"),
    "replication_pad1d": lambda g: F.pad(g34(g)[None], (2, 1), mode="replicate"),
    "replication_pad2d": lambda g: F.pad(g34(g)[None], (2, 1, 1, 2), mode="replicate"),
    "replication_pad3d": lambda g: F.pad(g.reshape(1, 1, 3, 2, 2), (1, 1, 0, 1, 2, 1), mode="replicate"),
    "slice_scatter": lambda g: c(4, 3).slice_scatter(g[:6].reshape(2, 3), 0, 1, 3),
    "select_scatter": lambda g: g34(g).select_scatter(g[:3], 1, 2),
    "diagonal_scatter": lambda g: g34(g).diagonal_scatter(g[:3]),
    "as_strided_scatter": lambda g: g34(g).as_strided_scatter(g[:4].reshape(2, 2), (2, 2), (5, 1), 1),
    "masked_scatter": lambda g: c(3, 4).masked_scatter(kept(3, 4), g),
    "masked_scatter in rows": lambda g: c(3, 4).masked_scatter(kept(3, 1), g),
    "masked_scatter_backward": lambda g: aten.masked_scatter_backward(g34(g), kept(3, 4), [7]),
    "masked_scatter_backward in rows": lambda g: aten.masked_scatter_backward(g34(g), kept(3, 1), [8]),
    "masked_select": lambda g: g34(g).masked_select(kept(3, 4)),
    "masked_select in rows": lambda g: g34(g).masked_select(kept(3, 1)),
    "pixel_shuffle": lambda g: F.pixel_shuffle(g.reshape(1, 4, 3, 1), 2),
    "pixel_unshuffle": lambda g: F.pixel_unshuffle(g.reshape(1, 1, 6, 2), 2),
    "channel_shuffle": lambda g: F.channel_shuffle(g.reshape(1, 6, 2), 3),
    "im2col": lambda g: F.unfold(g.reshape(1, 1, 3, 4), 2, padding=1, stride=(1, 2)),
    "col2im": lambda g: F.fold(g.reshape(1, 4, 3), (2, 4), 2),
    "block_diag": lambda g: torch.block_diag(g[:4].reshape(2, 2), c(1, 2), g[4:7]),
    "diag_embed": lambda g: torch.diag_embed(g34(g), 1),
    "tril": lambda g: g34(g).tril(-1),
    "triu": lambda g: g34(g).triu(1),
    "gather": lambda g: g34(g).gather(1, torch.tensor([[3, 0], [1, 1]])),
    "index_select": lambda g: g34(g).index_select(1, torch.tensor([3, 0, 3])),
    "scatter_add": lambda g: g34(g).scatter_add(0, torch.tensor([[2, 0, 2]]), g[:6].reshape(2, 3)),
    "index_add": lambda g: g34(g).index_add(1, torch.tensor([3, 0]), g[:6].reshape(3, 2)),
    "_unsafe_index": lambda g: aten._unsafe_index(g34(g), [None, torch.tensor([1, 1, 3])]),
    "unfold_backward": lambda g: aten.unfold_backward(g.reshape(4, 3), [6], 0, 3, 1),
    "embedding_dense_backward": lambda g: aten.embedding_dense_backward(g34(g), torch.tensor([0, 2, 0]), 4, -1, False),
    "upsample_nearest2d": lambda g: F.interpolate(g.reshape(1, 6, 1, 2), scale_factor=2),
    "avg_pool2d": lambda g: F.avg_pool2d(g.reshape(1, 1, 3, 4), 2, 1, 1),
    "avg_pool3d": lambda g: F.avg_pool3d(g.reshape(1, 1, 3, 2, 2), 2, 1),
    "avg_pool2d_backward": lambda g: aten.avg_pool2d_backward(
        g.reshape(1, 1, 3, 4), c(1, 1, 4, 8), [2, 2], [1, 2], [0, 0], False, True, None
    ),
    "convolution": lambda g: F.conv2d(g.reshape(1, 2, 2, 3), c(4, 1, 2, 2), c(4), groups=2, padding=1),
    "convolution of channels": lambda g: F.conv1d(g.reshape(2, 2, 3), c(3, 2, 2), stride=2, padding=1),
    "convolution with gaps": lambda g: F.conv_transpose1d(g.reshape(1, 2, 6), c(2, 2, 3), stride=2, dilation=2),
}
"""Of these exactly those entries that the dense matrix of the linear map holds."""

LIKE: dict[str, tuple[Map, Map]] = {
    # one number from each line
    "amax": (lambda g: g34(g).amax(1), ROWS),
    "amin": (lambda g: g34(g).amin(0), COLUMNS),
    "aminmax": (lambda g: torch.aminmax(g34(g), dim=1), lambda g: (ROWS(g), ROWS(g))),
    "prod": (lambda g: g34(g).prod(1), ROWS),
    "logsumexp": (lambda g: g34(g).logsumexp(1), ROWS),
    "linalg_vector_norm": (lambda g: torch.linalg.vector_norm(g34(g), dim=1), ROWS),
    "norm": (lambda g: aten.norm(g34(g), 2, [1]), ROWS),
    "var": (lambda g: g34(g).var(1), ROWS),
    "std": (lambda g: g34(g).std(0), COLUMNS),
    "var_mean": (lambda g: torch.var_mean(g34(g), 1), lambda g: (ROWS(g), ROWS(g))),
    "std_mean": (lambda g: torch.std_mean(g34(g), 0), lambda g: (COLUMNS(g), COLUMNS(g))),
    "median": (lambda g: g34(g).median(1).values, ROWS),
    "nanmedian": (lambda g: g34(g).nanmedian(0).values, COLUMNS),
    "mode": (lambda g: g34(g).mode(1).values, ROWS),
    "kthvalue": (lambda g: g34(g).kthvalue(2, 1).values, ROWS),
    "max": (lambda g: g34(g).max(1).values, ROWS),
    "min": (lambda g: g34(g).min(0).values, COLUMNS),
    # a line from each line
    "_softmax": (lambda g: g34(g).softmax(1), OVER_ROWS),
    "_log_softmax": (lambda g: g34(g).log_softmax(0), OVER_COLUMNS),
    "cumsum": (lambda g: g34(g).cumsum(1), OVER_ROWS),
    "cumprod": (lambda g: g34(g).cumprod(0), OVER_COLUMNS),
    "logcumsumexp": (lambda g: g34(g).logcumsumexp(1), OVER_ROWS),
    "cummax": (lambda g: g34(g).cummax(1).values, OVER_ROWS),
    "cummin": (lambda g: g34(g).cummin(0).values, OVER_COLUMNS),
    "_fft_r2c": (lambda g: torch.view_as_real(torch.fft.rfft(g34(g))), each((3, 6))),
    "_fft_c2r": (lambda g: torch.fft.irfft(torch.view_as_complex(g.reshape(2, 3, 2))), each((2, 4))),
    # a matrix from each matrix
    "linalg_solve_triangular": (
        lambda g: torch.linalg.solve_triangular(SPD[:2].tril(), g.reshape(2, 3, 2), upper=False), each((2, 3, 2))
    ),
    "triangular_solve": (lambda g: torch.triangular_solve(g.reshape(2, 3, 2), SPD[:2]).solution, each((2, 3, 2))),
    "_linalg_solve_ex": (lambda g: torch.linalg.solve(SPD[:2], g.reshape(2, 3, 2)), each((2, 3, 2))),
    "linalg_lu_solve": (lambda g: torch.linalg.lu_solve(*LU, g.reshape(2, 3, 2)), each((2, 3, 2))),
    "linalg_lu_solve of factors": (
        lambda g: torch.linalg.lu_solve(5 + g.reshape(3, 2, 2), LU[1][:1, :2].expand(3, 2), c(3, 2, 1)),
        each((3, 2, 1)),
    ),
    "cholesky_solve": (lambda g: torch.cholesky_solve(g.reshape(2, 3, 2), SPD[:2].tril()), each((2, 3, 2))),
    "linalg_inv_ex": (lambda g: torch.linalg.inv(SMALL + g.reshape(3, 2, 2)), each((3, 2, 2))),
    "linalg_cholesky_ex": (lambda g: torch.linalg.cholesky(SMALL + g.reshape(3, 2, 2)), each((3, 2, 2))),
    "cholesky_inverse": (lambda g: torch.cholesky_inverse(SMALL + g.reshape(3, 2, 2)), each((3, 2, 2))),
    "linalg_matrix_exp": (lambda g: torch.linalg.matrix_exp(g.reshape(3, 2, 2)), each((3, 2, 2))),
    "_linalg_eigh": (lambda g: torch.linalg.eigvalsh(g.reshape(3, 2, 2)), each((3, 2))),
    "_linalg_svd": (lambda g: torch.linalg.svdvals(g.reshape(3, 2, 2)), each((3, 2))),
    "linalg_qr": (lambda g: torch.linalg.qr(SMALL + g.reshape(3, 2, 2)).R, each((3, 2, 2))),
    "_linalg_det": (lambda g: torch.linalg.det(SMALL + g.reshape(3, 2, 2)), each((3, 1))),
    "_linalg_slogdet": (lambda g: torch.linalg.slogdet(SMALL + g.reshape(3, 2, 2)).logabsdet, each((3, 1))),
    "linalg_lu_factor_ex": (lambda g: torch.linalg.lu_factor(SMALL + g.reshape(3, 2, 2)).LU, each((3, 2, 2))),
    # an image from each image
    "upsample_bilinear2d": (
        lambda g: F.interpolate(g.reshape(1, 6, 1, 2), scale_factor=2, mode="bilinear"), each((6, 2, 4))
    ),
    "upsample_bicubic2d": (
        lambda g: F.interpolate(g.reshape(1, 3, 2, 2), scale_factor=2, mode="bicubic"), each((3, 4, 4))
    ),
    "_adaptive_avg_pool2d": (lambda g: aten._adaptive_avg_pool2d(g.reshape(1, 3, 2, 2), [1, 2]), each((3, 2))),
    # what is chosen from, or written over, stays
    "where": (lambda g: torch.where(kept(6), g[:6], g[6:]), lambda g: g[:6] + g[6:]),
    "masked_fill": (lambda g: g.masked_fill(kept(12), 0.0), lambda g: g),
    "lerp": (lambda g: torch.lerp(g[:6], g[6:], c(6)), lambda g: g[:6] + g[6:]),
    "addcmul": (lambda g: torch.addcmul(g[:6], g[6:], c(6)), lambda g: g[:6] + g[6:]),
    "addcdiv": (lambda g: torch.addcdiv(g[:6], g[6:], c(6)), lambda g: g[:6] + g[6:]),
    "index_copy": (
        lambda g: g34(g).index_copy(0, torch.tensor([2, 0]), g[2:10].reshape(2, 4)),
        lambda g: g34(g).index_add(0, torch.tensor([2, 0]), g[2:10].reshape(2, 4)),
    ),
    "scatter": (
        lambda g: g34(g).scatter(1, torch.tensor([[3, 0], [1, 2]]), g[:6].reshape(2, 3)),
        lambda g: g34(g).scatter_add(1, torch.tensor([[3, 0], [1, 2]]), g[:6].reshape(2, 3)),
    ),
    "index_put": (
        lambda g: g34(g).index_put((torch.tensor([0, 2]), torch.tensor([1])), g[:2]),
        lambda g: g34(g).index_put((torch.tensor([0, 2]), torch.tensor([1])), g[:2], accumulate=True),
    ),
    "_unsafe_index_put": (
        lambda g: aten._unsafe_index_put(g34(g), [torch.tensor([0, 2])], g[:4]),
        lambda g: aten._unsafe_index_put(g34(g), [torch.tensor([0, 2])], g[:4], True),
    ),
}  # fmt: skip
"""Of these what the dense matrix of the second holds, which is at least what the first needs."""


def of(backward: Map) -> Map:
    """A function to twelve numbers, whose gradient is what the backward gives."""

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.new_zeros(12)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return flat(backward(g))

    return Through.apply


def flat(result: Any) -> Tensor:
    return torch.cat([part.reshape(-1) for part in ([result] if isinstance(result, Tensor) else result)])


def matrix(f: Map) -> Tensor:
    """Which entries the matrix of derivatives holds, by differences at three points."""
    held = torch.zeros(len(flat(f(POINTS[0]))), 12, dtype=torch.bool)
    for g in POINTS:
        slopes = [flat(f(g + 1e-4 * e)) - flat(f(g - 1e-4 * e)) for e in torch.eye(12, dtype=D)]
        held |= torch.stack(slopes, 1).abs() > 1e-10
    return held


@pytest.mark.parametrize("name", [*LINEAR, *LIKE])
def test_what_the_operator_couples_and_no_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backward, couples = LIKE.get(name) or (LINEAR[name], LINEAR[name])
    find, answers = _rules.find, {}

    def noted(function: Any) -> Any:
        rule = find(function)
        return rule and (lambda op: answers.setdefault(op.name, rule(op)))

    monkeypatch.setattr(_rules, "find", noted)
    expected = matrix(couples)
    pattern = sparsity_pattern(of(backward), torch.zeros(len(expected), dtype=D), order=1)
    assert not (matrix(backward) & ~expected).any()
    assert torch.equal(pattern.to_torch().to_dense().T.bool(), expected)
    assert pattern.without_rule == ()
    assert answers[name.partition(" ")[0]] is not None
