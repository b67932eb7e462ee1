"""Wrong calls by public name: each is an error that says what was got, and what to do instead.

A row is the mistake, the call, words of the error, and its class where that is not `InputError`.
"""

import collections
import functools
import operator
import re
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.sparse import linalg as scipy_linalg
from torch import Tensor, nn
from torch.autograd import forward_ad

import hodiff
import hodiff.plotting
from hodiff import GraphError, HodiffError, InputError
from tests.support.modules import CubeOnce
from tests.support.releases import STEPS

D = torch.float64
torch.manual_seed(0)
x = torch.tensor([0.3, 0.7, 1.1], dtype=D)
X = torch.randn(5, 3, dtype=D)
v = torch.ones(3, dtype=D)
SIX = torch.linspace(-1, 1.5, 6, dtype=D)
PAIRS = SIX.reshape(3, 2)
W = torch.cos(torch.arange(6, dtype=D))
BIG = 2**70
"""Beyond what PyTorch takes."""
m = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
NAMED = nn.ModuleDict({"encoder": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
NET = nn.Linear(3, 2).double()
batch = (X, torch.randn(5, 1, dtype=D))
data = [batch]
LABELLED = [(torch.ones(4, 3, dtype=D), torch.zeros(4, 2, dtype=D))]
opt = torch.optim.SGD(m.parameters(), lr=0.1)
ONE_OF_TWO = {"a": SIX, "b": SIX[:2]}
Pair = collections.namedtuple("Pair", ["a", "b"])


def f(z):
    return (z**3).sum()


def g(z):
    return (z**3).sum(-1)


def vec(z):
    return z**2


def loss(model):
    return F.mse_loss(model(X), batch[1])


def lf(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def predict(model, batch):
    return model(batch[0])


def of_a(point):
    return f(point["a"])


def of_leaves(point):
    return sum(f(leaf) for leaf in (point.values() if isinstance(point, dict) else point))


def leaf(point):
    return point.clone().requires_grad_()


def at(call, point):
    return call(leaf(point))


def freed():
    return differentiated(loss(m))


def differentiated(value):
    value.backward()
    return value


def edits_what_it_saved(z):
    y = torch.exp(z)
    result = (y**2).sum()
    y.add_(1)
    return result


def endless(*entries):
    point = [*entries]
    point.append(point)
    return point


def deep(point):
    for _ in range(200):
        point = [point]
    return point


def tied():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False)).double()
    model[2].weight = model[0].weight
    return model


def quiet(function):
    """Without PyTorch's own warnings of what is a prototype, or on its way out."""

    @functools.wraps(function)
    def call(*args):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args)

    return call


@quiet
def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2, dtype=D), torch.ones(3, dtype=D)], layout=layout)


@quiet
def scripted():
    return torch.jit.script(nn.Linear(3, 1, dtype=D))


@quiet
def compiled_result():
    point = leaf(X)
    return hodiff.hvp(torch.compile(m, backend="aot_eager")(point).sin().sum(), point, torch.ones_like(X))


def with_a_tangent():
    with forward_ad.dual_level():
        return hodiff.grad(f, forward_ad.make_dual(X, torch.ones_like(X)))


H = hodiff.HessianOperator(f, x)
M = hodiff.MatrixOperator(torch.eye(3, dtype=D) * 2)

