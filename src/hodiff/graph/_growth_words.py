"""What is said of a graph that grows."""

from __future__ import annotations

from dataclasses import dataclass

from hodiff.graph._case import Pass, indented
from hodiff.graph._holders import Holder
from hodiff.graph._line import quoted

TITLE = "hodiff: graphs that grow from iteration to iteration"


@dataclass(frozen=True)
class Grown:
    """A graph that grows; it prints as a few lines.

    Attributes:
        kind: `spent`, `kept`, `gradient`, `cycle`, `again` or `unused`: a key of `KINDS`.
        holder: What holds it, and how much of it.
        call: The pass concerned; None if there was none.
    """

    kind: str
    holder: Holder
    call: Pass | None = None

    def __str__(self) -> str:
        kind, holder = KINDS[self.kind], self.holder
        facts = {"variable": holder.variable, "count": holder.iterations, "bytes": f"{holder.bytes:,}"}
        lines = ["  " + kind.what.format(**facts)]
        if holder.line is not None:
            lines.append(f"    grows at     {quoted(holder.line)}")
        if self.call is not None and self.call.path:
            line = self.call.stack[0]
            lines.append(f"    pass         {quoted(line)}")
        lines.append(f"    => {kind.reason.format(**facts)}")
        lines += [line for fix in kind.fixes[:1] for line in indented("    fix: ", fix.format(**facts))]
        lines += [line for text in kind.unknown for line in indented("    not known: ", text.format(**facts))]
        return "\n".join(lines)


@dataclass(frozen=True)
class Kind:
    """The sentences of one kind of growth; a fix only where nothing that is computed can change by it."""

    what: str
    reason: str
    fixes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


_LOSES = (
    "whether gradients are to reach back through all iterations. If not, `{variable} = {variable}.detach()` at the\n"
    "start of each cuts there, and `retain_graph=True` is no longer needed."
)

KINDS = {
    "spent": Kind(
        "`{variable}` holds the graphs of {count} iterations, whose passes have run",
        "the passes freed what another pass would need; what is left is of no use, and more in each iteration.",
        ("put the value alone into `{variable}`: `.detach()`, or `.item()` for a number.",),
    ),
    "kept": Kind(
        "`{variable}` holds the graphs of {count} iterations, and {bytes} B that they saved",
        "the passes were told to keep them.",
        unknown=(
            "whether another pass is to go through them. If not, leave `retain_graph` and `create_graph` out,\n"
            "and put the value alone into `{variable}`: `.detach()`, or `.item()` for a number.",
        ),
    ),
    "gradient": Kind(
        "`{variable}` holds the graphs of {count} iterations, and {bytes} B that they saved",
        "backward(create_graph=True) adds a gradient with its graph to `.grad`, which was never reset.",
        unknown=(
            "whether the gradients of all iterations are to be added up. If not, set `.grad = None` before each\n"
            "pass; hodiff.grad and torch.autograd.grad return a gradient, and leave `.grad` alone.",
        ),
    ),
    "cycle": Kind(
        "{count} tensors and more hold their own graphs in `.grad`, and will until the program ends",
        "backward(create_graph=True) leaves in `.grad` a gradient whose graph leads back to the tensor: a cycle\n"
        "       that no garbage collector sees.",
        ("take the gradient by hodiff.grad or torch.autograd.grad(..., create_graph=True), which write no `.grad`.",),
    ),
    "again": Kind(
        "each pass runs the graphs of all iterations before it again: {count} nodes in the largest",
        "`{variable}` hands the graph of one iteration to the next, and `retain_graph=True` keeps them all.",
        unknown=(_LOSES,),
    ),
    "unused": Kind(
        "`{variable}` holds the graphs of {count} iterations and more, and {bytes} B that they saved",
        "no backward pass has gone through them.",
        unknown=(
            "whether one was meant to. If not, compute them under torch.no_grad(), or put the value alone into\n"
            "`{variable}`: `.detach()`, or `.item()` for a number.",
        ),
    ),
}


def report(grown: list[Grown]) -> str:
    """All of them, under one title; empty if there are none."""
    return "\n\n".join([TITLE, *map(str, grown)]) + "\n" if grown else ""
