"""Derivatives through solutions: of a minimum, a root, a fixed point that any solver found."""
