"""What may change between two calls of a step, each with a step that would be out of date if nothing saw it.

Each case gets a `World`, and gives the loss and what changes between the third call and the fourth.
"""

import copy
import functools
import math
import os
import random
import sys
import tempfile
import time
import types

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

AG = torch.autograd.grad


class World:
    """What a step is made of, and trained on; the step and its eager twin have one each."""

    def __init__(self):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
        self.x = torch.randn(4, 3)
        self.w = 0.5


def grad_loss(net, x):
    x = x.detach().requires_grad_()
    return AG(net(x).sum(), x, create_graph=True)[0].square().mean()


CHANGES = {}
"""By name."""


def change(f):
    CHANGES[f.__name__] = f
    return f


# each returns loss, change(w)
@change
def closure_float(w):
    cell = 0.5

    def loss(net, x):
        return cell * grad_loss(net, x)

    def change():
        nonlocal cell
        cell = 0.1

    return loss, change


@change
def attribute(w):
    w.net.weight = 0.5

    def change():
        w.net.weight = 0.1

    return (lambda net, x: net.weight * grad_loss(net, x)), change


@change
def config_object(w):
    cfg = types.SimpleNamespace(a=0.5)

    def change():
        cfg.a = 0.1

    return (lambda net, x: cfg.a * grad_loss(net, x)), change


@change
def config_dict(w):
    cfg = {"a": 0.5}

    def change():
        cfg["a"] = 0.1

    return (lambda net, x: cfg["a"] * grad_loss(net, x)), change


@change
def slots(w):
    class S:
        __slots__ = ("a",)

    cfg = S()
    cfg.a = 0.5

    def change():
        cfg.a = 0.1

    return (lambda net, x: cfg.a * grad_loss(net, x)), change


@change
def class_attribute(w):
    class C:
        a = 0.5

    def change():
        C.a = 0.1

    return (lambda net, x: C.a * grad_loss(net, x)), change


@change
def dunder_dict_get(w):
    class C:
        pass

    cfg = C()

    def change():
        cfg.a = 0.1

    return (lambda net, x: vars(cfg).get("a", 0.5) * grad_loss(net, x)), change


@change
def dunder_dict_in(w):
    class C:
        pass

    cfg = C()

    def change():
        cfg.a = 0.1

    return (lambda net, x: (0.1 if "a" in cfg.__dict__ else 0.5) * grad_loss(net, x)), change


@change
def getattr_default(w):
    class C:
        pass

    cfg = C()

    def change():
        cfg.a = 0.1

    return (lambda net, x: getattr(cfg, "a", 0.5) * grad_loss(net, x)), change


@change
def hasattr_later(w):
    cfg = w.net

    def change():
        cfg.extra = 0.1

    return (lambda net, x: (net.extra if hasattr(net, "extra") else 0.5) * grad_loss(net, x)), change


@change
def dict_get_missing(w):
    cfg = {}

    def change():
        cfg["a"] = 0.1

    return (lambda net, x: cfg.get("a", 0.5) * grad_loss(net, x)), change


@change
def rebound_tensor(w):
    t = torch.tensor(0.5)

    def loss(net, x):
        return t * grad_loss(net, x)

    def change():
        nonlocal t
        t = torch.tensor(0.1)

    return loss, change


@change
def tensor_in_place(w):
    t = torch.tensor(0.5)

    def change():
        t.fill_(0.1)

    return (lambda net, x: t * grad_loss(net, x)), change


@change
def numpy_inside(w):
    a = np.array([0.5])

    def change():
        a[0] = 0.1

    return (lambda net, x: float(a[0]) * grad_loss(net, x)), change


@change
def numpy_closure(w):
    a = np.array([0.5])

    def change():
        a[0] = 0.1

    return (lambda net, x: torch.from_numpy(a).sum() * grad_loss(net, x)), change


@change
def numpy_of_input(w):
    def change():
        w.x = w.x * 2

    return (lambda net, x: float(x.numpy().sum()) * grad_loss(net, x)), change


@change
def item_inside(w):
    t = torch.tensor(0.5)

    def change():
        t.fill_(0.1)

    return (lambda net, x: t.item() * grad_loss(net, x)), change


@change
def item_of_buffer(w):
    w.net.register_buffer("b", torch.tensor(0.5))

    def change():
        w.net.b.fill_(0.1)

    return (lambda net, x: float(net.b) * grad_loss(net, x)), change


@change
def branch_on_data(w):
    def change():
        w.x = -w.x.abs()

    def loss(net, x):
        return grad_loss(net, x) * (1.0 if x.sum() > 0 else 0.1)

    w.x = w.x.abs()
    return loss, change


@change
def counter(w):
    n = [0]

    def loss(net, x):
        n[0] += 1
        return grad_loss(net, x) * (0.1 if n[0] > 1 else 1.0)

    return loss, lambda: None


@change
def counter_attr(w):
    w.net.n = 0

    def loss(net, x):
        net.n += 1
        return grad_loss(net, x) * net.n

    return loss, lambda: None


@change
def new_shape(w):
    def change():
        w.x = torch.randn(7, 3)

    return grad_loss, change


@change
def batch_of_one(w):
    def change():
        w.x = torch.randn(1, 3)

    return grad_loss, change


@change
def empty_batch_sum(w):
    def change():
        w.x = torch.randn(0, 3)

    def loss(net, x):
        return net(x).square().sum() + sum(p.square().sum() for p in net.parameters())

    return loss, change


