"""Gradient penalties and other regularisers made of derivatives, each differentiable by what is trained."""
