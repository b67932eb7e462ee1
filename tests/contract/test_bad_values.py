"""Values of a kind that an argument does not take: flags, numbers, words, containers, layouts. Each is told by name."""

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import hodiff
import hodiff.plotting

D = torch.float64
X = torch.tensor([[0.3, -0.8], [1.4, 0.9], [0.2, 0.5]], dtype=D)


def test_a_tangent_of_forward_mode_is_not_lost() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        with pytest.raises(hodiff.InputError, match=r"tangent .* hodiff\.jvp"):
            hodiff.grad(lambda z: (z**3).sum(), dual)
        found = hodiff.grad(lambda z: (z**3 * dual).sum(), X)
        torch.testing.assert_close(forward_ad.unpack_dual(found).tangent, 3 * X**2)


def test_a_scripted_module_inside_of_the_point_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(torch.jit.script(nn.Linear(2, 1, dtype=D)), nn.Linear(1, 1, dtype=D))
    with pytest.raises(hodiff.InputError, match=r"^0 is a TorchScript module, .* eager module"):
        hodiff.grad(lambda m: m(X).sum(), model)


def test_a_frozen_module_names_the_way_out() -> None:
    with pytest.raises(hodiff.InputError, match=r"no trainable parameter .* requires_grad_\(True\)"):
        hodiff.grad(lambda m: m(X).sum(), nn.Linear(2, 1, dtype=D).requires_grad_(False))


@pytest.mark.parametrize("depth", ["in itself", "deep"])
def test_a_container_without_end(depth: str) -> None:
    point: list = [X]
    if depth == "deep":
        for _ in range(200):
            point = [point]
    else:
        point.append(point)
    with pytest.raises(hodiff.InputError, match="x: containers are nested more than"):
        hodiff.grad(lambda z: X.sum(), point)


def test_a_vector_in_itself() -> None:
    v: list = []
    v.append(v)
    with pytest.raises(hodiff.InputError, match="v: containers are nested more than"):
        hodiff.MatrixOperator(torch.eye(3)) @ v


@pytest.mark.parametrize(
    ("option", "call"),
    [
        ("chunk_size", lambda v: hodiff.hessian(lambda z: (z**3).sum(), X, chunk_size=v)),
        ("reduction", lambda v: hodiff.gradient_penalty(lambda z: (z**3).sum(-1), X, reduction=v)),
        ("batch_weight", lambda v: hodiff.HessianOperator(lambda z, b: (z**3).sum(), X, data=[0], batch_weight=v)),
        ("kind", lambda v: hodiff.FisherOperator(lambda z, b: z, nn.MSELoss(), X, data=[(X, X)], kind=v)),
        ("method", lambda v: hodiff.laplacian(lambda z: (z**3).sum(-1), X, method=v)),
        ("method", lambda v: hodiff.solve(hodiff.MatrixOperator(torch.eye(2)), torch.ones(2), method=v)),
        ("probes", lambda v: hodiff.trace(hodiff.MatrixOperator(torch.eye(2)), probes=v)),
        ("ord", lambda v: hodiff.gradient_penalty(lambda z: (z**3).sum(-1), X, ord=v)),
    ],
)
def test_an_array_where_a_word_is_expected(option: str, call) -> None:
    with pytest.raises(hodiff.InputError, match=f"{option}: "):
        call(np.ones((2, 3)))


def test_a_number_of_numpy_is_no_data() -> None:
    with pytest.raises(hodiff.InputError, match="data: got a NumPy float64"):
        hodiff.HessianOperator(lambda z, b: (z**3).sum(), X, data=np.float64(1.5))


def test_an_operator_at_a_negated_view() -> None:
    x = torch._neg_view(-X)
    found = hodiff.HessianOperator(lambda z: (z**3).sum(), x) @ torch.ones_like(X)
    torch.testing.assert_close(found, 6 * X)


def test_a_nested_matrix() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(hodiff.InputError, match=r"A is nested"):
        hodiff.MatrixOperator(nested)


def test_one_point_given_twice_to_a_tensor_already_computed() -> None:
    x = X.clone().requires_grad_()
    with pytest.raises(hodiff.InputError, match=r"x\[1\]: the same tensor is given twice"):
        hodiff.grad((x**2).sum(), (x, x))


@pytest.mark.parametrize("option", ["create_graph", "batch_ndim", "check_independence", "allow"])
def test_a_tensor_where_a_flag_or_a_number_is_expected(option: str) -> None:
    with pytest.raises(hodiff.InputError, match=f"{option}: "):
        hodiff.grad(lambda z: (z**3).sum(), X, **{option: torch.ones(3)})


def test_a_nested_vector() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2, dtype=D), torch.ones(3, dtype=D)])
    with pytest.raises(hodiff.InputError, match="v: got a nested tensor; give a dense one"):
        hodiff.hvp(lambda z: (z**3).sum(), X, nested)


