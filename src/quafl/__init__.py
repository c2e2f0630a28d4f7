"""QuAFL: quantized asynchronous federated learning, simulated and for real.

Names are imported when they are first used: a federation's client has no need of the simulator.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quafl.version import __version__

if TYPE_CHECKING:
    from quafl.codec import QSGD, Identity, Lattice
    from quafl.core import (
        SCAFFOLD,
        Defence,
        FedAsync,
        FedAvg,
        FedBuff,
        FedNova,
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
    "QSGD",
    "SCAFFOLD",
    "Absence",
    "Change",
    "Defence",
    "FedAsync",
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
_HOMES = {
    "quafl.codec": ("QSGD", "Identity", "Lattice"),
    "quafl.core": (
        *("SCAFFOLD", "Defence", "FedAsync", "FedAvg", "FedBuff", "FedNova", "QuAFL"),
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
