"""Gradient penalties and other regularizers made of derivatives,
each differentiable by what is trained.
"""