FLAGS = {
    "matrix": lambda v: hodiff.hessian(lambda z: (z**3).sum(), X, matrix=v),
    "matrix=": lambda v: hodiff.jacobian(lambda z: z**3, X, matrix=v),
    "has_aux": lambda v: hodiff.laplacian(lambda z: (z**3).sum(-1), X, has_aux=v),
    **{
        f"has_aux{'=' * n}": lambda v, f=f: f(lambda z: (z**3).sum(), X, has_aux=v)
        for n, f in enumerate([hodiff.grad, hodiff.hessian, hodiff.hessian_diagonal], 1)
    },
    "has_aux====": lambda v: hodiff.hvp(lambda z: (z**3).sum(), X, X, has_aux=v),
    "return_outputs": lambda v: hodiff.gradient_penalty(
        lambda z: (z**3).sum(-1), X, return_outputs=v, create_graph=False
    ),
    "symmetric": lambda v: hodiff.MatrixOperator(torch.eye(2), symmetric=v),
    "release": lambda v: hodiff.multi_grad([lambda z: (z**3).sum()], X, release=v),
    "return_used": lambda v: hodiff.multi_grad([lambda z: (z**3).sum()], X, return_used=v),
    "scaled": lambda v: hodiff.jet(torch.sin, X, [X], scaled=v),
}


@pytest.mark.parametrize("option", FLAGS)
@pytest.mark.parametrize("word", ["no", "yes", 2, [False]], ids=repr)
def test_a_word_where_a_flag_is_expected(option: str, word: object) -> None:
    with pytest.raises(hodiff.InputError, match=rf"{option.rstrip('=')}: got .*, expected True or False"):
        FLAGS[option](word)


@pytest.mark.parametrize("option", FLAGS)
def test_flags_of_numpy_and_numbers(option: str) -> None:
    FLAGS[option](np.bool_(False))
    FLAGS[option](0)


@pytest.mark.parametrize("option", FLAGS)
def test_an_array_where_a_flag_is_expected(option: str) -> None:
    with pytest.raises(hodiff.InputError, match=f"{option.rstrip('=')}: got a NumPy array, expected True or False"):
        FLAGS[option](np.ones(2))


def test_a_flag_is_looked_at_before_anything_is_computed() -> None:
    penalty, calls = hodiff.PathLengthPenalty(), []

    def images(w: Tensor) -> Tensor:
        calls.append(w)
        return w[:, :, None] ** 2

    with pytest.raises(hodiff.InputError, match="return_outputs: got a NumPy array, expected True or False"):
        penalty(images, X, return_outputs=np.ones(2))
    assert not calls
    assert float(penalty.mean_length) == 0


@pytest.mark.parametrize("solution", [hodiff.implicit.argmin, hodiff.implicit.root, hodiff.implicit.fixed_point])
@pytest.mark.parametrize("limit", [1j, "small", float("nan"), -1.0, np.ones(2), True], ids=repr)
def test_a_tolerance_that_is_no_number(solution, limit) -> None:
    with pytest.raises(hodiff.InputError, match=r"gradient_tol: got .*, expected a number of at least 0, or None"):
        solution(lambda z: z**2, torch.zeros(2), gradient_tol=limit)


def test_paths_that_are_none() -> None:
    with pytest.raises(hodiff.InputError, match="primals: got None, expected a tensor, or a tuple"):
        hodiff.jet(torch.sin, None, [X])
    with pytest.raises(hodiff.InputError, match="series: got an int, expected a list of tensors"):
        hodiff.jet(torch.sin, (X,), 3)


def test_a_keyword_that_is_no_word() -> None:
    with pytest.raises(hodiff.InputError, match="kwargs: got an int as a key, expected names of arguments"):
        hodiff.hessian_penalty(lambda z: (z**3).sum(-1), X, kwargs={1: X})


@pytest.mark.parametrize("call", [hodiff.hessian, hodiff.cross_hessian])
def test_a_number_of_dimensions_that_is_none(call) -> None:
    where = (X, X) if call is hodiff.cross_hessian else (X,)
    with pytest.raises(hodiff.InputError, match=r"batch_ndim: got 1\.5, expected an integer"):
        call(lambda *z: sum((each**3).sum() for each in z), *where, batch_ndim=1.5)


@pytest.mark.parametrize("option", ["weight", "target", "power", "grad_scale"])
def test_a_number_beyond_what_pytorch_takes(option: str) -> None:
    with pytest.raises(hodiff.InputError, match=f"{option}: got {2**70}, expected a number"):
        hodiff.gradient_penalty(lambda z: (z**3).sum(-1), X, **{option: 2**70})


