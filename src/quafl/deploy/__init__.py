"""The real world: the same algorithms over a network."""
