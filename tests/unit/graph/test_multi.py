"""multi_grad: the same numbers as separate passes, on any topology; and what it leaves in memory."""

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff.curvature._memory import LiveBytes
from tests.support.ledger import Ledger, without_collector
from tests.support.properties import right_or_refused
from tests.unit.graph.random_graphs import Graphs

WAYS = ({}, {"release": True}, {"create_graph": True})


def separately(losses, where):
    rows = []
    for loss in losses:
        row = torch.autograd.grad(loss, where, retain_graph=True, allow_unused=True) if loss.requires_grad else where
        rows.append([torch.zeros_like(w) if g is None else g for g, w in zip(row, where, strict=True)])
    return rows


def compare(seed: int, options: dict) -> int:
    graphs = Graphs(seed, wild=seed % 2 == 0)
    graphs.losses.append(graphs.scalar())
    r = graphs.r
    where = r.sample(graphs.values, r.randint(1, min(3, len(graphs.values))))
    try:
        expected = separately(graphs.losses, where)
    except RuntimeError:  # two in-place views of a kind that PyTorch itself refuses
        return 0
    if all(not part.any() for row in expected for part in row):
        return 0
    try:
        got = hodiff.multi_grad(graphs.losses, where, strict=False, **options)
    except hodiff.GraphError as error:  # a product with an entry of 1e-9 has no second derivative of PyTorch's
        assert options.get("create_graph") and "near 0 (it divides by the entries)" in str(error)
        return 0
    for row, right in zip(got, expected, strict=True):
        for part, other in zip(row, right, strict=True):
            torch.testing.assert_close(part, other, rtol=1e-12, atol=1e-12)
    return 1


@pytest.mark.table(plain=1)
@pytest.mark.filterwarnings("ignore::hodiff.CustomFunctionWarning")
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_random_graphs(options):
    assert sum(compare(seed, options) for seed in range(490)) >= 400


def rebuild(seed: int, leaves):
    """The losses of graph number `seed`, on other leaves."""
    graphs = object.__new__(Graphs)
    graphs.r = random.Random(seed)
    graphs.leaves = list(leaves)
    graphs.r.randint(1, 3)
    graphs.values = list(leaves)
    for _ in range(graphs.r.randint(3, 9)):
        graphs.values.append(graphs.next(False))
    return [graphs.scalar() for _ in range(graphs.r.randint(1, 4))]


def test_functions_on_random_graphs():
    done = 0
    for seed in range(420):
        graphs = Graphs(seed, wild=False)
        expected = separately(graphs.losses, graphs.leaves)
        if all(not part.any() for row in expected for part in row):
            continue
        calls = [lambda leaves, i=i, seed=seed: rebuild(seed, leaves)[i] for i in range(len(graphs.losses))]
        try:
            got = hodiff.multi_grad(calls, graphs.leaves)
        except hodiff.GraphError as error:  # one loss that depends on nothing: said, not zero
            assert "depend" in str(error)
            continue
        for row, right in zip(got, expected, strict=True):
            torch.testing.assert_close(row, right, rtol=1e-12, atol=1e-12)
        done += 1
    assert done >= 400


def test_each_topology_by_hand():
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    for options in WAYS:
        z = w * x**2
        inner, outer, skip = z.sum(), (w * z).sum(), (z * x).sum()  # w and x reach the losses directly, too
        got = hodiff.multi_grad({"inner": inner, "outer": outer, "skip": skip, "itself": inner}, (x, w), **options)
        right = {
            "inner": (4 * x, (x**2).sum()),
            "outer": (8 * x, 4 * (x**2).sum()),
            "skip": (6 * x**2, (x**3).sum()),
            "itself": (4 * x, (x**2).sum()),
        }
        for name, (by_x, by_w) in right.items():
            torch.testing.assert_close([part.detach() for part in got[name]], [by_x.detach(), by_w.detach()])
        assert x.grad is None


def heads(k: int = 6):
    torch.manual_seed(1)
    trunk = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()).double()
    each = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double() for _ in range(k)])
    return nn.ModuleDict({"trunk": trunk, "heads": each}), torch.randn(64, 8, dtype=torch.float64)


