"""QuAFL: quantized asynchronous federated learning, simulated and for real.

Names are imported when they are first used: a federation's client has no need of the simulator.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quafl.version import __version__

if TYPE_CHECKING:
    from quafl.codec import QSGD, BFloat16, Codecs, Difference, Identity, Lattice, TopK, compressed
    from quafl.core import (
        CA2FL,
        FAVANO,
        SCAFFOLD,
        Adaptive,
        Calibrated,
        Defence,
        FedAsync,
        FedAvg,
        FedBuff,
        FedNova,
        HeavyBall,
        Plain,
        QuAFL,
        adam,
        cosine,
        linear,
        momentum,
        sgd,
    )
    from quafl.sim import Absence, Change, Plan, Result, Simulation, World, simulate
    from quafl.tasks.local import Local

__all__ = [
    "CA2FL",
    "FAVANO",
    "QSGD",
    "SCAFFOLD",
    "Absence",
    "Adaptive",
    "BFloat16",
    "Calibrated",
    "Change",
    "Codecs",
    "Defence",
    "Difference",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedNova",
    "HeavyBall",
    "Identity",
    "Lattice",
    "Local",
    "Plain",
    "Plan",
    "QuAFL",
    "Result",
    "Simulation",
    "TopK",
    "World",
    "__version__",
    "adam",
    "compressed",
    "cosine",
    "linear",
    "momentum",
    "sgd",
    "simulate",
]
_HOMES = {
    "quafl.codec": ("BFloat16", "Codecs", "Difference", "Identity", "Lattice", "QSGD", "TopK", "compressed"),
    "quafl.core": (
        *("CA2FL", "FAVANO", "SCAFFOLD", "Calibrated", "FedAsync", "FedAvg", "FedBuff", "FedNova", "QuAFL"),
        *("Adaptive", "Defence", "HeavyBall", "Plain"),
        *("adam", "cosine", "linear", "momentum", "sgd"),
    ),
    "quafl.sim": ("Absence", "Change", "Plan", "Result", "Simulation", "World", "simulate"),
    "quafl.tasks.local": ("Local",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'quafl' has no attribute {name!r}")
