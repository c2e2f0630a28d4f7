"""The simulated world: virtual time, clients that are slow or lost, and their states side by side."""

from quafl.sim.simulation import Result, World, simulate, trajectory

__all__ = ["Result", "World", "simulate", "trajectory"]
