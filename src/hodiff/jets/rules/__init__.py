"""Rules of Taylor mode by kind; to import them is to register them."""

from hodiff.jets.rules import bilinear, composite, elementwise, fallback, linear, special

__all__ = ["bilinear", "composite", "elementwise", "fallback", "linear", "special"]
