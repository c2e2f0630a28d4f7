"""Simulated clients that lie: they train like the others, and then something else is said in their place. They know the
server's model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quafl import Simulation
from quafl.core.conversation import Replies
from quafl.core.messages import Heard, Vector
from quafl.core.randomness import derive

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
    """Some clients of a simulated fleet answer something else."""

    def __init__(self, run: Simulation, liars: Sequence[int], attack: Attack, boost: float, seed: int) -> None:
        self._honest, self._run = run._fleet.receive, run
        self._liars, self._attack, self._boost = liars, attack, boost
        self._rng = torch.Generator().manual_seed(derive(seed, "attack"))

    @classmethod
    def into(cls, run: Simulation, liars: Sequence[int], attack: Attack, boost: float, seed: int) -> None:
        """Have them lie in this run."""
        run._fleet.receive = cls(run, liars, attack, boost, seed).receive  # type: ignore[method-assign]

    def receive(self, count: int, within: float, since: int) -> Replies:
        """What the fleet has received, with the lies."""
        replies = self._honest(count, within, since)
        for row, client in enumerate(replies.senders.tolist()):
            if client in self._liars:
                replies = self._with_lie(replies, torch.tensor([row]))
        return replies

    def _with_lie(self, replies: Replies, row: Tensor) -> Replies:
        up, attack = replies.up, self._attack
        said = {one.name: self._vector(getattr(up, one.name)[row], one)[0] for one in up.vectors()}
        if attack.statistics is not None:
            said["statistics"] = torch.full_like(up.statistics[0], attack.statistics)
        distances, steps = dict(replies.distances), replies.steps
        if attack.distance is not None:
            distances = {name: told.index_fill(0, row, attack.distance) for name, told in distances.items()}
        if attack.speed is not None:
            steps = steps.index_fill(0, row, 0)
            if hasattr(up, "speed"):
                said["speed"] = torch.full_like(up.speed[0], attack.speed)
        lied = {name: getattr(up, name).index_copy(0, row, value[None]) for name, value in said.items()}
        return replace(replies, up=replace(up, **lied), distances=distances, steps=steps)

    def _vector(self, said: Tensor, declared: Vector) -> Tensor:
        """What is sent in place of an honest vector."""
        model = self._run.server.model
        whole = isinstance(declared.near, Heard)
        own = said - model if whole else -said  # displacements are sent with the other sign
        lie = self._attack.lie(self._boost, model, own, torch.randn(own.shape, generator=self._rng))
        lie = lie.expand_as(own) * torch.clamp(LONGEST / lie.norm(), max=1.0)
        return model + lie if whole else -lie
