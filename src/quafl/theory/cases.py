"""What the theorems take for given, of a settings file: how fast clients are, from its world; the rest is probed."""

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from quafl.codec.coders import Coders, coders_for
from quafl.core import sgd
from quafl.core.judgement import weighted
from quafl.core.messages import Buffers, Model
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm, Score, Task
from quafl.settings.algorithms import DEFAULT
from quafl.settings.base import SettingsError
from quafl.settings.curve import Settings
from quafl.sim.clock import VirtualClock
from quafl.sim.fleet import SimulatedFleet
from quafl.tasks import own
from quafl.tasks.precision import one_thread
from quafl.theory.parameters import Problem
from quafl.theory.polling import Polling, polling
from quafl.theory.probing import Probe, probe

ROUNDS = 400  # in which H_i is measured, where it has no closed form


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast polled clients of a world are."""

    expected_steps: Tensor  # H_i
    idle: float  # share of contacts that find no step
    round_time: float  # sit + swt
    closed: bool  # in closed form; else measured in a run in which nothing is learned
    laws: tuple[Polling, ...] = ()  # of each client, where there is a closed form


@dataclass(frozen=True, slots=True)
class Case:
    """A curve of a settings file, as the theorems see it."""

    label: str
    problem: Problem
    probe: Probe
    pace: Pace
    loss: float  # f(μ_0), of which f_* is taken to be 0


def case_of(settings: Settings, *, rounds: int | None = None) -> Case:
    """The curve as if it were run by the paper's algorithm with weights, with its s, K and wait; `rounds` in place of
    those that its time allows."""
    own.reach(map(Path, settings.modules or []))
    task = settings.task.build(settings.clients, settings.run, settings.run.seeds[0])
    algorithm = polled(settings)
    model, buffers = task.initial()
    pace = pace_of(settings, algorithm, len(model))
    try:
        with one_thread():
            found = probe(task, settings.clients.count, settings.algorithm.build_optimizer().rate)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    loss = loss_of(task, settings.clients.count, model, buffers)
    problem = Problem(
        speeds=tuple(pace.expected_steps.tolist()),
        sampled=algorithm.sampled,
        local_steps=algorithm.local_steps,
        rounds=rounds or max(1, int(settings.run.until / pace.round_time)),
        dim=len(model),
        smoothness=max(found.smoothness.value, 1e-30),
        variance=found.variance.value,
        dissimilarity=found.dissimilarity.value,
        gap=loss,
    )
    return Case(settings.label, problem, found, pace, loss)


def polled(settings: Settings) -> Algorithm:
    """The paper's algorithm, with weights, as a curve's own algorithm is set."""
    one = settings.algorithm.build()
    same: dict[str, Any] = {"sampled": one.sampled, "local_steps": one.local_steps, "wait": one.wait}
    return DEFAULT.model_copy(update={**same, "weighted": True}).build()


def pace_of(settings: Settings, algorithm: Algorithm, dim: int) -> Pace:
    """Of an algorithm that polls, in the curve's world and with its codec."""
    coders = coders_for(algorithm, settings.codec.build())
    try:
        return _computed(settings, algorithm, coders)
    except ValueError:
        return _measured(settings, algorithm, coders, dim)


def _computed(settings: Settings, algorithm: Algorithm, coders: Coders) -> Pace:
    """H_i in closed form; ValueError, where there is none."""
    world, count, rng = settings.clients.build(), settings.clients.count, Generators(settings.run.seeds[0])
    expected = world.expected_steps(algorithm, count, coders, rng)
    round_time = world.link(count, coders).latency + algorithm.wait
    if not round_time:
        raise ValueError("rounds take no time")
    rates = world.speeds(count, Generators(settings.run.seeds[0]), 0.0).rates.values[:, 0].tolist()
    law_of = {
        rate: polling(
            speed=rate,
            sampled=algorithm.sampled,
            clients=count,
            round_time=round_time,
            local_steps=algorithm.local_steps,
            law=world.step_law,
        )
        for rate in set(rates)
    }
    laws = tuple(law_of[rate] for rate in rates)
    return Pace(expected.double(), mean(one.idle for one in laws), round_time, closed=True, laws=laws)


def _measured(settings: Settings, algorithm: Algorithm, coders: Coders, dim: int) -> Pace:
    """H_i as clients count their steps, in a run with gradients of zero and messages of the right size."""
    world, count, rng = settings.clients.build(), settings.clients.count, Generators(settings.run.seeds[0])
    clock = VirtualClock()
    fleet = SimulatedFleet(
        _Still(dim),
        sgd(1.0),
        algorithm,
        coders,
        clock,
        world.speeds(count, rng, settings.run.until),
        rng,
        link=world.link(count, coders),
        limited=world.link_limited,
        unreachable=world.unreachable,
    )
    state = algorithm.start(*_Still(dim).initial())
    for done in range(1, ROUNDS + 1):
        state = fleet.run(algorithm.round(state, rng))
        if clock.now() >= settings.run.until or (done == ROUNDS // 10 and not clock.now()):
            break
    if not clock.now():
        raise SettingsError("rounds take no time: give the clients a latency (clients.latency_at_32_bits) or a wait")
    clients = fleet.clients.everybody()
    least = 1 / (clients.contacts.double() + 1)  # of a client that was never seen to take a step
    totals = fleet.totals
    return Pace(
        clients.expected_steps.double().maximum(least.clamp(max=algorithm.local_steps)),
        totals.idle / max(totals.contacts, 1),
        clock.now() / done,
        closed=False,
    )


@dataclass(frozen=True, slots=True)
class _Still:
    """A task of so many coordinates in which nobody moves."""

    dim: int

    def initial(self) -> tuple[Model, Buffers]:
        return torch.zeros(self.dim), torch.empty(0)

    def batch(self, client: int, step: int) -> None:
        return None

    def gradient(self, model: Model, buffers: Buffers, batch: None) -> tuple[Model, Buffers]:
        return torch.zeros_like(model), buffers

    def evaluate(self, model: Model, buffers: Buffers) -> Score:
        return {"loss": 0.0}

    def export(self, model: Model, buffers: Buffers) -> dict[str, Tensor]:
        return {}


def loss_of(task: Task, clients: int, model: Model, buffers: Buffers) -> float:
    """f at a model: on the training sample, on the test data, or as the first clients judge it."""
    score = task.evaluate(model, buffers)
    for name in "train_loss", "loss":
        if name in score:
            return float(score[name])
    judge = getattr(task, "judge", None)
    scores = [] if judge is None else [judge(client, model, buffers) for client in islice(range(clients), 20)]
    return float(weighted([one for one in scores if one is not None])["loss"])


def with_rounds(case: Case, rounds: int) -> Case:
    """The same for longer, or shorter."""
    return replace(case, problem=replace(case.problem, rounds=rounds))
