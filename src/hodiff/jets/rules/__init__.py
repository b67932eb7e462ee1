"""Rules of Taylor mode by kind: elementwise, bilinear, linear, composite, fallback, special. Importing registers them.

Some kinds have several files: functions made of pieces are elementwise; shapes, what is batched and Fourier transforms
are linear.
"""

from hodiff.jets.rules import (
    batched,
    bilinear,
    composite,
    elementwise,
    fallback,
    linear,
    piecewise,
    shape,
    special,
    spectral,
)

__all__ = [
    "batched",
    "bilinear",
    "composite",
    "elementwise",
    "fallback",
    "linear",
    "piecewise",
    "shape",
    "special",
    "spectral",
]
