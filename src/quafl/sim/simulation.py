"""One simulated run, from its parts to its rows; it can be left and taken up again, bit for bit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quafl.codec import Lattice
from quafl.codec.directions import codecs_for
from quafl.codec.packets import is_finite
from quafl.core.optim import sgd
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm, Codec, Optimizer, ServerState, Task, Totals
from quafl.record.diagnostics import potential
from quafl.record.rows import Row, make_row, worth
from quafl.sim.clock import VirtualClock
from quafl.sim.executors import Name
from quafl.sim.fleet import Diverged, SimulatedFleet
from quafl.sim.world import World
from quafl.tasks.precision import Precision
from quafl.tasks.supervised import Data, Measure, Supervised

STILL = 1000  # rounds at the same time, after which a run has no hope of ending


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how often, and what is looked at."""

    until: float  # simulated time
    every: float  # simulated time between evaluations
    seed: int = 0
    metric: str = "accuracy"  # that the best model is chosen by; the loss where a task does not have it
    lower_is_better: bool = False  # of the metric; of the loss it always is
    potential: bool = False  # record Φ_t

    def __post_init__(self) -> None:
        if not 0 < self.until < inf or not self.every > 0:
            raise ValueError(f"until is {self.until} and every {self.every}: both must be positive, and until finite")

    def worth(self, row: Row) -> float:
        """The higher, the better."""
        return worth(row, self.metric, lower_is_better=self.lower_is_better)


@dataclass(frozen=True, slots=True)
class _Best:
    """The best state evaluated so far."""

    worth: float
    server: ServerState


