"""Messages, algebra and what belongs to one class of operator only."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hodiff
from tests.support.modules import Cube
from tests.support.operators import IGNORED, LABELS, SMOOTH, D, X, draw, network, plain_jacobian, predict, split
from tests.support.properties import agree


def hessian() -> hodiff.HessianOperator:
    return hodiff.HessianOperator(lambda w: (X @ w).pow(4).sum(), draw(3))


@pytest.mark.parametrize("kind", ["data", "matrix"])
def test_transforms_of_torch_are_refused(kind: str) -> None:
    """A detached product would be a constant to them: half of the derivative of v'Hv."""
    H, v = hessian(), draw(3)
    A = H if kind == "data" else hodiff.MatrixOperator(H.dense())
    with pytest.raises(hodiff.InputError, match=r"inside a torch\.func transform"):
        torch.func.grad(lambda v: v @ (A @ v))(v)
    if kind == "data":
        H @ v  # evaluated, and refused then too
        with pytest.raises(hodiff.InputError, match=r"inside a torch\.func transform"):
            torch.vmap(lambda v: A @ v)(v[None])


# --- algebra ----------------------------------------------------------------------------------------------------------


def test_scalars_of_every_kind() -> None:
    H, v = hessian(), draw(3, seed=1)
    for scalar in (2, 2.0, torch.tensor(2.0)):
        agree((H + scalar) @ v, H @ v + 2 * v)
        agree((scalar + H) @ v, H @ v + 2 * v)
        agree((H - scalar) @ v, H @ v - 2 * v)
        agree((scalar - H) @ v, 2 * v - H @ v)
        agree((scalar * H) @ v, 2 * (H @ v))
        agree((H / scalar) @ v, (H @ v) / 2)
    agree(-H @ v, -(H @ v))


BAD_OPERANDS = {
    r"MatrixOperator\(A\)": lambda H: H + torch.ones(3, 3),
    r"requires grad": lambda H: H * torch.tensor(1.0, requires_grad=True),
    r"a str": lambda H: H + "x",
    r"sizes 3 and 4": lambda H: H + hodiff.MatrixOperator(torch.ones(4, dtype=D)),
    r"float64.*float32": lambda H: H @ hodiff.MatrixOperator(torch.ones(3)),
    r"matches no leaf. Near matches: x": lambda H: H.block("y"),
    r"got an int": lambda H: H.block(0),
    r"needs the same": lambda H: hodiff.MatrixOperator(draw(2, 3)).block("x"),
    r"sizes 3 and 2": lambda H: hodiff.MatrixOperator(draw(2, 3)) + 1,
}


@pytest.mark.parametrize("pattern", BAD_OPERANDS)
def test_bad_operands(pattern: str) -> None:
    with pytest.raises(hodiff.InputError, match=pattern):
        BAD_OPERANDS[pattern](hessian())


def test_blocks_share_what_was_evaluated() -> None:
    calls = []
    model = network()
    H = hodiff.HessianOperator(lambda m: calls.append(1) or m(X).square().mean(), model)
    whole, block = H.dense(), H.block("0.weight", "1").block("1.*")
    agree(block.dense(), whole[16:24, 16:24])
    assert list(block.unflatten(draw(8))) == ["1.weight", "1.bias"]
    assert len(calls) == 1


def test_blocks_of_containers_by_the_names_in_messages() -> None:
    H = hodiff.HessianOperator(lambda p: (p["a"].sum() * p["b"][0].sum()) ** 2, {"a": draw(2), "b": [draw(3)]})
    agree(H.block("x['b'][0]").dense(), H.dense()[2:, 2:])


def test_a_vector_may_be_an_ordered_mapping_or_a_selection_of_names_in_any_order() -> None:
    model = network()
    H = hodiff.HessianOperator(lambda m: m(X).square().mean(), model)
    v = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    found = H @ dict(reversed(v.items()))
    assert list(found) == list(v)
    agree(list(found.values()), list((H @ v).values()))


def test_stack_of_vectors_at_one_dimension_must_be_columns() -> None:
    H = hessian()
    with pytest.raises(hodiff.InputError, match=r"columns: give v\.T"):
        H @ draw(5, 3)


def test_repr_says_what_is_there() -> None:
    H = hodiff.HessianOperator(lambda m, b: (m(b[0]).sum(), len(b[0])), network().float(), data=split(X.float()))
    assert repr(H) == "HessianOperator(39 x 39, float32, double backward, 2 batches, not evaluated)"
    H @ torch.ones(39)
    assert "2 batches, cached " in repr(H) and "KiB" in repr(H)
    assert repr(H + 0.1).startswith("AffineOperator(39 x 39, float32, HessianOperator(")