@change
def unfreeze(w):
    w.net[0].requires_grad_(False)

    def change():
        w.net[0].requires_grad_(True)

    return grad_loss, change


@change
def freeze(w):
    def change():
        w.net[0].requires_grad_(False)

    return grad_loss, change


@change
def eval_mode(w):
    w.net.insert(1, nn.Dropout(0.5))

    def change():
        w.net.eval()

    return grad_loss, change


@change
def batchnorm_eval(w):
    w.net.insert(1, nn.BatchNorm1d(6))

    def change():
        w.net.eval()

    return grad_loss, change


@change
def batchnorm_train(w):
    w.net.insert(1, nn.BatchNorm1d(6))
    return (lambda net, x: net(x).square().mean()), lambda: None


@change
def data_in_place(w):
    def change():
        w.x.mul_(2)

    return grad_loss, change


@change
def param_data(w):
    def change():
        w.net[0].weight.data = torch.randn(6, 3)

    return grad_loss, change


@change
def param_data_shape(w):
    def change():
        w.net[0] = nn.Linear(3, 9)
        w.net[2] = nn.Linear(9, 1)

    return grad_loss, change


@change
def param_replaced(w):
    def change():
        w.net[0].weight = nn.Parameter(torch.randn(6, 3))

    return grad_loss, change


@change
def default_dtype(w):
    def change():
        torch.set_default_dtype(torch.float32)

    return (lambda net, x: grad_loss(net, x) * torch.tensor(1 / 3).double()), change


@change
def autocast_later(w):
    def loss(net, x):
        return net(x).float().square().mean()

    w.autocast = False
    w.net.float()
    w.x = w.x.float()

    def change():
        w.autocast = True

    return loss, change


@change
def dropout(w):
    w.net.insert(1, nn.Dropout(0.5))
    return grad_loss, lambda: None


@change
def drawn(w):
    return (lambda net, x: grad_loss(net, x + torch.randn_like(x))), lambda: None


@change
def generator(w):
    g = torch.Generator().manual_seed(3)
    return (lambda net, x: grad_loss(net, x + torch.randn(4, 3, generator=g))), lambda: None


@change
def manual_seed(w):
    def loss(net, x):
        torch.manual_seed(5)
        return grad_loss(net, x + torch.randn(4, 3))

    return loss, lambda: None


@change
def python_random(w):
    random.seed(3)
    return (lambda net, x: grad_loss(net, x) * random.random()), lambda: None


@change
def numpy_random(w):
    np.random.seed(3)
    return (lambda net, x: grad_loss(net, x) * np.random.rand()), lambda: None


@change
def iterator(w):
    it = iter([0.5, 0.1, 0.3, 0.2, 0.7, 0.9, 0.8, 0.1, 0.2, 0.3])
    return (lambda net, x: grad_loss(net, x) * next(it)), lambda: None


@change
def arg_float(w):
    w.extra = (0.5,)

    def change():
        w.extra = (0.1,)

    return (lambda net, x, a: a * grad_loss(net, x)), change


@change
def arg_none(w):
    w.extra = (None,)

    def change():
        w.extra = (torch.tensor(0.1),)

    return (lambda net, x, a: grad_loss(net, x) * (1 if a is None else a)), change


@change
def module_swapped(w):
    def change():
        w.net[1] = nn.Sigmoid()

    return grad_loss, change


@change
def module_list_grew(w):
    extra = nn.ModuleList([nn.Linear(3, 1)])
    w.net.extra = extra

    def change():
        torch.manual_seed(4)
        extra.append(nn.Linear(3, 1))

    return (
        lambda net, x: (
            grad_loss(net, x) + sum(m(x).sum() for m in net.extra)
            if False
            else grad_loss(net[:3], x) + sum(m(x).square().sum() for m in net.extra)
        )
    ), change


@change
def list_grew(w):
    l = [torch.tensor(0.5)]

    def change():
        l.append(torch.tensor(0.2))

    return (lambda net, x: grad_loss(net, x) * sum(l)), change


@change
def forward_hook_later(w):
    def change():
        w.net[0].register_forward_hook(lambda m, i, o: 2 * o)

    return grad_loss, change


@change
def forward_pre_hook_later(w):
    def change():
        w.net[0].register_forward_pre_hook(lambda m, i: (2 * i[0],))

    return grad_loss, change


@change
def backward_hook_later(w):
    def change():
        w.net[0].register_full_backward_hook(lambda m, gi, go: (2 * gi[0],) if gi[0] is not None else None)

    return grad_loss, change


@change
def global_hook_later(w):
    def change():
        doubled = lambda m, i, o: 2 * o if isinstance(m, nn.Linear) else None
        w.restore = torch.nn.modules.module.register_module_forward_hook(doubled).remove

    return grad_loss, change


@change
def param_hook(w):
    w.net[0].weight.register_hook(lambda g: 2 * g)
    return grad_loss, lambda: None


@change
def param_hook_later(w):
    def change():
        w.net[0].weight.register_hook(lambda g: 2 * g)

    return grad_loss, change


@change
def param_hook_inner(w):
    def loss(net, x):
        g = AG(net(x).square().mean(), list(net.parameters()), create_graph=True)
        return sum(a.square().sum() for a in g)

    def change():
        w.net[0].weight.register_hook(lambda g: 2 * g)

    return loss, change


@change
def post_accumulate_hook(w):
    w.seen = []
    w.net[0].weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(3), None)[1])
    return grad_loss, lambda: None


