import builtins
import gc
import threading
from collections import OrderedDict

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

import hodiff
from hodiff._core import _call, _hooks, _kernels, _locks, _settings, _versions
from hodiff._core._call import call
from hodiff._core._lending import EvaluationContext
from hodiff._core._settings import Counted
from tests.support.limits import in_threads


def asked(passes, create_graph=False):
    return call(torch.sum, torch.ones(2), passes=passes, create_graph=create_graph)


def switch():
    """A counted switch over a plain flag, and a log of what it did."""
    log = []

    def turn(undo):
        undo += [lambda: log.append("off")]
        log.append("on")

    return Counted(turn), log


def test_the_first_switches_and_the_last_restores():
    counted, log = switch()
    first, second = [], []
    counted.enter(first)
    counted.enter(second)
    _settings.undo_all(first)
    assert log == ["on"]
    _settings.undo_all(second)
    assert log == ["on", "off"]


def test_leaving_twice_is_leaving_once():
    counted, log = switch()
    first, second = [], []
    counted.enter(first)
    counted.enter(second)
    first[0]()
    first[0]()
    assert log == ["on"]
    _settings.undo_all(second)
    first[0]()
    assert log == ["on", "off"]


def test_what_is_interrupted_is_undone_once_more_and_the_rest_too():
    log, tries = [], []

    def interrupted():
        tries.append(1)
        if len(tries) == 1:
            raise KeyboardInterrupt("now")
        log.append("second")

    undo = [lambda: log.append("third"), interrupted, lambda: log.append("first")]
    with pytest.raises(KeyboardInterrupt, match="now"):
        _settings.undo_all(undo)
    assert log == ["first", "second", "third"] and not undo


def test_a_lending_that_was_lost_is_closed_with_its_last_reference():
    context = EvaluationContext(asked(passes=2)).__enter__()
    assert _kernels.included() and _call.inside()
    del context
    assert not _kernels.included() and not _call.inside()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_lending_that_was_lost_leaves_modes_to_the_contexts_around_it(mode):
    """They may have ended: to put back what was around the call would then switch gradients off for good."""
    with mode():
        context = EvaluationContext(asked(passes=2)).__enter__()
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    del context
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not _call.inside()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_that_was_lost_is_left_to_the_contexts_around_it(dtype):
    with torch.autocast("cpu", dtype):
        scope = _settings.autocast("cpu")
        scope.__enter__()
        assert not torch.is_autocast_enabled("cpu")
    del scope
    assert not torch.is_autocast_enabled("cpu")


def test_overlapping_threads_restore_once():
    counted, log = switch()
    inside, leave, mine, theirs = threading.Event(), threading.Event(), [], []

    def stay():
        counted.enter(theirs)
        inside.set()
        leave.wait(10)
        _settings.undo_all(theirs)

    thread = threading.Thread(target=stay, daemon=True)
    thread.start()
    inside.wait(10)
    counted.enter(mine)
    _settings.undo_all(mine)
    assert log == ["on"]
    leave.set()
    thread.join(10)
    assert log == ["on", "off"]


def test_what_another_thread_is_loading_is_waited_for_without_the_lock(monkeypatch):
    """To load it may collect a context that was lost, which waits for the lock."""
    import torch._dynamo  # noqa: F401

    loaded, import_ = [], builtins.__import__

    def seen(name, *args, **kwargs):
        if name.startswith("torch._dynamo"):
            loaded.append(_locks.lock._is_owned())
        return import_(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", seen)
    monkeypatch.setattr(_settings.eager, "needs", "torch._dynamo.eval_frame")  # as before it was loaded
    with EvaluationContext(asked(passes=2)):
        pass
    assert loaded[0] is False


def test_everything_is_undone_when_entering_fails(monkeypatch):
    def broken(undo):
        raise RuntimeError("no such backend")

    monkeypatch.setattr(_hooks.watch_hooks, "_switch", broken)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="no such backend"):
            EvaluationContext(asked(passes=2)).__enter__()
        assert not torch.is_grad_enabled()
    assert not _call.inside()


def test_what_cannot_be_undone_does_not_keep_the_rest_from_it():
    def broken():
        raise RuntimeError("no way back")

    with torch.no_grad():
        context = EvaluationContext(asked(passes=2)).__enter__()
        context.undo.append(broken)
        with pytest.raises(RuntimeError, match="no way back"):
            context.close()
        assert not torch.is_grad_enabled()
    assert not _call.inside()


