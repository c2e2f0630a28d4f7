"""Which executor: the one asked for, or the one that a short measurement found fastest for this model and batch."""

import json
import logging
import re
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from math import ceil
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quafl.core.optim import sgd
from quafl.core.seams import Counts, Direction, Ids, Optimizer, Task
from quafl.record.files import write_atomically
from quafl.sim.executors.changing import (
    AT_ONCE,
    COMPILING,
    SINCE,
    SO_FAR,
    Changing,
    Executor,
    Finish,
    Prepare,
    name_since,
)
from quafl.sim.executors.groups import Launch, launched, steps_in_groups
from quafl.sim.executors.lanes import (
    Lane,
    Lanes,
    Together,
    Unsuitable,
    can_be_together,
    flatten,
    lanes_for,
    on,
    step_of,
)
from quafl.sim.executors.sequential import Sequential
from quafl.sim.executors.tracing import first_line, trace
from quafl.tasks.files import cache_folder
from quafl.tasks.flat import Flat
from quafl.tasks.precision import arithmetic

_log = logging.getLogger(__name__)

ExecutorName: TypeAlias = Literal["auto", "sequential", "vectorised", "graph"]
MEASURED = "executors.json"  # what was found fastest, in the user's cache
TRIED = 2  # clients, and steps of each, on which an executor must agree with the sequential one
AGREEMENT = 0.5  # relative: it must be the same computation; Adam makes large steps of rounding errors, too
MOST_VECTORISED, MOST_BRANCHES = 64, 16  # lanes that are of use