WRONG = {
    "FisherOperator": {
        "without kind": (lambda: hodiff.FisherOperator(predict, nn.MSELoss(), NET, data=LABELLED), "kind"),
        "Fisher, predict of the batch alone": (
            lambda: (
                hodiff.FisherOperator(lambda batch: NET(batch[0]), nn.MSELoss(), NET, data=LABELLED, kind="exact")
                @ torch.ones(8, dtype=D)
            ),
            "predict.*batch",
        ),
        "Fisher, a loss that is not a likelihood": (
            lambda: (
                hodiff.FisherOperator(predict, nn.HuberLoss(), NET, data=LABELLED, kind="exact")
                @ torch.ones(8, dtype=D)
            ),
            "HuberLoss",
        ),
    },
    "GaussNewtonOperator": {
        "Gauss-Newton, a functional loss": (
            lambda: hodiff.GaussNewtonOperator(predict, F.mse_loss, NET, data=LABELLED) @ torch.ones(8, dtype=D),
            "loss.*(batch|nn.MSELoss)",
        ),
        "Gauss-Newton, operands swapped": (
            lambda: hodiff.GaussNewtonOperator(nn.MSELoss(), predict, NET, data=LABELLED) @ torch.ones(8, dtype=D),
            "predict|loss",
        ),
        "Gauss-Newton, a functional loss in place of predict": (
            lambda: hodiff.GaussNewtonOperator(F.mse_loss, predict, NET, data=LABELLED),
            "the order is predict, loss, where",
        ),
        "Gauss-Newton, predict of the batch alone": (
            lambda: (
                hodiff.GaussNewtonOperator(lambda batch: NET(batch[0]), nn.MSELoss(), NET, data=LABELLED)
                @ torch.ones(8, dtype=D)
            ),
            "predict.*batch",
        ),
    },
    "HessianOperator": {
        "HessianOperator(m, loss) swapped": (
            lambda: hodiff.HessianOperator(m, loss) @ torch.ones(21),
            r"x: got a function",
        ),
        "HessianOperator(loss(m), m) graph freed": (
            lambda: hodiff.HessianOperator(freed(), m) @ torch.ones(21, dtype=D),
            r"the graph has already been freed: a backward\(\) or autograd\.grad\(\) without r",
            GraphError,
        ),
        "data=DataLoader iterator": (
            lambda: hodiff.HessianOperator(lf, m, data=iter(data)) @ torch.ones(21, dtype=D),
            r"data: got a one-shot iterator \(list_iterator\), so the second product would see ",
        ),
        "data=tensor": (lambda: hodiff.HessianOperator(lf, m, data=X) @ torch.ones(21, dtype=D), r"data: got a Tensor"),
        "f(m) with data": (
            lambda: hodiff.HessianOperator(loss, m, data=data) @ torch.ones(21, dtype=D),
            r"f is called as f\(where, batch\) with data=, once for each batch",
        ),
        "data= that is a number of NumPy": (
            lambda: hodiff.HessianOperator(lambda z, b: (z**3).sum(), X, data=np.float64(1.5)),
            "data: got a NumPy float64",
        ),
    },
    "JacobianOperator": {
        "Jacobian @ wrong side": (
            lambda: hodiff.JacobianOperator(lambda z: torch.cat([z, z]), x) @ torch.ones(6, dtype=D),
            r"v has shape \(6,\)",
        ),
    },
    "LevenbergMarquardt": {
        "LM(loss, parameters())": (
            lambda: hodiff.LevenbergMarquardt(lambda mod, b: mod(b[0]) - b[1], m.parameters()),
            r"where is a generator \(model\.parameters\(\)\?\)",
        ),
        "LM scalar loss": (lambda: hodiff.LevenbergMarquardt(lf, m).step(batch), r"residuals\[0\] returned shape \(\)"),
        "LM step(closure)": (
            lambda: hodiff.LevenbergMarquardt(lambda mod, b: (mod(b[0]) - b[1])[:, 0], m).step(lambda: 1),
            r"step: got a closure",
        ),
        "LM step() without its batch": (
            lambda: hodiff.LevenbergMarquardt(lambda mod, b: (mod(b[0]) - b[1])[:, 0], m).step(),
            r"residuals\[0\] is called as residuals\[0\]\(where\) in step\(\), which its signature \(mod, b\)",
        ),
    },
    "LinearOperator": {
        "H + 'x'": (lambda: H + "0.1", r"operator \+ a str: expected a number or an operator"),
        "H[0, 0]": (
            lambda: hodiff.HessianOperator(f, x)[0, 0],
            r"HessianOperator\(3 x 3, float64, double backward, not evaluated\) cannot be in",
        ),
        "an operator for a function": (lambda: H(v), r"not a function or a number: write H @ v for a product"),
        "a power of an operator": (lambda: H**2, r"H @ H for a power"),
        "an inverse of an operator": (lambda: 1 / H, r"hodiff\.solve\(H, b\) for its inverse times b"),
        "a number of an operator": (lambda: float(H), r"not a function or a number"),
        "SciPy's H.toarray()": (
            lambda: H.toarray(),
            r"^a HessianOperator has no attribute 'toarray': .*H\.dense\(\)",
            HodiffError,
        ),
        "PyTorch's H.inverse()": (
            lambda: M.inverse(),
            r"no attribute 'inverse': write hodiff\.solve\(H, b\)",
            HodiffError,
        ),
        "H.eigenvalues()": (
            lambda: H.eigenvalues(),
            r"no attribute 'eigenvalues': write hodiff\.eigsh\(H, k\)",
            HodiffError,
        ),
        "H.anything": (
            lambda: H.anything,
            r"no attribute 'anything': write H @ v for a product; hodiff\.eigsh",
            HodiffError,
        ),
        "a matrix without a function": (
            lambda: M.value,
            r"no attribute 'value': only the Hessian and Gauss-Newton",
            HodiffError,
        ),
        "SciPy's cg": (lambda: scipy_linalg.cg(M, v.numpy()), r"Give SciPy's routines H\.to_scipy\(\)", TypeError),
        "SciPy's own operator": (lambda: scipy_linalg.aslinearoperator(H), r"H\.to_scipy\(\)", TypeError),
        "a length": (lambda: len(H), r"^a HessianOperator has no length: its size is H\.shape\.$", TypeError),
        "torch.tensor of an operator": (lambda: torch.tensor(M), r"its size is H\.shape", TypeError),
        "a loop over an operator": (lambda: list(H), r"cannot be indexed: .*Its matrix is H\.dense\(\)"),
        "a row of an operator": (lambda: H[0], r"cannot be indexed: .*Its matrix is H\.dense\(\)"),
        "an entry of an operator": (lambda: H[0, 1], r"cannot be indexed: .*Its matrix is H\.dense\(\)"),
    },
    "MatrixOperator": {
        "MatrixOperator(list)": (lambda: hodiff.MatrixOperator([[1.0, 2.0], [3.0, 4.0]]), r"A: got a list of 2"),
        "MatrixOperator(numpy)": (lambda: hodiff.MatrixOperator(np.eye(3)), r"A: got a NumPy array"),
        "3-D": (
            lambda: hodiff.MatrixOperator(torch.randn(2, 3, 3)),
            r"A: got torch\.strided, torch\.float32 of shape \(2, 3, 3\)",
        ),
        "a vector in itself": (
            lambda: hodiff.MatrixOperator(torch.eye(3)) @ endless(),
            "v: containers are nested more than",
        ),
        "a nested matrix": (lambda: hodiff.MatrixOperator(nested(torch.strided)), r"A: got a nested tensor"),
        "a view of one number": (
            lambda: hodiff.MatrixOperator(torch.ones((), dtype=D).expand(10**6, 10**6)),
            r"A is an expanded view of shape .* 7,451 GiB",
        ),
    },
    "PathLengthPenalty": {
        "an array for a flag": (
            lambda: hodiff.PathLengthPenalty()(lambda w: w[:, :, None] ** 2, X, return_outputs=np.ones(2)),
            "return_outputs: got a NumPy array, expected True or False",
        ),
    },
    "Selection": {
        "names that are a number": (
            lambda: hodiff.Selection(nn.Linear(2, 1), 3),
            r"names: got an int, .* hodiff\.select",
        ),
    },
    "biharmonic": {
        "a sum over the batch": (
            lambda: hodiff.biharmonic(f, X),
            r"f returned shape \(\); with batch_ndim=1 the shape must begin with \(5,\)",
        ),
    },
    "check_derivatives": {
        "check_derivatives(f(x), x)": (
            lambda: hodiff.check_derivatives(f(x.clone().requires_grad_()), x),
            r"f: check_derivatives evaluates f at many points",
        ),
        "a seed for a generator": (lambda: hodiff.check_derivatives(f, X, generator=7), "generator: got an int"),
    },
    "compile_step": {
        "a step for its value": (
            lambda: hodiff.compile_step(loss, m, backend="replay").backward(),
            r"a CompiledStep has no attribute 'backward': value = step\(\*batch\) is the loss",
            HodiffError,
        ),
    },
    "cross_hessian": {
        "of one argument": (
            lambda: hodiff.cross_hessian(lambda p: (p[0] * p[1]).sum(), x, x),
            r"two arguments|f\(x, y\)",
        ),
        "batch_ndim=1.5": (
            lambda: hodiff.cross_hessian(lambda a, b: f(a) + f(b), X, X, batch_ndim=1.5),
            r"batch_ndim: got 1\.5, expected an integer",
        ),
    },
    "cross_hvp": {
        "one-arg f": (
            lambda: hodiff.cross_hvp(f, x, x, v),
            r"f cannot be called with the 2 positional arguments it is given here: ",
        ),
        "a sparse vector": (
            lambda: hodiff.cross_hvp(
                lambda a, b: (a * b).sum(), torch.ones(3), torch.ones(3), torch.eye(3).to_sparse()
            ),
            r"v: got a torch\.sparse_coo tensor; give a dense one",
        ),
    },
    "curl": {
        "points of four coordinates": (
            lambda: hodiff.curl(lambda z: z, torch.ones(5, 4, dtype=D)),
            r"x: points have shape \(4,\); a curl needs \(2,\) or \(3,\)\.",
        ),
    },
    "curvature_penalty": {
        "a mean over the batch": (
            lambda: hodiff.curvature_penalty(lambda z: g(z).mean(), X),
            r"f returned shape \(\) .*Return one number per sample, not reduced over the batch",
        ),
    },
    "derivatives": {
        "a function that drops an entry": (lambda: hodiff.derivatives(lambda t: t[:-1], SIX, 2), r"shape|elementwise"),
        "an order beyond 64 bits": (
            lambda: hodiff.derivatives(torch.sin, X, 2**70),
            f"n: got {2**70}, expected an integer of at most 64 bits",
        ),
    },
    "derivatives_of": {
        "point without grad": (
            lambda: hodiff.derivatives_of(m(X), X)[0],
            r"x does not require grad, so f was computed without tracking it",
            GraphError,
        ),
        "['x']": (lambda: at(lambda z: hodiff.derivatives_of(m(z), z)["x"], X), r"index: got 'x'"),
    },
    "diagonal": {
        "sparse vectors": (
            lambda: hodiff.diagonal(hodiff.MatrixOperator(torch.eye(3)), vectors=torch.eye(3).to_sparse()),
            r"vectors: got a torch\.sparse_coo tensor; give a dense one",
        ),
    },
    "divergence": {
        "of scalar": (lambda: hodiff.divergence(g, X), r"f returned shape \(5,\) for x of shape \(5, 3\)"),
    },
    "dragan_penalty": {
        "a seed for a generator": (lambda: hodiff.dragan_penalty(g, X, generator=7), "generator: got an int"),
    },
    "eigsh": {
        "eigsh(H, 'largest')": (lambda: hodiff.eigsh(H, "largest"), r"k: got 'largest'"),
        "which='LM'": (lambda: hodiff.eigsh(H, 2, which="LM"), r"which: got 'LM'"),
        "a length of a record": (lambda: len(hodiff.eigsh(M, 2)), r"no length: it is a record with fields", TypeError),
    },
    "eikonal_penalty": {
        "a field of vectors": (
            lambda: hodiff.eikonal_penalty(lambda z: z, X),
            r"f returned shape \(5, 3\), expected one element per sample: \(5,\)",
        ),
    },
    "grad": {
        "grad(x, f)": (lambda: hodiff.grad(x, f), r"x: got a function"),
        "grad(f)(x) as torch.func": (lambda: hodiff.grad(f)(x), r"missing 1 .*'x'\. hodiff returns values"),
        "grad(model, X) for a module f": (lambda: hodiff.grad(m, X), r"f returned shape \(5, 1\)"),
        "grad(loss, model.parameters())": (
            lambda: hodiff.grad(loss, m.parameters()),
            r"x is a generator \(model\.parameters\(\)\?\)",
        ),
        "grad(loss, list(parameters)) loss ignores arg": (
            lambda: hodiff.grad(lambda p: loss(m), list(m.parameters())),
            r"f reaches x\[0\] other than through its argument, and that path would be missi",
            GraphError,
        ),
        "grad(loss, optimizer)": (
            lambda: hodiff.grad(loss, opt),
            r"x: got an SGD, expected a tensor, a container of tensors \(tuple, list, dict, ",
        ),
        "grad(loss(m), m) detached": (
            lambda: hodiff.grad(loss(m).detach(), m),
            r"f carries no graph: every path from 0\.weight, 0\.bias, 2\.weight, 2\.bias to the resu",
            GraphError,
        ),
        "grad('loss', m)": (lambda: hodiff.grad("loss", m), r"f: got a str"),
        "f uses .numpy()": (
            lambda: hodiff.grad(lambda z: torch.tensor(np.sin(z.detach().numpy())).sum(), x),
            r"(?s)carries no graph.*cut at.*torch\.stack",
            GraphError,
        ),
        "f under no_grad": (
            lambda: hodiff.grad(torch.no_grad()(f), x),
            r"(?s)carries no graph.*switched off \(no_grad.*enable_grad",
            GraphError,
        ),
        "args=tensor instead of tuple": (
            lambda: hodiff.grad(lambda z, t: (z * t).sum(), x, args=v),
            r"args: got a Tensor",
        ),
        "kwargs={'t'} a set": (lambda: hodiff.grad(lambda z, t=1: f(z), x, kwargs={"t"}), r"kwargs: got a set"),
        "point numpy array": (lambda: hodiff.grad(f, np.ones(3)), r"x: got a NumPy"),
        "point list of floats": (lambda: hodiff.grad(f, [0.1, 0.2]), r"x\[0\]: got the float 0\.1"),
        "point nn class": (lambda: hodiff.grad(loss, nn.Linear), r"x: got the class Linear"),
        "point generator": (
            lambda: hodiff.grad(lambda d: sum(t.sum() for t in d), (t for t in [x])),
            r"x is a generator \(model\.parameters\(\)\?\)",
        ),
        "f without a return": (
            lambda: hodiff.grad(lambda x: None, x),
            r"a tensor\. Does it end without a return statement\?$",
        ),
        "tensor form without requires_grad": (
            lambda: hodiff.grad(f(x), x),
            r"x does not require grad, so f was computed without tracking it",
            GraphError,
        ),
        "tensor form x twice": (
            lambda: at(lambda z: hodiff.grad(f(z), (z, z)), x),
            r"x\[1\]: the same tensor is given twice",
        ),
        "f detaches": (
            lambda: hodiff.grad(lambda z: f(z.detach()), x),
            r"(?s)carries no graph.*drop the detach",
            GraphError,
        ),
        "f of global x": (
            lambda: hodiff.grad(lambda z: f(x), x),
            r"no operation in f was given x: compute with f's argument",
            GraphError,
        ),
        "complex point": (
            lambda: hodiff.grad(lambda z: z.abs().sum(), torch.ones(2, dtype=torch.complex64)),
            r"x is complex \(torch\.complex64\)",
        ),
        "has_aux but f returns one": (lambda: hodiff.grad(f, x, has_aux=True), r"f returned a single tensor"),
        "an option of torch.func": (
            lambda: hodiff.grad(f, x, argnums=1),
            "unexpected keyword argument 'argnums'",
            TypeError,
        ),
        "an option of PyTorch": (
            lambda: hodiff.grad(f, x, retain_graph=True),
            "unexpected keyword argument 'retain_graph'",
            TypeError,
        ),
        "two points": (
            lambda: hodiff.grad(lambda a, b: (a * b).sum(), x, x),
            "2 positional arguments but 3 were given",
            TypeError,
        ),
        "retain_graph": (lambda: hodiff.grad(lambda z: z.sum(), x, retain_graph=True), "retain_graph", TypeError),
        "an output of each entry, with batch_ndim=1": (
            lambda: hodiff.grad(lambda t: t**2, PAIRS, batch_ndim=1),
            r"batch_ndim.*\(3, 2\)|\(3, 2\).*batch_ndim",
        ),
        "a scalar, with batch_ndim=1": (lambda: hodiff.grad(lambda t: t.sum(), PAIRS, batch_ndim=1), r"batch"),
        "batch_ndim=3 of two dimensions": (
            lambda: hodiff.grad(lambda t: t.sum(-1), PAIRS, batch_ndim=3),
            r"batch_ndim",
        ),
        "a module without parameters": (lambda: hodiff.grad(lambda m: m(X).sum(), nn.Tanh()), r"parameter"),
        "strict, and f reads one of two entries": (
            lambda: hodiff.grad(of_a, ONE_OF_TWO, strict=True),
            r"depend.*\bb\b|\bb\b.*depend",
            GraphError,
        ),
        "strict, and a parameter is not used": (
            lambda: hodiff.grad(
                lambda m: m[0](X).sin().sum(), nn.ModuleList([nn.Linear(3, 1), nn.Linear(1, 1)]).double(), strict=True
            ),
            r"1\.weight",
            GraphError,
        ),
        "a list of parameters beside the module": (
            lambda: hodiff.grad(lambda p: m(X).sum(), list(m.parameters())),
            r"argument",
            GraphError,
        ),
        "a tensor of f is changed in place": (lambda: hodiff.grad(edits_what_it_saved, SIX), r"in-?place", GraphError),
        "args= with a tensor": (lambda: at(lambda z: hodiff.grad(f(z), z, args=(1,)), SIX), r"args"),
        "kwargs= with a tensor": (lambda: at(lambda z: hodiff.grad(f(z), z, kwargs={"a": 1}), SIX), r"kwargs"),
        "args= that is the tensor itself": (
            lambda: hodiff.grad(lambda z, a: (z * a).sum(), SIX, args=SIX),
            r"args.*tuple",
        ),
        "kwargs= that is a list": (lambda: hodiff.grad(lambda z, a: (z * a).sum(), SIX, kwargs=[1]), r"kwargs"),
        "a tangent of forward mode": (lambda: with_a_tangent(), r"tangent .* hodiff\.jvp"),
        "a scripted layer of the module": (
            lambda: hodiff.grad(lambda m: m(X).sum(), nn.Sequential(scripted(), nn.Linear(1, 1, dtype=D))),
            r"^0 is a TorchScript module, .* eager module",
        ),
        "a frozen layer": (
            lambda: hodiff.grad(lambda m: m(X).sum(), nn.Linear(3, 1, dtype=D).requires_grad_(False)),
            r"no trainable parameter .* requires_grad_\(True\)",
        ),
        "a point in itself": (lambda: hodiff.grad(lambda z: X.sum(), endless(X)), "x: containers are nested more than"),
        "a point 200 lists deep": (
            lambda: hodiff.grad(lambda z: X.sum(), deep(X)),
            "x: containers are nested more than",
        ),
        "a float of eight bits": (
            lambda: hodiff.grad(lambda z: z.float().sum(), torch.ones(3).to(torch.float8_e4m3fn)),
            r"x has dtype torch\.float8_e4m3fn, a storage-only dtype",
        ),
    },
    "gradient_norm_penalty": {
        "f and its point swapped": (
            lambda: hodiff.gradient_norm_penalty(m, loss),
            r"x: got a function; the function comes first",
        ),
    },
    "gradient_penalty": {
        "gradient_penalty(x, f)": (
            lambda: hodiff.gradient_penalty(X, m),
            r"2\.weight has batch shape \(1,\), but 0\.weight has \(4,\)",
        ),
        "a penalty of a critic that takes labels, without them": (
            lambda: hodiff.gradient_penalty(lambda x, labels: (x * labels).sum(-1), torch.ones(3, 2)),
            "f cannot be called with the 1 positional argument.*'labels'.*args=",
        ),
        "a penalty, samples and critic swapped": (
            lambda: hodiff.gradient_penalty(torch.ones(3, 2), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))),
            "The function comes first and the samples second",
        ),
    },
    "hessian": {
        "point int tensor": (
            lambda: hodiff.hessian(f, torch.tensor([1, 2, 3])),
            r"x has dtype torch\.int64; derivatives need a real floating-point tensor",
        ),
        "batch_ndim=3": (lambda: hodiff.hessian(g, X, batch_ndim=3), r"x has shape \(5, 3\)"),
        "meta point": (
            lambda: hodiff.hessian(f, torch.ones(3, device="meta")),
            r"x is on the meta device, whose tensors hold no numbers",
        ),
        "of two arguments": (
            lambda: hodiff.hessian(lambda a, b: (a * b).sum(), (x, x)),
            r"one argument|tuple|f\(\(|unpack",
        ),
        "a dense Hessian of 160 GB": (
            lambda: hodiff.hessian(lambda z: (z**3).sum(), torch.ones(200_000)),
            "GB|GiB|HessianOperator|memory",
        ),
        "batch_ndim=2 of several outputs": (
            lambda: hodiff.hessian(lambda z: z, torch.ones(2, 2, 3, dtype=D), batch_ndim=2),
            "jacobian|sum|one output",
        ),
        "strict, and f reads one of two entries": (
            lambda: hodiff.hessian(of_a, ONE_OF_TWO, strict=True),
            r"depend.*\bb\b|\bb\b.*depend",
            GraphError,
        ),
        "several outputs of each sample": (
            lambda: hodiff.hessian(lambda z: z**2, PAIRS[None], batch_ndim=2),
            r"f\(x\)\[\.\.\., 0\].*hodiff\.jacobian\(f, x, batch_ndim=2\)",
        ),
        "a sum over the batch": (
            lambda: hodiff.hessian(lambda z: z.sum(), PAIRS[None], batch_ndim=2),
            "not reduced over the batch",
        ),
        "batch_ndim=1.5": (lambda: hodiff.hessian(f, X, batch_ndim=1.5), r"batch_ndim: got 1\.5, expected an integer"),
    },
    "hessian_penalty": {
        "generator=np": (
            lambda: hodiff.hessian_penalty(g, X, generator=np.random.default_rng(0)),
            r"generator: got a NumPy Generator",
        ),
        "a keyword that is a number": (
            lambda: hodiff.hessian_penalty(g, X, kwargs={1: X}),
            "kwargs: got an int as a key, expected names of arguments",
        ),
    },
    "hvp": {
        "v wrong shape": (lambda: hodiff.hvp(f, x, torch.ones(4, dtype=D)), r"v has shape \(4,\)"),
        "module v is module": (lambda: hodiff.hvp(loss, m, m), r"v: got a Sequential"),
        "module v dict missing key": (
            lambda: hodiff.hvp(loss, m, {"0.weight": torch.ones(4, 3, dtype=D)}),
            r"v has a dict with keys \['0\.weight'\]",
        ),
        "allow='relu'": (lambda: hodiff.hvp(f, x, v, allow=3), r"allow: got an int"),
        "a forgotten vector": (lambda: hodiff.hvp(f, x), "missing 1 required positional argument: 'v'", TypeError),
        "a vector that lacks a parameter": (
            lambda: hodiff.hvp(loss, m, {n: p.detach() for n, p in m.named_parameters() if n != "2.bias"}),
            r"2\.bias",
        ),
        "a list of too few for the parameters": (
            lambda: hodiff.hvp(loss, m, [p.detach() for p in m.parameters()][1:]),
            r"dict|name|structure",
        ),
        "a vector with a tied parameter by both names": (
            lambda: hodiff.hvp(
                lambda m: m(torch.ones(1, 2, dtype=D)).sin().sum(),
                tied(),
                dict.fromkeys(["0.weight", "2.weight"], torch.ones(2, 2, dtype=D)),
            ),
            r"2\.weight",
        ),
        "strict, and f reads one of two entries": (
            lambda: hodiff.hvp(of_a, ONE_OF_TWO, {"a": W, "b": W[:2]}, strict=True),
            r"depend.*\bb\b|\bb\b.*depend",
            GraphError,
        ),
        "a list of parameters beside the module": (
            lambda: hodiff.hvp(lambda p: m(X).sum(), list(m.parameters()), [p.detach() for p in m.parameters()]),
            r"argument",
            GraphError,
        ),
        "a compiled module's result": (lambda: compiled_result(), r"compile", GraphError),
        "an operation differentiable once": (
            lambda: hodiff.hvp(lambda z: CubeOnce.apply(z).sum(), SIX, W, allow=("Other",)),
            r"CubeOnce",
            GraphError,
        ),
        "a nested vector": (
            lambda: hodiff.hvp(f, X, nested(torch.strided)),
            "v: got a nested tensor; give a dense one",
        ),
    },
    "interpolate": {
        "interpolate, a feature mismatch": (
            lambda: hodiff.interpolate(torch.ones(4, 3), torch.ones(4, 5)),
            r"^(?!.*\[:n\]).*\(4, 5\)",
        ),
        "a seed for a generator": (lambda: hodiff.interpolate(X, X, generator=7), "generator: got an int"),
    },
    "jacobian": {
        "a parameter beside its module": (
            lambda: hodiff.jacobian(lambda w: m(X), m[0].weight),
            r"argument",
            GraphError,
        ),
    },
    "jet": {
        "series shapes": (lambda: hodiff.jet(torch.sin, x, [v[:2]]), r"series: got \(\(2,\), torch\.float64\)"),
        "primals that are None": (
            lambda: hodiff.jet(torch.sin, None, [X]),
            "primals: got None, expected a tensor, or a tuple",
        ),
        "a series that is a number": (
            lambda: hodiff.jet(torch.sin, (X,), 3),
            "series: got an int, expected a list of tensors",
        ),
    },
    "laplacian": {
        "point string": (lambda: hodiff.laplacian(g, "X"), r"x: got a str"),
        "of a 1-D point without batch_ndim=0": (lambda: hodiff.laplacian(f, x), r"f returned shape \(\)"),
    },
    "logdet": {
        "indefinite": (
            lambda: hodiff.logdet(hodiff.MatrixOperator(torch.diag(torch.tensor([1.0, -1.0])))),
            r"logdet: the operator has an eigenvalue of about -1",
        ),
    },
    "multi_grad": {
        "multi_grad(loss, m)": (lambda: hodiff.multi_grad(loss(m), m), r"losses: got a Tensor"),
    },
    "nth_derivative": {
        "n=-1": (lambda: hodiff.nth_derivative(torch.sin, x, -1), r"n: got -1"),
        "nth_derivative(2, f, x)": (lambda: hodiff.nth_derivative(2, torch.sin, x), r"n: got a Tensor"),
        "of scalar loss": (lambda: hodiff.nth_derivative(f, x, 2), r"f returned shape \(\) for x of shape \(3,\)"),
        "a scalar function": (lambda: hodiff.nth_derivative(f, SIX, 2), r"shape|elementwise"),
        "a dict for a point": (lambda: hodiff.nth_derivative(lambda t: t["a"], {"a": SIX}, 2), r"tensor"),
    },
    "nystrom": {
        "a rank of 0": (lambda: hodiff.nystrom(M, 0, 1.0), r"rank: got 0, expected an integer"),
    },
    "partial": {
        "index out of range": (lambda: hodiff.partial(g, X, 3), r"index: got 3, but x has coordinates 0 to 2\."),
        "index word": (lambda: hodiff.partial(g, X, "xx"), r"index: got 'xx'"),
        "index float": (lambda: hodiff.partial(g, X, 1.0), r"index: got 1\.0"),
    },
    "partials": {
        "an index beyond the last": (
            lambda: hodiff.partials(g, X, [0, 3]),
            r"index: got 3, but x has coordinates 0 to 2\.",
        ),
    },
    "gram": {
        "gram, a number of samples": (lambda: hodiff.gram(lf, m, 5), r"batch: got an int, expected"),
        "gram of a mean": (lambda: hodiff.gram(lf, m, batch), r"f returned shape \(\)"),
        "gram of all pairs": (
            lambda: hodiff.gram(lambda m, b: m(b[0]) - b[0][:, 0], m, batch),
            r"every sample is combined with every other",
        ),
    },
    "per_sample_grad": {
        "per_sample_grad, a number of samples": (
            lambda: hodiff.per_sample_grad(lf, m, 5),
            r"batch: got an int, expected",
        ),
        "mean loss": (lambda: hodiff.per_sample_grad(lf, m, batch), r"f returned shape \(\)"),
    },
    "r1_penalty": {
        "critic and samples swapped": (
            lambda: hodiff.r1_penalty(X, m),
            r"The function comes first and the samples second",
        ),
    },
    "r2_penalty": {
        "critic and samples swapped": (
            lambda: hodiff.r2_penalty(X, m),
            r"The function comes first and the samples second",
        ),
    },
    "sample_norm": {
        "of a float": (lambda: hodiff.sample_norm(1.0), r"grads: got the float 1\.0"),
    },
    "second_order_operator": {
        "C wrong": (lambda: hodiff.second_order_operator(g, X, torch.eye(2, dtype=D)), r"C has shape \(2, 2\)"),
        "C float32": (
            lambda: hodiff.second_order_operator(g, X, torch.eye(3)),
            r"C is torch\.float32 on cpu, but x is torch\.float64 on cpu",
        ),
    },
    "select": {
        "typo": (
            lambda: hodiff.select(m, "0.wieght"),
            r"(?s)pattern '0\.wieght' matches no parameter of Sequential.*0\.weight",
        ),
        "a selection for its module": (lambda: hodiff.select(m, "*")(X), r"call its \.module, .*part\.module\(x\)"),
        "a name misspelt": (lambda: hodiff.select(NAMED, "haed"), r"haed.*head"),
        "a name by another case": (lambda: hodiff.select(NAMED, "Head.*"), r"Head"),
        "frozen parameters alone": (
            lambda: hodiff.select(nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 1)), "0.*"),
            r"frozen|requires_grad",
        ),
        "all that was chosen is excluded": (lambda: hodiff.select(m, "0.*", exclude="0.*"), r"exclude"),
        "a tensor for a module": (lambda: hodiff.select(SIX, "0.*"), r"module"),
        "nothing matches what is excluded": (lambda: hodiff.select(m, "0.*", exclude="nothing"), r"nothing"),
        "a number for a pattern": (lambda: hodiff.select(nn.Linear(2, 1), 3), r"got an int, expected strings"),
        "a number among what is excluded": (
            lambda: hodiff.select(nn.Linear(2, 1), exclude=["bias", 3]),
            r"got an int, expected strings",
        ),
    },
    "sliced_score_matching_loss": {
        "score of scalar": (lambda: hodiff.sliced_score_matching_loss(g, X), r"f\(x\) has shape \(5,\)"),
    },
    "solve": {
        "solve(b, H)": (lambda: hodiff.solve(v, H), r"solve: got a tensor"),
        "method='lu'": (lambda: hodiff.solve(M, v, method="lu"), r"method: got 'lu'"),
        "preconditioner=tensor": (
            lambda: hodiff.solve(M, v, preconditioner=torch.eye(3, dtype=D)),
            r"preconditioner: got a tensor",
        ),
        "solve(...) @ x": (
            lambda: hodiff.solve(M, v) * 2,
            r"a SolveRecord is not a number: it is a record with fields \.value, \.residual, \.converged, \.",
        ),
        "a function for an operator": (
            lambda: hodiff.solve(f, x, v),
            "2 positional arguments but 3 were given",
            TypeError,
        ),
        "damping beyond 64 bits": (
            lambda: hodiff.solve(hodiff.MatrixOperator(torch.eye(2)), torch.ones(2), damping=2**70),
            "damping: got",
        ),
    },
    "sparse_jacobian": {
        "pattern list": (lambda: hodiff.sparse_jacobian(vec, x, pattern=[[1, 0, 0]]), r"pattern: got a list"),
    },
    "trace": {
        "MatrixOperator non-square trace": (
            lambda: hodiff.trace(hodiff.MatrixOperator(torch.randn(3, 2))),
            r"trace: the operator is 3 x 2, expected a square one \(J\.T @ J\?\)\.",
        ),
        "float(trace record)": (
            lambda: float(hodiff.trace(M)),
            r"a TraceRecord is not a number: it is a record with fields \.value, \.stderr, \.converged, \.pr",
        ),
        "samples=1.5": (lambda: hodiff.trace(M, samples=1.5), r"samples: got 1\.5"),
        "generator=seed": (lambda: hodiff.trace(M, samples=1, generator=0), r"generator: got an int"),
        "progress= by a word": (lambda: hodiff.trace(H, progress="no"), r"progress: .*'no'"),
        "record.item()": (
            lambda: hodiff.trace(M).item(),
            r"a TraceRecord has no attribute 'item': it is a record with",
            HodiffError,
        ),
        "a format for a record": (
            lambda: f"{hodiff.trace(M):.3f}",
            r"a TraceRecord has no format '\.3f': it is a record",
        ),
        "an estimate that equals a number": (
            lambda: hodiff.trace(H, samples=9) == 6.0,
            r"a TraceRecord is not a number",
        ),
    },
    "unroll": {
        "rule class": (lambda: hodiff.unroll(f, x, hodiff.rules.SGD, 3), r"rule: got the class SGD, not an instance"),
    },
    "value_and_divergence": {
        "a number for each point": (
            lambda: hodiff.value_and_divergence(g, X),
            r"f returned shape \(5,\) for x of shape \(5, 3\); value_and_divergence needs a vector field",
        ),
    },
    "value_grad_and_laplacian": {
        "a sum over the batch": (
            lambda: hodiff.value_grad_and_laplacian(f, X),
            r"f returned shape \(\); with batch_ndim=1 the shape must begin with \(5,\)",
        ),
    },
    "vjp": {
        "u missing shape": (lambda: hodiff.vjp(vec, x, torch.tensor(1.0, dtype=D)), r"u has shape \(\)"),
    },
    "wgan_gp_penalty": {
        "wgan_gp(real, fake, critic)": (
            lambda: hodiff.wgan_gp_penalty(X, X, m),
            r"fake: got the module Sequential, expected a tensor",
        ),
    },
    "graph.explain": {
        "graph.explain(text)": (
            lambda: hodiff.graph.explain("a second time"),
            r"exc: got a str\. Give the exception that",
        ),
        "graph.explain()": (lambda: hodiff.graph.explain(), r"exc: got None, and no exception is being handled"),
    },
    "graph.monitor": {
        "a list in itself": (lambda: hodiff.graph.monitor().step(a=endless()), "a: containers are nested deeper than"),
    },
    "graph.predict": {
        "graph.predict([1, 2])": (
            lambda: hodiff.graph.predict([1, 2.0]),
            r"loss: got a float and an int, expected a tensor",
        ),
    },
    "graph.release": {
        "keep= that is a number": (lambda: hodiff.graph.release(f(leaf(X)), keep=3), "keep: "),
    },
    "graph.shared": {
        "graph.shared([a, b])": (lambda: hodiff.graph.shared([f(x), f(x)]), r"one by one: shared\(d, e\)"),
    },
    "hodiff": {
        "a name of none": (lambda: hodiff.argmax, r"^module 'hodiff' has no attribute 'argmax'$", AttributeError),
    },
    "implicit.argmin": {
        "a forgotten solution": (
            lambda: hodiff.implicit.argmin(f),
            "missing 1 required positional argument: 'x_star'",
            TypeError,
        ),
        "a name of a submodule": (lambda: hodiff.argmin, r"write hodiff\.implicit\.argmin\.$", AttributeError),
    },
    "implicit.fixed_point": {
        "fixed_point of loss": (
            lambda: hodiff.implicit.fixed_point(f, x.clone().requires_grad_()),
            r"f must return the structure and shapes of x_star \(for a module, a dict by parameter name\)",
        ),
    },
    "plotting.convergence": {
        "axes= that is a number": (
            lambda: hodiff.plotting.convergence([hodiff.trace(M, samples=3)], axes=3),
            "axes: got an int, expected Matplotlib axes",
        ),
        "a label of two": (
            lambda: hodiff.plotting.convergence([hodiff.trace(M, samples=3)], label=["a", "b"]),
            "label: got a list of 2, expected the text",
        ),
    },
    "sparse.plan_hessian": {
        "a plan for its matrix": (
            lambda: hodiff.sparse.plan_hessian(f, x).toarray(),
            r"a Plan has no attribute 'toarray': plan\(x\) is the matrix at x",
            HodiffError,
        ),
    },
}
NOTED = {
    "a parameter for its module": (
        lambda: hodiff.grad(loss, m[0].weight),
        r"f receives x as one argument: a Tensor",
        TypeError,
    ),
    "loss before predict": (
        lambda: hodiff.GaussNewtonOperator(lambda o, b: F.mse_loss(o, b[1]), lambda m, b: m(b[0]), m, data=data).value,
        r"f receives x as one argument: a Sequential",
        AttributeError,
    ),
    "a DataLoader for a batch": (
        lambda: hodiff.LevenbergMarquardt(lambda mod, b: (mod(b[0]) - b[1])[:, 0], m).step(
            torch.utils.data.DataLoader([1.0])
        ),
        r"f is called as f\(where, batch\), batch is a DataLoader\.",
        TypeError,
    ),
    "samples in a list for a batch": (
        lambda: hodiff.per_sample_grad(lambda m, b: (m(b[0]) - b[1]).square().sum(-1), NET, [(v, v), (v, v)]),
        r"batch is a list of 2 containers.* torch\.utils\.data\.default_collate\(batch\)",
        TypeError,
    ),
    "NumPy in f": (
        lambda: hodiff.grad(lambda z: np.sin(z).sum(), x),
        r"NumPy has no derivatives; use PyTorch's",
        RuntimeError,
    ),
}
"""Errors of the caller's function pass as they are; a note says what hodiff called it with."""


