"""Rules of Taylor mode, one file for each kind. Importing this registers them."""

from hodiff.jets.rules import bilinear, composite, elementwise, fallback, linear, special

__all__ = ["bilinear", "composite", "elementwise", "fallback", "linear", "special"]