@change
def early_return(w):
    flag = {"a": True}

    def loss(net, x):
        if flag["a"]:
            return grad_loss(net, x)
        return net(x).mean()

    def change():
        flag["a"] = False

    return loss, change


@change
def parametrisation(w):
    def change():
        nn.utils.parametrize.register_parametrization(w.net[0], "weight", nn.Softplus())

    return grad_loss, change


@change
def spectral(w):
    nn.utils.parametrizations.spectral_norm(w.net[0])
    return grad_loss, lambda: None


@change
def weight_norm(w):
    nn.utils.parametrizations.weight_norm(w.net[0])
    return (lambda net, x: net(x).square().mean()), lambda: None


@change
def ema(w):
    e = copy.deepcopy(w.net)

    def change():
        with torch.no_grad():
            for p in e.parameters():
                p.mul_(0.5)

    return (lambda net, x: grad_loss(net, x) + (net(x) - e(x).detach()).square().mean()), change


@change
def submodule_compiled(w):
    w.net[2] = torch.compile(w.net[2], backend="eager")
    return grad_loss, lambda: None


@change
def module_attribute(w):
    m = types.ModuleType("m")
    m.a = 0.5
    sys.modules["m_lie"] = m

    def change():
        m.a = 0.1

    return (lambda net, x: m.a * grad_loss(net, x)), change


@change
def import_inside(w):
    m = types.ModuleType("m_lie")
    m.a = 0.5
    sys.modules["m_lie"] = m

    def loss(net, x):
        import m_lie

        return m_lie.a * grad_loss(net, x)

    def change():
        sys.modules["m_lie"].a = 0.1

    return loss, change


@change
def environ(w):
    os.environ["LIE"] = "0.5"

    def change():
        os.environ["LIE"] = "0.1"

    return (lambda net, x: float(os.environ["LIE"]) * grad_loss(net, x)), change


@change
def environ_missing(w):
    os.environ.pop("LIE2", None)

    def change():
        os.environ["LIE2"] = "0.1"

    return (lambda net, x: float(os.environ.get("LIE2", "0.5")) * grad_loss(net, x)), change


@change
def param_groups(w):
    opt = torch.optim.SGD(w.net.parameters(), lr=0.5)

    def change():
        opt.param_groups[0]["lr"] = 0.1

    return (lambda net, x: opt.param_groups[0]["lr"] * grad_loss(net, x)), change


@change
def trainable_closure(w):
    w.free = torch.tensor(2.0, requires_grad=True)
    return (lambda net, x: w.free**2 * grad_loss(net, x)), lambda: None


@change
def other_module(w):
    w.other = nn.Linear(3, 1)
    return (lambda net, x: (w.other(x) * net(x)).sum() + grad_loss(net, x)), lambda: None


@change
def arg_requires_grad(w):
    w.x.requires_grad_()
    return (lambda net, x: AG(net(x).sum(), x, create_graph=True)[0].square().mean() + x.square().sum()), lambda: None


@change
def arg_requires_grad_later(w):
    def change():
        w.x = w.x.clone().requires_grad_()

    return (lambda net, x: net(x).square().mean() + x.square().sum()), change


@change
def arg_nonleaf(w):
    w.z = torch.randn(4, 3, requires_grad=True)
    w.make_x = lambda: w.z * 2
    return (lambda net, x: AG(net(x).sum(), x, create_graph=True)[0].square().mean() + x.square().sum()), lambda: None


@change
def leaf_to_nonleaf(w):
    w.z = torch.randn(4, 3, requires_grad=True)
    w.make_x = lambda: w.z

    def change():
        w.make_x = lambda: w.z * 2

    return (lambda net, x: AG((net(x) * w.z).sum(), w.z, create_graph=True)[0].square().mean()), change