def add(name, mistake, call, words, *kind):
    rows = WRONG.setdefault(name, {})
    assert mistake not in rows, f"{name} has two rows of {mistake}"
    rows[mistake] = call, words, *kind


def for_each(calls, mistakes):
    """The same mistakes for several names, each with the way to call it."""
    for name, call in calls.items():
        for mistake, (made, *rest) in mistakes.items():
            add(name, mistake, functools.partial(made, call), *rest)


def for_values(name, said, values, call, *rest):
    """Values that an argument does not take."""
    for value in values:
        add(name, f"{said}{value!r}", functools.partial(call, value), *rest)


# --- a scalar function and a point ------------------------------------------------------------------------------------

SCALARS = {
    "grad": hodiff.grad,
    "value_and_grad": hodiff.value_and_grad,
    "hvp": lambda f, x: hodiff.hvp(f, x, W),
    "hessian": hodiff.hessian,
    "value_grad_and_hessian": hodiff.value_grad_and_hessian,
    "hessian_diagonal": hodiff.hessian_diagonal,
}


def beside(call, made):
    """A function that reads its parameter other than by its argument: the silent zeros of torch.autograd.functional."""
    weight = nn.Parameter(SIX.clone())
    return call(lambda w: made(w, weight), weight)


def entries(call):
    """What a transform of torch.func can take the derivative of."""

    def outer(point):
        found = call(f, point)
        return (found if isinstance(found, Tensor) else found[1]).sum()

    return outer


