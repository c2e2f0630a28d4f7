"""Algorithms, both sides, free of input and output. Imports torch alone."""

from quafl.core.ca2fl import CA2FL
from quafl.core.calibrated import Calibrated
from quafl.core.defence import Defence
from quafl.core.descent import Adaptive, HeavyBall, Plain
from quafl.core.favano import FAVANO
from quafl.core.fedasync import FedAsync
from quafl.core.fedavg import FedAvg
from quafl.core.fedbuff import FedBuff
from quafl.core.fednova import FedNova
from quafl.core.optim import adam, adamw, cosine, linear, momentum, sgd
from quafl.core.quafl import QuAFL
from quafl.core.scaffold import SCAFFOLD

__all__ = [
    "CA2FL",
    "FAVANO",
    "SCAFFOLD",
    "Adaptive",
    "Calibrated",
    "Defence",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedNova",
    "HeavyBall",
    "Plain",
    "QuAFL",
    "adam",
    "adamw",
    "cosine",
    "linear",
    "momentum",
    "sgd",
]