class Compiled(NamedTuple):
    """The steps of an executor's groups, and the lanes they are for."""

    steps: list[Launch]
    lanes: Lane


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
        if since := SINCE.fullmatch(name):
            made = self.make(since[1])
            made.name = name if made.name == since[1] else made.name
            return made
        so_far = SO_FAR.fullmatch(name.removesuffix(AT_ONCE))
        kind, taken = ("auto", int(so_far[1])) if so_far else (name.removesuffix(AT_ONCE), 0)
        if kind not in get_args(ExecutorName) and not re.fullmatch(r"vectorised by \d+", kind):
            raise ValueError(f"executor is {name!r}, must be one of {', '.join(get_args(ExecutorName))}")
        first = Sequential(self.task, self.optimizer, self.direction)
        if kind == "sequential" or (kind == "auto" and not self._on_gpu):
            return first
        try:
            if not can_be_together(self.task):
                raise Unsuitable(f"{type(self.task).__name__} has no pure_gradient")
            if not self.task.in_memory:
                raise Unsuitable("their data are read when they are needed")
            if not len(self._whole(self.task)):
                raise Unsuitable("no client has a whole batch")
            if kind == "auto" and not name.endswith(AT_ONCE) and (apart := _apart(self.task)) is not None:
                return Changing(first, self.beside(apart), taken)
            with COMPILING, arithmetic(self.task.precision, self.newcomer.base.device):
                made = self._prepared(self._group_sizes(kind), self.task)()
            made.name = name_since(taken, made.name)
            return made
        except Unsuitable as error:
            _log.warning("clients train one after another, because they cannot train together: %s", error)
            return first

    def beside(self, apart: Together) -> Prepare:
        """What "auto" makes while the run goes on, from a task apart. How much clients have to do is looked at now, in
        the thread that changes it."""
        typical = self.typical()
        ways = replace(self, typical=lambda: typical)
        sizes = ways._group_sizes("auto")
        return lambda: ways._prepared(sizes, apart)

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

    def _prepared(self, sizes: Mapping[str, int], task: Together) -> Finish:
        """All of these executors, or the one that was found fastest before, compiled."""
        key = self._key(sizes, task) if len(sizes) > 1 else ""
        known = _remembered().get(key)
        some = [[label for label in sizes if label == known], [label for label in sizes if label != known]]
        why: list[Unsuitable] = []
        for labels in some:
            ready: dict[str, Compiled] = {}
            for label in labels:
                try:
                    ready[label] = self._compiled(sizes[label], task)
                except Unsuitable as error:
                    _log.info("%s: %s", label, error)
                    why.append(error)
            if ready:
                return partial(self._fastest, ready, sizes, "" if known in ready else key, task)
        raise why[0]

    def _compiled(self, size: int, task: Together) -> Compiled:
        most = min(self.sampled, MOST_BRANCHES) if size == 1 else size
        lanes = lanes_for(self.newcomer, int(self._whole(task)[0]), most, hooked=self.direction is not None)
        parts = task.pure_gradient, self.optimizer, self.direction, lanes
        with on(lanes.factor.device):
            return Compiled(steps_in_groups(size, *parts, tf32=task.precision == "tf32"), lanes)

    def _fastest(self, ready: Mapping[str, Compiled], sizes: Mapping[str, int], key: str, task: Together) -> Executor:
        """Of those that agree with the sequential one; with a key, it is remembered."""
        made: list[Executor] = []
        why: list[Unsuitable] = []
        for label, compiled in ready.items():
            try:
                made.append(self._lanes(label, sizes[label], compiled, task))
            except Unsuitable as error:
                _log.info("%s: %s", label, error)
                why.append(error)
        if not made:
            raise why[0]
        best = made[0]
        if len(made) > 1:
            rates = [self._rate(executor, self._whole(task)) for executor in made]
            found = ", ".join(f"{executor.name} {rate:,.0f}" for executor, rate in zip(made, rates, strict=True))
            _log.info("local steps a second: %s", found)
            best = made[rates.index(max(rates))]
        if key:
            _remember(key, best.name)
        return best

    def _lanes(self, label: str, size: int, compiled: Compiled, task: Together) -> Executor:
        some = self._whole(task)[:TRIED]
        steps = torch.full((len(some),), TRIED)
        theirs = self._run(Sequential(task, self.optimizer, self.direction), some, steps)
        try:
            with on(compiled.lanes.factor.device), arithmetic(task.precision, compiled.lanes.factor.device):
                advance = launched(size, *compiled)
            made = Lanes(label, advance, size, task, self.optimizer, self.direction, compiled.lanes)
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

    def _rate(self, executor: Executor, ids: Ids) -> float:
        """Local steps a second of some of the clients, warmed up."""
        here = self.newcomer.base.device
        some = ids[torch.linspace(0, len(ids) - 1, self.sampled).round().long()]
        steps = self.typical()[some].clamp(min=1)
        self._run(executor, some, steps)
        _wait_for(here)
        began = perf_counter()
        taken = self._run(executor, some, steps).taken.sum()
        _wait_for(here)
        return float(taken) / (perf_counter() - began)

    def _run(self, executor: Executor, ids: Ids, steps: Counts) -> Any:
        newcomers = self.newcomer.each(lambda tensor: tensor.expand(len(ids), *tensor.shape))
        return executor(newcomers, ids, steps)

    def _key(self, sizes: Mapping[str, int], task: Together) -> str:
        """What the measurement depends on."""
        lanes = lanes_for(self.newcomer, int(self._whole(task)[0]), 1, hooked=self.direction is not None)
        one: Lane = pytree.tree_map(lambda rows: rows[0], lanes)
        shapes = [tuple(tensor.shape) for tensor in flatten(one.state)]
        device = torch.cuda.get_device_name(one.factor.device) if self._on_gpu else "cpu"
        code = trace(
            step_of(task.pure_gradient, sgd(1.0), self.direction), one._replace(state=one.state._replace(optimizer=()))
        ).code
        facts = code, shapes, self.sampled, dict(sizes)  # whatever the learning rate
        return blake2b(repr((*facts, task.precision, device, torch.__version__)).encode(), digest_size=16).hexdigest()


def _apart(task: Together) -> Together | None:
    """With a module of its own, as tracing puts other tensors into it; None, if that cannot be."""
    if not isinstance(flat := vars(task).get("flat"), Flat):
        return None
    try:
        own = deepcopy(flat)
    except Exception as error:  # the model is the user's
        _log.info("the model cannot be copied: %s", first_line(error))
        return None
    apart = copy(task)
    vars(apart)["flat"] = own
    return apart


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
