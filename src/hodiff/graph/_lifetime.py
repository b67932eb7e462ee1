"""The lifetime of saved tensors: which line saved them, which pass freed them;
freeing them by hand.
"""

from __future__ import annotations

import html
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from hodiff._core import _nodes
from hodiff._core._nodes import Node
from hodiff.graph import _inspect, _saved
from hodiff.graph._growth import Growth
from hodiff.graph._record import Listener, Pass, Record
from hodiff.graph._source import Line, quoted
from hodiff.graph._watch import Watch

ROWS = 40
MADE = sys.maxsize  # after the passes at the same place, which is that of the next node to be made
TITLE = "<title>What was saved, by which line, and which backward pass freed it</title>"
"""By which a file is known for a picture of ours."""
WIDTH = 440
MARGIN = 8
TOP = 52
HEIGHT = 32
LETTERS = 58
"""Of the picture: a row's text stands above its bars, so that it can be narrow."""
ALONE = 366
"""Its width as an image of its own, which notebooks make of it: that of a phone,
as it then cannot shrink.
"""
COLORS = {"freed": "#3a7", "held": "#e90"}


def _legend() -> list[str]:
    """The meaning of the colors."""
    parts = []
    for x, (state, text) in zip(
        (MARGIN, 150), {"freed": "freed by a pass", "held": "kept by it"}.items(), strict=True
    ):
        parts.append(f'<rect x="{x}" y="6" width="10" height="8" fill="{COLORS[state]}"/>')
        parts.append(f'<text x="{x + 14}" y="14">{text}</text>')
    parts.append('<path d="M 256 5 l 10 10 m 0 -10 l -10 10" stroke="#d33" stroke-width="2"/>')
    return [*parts, '<text x="272" y="14">needed, but gone</text>']


_UNKNOWN = Line("(not recorded)", 0)


class Span(NamedTuple):
    """The values that one line saved, from when they were made until a pass freed them.

    Attributes:
        line: The user's line.
        start: The place in the order of creation at which the first of the nodes was made.
        stop: The number of the pass.
        state: `freed`, `held` (the pass retained it) or `missing` (needed, and freed before).
        nodes: How many nodes.
        bytes: The bytes that they had saved, as far as it could be seen.
    """

    line: Line
    start: int
    stop: int
    state: str
    nodes: int
    bytes: int


class _Spans(Listener):
    """Listens to the passes under a watch: what each line saved, until which of them."""

    def __init__(self) -> None:
        self.all_spans: list[Span] = []
        self._sizes: dict[Node, int] = {}

    def before(self, call: Pass, nodes: Sequence[Node]) -> None:
        """Note the nodes' values now, before the pass frees them."""
        states = {node: {slot.state for slot in _saved.slots(node)} for node in nodes}
        gone = {_saved.FREED, _saved.RELEASED}
        self._sizes = {
            node: -1 if had & gone else _inspect.saved_bytes([node])
            for node, had in states.items()
            if had
        }

    def after(self, record: Record, call: Pass, failed: bool) -> None:
        """Note the values that the pass freed or kept; where it failed,
        those freed on its way and those missing.
        """
        sizes, self._sizes = self._sizes, {}  # nodes are not kept beyond the pass
        if not failed:
            self._collect(record, call, "held" if call.retained else "freed", sizes)
            return
        ran = {
            node: size
            for node, size in sizes.items()
            if size >= 0 and _inspect.trouble(node) == "freed"
        }
        self._collect(record, call, "freed", ran)
        self._collect(
            record, call, "missing", {node: 0 for node, size in sizes.items() if size < 0}
        )

    def _collect(self, record: Record, call: Pass, state: str, sizes: dict[Node, int]) -> None:
        rows: dict[Line, list[Node]] = {}
        for node in sizes:
            rows.setdefault(record.made(node) or _UNKNOWN, []).append(node)
        for line, nodes in rows.items():
            start = min(call.place, *map(_saved.sequence, nodes))
            size = sum(max(sizes[node], 0) for node in nodes)
            self.all_spans.append(Span(line, start, call.number, state, len(nodes), size))


