"""Bugs planted by rule in the library, and whether a test sees them: `python -m tests.mutants`."""