def test_unused_parameter_is_a_zero_block() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)}).double()
    H = hodiff.HessianOperator(lambda m: m["used"](draw(4, 2)).pow(2).sum(), model)
    assert H.block("unused").dense().abs().max() == 0
    with pytest.raises(hodiff.GraphError, match="strict"):
        hodiff.HessianOperator(lambda m: m["used"](draw(4, 2)).sum(), model, strict=True) @ torch.zeros(6, dtype=D)


def test_scipy_exports_single_precision_as_such() -> None:
    import numpy as np

    S = hodiff.HessianOperator(lambda x: (x**2).sum(), torch.ones(3)).to_scipy()
    assert S.dtype == np.float32 and (S @ np.ones(3)).dtype == np.float32
    with pytest.raises(hodiff.InputError, match="bfloat16"):
        hodiff.HessianOperator(lambda x: (x**2).sum(), torch.ones(3, dtype=torch.bfloat16)).to_scipy()


def test_construction_evaluates_nothing_and_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def never(*args: object) -> None:
        raise RuntimeError("evaluated")

    hodiff.HessianOperator(never, draw(3))
    hodiff.GaussNewtonOperator(never, nn.MSELoss(), draw(3), data=[1])
    hodiff.JacobianOperator(never, draw(3))
    assert capsys.readouterr() == ("", "")


def test_tensor_form_leaves_the_callers_graph() -> None:
    x = draw(3).requires_grad_()
    loss = (X @ x).pow(4).sum()
    H = hodiff.HessianOperator(loss, x)
    H @ draw(3), H.dense()
    loss.backward()
    agree(x.grad, H.gradient)
    with pytest.raises(hodiff.InputError, match="already computed"):
        hodiff.HessianOperator(loss, x, data=[1])
    with pytest.raises(hodiff.InputError, match="f: got an int"):
        hodiff.HessianOperator(3, x)  # type: ignore[arg-type]


# --- Gauss-Newton and Fisher ------------------------------------------------------------------------------------------

BAD_LOSSES = {
    r'"none" gives no scalar': nn.CrossEntropyLoss(reduction="none"),
    r"(?s)L1Loss.*L1Loss\(reduction='sum'\)": nn.L1Loss(),
    r"got the class MSELoss": nn.MSELoss,
    r"got a str": "mse",
}


@pytest.mark.parametrize("pattern", BAD_LOSSES)
def test_bad_losses(pattern: str) -> None:
    with pytest.raises(hodiff.InputError, match=pattern):
        hodiff.GaussNewtonOperator(predict, BAD_LOSSES[pattern], network(), data=split(X, LABELS))


def test_regularizer_inside_the_loss_is_refused() -> None:
    model = network()
    loss = lambda outputs, batch: (outputs.square().sum() + model[0].weight.square().sum(), len(outputs))
    with pytest.raises(hodiff.GraphError, match=r"0\.weight other than through the outputs.*G \+ 0\.1"):
        hodiff.GaussNewtonOperator(predict, loss, model, data=split(X, LABELS)) @ draw(39)


def test_other_misuse() -> None:
    model = network()
    with pytest.raises(hodiff.InputError, match="None, expected an iterable"):
        hodiff.GaussNewtonOperator(predict, nn.MSELoss(), model, data=None)
    with pytest.raises(hodiff.InputError, match="is not a pair"):
        hodiff.GaussNewtonOperator(lambda m, b: m(b), nn.MSELoss(), model, data=[X]) @ draw(39)
    with pytest.raises(hodiff.InputError, match=r"targets have shape \(10,\), the outputs \(10, 3\)"):
        hodiff.GaussNewtonOperator(predict, nn.MSELoss(), model, data=[(X, LABELS.double())]) @ draw(39)
    with pytest.raises(hodiff.InputError, match=r"targets have shape \(10, 3\), expected \(10,\)"):
        hodiff.GaussNewtonOperator(predict, nn.CrossEntropyLoss(), model, data=[(X, LABELS[:, None].expand(10, 3))]) @ (
            draw(39)
        )
    with pytest.raises(hodiff.InputError, match="predict: got an int"):
        hodiff.JacobianOperator(3, model)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="no gradient"):
        hodiff.JacobianOperator(lambda m: m(X), model).gradient  # noqa: B018


