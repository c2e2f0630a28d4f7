"""The paper's theorems, to be computed and to be checked. docs/theory.md explains each quantity."""

from quafl.theory.bounds import (
    Bound,
    Condition,
    Term,
    conditions,
    full_theorem,
    full_theorem_as_printed,
    holds_from,
    main_theorem,
    potential_bound,
    rounds_for,
    server_condition,
    server_corollary,
)
from quafl.theory.parameters import Problem, damping, lattice_side, learning_rate
from quafl.theory.polling import Polling, polling

__all__ = [
    "Bound",
    "Condition",
    "Polling",
    "Problem",
    "Term",
    "conditions",
    "damping",
    "full_theorem",
    "full_theorem_as_printed",
    "holds_from",
    "lattice_side",
    "learning_rate",
    "main_theorem",
    "polling",
    "potential_bound",
    "rounds_for",
    "server_condition",
    "server_corollary",
]
