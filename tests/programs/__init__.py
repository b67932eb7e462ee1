"""Programs whose backward pass fails, and what is said of them."""

OF_AUTOGRAD = r"(?i)backward|differentiate|derivative|\bgrad\b|inplace|in-place|inference|deepcopy|checkpoint"
"""PyTorch's own words for what these programs meet."""
