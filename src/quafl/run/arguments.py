"""What a program gives: a curve like that of a settings file, with a model, data and functions that no file holds."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from hashlib import blake2b
from itertools import chain
from math import inf
from operator import index
from pathlib import Path
from typing import Any, Self

import tomli_w
import torch
from torch import Tensor, nn
from torch.nn import functional

from quafl.codec import compressed
from quafl.codec.seams import Codec, Codecs
from quafl.core.checks import check_positive, check_whole
from quafl.core.optim import sgd
from quafl.core.seams import Algorithm, Optimizer
from quafl.run.folders import PROGRAM
from quafl.settings.base import SettingsError, Tracker, meant
from quafl.settings.reading import checked
from quafl.settings.world import Run
from quafl.sim import Simulation, World
from quafl.sim.checks import check_parts
from quafl.sim.executors import ExecutorName
from quafl.sim.fleet import Placing
from quafl.tasks import given
from quafl.tasks.flat import check_module
from quafl.tasks.hands import Data, HeldOut, OnDemand, count, known_by
from quafl.tasks.judging import Measure
from quafl.tasks.precision import Precision
from quafl.tasks.reading import Collate
from quafl.tasks.supervised import Augment, Supervised
from quafl.tasks.trees import Tree

KNOWN = 16  # clients whose data, made on demand, are looked at to know them again
CODEC, OPTIMIZER, WORLD = compressed(bits=4), sgd(lr=0.1), World()  # where nothing else is said; they are immutable


@dataclass(kw_only=True, eq=False)
class Arguments:
    """One curve, as `simulate` is given it."""

    model: nn.Module
    clients: Sequence[Data]
    algorithm: Algorithm
    until: float
    codec: Codec | Codecs = CODEC
    optimizer: Optimizer = OPTIMIZER
    loss: Measure = functional.cross_entropy
    metrics: Mapping[str, Measure] | None = None
    lower_is_better: bool = False
    test: Data | None = None
    held_out: HeldOut | None = None
    per_client: bool = False
    personal_steps: int = 0
    batch_size: int = 32
    accumulate: int = 1
    augment: Augment | None = None
    collate: Collate | None = None
    workers: int = 0
    world: World = WORLD
    evaluations: int = 50
    average: float = 0.0
    memory: float = inf
    device: torch.device | str = "cpu"
    executor: ExecutorName = "auto"
    precision: Precision = "float32"
    track: Sequence[Tracker] = ()
    seeds: Sequence[int] = (0,)
    target: float = 0.9
    label: str = ""
    fingerprint: str = ""  # of the model and the data, where a folder is to be found again
    run: Run = field(init=False)
    made: tuple[Supervised, Simulation] = field(init=False, repr=False)  # what is running

    def __post_init__(self) -> None:
        check_parts(self.algorithm, self.codec, self.optimizer, self.world)
        check_module(self.model)
        self.device = given.usable(self.device)
        check_positive("until", self.until)
        check_whole("evaluations", self.evaluations, 1)
        self.label = self.label or type(self.algorithm).__name__
        self.clients = self.clients if isinstance(self.clients, OnDemand) else given.listed(self.clients)
        section = {
            "until": float(self.until),
            "every": self.until / self.evaluations,
            "seeds": _seeds(self.seeds),
            "metric": next(iter(self.metrics or {}), "accuracy" if self.metrics is None else "loss"),
            "target": self.target,
            "lower_is_better": self.lower_is_better,
            "average": self.average,
            "memory": self.memory,
            "per_client": self.per_client or self.held_out is not None or self.personal_steps > 0,
            "personal_steps": self.personal_steps,
            "device": str(self.device),
            "executor": self.executor,
            "precision": self.precision,
            "track": list(self.track) or None,
        }
        try:
            self.run = checked(Run, section, "")
        except SettingsError as error:
            raise ValueError(str(error)) from None

    def simulation(
        self, seed: int, executor: str | None = None, spread: Placing | None = None
    ) -> tuple[Supervised, Simulation]:
        """One seed, ready to run."""
        task = Supervised(
            self.model,
            self.clients,
            loss=self.loss,
            metrics=self.metrics,
            test=self.test,
            held_out=self.held_out,
            batch_size=self.batch_size,
            accumulate=self.accumulate,
            augment=self.augment,
            collate=self.collate,
            workers=self.workers,
            seed=seed,
            device=self.device,
            precision=self.precision,
        )
        parts = self.world, self.algorithm, self.codec, self.optimizer, self.run.plan(seed)
        chosen, memory = executor or self.executor, 1e9 * self.memory
        self.made = task, Simulation(task, len(self.clients), *parts, executor=chosen, spread=spread, memory=memory)
        return self.made

    def only(self, *seeds: int) -> Self:
        """It with these seeds, none of which depends on who is told, or on how much memory there is."""
        return replace(self, seeds=seeds, track=(), memory=inf)

    def sources(self) -> str:
        """None: the program is the user's own."""
        return ""

    def known(self) -> Self:
        """With the fingerprint of its model and data."""
        digest = blake2b(digest_size=16)
        for name, tensor in self.model.state_dict().items():
            _add(digest, name, tensor)
        test = () if self.test is None else (self.test,)
        own = self.held_out if isinstance(self.held_out, Sequence) else ()
        for number, data in enumerate((*_some(self.clients), *test, *_some(own))):
            if data is None:
                continue
            digest.update(f"{count(data)} ".encode())
            for tree in chain.from_iterable(known_by(data, f"data {number}", self.collate)):
                for name, tensor in _named(tree).items():
                    _add(digest, name, tensor)
        return replace(self, fingerprint=digest.hexdigest())

    def to_toml(self) -> str:
        """What its numbers depend on, as far as it can be written down."""
        up_down = (
            {way: _table(one) for way, one in self.codec._asdict().items()} if isinstance(self.codec, Codecs) else {}
        )
        table = {
            "label": self.label,
            "task": {
                "name": PROGRAM,
                "model": type(self.model).__name__,
                "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
                "fingerprint": self.fingerprint,
                "loss": _plain(self.loss),
                "metrics": sorted(self.metrics or {}),
                "batch": self.batch_size,
                "accumulate": self.accumulate,
                "held_out": self.held_out if isinstance(self.held_out, float) else self.held_out is not None,
                "augment": _plain(self.augment),
                "collate": _plain(self.collate),
            },
            "clients": {"count": len(self.clients), **_table(self.world)},
            "algorithm": _table(self.algorithm),
            "codec": up_down or _table(self.codec),
            "optimizer": _plain(self.optimizer),
            "run": self.run.model_dump(exclude_none=True),
        }
        return tomli_w.dumps(table)