@pytest.mark.parametrize("shape", [(3,), (6, 3), (6, 3, 2), (2, 3, 2, 2)])
@pytest.mark.parametrize("kind", ["exact", "mc", "empirical"])
def test_class_dimension_is_where_cross_entropy_has_it(shape: tuple[int, ...], kind: str) -> None:
    """The closed form against the loss differentiated; by samples, against its mean over many."""
    z = draw(*shape, seed=5)
    target = torch.randint(3, shape[:1] * (len(shape) > 1) + shape[2:], generator=torch.Generator().manual_seed(0))
    data = [(None, target)]
    identity = lambda z, batch: z * 1.0
    G = hodiff.GaussNewtonOperator(identity, nn.CrossEntropyLoss(), z, data=data).dense()
    agree(G, hodiff.hessian(lambda z: F.cross_entropy(z, target), z, matrix=True), 1e-10)
    if len(shape) == 1 and kind == "empirical":
        return
    options = {"samples": 4000, "generator": torch.Generator().manual_seed(1)} if kind == "mc" else {}
    found = hodiff.FisherOperator(identity, nn.CrossEntropyLoss(), z, data=data, kind=kind, **options).dense()
    if kind == "empirical":
        g = hodiff.grad(lambda z: F.cross_entropy(z, target, reduction="sum"), z).reshape(shape[0], -1)
        expected = torch.block_diag(*[torch.outer(row, row) for row in g]) / target.numel()
        agree(found, expected, 1e-10)
    else:  # 4000 labels: each entry is within some 5 / sqrt(4000) of its scale
        agree(found, G, 1e-10 if kind == "exact" else 0.1)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss()])
def test_sampled_fisher_of_other_likelihoods(loss: nn.Module) -> None:
    z, target = draw(2, 2), torch.ones(2, 2, dtype=D)
    identity = lambda z, batch: z * 1.0
    exact = hodiff.FisherOperator(identity, loss, z, data=[(None, target)], kind="exact").dense()
    agree(exact, hodiff.hessian(lambda z: loss(z, target), z, matrix=True), 1e-10)
    sampled = hodiff.FisherOperator(identity, loss, z, data=[(None, target)], kind="mc", samples=10000).dense()
    agree(sampled, exact, 0.1)


def test_sampled_labels_stay_and_are_seeded() -> None:
    make = lambda seed, budget: hodiff.FisherOperator(
        predict, nn.CrossEntropyLoss(), network(), data=split(X, IGNORED), kind="mc", memory_budget=budget,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    first = make(0, 0.5)
    agree(first.dense(), first.dense(), 0)
    agree(make(0, 0).dense(), first.dense(), 1e-12)
    assert (make(1, 0.5).dense() - first.dense()).norm() > 1e-3
    before = first.dense()
    assert (first.refresh().dense() - before).norm() > 1e-3


def test_fisher_of_what_is_no_likelihood_is_refused() -> None:
    for kind in ("exact", "mc"):
        with pytest.raises(hodiff.InputError, match="GaussNewtonOperator"):
            hodiff.FisherOperator(predict, SMOOTH, network(), data=split(X, LABELS), kind=kind)
        with pytest.raises(hodiff.InputError, match="does not name a distribution"):
            hodiff.FisherOperator(predict, lambda o, b: (o.sum(), 1), network(), data=split(X), kind=kind)
    with pytest.raises(hodiff.InputError, match="kind: got 'true'"):
        hodiff.FisherOperator(predict, nn.MSELoss(), network(), data=split(X, X), kind="true")
    with pytest.raises(hodiff.InputError, match="leading dimension"):
        hodiff.FisherOperator(lambda w, b: w.sum(), lambda o, b: (o**2, 1), draw(3), data=[1], kind="empirical") @ draw(
            3
        )


def test_empirical_fisher_of_several_outputs() -> None:
    """One score per sample across all outputs, not one per output."""
    model = network()
    both = lambda m, b: {"a": m(b[0]), "b": torch.sin(m(b[0])[:, :2])}
    loss = lambda o, b: (o["a"].square().sum() + (o["b"] ** 3).sum(), len(b[0]))
    F_ = hodiff.FisherOperator(both, loss, model, data=split(X), kind="empirical").dense()
    g = torch.cat([
        plain_jacobian(loss(both(model, (X[i : i + 1],)), (X[:1],))[0].reshape(1), list(model.parameters()))
        for i in range(10)
    ])  # fmt: skip
    agree(F_, g.T @ g / 10, 1e-11)


# --- Jacobian ---------------------------------------------------------------------------------------------------------


def test_jacobian_of_containers_and_without_data() -> None:
    model = network()
    J = hodiff.JacobianOperator(lambda m: {"p": m(X[:2]), "q": (m(X[2:3]).sum(),)}, model)
    v = draw(39)
    found = J @ J.unflatten(v)
    assert found["p"].shape == (2, 3) and found["q"][0].shape == ()
    dense = plain_jacobian(
        torch.cat([model(X[:2]).reshape(-1), model(X[2:3]).sum().reshape(1)]), list(model.parameters())
    )
    agree(J.dense(), dense, 1e-11)
    agree(J.T @ found, J.unflatten(dense.T @ (dense @ v)), 1e-11)
    assert J.value["p"].shape == (2, 3)


def test_rows_keep_their_places_when_data_are_shuffled() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), batch_size=4, shuffle=True)
    J = hodiff.JacobianOperator(predict, network(), data=loader, memory_budget=0)
    agree(J.dense(), J.dense(), 0)
    agree((J.T @ J).dense(), J.dense().T @ J.dense(), 1e-11)
    G = J.T @ J
    assert G.symmetric and (G @ G).symmetric and not (G @ (G + 1)).symmetric


