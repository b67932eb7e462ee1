"""One small function for each rule, of x with shape (5, 3) and entries in (0.5, 2)."""

import torch
import torch.nn.functional as F

D = torch.float64
EYE = torch.eye(3, dtype=D)


def spd(x):
    return x.T @ x + EYE


def words(text):
    return text.split()


UNARY = {
    **{
        name: getattr(torch, name)
        for name in words(
            "tanh sigmoid exp exp2 expm1 sin cos sinh cosh square sqrt rsqrt reciprocal log log2 log10 "
            "log1p atan asinh erf erfc lgamma digamma abs nan_to_num"
        )
    },
    "tan": lambda x: torch.tan(0.3 * x),
    "atanh": lambda x: torch.atanh(0.2 * x),
    "asin": lambda x: torch.asin(0.2 * x),
    "acos": lambda x: torch.acos(0.2 * x),
    "acosh": lambda x: torch.acosh(x + 1),
    "ndtr": torch.special.ndtr,
    "log_ndtr": lambda x: torch.special.log_ndtr(3 * x - 4),
    "erfcx": lambda x: torch.special.erfcx(3 * x),
    "cube": lambda x: x**3,
    "power": lambda x: x**-1.5,
    "power 0": lambda x: x**0 * x.sin(),
    "power of zero": lambda x: (x - x.detach()) ** 3 + x,
    "tensor power": lambda x: x ** torch.tensor([2.0, 0.0, 1.5], dtype=D),
    "number to the power": lambda x: 2.5**x,
    "x to the x": lambda x: x**x,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    **{
        name: getattr(F, name)
        for name in words(
            "silu logsigmoid mish softsign tanhshrink hardswish relu leaky_relu hardtanh softshrink relu6"
        )
    },
    "softplus": lambda x: F.softplus(x, beta=2.0),
    "softplus, linear part": lambda x: F.softplus(x, beta=2.0, threshold=2.0),
    "elu": lambda x: F.elu(x - 1, alpha=0.7),
    "selu": lambda x: F.selu(x - 1),
    "celu": lambda x: F.celu(x - 1, alpha=0.5),
    "threshold": lambda x: F.threshold(x, 1.0, 0.3) * x,
    "hardshrink": lambda x: F.hardshrink(x - 1) * x,
    "logit": lambda x: torch.logit(x * 0.3),
    "frac": lambda x: torch.frac(x) * x,
}