TRANSFORMED = r"(?is)torch\.func.*(batch_ndim|hodiff)"
UNRELATED = leaf(SIX)
OF_SCALARS = {
    "f returns all entries": (lambda call: call(vec, SIX), r"(?is)\(6,\).*(batch_ndim|jacobian|sum)"),
    "f returns a float": (lambda call: call(lambda z: float(f(z.detach())), SIX), r"(?is)float"),
    "f returns nothing": (lambda call: call(lambda z: None, SIX), r"f returned None"),
    "f returns an integer": (lambda call: call(lambda z: (z > 0).sum(), SIX), r"(?is)int64|depend|integer|floating"),
    "f returns a complex number": (lambda call: call(lambda z: torch.complex(z, z).sum(), SIX), r"(?is)complex"),
    "a generator of parameters": (
        lambda call: call(lambda p: m(X).sum(), m.parameters()),
        r"(?is)generator.*(list\(|module|model)",
    ),
    "an iterator for a point": (lambda call: call(lambda p: m(X).sum(), iter([SIX])), r"(?is)generator|iterator"),
    **{
        f"{value!r} for f": (
            lambda call, value=value: call(value, SIX),
            r"(?is)(callable|function).*tensor|tensor.*(callable|function)",
        )
        for value in (3.0, None, "f", [1])
    },
    "a number without a graph": (lambda call: call(f(SIX), leaf(SIX)), r"(?is)graph|no_grad|detach", GraphError),
    "a number of another tensor": (lambda call: call(f(UNRELATED), leaf(SIX)), r"(?is)depend", GraphError),
    "f of another tensor": (lambda call: call(lambda z: f(UNRELATED), SIX), r"(?is)depend", GraphError),
    "f detaches its argument": (
        lambda call: call(lambda z: f(z.detach()), SIX),
        r"(?is)depend|detach|graph",
        GraphError,
    ),
    "f is constant": (lambda call: call(lambda z: torch.zeros((), dtype=D), SIX), r"(?is)depend|graph", GraphError),
    "a number of a point that needs no gradient": (
        lambda call: call(f(leaf(SIX)), SIX),
        r"(?is)requires_grad|depend",
        (GraphError, InputError),
    ),
    "f reads the parameter itself": (
        lambda call: beside(call, lambda w, weight: f(weight)),
        r"(?is)argument",
        GraphError,
    ),
    "f reads the parameter itself, and its argument": (
        lambda call: beside(call, lambda w, weight: f(weight) + f(w)),
        r"(?is)argument",
        GraphError,
    ),
    "a number whose graph was freed": (
        lambda call: at(lambda z: call(differentiated(f(z)), z), SIX),
        r"(?is)freed|retain_graph",
        GraphError,
    ),
    "inside torch.func.vmap": (lambda call: torch.func.vmap(entries(call))(SIX.reshape(1, 6)), TRANSFORMED),
    "inside torch.func.grad": (lambda call: torch.func.grad(entries(call))(SIX), TRANSFORMED),
    "inside torch.func.jvp": (lambda call: torch.func.jvp(entries(call), (SIX,), (W,)), TRANSFORMED),
}
POINTS = {
    "of integers": (torch.arange(6), r"int64.*(float|double)"),
    "of truth values": (torch.ones(6, dtype=torch.bool), r"bool"),
    "that is complex": (SIX.to(torch.complex128), r"complex"),
    "that is sparse": (torch.eye(3, dtype=D).to_sparse(), r"sparse.*dense"),
    "that is an empty tuple": ((), r"empty|no tensor|without any tensor"),
    "that is an empty list": ([], r"empty|no tensor|without any tensor"),
    "that is an empty dict": ({}, r"empty|no tensor|without any tensor"),
    "that is empty inside": ({"a": [], "b": ()}, r"empty|no tensor|without any tensor"),
    "that is a number": (3.0, r"3\.0.*torch\.tensor"),
    "that is a word": ("x", r"str.*tensor"),
    "that is None": (None, r"None.*tensor"),
    "with a number inside": ({"a": SIX, "b": 3}, r"\bb\b.*\b3\b"),
    "with integers inside": ([SIX, torch.arange(3)], r"1.*int64"),
    "that is a set": ({1.0}, r"set"),
}
for_each(SCALARS, OF_SCALARS)
for_each(
    SCALARS,
    {
        f"a point {what}": (lambda call, point=point: call(lambda z: f(SIX), point), rf"(?is){words}")
        for what, (point, words) in POINTS.items()
    },
)
for name in (*SCALARS.keys() - {"hvp"}, "jacobian"):
    add(name, "no point", functools.partial(getattr(hodiff, name), f), rf"(?is)hodiff\.{name}\(f, x")

