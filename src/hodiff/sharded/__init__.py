"""Points whose tensors are sharded over processes: internal, loaded where such a one is met."""
