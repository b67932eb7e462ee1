"""What a device has risks of its own for: its generators, its memory, its kernels, its streams.

Each test runs on the CPU, too, so that what it expects is known to be right where there is no GPU.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hodiff
from hodiff._core import _reverse
from hodiff.curvature import _memory
from tests.support.callers import CALLERS, PLAIN, SCALE, Caller, tensors
from tests.support.properties import agree
from tests.support.releases import CHECKPOINTS
from tests.support.scene import X

D = torch.float64
HAS_GPU = torch.cuda.is_available()
DEVICES = ["cpu", "cuda"] if HAS_GPU else ["cpu"]
everywhere = pytest.mark.parametrize("device", [torch.device(each) for each in DEVICES], ids=str)
ON_THE_CPU = {"sparse.sparsity_pattern", "sparse.color", "check_derivatives"}
"""Names whose result describes, and lies beside the data."""


def test_there_is_a_gpu() -> None:
    if not HAS_GPU:
        pytest.skip("no GPU: the tests of this folder ran on the CPU alone")


def on_cpu(values: Any) -> Any:
    """The same structure of detached tensors, on the CPU."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    if isinstance(values, dict):
        return {name: on_cpu(value) for name, value in values.items()}
    return [on_cpu(value) for value in values]


def states(device: torch.device) -> list[Tensor]:
    """Those of the default generators that a function on a device may draw from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


# --- every public name ------------------------------------------------------------------------------------------------


def wave(z: Tensor) -> Tensor:
    return SCALE.to(z.device) * z.sin() * z


@everywhere
@pytest.mark.parametrize("caller", CALLERS, ids=repr)
def test_a_function(caller: Caller, device: torch.device) -> None:
    got, expected = (caller(wave, X.to(where)) for where in (device, "cpu"))
    assert caller.name in ON_THE_CPU or {each.device.type for each in got} <= {device.type}
    agree(on_cpu(got), on_cpu(expected), 1e-8)


@everywhere
@pytest.mark.parametrize("name", [name for name in PLAIN if not name.startswith("graph.")])
def test_what_takes_no_function(name: str, device: torch.device) -> None:
    single = name == "twice_differentiable"  # precision
    got, expected = (PLAIN[name](X.to(where)) for where in (device, "cpu"))
    if isinstance(got, Tensor):
        assert name in ON_THE_CPU or got.device.type == device.type
    agree(on_cpu(tensors(got)), on_cpu(tensors(expected)), 1e-4 if single else 1e-8)


@everywhere
def test_the_default_device_is_for_what_the_user_makes(device: torch.device) -> None:
    loss = lambda x: (x**3).sum()
    with device:
        assert hodiff.hessian(loss, X).device.type == "cpu"
    agree(on_cpu(hodiff.hessian(loss, X.to(device))), hodiff.hessian(loss, X))


@everywhere
@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
def test_graphs_are_read(device: torch.device) -> None:
    losses = [(x.exp() * x).sum() for x in (X.clone().to(where).requires_grad_() for where in ("cpu", device))]
    of_the_cpu, here = ([node.name for node in hodiff.graph.inspect(loss).nodes] for loss in losses)
    assert here == of_the_cpu and len(here) == 4
    loss = losses[1]
    assert hodiff.graph.predict(loss).verdict == "ok"
    with pytest.raises(RuntimeError, match="second time") as failed, hodiff.graph.watch():
        loss.backward()
        loss.backward()
    explanation = hodiff.graph.explain(failed.value)
    assert explanation is not None and explanation.cause == "same loss twice"


# --- generators -------------------------------------------------------------------------------------------------------


def quadratic(device: torch.device) -> hodiff.HessianOperator:
    a = seeded(6, 6).to(device)
    return hodiff.HessianOperator(lambda x: ((a @ x) ** 4).sum(), seeded(6, seed=1).to(device))


@everywhere
@pytest.mark.parametrize("probes", ["rademacher", "gaussian"])
def test_what_is_drawn_comes_from_the_device_s_generator(probes: Any, device: torch.device) -> None:
    H, results = quadratic(device), []
    for _ in range(2):
        torch.manual_seed(3)
        before = states(device)
        results += [hodiff.trace(H, samples=3, probes=probes).value]
        assert not torch.equal(states(device)[-1], before[-1])
        assert all(map(torch.equal, states(device)[:-1], before[:-1]))  # the CPU's, where there is another
    assert torch.equal(*results)


@everywhere
def test_with_a_generator_nothing_else_is_drawn_from(device: torch.device) -> None:
    H, before = quadratic(device), states(device)
    draw = lambda: hodiff.trace(H, samples=3, generator=torch.Generator(device).manual_seed(3)).value
    assert torch.equal(draw(), draw())
    assert all(map(torch.equal, states(device), before))


@everywhere
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_generator_of_the_cpu_gives_every_device_the_same_numbers(dtype: torch.dtype, device: torch.device) -> None:
    real, fake = (seeded(5, 3, seed=seed).to(dtype) for seed in (0, 1))
    mixed = [
        hodiff.interpolate(real.to(where), fake.to(where), generator=torch.Generator().manual_seed(7))
        for where in (device, "cpu")
    ]
    assert mixed[0].device.type == device.type
    agree(on_cpu(mixed[0]), mixed[1], 4 * torch.finfo(dtype).eps)


def network(device: torch.device, *, drops: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Linear(3, 8),
        nn.Tanh(),
        nn.Dropout(0.5 if drops else 0.0),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 1),
    ]
    return nn.Sequential(*layers).double().to(device)


@everywhere
@pytest.mark.parametrize("budget", [0, 1.0])
@pytest.mark.filterwarnings("ignore::hodiff.RandomnessWarning")
def test_a_function_that_draws_is_one_function(budget: float, device: torch.device) -> None:
    """Of an operator whose graph is made again for each product, too."""
    model, x = network(device), seeded(4, 3).to(device)
    torch.manual_seed(1)
    H = hodiff.HessianOperator(lambda m, b: (m(b) ** 2).sum(), model, data=[x], reduction="sum", memory_budget=budget)
    u, v = (seeded(H.shape[0], seed=seed).to(device) for seed in (1, 2))
    products = [H @ u]
    state = states(device)
    products += [H @ v, H @ u]
    assert all(map(torch.equal, states(device), state))
    assert torch.equal(products[0], products[2])
    agree(on_cpu(products[0] @ v), on_cpu(products[1] @ u))


@everywhere
@CHECKPOINTS
def test_a_block_that_runs_again_draws_what_it_drew(device: torch.device) -> None:
    model, x = network(device), seeded(4, 3).to(device)
    vector = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    results = []
    for checkpoint in (False, "[0-9]"):
        torch.manual_seed(2)
        results += [hodiff.hvp(lambda m: (m(x) ** 2).sum(), model, vector, checkpoint=checkpoint)]
    agree(on_cpu(results[1]), on_cpu(results[0]))


# --- memory -----------------------------------------------------------------------------------------------------------


@contextmanager
def short_of_memory(device: torch.device, most: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU has 300 MiB left; on the CPU a batch of more than `most` vectors is said to have met its end."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + 300 * 2**20) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.empty_cache()
        return
    engine = _reverse._engine_pass

    def out(outputs: Any, cotangents: Any, *rest: Any, **options: Any) -> Any:
        if sizes[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return engine(outputs, cotangents, *rest, **options)

    monkeypatch.setattr(_reverse, "_engine_pass", out)
    yield
    monkeypatch.setattr(_reverse, "_engine_pass", engine)


sizes: list[int] = []
"""How many vectors each batch had."""


@everywhere
def test_a_chunk_is_halved_when_memory_runs_out(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU 512 vectors need 512 MiB at once."""
    width, count = (2**17, 512) if device.type == "cuda" else (2**9, 64)
    batched = _reverse.batched
    monkeypatch.setattr(_reverse, "batched", lambda f, v: (sizes.append(len(v[0])), batched(f, v))[1])
    monkeypatch.setattr(_reverse, "auto_chunk", lambda *given: count)
    sizes.clear()
    x, b = seeded(8).to(device), (seeded(width, 8, seed=1) / 8).to(device)
    f = lambda x: (b @ x).sin().reshape(16, -1).sum(1)
    cotangents = seeded(count, 16, seed=2).to(device)
    with short_of_memory(device, count // 3, monkeypatch):
        got = hodiff.vjp(f, x, cotangents)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            hodiff.vjp(f, x, cotangents, chunk_size=count)
    assert sizes[0] == count > sizes[1] == count // 2, sizes
    assert hodiff.vjp(f, x, cotangents[0]).isfinite().all()  # no level of the batch is left on
    slope = (b @ x).cos()[:, None] * b
    agree(on_cpu(got), on_cpu(cotangents @ slope.reshape(16, -1, 8).sum(1)))


@everywhere
def test_what_is_too_large_is_refused_by_the_device_s_memory(device: torch.device) -> None:
    x = torch.ones(4 * 10**6, device=device)
    with pytest.raises(hodiff.InputError, match=rf"64,000 GB, but {device.type}.* has [\d,]+ GB"):
        hodiff.hessian(lambda x: (x**3).sum(), x)


@everywhere
def test_memory_is_measured_where_it_is(device: torch.device) -> None:
    free = _memory.free_bytes(device)
    made, size = _memory.measured(lambda: torch.ones(2**18, dtype=D, device=device), device)
    assert made.nbytes <= size < 2 * made.nbytes < free
    if device.type == "cuda":
        assert free <= torch.cuda.get_device_properties(device).total_memory


# --- precision and kernels --------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_function_runs_under_the_caller_s_autocast(dtype: torch.dtype, device: torch.device) -> None:
    model, x = network(device, drops=False).float(), seeded(16, 3).float().to(device)
    vector = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    kinds: list[torch.dtype] = []

    def loss(m: nn.Module) -> Tensor:
        y = m(x)
        kinds.append(y.dtype)
        return y.float().square().mean()

    def inside(m: nn.Module) -> Tensor:
        with torch.autocast(device.type, dtype=dtype):
            return loss(m)

    plain = hodiff.hvp(loss, model, vector)
    with torch.autocast(device.type, dtype=dtype):
        under = hodiff.hvp(loss, model, vector)
        assert torch.is_autocast_enabled(device.type)
    agree(on_cpu(hodiff.hvp(inside, model, vector)), on_cpu(under), 1e-6)
    agree(on_cpu(under), on_cpu(plain), 0.1)
    assert kinds == [torch.float32, dtype, dtype]


INDEX = torch.tensor([[0, 2, 1], [1, 1, 3]])
KERNELS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "layer_norm": ((4, 6), lambda x: F.layer_norm(x, (6,), x[0], x[1])),
    "group_norm": ((3, 4, 5), lambda x: F.group_norm(x, 2)),
    "batch_norm": ((6, 4), lambda x: F.batch_norm(x, None, None, x[0], training=True)),
    "instance_norm": ((2, 3, 6), F.instance_norm),
    "rms_norm": ((4, 6), lambda x: F.rms_norm(x, (6,))),
    "softmax": ((4, 6), lambda x: F.softmax(x, -1)),
    "cross_entropy": ((3, 5), lambda x: F.cross_entropy(x, INDEX[0].to(x.device), label_smoothing=0.1)),
    "gelu": ((4, 6), F.gelu),
    "conv2d": ((2, 3, 6, 6), lambda x: F.conv2d(x, x[:, :, :3, :3].sin())),
    "conv_transpose2d": ((2, 2, 4, 4), lambda x: F.conv_transpose2d(x, x[:, :, :3, :3].sin())),
    "max_pool2d": ((1, 2, 4, 4), lambda x: F.max_pool2d(x, 2)),
    "bilinear": ((1, 2, 4, 4), lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear")),
    "embedding": ((4, 3), lambda x: F.embedding(INDEX.to(x.device), x)),
    "scatter_add": ((4, 3), lambda x: x.scatter_add(0, INDEX.to(x.device), x[:2].sin())),
    "cumsum": ((4, 6), lambda x: x.cumsum(1)),
    "prod": ((4, 3), lambda x: x.prod(0)),
    "solve": ((3, 3), lambda x: torch.linalg.solve(x + 4 * torch.eye(3).to(x), x)),
    "cholesky": ((3, 3), lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(3).to(x))),
    "eigvalsh": ((3, 3), lambda x: torch.linalg.eigvalsh(x + x.mT)),
    "svdvals": ((3, 4), torch.linalg.svdvals),
    "fft": ((8,), lambda x: torch.fft.rfft(x).abs().square()),
    "attention": ((2, 2, 5, 8), lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos())),
    "attention, causal": ((1, 2, 5, 8), lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos(), is_causal=True)),
    "attention, rows masked in full": (
        (1, 1, 4, 8),
        lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos(), attn_mask=masked(x)),
    ),
}