@pytest.mark.parametrize(
    ("passes", "create_graph", "order"), [(1, False, 1), (1, True, 2), (2, False, 2), (2, True, 3)]
)
def test_order_outside_any_call(passes, create_graph, order):
    assert asked(passes, create_graph).order == order


def test_order_inside_a_call_counts_its_passes():
    with EvaluationContext(asked(passes=2)):
        assert asked(1, create_graph=True).order == 3
        assert asked(1).order == 1


def test_attention_is_what_the_user_had_set():
    """Each flag by itself: also one that was off before, and the math kernel."""
    cuda = torch.backends.cuda
    getters = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled, cuda.math_sdp_enabled)
    setters = (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_cudnn_sdp, cuda.enable_math_sdp)
    before = [get() for get in getters]
    try:
        for wanted in ((True, False, True, False), (False, True, False, True), (True, True, True, True)):
            for enable, on in zip(setters, wanted, strict=True):
                enable(on)
            with _settings.Scope(_kernels.plain_attention.enter):
                assert [get() for get in getters] == [False, False, False, True]
            assert tuple(get() for get in getters) == wanted
    finally:
        for enable, on in zip(setters, before, strict=True):
            enable(on)


def test_a_switch_that_is_interrupted_is_put_back():
    log, undo = [], []

    def turn(undo):
        undo += [lambda: log.append("off")]
        log.append("on")
        raise KeyboardInterrupt("as it returns")

    with pytest.raises(KeyboardInterrupt, match="as it returns"):
        Counted(turn).enter(undo)
    _settings.undo_all(undo)
    assert log == ["on", "off"]


def test_what_is_compiled_runs_as_it_is():
    from torch._dynamo import eval_frame

    before, undo = eval_frame._stance, []
    _settings.eager.enter(undo)
    inside = eval_frame._stance
    with torch.compiler.set_stance("force_eager"):
        assert inside == eval_frame._stance
    _settings.undo_all(undo)
    assert eval_frame._stance is before


def test_what_restores_the_hook_of_modules_is_known_before_it_is_there(monkeypatch):
    class Interrupted(OrderedDict):
        def __setitem__(self, key, hook):
            super().__setitem__(key, hook)
            raise KeyboardInterrupt("as it returns")

    hooks, undo = Interrupted(), []
    monkeypatch.setattr(_versions, "before_modules", hooks)
    with pytest.raises(KeyboardInterrupt, match="as it returns"):
        _hooks.watch_modules.enter(undo)
    assert len(hooks) == 1
    _settings.undo_all(undo)
    assert not hooks


def test_a_lending_that_was_lost_in_a_cycle_is_closed_with_it():
    context = EvaluationContext(asked(passes=2)).__enter__()
    cycle = [context]
    cycle.append(cycle)
    del context, cycle
    gc.collect()
    assert torch.backends.cuda.flash_sdp_enabled() and not _call.inside()


def test_a_mode_that_comes_back_after_its_end_goes_with_the_next_call():
    """As where an interrupt comes between the operation of a mode and the end of PyTorch's context around it."""
    mode = BaseTorchFunctionMode()
    with _settings.on(mode):
        popped = torch.overrides._pop_mode_temporarily()
        popped.__enter__()
    del popped  # and with it the context, which puts the mode on
    assert torch.overrides._get_current_function_mode_stack() == [mode]
    hodiff.grad(lambda x: x.sin().sum(), torch.ones(2))
    assert not torch.overrides._get_current_function_mode_stack() and not _settings.absent.modes


def test_cudnn_is_switched_back(monkeypatch):
    # PyTorch's database of operations, once imported, forbids what every user may do.
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)
    for wanted in (True, False):
        with torch.backends.cudnn.flags(enabled=wanted):
            undo = []
            _settings.no_cudnn.enter(undo)
            assert not torch.backends.cudnn.enabled
            _settings.undo_all(undo)
            assert torch.backends.cudnn.enabled is wanted


def test_modes_of_threads_that_overlap_leave_no_flag() -> None:
    """PyTorch keeps for the whole process whether a mode is on; a flag that stays on keeps Dynamo from compiling."""

    class Mode(_settings.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **kwargs or {})

    before, inside, first_left = _settings._flags(), threading.Barrier(2), threading.Event()

    def first() -> None:
        with _settings.on(Mode()):
            inside.wait(10)
        first_left.set()

    def second() -> None:
        with _settings.on(Mode()):
            with _settings.on(Mode()):
                inside.wait(10)
                assert first_left.wait(10)
            assert _settings._flags() != before  # one of its modes is still on

    in_threads(first, second)
    assert _settings._flags() == before
