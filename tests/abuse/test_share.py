"""A share of `python -m tests.abuse`, drawn by hypothesis: any name, any argument, any bad value."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.abuse import judge
from tests.abuse.calls import arguments, targets
from tests.abuse.values import LAYOUTS, VALUES

TARGETS = targets()


@pytest.mark.parametrize("name", ["grad", "hvp", "jacobian", "laplacian", "gradient_penalty", "solve"])
def test_the_main_names(name: str) -> None:
    """Whole, but for layouts: the point and the vector."""
    target = TARGETS[name]
    for argument in [a for a in arguments(target) if a in ("x", "v", "b")]:
        for value in VALUES:
            verdict = judge.bad_value(target, argument, value)
            assert verdict in judge.GOOD, f"{name}({argument}={value}): {verdict}"


@settings(max_examples=100)
@given(st.sampled_from(["grad", "hvp", "jvp", "vjp", "hessian", "jacobian"]), st.data())
def test_other_layouts(name: str, data: st.DataObject) -> None:
    target = TARGETS[name]
    argument = data.draw(st.sampled_from([a for a in arguments(target) if a in ("x", "v", "u")]))
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
    verdict = judge.other_layout(target, argument, layout)
    assert verdict is None or verdict in judge.GOOD, f"{name}({argument}={layout}): {verdict}"
