"""QuAFL: quantized asynchronous federated learning, simulated and for real."""

from quafl.codec import QSGD, Identity, Lattice
from quafl.core import Defence, FedAvg, FedBuff, FedNova, QuAFL, adam, cosine, linear, momentum, sgd
from quafl.sim import Absence, Change, Plan, Result, Simulation, World, simulate
from quafl.tasks.local import Local
from quafl.version import __version__

__all__ = [
    "QSGD",
    "Absence",
    "Change",
    "Defence",
    "FedAvg",
    "FedBuff",
    "FedNova",
    "Identity",
    "Lattice",
    "Local",
    "Plan",
    "QuAFL",
    "Result",
    "Simulation",
    "World",
    "__version__",
    "adam",
    "cosine",
    "linear",
    "momentum",
    "sgd",
    "simulate",
]