class Lifetime(Watch):
    """A watch that also draws; `str()` is a table, `.svg()` a picture, `.save(path)` writes it.

    Attributes:
        spans: What each line saved, until which pass.
        passes: The backward passes seen.

    Examples:
        >>> import torch, hodiff
        >>> x = torch.ones(2, requires_grad=True)
        >>> with hodiff.graph.lifetime() as picture:
        ...     x.square().sum().backward()
        >>> [(span.state, span.nodes) for span in picture.spans]
        [('freed', 1)]
    """

    def __init__(self, *, also: Growth | None = None) -> None:
        recorder = _Spans()
        super().__init__(recorder, *([also] if also else []))
        self.spans = recorder.all_spans

    def _rows(self) -> list[Line]:
        return list(
            dict.fromkeys(span.line for span in sorted(self.spans, key=lambda span: span.start))
        )[:ROWS]

    def __str__(self) -> str:
        lines = [f"{len(self.passes)} backward passes"]
        lines += [
            f"  pass {call.number}: {call}{'   retained' if call.retained else ''}"
            for call in self.passes[:ROWS]
        ]
        for line in self._rows():
            lines.append(f"{quoted(line)}")
            for span in [span for span in self.spans if span.line == line][:ROWS]:
                verb = {"freed": "freed by", "held": "kept by", "missing": "MISSING in"}[span.state]
                size = f", {span.bytes:,} B" if span.state != "missing" else ""
                lines.append(f"    {span.nodes} nodes{size}: {verb} pass {span.stop}")
        return "\n".join(lines)

    def svg(self) -> str:
        """The picture: a row for each line that saved something, a vertical line for each pass.

        Green: freed by the pass. Amber: kept by it. A red cross: needed by the pass, and freed
        before. The text has the color of the page around it (as an image of its own a gray that is
        seen on light and dark), and can be read on a phone.
        """
        rows = self._rows()
        at = self._axis()
        bottom = TOP + HEIGHT * len(rows)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 8}" '
            f'width="{ALONE}" style="width:100%;max-width:{WIDTH * 4 // 3}px;height:auto" '
            'fill="currentColor" font-family="monospace" font-size="12">',
            TITLE,
            "<style>svg:root{color:#777}</style>",  # an image of its own has no page around it
            *_legend(),
        ]
        if not self.passes:
            parts.append(f'<text x="{MARGIN}" y="{TOP}">no backward pass was seen</text>')
        shown = self.passes[-200:]
        for call in shown:
            x = at[call.place, call.number]
            parts.append(
                f'<line x1="{x:.1f}" y1="{TOP - 10}" x2="{x:.1f}" y2="{bottom}" stroke="#888" '
                'stroke-opacity="0.5" '
                f'stroke-dasharray="3">'
                f"<title>{html.escape(str(call))}</title></line>"
            )
            if len(shown) <= 20:
                parts.append(
                    f'<text x="{x:.1f}" y="{TOP - 14}" text-anchor="middle">{call.number}</text>'
                )
        for index, line in enumerate(rows):
            y = TOP + HEIGHT * index
            text = html.escape(f"{line} {line.text}"[:LETTERS])
            parts.append(f'<text x="{MARGIN}" y="{y + 13}">{text}</text>')
            parts += self._bars(line, at, y + 18)
        return "\n".join([*parts, "</svg>"])

    def _axis(self) -> dict[tuple[int, int], float]:
        """The place of each event in the drawing, in their order and equally far apart:
        `(place, pass)`, or `(place, MADE)`.

        To the scale of the places a picture would begin with whatever the program did before, and
        passes that follow each other with nothing made between them would be one.
        """
        events = {(span.start, MADE) for span in self.spans} | {
            (call.place, call.number) for call in self.passes
        }
        step = (WIDTH - 2 * MARGIN) / (len(events) + 1)
        return {event: MARGIN + step * number for number, event in enumerate(sorted(events), 1)}

    def _bars(self, line: Line, at: Mapping[tuple[int, int], float], y: int) -> Iterator[str]:
        """The bars of one line's values: each begins where the last pass that
        kept the same left it.
        """
        kept: dict[int, tuple[int, int]] = {}
        for span in [span for span in self.spans if span.line == line]:
            stop = self.passes[span.stop].place, span.stop
            x = at[stop]
            if span.state == "missing":
                yield (
                    f'<path d="M {x - 5:.1f} {y - 1} l 10 10 m 0 -10 l -10 10" stroke="#d33" '
                    'stroke-width="2">'
                    f"<title>pass {span.stop} needs {span.nodes} nodes that were "
                    "freed</title></path>"
                )
                continue
            start = at[kept.get(span.start, (span.start, MADE))]
            if span.state == "held":
                kept[span.start] = stop
            yield (
                f'<rect x="{start:.1f}" y="{y}" width="{max(x - start, 1):.1f}" height="8" '
                f'fill="{COLORS[span.state]}"><title>{span.nodes} nodes, '
                f"{span.bytes:,} B</title></rect>"
            )

    def _repr_svg_(self) -> str:
        return self.svg()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg())


