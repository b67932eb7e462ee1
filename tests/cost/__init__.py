"""What a call costs: evaluations of f, reverse passes, operations."""
