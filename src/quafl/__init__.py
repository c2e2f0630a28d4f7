"""QuAFL: quantized asynchronous federated learning, simulated and for real.

Names are imported when they are first used: a federation's client has no need of the simulator.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quafl.version import __version__

if TYPE_CHECKING:
    from quafl.codec import QSGD, BFloat16, Codecs, Difference, Identity, Lattice, TopK, compressed
    from quafl.codec.seams import Codec
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
        adamw,
        cosine,
        linear,
        momentum,
        sgd,
    )
    from quafl.core.descent import Descent
    from quafl.core.optim import Schedule
    from quafl.core.seams import Algorithm, Optimizer, Task
    from quafl.record.attendance import Attendance, Event
    from quafl.record.evaluations import Diverged
    from quafl.record.rows import Row
    from quafl.record.summary import Curve, RecordError, RunError
    from quafl.run.front import compare, simulate, tune
    from quafl.run.results import Comparison, Models, Result, Tuning
    from quafl.run.taking_part import Brought, Served, join, serve
    from quafl.settings.base import SettingsError
    from quafl.sim import Absence, Change, Plan, Simulation, World
    from quafl.sim.crew import Contacts
    from quafl.sim.executors import ExecutorName
    from quafl.tasks.hands import Data, OnDemand
    from quafl.tasks.judging import Measure
    from quafl.tasks.local import Local
    from quafl.tasks.precision import Precision
    from quafl.tasks.reading import Collate
    from quafl.tasks.supervised import Augment

_HOMES = {
    "quafl.codec": ("BFloat16", "Codecs", "Difference", "Identity", "Lattice", "QSGD", "TopK", "compressed"),
    "quafl.codec.seams": ("Codec",),
    "quafl.core": (
        *("CA2FL", "FAVANO", "SCAFFOLD", "Calibrated", "FedAsync", "FedAvg", "FedBuff", "FedNova", "QuAFL"),
        *("Adaptive", "Defence", "HeavyBall", "Plain"),
        *("adam", "adamw", "cosine", "linear", "momentum", "sgd"),
    ),
    "quafl.core.descent": ("Descent",),
    "quafl.core.optim": ("Schedule",),
    "quafl.core.seams": ("Algorithm", "Optimizer", "Task"),
    "quafl.record.attendance": ("Attendance", "Event"),
    "quafl.record.evaluations": ("Diverged",),
    "quafl.record.rows": ("Row",),
    "quafl.record.summary": ("Curve", "RecordError", "RunError"),
    "quafl.run.front": ("compare", "simulate", "tune"),
    "quafl.run.results": ("Comparison", "Models", "Result", "Tuning"),
    "quafl.run.taking_part": ("Brought", "Served", "join", "serve"),
    "quafl.settings.base": ("SettingsError",),
    "quafl.sim": ("Absence", "Change", "Plan", "Simulation", "World"),
    "quafl.sim.crew": ("Contacts",),
    "quafl.sim.executors": ("ExecutorName",),
    "quafl.tasks.local": ("Local",),
    "quafl.tasks.precision": ("Precision",),
    "quafl.tasks.hands": ("Data", "OnDemand"),
    "quafl.tasks.judging": ("Measure",),
    "quafl.tasks.reading": ("Collate",),
    "quafl.tasks.supervised": ("Augment",),
}
__all__ = [
    "CA2FL",
    "FAVANO",
    "QSGD",
    "SCAFFOLD",
    "Absence",
    "Adaptive",
    "Algorithm",
    "Attendance",
    "Augment",
    "BFloat16",
    "Brought",
    "Calibrated",
    "Change",
    "Codec",
    "Codecs",
    "Collate",
    "Comparison",
    "Contacts",
    "Curve",
    "Data",
    "Defence",
    "Descent",
    "Difference",
    "Diverged",
    "Event",
    "ExecutorName",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedNova",
    "HeavyBall",
    "Identity",
    "Lattice",
    "Local",
    "Measure",
    "Models",
    "OnDemand",
    "Optimizer",
    "Plain",
    "Plan",
    "Precision",
    "QuAFL",
    "RecordError",
    "Result",
    "Row",
    "RunError",
    "Schedule",
    "Served",
    "SettingsError",
    "Simulation",
    "Task",
    "TopK",
    "Tuning",
    "World",
    "__version__",
    "adam",
    "adamw",
    "compare",
    "compressed",
    "cosine",
    "join",
    "linear",
    "momentum",
    "serve",
    "sgd",
    "simulate",
    "tune",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'quafl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
