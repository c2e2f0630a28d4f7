"""How the local steps of the contacted clients are computed: one after another, or together in lanes.

A new way for lanes is a function that advances them, one file like `groups`, and a line in `choice`.
"""

from quafl.sim.executors.changing import Changing, Executor
from quafl.sim.executors.choice import Choice, ExecutorName
from quafl.sim.executors.sequential import Sequential

__all__ = ["Changing", "Choice", "Executor", "ExecutorName", "Sequential"]