def lifetime() -> Lifetime:
    """A `watch` that also records what each pass frees, keeps or misses, and draws it as SVG.

    A row is a line of the user's that saved tensors, a vertical line a backward pass. A bar reaches
    from the making of what was saved to the pass that freed it (green) or kept it (amber); a red
    cross marks what a pass needed and found freed.

    Returns:
        A context manager; entered, it gives the recorder. `str(it)` is a table, `it.svg()` the
        picture (a notebook shows it by itself), `it.save(path)` writes it, `it.spans` holds the
        records.

    Cost:
        That of `watch`, and some 10 µs per node in each pass. No memory of tensors, whatever their
        shape.

    Examples:
        >>> import torch, hodiff
        >>> x = torch.ones(2, requires_grad=True)
        >>> with hodiff.graph.lifetime() as picture:
        ...     y = x.exp()
        ...     y.sum().backward(retain_graph=True)
        ...     y.sum().backward()
        >>> [span.state for span in picture.spans]
        ['held', 'freed']
        >>> picture.svg().startswith("<svg")
        True
    """
    return Lifetime()


# --- giving back what chosen nodes saved, without running them ------------------------------------


class Released(NamedTuple):
    """The number of nodes released, and the bytes of their saved values that could be seen.

    A storage that something else holds as well is not returned by it.
    """

    nodes: int
    bytes: int


def release(loss: Tensor | Sequence[Tensor], keep: Tensor | Sequence[Tensor] = ()) -> Released:
    """Drop what the nodes of a graph saved, after the forward and without a backward pass.

    Released are the nodes that `loss` reaches and nothing in `keep` does. A pass that needs one of
    them raises `GraphError`, in our words. Tensors, `.grad` and the nodes themselves stay.

    Args:
        loss: A tensor of any shape, or several.
        keep: Tensors whose graphs must stay usable.

    Returns:
        How many nodes had something released, and its bytes.

    Raises:
        InputError: Something that is not a tensor.

    Cost:
        No pass; some 10 µs per node. What is packed (checkpoints, `save_on_cpu`) or cannot be seen
        stays as it is: it has hooks of its own.

    Examples:
        >>> import torch, hodiff
        >>> x = torch.rand(1000, requires_grad=True)
        >>> trunk = x.exp()
        >>> first, second = trunk.sin().sum(), trunk.cos().sum()
        >>> hodiff.graph.release(first, keep=second)
        Released(nodes=1, bytes=4000)
        >>> hodiff.graph.predict(first).verdict, hodiff.graph.predict(second).verdict
        ('fail', 'ok')
    """
    given = _inspect.tensors(loss, "loss")
    kept = [] if isinstance(keep, (tuple, list)) and not keep else _inspect.tensors(keep, "keep")
    with _saved.without_modes():
        stay = set(_nodes.walk([_nodes.node_of(tensor) for tensor in kept]))
        return drop(
            node
            for node in _nodes.walk([_nodes.node_of(tensor) for tensor in given])
            if node not in stay
        )


def drop(nodes: Iterable[Node]) -> Released:
    """Free what these nodes saved."""
    count, sizes = 0, {}
    for node in nodes:
        mine = dict(
            _saved.storage(slot.value) for slot in _saved.slots(node) if slot.value is not None
        )
        if _saved.release(node):
            count += 1
            sizes.update(mine)
    return Released(count, sum(sizes.values()))