OTHERS = {
    "sum with shapes": lambda x: x + x.sin()[:, :1] - 2 * x.sum(0),
    "rsub": lambda x: 1 - x * x,
    "sub, alpha": lambda x: torch.sub(x, x.sin(), alpha=3),
    "names of NumPy's": lambda x: torch.sum(x**3, axis=1, keepdims=True) * torch.cumsum(x, axis=0) + x.std(axis=0),
    "product": lambda x: x[:, :1] * x.sin() * 2,
    "product with itself": lambda x: x * x,
    "division": lambda x: x / (1 + x[:, :1]),
    "rdiv": lambda x: 1 / x,
    "division by a constant": lambda x: x.sin() / torch.arange(1, 4, dtype=D),
    "division, rounded to zero": lambda x: torch.div(x * 10 - 4, 3, rounding_mode="trunc") * x.square(),
    "matrix product": lambda x: x @ x.T,
    "stacked product": lambda x: x[:, None] @ x.sin()[:, :, None],
    "matrix vector": lambda x: x @ x[0],
    "vector matrix": lambda x: x[0] @ x.T,
    "inner product": lambda x: x[0] @ x[1],
    "inner product of matrices": lambda x: torch.inner(x[:2], x.sin()[:2]),
    "mm": lambda x: torch.mm(x, x.T),
    "outer": lambda x: torch.outer(x[0], x[1]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "einsum, implicit": lambda x: torch.einsum("ij,kj", x, x.sin()),
    "einsum, dots": lambda x: torch.einsum("...j,...j->...", x, x.sin()),
    "addmm": lambda x: torch.addmm(x[:3], x.T, x, beta=0.5, alpha=2),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None, :, :1], x[None, :1]),
    "addcmul": lambda x: torch.addcmul(x, x, x.sin(), value=2),
    "addcdiv": lambda x: torch.addcdiv(x, x.sin(), x, value=2),
    "lerp": lambda x: torch.lerp(x, x.sin(), 0.3),
    "linear": lambda x: F.linear(x, torch.arange(6, dtype=D).reshape(2, 3), torch.ones(2, dtype=D)).sin(),
    "linear, weights": lambda x: F.linear(x, x[:2].sin(), x[0, :2]),
    "cat": lambda x: torch.cat([x, x.sin(), torch.ones_like(x)], 1).square(),
    "stack": lambda x: torch.stack([x, x * x], 1),
    "index": lambda x: x[:, [0, 2]] * x[..., None, 1] * x[1:2, 0],
    "index, tensors apart": lambda x: x[None, torch.tensor([0, 1]), :, None][:, torch.tensor([1]), 0:2],
    "reshape": lambda x: x.sin().reshape(3, 5).flatten().view(-1, 3).unflatten(0, (5, 1)),
    "permute": lambda x: x[None].permute(2, 0, 1).sin().transpose(0, -1).mT * x.T.sum(),
    "movedim": lambda x: x[None].movedim(0, -1).squeeze(-1).unsqueeze(1).sin(),
    "expand": lambda x: x[:, :1].expand(5, 4).sin(),
    "split": lambda x: x.split([1, 2], 1)[1].sin() * x.chunk(3, 1)[2],
    "unbind": lambda x: x.unbind(1)[1] * x.select(1, 0).narrow(0, 0, 5),
    "unbind of rows": lambda x: torch.cat([row.square() for row in x.unbind()]),
    "gather": lambda x: x.gather(1, torch.tensor([[0, 1]] * 5)).sin() * x.index_select(1, torch.tensor([0, 2])),
    "cumsum": lambda x: x.square().cumsum(-1),
    "flip": lambda x: x.flip(0).sin().roll(1, 1),
    "repeat": lambda x: x.repeat(2, 1).sin().tile(1, 2).triu(),
    "pad": lambda x: F.pad(x, (1, 1)).cos(),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0].sin(),
    "mean": lambda x: x.sin().mean(-1, keepdim=True) * x.mean(),
    "conv": lambda x: F.conv1d(x[:, None], torch.ones(2, 1, 2, dtype=D)).sin(),
    "conv_transpose": lambda x: F.conv_transpose1d(x[:, None], torch.ones(1, 2, 2, dtype=D)).sin(),
    "interpolate": lambda x: F.interpolate(x[:, None], scale_factor=2.0, mode="linear").sin(),
    "avg_pool": lambda x: F.avg_pool1d(x[:, None], 2).sin(),
    "max_pool": lambda x: F.max_pool1d(x[:, None], 2).sin(),
    "embedding": lambda x: F.embedding(torch.tensor([[0, 2]]), x).sin(),
    "embedding by its other name": lambda x: torch.embedding(x, torch.tensor([[0, 2]])).sin(),
    "index_add": lambda x: torch.zeros(5, 3, dtype=D).index_add(0, torch.tensor([0, 0, 1, 1, 2]), x.sin()),
    "constants among linear arguments": lambda x: torch.hstack([x, torch.ones(5, 1, dtype=D)]).sin(),
    "index_add to a constant": lambda x: torch.ones(5, 3, dtype=D).index_add(0, torch.tensor([0, 0, 1, 1, 2]), x).sin(),
    "pad with a value": lambda x: F.pad(x, (1, 1), value=0.5).sin(),
    "mse with a target": lambda x: F.mse_loss(x, torch.ones_like(x)),
    "masked_fill": lambda x: x.sin().masked_fill(x > 1, 0.5),
    "where": lambda x: torch.where(x > 1, x.sin(), x.cos()),
    "maximum": lambda x: torch.maximum(x.sin(), x * 0.5) - torch.minimum(x, x.square()),
    "max": lambda x: x.max(-1)[0].sin() * x.amin(-1) + x.max(),
    "sort": lambda x: x.sort(-1)[0].sin() * x.topk(3)[0],
    "clamp": lambda x: x.clamp(0.8, 1.7) * x,
    "prelu of columns": lambda x: F.prelu(x - 1, torch.tensor([0.2, -0.3, 1.4], dtype=D)).sin(),
    "prelu": lambda x: F.prelu(x - 1, torch.tensor([0.2], dtype=D)).sin(),
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, 0),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "fft": lambda x: _parts(torch.fft.fft(x.exp(), dim=0)) * x,
    "rfft and irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x.sin(), norm="ortho") * WAVES[:, :2], n=3) * x,
    "fftn": lambda x: torch.fft.irfftn(torch.fft.rfftn(x * x), s=(5, 3)) * _parts(torch.fft.ifft2(x)),
    "hfft": lambda x: torch.fft.hfft(torch.complex(x, x.sin()), n=4) * _parts(torch.fft.ihfft(x))[:, :1],
    "fftshift": lambda x: torch.fft.fftshift(x.sin(), dim=1) * torch.fft.ifftshift(x),
    "spectral derivative": lambda x: torch.fft.ifft(1j * torch.arange(3) * torch.fft.fft(x**2)).real,
    "complex arithmetic": lambda x: _parts(_rational(torch.fft.fft(x))) * x,
    "complex and real": lambda x: (x.to(torch.complex128) * 1j * x.cdouble() + (x + 2j)).imag * x,
    "complex views": lambda x: torch.view_as_real(torch.fft.ifft(_as_complex(x))).sum(-1),
    "group_norm": lambda x: F.group_norm(x.repeat(1, 2), 2),
    "rms_norm": lambda x: F.rms_norm(x, (3,)),
    "batch_norm": lambda x: F.batch_norm(x.sin(), torch.zeros(3, dtype=D), torch.ones(3, dtype=D)),
    "norm": lambda x: x.norm(dim=-1) * torch.linalg.vector_norm(x, 3, -1) * torch.linalg.norm(x),
    "normalize": F.normalize,
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.sin()),
    "var": lambda x: x.var(-1) + x.std(),
    "glu": lambda x: F.glu(torch.cat([x, x], -1)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x.sin(), x.exp()),
    "attention, causal": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None].sin(), is_causal=True),
    "in place": lambda x: x.sin().mul_(x).add_(1),
    "augmented": lambda x: _augmented(x),
    "prod": lambda x: x.prod(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "solve": lambda x: torch.linalg.solve(spd(x), x.T),
    "slogdet": lambda x: torch.linalg.slogdet(spd(x))[1],
    "atan2": lambda x: torch.atan2(x, x.sin()),
    "hypot": lambda x: torch.hypot(x, x.sin()),
    "logaddexp": lambda x: torch.logaddexp(x, x.sin()),
    "i0": torch.special.i0,
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 0, 1])),
    "mse": lambda x: F.mse_loss(x, x.sin()),
}

