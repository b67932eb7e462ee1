"""Derivatives of functions: the calculus, from gradients to Hessians and beyond."""
