"""Shapes like the input's: containers, modules, selections, dtypes, layouts, empty and 0-d tensors."""

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import hodiff
from tests.support.inputs import CONTAINERS, direction
from tests.support.modules import BY_NAME
from tests.support.oracle import flatten
from tests.support.properties import agree, leaves, same_structure

D = torch.float64
A, B = torch.tensor([0.3, -0.8, 1.1], dtype=D), torch.tensor([[0.5, -1.2], [0.9, 0.2]], dtype=D)
containers = pytest.mark.parametrize("name", CONTAINERS)


def mixed(a: Tensor, b: Tensor) -> Tensor:
    return (torch.sin(a)[:, None, None] * b**3).sum() * a.prod() + a[0] ** 2


def flat_mixed(z: Tensor) -> Tensor:
    return mixed(z[:3], z[3:].reshape(2, 2))


Z = torch.cat([A, B.reshape(-1)])


@containers
def test_containers(name: str) -> None:
    build, read = CONTAINERS[name]
    x, v = build(A, B), build(direction(A), direction(B))
    f = lambda t: mixed(*read(t))
    g = hodiff.grad(f, x)
    same_structure(g, x)
    agree(flatten(g), hodiff.grad(flat_mixed, Z))
    product = hodiff.hvp(f, x, v)
    same_structure(product, x)
    agree(flatten(product), hodiff.hvp(flat_mixed, Z, flatten(v)))
    many = build(direction(A, 3, 2), direction(B, 4, 2))
    product = hodiff.hvp(f, x, many)
    for i in range(2):
        single = build(*(t[i] for t in read(many)))
        agree([t[i] for t in leaves(product)], leaves(hodiff.hvp(f, x, single)))
    whole = hodiff.hessian(flat_mixed, Z)
    agree(hodiff.hessian(f, x, matrix=True), whole)
    blocks = hodiff.hessian(f, x)
    rows = [read(block) for block in read(blocks)]
    agree(rows[0][0], whole[:3, :3].clone())
    agree(rows[0][1], whole[:3, 3:].reshape(3, 2, 2).clone())
    agree(rows[1][0], whole[3:, :3].reshape(2, 2, 3).clone())
    agree(rows[1][1], whole[3:, 3:].reshape(2, 2, 2, 2).clone())
    diagonal = hodiff.hessian_diagonal(f, x)
    same_structure(diagonal, x)
    agree(flatten(diagonal), whole.diagonal().clone())
    value, gradient, again = hodiff.value_grad_and_hessian(f, x, matrix=True)
    agree((value, flatten(gradient), again), (f(x), flatten(g), whole))


@containers
def test_containers_of_outputs(name: str) -> None:
    build, read = CONTAINERS[name]
    f = lambda x: build(torch.sin(x), torch.outer(x, x)[:2])
    jacobian = hodiff.jacobian(f, A)
    by_hand = (torch.diag(torch.cos(A)), hodiff.jacobian(lambda x: torch.outer(x, x)[:2], A))
    agree(read(jacobian), by_hand)
    u, v = build(direction(A), direction(torch.ones(2, 3, dtype=D))), direction(A, 7)
    pushed = hodiff.jvp(f, A, v)
    same_structure(pushed, f(A))
    agree(read(pushed), tuple(torch.tensordot(j, v, 1) for j in by_hand))
    agree(hodiff.vjp(f, A, u), sum(torch.tensordot(t, j, t.ndim) for t, j in zip(read(u), by_hand, strict=True)))
    where = build(A, B)
    both = hodiff.jacobian(lambda t: {"out": read(t)[0] * read(t)[1].sum()}, where)
    agree(read(both["out"]), (torch.eye(3, dtype=D) * B.sum(), A[:, None, None].expand(3, 2, 2).clone()))


def test_containers_in_the_tensor_form() -> None:
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    loss = mixed(a, b)
    got = hodiff.hvp(loss, {"a": a, "b": b}, {"a": A, "b": B})
    agree(flatten(got), hodiff.hvp(flat_mixed, Z, Z))
    agree(hodiff.hessian(loss, (a, b), matrix=True), hodiff.hessian(flat_mixed, Z))
    jacobian = hodiff.jacobian({"y": torch.sin(a), "z": a.sum() * b}, a)
    agree(jacobian["y"], torch.diag(torch.cos(A)))
    agree(jacobian["z"], B[..., None].expand(2, 2, 3).clone())


def test_ordered_dict_and_shared_structure() -> None:
    x = OrderedDict(second=A, first=B)
    g = hodiff.grad(lambda t: mixed(t["second"], t["first"]), x)
    assert list(g) == ["second", "first"]
    agree(
        hodiff.hvp(lambda t: mixed(t["second"], t["first"]), x, {"first": B, "second": A})["second"],
        hodiff.hvp(flat_mixed, Z, Z)[:3].clone(),
    )