def test_an_order_beyond_what_pytorch_takes() -> None:
    with pytest.raises(hodiff.InputError, match=f"n: got {2**70}, expected an integer of at most 64 bits"):
        hodiff.derivatives(lambda z: z.sin(), X, 2**70)
    A = hodiff.MatrixOperator(torch.eye(2))
    with pytest.raises(hodiff.InputError, match="damping: got"):
        hodiff.solve(A, torch.ones(2), damping=2**70)


@pytest.mark.parametrize("call", [
    lambda g: hodiff.check_derivatives(lambda z: (z**3).sum(), X, generator=g),
    lambda g: hodiff.interpolate(X, X, generator=g),
    lambda g: hodiff.dragan_penalty(lambda z: (z**3).sum(-1), X, generator=g),
])  # fmt: skip
def test_a_seed_in_the_place_of_a_generator(call) -> None:
    with pytest.raises(hodiff.InputError, match="generator: got an int"):
        call(7)


def test_a_matrix_that_is_a_view_of_one_number() -> None:
    with pytest.raises(hodiff.InputError, match=r"A is an expanded view of shape .* 7,451 GiB"):
        hodiff.MatrixOperator(torch.ones((), dtype=D).expand(10**6, 10**6))
    found = hodiff.MatrixOperator(torch.ones(()).expand(3, 3)) @ torch.ones(3)
    torch.testing.assert_close(found, torch.full((3,), 3.0))


def test_names_of_a_selection() -> None:
    with pytest.raises(hodiff.InputError, match=r"names: got an int, .* hodiff\.select"):
        hodiff.Selection(nn.Linear(2, 1), 3)


@pytest.mark.parametrize("call", [
    lambda: hodiff.select(nn.Linear(2, 1), 3), lambda: hodiff.select(nn.Linear(2, 1), exclude=["bias", 3]),
])  # fmt: skip
def test_a_pattern_is_a_word(call) -> None:
    with pytest.raises(hodiff.InputError, match=r"got an int, expected strings"):
        call()


def test_what_a_graph_is_kept_for() -> None:
    with pytest.raises(hodiff.InputError, match="keep: "):
        hodiff.graph.release((X.clone().requires_grad_() ** 2).sum(), keep=3)


def test_a_callbacks_exception_is_the_users() -> None:
    def seen(record: object) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        hodiff.solve(hodiff.MatrixOperator(torch.eye(2) * 2), torch.ones(2), callback=seen)


def test_vectors_that_are_sparse() -> None:
    with pytest.raises(hodiff.InputError, match=r"vectors: got a torch\.sparse_coo tensor; give a dense one"):
        hodiff.diagonal(hodiff.MatrixOperator(torch.eye(3)), vectors=torch.eye(3).to_sparse())
    with pytest.raises(hodiff.InputError, match=r"v: got a torch\.sparse_coo tensor; give a dense one"):
        hodiff.cross_hvp(lambda a, b: (a * b).sum(), torch.ones(3), torch.ones(3), torch.eye(3).to_sparse())


def test_a_list_in_itself_is_no_root_of_a_graph() -> None:
    endless: list = []
    endless.append(endless)
    with pytest.raises(hodiff.InputError, match="a: containers are nested deeper than"):
        hodiff.graph.monitor().step(a=endless)


