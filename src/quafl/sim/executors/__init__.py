"""How the local steps of the contacted clients are computed: one after another, or together in lanes.

A new way for lanes is an engine, one file like `groups`, and a line in `choice`.
"""

from quafl.sim.executors.choice import Choice, Executor, ExecutorName
from quafl.sim.executors.sequential import Sequential

__all__ = ["Choice", "Executor", "ExecutorName", "Sequential"]
