"""A keyword that several public functions share is the same word everywhere: annotation, default, order."""

import inspect
from collections import defaultdict
from typing import get_args, get_type_hints

import pytest

import hodiff

pytestmark = pytest.mark.names


def spelled(name):
    """The keyword-only parameters of a public function or class, with their evaluated annotations."""
    value = getattr(hodiff, name)
    function = value.__init__ if inspect.isclass(value) else value
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, hints.get(p.name), p.default) for p in parameters if p.kind is p.KEYWORD_ONLY]


def has_signature(name):
    value = getattr(hodiff, name)
    return inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, BaseException))


KEYWORDS = {name: spelled(name) for name in hodiff.__all__ if has_signature(name)}
WORDS = [[word for word, *_ in keywords] for keywords in KEYWORDS.values()]
SHARED = defaultdict(dict)
for function, keywords in KEYWORDS.items():
    for word, annotation, default in keywords:
        SHARED[word][function] = (annotation, default)

# Where one word may have several defaults, or several vocabularies, and why.
DEFAULTS = {
    "batch_ndim": "0 for the calculus, whose f is one scalar; 1 for penalties and fields, which are made of samples",
    "damping": "0 for what is solved as it is; above 0 for least squares, whose rule moves it",
    "method": "each family has routes of its own, and its own best one",
    "progress": "an estimator shows a bar where a terminal waits; one over batches would stand inside it",
    "reduction": "the Hessian penalty was published with the largest value",
    "samples": "a variance takes two; a trace or Laplacian is exact unless asked; labels are drawn once",
    "target": "the norm that each penalty was published with",
    "weight": "the factor that each penalty was published with",
}
ANNOTATIONS = {
    "damping": "a solution is also differentiated by it",
    "method": "each family has routes of its own",
    "progress": "None of an estimator is where a terminal waits",
    "reduction": "of samples: mean, sum, none; of outputs also max",
    "samples": "None is exact, where there is an exact one",
    "target": "a tensor per sample in the core; the published recipes have one number",
    "weight": "a Laplacian has one factor for each coordinate",
    "probes": "a Laplacian may also be sampled along coordinates",
}
# Pairs whose order differs, and where.
ORDER = {
    ("chunk_size", "strict"): "operators",
    ("allow", "chunk_size"): "operators",
    ("allow", "generator"): "operators",
    ("chunk_size", "generator"): "operators",
}


@pytest.mark.parametrize("word", [word for word, users in SHARED.items() if len(users) > 1])
def test_a_shared_keyword_means_one_thing(word):
    annotations, defaults = zip(*SHARED[word].values(), strict=True)
    if word not in ANNOTATIONS:
        assert len({repr(a) for a in annotations}) == 1, SHARED[word]
    if word not in DEFAULTS:
        assert len({repr(d) for d in defaults}) == 1, SHARED[word]


def test_shared_keywords_stand_in_one_order():
    before = defaultdict(set)
    for name, keywords in KEYWORDS.items():
        words = [word for word, *_ in keywords]
        for index, first in enumerate(words):
            for second in words[index + 1 :]:
                before[first, second].add(name)
    both = {tuple(sorted(pair)): users for pair, users in before.items() if pair[::-1] in before}
    assert not {pair: (before[pair], before[pair[::-1]]) for pair in both if pair not in ORDER}


def test_options_are_literals():
    """A vocabulary of words is one that the type checker knows, and the default is one of them."""
    loose = {
        name
        for name, keywords in KEYWORDS.items()
        for word, annotation, default in keywords
        if isinstance(default, str) and default not in words_of(annotation)
    }
    assert not loose


def words_of(annotation):
    """The strings among the arguments of a `Literal`, in a union or alone."""
    found = set()
    for part in get_args(annotation):
        found |= {part} if isinstance(part, str) else words_of(part)
    return found


def test_no_explanation_is_left_over():
    """What is explained, exists."""
    for table, index in ((ANNOTATIONS, 0), (DEFAULTS, 1)):
        for word in table:
            assert len({repr(pair[index]) for pair in SHARED[word].values()}) > 1, f"{word} is the same everywhere"
    for first, second in ORDER:
        orders = {words.index(first) < words.index(second) for words in WORDS if {first, second} <= set(words)}
        assert len(orders) == 2, f"{first} and {second} stand in one order"
