"""The simulated world: virtual time, clients that are slow, away or lost, and their states side by side."""

from quafl.record.evaluations import Diverged
from quafl.sim.simulation import Plan, Simulation
from quafl.sim.world import Absence, Change, World

__all__ = ["Absence", "Change", "Diverged", "Plan", "Simulation", "World"]
