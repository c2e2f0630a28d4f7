"""Algorithms, both sides, free of I/O. Imports torch alone."""

from quafl.core.fedavg import FedAvg
from quafl.core.optim import sgd
from quafl.core.quafl import QuAFL

__all__ = ["FedAvg", "QuAFL", "sgd"]
