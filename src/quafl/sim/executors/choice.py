"""Which executor: the one asked for, or the one that a short measurement found fastest for this model and batch."""

import json
import logging
from dataclasses import dataclass
from hashlib import blake2b
from time import perf_counter
from typing import Literal, Protocol, TypeAlias, get_args

import torch
from torch import Tensor

from quafl.core.seams import ClientState, Counts, Ids, Optimizer, Task
from quafl.record.files import write_atomically
from quafl.sim.executors.graphs import branches
from quafl.sim.executors.lanes import Engine, Lanes, Together, Unsuitable, can_be_together, flatten, lanes_for, step_of
from quafl.sim.executors.sequential import Sequential
from quafl.sim.executors.tracing import first_line, lane, trace
from quafl.sim.executors.vectorised import vectorised
from quafl.tasks.files import cache_folder

_log = logging.getLogger(__name__)

Name: TypeAlias = Literal["auto", "sequential", "vectorised", "graph"]
NAMES: tuple[Name, ...] = get_args(Name)
ENGINES: dict[str, tuple[Engine, int]] = {  # and the most lanes that are of use
    "vectorised": (vectorised, 64),
    "graph": (branches, 16),
}
MEASURED = "executors.json"  # what was found fastest, in the user's cache
TRIED = 2  # clients, and steps of each, on which an executor must agree with the sequential one
AGREEMENT = 0.5  # relative: it must be the same computation; Adam makes large steps of rounding errors, too


class Executor(Protocol):
    """Takes local steps."""

    name: str

    def __call__(self, clients: ClientState, ids: Ids, counts: Counts) -> ClientState:
        """The clients after `counts` more steps each."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Executors for a task with `clients` clients, of whom `sampled` are contacted at a time and take `steps` steps."""

    task: Task
    optimizer: Optimizer
    newcomer: ClientState
    clients: int
    sampled: int
    steps: int

    def make(self, name: Name) -> Executor:
        """What cannot be executed as asked is executed one client after another, and one line says why."""
        if name == "sequential" or (name == "auto" and self.newcomer.base.device.type != "cuda"):
            return Sequential(self.task, self.optimizer)
        try:
            if not can_be_together(self.task):
                raise Unsuitable(f"{type(self.task).__name__} has no pure_gradient")
            return self._fastest(self.task) if name == "auto" else self._engine(name, self.task)
        except Unsuitable as error:
            _log.warning("clients train one after another, because they cannot train together: %s", error)
            return Sequential(self.task, self.optimizer)

    def _engine(self, name: str, task: Together) -> Executor:
        engine, most = ENGINES[name]
        lanes = lanes_for(task, self.newcomer, self.clients, min(self.sampled, most))
        try:
            made = Lanes(name, engine, task, self.optimizer, lanes)
        except Unsuitable:
            raise
        except Exception as error:  # of a model that nobody here has seen before, on a device likewise
            raise Unsuitable(first_line(error)) from error
        mine, theirs = (self._run(one, TRIED, TRIED) for one in (made, Sequential(task, self.optimizer)))
        away = max(_distance(mine.progress, theirs.progress), _distance(mine.buffers, theirs.buffers))
        if not away <= AGREEMENT:
            raise Unsuitable(f"{name} steps differ by {away:.1%} from those taken one by one")
        return made

    def _fastest(self, task: Together) -> Executor:
        key = self._key(task)
        known = _remembered().get(key)
        if known is not None:
            return self._engine(known, task) if known in ENGINES else Sequential(task, self.optimizer)
        made: dict[str, Executor] = {"sequential": Sequential(task, self.optimizer)}
        for name in ENGINES:
            try:
                made[name] = self._engine(name, task)
            except Unsuitable as error:
                _log.info("%s: %s", name, error)
                if name == list(ENGINES)[-1] and len(made) == 1:
                    raise
        rates = {name: self._rate(executor) for name, executor in made.items()}
        _log.info("local steps a second: %s", ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items()))
        best = max(rates, key=lambda name: rates[name])
        _remember(key, best)
        return made[best]

    def _rate(self, executor: Executor) -> float:
        """Local steps a second, warmed up."""
        clients, steps = (self.sampled, self.steps) if executor.name in ENGINES else (1, min(self.steps, TRIED))
        self._run(executor, clients, steps)
        torch.cuda.synchronize()
        began = perf_counter()
        taken = self._run(executor, clients, steps).taken.sum()
        torch.cuda.synchronize()
        return float(taken) / (perf_counter() - began)

    def _run(self, executor: Executor, clients: int, steps: int) -> ClientState:
        ids = torch.arange(min(clients, self.clients))
        newcomers = self.newcomer.each(lambda tensor: tensor.expand(len(ids), *tensor.shape))
        return executor(newcomers, ids, torch.full((len(ids),), steps))

    def _key(self, task: Together) -> str:
        """What the measurement depends on."""
        one = lane(lanes_for(task, self.newcomer, self.clients, 1), 0)
        shapes = [tuple(tensor.shape) for tensor in flatten(one.state)]
        device = torch.cuda.get_device_name(one.factor.device)
        facts = trace(step_of(task.pure_gradient, self.optimizer), one).code, shapes, min(self.sampled, self.clients)
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
