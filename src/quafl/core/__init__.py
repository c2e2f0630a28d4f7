"""Algorithms, both sides, free of I/O. Imports torch alone."""

from quafl.core.defence import Defence
from quafl.core.fedavg import FedAvg
from quafl.core.fedbuff import FedBuff
from quafl.core.fednova import FedNova
from quafl.core.optim import adam, cosine, linear, momentum, sgd
from quafl.core.quafl import QuAFL

__all__ = ["Defence", "FedAvg", "FedBuff", "FedNova", "QuAFL", "adam", "cosine", "linear", "momentum", "sgd"]