def expected_heads(model, x):
    z = model["trunk"](x)
    losses = [head(z).square().mean() for head in model["heads"]]
    return separately(losses, list(model.parameters()))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_module(shared, create_graph):
    model, x = heads()
    right = expected_heads(model, x)
    if shared:
        calls = [lambda m, z, i=i: m["heads"][i](z).square().mean() for i in range(6)]
        got = hodiff.multi_grad(calls, model, shared=lambda m: m["trunk"](x), create_graph=create_graph)
    else:
        calls = [lambda m, i=i: m["heads"][i](m["trunk"](x)).square().mean() for i in range(6)]
        got = hodiff.multi_grad(calls, model, create_graph=create_graph)
    names = [name for name, _ in model.named_parameters()]
    for row, expected in zip(got, right, strict=True):
        assert list(row) == names
        torch.testing.assert_close([part.detach() for part in row.values()], expected, rtol=1e-12, atol=1e-14)
    assert all(part.requires_grad == create_graph for part in got[0].values())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("release", [False, True])
def test_the_graphs_are_the_callers_unless_released(release):
    model, x = heads()
    with without_collector(), Ledger() as ledger:
        z = model["trunk"](x)
        losses = [head(z).square().mean() for head in model["heads"]]
        before = ledger.alive(besides=(z, losses))
        got = hodiff.multi_grad(losses, model, release=release)
        after = ledger.alive(besides=(z, losses, got))
    if release:
        assert after == 0
        with pytest.raises(RuntimeError, match=r"was released: by hodiff|second time"):
            losses[0].backward()
    else:
        assert after == before > 0
        for loss in losses:
            loss.backward(retain_graph=True)


def test_what_no_later_loss_needs_goes_before_it():
    """Losses at layers: the deepest has its turn first, in whatever order they are given."""
    peaks = {}
    for release in (False, True):
        for order in (1, -1):
            torch.manual_seed(0)
            layers, h, losses = nn.ModuleList([nn.Linear(64, 64) for _ in range(12)]), torch.randn(1024, 64), []
            with LiveBytes() as live:
                for layer in layers:
                    h = layer(h).tanh()
                    losses.append(h.square().mean())
                hodiff.multi_grad(losses[::order], layers, release=release)
            peaks[release, order] = live.peak
            del h, losses
    assert peaks[True, 1] == pytest.approx(peaks[True, -1], rel=0.05)
    assert peaks[True, 1] < 0.8 * peaks[False, 1]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_hook_on_the_shared_tensor_runs_once_for_each_loss(options):
    """As in separate passes; a pass that ended at the tensor, and another that began there, would run it twice."""
    a = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    ran = []

    def hook(g):
        ran.append(1)
        return 10 * g

    h = a * 1
    h.register_hook(hook)
    first, second = hodiff.multi_grad([h.sum(), (h**2).sum()], a, **options)
    assert (first.item(), second.item()) == (10.0, 40.0)
    assert len(ran) == 2


def of_cube(x):
    return hodiff.multi_grad([lambda z: (z**3).sum()], x)[0]


def of_cube_as_a_tensor(x):
    return hodiff.multi_grad([(x**3).sum()], x)[0]


def of_cube_with_a_trunk(x):
    return hodiff.multi_grad([lambda z, trunk: (z * trunk).sum()], x, shared=lambda z: z**2)[0]


@pytest.mark.parametrize("inner", [of_cube, of_cube_as_a_tensor, of_cube_with_a_trunk])
def test_inside_another_call_it_is_differentiated(inner):
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(hodiff.grad(lambda x: (inner(x) * x).sum(), x), 9 * x**2)
    torch.testing.assert_close(hodiff.hessian(lambda x: (inner(x) * x).sum(), x), torch.diag(18 * x))

    def as_constant(x):
        with torch.no_grad():
            constant = inner(x)
        return (constant * x).sum()

    if inner is not of_cube_as_a_tensor:  # whose cube would have no graph there
        torch.testing.assert_close(hodiff.grad(as_constant, x), 3 * x**2)


def test_a_linear_loss_inside_another_call_has_a_zero_derivative():
    x = torch.ones(2, dtype=torch.float64)
    assert torch.equal(hodiff.grad(lambda x: hodiff.multi_grad([x.sum()], x)[0].sum(), x), torch.zeros_like(x))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("packed", ["save_on_cpu", "checkpoint"])
