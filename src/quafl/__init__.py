"""QuAFL: quantized asynchronous federated learning, simulated and for real."""

from quafl.codec import QSGD, Identity, Lattice
from quafl.core import FedAvg, QuAFL, sgd
from quafl.sim import Result, World, simulate
from quafl.version import __version__

__all__ = ["QSGD", "FedAvg", "Identity", "Lattice", "QuAFL", "Result", "World", "__version__", "sgd", "simulate"]
