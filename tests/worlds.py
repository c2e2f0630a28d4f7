"""Small worlds to try algorithms in."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quafl.codec import Identity
from quafl.core import sgd
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm, Codec, Codecs, ServerState, Speeds, Task
from quafl.sim.clock import VirtualClock
from quafl.sim.fleet import SimulatedFleet
from quafl.sim.speeds import Constant

NEVER = 1e9  # a step time that no run lives to see


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

    def everybody(self, state: ServerState) -> Tensor:
        return torch.cat((state.model.unsqueeze(0), self.fleet.clients.base))


def world(
    task: Task,
    size: int,
    algorithm: Algorithm,
    *,
    codec: Codec | None = None,
    lr: float = 0.1,
    speeds: Speeds | float = 1.0,
    latency: float = 0.0,
    unreachable: float = 0.0,
    seed: int = 0,
) -> World:
    codecs = Codecs(*[codec or Identity()] * 2)
    rng, clock = Generators(seed), VirtualClock()
    if isinstance(speeds, float):
        speeds = Constant(torch.full((size,), speeds))
    fleet = SimulatedFleet(
        size, task, sgd(lr), algorithm, codecs, clock, speeds, rng, latency=latency, unreachable=unreachable
    )
    return World(algorithm, codecs, clock, rng, fleet, ServerState(*task.initial()))