def test_an_eight_bit_float_is_for_storage() -> None:
    with pytest.raises(hodiff.InputError, match=r"x has dtype torch\.float8_e4m3fn, a storage-only dtype"):
        hodiff.grad(lambda z: z.float().sum(), torch.ones(3).to(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("c", "words"),
    [
        ("word", "c: got 'word', expected a finite number"),
        ([1.0], r"c: got \[1.0\]"),
        (2**70, "c: got 1180591620717411303424"),
        (float("nan"), "c: got nan"),
        (np.ones(3), "c: got array"),
        (torch.ones(2, dtype=D), r"c has shape \(2,\), which does not broadcast to the shape of f\(x\), \(3,\)"),
        (torch.ones(1, 3, dtype=D), r"c has shape \(1, 3\)"),
        (torch.ones(3, dtype=D, device="meta"), "c is on the meta device"),
    ],
)
def test_a_factor_of_an_operator_that_is_none(c: object, words: str) -> None:
    with pytest.raises(hodiff.InputError, match=words):
        hodiff.second_order_operator(lambda z: z.square().sum(-1), X, torch.ones(2, dtype=D), c=c)  # type: ignore[arg-type]


@pytest.mark.parametrize("c", [2, 2.0, np.float64(2), torch.tensor(2.0), torch.full((3,), 2.0), torch.full((1,), 2.0)])
def test_a_factor_of_an_operator(c: object) -> None:
    f = lambda z: z.square().sum(-1)
    found = hodiff.second_order_operator(f, X, torch.ones(2, dtype=D), c=c)  # type: ignore[arg-type]
    torch.testing.assert_close(found, 4 + 2 * f(X))


@pytest.mark.parametrize("flag", ["log_density", "variance_reduced"])
def test_a_flag_of_score_matching_that_is_none(flag: str) -> None:
    with pytest.raises(hodiff.InputError, match=f"{flag}: got a NumPy array, expected True or False"):
        hodiff.sliced_score_matching_loss(lambda z: -z, X, **{flag: np.ones(2)})


def test_tensors_that_are_no_pattern() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for value, words in (nested, "nested"), (jagged, "nested"), (torch.ones(2, 2).to_mkldnn(), "mkldnn"):
        with pytest.raises(hodiff.InputError, match=f"pattern: got a {words} tensor, expected a hodiff Pattern"):
            hodiff.sparse.color(value)
        with pytest.raises(hodiff.InputError, match=f"pattern: got a {words} tensor, expected a hodiff Pattern"):
            hodiff.sparse_hessian(lambda z: z.pow(4).sum(), X, pattern=value)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
@pytest.mark.parametrize("output", ["torch", "scipy", "auto"])
def test_sparse_matrices_of_no_numbers(shape: tuple[int, ...], output: str) -> None:
    for found in (
        hodiff.sparse_hessian(lambda z: (z.sin() * z).sum(), torch.ones(shape), output=output),  # type: ignore[arg-type]
        hodiff.sparse_jacobian(lambda z: z.sin() * z, torch.ones(shape), output=output),  # type: ignore[arg-type]
    ):
        assert found.shape == (0, 0)


@pytest.mark.parametrize("check", [None, 2, "yes", np.ones(2)], ids=repr)
def test_a_check_of_a_sparse_matrix_is_a_flag(check: object) -> None:
    with pytest.raises(hodiff.InputError, match=r"check: got .*, expected True or False"):
        hodiff.sparse_hessian(lambda z: z.pow(4).sum(), X, check=check)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [torch.ones(3), np.ones(3), 1.0, 3, True])
def test_an_order_of_a_pattern_that_is_none(order: object) -> None:
    with pytest.raises(hodiff.InputError, match="order: got"):
        hodiff.sparse.sparsity_pattern(lambda z: z.pow(4).sum(), X, order=order)  # type: ignore[arg-type]


def test_arguments_that_hold_themselves() -> None:
    endless: list[object] = [X]
    endless.append(endless)
    f = lambda z, held, rest: (held * z).pow(3).sum()
    assert hodiff.sparse.sparsity_pattern(f, X, args=endless).nnz == 6
    found = hodiff.sparse_hessian(f, X, args=endless).to_dense()
    torch.testing.assert_close(found, (6 * X**4).flatten().diag())


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("name", ["grad", "hvp", "jacobian", "per_sample_grad", "jacobian_penalty"])
def test_a_function_of_nested_results(name: str, layout: torch.layout) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ragged = torch.nested.nested_tensor([torch.ones(2, dtype=D), torch.ones(3, dtype=D)], layout=layout)
    given = {"hvp": (X,), "per_sample_grad": (ragged,)}.get(name, ())
    with pytest.raises(hodiff.InputError, match="f: f\\(x\\) is a nested tensor; return a dense one"):
        getattr(hodiff, name)(lambda z, *_: z.sum() * ragged, X, *given)


def test_pictures_on_axes_that_are_none() -> None:
    record = hodiff.trace(hodiff.MatrixOperator(torch.eye(3, dtype=D)), samples=3)
    with pytest.raises(hodiff.InputError, match="axes: got an int, expected Matplotlib axes"):
        hodiff.plotting.convergence([record], axes=3)
    with pytest.raises(hodiff.InputError, match="label: got a list of 2, expected the text"):
        hodiff.plotting.convergence([record], label=["a", "b"])  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["return_state", "first_order", "segments"])
def test_options_of_unroll_that_are_none(option: str) -> None:
    with pytest.raises(hodiff.InputError, match=f"{option}: "):
        hodiff.unroll(lambda z: z.square().sum(), X, hodiff.rules.SGD(lr=0.1), 2, **{option: np.ones(2)})  # type: ignore[call-overload]


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
@pytest.mark.parametrize("call", [
    lambda f: hodiff.jacobian(f, X[:2]), lambda f: hodiff.vjp(f, X[:2], X[:2]), lambda f: hodiff.jvp(f, X[:2], X[:2]),
    lambda f: hodiff.sparse_jacobian(f, X[:2]), lambda f: hodiff.jacobian_penalty(f, X[:2], samples=None),
])  # fmt: skip
def test_a_function_of_sparse_results(call, layout: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f = lambda z: (z**2).to_sparse() if layout == "sparse_coo" else (z**2).to_sparse_csr()
        with pytest.raises(hodiff.InputError, match=rf"f: f\(x\) is a torch\.{layout} tensor; return a dense one"):
            call(f)