def test_cross_hessian_structures_nest() -> None:
    f = lambda x, y: mixed(x["a"], y[0]) * y[1]
    s = torch.tensor(0.7, dtype=D)
    block = hodiff.cross_hessian(f, {"a": A}, (B, s))
    product = hodiff.cross_hvp(f, {"a": A}, (B, s), (direction(B), s))
    agree(product["a"], torch.tensordot(block["a"][0], direction(B), 2) + block["a"][1] * s)
    whole = hodiff.hessian(flat_mixed, Z)
    agree(block["a"][0], s * whole[:3, 3:].reshape(3, 2, 2))
    agree(block["a"][1], hodiff.grad(flat_mixed, Z)[:3].clone())


@pytest.mark.parametrize("swap", [False, True])
def test_cross_hessian_of_inputs_and_parameters(swap: bool) -> None:
    setting = BY_NAME["GELU"].build()
    model, x = setting.model, setting.x[:2]
    by_name = {n: p.detach() for n, p in model.named_parameters()}
    f = lambda m, t: setting.loss(m, t)
    if swap:
        block = hodiff.cross_hessian(lambda t, m: f(m, t), x, model)
    else:
        block = hodiff.cross_hessian(f, model, x)
    assert list(block) == list(by_name)
    v = direction(x)
    for name, p in by_name.items():
        # d/dt grad_p at x + t v
        pushed = hodiff.jvp(lambda t, n=name: hodiff.grad(lambda m: f(m, t), model)[n], x, v)
        if swap:
            agree(torch.tensordot(v, block[name], 2), pushed)
        else:
            assert block[name].shape == (*p.shape, *x.shape)
            agree(torch.tensordot(block[name], v, 2), pushed)


# --- modules and selections -------------------------------------------------------------------------------------------


def test_module_results_are_dicts_by_name() -> None:
    setting = BY_NAME["tied weights"].build()
    names = [n for n, _ in setting.model.named_parameters()]
    assert (
        list(hodiff.grad(setting.of_model, setting.model)) == names == ["encoder.weight", "encoder.bias", "twin.bias"]
    )
    matrix = hodiff.hessian(setting.of_model, setting.model, matrix=True)
    blocks = hodiff.hessian(setting.of_model, setting.model)
    agree(
        torch.cat(
            [
                torch.cat([blocks[r][c].reshape(setting.model.get_parameter(r).numel(), -1) for c in names], 1)
                for r in names
            ]
        ),
        matrix,
    )
    frozen = BY_NAME["frozen first layer"].build()
    assert list(hodiff.grad(frozen.of_model, frozen.model)) == ["2.weight", "2.bias"]


def test_selection_is_a_block() -> None:
    setting = BY_NAME["GELU"].build()
    head = hodiff.select(setting.model, "2.*")
    assert list(head) == ["2.weight", "2.bias"]
    assert head.module is setting.model
    whole = hodiff.hessian(setting.of_model, setting.model)
    part = hodiff.hessian(lambda s: setting.of_model(s.module), head)
    assert list(part) == ["2.weight", "2.bias"]
    for row in part:
        for column in part[row]:
            agree(part[row][column], whole[row][column])
    assert list(hodiff.select(setting.model, "0")) == ["0.weight", "0.bias"]  # a submodule's name selects all below
    assert list(hodiff.select(setting.model, "*", exclude="*.bias")) == ["0.weight", "2.weight"]
    assert list(hodiff.select(setting.model, "0.weight", "2.b*", exclude=("0.bias",))) == ["0.weight", "2.bias"]
    g = hodiff.grad(lambda s: s["2.bias"].pow(3).sum(), head)
    agree(g["2.bias"], 3 * setting.model[2].bias.detach() ** 2)
    assert not g["2.weight"].any()


def test_containers_may_hold_modules() -> None:
    setting = BY_NAME["GELU"].build()
    v = direction(setting.x)
    w = {n: direction(p) for n, p in setting.model.named_parameters()}
    f = lambda t: setting.loss(t["model"], t["x"])
    product = hodiff.hvp(f, {"model": setting.model, "x": setting.x}, {"model": w, "x": v})
    cross = hodiff.jvp(lambda x: hodiff.grad(lambda m: setting.loss(m, x), setting.model), setting.x, v)
    own = hodiff.hvp(setting.of_model, setting.model, w)
    assert list(product["model"]) == list(own)
    for name in own:
        agree(product["model"][name], own[name] + cross[name])
    assert product["x"].shape == setting.x.shape


def test_many_vectors_for_a_module() -> None:
    setting = BY_NAME["LayerNorm"].build()
    many = {n: direction(p, i, 3) for i, (n, p) in enumerate(setting.model.named_parameters())}
    for chunk in (1, 2, "auto"):
        got = hodiff.hvp(setting.of_model, setting.model, many, chunk_size=chunk)
        for k in range(3):
            single = hodiff.hvp(setting.of_model, setting.model, {n: v[k] for n, v in many.items()})
            agree({n: t[k] for n, t in got.items()}, single)