def test_release_frees_what_is_packed_where_no_other_loss_needs_it(packed):
    a = torch.rand(3, requires_grad=True)
    if packed == "checkpoint":
        losses = [checkpoint(lambda x: x.exp().sum(), a, use_reentrant=False) for _ in range(2)]
    else:
        with torch.autograd.graph.save_on_cpu():
            losses = [a.exp().sum(), a.exp().sum()]
    for found in hodiff.multi_grad(losses, a, release=True):
        torch.testing.assert_close(found, a.detach().exp())
    for loss in losses:
        with pytest.raises((RuntimeError, hodiff.GraphError), match=r"second time|already been freed|was released"):
            loss.backward()


def test_release_is_refused_where_the_graph_is_needed_again():
    x = torch.ones(2)
    with pytest.raises(hodiff.InputError, match="release frees the graphs of the losses"):
        hodiff.grad(lambda x: hodiff.multi_grad([(x**3).sum()], x, release=True)[0].sum(), x)
    with pytest.raises(hodiff.InputError, match="release frees the graphs of the losses"):
        hodiff.multi_grad([x.requires_grad_().sum()], x, release=True, create_graph=True)


def test_a_head_that_bypasses_its_argument_is_refused():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(hodiff.GraphError, match="f reaches where other than through its argument"):
        hodiff.multi_grad([lambda _, z: (z * x).sum()], x, shared=lambda x: x**2)


@pytest.mark.parametrize("kind", ["tensors", "functions", "shared", "shared, recorded"])
def test_strict_is_about_each_loss(kind):
    a, b = (torch.ones(2, requires_grad=True) for _ in "ab")
    both, one = (lambda t: (t[0] * t[1]).sum()), (lambda t: t[1].exp().sum())
    losses, options = [both, one], {}
    if kind == "tensors":
        losses = [both((a, b)), one((a, b))]
    elif kind != "functions":
        losses = [lambda t, z: (t[0] * z).sum(), lambda t, z: z.sum()]
        options = {"shared": lambda t: t[1] ** 2, "create_graph": kind == "shared, recorded"}
    hodiff.multi_grad(losses, (a, b), **options)
    with pytest.raises(hodiff.GraphError, match=r"strict=True: (losses\[1\]|the result) does not depend on where\[0\]"):
        hodiff.multi_grad(losses, (a, b), strict=True, **options)


def test_zero_where_a_loss_does_not_depend_and_an_error_where_none_does():
    a, b = (torch.ones(2, requires_grad=True) for _ in "ab")
    first, second = hodiff.multi_grad([a.sum(), b.exp().sum()], (a, b))
    assert torch.equal(first[1], torch.zeros(2))
    assert torch.equal(second[0], torch.zeros(2))
    with pytest.raises(hodiff.GraphError, match="depend"):
        hodiff.multi_grad([(b * 2).sum()], a)


@pytest.mark.parametrize("return_used", [False, True], ids=["", "used"])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("kind", ["tensors", "tensors, released", "functions", "shared"])
@pytest.mark.parametrize("other", ["constant", "detached", "of another"])
def test_each_loss_by_itself_depends_on_something(other, kind, create_graph, return_used):
    """Zeros for a loss that nothing matters to are given where they are asked for, and else an error names it."""
    release = kind == "tensors, released"
    a, b = (torch.ones(2, requires_grad=True) for _ in "ab")
    second = {
        "constant": lambda z: torch.tensor(1.0),
        "detached": lambda z: z.detach().sum(),
        "of another": lambda z: b.exp().sum(),
    }[other]
    losses = {"first": (a**2).sum(), "second": second(a**2)}
    options = {"return_used": return_used, "create_graph": create_graph and not release}
    if release:
        options["release"] = True
    if kind == "functions":
        losses = {"first": lambda a: (a**2).sum(), "second": lambda a: second(a**2)}
    elif kind == "shared":
        losses = {"first": lambda a, z: z.sum(), "second": lambda a, z: second(z)}
        options["shared"] = lambda a: a**2
    words = r"losses\['second'\] does not depend on where.*strict=False" if kind != "functions" else "depend|no graph"
    with pytest.raises(hodiff.GraphError, match=words):
        hodiff.multi_grad(losses, a, **options)
    if kind.startswith("tensors"):
        a = torch.ones(2, requires_grad=True)
        losses = {"first": (a**2).sum(), "second": second(a**2)}
    found = hodiff.multi_grad(losses, a, strict=False, **options)
    if return_used:
        found, used = found
        assert used == {"first": True, "second": False}
    assert torch.equal(found["first"], torch.full((2,), 2.0)) and torch.equal(found["second"], torch.zeros(2))


