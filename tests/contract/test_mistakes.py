"""A hundred mistakes over all public names: each is an error that says what was got, and what to do instead.

Those under SIGNATURES are in Python's own words: they are about the signature, before anything of ours runs.
"""

import re
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.sparse import linalg as scipy_linalg
from torch import nn

import hodiff
from tests.support.releases import STEPS

D = torch.float64
torch.manual_seed(0)
x = torch.tensor([0.3, 0.7, 1.1], dtype=D)
X = torch.randn(5, 3, dtype=D)
v = torch.ones(3, dtype=D)
m = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
batch = (X, torch.randn(5, 1, dtype=D))
data = [batch]
opt = torch.optim.SGD(m.parameters(), lr=0.1)


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


def at(call, point):
    return call(point.clone().requires_grad_())


def freed():
    value = loss(m)
    value.backward()
    return value


H = hodiff.HessianOperator(f, x)
M = hodiff.MatrixOperator(torch.eye(3, dtype=D) * 2)

# The mistake, the call, the words.
TAUGHT = {
    "grad(x, f)": (lambda: hodiff.grad(x, f), r"x: got a function"),
    "grad(f)(x) as torch.func": (lambda: hodiff.grad(f)(x), r"x is missing"),
    "grad(model, X) for a module f": (lambda: hodiff.grad(m, X), r"f returned shape \(5, 1\)"),
    "grad(loss, model.parameters())": (
        lambda: hodiff.grad(loss, m.parameters()),
        r"x is a generator \(model\.parameters\(\)\?\)",
    ),
    "grad(loss, list(parameters)) loss ignores arg": (
        lambda: hodiff.grad(lambda p: loss(m), list(m.parameters())),
        r"f reaches x\[0\] other than through its argument, and that path would be missi",
    ),
    "grad(loss, optimizer)": (
        lambda: hodiff.grad(loss, opt),
        r"x: got an SGD, expected a tensor, a container of tensors \(tuple, list, dict, ",
    ),
    "grad(loss(m), m) detached": (
        lambda: hodiff.grad(loss(m).detach(), m),
        r"f carries no graph: every path from 0\.weight, 0\.bias, 2\.weight, 2\.bias to the resu",
    ),
    "grad('loss', m)": (lambda: hodiff.grad("loss", m), r"f: got a str"),
    "f uses .numpy()": (
        lambda: hodiff.grad(lambda z: torch.tensor(np.sin(z.detach().numpy())).sum(), x),
        r"carries no graph.*cut at.*torch\.stack",
    ),
    "f under no_grad": (
        lambda: hodiff.grad(torch.no_grad()(f), x),
        r"carries no graph.*switched off \(no_grad.*enable_grad",
    ),
    "f returns None (print)": (lambda: hodiff.hessian(lambda z: None, x), r"f returned None"),
    "args=tensor instead of tuple": (lambda: hodiff.grad(lambda z, t: (z * t).sum(), x, args=v), r"args: got a Tensor"),
    "kwargs={'t'} a set": (lambda: hodiff.grad(lambda z, t=1: f(z), x, kwargs={"t"}), r"kwargs: got a set"),
    "point numpy array": (lambda: hodiff.grad(f, np.ones(3)), r"x: got a NumPy"),
    "point list of floats": (lambda: hodiff.grad(f, [0.1, 0.2]), r"x\[0\]: got the float 0\.1"),
    "point int tensor": (
        lambda: hodiff.hessian(f, torch.tensor([1, 2, 3])),
        r"x has dtype torch\.int64; derivatives need a real floating-point tensor",
    ),
    "point nn class": (lambda: hodiff.grad(loss, nn.Linear), r"x: got the class Linear"),
    "point string": (lambda: hodiff.laplacian(g, "X"), r"x: got a str"),
    "point generator": (
        lambda: hodiff.grad(lambda d: sum(t.sum() for t in d), (t for t in [x])),
        r"x is a generator \(model\.parameters\(\)\?\)",
    ),
    "laplacian of a 1-D point without batch_ndim=0": (lambda: hodiff.laplacian(f, x), r"f returned shape \(\)"),
    "divergence of scalar": (lambda: hodiff.divergence(g, X), r"f returned shape \(5,\) for x of shape \(5, 3\)"),
    "partial index out of range": (lambda: hodiff.partial(g, X, 3), r"index: got 3, but x has coordinates 0 to 2\."),
    "partial index word": (lambda: hodiff.partial(g, X, "xx"), r"index: got 'xx'"),
    "partial index float": (lambda: hodiff.partial(g, X, 1.0), r"index: got 1\.0"),
    "derivatives_of point without grad": (
        lambda: hodiff.derivatives_of(m(X), X)[0],
        r"x does not require grad, so f was computed without tracking it",
    ),
    "derivatives_of ['x']": (lambda: at(lambda z: hodiff.derivatives_of(m(z), z)["x"], X), r"index: got 'x'"),
    "nth_derivative n=-1": (lambda: hodiff.nth_derivative(torch.sin, x, -1), r"n: got -1"),
    "nth_derivative(2, f, x)": (lambda: hodiff.nth_derivative(2, torch.sin, x), r"n: got a Tensor"),
    "nth_derivative of scalar loss": (
        lambda: hodiff.nth_derivative(f, x, 2),
        r"f returned shape \(\) for x of shape \(3,\)",
    ),
    "second_order_operator C wrong": (
        lambda: hodiff.second_order_operator(g, X, torch.eye(2, dtype=D)),
        r"C has shape \(2, 2\)",
    ),
    "second_order_operator C float32": (
        lambda: hodiff.second_order_operator(g, X, torch.eye(3)),
        r"C is torch\.float32 on cpu, but x is torch\.float64 on cpu",
    ),
    "jet series shapes": (lambda: hodiff.jet(torch.sin, x, [v[:2]]), r"series: got \(\(2,\), torch\.float64\)"),
    "hvp v wrong shape": (lambda: hodiff.hvp(f, x, torch.ones(4, dtype=D)), r"v has shape \(4,\)"),
    "hvp module v is module": (lambda: hodiff.hvp(loss, m, m), r"v: got a Sequential"),
    "hvp module v dict missing key": (
        lambda: hodiff.hvp(loss, m, {"0.weight": torch.ones(4, 3, dtype=D)}),
        r"v has a dict with keys \['0\.weight'\]",
    ),
    "vjp u missing shape": (lambda: hodiff.vjp(vec, x, torch.tensor(1.0, dtype=D)), r"u has shape \(\)"),
    "cross_hvp one-arg f": (
        lambda: hodiff.cross_hvp(f, x, x, v),
        r"f cannot be called with the 2 positional arguments it is given here: ",
    ),
    "batch_ndim=-1": (lambda: hodiff.grad(g, X, batch_ndim=-1), r"batch_ndim: got -1"),
    "batch_ndim=3": (lambda: hodiff.hessian(g, X, batch_ndim=3), r"x has shape \(5, 3\)"),
    "chunk_size=0": (lambda: hodiff.hessian(f, x, chunk_size=0), r"chunk_size: got 0"),
    "allow='relu'": (lambda: hodiff.hvp(f, x, v, allow=3), r"allow: got an int"),
    "HessianOperator(m, loss) swapped": (
        lambda: hodiff.HessianOperator(m, loss) @ torch.ones(21),
        r"x: got a function",
    ),
    "HessianOperator(loss(m), m) graph freed": (
        lambda: hodiff.HessianOperator(freed(), m) @ torch.ones(21, dtype=D),
        r"the graph has already been freed: a backward\(\) or autograd\.grad\(\) without r",
    ),
    "HessianOperator data=DataLoader iterator": (
        lambda: hodiff.HessianOperator(lf, m, data=iter(data)) @ torch.ones(21, dtype=D),
        r"data: got a one-shot iterator \(list_iterator\), so the second product would see ",
    ),
    "HessianOperator data=tensor": (
        lambda: hodiff.HessianOperator(lf, m, data=X) @ torch.ones(21, dtype=D),
        r"data: got a Tensor",
    ),
    "HessianOperator f(m) with data": (
        lambda: hodiff.HessianOperator(loss, m, data=data) @ torch.ones(21, dtype=D),
        r"f is called as f\(where, batch\) with data=, once for each batch",
    ),
    "Jacobian @ wrong side": (
        lambda: hodiff.JacobianOperator(lambda z: torch.cat([z, z]), x) @ torch.ones(6, dtype=D),
        r"v has shape \(6,\)",
    ),
    "MatrixOperator(list)": (lambda: hodiff.MatrixOperator([[1.0, 2.0], [3.0, 4.0]]), r"A: got a list of 2"),
    "MatrixOperator(numpy)": (lambda: hodiff.MatrixOperator(np.eye(3)), r"A: got a NumPy array"),
    "MatrixOperator non-square trace": (
        lambda: hodiff.trace(hodiff.MatrixOperator(torch.randn(3, 2))),
        r"trace: the operator is 3 x 2, expected a square one \(J\.T @ J\?\)\.",
    ),
    "MatrixOperator 3-D": (
        lambda: hodiff.MatrixOperator(torch.randn(2, 3, 3)),
        r"A: got torch\.strided, torch\.float32 of shape \(2, 3, 3\)",
    ),
    "eigsh(H, 'largest')": (lambda: hodiff.eigsh(H, "largest"), r"k: got 'largest'"),
    "eigsh which='LM'": (lambda: hodiff.eigsh(H, 2, which="LM"), r"which: got 'LM'"),
    "solve(b, H)": (lambda: hodiff.solve(v, H), r"solve: got a tensor"),
    "solve method='lu'": (lambda: hodiff.solve(M, v, method="lu"), r"method: got 'lu'"),
    "solve preconditioner=tensor": (
        lambda: hodiff.solve(M, v, preconditioner=torch.eye(3, dtype=D)),
        r"preconditioner: got a tensor",
    ),
    "logdet indefinite": (
        lambda: hodiff.logdet(hodiff.MatrixOperator(torch.diag(torch.tensor([1.0, -1.0])))),
        r"logdet: the operator has an eigenvalue of about -1",
    ),
    "H + 'x'": (lambda: H + "0.1", r"operator \+ a str: expected a number or an operator"),
    "H[0, 0]": (lambda: H[0, 0], r"HessianOperator\(3 x 3, float64, double backward, not evaluated\) cannot be in"),
    "float(trace record)": (
        lambda: float(hodiff.trace(M)),
        r"a TraceRecord is not a number but a record with fields \.value, \.stderr, \.converged, \.pr",
    ),
    "solve(...) @ x": (
        lambda: hodiff.solve(M, v) * 2,
        r"a SolveRecord is not a number but a record with fields \.value, \.residual, \.converged, \.",
    ),
    "samples=1.5": (lambda: hodiff.trace(M, samples=1.5), r"samples: got 1\.5"),
    "generator=seed": (lambda: hodiff.trace(M, samples=1, generator=0), r"generator: got an int"),
    "generator=np": (
        lambda: hodiff.hessian_penalty(g, X, generator=np.random.default_rng(0)),
        r"generator: got a NumPy Generator",
    ),
    "LM(loss, parameters())": (
        lambda: hodiff.LevenbergMarquardt(lambda mod, b: mod(b[0]) - b[1], m.parameters()),
        r"x is a generator \(model\.parameters\(\)\?\)",
    ),
    "LM scalar loss": (lambda: hodiff.LevenbergMarquardt(lf, m).step(batch), r"residuals\[0\] returned shape \(\)"),
    "LM step(closure)": (
        lambda: hodiff.LevenbergMarquardt(lambda mod, b: (mod(b[0]) - b[1])[:, 0], m).step(lambda: 1),
        r"step: got a closure",
    ),
    "gradient_penalty(x, f)": (
        lambda: hodiff.gradient_penalty(X, m),
        r"2\.weight has batch shape \(1,\), but 0\.weight has \(4,\)",
    ),
    "wgan_gp(real, fake, critic)": (
        lambda: hodiff.wgan_gp_penalty(X, X, m),
        r"fake: got the module Sequential, expected a tensor",
    ),
    "sample_norm of a float": (lambda: hodiff.sample_norm(1.0), r"grads: got the float 1\.0"),
    "score of scalar": (lambda: hodiff.sliced_score_matching_loss(g, X), r"f\(x\) has shape \(5,\)"),
    "fixed_point of loss": (
        lambda: hodiff.implicit.fixed_point(f, x.clone().requires_grad_()),
        r"f must return the structure and shapes of x_star \(for a module, a dict by parameter name\)",
    ),
    "unroll rule class": (
        lambda: hodiff.unroll(f, x, hodiff.rules.SGD, 3),
        r"rule: got the class SGD, not an instance",
    ),
    "sparse_jacobian pattern list": (
        lambda: hodiff.sparse_jacobian(vec, x, pattern=[[1, 0, 0]]),
        r"pattern: got a list",
    ),
    "multi_grad(loss, m)": (lambda: hodiff.multi_grad(loss(m), m), r"losses: got a Tensor"),
    "per_sample_grad, a number of samples": (lambda: hodiff.per_sample_grad(lf, m, 5), r"batch: got an int, expected"),
    "progress= by a word": (lambda: hodiff.trace(H, progress="no"), r"progress: .*'no'"),
    "per_sample_grad mean loss": (lambda: hodiff.per_sample_grad(lf, m, batch), r"f returned shape \(\)"),
    "select typo": (lambda: hodiff.select(m, "0.wieght"), r"pattern '0\.wieght' matches no parameter of Sequential"),
    "check_derivatives(f(x), x)": (
        lambda: hodiff.check_derivatives(f(x.clone().requires_grad_()), x),
        r"f: check_derivatives evaluates f at many points",
    ),
    "graph.explain(text)": (lambda: hodiff.graph.explain("a second time"), r"exc: got a str\. Give the exception that"),
    "graph.shared([a, b])": (lambda: hodiff.graph.shared([f(x), f(x)]), r"one by one: shared\(d, e\)"),
    "graph.predict([1, 2])": (
        lambda: hodiff.graph.predict([1, 2.0]),
        r"loss: got a float and an int, expected a tensor",
    ),
    "f without a return": (
        lambda: hodiff.grad(lambda x: None, x),
        r"a tensor\. Does it end without a return statement\?$",
    ),
    "graph.explain()": (lambda: hodiff.graph.explain(), r"exc: got None, and no exception is being handled"),
    "tensor form without requires_grad": (
        lambda: hodiff.grad(f(x), x),
        r"x does not require grad, so f was computed without tracking it",
    ),
    "tensor form x twice": (
        lambda: at(lambda z: hodiff.grad(f(z), (z, z)), x),
        r"x\[1\]: the same tensor is given twice",
    ),
    "f detaches": (lambda: hodiff.grad(lambda z: f(z.detach()), x), r"carries no graph.*drop the detach"),
    "f of global x": (
        lambda: hodiff.grad(lambda z: f(x), x),
        r"no operation in f was given x: compute with f's argument",
    ),
    "meta point": (
        lambda: hodiff.hessian(f, torch.ones(3, device="meta")),
        r"x is on the meta device, whose tensors hold no numbers",
    ),
    "complex point": (
        lambda: hodiff.grad(lambda z: z.abs().sum(), torch.ones(2, dtype=torch.complex64)),
        r"x is complex \(torch\.complex64\)",
    ),
    "an operator for a function": (lambda: H(v), r"not a function or a number: write H @ v for a product"),
    "a power of an operator": (lambda: H**2, r"H @ H for a power"),
    "an inverse of an operator": (lambda: 1 / H, r"hodiff\.solve\(H, b\) for its inverse times b"),
    "a number of an operator": (lambda: float(H), r"not a function or a number"),
    "SciPy's H.toarray()": (lambda: H.toarray(), r"^a HessianOperator has no attribute 'toarray': .*H\.dense\(\)"),
    "PyTorch's H.inverse()": (lambda: M.inverse(), r"no attribute 'inverse': write hodiff\.solve\(H, b\)"),
    "H.eigenvalues()": (lambda: H.eigenvalues(), r"no attribute 'eigenvalues': write hodiff\.eigsh\(H, k\)"),
    "H.anything": (lambda: H.anything, r"no attribute 'anything': write H @ v for a product; hodiff\.eigsh"),
    "a matrix without a function": (lambda: M.value, r"no attribute 'value': only the Hessian and Gauss-Newton"),
    "record.item()": (lambda: hodiff.trace(M).item(), r"a TraceRecord has no attribute 'item': it is a record with"),
    "a format for a record": (lambda: f"{hodiff.trace(M):.3f}", r"a TraceRecord has no format '\.3f': it is a record"),
    "a plan for its matrix": (
        lambda: hodiff.sparse.plan_hessian(f, x).toarray(),
        r"a Plan has no attribute 'toarray': plan\(x\) is the matrix at x",
    ),
    "a step for its value": (
        lambda: hodiff.compile_step(loss, m, backend="replay").backward(),
        r"a CompiledStep has no attribute 'backward': value = step\(\*batch\) is the loss",
    ),
    "LM step() without its batch": (
        lambda: hodiff.LevenbergMarquardt(lambda mod, b: (mod(b[0]) - b[1])[:, 0], m).step(),
        r"residuals\[0\] is called as residuals\[0\]\(where\) in step\(\), which its signature \(mod, b\)",
    ),
    "a selection for its module": (lambda: hodiff.select(m, "*")(X), r"call the module itself, model\(x\)"),
    "an estimate that equals a number": (lambda: hodiff.trace(H, samples=9) == 6.0, r"a TraceRecord is not a number"),
    "has_aux but f returns one": (lambda: hodiff.grad(f, x, has_aux=True), r"f returned a single tensor"),
}
SIGNATURES = {
    "a forgotten vector": (lambda: hodiff.hvp(f, x), "missing 1 required positional argument: 'v'"),
    "a forgotten solution": (lambda: hodiff.implicit.argmin(f), "missing 1 required positional argument: 'x_star'"),
    "an option of torch.func": (lambda: hodiff.grad(f, x, argnums=1), "unexpected keyword argument 'argnums'"),
    "an option of PyTorch": (
        lambda: hodiff.grad(f, x, retain_graph=True),
        "unexpected keyword argument 'retain_graph'",
    ),
    "two points": (lambda: hodiff.grad(lambda a, b: (a * b).sum(), x, x), "2 positional arguments but 3 were given"),
    "a function for an operator": (lambda: hodiff.solve(f, x, v), "2 positional arguments but 3 were given"),
}
FOREIGN = {
    "SciPy's cg": (lambda: scipy_linalg.cg(M, v.numpy()), TypeError, r"Give SciPy's routines H\.to_scipy\(\)"),
    "SciPy's own operator": (lambda: scipy_linalg.aslinearoperator(H), TypeError, r"H\.to_scipy\(\)"),
    "a length": (lambda: len(H), TypeError, r"^a HessianOperator has no length: its size is H\.shape\.$"),
    "torch.tensor of an operator": (lambda: torch.tensor(M), TypeError, r"its size is H\.shape"),
    "a length of a record": (lambda: len(hodiff.eigsh(M, 2)), TypeError, r"no length: it is a record with fields"),
    "a name of a submodule": (lambda: hodiff.argmin, AttributeError, r"write hodiff\.implicit\.argmin$"),
    "a name of none": (lambda: hodiff.argmax, AttributeError, r"^module 'hodiff' has no attribute 'argmax'$"),
}
"""Asked by other libraries, or of Python: the class of the error is theirs, the words are ours."""
NOTED = {
    "a parameter for its module": (lambda: hodiff.grad(loss, m[0].weight), r"f receives x as one argument: a Tensor"),
    "loss before predict": (
        lambda: hodiff.GaussNewtonOperator(lambda o, b: F.mse_loss(o, b[1]), lambda m, b: m(b[0]), m, data=data).value,
        r"f receives x as one argument: a Sequential",
    ),
    "a DataLoader for a batch": (
        lambda: hodiff.LevenbergMarquardt(lambda mod, b: (mod(b[0]) - b[1])[:, 0], m).step(
            torch.utils.data.DataLoader([1.0])
        ),
        r"hodiff called residuals\[0\] with this batch: a DataLoader\.",
    ),
    "NumPy in f": (lambda: hodiff.grad(lambda z: np.sin(z).sum(), x), r"NumPy has no derivatives; use PyTorch's"),
}
"""Errors of the caller's function pass as they are; a note says what hodiff called it with."""


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=[STEPS] * (name == "a step for its value")) for name in TAUGHT]
)
def test_a_mistake_is_told(mistake):
    call, words = TAUGHT[mistake]
    with pytest.raises(hodiff.HodiffError, match=rf"(?s){words}"):
        call()


