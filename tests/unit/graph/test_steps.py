"""Under a watch, a step of PyTorch's own optimizers is seen as one change; all else is seen call by call."""

import collections
import functools
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.optim import optimizer as _optimizer
from torch.overrides import TorchFunctionMode

from hodiff._core import _settings
from hodiff.graph._record import Listener
from hodiff.graph._watch import Watch
from tests.support.limits import in_threads

ARITHMETIC = {"add_", "mul_", "addcdiv_", "addcmul_", "sub_", "square"}


class Counting(Listener):
    """Counts the calls that a watch sees."""

    def __init__(self):
        self.names = collections.Counter()

    def called(self, func, arguments, result, frame):
        self.names[getattr(func, "__name__", "")] += 1


class Program:
    """A layer, its gradient, and the watch that is to see the rest."""

    def __init__(self, kind=torch.optim.SGD, **options):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = kind([*self.model.parameters(), torch.ones(2, requires_grad=True)], lr=0.1, **options)
        self.listener = Counting()
        self.model(torch.ones(1, 3)).sum().backward()

    @functools.cached_property
    def watch(self):
        return Watch(self.listener)

    def sees(self, call):
        """Which arithmetic is seen of a call."""
        self.listener.names.clear()
        call()
        return self.listener.names.keys() & ARITHMETIC

    def sees_the_next(self):
        return self.sees(lambda: torch.ones(2).square()) == {"square"}


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
)
def test_a_step_is_one_change_of_the_leaves_that_it_changed(kind):
    program = Program(kind)
    with program.watch as watch:
        seen = program.sees(lambda: program.optimizer.step())
        assert program.sees_the_next()
    assert not seen
    for leaf in program.model.parameters():
        change = watch.record.changed(leaf)
        assert "program.optimizer.step()" in change.line.text
        assert change.line.file == __file__
        assert (change.call, change.passes) == ("step", 0)
    unused = program.optimizer.param_groups[0]["params"][-1]
    assert watch.record.changed(unused) is None


def test_steps_change_as_without_a_watch():
    results = []
    for context in (nullcontext, Watch):
        program = Program(torch.optim.Adam, weight_decay=0.1)
        with context():
            for _ in range(3):
                program.optimizer.step()
        results.append([leaf.detach().clone() for leaf in program.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_step_that_a_scheduler_or_a_caller_wraps():
    program = Program()
    scheduler = torch.optim.lr_scheduler.StepLR(program.optimizer, 1)

    def train_step():
        program.optimizer.step(None)

    with program.watch as watch:
        assert not program.sees(train_step)
        scheduler.step()
    assert watch.record.changed(program.model.weight).line.text == "program.optimizer.step(None)"


def closure_given(program):
    return lambda: program.optimizer.step(lambda: program.model.weight.square().sum())


def of_the_users_class(program):
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            self.param_groups[0]["params"][0].data.square()

    program.optimizer = Mine(program.model.parameters(), lr=0.1)
    return program.optimizer.step


def differentiable(program):
    program.optimizer = torch.optim.SGD([program.model.weight.clone()], lr=0.1, differentiable=True)
    program.optimizer.param_groups[0]["params"][0].grad = torch.ones(2, 3)
    return program.optimizer.step


@pytest.mark.parametrize("make", [closure_given, of_the_users_class, differentiable])
def test_other_steps_are_seen_call_by_call(make):
    program = Program()
    call = make(program)
    with program.watch:
        assert "add_" in program.sees(call)
        assert program.sees_the_next()


@pytest.mark.parametrize("which", ["register_step_pre_hook", "register_step_post_hook"])
def test_what_the_users_hooks_do_is_seen(which):
    program = Program()
    getattr(program.optimizer, which)(lambda *given: (program.model.weight.detach().square(), None)[1])
    with program.watch:
        assert "square" in program.sees(program.optimizer.step)


class Refusing(TorchFunctionMode):
    """Has the step of an optimizer fail half-way."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "add_" and args[0].dim() == 1:
            raise ValueError("refused")
        return func(*args, **(kwargs or {}))


def test_after_a_step_that_raised_calls_are_seen_again():
    program = Program()
    with Refusing(), program.watch as watch:
        with suppress(ValueError):
            program.optimizer.step()
        assert program.sees_the_next()
        assert watch.record.changed(program.model.weight) is not None
        assert watch.record.changed(program.model.bias) is None
    assert torch._C._len_torch_function_stack() == 0


def test_if_its_error_is_kept_they_are_seen_from_the_next_step_on():
    program = Program()
    with Refusing(), program.watch:
        with pytest.raises(ValueError, match="refused") as kept:
            program.optimizer.step()
        with pytest.raises(ValueError, match="refused"):
            program.optimizer.step()
        assert kept.tb
        assert torch._C._len_torch_function_stack() == 2
        assert program.sees_the_next()
    assert torch._C._len_torch_function_stack() == 0


def test_a_step_that_raises_out_of_the_watch_leaves_the_callers_modes():
    program = Program()
    with Refusing():
        with pytest.raises(ValueError, match="refused"), program.watch:
            program.optimizer.step()
        assert torch._C._len_torch_function_stack() == 1
    assert program.watch.record.changed(program.model.weight) is not None


class Outer(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_under_a_mode_of_the_users_and_in_a_watch_within_a_watch():
    program = Program()
    with program.watch, Outer():
        assert "add_" in program.sees(program.optimizer.step)
    with program.watch, Watch() as inner:
        assert "add_" in program.sees(program.optimizer.step)
        assert program.sees_the_next()
    assert inner.record.changed(program.model.weight).call == "step"
    assert torch._C._len_torch_function_stack() == 0


def test_no_place_is_taken_above_a_mode_that_was_entered_since():
    program = Program()
    with Refusing(), program.watch:
        try:
            program.optimizer.step()
        except ValueError as error:
            kept = error
        with Outer() as outer:
            del kept  # and with it the frame of the step
            assert _settings.those_on(TorchFunctionMode)[-1] is outer
        assert torch._C._len_torch_function_stack() == 1
    assert torch._C._len_torch_function_stack() == 0


def test_a_step_of_another_thread_takes_nothing_off():
    program, other = Program(), Program()
    with program.watch as watch:
        in_threads(other.optimizer.step)
        assert program.sees_the_next()
    assert watch.record.changed(other.model.weight) is None


def test_nothing_is_left_with_optimizers():
    hooks = _optimizer._global_optimizer_pre_hooks
    before = len(hooks)
    with Watch(), Watch():
        assert len(hooks) == before + 2
    assert len(hooks) == before


def test_a_compiled_step():
    results = []
    for context in (nullcontext, Watch):
        program = Program()
        compiled = torch.compile(lambda program=program: program.optimizer.step(), backend="eager")
        with context():
            compiled()
        results.append(program.model.weight.detach().clone())
    assert torch.equal(*results)