# --- vectors ----------------------------------------------------------------------------------------------------------

VECTORS = {
    "of another shape": (torch.ones(5, dtype=D), r"\(5,\).*\(6,\)|\(6,\).*\(5,\)"),
    "with two more dimensions": (torch.ones(2, 2, 6, dtype=D), r"\(2, 2, 6\)"),
    "as many as entries": (torch.ones(6, 6, dtype=D), r"\(6, 6\).*\[\w\] for rows"),
    "neither rows nor columns": (torch.ones(5, 2, dtype=D), r"\(5, 2\).*\(6,\)"),
    "without dimensions": (torch.ones((), dtype=D), r"\(\)"),
    "of another dtype": (torch.ones(6, dtype=torch.float32), r"float32.*float64|float64.*float32"),
    "of integers": (torch.ones(6, dtype=torch.int64), r"int64"),
    "that is complex": (torch.ones(6, dtype=torch.complex128), r"complex"),
    "on another device": (torch.ones(6, dtype=D, device="meta"), r"meta"),
    "that is a number": (1.0, r"float"),
    "that is a list of too few numbers": ([1.0] * 5, r"5"),
    "that is a tuple of two": ((W, W), r"tuple|structure"),
    "that is a dict": ({"x": W}, r"dict|structure"),
    "that is None": (None, r"None"),
}
for_each(
    {
        "hvp": lambda v: hodiff.hvp(f, SIX, v),
        "cross_hvp": lambda v: hodiff.cross_hvp(lambda x, y: (x * y).sum(), 2 * SIX, SIX, v),
        "jvp": lambda v: hodiff.jvp(lambda x: x**3, SIX, v),
        "vjp": lambda v: hodiff.vjp(lambda x: x**3, SIX, v),
    },
    {
        f"a vector {what}": (lambda call, vector=vector: call(vector), rf"(?is){words}")
        for what, (vector, words) in VECTORS.items()
    },
)
for mistake, point, vector, words in (
    ("a vector without a key", {"a": SIX, "b": SIX}, {"a": W}, r"\bb\b"),
    ("a vector with one more key", {"a": SIX}, {"a": W, "z": W}, r"\bz\b"),
    ("a vector by another key", {"a": SIX}, {"z": W}, r"\b[az]\b"),
    ("one vector for two entries", (SIX, SIX), (W,), r"2|structure|length"),
    ("an entry of another shape", {"a": SIX, "b": SIX}, {"a": W, "b": W[:2]}, r"\bb\b.*\(2,\)"),
    (
        "one and many vectors",
        {"a": SIX, "b": SIX},
        {"a": W, "b": torch.stack([W, W])},
        r"different numbers|\b[ab]\b",
    ),
    ("two and three vectors", (SIX, SIX), (torch.stack([W, W]), torch.stack([W, W, W])), r"2.*3|3.*2"),
    ("a flat vector of too few", Pair(SIX, SIX), torch.cat([W, W])[1:], r"Pair|structure|Tensor|11"),
):
    add("hvp", mistake, functools.partial(hodiff.hvp, of_leaves, point, vector), rf"(?is){words}")