@change
def custom_function(w):
    class Sq(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a**2

        @staticmethod
        def backward(ctx, g):
            (a,) = ctx.saved_tensors
            return 2 * a * g

    return (lambda net, x: grad_loss(lambda x: Sq.apply(net(x)), x)), lambda: None


@change
def checkpointed(w):
    from torch.utils.checkpoint import checkpoint

    return (lambda net, x: grad_loss(lambda x: checkpoint(net, x, use_reentrant=False), x)), lambda: None


@change
def gru(w):
    w.net = nn.GRU(3, 5, batch_first=True)
    return (lambda net, x: net(x.unsqueeze(0))[0].square().mean()), lambda: None


@change
def lstm(w):
    w.net = nn.LSTM(3, 5, batch_first=True)
    return (lambda net, x: net(x.unsqueeze(0))[0].square().mean()), lambda: None


@change
def sdpa(w):
    w.net = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    w.x = torch.randn(2, 3, 4)
    return (lambda net, x: net(x).square().mean()), lambda: None


@change
def stored_state(w):
    w.net.h = torch.zeros(4, 1)

    def loss(net, x):
        out = net(x) + net.h
        net.h = out
        return out.square().mean() if False else out.detach().sum() * 0 + net(x).square().mean()

    return loss, lambda: None


@change
def dict_argument_filled(w):
    w.extra = ({},)

    def loss(net, x, d):
        d["f"] = net(x)
        return d["f"].square().mean()

    return loss, lambda: None


@change
def requires_grad_on_argument(w):
    def loss(net, x):
        x.requires_grad_(True)
        return AG(net(x).sum(), x, create_graph=True)[0].square().mean()

    return loss, lambda: None


@change
def user_detach(w):
    return (lambda net, x: grad_loss(lambda x: net(x) * net(x).detach(), x)), lambda: None


@change
def inner_detached(w):
    def loss(net, x):
        x = x.detach().requires_grad_()
        return AG(net(x).sum(), x)[0].square().mean() + net(x).square().mean()

    return loss, lambda: None


@change
def tensor_hook_inside(w):
    def loss(net, x):
        h = net(x)
        h.register_hook(lambda g: 2 * g)
        return h.square().mean()

    return loss, lambda: None


@change
def in_place_inside(w):
    def loss(net, x):
        h = net(x).clone()
        h.mul_(2)
        h[0] = 0
        return h.square().mean() + grad_loss(net, x)

    return loss, lambda: None


@change
def buffer_written(w):
    w.net.register_buffer("n", torch.zeros(()))

    def loss(net, x):
        net.n.add_(1)
        return grad_loss(net, x) * net.n

    return loss, lambda: None


@change
def closure_tensor_written(w):
    n = torch.zeros(())

    def loss(net, x):
        n.add_(1)
        return grad_loss(net, x) * n

    return loss, lambda: None


@change
def argument_written(w):
    def loss(net, x):
        x.mul_(1.5)
        return grad_loss(net, x)

    return loss, lambda: None


@change
def alias_written(w):
    base = torch.zeros(2)
    view = base[:1]

    def loss(net, x):
        a = base.sum() + 1
        view.add_(1)
        b = base.sum() + 1
        return grad_loss(net, x) * a * b

    return loss, lambda: None


@change
def tied(w):
    w.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    w.net[2].weight = w.net[0].weight
    return grad_loss, lambda: None


@change
def untied_later(w):
    w.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    w.net[2].weight = w.net[0].weight

    def change():
        w.net[2].weight = nn.Parameter(w.net[0].weight.detach() * 2)

    return grad_loss, change


@change
def tied_later(w):
    w.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    def change():
        w.net[2].weight = w.net[0].weight

    return grad_loss, change


@change
def grad_enabled_flag(w):
    return (lambda net, x: grad_loss(net, x) * (1.0 if torch.is_grad_enabled() else 0.1)), lambda: None


@change
def param_changed_dtype(w):
    def change():
        w.net.float()
        w.x = w.x.float()

    return grad_loss, change


@change
def lambda_rebound(w):
    act = torch.sin

    def loss(net, x):
        return grad_loss(lambda x: act(net(x)), x)

    def change():
        nonlocal act
        act = torch.cos

    return loss, change


@change
def partial_changed(w):
    scale = functools.partial(torch.mul, 0.5)

    def loss(net, x):
        return scale(grad_loss(net, x))

    def change():
        nonlocal scale
        scale = functools.partial(torch.mul, 0.1)

    return loss, change


@change
def clock(w):
    return (lambda net, x: grad_loss(net, x) * (1 + 0 * time.time())), lambda: None


@change
def sign_of_zero(w):
    """Zeros are equal, and 1 / 0.0 is not."""
    w.net.shift = 0.0

    def change():
        w.net.shift = -0.0

    return (lambda net, x: grad_loss(net, x) * math.copysign(1.0, net.shift)), change


def lower_by_default(w):
    """Float16 in place of bfloat16, where autocast is asked for no type."""
    w.restore = lambda: torch.set_autocast_dtype("cpu", torch.bfloat16)
    return lambda: torch.set_autocast_dtype("cpu", torch.float16)


@change
def autocast_default(w):
    def loss(net, x):
        with torch.autocast("cpu"):
            return grad_loss(net, x)

    return loss, lower_by_default(w)


@change
def autocast_default_read(w):
    def loss(net, x):
        return torch.finfo(torch.get_autocast_dtype("cpu")).eps * grad_loss(net, x)

    return loss, lower_by_default(w)


@change
def recursion_limit(w):
    limit = sys.getrecursionlimit()
    w.restore = lambda: sys.setrecursionlimit(limit)

    def loss(net, x):
        return (2.0 if sys.getrecursionlimit() == limit else 1.0) * grad_loss(net, x)

    return loss, lambda: sys.setrecursionlimit(limit + 500)


@change
def global_hides_a_builtin(w):
    globals().pop("abs", None)
    w.restore = lambda: globals().pop("abs", None)

    def change():
        globals()["abs"] = lambda x: 3.0

    return (lambda net, x: abs(-0.5) * grad_loss(net, x)), change


@change
def method_of_tensor_replaced(w):
    old = torch.Tensor.square
    w.restore = lambda: setattr(torch.Tensor, "square", old)

    def change():
        torch.Tensor.square = lambda x: 3 * x

    return (lambda net, x: net(x).square().mean()), change


@change
def retained(w):
    w.make_x = lambda: w.given
    w.given = torch.randn(4, 3, requires_grad=True) * 1.0

    def change():
        w.given.retain_grad()

    return (lambda net, x: (2.0 if x.retains_grad else 1.0) * grad_loss(net, x)), change


@change
def version(w):
    def change():
        w.x.add_(0.0)

    return (lambda net, x: (1.0 + x._version) * grad_loss(net, x)), change


@change
def base(w):
    def change():
        w.x = w.x.view(4, 3)

    return (lambda net, x: (2.0 if x._base is None else 1.0) * grad_loss(net, x)), change


@change
def string_of_sizes(w):
    sizes = [4, 4, 4, 7, 5, 5]
    weights = {"torch.Size([4, 3])": 2.0, "torch.Size([5, 3])": 3.0}
    w.make_x = lambda: torch.ones(sizes.pop(0), 3)
    return (lambda net, x: weights.get(f"{x.shape}", 1.0) * grad_loss(net, x)), lambda: None


@change
def environment(w):
    os.environ["HODIFF_TEST"] = "0.5"
    w.restore = lambda: os.environ.pop("HODIFF_TEST")
    return (lambda net, x: grad_loss(net, x) * float(os.getenv("HODIFF_TEST"))), lambda: os.environ.update(
        HODIFF_TEST="0.1"
    )


@change
def strided(w):
    def change():
        w.x = torch.randn(3, 4).t()

    return grad_loss, change


@change
def value_of_loss_is_parameter(w):
    w.net.p = nn.Parameter(torch.tensor(3.0))
    return (lambda net, x: net.p), lambda: None


@change
def gradient_is_input(w):
    w.net.p = nn.Parameter(torch.ones(4, 3))
    return (lambda net, x: (net.p * x).sum()), lambda: None


@change
def same_gradient_twice(w):
    w.net.p = nn.Parameter(torch.ones(4))
    w.net.q = nn.Parameter(torch.ones(4))
    return (lambda net, x: (net.p + net.q).sum() * x.sum()), lambda: None


@change
def set_grad_in_loss(w):
    def loss(net, x):
        with torch.no_grad():
            t = net(x)
        return (net(x) - 2 * t).square().mean()

    return loss, lambda: None


@change
def layernorm_third(w):
    w.net.insert(1, nn.LayerNorm(6))

    def loss(net, x):
        g = AG(net(x).square().mean(), list(net.parameters()), create_graph=True)
        return sum(a.square().sum() for a in g)

    return loss, lambda: None


@change
def try_key(w):
    cfg = {}

    def loss(net, x):
        try:
            a = cfg["a"]
        except KeyError:
            a = 0.5
        return a * grad_loss(net, x)

    def change():
        cfg["a"] = 0.1

    return loss, change


@change
def try_attr(w):
    cfg = types.SimpleNamespace()

    def loss(net, x):
        try:
            a = cfg.a
        except AttributeError:
            a = 0.5
        return a * grad_loss(net, x)

    def change():
        cfg.a = 0.1

    return loss, change


@change
def try_module_attr(w):
    def loss(net, x):
        try:
            a = net.a
        except AttributeError:
            a = 0.5
        return a * grad_loss(net, x)

    def change():
        w.net.a = 0.1

    return loss, change


@change
def in_set(w):
    cfg = set()

    def change():
        cfg.add("a")

    return (lambda net, x: (0.1 if "a" in cfg else 0.5) * grad_loss(net, x)), change


@change
def in_list(w):
    cfg = ["b"]

    def change():
        cfg.append("a")

    return (lambda net, x: (0.1 if "a" in cfg else 0.5) * grad_loss(net, x)), change


@change
def in_dict(w):
    cfg = {"b": 1}

    def change():
        cfg["a"] = 1

    return (lambda net, x: (0.1 if "a" in cfg else 0.5) * grad_loss(net, x)), change


@change
def in_tuple_keys(w):
    cfg = {"b": 1}

    def change():
        cfg["a"] = 1

    return (lambda net, x: (0.1 if "a" in cfg else 0.5) * grad_loss(net, x)), change


@change
def dict_len(w):
    cfg = {"b": 1}

    def change():
        cfg["a"] = 1

    return (lambda net, x: len(cfg) * grad_loss(net, x)), change


@change
def dict_truth(w):
    cfg = {}

    def change():
        cfg["a"] = 1

    return (lambda net, x: (0.1 if cfg else 0.5) * grad_loss(net, x)), change


@change
def dict_items(w):
    cfg = {"b": 0.5}

    def change():
        cfg["a"] = 0.3

    return (lambda net, x: sum(v for k, v in cfg.items()) * grad_loss(net, x)), change


@change
def dict_order(w):
    cfg = {"b": 0.5, "a": 0.2}

    def change():
        v = cfg.pop("b")
        cfg["b"] = v

    def loss(net, x):
        r = 1.0
        for v in cfg.values():
            r = r * 2 + v
        return r * grad_loss(net, x)

    return loss, change


@change
def ordered_dict(w):
    from collections import OrderedDict

    cfg = OrderedDict(b=0.5, a=0.2)

    def change():
        cfg.move_to_end("b")

    def loss(net, x):
        r = 1.0
        for v in cfg.values():
            r = r * 2 + v
        return r * grad_loss(net, x)

    return loss, change


@change
def defaultdict(w):
    from collections import defaultdict as D

    cfg = D(lambda: 0.5)

    def change():
        cfg["a"] = 0.1

    return (lambda net, x: cfg["a"] * grad_loss(net, x)), change


@change
def deque(w):
    from collections import deque as D

    cfg = D([0.5])

    def change():
        cfg[0] = 0.1

    return (lambda net, x: cfg[0] * grad_loss(net, x)), change


@change
def counter_missing(w):
    from collections import Counter

    cfg = Counter()

    def change():
        cfg["a"] = 3

    return (lambda net, x: (cfg["a"] + 1) * grad_loss(net, x)), change


@change
def chainmap(w):
    from collections import ChainMap

    base = {"a": 0.5}
    top = {}
    cfg = ChainMap(top, base)

    def change():
        top["a"] = 0.1

    return (lambda net, x: cfg["a"] * grad_loss(net, x)), change


@change
def mappingproxy(w):
    base = {"a": 0.5}
    cfg = types.MappingProxyType(base)

    def change():
        base["a"] = 0.1

    return (lambda net, x: cfg["a"] * grad_loss(net, x)), change


@change
def mappingproxy_missing(w):
    base = {}
    cfg = types.MappingProxyType(base)

    def change():
        base["a"] = 0.1

    return (lambda net, x: cfg.get("a", 0.5) * grad_loss(net, x)), change


@change
def custom_mapping(w):
    from collections.abc import Mapping

    class M(Mapping):
        def __init__(self):
            self.d = {}

        def __getitem__(self, k):
            return self.d[k]

        def __iter__(self):
            return iter(self.d)

        def __len__(self):
            return len(self.d)

    cfg = M()

    def change():
        cfg.d["a"] = 0.1

    return (lambda net, x: cfg.get("a", 0.5) * grad_loss(net, x)), change


@change
def dict_subclass_missing(w):
    class M(dict):
        pass

    cfg = M()

    def change():
        cfg["a"] = 0.1

    return (lambda net, x: cfg.get("a", 0.5) * grad_loss(net, x)), change


@change
def setdefault(w):
    cfg = {"a": 0.5}

    def change():
        cfg["a"] = 0.1

    return (lambda net, x: cfg.setdefault("a", 0.5) * grad_loss(net, x)), change


@change
def globals_get(w):
    globals().pop("LIE_G", None)

    def change():
        globals()["LIE_G"] = 0.1

    return (lambda net, x: globals().get("LIE_G", 0.5) * grad_loss(net, x)), change


@change
def global_variable(w):
    globals()["LIE_V"] = 0.5

    def change():
        globals()["LIE_V"] = 0.1

    return (lambda net, x: LIE_V * grad_loss(net, x)), change  # noqa: F821


@change
def name_error(w):
    globals().pop("LIE_N", None)

    def loss(net, x):
        try:
            a = LIE_N
        except NameError:
            a = 0.5
        return a * grad_loss(net, x)

    def change():
        globals()["LIE_N"] = 0.1

    return loss, change


@change
def default_argument(w):
    def loss(net, x, a=0.5):
        return a * grad_loss(net, x)

    def change():
        loss.__defaults__ = (0.1,)

    return loss, change


@change
def kw_default(w):
    def loss(net, x, *, a=0.5):
        return a * grad_loss(net, x)

    def change():
        loss.__kwdefaults__["a"] = 0.1

    return loss, change


@change
def helper_default(w):
    def helper(a=0.5):
        return a

    def change():
        helper.__defaults__ = (0.1,)

    return (lambda net, x: helper() * grad_loss(net, x)), change


@change
def helper_code(w):
    def helper():
        return 0.5

    def change():
        helper.__code__ = (lambda: 0.1).__code__

    return (lambda net, x: helper() * grad_loss(net, x)), change


@change
def function_attribute(w):
    def helper():
        return 0.5

    helper.a = 0.5

    def change():
        helper.a = 0.1

    return (lambda net, x: helper.a * grad_loss(net, x)), change


@change
def forward_patched(w):
    def change():
        m = w.net[1]
        m.forward = lambda x: torch.sin(x)

    return grad_loss, change


@change
def forward_patched_class(w):
    class T(nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    w.net[1] = T()

    def change():
        T.forward = lambda self, x: torch.sin(x)

    return grad_loss, change


@change
def call_patched_class(w):
    class T(nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    w.net[1] = T()

    def change():
        T.__call__ = lambda self, x: torch.sin(x)

    return grad_loss, change


@change
def method_patched(w):
    class C:
        def f(self):
            return 0.5

    c = C()

    def change():
        c.f = lambda: 0.1

    return (lambda net, x: c.f() * grad_loss(net, x)), change


@change
def class_method_patched(w):
    class C:
        def f(self):
            return 0.5

    c = C()

    def change():
        C.f = lambda self: 0.1

    return (lambda net, x: c.f() * grad_loss(net, x)), change


@change
def class_swapped(w):
    class A:
        def f(self):
            return 0.5

    class B(A):
        def f(self):
            return 0.1

    c = A()

    def change():
        c.__class__ = B

    return (lambda net, x: c.f() * grad_loss(net, x)), change


@change
def a_property(w):
    class C:
        _a = 0.5

        @property
        def a(self):
            return self._a

    c = C()

    def change():
        c._a = 0.1

    return (lambda net, x: c.a * grad_loss(net, x)), change


@change
def dunder_getattr(w):
    class C:
        def __init__(self):
            self.d = {"a": 0.5}

        def __getattr__(self, n):
            return self.d[n]

    c = C()

    def change():
        c.d["a"] = 0.1

    return (lambda net, x: c.a * grad_loss(net, x)), change


@change
def dunder_getattr_shadow(w):
    class C:
        def __getattr__(self, n):
            return 0.5

    c = C()

    def change():
        c.a = 0.1

    return (lambda net, x: c.a * grad_loss(net, x)), change


@change
def instance_shadows_class(w):
    class C:
        a = 0.5

    c = C()

    def change():
        c.a = 0.1

    return (lambda net, x: c.a * grad_loss(net, x)), change


@change
def lru_cache(w):
    cfg = {"a": 0.5}

    @functools.lru_cache
    def f(k):
        return cfg[k]

    def change():
        cfg["a"] = 0.1
        f.cache_clear()

    return (lambda net, x: f("a") * grad_loss(net, x)), change


@change
def submodule_training(w):
    w.net.insert(1, nn.Dropout(0.5))

    def change():
        w.net[1].training = False

    return grad_loss, change


@change
def dropout_p(w):
    w.net.insert(1, nn.Dropout(0.5))

    def change():
        w.net[1].p = 0.1

    return grad_loss, change


@change
def grad_read(w):
    def loss(net, x):
        s = 1.0 if net[0].weight.grad is None else 0.1
        return s * grad_loss(net, x)

    w.keep = True
    return loss, lambda: None


@change
def grad_used(w):
    w.other_p = torch.ones(2, requires_grad=True)

    def loss(net, x):
        s = 1.0 if w.other_p.grad is None else w.other_p.grad.sum()
        return s * grad_loss(net, x)

    def change():
        w.other_p.grad = torch.ones(2) * 3

    return loss, change


@change
def tensor_attribute(w):
    w.x.a = 0.5

    def change():
        w.x.a = 0.1

    return (lambda net, x: x.a * grad_loss(net, x)), change


@change
def requires_grad_branch(w):
    t = torch.tensor(2.0)

    def change():
        t.requires_grad_()

    return (lambda net, x: (0.1 if t.requires_grad else 0.5) * grad_loss(net, x)), change


@change
def contiguous_branch(w):
    def change():
        w.x = torch.randn(3, 4).t()

    return (lambda net, x: (0.1 if x.is_contiguous() else 0.5) * grad_loss(net, x)), change


@change
def batch_branch(w):
    def change():
        w.x = torch.randn(8, 3)

    return (lambda net, x: (0.1 if len(x) > 5 else 0.5) * grad_loss(net, x) / x.shape[0]), change


@change
def dtype_flag(w):
    def change():
        torch.set_default_dtype(torch.float32)

    return (lambda net, x: (0.1 if torch.get_default_dtype() == torch.float32 else 0.5) * grad_loss(net, x)), change


@change
def backend_flag(w):
    set_flag = torch._C._set_cudnn_benchmark  # PyTorch's own test modules, once imported, forbid the assignment
    set_flag(False)

    def change():
        set_flag(True)

    return (lambda net, x: (0.1 if torch.backends.cudnn.benchmark else 0.5) * grad_loss(net, x)), change


@change
def deterministic_flag(w):
    torch.use_deterministic_algorithms(False)

    def change():
        torch.use_deterministic_algorithms(True)

    return (lambda net, x: (0.1 if torch.are_deterministic_algorithms_enabled() else 0.5) * grad_loss(net, x)), change


@change
def contextvar(w):
    import contextvars

    c = contextvars.ContextVar("c", default=0.5)

    def change():
        c.set(0.1)

    return (lambda net, x: c.get() * grad_loss(net, x)), change


@change
def thread_local(w):
    import threading

    c = threading.local()
    c.a = 0.5

    def change():
        c.a = 0.1

    return (lambda net, x: c.a * grad_loss(net, x)), change


@change
def numpy_scalar(w):
    c = types.SimpleNamespace(a=np.float64(0.5))

    def change():
        c.a = np.float64(0.1)

    return (lambda net, x: c.a * grad_loss(net, x)), change


@change
def numpy_int(w):
    c = types.SimpleNamespace(a=np.int64(5))

    def change():
        c.a = np.int64(3)

    return (lambda net, x: int(c.a) * grad_loss(net, x)), change


@change
def enum_member(w):
    import enum

    class E(enum.Enum):
        A = 0.5
        B = 0.1

    c = types.SimpleNamespace(a=E.A)

    def change():
        c.a = E.B

    return (lambda net, x: c.a.value * grad_loss(net, x)), change


@change
def dataclass(w):
    import dataclasses

    @dataclasses.dataclass
    class C:
        a: float = 0.5

    w.extra = (C(),)

    def change():
        w.extra = (C(0.1),)

    return (lambda net, x, c: c.a * grad_loss(net, x)), change


@change
def dataclass_frozen(w):
    import dataclasses

    @dataclasses.dataclass(frozen=True)
    class C:
        a: float = 0.5

    cfg = [C()]

    def change():
        cfg[0] = C(0.1)

    return (lambda net, x: cfg[0].a * grad_loss(net, x)), change


@change
def namedtuple_arg(w):
    from collections import namedtuple

    T = namedtuple("T", "a b")
    w.extra = (T(torch.tensor(0.5), 2.0),)

    def change():
        w.extra = (T(torch.tensor(0.5), 3.0),)

    return (lambda net, x, c: c.a * c.b * grad_loss(net, x)), change


@change
def file_exists(w):
    p = tempfile.mktemp()

    def change():
        open(p, "w").close()

    return (lambda net, x: (0.1 if os.path.exists(p) else 0.5) * grad_loss(net, x)), change


@change
def identity_of(w):
    a, b = object(), object()
    c = types.SimpleNamespace(a=a)

    def change():
        c.a = b

    return (lambda net, x: (0.5 if c.a is a else 0.1) * grad_loss(net, x)), change


@change
def type_of(w):
    c = types.SimpleNamespace(a=1)

    def change():
        c.a = 1.0

    return (lambda net, x: (0.5 if isinstance(c.a, int) else 0.1) * grad_loss(net, x)), change


@change
def buffer_none(w):
    w.net.register_buffer("b", None)

    def change():
        w.net.b = torch.tensor(0.1)

    return (lambda net, x: (0.5 if net.b is None else net.b) * grad_loss(net, x)), change


@change
def param_added(w):
    def change():
        torch.manual_seed(3)
        w.net.register_parameter("extra", nn.Parameter(torch.tensor(0.7)))

    return (lambda net, x: grad_loss(net, x) + sum(p.square().sum() for p in net.parameters())), change


@change
def param_deleted(w):
    w.net.register_parameter("extra", nn.Parameter(torch.tensor(0.7)))

    def change():
        del w.net.extra

    return (lambda net, x: grad_loss(net, x) + sum(p.square().sum() for p in net.parameters())), change


@change
def add_module_later(w):
    def change():
        w.net.append(nn.Tanh())

    return grad_loss, change


@change
def functional_patched(w):
    old = F.softplus
    w.restore = lambda: setattr(F, "softplus", old)

    def change():
        F.softplus = torch.sin

    return (lambda net, x: grad_loss(lambda x: F.softplus(net(x)), x)), change


@change
def math_inside(w):
    c = types.SimpleNamespace(a=0.5)

    def change():
        c.a = 0.1

    return (lambda net, x: math.exp(c.a) * grad_loss(net, x)), change


@change
def string_flag(w):
    c = types.SimpleNamespace(a="mean")

    def change():
        c.a = "sum"

    return (lambda net, x: getattr(grad_loss(net, x) * net(x), c.a)()), change


@change
def bool_int(w):
    c = types.SimpleNamespace(a=True)

    def change():
        c.a = False

    return (lambda net, x: (1 + c.a) * grad_loss(net, x)), change


@change
def anneal_each_call(w):
    c = types.SimpleNamespace(a=0.5)
    w.each = lambda: setattr(c, "a", c.a * 0.9)
    return (lambda net, x: c.a * grad_loss(net, x)), lambda: None


@change
def int_each_call(w):
    c = types.SimpleNamespace(a=1)
    w.each = lambda: setattr(c, "a", c.a + 1)
    return (lambda net, x: c.a * grad_loss(net, x) * x[c.a % 3].sum()), lambda: None


@change
def slice_each_call(w):
    c = types.SimpleNamespace(a=1)
    w.each = lambda: setattr(c, "a", c.a % 3 + 1)
    return (lambda net, x: grad_loss(net, x[: c.a])), lambda: None


@change
def tensor_list_shrinks(w):
    l = [torch.tensor(0.5), torch.tensor(2.0)]

    def change():
        l.pop()

    return (lambda net, x: grad_loss(net, x) * torch.stack(l).sum()), change


@change
def weakref_target(w):
    import weakref

    class C:
        a = 0.5

    c = C()
    r = weakref.ref(c)

    def change():
        c.a = 0.1

    return (lambda net, x: r().a * grad_loss(net, x)), change


@change
def nested_closure(w):
    a = 0.5

    def outer():
        def inner():
            return a

        return inner

    f = outer()

    def change():
        nonlocal a
        a = 0.1

    return (lambda net, x: f() * grad_loss(net, x)), change


@change
def tensor_shape_of_buffer(w):
    w.net.register_buffer("b", torch.zeros(3))

    def change():
        w.net.b = torch.zeros(5)

    return (lambda net, x: net.b.shape[0] * grad_loss(net, x)), change


@change
def aliased_later(w):
    w.net.register_buffer("b", torch.zeros(2))
    t = [torch.ones(2)]

    def loss(net, x):
        a = t[0].sum() + 1
        net.b.add_(1)
        b = t[0].sum() + 1
        return grad_loss(net, x) * a * b

    def change():
        t[0] = w.net.b

    return loss, change


@change
def stack_mode(w):
    from torch.overrides import TorchFunctionMode

    class M(TorchFunctionMode):
        def __torch_function__(self, f, t, a=(), k=None):
            r = f(*a, **(k or {}))
            return r * 2 if f is torch.tanh else r

    def change():
        w.mode = M()
        w.mode.__enter__()
        w.restore = lambda: w.mode.__exit__(None, None, None)

    return grad_loss, change


@change
def default_device(w):
    def change():
        torch.set_default_device("cpu")
        w.restore = lambda: torch.set_default_device(None)

    return (lambda net, x: grad_loss(net, x) * torch.ones(())), change


@change
def saved_hooks(w):
    def change():
        c = torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t)
        c.__enter__()
        w.restore = lambda: c.__exit__(None, None, None)

    return (lambda net, x: net(x).square().mean()), change


def _weighed(module):
    """A loss times a number that a module or an object has."""
    return lambda net, x: grad_loss(net, x) * module.k


@change
def attribute_hides_that_of_a_base(w):
    base = type("Base", (), {"k": 0.5})
    kind = type("Kind", (base,), {})
    return _weighed(kind()), lambda: setattr(kind, "k", 0.1)


@change
def attribute_of_a_base(w):
    base = type("Base", (), {"k": 0.5})
    return _weighed(type("Kind", (base,), {})()), lambda: setattr(base, "k", 0.1)


@change
def attribute_hides_that_of_a_base_module(w):
    base = type("Base", (nn.Module,), {"k": 0.5})
    kind = type("Kind", (base,), {})
    return _weighed(kind()), lambda: setattr(kind, "k", 0.1)


@change
def property_hides_an_attribute(w):
    kind = type("Kind", (nn.Module,), {})
    module = kind()
    module.k = 0.5
    return _weighed(module), lambda: setattr(kind, "k", property(lambda self: 0.1))


@change
def attribute_hides_getattr_of_a_module(w):
    def look_up(self, name):
        return 0.5 if name == "k" else nn.Module.__getattr__(self, name)

    module = type("Kind", (nn.Module,), {"__getattr__": look_up})()
    return _weighed(module), lambda: setattr(module, "k", 0.1)
