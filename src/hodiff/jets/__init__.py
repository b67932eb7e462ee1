"""Taylor mode: truncated power series through a function, by rules for its operations.

`hodiff.laplacian` and the like stand on it; `report` tells which operations of a function have a
rule.
"""

from hodiff._core import _compiled_callers
from hodiff.jets import _dispatch as _dispatch
from hodiff.jets import rules as rules
from hodiff.jets._pushforward import Report, report

__all__ = ["Report", "report"]

_compiled_callers.publish(vars())