# --- orders -----------------------------------------------------------------------------------------------------------

NTH = {"nth_derivative": hodiff.nth_derivative, "derivatives": hodiff.derivatives}
ENTRYWISE = r"(?is)elementwise.*(hessian|jacobian)"
MIXING = {
    "sums up": lambda z: z.cumsum(0) ** 2,
    "multiplies by the sum": lambda z: z * z.sum(),
    "cubes its neighbour": lambda z: torch.roll(z, 1) ** 3,
}
for_each(
    NTH,
    {
        **{
            f"an order of {n!r}": (lambda call, n=n: call(torch.sin, SIX, n), r"\bn: got .*expected")
            for n in (-1, 2.0, True, "2", None, torch.tensor(2))
        },
        **{
            f"a function that {does}": (lambda call, mixes=mixes: call(mixes, SIX, 2), ENTRYWISE)
            for does, mixes in MIXING.items()  # the sum of a Jacobian's row is not the derivative of an entry
        },
        **{  # at zeros the first derivative is right: no entry has one by another
            f"a function that mixes entries at zeros, order {n}": (
                lambda call, n=n: call(lambda z: z * z.roll(1), torch.zeros(3, dtype=D), n),
                r"(?i)entr|element",
            )
            for n in (2, 3, 4)
        },
    },
)
for does, mixes in MIXING.items():
    call = functools.partial(hodiff.nth_derivative, mixes, SIX, 1)
    add("nth_derivative", f"a first derivative of one that {does}", call, ENTRYWISE)

