"""What the pages' pictures share: `svg(figure)` is a figure in the colors of the page, light or dark.

Pages import it in fences that are run and not shown, so that a reader sees the mathematics and the picture.
"""

import io
import re

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

INK = "#010203"  # no color that anybody draws with: it becomes the page's own
_STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be selected, and takes the page's font
    "svg.hashsalt": "hodiff",  # the same picture is the same file
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick")},
    **{f"axes.{part}color": INK for part in ("edge", "label")},
}
matplotlib.rcParams.update(_STYLE)


def subplots(*args: object, **kwargs: object) -> tuple:
    """As `plt.subplots`, without margins to care for."""
    return plt.subplots(*args, **{"layout": "constrained", **kwargs})


def svg(figure: Figure, *, says: str) -> str:
    """The figure as a scalable element of a page; `says` is read to those who cannot see it."""
    file = io.StringIO()
    figure.savefig(
        file,
        format="svg",
        bbox_inches="tight",
        transparent=True,
        metadata={"Date": None},
    )
    plt.close(figure)
    picture = file.getvalue()
    picture = picture[picture.index("<svg") :].replace(INK, "currentColor")
    size = re.search(r' width="([\d.]+)pt" height="[\d.]+pt"', picture)
    if size is None:
        raise ValueError("matplotlib wrote an SVG without a size in points")
    width = float(size[1]) / 0.75
    style = f"--least: {min(width, 560):.0f}px; width: 100%; max-width: {width:.0f}px; height: auto"
    picture = picture.replace(
        size[0], f' style="{style}" role="img" aria-label="{says}"', 1
    )
    return f'<div class="picture">{picture}</div>'