# --- dtypes and layouts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)],
)
def test_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    x = A.to(dtype)
    f = lambda t: torch.sin(t).mul(t**2).sum()
    expected = hodiff.hessian_diagonal(f, x.double())
    got = hodiff.hessian_diagonal(f, x)
    assert got.dtype == dtype
    agree(got.double(), expected, tolerance)
    assert hodiff.hvp(f, x, torch.ones_like(x)).dtype == dtype
    assert hodiff.nth_derivative(torch.sin, x, 3).dtype == dtype


def test_mixed_dtypes() -> None:
    x = {"single": A.float(), "double": A}
    f = lambda t: (t["single"].double() ** 2 * t["double"] ** 3).sum()
    h = hodiff.hvp(f, x, {"single": torch.ones(3), "double": torch.ones(3, dtype=D)})
    assert (h["single"].dtype, h["double"].dtype) == (torch.float32, D)
    agree(h["double"], 6 * A**2 * A + 6 * A**2 * A, 1e-6)
    assert hodiff.hessian(f, x, matrix=True).dtype == D  # one matrix has one dtype: the promoted one


LAYOUTS = {
    "transposed": lambda: torch.randn(3, 4, dtype=D).T,
    "sliced": lambda: torch.randn(8, 6, dtype=D)[::2, 1:4],
    "expanded": lambda: torch.randn(4, 1, dtype=D).expand(4, 3),
    "channels_last": lambda: torch.randn(2, 3, 2, 2, dtype=D).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.randn(2, 3, 4, dtype=D).permute(2, 0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    x = LAYOUTS[layout]()
    f = lambda t: (torch.sin(t) * t.cumsum(-1)).square().sum()
    v = direction(x)
    tidy = x.contiguous()
    agree(hodiff.grad(f, x), hodiff.grad(f, tidy))
    agree(hodiff.hvp(f, x, v.mT.contiguous().mT), hodiff.hvp(f, tidy, v))
    agree(hodiff.hessian(f, x), hodiff.hessian(f, tidy))
    agree(hodiff.hessian(f, x, matrix=True), hodiff.hessian(f, tidy, matrix=True))
    agree(hodiff.nth_derivative(torch.sin, x, 3), -torch.cos(tidy))
    expanded = torch.ones((), dtype=D).expand(x.shape)
    agree(hodiff.hvp(f, x, expanded), hodiff.hvp(f, tidy, torch.ones_like(tidy)))


def test_scalar_point() -> None:
    x = torch.tensor(0.4, dtype=D)
    agree(hodiff.hessian(torch.sin, x), -torch.sin(x))
    assert hodiff.hessian(torch.sin, x, matrix=True).shape == (1, 1)
    agree(
        hodiff.hvp(torch.sin, x, torch.tensor([1.0, 2.0], dtype=D)), -torch.sin(x) * torch.tensor([1.0, 2.0], dtype=D)
    )
    agree(hodiff.jacobian(lambda t: torch.stack([t, t**2]), x), torch.stack([torch.ones_like(x), 2 * x]))
    agree(hodiff.nth_derivative(torch.sin, x, 4), torch.sin(x))


def test_empty_tensor_and_empty_output() -> None:
    x = torch.zeros(0, dtype=D)
    assert hodiff.grad(lambda t: (t**2).sum(), x).shape == (0,)
    assert hodiff.hessian(lambda t: (t**2).sum(), x).shape == (0, 0)
    assert hodiff.nth_derivative(torch.sin, x, 3).shape == (0,)
    assert hodiff.jacobian(lambda t: t[:0], A).shape == (0, 3)
    both = hodiff.grad(lambda t: (t[0] ** 2).sum() + (t[1] ** 3).sum(), (x, A))
    assert both[0].shape == (0,)
    agree(both[1], 3 * A**2)
    no_vectors = torch.zeros(0, 3, dtype=D)
    assert hodiff.hvp(lambda t: (t**3).sum(), A, no_vectors).shape == (0, 3)


def test_result_is_no_view_of_the_callers_tensors() -> None:
    """f = <c, x>: the gradient is c's values, not c."""
    c = A.clone()
    g = hodiff.grad(lambda x: c @ x, A)
    g.zero_()
    agree(c, A)
    hodiff.jacobian(lambda x: c * x, A).zero_()
    hodiff.vjp(lambda x: x, A, c).zero_()
    hodiff.jvp(lambda x: x, A, c).zero_()
    hodiff.hvp(lambda x: x.square().sum() / 2, A, c).zero_()
    agree(c, A)


def test_parameter_as_a_tensor() -> None:
    w = nn.Parameter(A.clone())
    g = hodiff.grad(lambda t: (t**3).sum(), w)
    assert type(g) is Tensor
    assert w.grad is None
    agree(g, 3 * A**2)
