from collections import OrderedDict, defaultdict, namedtuple

import pytest

from hodiff._core import _tree

Pair = namedtuple("Pair", "left right")

CONTAINERS = {
    "leaf": 1,
    "tuple": (1, 2),
    "list": [1, [2, 3]],
    "dict": {"a": 1, "b": {"c": 2}},
    "namedtuple": Pair(1, (2, 3)),
    "ordered": OrderedDict(a=1, b=2),
    "default": defaultdict(list, a=1),
    "empty": (),
}


@pytest.mark.parametrize("value", CONTAINERS.values(), ids=CONTAINERS)
def test_rebuilding_gives_the_same_container(value):
    leaves, names, tree = _tree.flatten(value)
    again = _tree.rebuild(tree, iter(leaves))
    assert again == value
    assert type(again) is type(value)
    assert len(names) == len(leaves)


def test_names_are_what_the_user_would_write():
    _, names, _ = _tree.flatten({"w": [1, Pair(2, 3)]}, "x")
    assert names == ["x['w'][0]", "x['w'][1].left", "x['w'][1].right"]


def test_a_dict_keeps_its_factory():
    leaves, _, tree = _tree.flatten(defaultdict(list, a=1))
    again = _tree.rebuild(tree, iter(leaves))
    assert again["missing"] == []


def test_dicts_match_by_key_and_not_by_position():
    _, _, tree = _tree.flatten({"a": 1, "b": 2})
    _, _, other = _tree.flatten({"b": 20, "a": 10})
    assert _tree.difference(tree, other, "v") is None
    assert _tree.leaves_like(tree, {"b": 20, "a": 10}) == [10, 20]


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ([1, 2], "v is a list of 2, expected a tuple of 2"),
        (1, "v is a single tensor, expected a tuple of 2"),
        ((1, 2, 3), "v has a tuple of 3, expected a tuple of 2"),
        ((1, (2, 3)), "v[1] is a tuple of 2, expected a single tensor"),
    ],
)
def test_the_first_difference_is_named(got, words):
    _, _, expected = _tree.flatten((1, 2))
    _, _, tree = _tree.flatten(got)
    assert _tree.difference(expected, tree, "v") == words


class Output(OrderedDict):
    """Of transformers: it has its items as attributes, and forbids `update`."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *given, **named):
        raise TypeError("You cannot use ``update``.")


def test_a_dict_that_forbids_update():
    value = Output()
    value["state"], value["logits"] = 1, (2, 3)
    built = _tree.tree_map(lambda x: x + 1, value)
    assert type(built) is Output and built.logits is built["logits"]
    assert dict(built) == {"state": 2, "logits": (3, 4)} and value.state == 1
