"""Simulated clients that lie: they train like the others, and then something else is sent in their place, encoded with
the algorithm's own codec. They know the server's model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quafl import Simulation
from quafl.core.randomness import derive
from quafl.core.seams import Packet, Replies

LONGEST = 1e6  # displacement of a liar: numbers that stay finite when they are squared


@dataclass(frozen=True)
class Attack:
    """`lie` makes the displacement that is sent, of the boost, the model X_t, the client's own displacement from it and
    a direction of the attacker's choice."""

    lie: Callable[[float, Tensor, Tensor, Tensor], Tensor] = lambda boost, model, own, chance: own
    boosts: tuple[float, ...] = (1.0,)  # the worst one counts
    statistics: float | None = None  # sent in place of the client's
    distance: float | None = None  # likewise
    speed: float | None = None  # likewise
    turned: bool = False  # it has learned 9 − y in place of y
    batch_norm: bool = False  # in a network that has it


class Attacked:
    """A simulated fleet, some of whose clients answer something else."""

    def __init__(self, run: Simulation, liars: Sequence[int], attack: Attack, boost: float, seed: int) -> None:
        self._fleet, self._run, self._up = run._fleet, run, run._codecs.up
        self._liars, self._attack, self._boost = liars, attack, boost
        self._rng = torch.Generator().manual_seed(derive(seed, "attack"))

    @classmethod
    def into(cls, run: Simulation, liars: Sequence[int], attack: Attack, boost: float, seed: int) -> None:
        """Have them lie in this run."""
        run._fleet = cls(run, liars, attack, boost, seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def receive(self, count: int, within: float, since: int) -> Replies:
        replies = self._fleet.receive(count, within, since)
        for row, client in enumerate(replies.senders.tolist()):
            if client in self._liars:
                replies = self._with_lie(replies, row)
        return replies

    def _with_lie(self, replies: Replies, row: int) -> Replies:
        honest, ask = replies.answer[row : row + 1], replies.refine
        vector = self._vector(honest.packet, lambda _, request: ask(row, request))
        exact, attack = honest.packet.exact, self._attack
        if attack.statistics is not None:
            exact = torch.full_like(exact, attack.statistics)
        length = (vector - self._run.server.model if self._up.keyed else vector).norm().reshape(1)
        answer = replace(honest, packet=self._up.encode(vector[None], self._rng, distance=length, exact=exact))
        if attack.distance is not None:
            answer = replace(answer, distance=torch.tensor([attack.distance]))
        if attack.speed is not None:
            answer = replace(answer, speed=torch.tensor([attack.speed]), steps=torch.zeros_like(answer.steps))

        def refine(which: int, request: Packet) -> Packet:
            return self._up.refine(vector, request) if which == row else ask(which, request)

        return replace(replies, answer=replies.answer.with_rows(torch.tensor([row]), answer), refine=refine)

    def _vector(self, packet: Packet, refine: Any) -> Tensor:
        """What is sent in place of what the packet says."""
        model = self._run.server.model
        said = self._up.decode(packet, key=model, refine=refine)[0]
        own = said - model if self._up.keyed else -said  # displacements are sent with the other sign
        lie = self._attack.lie(self._boost, model, own, torch.randn(own.shape, generator=self._rng))
        lie = lie * (LONGEST / lie.norm()).clamp(max=1.0)
        return model + lie if self._up.keyed else -lie
