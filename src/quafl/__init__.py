"""QuAFL: quantized asynchronous federated learning, simulated and for real."""

from quafl.codec import Identity, Lattice
from quafl.core import FedAvg, QuAFL, sgd
from quafl.sim import World, simulate
from quafl.version import __version__

__all__ = ["FedAvg", "Identity", "Lattice", "QuAFL", "World", "__version__", "sgd", "simulate"]