@pytest.mark.parametrize("mistake", SIGNATURES)
def test_a_wrong_signature_is_told_by_python(mistake):
    call, words = SIGNATURES[mistake]
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.parametrize("mistake", FOREIGN)
def test_a_mistake_of_another_kind_is_told(mistake):
    call, kind, words = FOREIGN[mistake]
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize("mistake", NOTED)
def test_an_error_of_a_function_is_noted(mistake):
    call, words = NOTED[mistake]
    with pytest.raises((TypeError, AttributeError, RuntimeError), match=words) as caught:
        call()
    (note,) = caught.value.__notes__
    assert re.search(words, note)


def test_what_an_object_lacks_it_has_not():
    """Tools ask by `hasattr`; an error of a property is its own; and an object without a length is true."""
    for value in (H, hodiff.trace(M), hodiff.sparse.plan_hessian(f, x)):
        assert value
        assert not hasattr(value, "toarray")
        assert f"{value}" == str(value)
    absent = nn.Module()
    with pytest.raises(AttributeError, match="'Module' object has no attribute 'w'"):
        hodiff.HessianOperator(lambda z: absent.w, x).value  # noqa: B018


# --- what fits all names: a record where its number is wanted -------------------------------------

RECORDS = {
    "trace": lambda: hodiff.trace(M),
    "diagonal": lambda: hodiff.diagonal(M),
    "solve": lambda: hodiff.solve(M, v),
    "eigsh": lambda: hodiff.eigsh(M, 1),
    "logdet": lambda: hodiff.logdet(M),
    "spectral_density": lambda: hodiff.spectral_density(M, width=0.1),
    "laplacian": lambda: hodiff.laplacian(g, X, samples=2),
}
USES = {
    "float": float,
    "sum": lambda r: r + 1.0,
    "tensor first": lambda r: v * r,
    "comparison": lambda r: r < 1.0,
    "torch": lambda r: torch.sum(r),
    "in a list": lambda r: torch.stack([v, r]),
    "entry": lambda r: r[0],
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", RECORDS)
def test_a_record_where_its_number_is_wanted(name, use):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = RECORDS[name]()
    with pytest.raises(hodiff.InputError, match=r"is not a number but a record with fields \.value"):
        USES[use](record)


@pytest.mark.parametrize("call", [lambda p: p**2, lambda p: p.sum(), lambda p: p(X)])
def test_an_error_of_f_says_what_f_was_given(call):
    """The exception is the user's; that f is given a container is of hodiff's calling convention."""
    with pytest.raises((TypeError, AttributeError), match="'dict'") as caught:
        hodiff.grad(call, {"a": x})
    assert caught.value.__notes__ == ["hodiff: f receives x as one argument: a dict with keys ['a']."]
    with pytest.raises(TypeError, match="unsupported operand") as caught:
        hodiff.grad(lambda z: z @ "a", x)
    assert not hasattr(caught.value, "__notes__")


def test_a_loop_over_an_operator():
    for use in (list, lambda A: A[0], lambda A: A[0, 1]):
        with pytest.raises(hodiff.InputError, match=r"cannot be indexed: .*Its matrix is H\.dense\(\)"):
            use(H)
