"""Pictures of what takes several records; a single one draws itself: `record.plot()`.

Needs matplotlib (`pip install 'hodiff[plot]'`). Colours are those of the style in force, so that a picture is
light or dark as the page around it (`matplotlib.style.use("dark_background")`).
"""

from hodiff.plotting._convergence import convergence

__all__ = ["convergence"]