def test_outputs_that_cannot_be_put_together() -> None:
    J = hodiff.JacobianOperator(lambda m, b: m(b[0]).T, network(), data=split(X))
    with pytest.raises(hodiff.InputError, match="leading dimension"):
        J @ draw(39)


def test_no_warning_without_a_reason() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hessian() @ draw(3)


def test_batches_add_up_where_two_leaves_have_one_gradient() -> None:
    """Of x + y the engine gives one tensor as both parts: adding in place would count a batch twice."""
    f = lambda p, weight: ((p[0] + p[1]).square().sum() * weight, weight)
    x, y, v = draw(3), draw(3, seed=1), draw(6, seed=2)
    both = v[:3] + v[3:]
    H = hodiff.HessianOperator(f, (x, y), data=[1.0, 2.0, 4.0])
    agree(H @ v, 2 * torch.cat([both, both]))
    agree(H @ v[:, None].expand(6, 3), 2 * torch.cat([both, both])[:, None].expand(6, 3))
    agree(H.gradient, (2 * (x + y),) * 2)


def test_sparse_gradients_of_an_embedding_over_batches() -> None:
    words = [torch.tensor([1, 2, 3]), torch.tensor([3, 3])]
    loss = lambda m, word: (m(word).pow(3).sum(), len(word))
    dense = nn.Embedding(5, 2, dtype=D)
    sparse = nn.Embedding(5, 2, sparse=True, _weight=dense.weight.detach().clone())
    H = hodiff.HessianOperator(loss, sparse, data=words)
    agree(H.dense(), hodiff.HessianOperator(loss, dense, data=words).dense(), 1e-12)
    agree(
        H.dense().diagonal().reshape(5, 2),
        6 * dense.weight * torch.bincount(torch.cat(words), minlength=5)[:, None] / 5,
    )


# --- calls that would fail elsewhere, and raw -------------------------------------------------------------------------

PAIRS = split(X, X)


def make(cls: type = hodiff.GaussNewtonOperator, function=predict, loss=None, where=None, data=PAIRS, **options):
    return cls(function, nn.MSELoss() if loss is None else loss, where or network(), data=data, **options)


MISUSE = {
    r'kind is missing\. "exact"': lambda: make(hodiff.FisherOperator),
    r"predict is called as predict\(where, batch\).*\(model\) does not allow": lambda: make(
        function=lambda model: model
    ),
    r"predict is called as predict\(where\) without data=": lambda: hodiff.JacobianOperator(predict, network()),
    r"f is called as f\(where, batch\) with data=": lambda: hodiff.HessianOperator(lambda m: 0, network(), data=PAIRS),
    r"f is called as f\(where\) without data=": lambda: hodiff.HessianOperator(lambda m, b: 0, network()),
    r"f is called as f\(where, int\)": lambda: hodiff.HessianOperator(lambda m: 0, network(), args=(3,)),
    r"loss is called as loss\(outputs, batch\)": lambda: make(loss=lambda outputs: outputs.sum()),
    r"(?s)predict: got the module Sequential itself.*model\(batch\[0\]\)": lambda: make(function=network()),
    r"^the order is predict, loss, where": lambda: make(function=nn.MSELoss(), loss=predict),
    r"the order is predict, loss, where": lambda: make(loss=network(), where=nn.MSELoss()),
    r"data: got None": lambda: make(data=None),
    r"generator: got an int": lambda: make(hodiff.FisherOperator, kind="mc", generator=0),
    r"(?s)F\.mse_loss takes targets.*a tuple of 2.*reduction='sum'": lambda: make(loss=F.mse_loss) @ draw(39),
    r"HuberLoss does not name .*hodiff\.GaussNewtonOperator": lambda: make(
        hodiff.FisherOperator, loss=nn.HuberLoss(), kind="exact"
    ),
    r"(?s)not of MarginRankingLoss.*\(input1, \.\.\. input2, \.\.\. target\)": lambda: make(
        loss=nn.MarginRankingLoss()
    ),
}


