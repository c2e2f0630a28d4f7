"""Which executor: the one asked for, or the one that a short measurement found fastest for this model and batch."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from math import ceil
from time import perf_counter
from typing import Any, Literal, Protocol, TypeAlias, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quafl.core.optim import sgd
from quafl.core.seams import Counts, Direction, Ids, Optimizer, Task
from quafl.record.files import write_atomically
from quafl.sim.executors.groups import in_groups
from quafl.sim.executors.lanes import (
    Lane,
    Lanes,
    Together,
    Unsuitable,
    can_be_together,
    flatten,
    lanes_for,
    step_of,
)
from quafl.sim.executors.sequential import Sequential
from quafl.sim.executors.tracing import first_line, trace
from quafl.tasks.files import cache_folder

_log = logging.getLogger(__name__)

ExecutorName: TypeAlias = Literal["auto", "sequential", "vectorised", "graph"]
MEASURED = "executors.json"  # what was found fastest, in the user's cache
TRIED = 2  # clients, and steps of each, on which an executor must agree with the sequential one
AGREEMENT = 0.5  # relative: it must be the same computation; Adam makes large steps of rounding errors, too
MOST_VECTORISED, MOST_BRANCHES = 64, 16  # lanes that are of use


class Executor(Protocol):
    """Takes local steps."""

    name: str

    def __call__(self, clients: Any, ids: Ids, counts: Counts) -> Any:
        """The clients after `counts` more steps each."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Executors for a task with that many clients, of whom `sampled` are contacted at a time; `typical` says how many
    steps each may then have to take."""

    task: Task
    optimizer: Optimizer
    direction: Direction | None
    newcomer: Any
    clients: int
    sampled: int
    typical: Callable[[], Counts]

    def make(self, name: str) -> Executor:
        """An `ExecutorName`, or the very one that had this name before. What cannot be executed as asked is executed
        one client after another, and one line says why."""
        if name not in get_args(ExecutorName) and not re.fullmatch(r"vectorised by \d+", name):
            raise ValueError(f"executor is {name!r}, must be one of {', '.join(get_args(ExecutorName))}")
        if name == "sequential" or (name == "auto" and not self._on_gpu):
            return Sequential(self.task, self.optimizer, self.direction)
        try:
            if not can_be_together(self.task):
                raise Unsuitable(f"{type(self.task).__name__} has no pure_gradient")
            if not self.task.in_memory:
                raise Unsuitable("their data are read when they are needed")
            if not len(self._whole(self.task)):
                raise Unsuitable("no client has a whole batch")
            sizes = self._group_sizes(name)
            if len(sizes) == 1:
                return self._lanes(*next(iter(sizes.items())), self.task)
            return self._fastest(sizes, self.task)
        except Unsuitable as error:
            _log.warning("clients train one after another, because they cannot train together: %s", error)
            return Sequential(self.task, self.optimizer, self.direction)

    @property
    def _on_gpu(self) -> bool:
        return bool(self.newcomer.base.device.type == "cuda")

    def _whole(self, task: Together) -> Ids:
        """Clients that have whole batches."""
        return task.same_shape(torch.arange(self.clients)).nonzero().squeeze(-1)

    def _group_sizes(self, name: str) -> dict[str, int]:
        """Of the executors of that name."""
        label, _, size = name.rpartition(" ")
        if label == "vectorised by" and size.isdigit():
            return {name: int(size)}
        typical = self.typical().double()
        busy = float(typical.mean() / typical.max().clamp(min=1))  # those with the most steps need a lane each
        width = min(max(ceil(self.sampled * busy), 2), self.sampled, MOST_VECTORISED)
        vectorised = {f"vectorised by {width}": width} if width > 1 else {"graph": 1}
        return {"auto": {**vectorised, "graph": 1}, "graph": {"graph": 1}, "vectorised": vectorised}[name]

    def _lanes(self, label: str, size: int, task: Together) -> Executor:
        most = min(self.sampled, MOST_BRANCHES) if size == 1 else size
        lanes = lanes_for(self.newcomer, int(self._whole(task)[0]), most, hooked=self.direction is not None)
        some = self._whole(task)[:TRIED]
        steps = torch.full((len(some),), TRIED)
        theirs = self._run(Sequential(task, self.optimizer, self.direction), some, steps)
        try:
            made = Lanes(label, partial(in_groups, size), size, task, self.optimizer, self.direction, lanes)
            mine = self._run(made, some, steps)
        except Unsuitable:
            raise
        except Exception as error:  # of a model that nobody here has seen before, on a device likewise
            raise Unsuitable(first_line(error)) from error
        moved = theirs.buffers - self.newcomer.buffers
        for away in _distance(mine.progress, theirs.progress), _distance(mine.buffers - self.newcomer.buffers, moved):
            if not away <= AGREEMENT:
                raise Unsuitable(f"{label}: its steps differ by {away:.1%} from those taken one by one")
        return made

    def _fastest(self, sizes: dict[str, int], task: Together) -> Executor:
        key = self._key(sizes, task)
        known = _remembered().get(key)
        made: list[Executor] = []
        why: list[Unsuitable] = []
        if known in sizes:
            try:
                return self._lanes(known, sizes[known], task)
            except Unsuitable as error:
                _log.info("%s: %s", known, error)
                why.append(error)
                sizes = {label: size for label, size in sizes.items() if label != known}
        for label, size in sizes.items():
            try:
                made.append(self._lanes(label, size, task))
            except Unsuitable as error:
                _log.info("%s: %s", label, error)
                why.append(error)
        if not made:
            raise why[0]
        rates = [self._rate(executor, self._whole(task)) for executor in made]
        found = ", ".join(f"{executor.name} {rate:,.0f}" for executor, rate in zip(made, rates, strict=True))
        _log.info("local steps a second: %s", found)
        best = made[rates.index(max(rates))]
        _remember(key, best.name)
        return best

    def _rate(self, executor: Executor, ids: Ids) -> float:
        """Local steps a second of some of the clients, warmed up."""
        here = self.newcomer.base.device
        some = ids[torch.linspace(0, len(ids) - 1, self.sampled).round().long()]
        steps = self.typical()[some].clamp(min=1)
        self._run(executor, some, steps)
        torch.cuda.synchronize(here)
        began = perf_counter()
        taken = self._run(executor, some, steps).taken.sum()
        torch.cuda.synchronize(here)
        return float(taken) / (perf_counter() - began)

    def _run(self, executor: Executor, ids: Ids, steps: Counts) -> Any:
        newcomers = self.newcomer.each(lambda tensor: tensor.expand(len(ids), *tensor.shape))
        return executor(newcomers, ids, steps)

    def _key(self, sizes: dict[str, int], task: Together) -> str:
        """What the measurement depends on."""
        lanes = lanes_for(self.newcomer, int(self._whole(task)[0]), 1, hooked=self.direction is not None)
        one: Lane = pytree.tree_map(lambda rows: rows[0], lanes)
        shapes = [tuple(tensor.shape) for tensor in flatten(one.state)]
        device = torch.cuda.get_device_name(one.factor.device)
        code = trace(
            step_of(task.pure_gradient, sgd(1.0), self.direction), one._replace(state=one.state._replace(optimizer=()))
        ).code
        facts = code, shapes, self.sampled, sizes  # whatever the learning rate
        return blake2b(repr((*facts, task.precision, device, torch.__version__)).encode(), digest_size=16).hexdigest()


def _distance(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).norm() / theirs.norm().clamp(min=1e-30))


def _remembered() -> dict[str, str]:
    try:
        known: dict[str, str] = json.loads((cache_folder() / MEASURED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known


def _remember(key: str, name: str) -> None:
    """For the next time; a folder that cannot be written to only costs another measurement."""
    path = cache_folder() / MEASURED
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as stream:
            json.dump(_remembered() | {key: name}, stream, indent=2)
    except OSError as error:
        _log.info("%s: %s", path, error)
