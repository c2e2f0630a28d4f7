"""Small worlds to try algorithms in."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quafl.codec import Identity
from quafl.codec.directions import codecs_for
from quafl.core import sgd
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm, Codec, Codecs, Optimizer, ServerState, Speeds, Task
from quafl.sim.clock import VirtualClock
from quafl.sim.fleet import SimulatedFleet
from quafl.sim.link import Link
from quafl.sim.piecewise import Piecewise
from quafl.sim.speeds import Constant

NEVER = 1e9  # a step time that no run lives to see


def steady(times: Tensor) -> Piecewise:
    """Steps per time unit of clients whose steps take these times, always."""
    return Piecewise.steady(1 / times.double())


@dataclass
class World:
    algorithm: Algorithm
    codecs: Codecs
    clock: VirtualClock
    rng: Generators
    fleet: SimulatedFleet
    start: ServerState

    def rounds(self, count: int, state: ServerState | None = None) -> list[ServerState]:
        states = self.algorithm.rounds(state or self.start, self.fleet, self.codecs, self.clock, self.rng)
        return [next(states) for _ in range(count)]

    def bases(self) -> Tensor:
        return self.fleet.clients.everybody().base

    def scatter(self, bases: Tensor) -> None:
        clients = self.fleet.clients
        clients.put(torch.arange(len(clients)), replace(clients.everybody(), base=bases))

    def everybody(self, state: ServerState) -> Tensor:
        return torch.cat((state.model.unsqueeze(0), self.bases()))


def world(
    task: Task,
    size: int,
    algorithm: Algorithm,
    *,
    codec: Codec | None = None,
    lr: float = 0.1,
    optimizer: Optimizer | None = None,
    speeds: Speeds | float = 1.0,
    latency: float = 0.0,
    link: Link | None = None,
    limited: bool = True,
    unreachable: float = 0.0,
    seed: int = 0,
) -> World:
    codecs = codecs_for(algorithm, codec or Identity())
    rng, clock = Generators(seed), VirtualClock()
    if isinstance(speeds, float):
        speeds = Constant(steady(torch.full((size,), speeds)))
    fleet = SimulatedFleet(
        task,
        optimizer or sgd(lr),
        algorithm,
        codecs,
        clock,
        speeds,
        rng,
        link=link or Link(latency),
        limited=limited,
        unreachable=unreachable,
    )
    return World(algorithm, codecs, clock, rng, fleet, ServerState(*task.initial()))