def test_a_loss_that_depends_by_a_path_without_a_gradient_is_no_error():
    """The engine gives nothing there, as for a loss that does not depend; the graph tells the two apart."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return None

    a = torch.ones(2, requires_grad=True)
    first, second = hodiff.multi_grad([a.sum(), Nothing.apply(a).sum()], a)
    assert torch.equal(first, torch.ones(2)) and torch.equal(second, torch.zeros(2))


@pytest.mark.parametrize(
    ("losses", "options", "message"),
    [
        ([], {}, "losses: got none"),
        (3, {}, "losses: got an int"),
        ([3], {}, "losses: one is an int"),
        ("mixed", {}, "got both tensors"),
        ("tensors", {"shared": torch.exp}, "shared: with it, losses are functions"),
        ("vector", {}, "expected one element"),
    ],
)
def test_bad_input(losses, options, message):
    a = torch.ones(2, requires_grad=True)
    given = {"mixed": [a.sum(), torch.sum], "tensors": [a.sum()], "vector": [a * 2]}.get(str(losses), losses)
    with pytest.raises(hodiff.InputError, match=message):
        hodiff.multi_grad(given, a, **options)


HEADS = {
    "tensors": lambda m, x, **o: hodiff.multi_grad([m[0](x).sum(), m[1](m[0](x)).sum(), m[2](x).sum()], m, **o),
    "functions": lambda m, x, **o: hodiff.multi_grad(
        [lambda m: m[0](x).sum(), lambda m: m[1](m[0](x)).sum(), lambda m: m[2](x).sum()], m, **o
    ),
    "shared": lambda m, x, **o: hodiff.multi_grad(
        [lambda m, h: h.sum(), lambda m, h: m[1](h).sum(), lambda m, h: m[2](x).sum()], m, shared=lambda m: m[0](x), **o
    ),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_what_each_loss_uses_is_told(name, create_graph):
    """A vanishing gradient is not a missing one: the weight of an input of zeros is used."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 1)])
    x = torch.zeros(3, 2)
    plain = HEADS[name](model, x, create_graph=create_graph)
    gradients, used = HEADS[name](model, x, create_graph=create_graph, return_used=True)
    for a, b in zip(gradients, plain, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in b)
    assert [[key for key, one in each.items() if one] for each in used] == [
        ["0.weight", "0.bias"],
        ["0.weight", "0.bias", "1.weight", "1.bias"],
        ["2.weight", "2.bias"],
    ]
    assert not gradients[0]["0.weight"].any()
    with pytest.raises(hodiff.GraphError, match=r"strict=True: .*does not depend on"):
        HEADS[name](model, x, create_graph=create_graph, return_used=True, strict=True)


def test_what_is_used_is_named_like_the_losses():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    _, used = hodiff.multi_grad({"first": a.sum(), "both": (a * b).sum()}, (a, b), return_used=True, release=True)
    assert used == {"first": (True, False), "both": (True, True)}


D = torch.float64


@pytest.mark.parametrize("release", [False, True])
def test_a_hook_at_the_cut_runs_once(release: bool) -> None:
    a = torch.tensor(2.0, dtype=D, requires_grad=True)
    h = a * 1
    h.register_hook(lambda g: 10 * g)
    losses = [h.sum(), (h**2).sum()]
    got = hodiff.multi_grad(losses, a, release=release)
    torch.testing.assert_close(torch.stack([torch.as_tensor(g) for g in got]), torch.tensor([10.0, 40.0], dtype=D))


def test_multi_grad_inside_a_call() -> None:
    x = torch.tensor([0.5, 2.0], dtype=D)
    f = lambda x: (hodiff.multi_grad([lambda z: (z**3).sum()], x)[0] * x).sum()
    right_or_refused(lambda: hodiff.grad(f, x), 9 * x**2, "multi_grad")


def test_pcgrad_gradients_and_masks():
    trunk, heads = nn.Linear(3, 4).double(), nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)]).double()
    model, x = nn.ModuleList([trunk, heads]), torch.randn(5, 3, dtype=D)
    losses = [head(trunk(x)).square().mean() for head in heads]
    gradients, used = hodiff.multi_grad(losses, model, return_used=True)
    shared = [key for key in used[0] if used[0][key] and used[1][key]]
    assert shared == ["0.weight", "0.bias"]
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(losses[0], list(model.parameters()), retain_graph=True)
    assert not gradients[0]["1.1.weight"].any()