# PyTorch's own are wrong at third order, weight_norm's at second.
# Checked against the definition, in `hodiff._core._substitutes`, and differences.
NORMS = {
    "layer_norm": lambda x: F.layer_norm(x, (3,), torch.tensor([1.0, 2.0, 0.5], dtype=D), torch.ones(3, dtype=D)),
    "instance_norm": lambda x: F.instance_norm(x[None].sin()),
    "weight_norm": lambda x: torch._weight_norm(x, x.exp()[:, :1], 0),
    "weight_norm, columns": lambda x: torch._weight_norm(x, x.exp()[:1], 1),
    "weight_norm of a constant": lambda x: torch._weight_norm(torch.ones(5, 3, dtype=D), x.exp()[:, :1], 0),
}


WAVES = torch.complex(torch.arange(15, dtype=D).reshape(5, 3) / 10, torch.ones(5, 3, dtype=D))


def _parts(z):
    return z.real * z.imag + z.imag


def _rational(z):
    """Sums, products and shapes that complex values may pass."""
    z = torch.cat([z[:, :1], -z[:, 1:].flip(1)], 1) * WAVES
    return (z @ z.mT / 20 + z.conj().mean()).sum(0)[:3] - 1 / (3 + z)


def _as_complex(x):
    return torch.view_as_complex(torch.stack([x, x * x], -1))


def _augmented(x):
    h = x.sin()
    h += x
    h *= 2
    return h