# --- flags, numbers and words -----------------------------------------------------------------------------------------

FLAGS = {
    ("hessian", "matrix"): lambda v: hodiff.hessian(f, X, matrix=v),
    ("jacobian", "matrix"): lambda v: hodiff.jacobian(lambda z: z**3, X, matrix=v),
    ("laplacian", "has_aux"): lambda v: hodiff.laplacian(g, X, has_aux=v),
    ("grad", "has_aux"): lambda v: hodiff.grad(f, X, has_aux=v),
    ("hessian", "has_aux"): lambda v: hodiff.hessian(f, X, has_aux=v),
    ("hessian_diagonal", "has_aux"): lambda v: hodiff.hessian_diagonal(f, X, has_aux=v),
    ("hvp", "has_aux"): lambda v: hodiff.hvp(f, X, X, has_aux=v),
    ("gradient_penalty", "return_outputs"): lambda v: hodiff.gradient_penalty(
        g, X, return_outputs=v, create_graph=False
    ),
    ("MatrixOperator", "symmetric"): lambda v: hodiff.MatrixOperator(torch.eye(2), symmetric=v),
    ("multi_grad", "release"): lambda v: hodiff.multi_grad([f], X, release=v),
    ("multi_grad", "return_used"): lambda v: hodiff.multi_grad([f], X, return_used=v),
    ("jet", "scaled"): lambda v: hodiff.jet(torch.sin, X, [X], scaled=v),
}
for (name, option), call in FLAGS.items():
    for_values(name, f"{option}=", ("no", "yes", 2, [False]), call, f"{option}: got .*, expected True or False")
    for_values(name, f"{option}=", (np.ones(2),), call, f"{option}: got a NumPy array, expected True or False")
for option in ("log_density", "variance_reduced"):
    add(
        "sliced_score_matching_loss",
        f"an array for {option}",
        lambda option=option: hodiff.sliced_score_matching_loss(lambda z: -z, X, **{option: np.ones(2)}),
        f"{option}: got a NumPy array, expected True or False",
    )
for option in ("create_graph", "batch_ndim", "check_independence", "allow"):
    call = functools.partial(hodiff.grad, f, X, **{option: torch.ones(3)})
    add("grad", f"a tensor for {option}", call, f"{option}: ")
for option in ("weight", "target", "power", "grad_scale"):
    call = functools.partial(hodiff.gradient_penalty, g, X, **{option: BIG})
    add("gradient_penalty", f"{option} beyond 64 bits", call, f"{option}: got {BIG}, expected a (positive )?number")
for option in ("return_state", "first_order", "segments"):
    call = functools.partial(hodiff.unroll, f, X, hodiff.rules.SGD(lr=0.1), 2, **{option: np.ones(2)})
    add("unroll", f"an array for {option}", call, f"{option}: ")
for name, option, call in (
    ("hessian", "chunk_size", lambda v: hodiff.hessian(f, X, chunk_size=v)),
    ("gradient_penalty", "reduction", lambda v: hodiff.gradient_penalty(g, X, reduction=v)),
    (
        "HessianOperator",
        "batch_weight",
        lambda v: hodiff.HessianOperator(lambda z, b: f(z), X, data=[0], batch_weight=v),
    ),
    (
        "FisherOperator",
        "kind",
        lambda v: hodiff.FisherOperator(lambda z, b: z, nn.MSELoss(), X, data=[(X, X)], kind=v),
    ),
    ("laplacian", "method", lambda v: hodiff.laplacian(g, X, method=v)),
    ("solve", "method", lambda v: hodiff.solve(hodiff.MatrixOperator(torch.eye(2)), torch.ones(2), method=v)),
    ("trace", "probes", lambda v: hodiff.trace(hodiff.MatrixOperator(torch.eye(2)), probes=v)),
    ("gradient_penalty", "ord", lambda v: hodiff.gradient_penalty(g, X, ord=v)),
):
    add(name, f"an array for {option}", functools.partial(call, np.ones((2, 3))), f"{option}: ")
for n in (-1, 0.5, True, "1"):
    call = functools.partial(hodiff.grad, f, SIX, batch_ndim=n)
    add("grad", f"batch_ndim={n!r}", call, f"batch_ndim: got {n!r}")
for n in (0, -1, 1.5, True, "many"):
    call = functools.partial(hodiff.hessian, f, SIX, chunk_size=n)
    add("hessian", f"chunk_size={n!r}", call, f"chunk_size: got {n!r}")
for solution in ("argmin", "root", "fixed_point"):
    for_values(
        f"implicit.{solution}",
        "gradient_tol=",
        (1j, "small", float("nan"), -1.0, np.ones(2), True),
        lambda tol, solution=solution: getattr(hodiff.implicit, solution)(vec, torch.zeros(2), gradient_tol=tol),
        r"gradient_tol: got .*, expected a number of at least 0, or None",
    )
for c, words in (
    ("word", "c: got 'word', expected a number, or a tensor"),
    ([1.0], "c: got a list of 1"),
    (BIG, f"c: got {BIG}"),
    (float("nan"), "c: got nan"),
    (np.ones(5), "c: got a NumPy array"),
    (torch.ones(2, dtype=D), r"c has shape \(2,\), which does not broadcast to the shape of f\(x\), \(5,\)"),
    (torch.ones(1, 5, dtype=D), r"c has shape \(1, 5\)"),
    (torch.ones(5, dtype=D, device="meta"), "c is on the meta device"),
):
    call = functools.partial(hodiff.second_order_operator, g, X, torch.ones(3, dtype=D), c=c)
    add("second_order_operator", f"c={c!r}", call, words)

# --- sparse matrices, and results that are sparse or nested -----------------------------------------------------------

