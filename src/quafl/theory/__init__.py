"""Parameters of the paper's theorems."""

from quafl.theory.parameters import lattice_side, learning_rate

__all__ = ["lattice_side", "learning_rate"]
