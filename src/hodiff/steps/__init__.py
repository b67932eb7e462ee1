"""A training step, loss and gradient in one graph; see `compile_step`."""