for_values(
    "sparse_hessian",
    "check=",
    (None, 2, "yes", np.ones(2)),
    lambda check: hodiff.sparse_hessian(f, X, check=check),
    r"check: got .*, expected True or False",
)
for_values(
    "sparse.sparsity_pattern",
    "order=",
    (torch.ones(3), np.ones(3), 1.0, 3, True),
    lambda order: hodiff.sparse.sparsity_pattern(f, X, order=order),
    "order: got",
)
PATTERNS = {
    "a nested": (lambda: nested(torch.strided), "nested"),
    "a jagged": (lambda: nested(torch.jagged), "nested"),
    "an MKL-DNN": (lambda: torch.ones(2, 2).to_mkldnn(), "mkldnn"),
}
for_each(
    {
        "sparse.color": hodiff.sparse.color,
        "sparse_hessian": lambda pattern: hodiff.sparse_hessian(f, X, pattern=pattern),
    },
    {
        f"{kind} tensor for a pattern": (
            lambda call, made=made: call(made()),
            f"pattern: got a {said} tensor, expected a hodiff Pattern",
        )
        for kind, (made, said) in PATTERNS.items()
    },
)
for_each(
    {
        "grad": lambda f, _: hodiff.grad(f, X),
        "hvp": lambda f, _: hodiff.hvp(f, X, X),
        "jacobian": lambda f, _: hodiff.jacobian(f, X),
        "per_sample_grad": lambda f, ragged: hodiff.per_sample_grad(f, X, ragged),
        "jacobian_penalty": lambda f, _: hodiff.jacobian_penalty(f, X),
    },
    {
        f"f returns a nested tensor, {layout}": (
            lambda call, layout=layout: call(lambda z, *_: z.sum() * nested(layout), nested(layout)),
            r"f: f\(x\) is a nested tensor; return a dense one",
        )
        for layout in (torch.strided, torch.jagged)
    },
)
for_each(
    {
        "jacobian": lambda f: hodiff.jacobian(f, PAIRS[:2]),
        "vjp": lambda f: hodiff.vjp(f, PAIRS[:2], PAIRS[:2]),
        "jvp": lambda f: hodiff.jvp(f, PAIRS[:2], PAIRS[:2]),
        "sparse_jacobian": lambda f: hodiff.sparse_jacobian(f, PAIRS[:2]),
        "jacobian_penalty": lambda f: hodiff.jacobian_penalty(f, PAIRS[:2], samples=None),
    },
    {
        f"f returns a {layout} tensor": (
            lambda call, convert=convert: quiet(call)(lambda z: convert(z**2)),
            rf"f: f\(x\) is a torch\.{layout} tensor; return a dense one",
        )
        for layout, convert in (("sparse_coo", Tensor.to_sparse), ("sparse_csr", Tensor.to_sparse_csr))
    },
)

# --- a record where its number is wanted ------------------------------------------------------------------------------

NO_NUMBER = r"is (not a number|no tensor): it is a record with fields \.value"
for_each(
    {
        "trace": lambda: hodiff.trace(M),
        "diagonal": lambda: hodiff.diagonal(M),
        "solve": lambda: hodiff.solve(M, v),
        "eigsh": lambda: hodiff.eigsh(M, 1),
        "logdet": lambda: hodiff.logdet(M),
        "spectral_density": lambda: hodiff.spectral_density(M, width=0.1),
        "laplacian": lambda: hodiff.laplacian(g, X, samples=2),
    },
    {
        "its record to float()": (lambda record: float(quiet(record)()), NO_NUMBER),
        "its record in a sum": (lambda record: quiet(record)() + 1.0, NO_NUMBER),
        "its record behind a tensor": (lambda record: v * quiet(record)(), NO_NUMBER),
        "its record compared": (lambda record: quiet(record)() < 1.0, NO_NUMBER),
        "its record to PyTorch": (lambda record: torch.sum(quiet(record)()), NO_NUMBER),
        "its record in a list": (lambda record: torch.stack([v, quiet(record)()]), NO_NUMBER),
        "its record's entry": (lambda record: quiet(record)()[0], NO_NUMBER),
    },
)

# ----------------------------------------------------------------------------------------------------------------------

NO_INPUT = {
    **dict.fromkeys(
        ["BatchMixingWarning", "ConvergenceWarning", "CustomFunctionWarning", "HodiffWarning", "RandomnessWarning"],
        "a class of warnings",
    ),
    **dict.fromkeys(["DerivativeError", "GraphError", "HodiffError", "InputError"], "a class of errors"),
    "twice_differentiable": "it takes nothing",
}
ROWS = {f"{name}: {mistake}": row for name, rows in WRONG.items() for mistake, row in rows.items()}
MARKS = {"compile_step": [STEPS]}


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("row", [pytest.param(row, marks=MARKS.get(row.partition(":")[0], ())) for row in ROWS])
def test_a_wrong_call_is_told(row):
    call, words, *kind = ROWS[row]
    with pytest.raises(*(kind or [InputError]), match=words):
        call()


@pytest.mark.names
def test_each_public_name_has_a_row():
    assert set(hodiff.__all__) - set(WRONG) == set(NO_INPUT), "write what is a wrong call of it, and what is then said"
    for name in WRONG.keys() - {"hodiff"}:
        assert operator.attrgetter(name)(hodiff)


@pytest.mark.parametrize("mistake", NOTED)
def test_an_error_of_a_function_is_noted(mistake):
    call, words, kind = NOTED[mistake]
    with pytest.raises(kind, match=words) as caught:
        call()
    (note,) = caught.value.__notes__
    assert re.search(words, note)


@pytest.mark.parametrize("call", [lambda p: p**2, lambda p: p.sum(), lambda p: p(X)])
def test_an_error_of_f_says_what_f_was_given(call):
    """The exception is the user's; that f is given a container is of hodiff's calling convention."""
    with pytest.raises((TypeError, AttributeError), match="'dict'") as caught:
        hodiff.grad(call, {"a": x})
    assert caught.value.__notes__ == ["hodiff: f receives x as one argument: a dict with keys ['a']."]
    with pytest.raises(TypeError, match="unsupported operand") as caught:
        hodiff.grad(lambda z: z @ "a", x)
    assert not hasattr(caught.value, "__notes__")


def test_an_error_of_what_f_calls_is_not_said_to_be_of_the_point() -> None:
    """The label of a single sample has no length, and a tuple is no batch: neither has to do with the module."""
    label = torch.tensor(1.0, dtype=D)
    with pytest.raises(TypeError, match="0-d tensor") as caught:
        hodiff.grad(lambda m: m(X).sum() / len(label), m)
    assert not hasattr(caught.value, "__notes__")


def test_a_number_among_losses_is_named() -> None:
    with pytest.raises(hodiff.InputError, match="one is a float; expected scalar tensors"):
        hodiff.multi_grad([loss(m), 3.0], m)  # type: ignore[list-item]


def test_a_point_without_its_batch_is_named() -> None:
    with pytest.raises(hodiff.InputError, match=r"A single sample needs a batch dimension: x\[None\]"):
        hodiff.wgan_gp_penalty(lambda x: x.sum().reshape(1), torch.ones(5), torch.zeros(5))


def test_data_is_named_among_what_cuts_a_path() -> None:
    def by_data(p: Tensor) -> Tensor:
        w = nn.Parameter(torch.ones(6, dtype=D))
        w.data += p
        return w.square().sum()

    with pytest.raises(hodiff.GraphError, match=r"\.data and \.item\(\) of it cut the path"):
        hodiff.hessian(by_data, SIX)


def test_a_semidefinite_matrix_is_told_to_take_damping() -> None:
    with pytest.warns(hodiff.HodiffWarning, match="semidefinite one, as a Gauss-Newton matrix is, needs damping"):
        hodiff.solve(hodiff.MatrixOperator(torch.tensor([1.0, -1.0], dtype=D)), torch.ones(2, dtype=D), products=9)


def test_gradients_that_do_not_fit_are_foreseen() -> None:
    wide = torch.zeros(1, dtype=D).expand(40_000_000).requires_grad_()
    with pytest.raises(hodiff.InputError, match=r"GB, but cpu has .* Give fewer samples at a time"):
        hodiff.per_sample_grad(lambda w, b: b * w[0], wide, torch.ones(5000, dtype=D))


LARGE = {
    "eigsh": (lambda H: hodiff.eigsh(H, 200_000), "eigsh: the basis"),
    "nystrom": (lambda H: hodiff.nystrom(H, 200_000, shift=1.0), "the random vectors"),
    "logdet": (lambda H: hodiff.logdet(H, steps=200_000, samples=1), "logdet: the basis"),
    "solve": (lambda H: hodiff.solve(H, WIDE, method="gmres", restart=200_000), "solve: the vectors that GMRES keeps"),
    "jacobian_penalty": (lambda _: hodiff.jacobian_penalty(torch.sin, WIDE[None], samples=200_000), "the random"),
}
WIDE = torch.linspace(1, 2, 300_000)


@pytest.mark.parametrize("name", LARGE)
def test_vectors_that_do_not_fit_are_foreseen(name, monkeypatch):
    monkeypatch.setattr("hodiff._core._arguments.memory_on", lambda device: 2e9)
    call, words = LARGE[name]
    with pytest.raises(InputError, match=rf"{words}.* would hold .*GB, but cpu has 2 GB"):
        call(hodiff.MatrixOperator(WIDE))


def test_a_zero_tensor_has_no_memory_for_steps() -> None:
    zero = torch._efficientzerotensor((3,), dtype=D)
    with pytest.raises(InputError, match=r"efficient zero tensor.* give its \.clone\(\)"):
        hodiff.LevenbergMarquardt(lambda p: p - 1, zero)


def test_overrides_that_are_switched_off_are_named() -> None:
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(InputError, match="overrides are switched off here"):
        hodiff.biharmonic(lambda t: t.sin().prod(-1), X)
