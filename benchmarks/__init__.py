"""Ratios against peers, measured in one process: `python -m benchmarks`."""
