"""Small worlds to try algorithms in."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from quafl.codec import Identity
from quafl.codec.coders import Coders, coders_for
from quafl.codec.seams import Codec, Codecs
from quafl.core import sgd
from quafl.core.conversation import Replies
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm, Optimizer, ServerState, Task
from quafl.sim.clock import VirtualClock
from quafl.sim.fleet import SimulatedFleet
from quafl.sim.link import Link
from quafl.sim.piecewise import Piecewise
from quafl.sim.speeds import Constant, Speeds

NEVER = 1e9  # a step time that no run lives to see


def steady(times: Tensor) -> Piecewise:
    """Steps per time unit of clients whose steps take these times, always."""
    return Piecewise.steady(1 / times.double())


class Listened(SimulatedFleet):
    """Remembers what it has received."""

    came: list[Replies]

    def receive(self, count: int, within: float, since: int) -> Replies:
        replies = super().receive(count, within, since)
        self.came.append(replies)
        return replies


@dataclass
class World:
    algorithm: Algorithm
    coders: Coders
    clock: VirtualClock
    rng: Generators
    fleet: Listened
    start: Any  # the algorithm's ServerState

    @property
    def came(self) -> list[Replies]:
        """All that clients have said, decoded."""
        return self.fleet.came

    def states(self, state: ServerState | None = None) -> Iterator[Any]:
        """The server after each round, without end."""
        state = state or self.start
        while True:
            state = self.fleet.run(self.algorithm.round(state, self.rng))
            yield state

    def rounds(self, count: int, state: ServerState | None = None) -> list[Any]:
        return list(islice(self.states(state), count))

    def bases(self) -> Tensor:
        bases: Tensor = self.fleet.clients.everybody().base
        return bases

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
    codec: Codec | Codecs | None = None,
    lr: float = 0.1,
    optimizer: Optimizer | None = None,
    speeds: Speeds | float = 1.0,
    latency: float = 0.0,
    link: Link | None = None,
    limited: bool = True,
    unreachable: float = 0.0,
    seed: int = 0,
    **more: Any,
) -> World:
    coders = coders_for(algorithm, codec or Identity())
    rng, clock = Generators(seed), VirtualClock()
    if isinstance(speeds, float):
        speeds = Constant(steady(torch.full((size,), speeds)))
    fleet = Listened(
        task,
        optimizer or sgd(lr),
        algorithm,
        coders,
        clock,
        speeds,
        rng,
        link=link or Link(latency),
        limited=limited,
        unreachable=unreachable,
        **more,
    )
    fleet.came = []
    return World(algorithm, coders, clock, rng, fleet, algorithm.start(*task.initial()))
