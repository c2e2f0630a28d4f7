"""One simulated run, from its parts to its rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from quafl.codec import Lattice
from quafl.core.optim import sgd
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm, Codec, Codecs, Optimizer, ServerState, Speeds, Task, Totals
from quafl.record.diagnostics import potential
from quafl.record.rows import Row, make_row
from quafl.sim.clock import VirtualClock
from quafl.sim.fleet import SimulatedFleet
from quafl.sim.speeds import Constant, Exponential, fast_and_slow
from quafl.tasks.supervised import Data, Measure, Supervised


@dataclass(frozen=True, slots=True)
class World:
    """How fast the clients are, and how far away."""

    slow: float = 0.25  # share of slow clients: the last ones
    step_times: tuple[float, float] = (2.0, 8.0)  # mean time of a local step: fast and slow clients
    exponential: bool = True  # else every step takes exactly that time
    latency_at_32_bits: float = 10.0  # sit of an uncompressed exchange; at b bits it is b/32 of that
    unreachable: float = 0.0  # probability that a contact is lost

    def speeds(self, clients: int, rng: torch.Generator) -> Speeds:
        """The law of the step times."""
        times = fast_and_slow(clients, slow=self.slow, means=self.step_times)
        return Exponential(times, rng) if self.exponential else Constant(times)

    def latency(self, codecs: Codecs) -> float:
        """sit: the paper's 10·b/32, for the mean b of the two directions."""
        return self.latency_at_32_bits * (codecs.up.bits + codecs.down.bits) / 64


def trajectory(
    task: Task,
    size: int,
    world: World,
    algorithm: Algorithm,
    codec: Codec,
    optimizer: Optimizer,
    *,
    until: float,
    every: float,
    seed: int,
    with_potential: bool = False,
) -> Iterator[tuple[Row, ServerState]]:
    """A row and the state behind it, at time 0, whenever `every` more time has passed, and at the last state that is
    reached by the time `until`."""
    if not 0 < until < inf or not every > 0:
        raise ValueError(f"until is {until} and every {every}: both must be positive, and until finite")
    if algorithm.sampled > size:
        raise ValueError(f"sampled is {algorithm.sampled}, there are only {size} clients; sample at most all of them")
    rng, clock, codecs = Generators(seed), VirtualClock(), Codecs(up=codec, down=codec)
    fleet = SimulatedFleet(
        size,
        task,
        optimizer,
        algorithm,
        codecs,
        clock,
        world.speeds(size, rng["speeds"]),
        rng,
        latency=world.latency(codecs),
        unreachable=world.unreachable,
    )

    def reached(state: ServerState) -> _Point:
        spread = potential(state.model, fleet.clients.base) if with_potential else None
        return _Point(clock.now(), state, replace(fleet.totals), spread)

    def evaluated(point: _Point) -> tuple[Row, ServerState]:
        score = task.evaluate(point.state.model, point.state.buffers)
        row = make_row(seed, point.time, point.state, point.totals, score)
        if point.potential is not None:
            row["potential"] = point.potential
        return row, point.state

    latest = reached(ServerState(*task.initial()))
    yield evaluated(latest)
    due = every
    evaluated_last = True
    for state in algorithm.rounds(latest.state, fleet, codecs, clock, rng):
        if clock.now() == latest.time:
            raise ValueError("a round took no simulated time; give the clients a latency or the algorithm a wait")
        if clock.now() > until:
            break
        latest = reached(state)
        evaluated_last = clock.now() >= due
        if evaluated_last:
            yield evaluated(latest)
            due = every * (clock.now() // every + 1)
    if not evaluated_last:
        yield evaluated(latest)


class _Point(NamedTuple):
    """Where a run stands after a round."""

    time: float
    state: ServerState
    totals: Totals
    potential: float | None


@dataclass(frozen=True, slots=True)
class Result:
    """What `simulate` returns."""

    rows: list[Row]
    model: nn.Module


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
    test: Data | None = None,
    batch_size: int = 32,
    world: World = World(),  # noqa: B008
    evaluations: int = 50,
    seed: int = 0,
) -> Result:
    """Train `model` on the clients' data, a pair (inputs, targets) each, for `until` units of virtual time.

    `loss` and `metrics` take a batch's outputs and targets; `test` is what the rows are measured on, by default all the
    clients' data. The module given is not touched: the result holds a trained copy.
    """
    task = Supervised(model, clients, loss=loss, metrics=metrics, test=test, batch_size=batch_size, seed=seed)
    rows: list[Row] = []
    for row, state in trajectory(
        task, len(clients), world, algorithm, codec, optimizer, until=until, every=until / evaluations, seed=seed
    ):
        rows.append(row)
    return Result(rows, task.flat.module(state.model, state.buffers))
