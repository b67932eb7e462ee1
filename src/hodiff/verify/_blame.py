"""Why a derivative and its differences disagree: cuts, hooks, kinks, Functions and operations, each tried alone."""

from __future__ import annotations

from collections.abc import Sequence

from hodiff._core._faults import interrupts
from hodiff._core._options import Allowed
from hodiff.graph import _cut
from hodiff.graph._line import Line
from hodiff.verify import _isolated
from hodiff.verify._compare import Point, Scalar, derived, difference, epsilon, first_step
from hodiff.verify._differences import Slope
from hodiff.verify._evaluation import Evaluation
from hodiff.verify._kinks import kinks
from hodiff.verify._report import Cause, Check, cause
from hodiff.verify._trace import Place, Site

LAST = 2**-6
"""The last step of the differences, of the first."""


def causes(evaluation: Evaluation, path: Sequence[Point], failed: Check, allow: Allowed) -> list[Cause]:
    """The places that explain a disagreement, or why it cannot be told, at the lowest order that has one."""
    near = kinks(evaluation, path[failed.order - 1], LAST * first_step(epsilon(evaluation.point)))
    if failed.verdict == "inconclusive":
        return near
    function = derived(evaluation.scalar, path[: failed.order - 1], allow)
    found, explained = _cuts(evaluation, function, path, failed)
    if explained:
        return found
    found += _hooks(evaluation, function, path, failed, allow)
    found += near
    found += _isolated.functions(evaluation, failed.order, allow)
    if not found:
        found += _isolated.operations(evaluation, failed.order)
    return found or _inside_transforms(evaluation)


# --- cuts


def _cuts(evaluation: Evaluation, function: Scalar, path: Sequence[Point], failed: Check) -> tuple[list[Cause], bool]:
    """The cuts whose values matter, and whether all of them together explain the disagreement."""
    allowed = {site.key for site in evaluation.allowed}
    sites = [site for site in evaluation.recorded().sites if site.key not in allowed]
    groups: dict[tuple[Place, str], list[Site]] = {}
    for site in sites:
        groups.setdefault((site.place._replace(frames=site.place.frames[:1]), site.kind), []).append(site)
    whole = _held(evaluation, function, path, failed, sites) if sites else None
    found = []
    for group in groups.values():
        numeric = whole if len(groups) == 1 else _held(evaluation, function, path, failed, group)
        if numeric is not None and not _agree(evaluation.point, failed.differences, numeric, failed):
            found.append(_of_cut(group[0], failed.differences - numeric.value, failed))
    explained = whole is not None and _agree(evaluation.point, failed.computed, whole, failed)
    return found, explained and bool(found)


def _held(
    evaluation: Evaluation, function: Scalar, path: Sequence[Point], failed: Check, sites: Sequence[Site]
) -> Slope | None:
    """The differences with the values of these cuts held; None where they cannot be."""
    with evaluation.holding({site.key: site.value for site in sites}):
        try:
            return difference(function, evaluation.point, path[failed.order - 1])
        except Exception as error:  # f goes another way then, or the value has another shape
            if interrupts(error):
                raise
            return None


def _agree(point: Point, expected: float, numeric: Slope, failed: Check) -> bool:
    tolerance = 10 * numeric.error + epsilon(point) ** 0.4 * max(abs(failed.computed), abs(failed.differences))
    return abs(expected - numeric.value) <= tolerance + 100 * epsilon(point)


def _inside_transforms(evaluation: Evaluation) -> list[Cause]:
    """The cuts whose values cannot be held."""
    fix = "leave it out, if this value is to be trained through; or check the function that is transformed by itself."
    return [
        cause("cut", line, f"{_written(name)} inside a torch.func transform may be it: its value cannot be held", fix)
        for line, name in dict.fromkeys((place.line, name) for name, place in evaluation.recorded().unheld)
    ]


_CALLS = {"__get__": ".data", "__set__": ".data", "__setitem__": "[...] ="} | {
    f"__{name}__": name for name in ("float", "int", "index", "array", "complex")
}
"""How a call is written, where its name is another."""


def _written(call: str) -> str:
    word = _CALLS.get(call, call)
    return word if word.startswith((".", "[")) else f"{word}()"


def _of_cut(site: Site, part: float, failed: Check) -> Cause:
    line = site.place.line
    inside = f" in {site.place.inside}" if site.place.inside else ""
    word = _written(site.call)
    how = {
        "no_grad": f"{word}{inside} runs while gradients are switched off (no_grad or inference_mode)",
        "gradient": f"the gradient{inside} is taken without create_graph=True",
        "smooth": f"PyTorch declares no derivative of {word.rstrip('()')}, smooth as it is",
    }.get(site.kind, f"{word}{inside} gives a value without its graph")
    reason = f"{how}: it counts as a constant, and {part:+.6e} of the derivative of order {failed.order} is missing"
    named = site.place.inside.partition(" ")[0] or str(line)
    fix = _cut.fix_of(site.kind, None, word.rstrip("()")).replace("\n", " ").rstrip(".")
    meant = f'if it is meant as a constant, allow="{named}" checks the rest.'
    fix = f"{fix or 'write it with operations that are recorded'}; {meant}"
    return cause("cut", line, reason, fix)


# --- hooks


def _hooks(
    evaluation: Evaluation, function: Scalar, path: Sequence[Point], failed: Check, allow: Allowed
) -> list[Cause]:
    """Hooks without which the derivative is what the differences say."""
    places = evaluation.recorded().hooks
    fix = "remove it for this check, or write what it does into f."
    if places:
        with evaluation.without_hooks():
            without = _isolated.along(function, evaluation.point, path[failed.order - 1], allow)
        if abs(without - failed.differences) <= max(failed.tolerance, 1e-6 * abs(failed.differences)):
            reason = f"a hook on a tensor changes the gradient; without it, it is {without:+.6e}"
            return [cause("hook", place.line, reason, fix) for place in dict.fromkeys(places)]
    hooked = [module for module in evaluation.lending.borrowed if module._backward_hooks]
    return [
        cause("hook", Line("", 0), f"a backward hook of a {type(module).__name__} may change the gradient", fix)
        for module in hooked[:3]
    ]