def masked(x: Tensor) -> Tensor:
    """A mask with one row that is a large finite number throughout."""
    mask = x.new_zeros(x.shape[-2], x.shape[-2])
    mask[1] = torch.finfo(x.dtype).min
    return mask


def derivatives(f: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The gradient, the second derivative along a direction, and the gradient of its product with that."""
    v = torch.cos(torch.arange(x.numel(), dtype=D)).reshape(x.shape).to(x)
    loss = lambda z: (f(z).sin() + f(z).square()).sum()
    third = hodiff.grad(lambda z: (hodiff.hvp(loss, z, v) * v).sum(), x)
    return [hodiff.grad(loss, x), hodiff.hvp(loss, x, v), third]


@everywhere
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str, device: torch.device) -> None:
    """In double precision what the CPU gives; single precision, with kernels of its own, nearly."""
    shape, f = KERNELS[name]
    x = seeded(*shape, seed=4)
    expected = derivatives(f, x)
    try:
        agree(on_cpu(derivatives(f, x.to(device))), expected, 1e-8)
    except hodiff.GraphError as refused:
        assert device.type != "cpu"
        pytest.skip(f"refused on {device}: {refused}")
    single = [part.double() for part in on_cpu(derivatives(f, x.float().to(device)))]
    for got, want in zip(single, expected, strict=True):
        agree(got, want, 2e-2)


TOLERANCE = {torch.bfloat16: 6e-2, torch.float16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-10}


@everywhere
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
        (SDPBackend.FLASH_ATTENTION, torch.float16),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float16),
        (SDPBackend.CUDNN_ATTENTION, torch.bfloat16),
        (SDPBackend.MATH, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_each_kernel(backend: SDPBackend, dtype: torch.dtype, causal: bool, device: torch.device) -> None:
    """A GPU has four, of which the CPU has two; where one does not serve, PyTorch says so."""
    x, v = (seeded(3, 2, 2, 16, 64, seed=seed).to(dtype).double() / 2 for seed in (5, 6))
    attends = lambda z: F.scaled_dot_product_attention(*z, is_causal=causal)
    loss = lambda z: attends(z).double().sin().sum()
    expected = [hodiff.grad(loss, x), hodiff.hvp(loss, x, v)]
    there, along = x.to(device, dtype), v.to(device, dtype)
    with sdpa_kernel(backend):
        try:
            attends(there)
        except RuntimeError as error:
            assert re.search("No (available kernel|viable backend)", str(error)), error
            return
        got = [hodiff.grad(loss, there), hodiff.hvp(loss, there, along)]
    for ours, want in zip(got, expected, strict=True):
        assert ours.dtype == dtype
        agree(on_cpu(ours).double(), want, TOLERANCE[dtype])


@everywhere
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
def test_recurrent_layers(kind: type[nn.Module], device: torch.device) -> None:
    """The layer of cuDNN has no second derivative: f runs once more without it, and drops what it dropped."""
    torch.manual_seed(0)
    layer: Any = kind(3, 4).double().to(device)
    x, v = seeded(5, 2, 3).to(device), seeded(5, 2, 3, seed=1).to(device)
    loss = lambda x: F.dropout(layer(x)[0], 0.5).square().sum()

    def gradient(t: float) -> Tensor:
        torch.manual_seed(1)
        return hodiff.grad(loss, x + t * v)

    torch.manual_seed(1)
    enabled = torch.backends.cudnn.enabled
    Hv = hodiff.hvp(loss, x, v)
    assert torch.backends.cudnn.enabled == enabled
    agree(on_cpu(Hv), on_cpu((gradient(1e-5) - gradient(-1e-5)) / 2e-5), 1e-7)


# --- streams and graphs -----------------------------------------------------------------------------------------------


def on_a_stream(device: torch.device) -> Any:
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def fields(x: Tensor) -> list[Tensor]:
    loss = lambda z: (z.sin() * z.flip(-1)).sum()
    H = hodiff.HessianOperator(loss, x)
    return [
        hodiff.grad(loss, x),
        hodiff.hvp(loss, x, x),
        hodiff.hessian(loss, x),
        hodiff.laplacian(lambda z: (z.sin() * z.flip(-1)).sum(-1), x),
        H @ x,
    ]


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@everywhere
@pytest.mark.parametrize("threaded", [False, True])
def test_what_is_queued_on_a_stream_is_waited_for(threaded: bool, device: torch.device) -> None:
    """The point is the result of long work on the same stream."""
    results: list[list[Tensor]] = []
    long = torch.eye(2000 if device.type == "cuda" else 20, device=device)
    point = X.to(device)
    settle(device)

    def run() -> None:
        with on_a_stream(device):
            for _ in range(20):
                long.copy_(long @ long)
            results.append(fields(point * long[0, 0]))
            settle(device)

    if threaded:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(120)
    else:
        run()
    agree(on_cpu(results[0]), fields(X))


@everywhere
@pytest.mark.parametrize("name", ["grad", "hvp", "laplacian", "gradient_penalty"])
def test_a_call_is_captured_right_or_not_at_all(name: str, device: torch.device) -> None:
    """In a CUDA graph: its replay with another point is right, or the capture was refused."""
    loss = lambda z: (z.sin() * z.flip(-1)).sum()
    rows = lambda z: (z.sin() * z.flip(-1)).sum(-1)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "grad": lambda x: hodiff.grad(loss, x),
        "hvp": lambda x: hodiff.hvp(loss, x, torch.ones_like(x)),
        "laplacian": lambda x: hodiff.laplacian(rows, x),
        "gradient_penalty": lambda x: hodiff.gradient_penalty(rows, x, create_graph=False),
    }
    call, x = calls[name], X.to(device)
    if device.type == "cpu":
        agree(call(x + 1), call(X + 1))
        return
    with on_a_stream(device):
        for _ in range(3):
            call(x)
    settle(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = call(x)
    except (RuntimeError, hodiff.HodiffError) as error:
        settle(device)
        words = " ".join(str(each) for each in (error, error.__context__, error.__cause__))
        assert "captur" in words, words
        pytest.skip(f"not captured: {str(error).splitlines()[0]}")
    x.copy_(X + 1)
    graph.replay()
    settle(device)
    agree(on_cpu(result), on_cpu(call(X + 1)))


# --- operators over data ----------------------------------------------------------------------------------------------


@everywhere
def test_an_operator_over_data_that_stay_on_the_cpu(device: torch.device) -> None:
    """Each batch is moved in the function; vectors come from NumPy, too; results are where the parameters are."""
    data = [(seeded(5, 3, seed=seed), seeded(5, 1, seed=10 + seed)) for seed in range(3)]

    def operator(where: torch.device) -> hodiff.HessianOperator:
        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
            x, y = (part.to(where, non_blocking=True) for part in batch)
            return (model(x) - y).square().sum(), len(x)

        return hodiff.HessianOperator(loss, network(where, drops=False), data=data)

    H, expected = operator(device), operator(torch.device("cpu")).dense()
    v = seeded(H.shape[0], seed=3)
    damped = H + 20.0
    eigen = hodiff.eigsh(H, 2, generator=torch.Generator().manual_seed(0))
    solution = hodiff.solve(damped, v.to(device), rtol=1e-12)
    products = (H @ v.to(device), eigen.value, eigen.vectors, solution.value)
    assert {each.device.type for each in products} == {device.type}
    agree(on_cpu(H.dense()), expected)
    agree(on_cpu(products[0]), expected @ v)
    agree(torch.as_tensor(H @ v.numpy()).cpu(), expected @ v)
    agree(on_cpu(eigen.value).sort().values, torch.linalg.eigvalsh(expected)[-2:], 1e-6)
    agree(on_cpu(solution.value), torch.linalg.solve(expected + 20 * torch.eye(len(v), dtype=D), v), 1e-8)
    agree(on_cpu(hodiff.trace(H, samples=len(v)).value), expected.trace())


@everywhere
def test_least_squares(device: torch.device) -> None:
    """Steps find the solution of a linear problem."""
    a, b = seeded(8, 4).to(device), seeded(8, seed=1).to(device)
    x = torch.zeros(4, dtype=D, device=device, requires_grad=True)
    optimizer = hodiff.LevenbergMarquardt(lambda z: a @ z - b, x)
    for _ in range(20):
        optimizer.step()
    agree(on_cpu(x), torch.linalg.lstsq(on_cpu(a), on_cpu(b)[:, None]).solution[:, 0], 1e-6)
