"""Which variables hold which tensors, as they are written; and by which lines a call came."""

import enum
import gc
import sys
import weakref
from collections.abc import Mapping

import torch
from torch import nn

import hodiff
from hodiff.graph import _names
from hodiff.graph._names import TensorNames, user_frames
from hodiff.graph._source import lines_of


def frames():
    """The caller's frame and those around it."""
    return list(user_frames(sys._getframe(1)))


# --- frames -----------------------------------------------------------------------------------------------------------


def test_the_innermost_variable_of_a_name_is_the_one_that_can_be_written():
    def inner():
        t = torch.ones(2)
        return t, TensorNames(frames())

    t = torch.zeros(2)
    other = t
    mine, names = inner()
    assert names.of(mine) == "t"
    assert names.values["t"] is mine
    assert names.of(t) == "other"
    assert other is t


def test_callers_are_searched_too_and_a_global_belongs_to_the_innermost_of_its_module():
    def inner():
        return TensorNames(frames())

    kept = torch.ones(2)
    names = inner()
    assert names.of(kept) == "kept"
    assert names.owners["kept"] is sys._getframe().f_code
    assert names.owners["frames"] is inner.__code__


def test_a_search_leaves_nothing_behind():
    y = torch.ones(2, requires_grad=True).exp()
    dead = weakref.ref(y)
    hodiff.graph.inspect(y)
    del y
    assert dead() is None


def test_a_search_does_not_empty_locals_that_the_user_holds():
    y = torch.ones(2, requires_grad=True).exp()
    held = locals()
    hodiff.graph.inspect(y)
    assert held["y"] is y


# --- what a variable leads to -----------------------------------------------------------------------------------------


def of(**roots):
    return TensorNames(roots=roots)


def test_the_first_of_several_gives_its_name():
    t = torch.arange(4.0)
    names = of(a=t, b=t.view(2, 2))
    assert names.memory(t[1:]) == "a"
    first, second = torch.ones(2, requires_grad=True).exp().chunk(2)
    assert of(first=first, second=second).nodes[first.grad_fn] == "first"


def test_a_gradient_is_named_by_its_leaf():
    w = torch.ones(2, requires_grad=True)
    w.exp().sum().backward()
    assert of(w=w).of(w.grad) == "w.grad"


def test_results_are_no_leaves_and_no_optimizers_tensors():
    w = torch.ones(2, requires_grad=True)
    y, optimizer = w.exp(), torch.optim.SGD([w], lr=0.1)
    found = TensorNames(roots={"w": w, "y": y, "optimizer": optimizer}, results=True)
    assert [id(tensor) for tensor in found.all] == [id(y)]
    assert found.optimizers == {}
    assert of(optimizer=optimizer).optimizers == {id(optimizer): "optimizer"}


def test_four_steps_and_no_more():
    near, far = torch.ones(1), torch.ones(1)
    names = of(a={"b": [{"c": (near, [far])}]})
    assert names.of(near) == "a['b'][0]['c'][0]"
    assert names.of(far) == ""


def test_a_dict_of_very_many_is_not_searched():
    t = torch.ones(1)
    assert of(d=dict.fromkeys(range(_names.BUDGET), t)).of(t) == "d[0]"
    assert of(d=dict.fromkeys(range(_names.BUDGET + 1), t)).of(t) == ""


def test_keys_that_cannot_be_written_are_named_by_class_and_place():
    t, u, v, w = torch.ones(1), torch.ones(1), torch.ones(1), torch.ones(1)
    names = of(d={(1, "a"): t, object(): u, (1, object()): v, torch.nn.ReLU(): [w]})
    assert [names.of(each) for each in (t, u, v, w)] == [
        "d[(1, 'a')]",
        "d[<object 1>]",
        "d[<tuple 2>]",
        "d[<ReLU 3>][0]",
    ]


class Computing(Mapping):
    """A mapping of its own kind: what it is asked for, it computes."""

    def __init__(self, kept):
        self.kept = kept

    def __getitem__(self, key):
        raise AssertionError

    def __iter__(self):
        raise AssertionError

    def __len__(self):
        raise AssertionError


def test_a_mapping_of_its_own_kind_is_not_searched():
    t = torch.ones(1)
    assert of(m=Computing(t)).of(t) == ""


class Stateful(nn.Module):
    shared = [torch.ones(1)]  # noqa: RUF012 -- as users write it

    def __init__(self):
        super().__init__()
        self.register_buffer("buffer", torch.zeros(1))
        self.state = torch.zeros(1)


def test_modules_that_are_held_twice_have_their_first_name():
    net = nn.Module()
    net.first = nn.Sequential(nn.Linear(1, 1), Stateful())
    net.second = net.first
    net.third = Stateful()
    names = of(net=net)
    assert names.paths[id(net.first[1].buffer)] == ["net.first[1].buffer"]
    assert names.paths[id(net.first[1].state)] == ["net.first[1].state"]
    assert names.of(net.third.state) == "net.third.state"
    assert names.of(Stateful.shared[0]) == "net.first[1].shared[0]"


# --- paths ------------------------------------------------------------------------------------------------------------


def frame_of(text, file):
    space = {}
    exec(compile(f"import sys\n{text}\nframe = sys._getframe()", file, "exec"), space)
    return space.pop("frame")


def test_code_that_is_no_users_has_a_path_of_its_own():
    paths = _names.Paths()
    one, other = frame_of("one = 1", "<frozen one>"), frame_of("other = 2", "<frozen other>")
    numbers = [paths.number(each, _names.marked(each)) for each in (one, other)]
    assert [paths[number] for number in numbers] == [((one.f_code, 3),), ((other.f_code, 3),)]


def test_the_same_code_in_two_files_has_two_paths():
    paths = _names.Paths()
    frames = [frame_of("x = 1", file) for file in ("one.py", "other.py")]
    assert frames[0].f_code == frames[1].f_code  # as Python has it
    numbers = [paths.number(frame, _names.marked(frame)) for frame in frames]
    assert [lines_of(paths[number])[0].file for number in numbers] == ["one.py", "other.py"]


def test_code_that_is_gone_is_not_taken_for_what_has_its_place():
    paths = _names.Paths()
    for turn in range(20):  # equal code is compiled again and again, and another at times
        for text in ("x = 1", f"x = {turn}"):
            frame = frame_of(text, "user.py")
            assert paths[paths.number(frame, _names.marked(frame))] == ((frame.f_code, 3),)
            del frame
            gc.collect(0)


class Colour(enum.StrEnum):
    RED = "red"


def test_keys_of_derived_classes_are_not_written_as_code() -> None:
    """What an Enum shows of itself, `<Colour.RED: 'red'>`, is no expression that could be evaluated."""
    assert _names._is_plain(("red", 1, True))
    assert not _names._is_plain(Colour.RED)
    assert not _names._is_plain((Colour.RED,))