@pytest.mark.parametrize("pattern", MISUSE)
def test_misuse_is_named(pattern: str) -> None:
    with pytest.raises(hodiff.InputError, match=pattern):
        MISUSE[pattern]()


def test_functions_that_can_be_called_are_not_refused() -> None:
    class Callable_:
        def __call__(self, model: nn.Module, *batches: object, scale: float = 1.0) -> torch.Tensor:
            return model(X) * scale

    calls = Callable_()
    agree(hodiff.JacobianOperator(calls, network()).value, network()(X).detach())
    agree(hodiff.JacobianOperator(calls, network(), data=[0]).value, network()(X).detach())
    bounded = hodiff.HessianOperator(lambda m, b, k, *, p: (m(b[0]).pow(p).sum() * k, 1), network(), data=PAIRS,
                                     args=(2.0,), kwargs={"p": 2})  # fmt: skip
    agree(bounded.value, 2 * network()(X).square().sum().detach() / 2)
    hodiff.HessianOperator(torch.dot, torch.ones(2), args=(torch.ones(2),))  # built in: it has no signature
    targets = [X, X + 1]
    summed = lambda z, t: (F.mse_loss(z, t, reduction="sum"), len(t))
    agree(
        make(function=lambda m, b: m(X), loss=F.mse_loss, data=targets, batch_weight=lambda t: t.numel()).dense(),
        3 * make(function=lambda m, b: m(X), loss=summed, data=targets).dense() / 9,
    )


def test_an_error_of_the_loss_says_what_it_was_given() -> None:
    with pytest.raises(AttributeError, match="'tuple' object has no attribute") as caught:
        make(loss=lambda outputs, targets: (F.mse_loss(outputs, targets), 1)) @ draw(39)
    assert any("loss(outputs, batch) with this batch: a tuple of 2" in n for n in caught.value.__notes__)


def test_complex_parameters_are_refused_by_name() -> None:
    """Left out, they would make every number another one, silently."""
    model = nn.Linear(3, 1, dtype=D)
    model.c = nn.Parameter(torch.ones(2, dtype=torch.cdouble))
    f = lambda m: m(X).square().sum() * m.c.abs().square().sum()
    for build in (
        lambda: hodiff.HessianOperator(f, model),
        lambda: make(where=model, function=lambda m, b: m(b[0])),
        lambda: make(hodiff.FisherOperator, where=model, function=lambda m, b: m(b[0]), kind="exact"),
        lambda: hodiff.JacobianOperator(f, model),
    ):
        with pytest.raises(hodiff.InputError, match=r"\bc\b.*complex|complex.*\bc\b"):
            build()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, g):
        return (2 * ctx.saved_tensors[0] * g).detach()


@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
def test_functions_that_cut_the_backward_off() -> None:
    x, one = torch.tensor([1.0, 2.0], dtype=D), torch.ones(2, dtype=D)
    loss = lambda outputs, batch: (outputs.square().sum(), 1)
    for f in (Square.apply, lambda x: Square.apply(x) + x.sin()):
        agree(hodiff.vjp(f, x, one), hodiff.jacobian(f, x).T @ one)
        for call in (
            lambda f=f: hodiff.jvp(f, x, one),
            lambda f=f: hodiff.JacobianOperator(f, x) @ one,
            lambda f=f: hodiff.GaussNewtonOperator(lambda w, b: f(w), loss, x, data=[0]).dense(),
            lambda f=f: hodiff.FisherOperator(lambda w, b: f(w), loss, x, data=[0], kind="empirical").dense(),
        ):
            with pytest.raises(hodiff.GraphError, match=r"backward of one of Square detaches"):
                call()
    agree(hodiff.jvp(Cube.apply, x, one), 3 * x**2)
    agree(hodiff.JacobianOperator(Cube.apply, x).dense(), torch.diag(3 * x**2))
