"""Properties that hold for every function: linearity, symmetry, agreement of routes."""