class Simulation:
    """An iterator of rounds: each gives the row of an evaluation, or None. Between two, `state` is all that another
    one, made from the same parts, needs to go on from there. `expected_steps` are the H_i, where they are known in
    advance; `executor` is as in `simulate`."""

    def __init__(
        self,
        task: Task,
        clients: int,
        world: World,
        algorithm: Algorithm,
        codec: Codec,
        optimizer: Optimizer,
        plan: Plan,
        *,
        expected_steps: Tensor | None = None,
        executor: str = "auto",
    ) -> None:
        if algorithm.sampled > clients:
            raise ValueError(
                f"sampled is {algorithm.sampled}, there are only {clients} clients; sample at most all of them"
            )
        self.rows: list[Row] = []
        self.server = ServerState(*task.initial())
        self.best = _Best(-inf, self.server)
        self._task, self._algorithm, self._plan = task, algorithm, plan
        self._rng, self._clock, self._codecs = Generators(plan.seed), VirtualClock(), codecs_for(algorithm, codec)
        speeds, link = world.speeds(clients, self._rng, plan.until), world.link(clients, self._codecs)
        self._fleet = SimulatedFleet(
            task,
            optimizer,
            algorithm,
            self._codecs,
            self._clock,
            speeds,
            self._rng,
            link=link,
            limited=world.link_limited,
            unreachable=world.unreachable,
            expected_steps=expected_steps,
            executor=executor,
        )
        self._reach(self.server)
        self._due, self._evaluated, self._still = 0.0, False, 0

    @property
    def executor(self) -> str:
        """How local steps are computed."""
        return self._fleet.execute.name

    def __iter__(self) -> Iterator[Row | None]:
        """At time 0, whenever `every` more time has passed, and at the last state that is reached by the time `until`,
        there is a row."""
        if not self.rows:
            yield self._evaluate()
        for state in self._algorithm.rounds(self.server, self._fleet, self._codecs, self._clock, self._rng):
            self._still = self._still + 1 if self._clock.now() == self._time else 0
            if self._still == STILL:
                raise ValueError(
                    f"{STILL} rounds took no simulated time: give the clients a latency or the algorithm a wait, and "
                    f"let somebody be there"
                )
            if self._clock.now() > self._plan.until:
                break
            self._reach(state)
            self._evaluated = False
            yield self._evaluate() if self._time >= self._due else None
        if not self._evaluated:
            yield self._evaluate()

    def state(self) -> dict[str, Any]:
        """For `restore`: dictionaries, lists, tensors and numbers."""
        fleet = self._fleet.state()  # first: what it still has to compute draws from the generators
        return {
            "server": _plain(self.server),
            "best": {"worth": self.best.worth, "server": _plain(self.best.server)},
            "clock": self._clock.state(),
            "rng": self._rng.state(),
            "fleet": fleet,
            "rows": [dict(row) for row in self.rows],
            "time": self._time,
            "totals": asdict(self._totals),
            "spread": self._spread,
            "due": self._due,
            "evaluated": self._evaluated,
            "still": self._still,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.server = ServerState(**state["server"])
        self.best = _Best(state["best"]["worth"], ServerState(**state["best"]["server"]))
        self._clock.restore(state["clock"])
        self._rng.restore(state["rng"])
        self._fleet.restore(state["fleet"])
        self.rows = [dict(row) for row in state["rows"]]
        self._time, self._totals, self._spread = state["time"], Totals(**state["totals"]), state["spread"]
        self._due, self._evaluated, self._still = state["due"], state["evaluated"], state["still"]

    def _reach(self, state: ServerState) -> None:
        """Where the run stands after a round."""
        if not (isfinite(state.distance) and is_finite(state.model) and is_finite(state.buffers)):
            raise Diverged(f"in round {state.round} the server's model is not finite")
        self.server, self._time, self._totals = state, self._clock.now(), replace(self._fleet.totals)
        self._spread = potential(state.model, self._fleet.clients.everybody().base) if self._plan.potential else None

    def _evaluate(self) -> Row:
        score = self._task.evaluate(self.server.model, self.server.buffers)
        if not isfinite(score["loss"]):
            if not self.rows:
                raise ValueError(f"the loss of the initial model is {score['loss']}; look at the model and the data")
            raise Diverged(f"in round {self.server.round} the loss is {score['loss']}")
        row = make_row(self._plan.seed, self._time, self.server, self._totals, score)
        if self._spread is not None:
            row["potential"] = self._spread
        self.rows.append(row)
        if self._plan.worth(row) > self.best.worth:
            self.best = _Best(self._plan.worth(row), self.server)
        self._due = self._plan.every * (self._time // self._plan.every + 1)
        self._evaluated = True
        return row


def _plain(state: ServerState) -> dict[str, Any]:
    return {**asdict(replace(state, extra={})), "extra": dict(state.extra)}


@dataclass(frozen=True, slots=True)
class Result:
    """What `simulate` returns."""

    rows: list[Row]
    model: nn.Module
    best: nn.Module  # of all states evaluated


def simulate(
    *,
    model: nn.Module,
    clients: Sequence[Data],
    algorithm: Algorithm,
    until: float,
    codec: Codec = Lattice(bits=4),  # noqa: B008  # immutable
    optimizer: Optimizer = sgd(lr=0.1),  # noqa: B008
    loss: Measure = functional.cross_entropy,
    metrics: Mapping[str, Measure] | None = None,
    lower_is_better: bool = False,
    test: Data | None = None,
    batch_size: int = 32,
    world: World = World(),  # noqa: B008
    evaluations: int = 50,
    seed: int = 0,
    device: torch.device | str = "cpu",
    executor: Name = "auto",
    precision: Precision = "float32",
) -> Result:
    """Train `model` on the clients' data, a pair (inputs, targets) each, for `until` units of virtual time.

    Inputs and targets are tensors, or tuples or dictionaries of them, an example a row. `loss` and `metrics` take a
    batch's outputs and targets; the best model is chosen by the first metric, the higher the better unless
    `lower_is_better`. `test` is what the rows are measured on, by default all the clients' data. The module given is
    not touched: the result holds trained copies. Models, data and messages are on the `device`. Local steps are taken
    by the `executor`: "sequential", "vectorised", "graph", or on a GPU the one found fastest ("auto"); gradients are
    computed in "float32", "tf32" or "bfloat16". Training that leaves the finite numbers raises `Diverged`, which holds
    the rows so far.
    """
    if evaluations < 1:
        raise ValueError(f"evaluations is {evaluations}, must be at least 1")
    task = Supervised(
        model,
        clients,
        loss=loss,
        metrics=metrics,
        test=test,
        batch_size=batch_size,
        seed=seed,
        device=device,
        precision=precision,
    )
    metric = next(iter(task.metrics), "loss")
    plan = Plan(until=until, every=until / evaluations, seed=seed, metric=metric, lower_is_better=lower_is_better)
    run = Simulation(task, len(clients), world, algorithm, codec, optimizer, plan, executor=executor)
    try:
        for _ in run:
            pass
    except Diverged as error:
        error.rows = run.rows
        raise
    final, best = run.server, run.best.server
    return Result(run.rows, task.flat.module(final.model, final.buffers), task.flat.module(best.model, best.buffers))