def arguments(label: str, *given: Mapping[str, Any]) -> Arguments:
    """A curve of that name, of tables of arguments, of which the later ones count more."""
    known = [one.name for one in fields(Arguments) if one.init and one.name not in ("label", "fingerprint")]
    together = {name: value for table in given for name, value in table.items()}
    for name in together:
        if name not in known:
            raise TypeError(f"{label} has an argument {name!r}; {meant(name, known)}there are {', '.join(known)}")
    missing = [name for name in ("model", "clients", "algorithm", "until") if name not in together]
    if missing:
        raise TypeError(f"{label} has no {' and no '.join(missing)}; give it to the curve, or to all of them")
    return Arguments(label=label, **together)


def _seeds(seeds: Any) -> list[int]:
    """Whole numbers of whatever kind."""
    try:
        return [index(seed) for seed in seeds]
    except TypeError:
        raise TypeError(f"seeds is {seeds!r}, must be whole numbers, such as [0, 1, 2] or range(3)") from None


def _table(value: Any) -> dict[str, Any]:
    """An object's kind and its fields, for a file."""
    if not is_dataclass(value):
        return {"name": _plain(value)}
    found = {one.name: getattr(value, one.name) for one in fields(value)}
    return {"name": type(value).__name__, **{name: _plain(one) for name, one in found.items() if one is not None}}


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [_plain(one) for one in value]
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # where it lies in memory is another every time


def _some(clients: Sequence[Data]) -> Sequence[Data]:
    """Those by which all are known again: where they are made on demand, not all of them are."""
    step = max(1, len(clients) // KNOWN) if isinstance(clients, OnDemand) else 1
    return [clients[client] for client in range(0, len(clients), step)]


def _named(tree: Tree) -> dict[str, Tensor]:
    if isinstance(tree, Mapping):
        return dict(tree)
    return {str(place): part for place, part in enumerate(tree if isinstance(tree, tuple) else (tree,))}


def _add(digest: Any, name: str, tensor: Tensor) -> None:
    plain = tensor.detach().cpu().contiguous()
    digest.update(f"{name} {plain.dtype} {tuple(plain.shape)} ".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy())
