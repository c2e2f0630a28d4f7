"""FedBuff (Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", 2022, Algorithm 1).

All clients train all the time. One that has finished sends how far it has come and starts again from the server's
current model; the server moves whenever its buffer is full.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal

import torch
from torch import Tensor

from quafl.core.client import rebase
from quafl.core.randomness import Generators
from quafl.core.seams import Buffers, ClientState, Clock, Codecs, Counts, Fleet, Ids, Model, Note, Replies, ServerState
from quafl.core.server import check_counts, tell


@dataclass(frozen=True, slots=True)
class FedBuff:
    """A round is one filling of the buffer with `sampled` displacements, after `local_steps` steps each."""

    sampled: int = 5
    local_steps: int = 5
    server_lr: float = 1.0  # η_g
    staleness: bool = False  # weigh a displacement that is τ rounds old by 1/√(1+τ)
    patience: float = inf  # after which a silent client is sent the model once more

    answers: ClassVar[Literal["at once", "when done"]] = "when done"
    compressed: ClassVar[Literal["both ways", "uplink"]] = "uplink"

    def __post_init__(self) -> None:
        check_counts(self.sampled, self.local_steps)
        if not self.server_lr > 0:
            raise ValueError(f"server_lr is {self.server_lr}, must be positive")

    # At the server

    def budget(self, speed: Tensor) -> Counts:
        """K, whoever it is."""
        return torch.full(speed.shape, self.local_steps)

    def rounds(
        self, state: ServerState, fleet: Fleet, codecs: Codecs, clock: Clock, rng: Generators
    ) -> Iterator[ServerState]:
        """w^0, w^1, …: one state a round, from the one given on."""
        asked = state.extra.get("asked", torch.full((fleet.size,), -inf, dtype=torch.float64))
        while True:
            total, exact = torch.zeros_like(state.model), list[Buffers]()
            while len(exact) < self.sampled:
                idle = _idle(asked, fleet.available(), clock.now() - self.patience)
                if len(idle):  # line 2: they start from the current w^t
                    tell(state, idle, fleet, codecs, rng, Note(round=state.round, sampled=self.sampled, slowest=inf))
                    asked = asked.index_fill(0, idle, clock.now())
                replies = fleet.receive(1, within=self.patience, since=0)  # line 4
                asked = asked.index_fill(0, replies.failed, -inf)
                if not len(replies.senders):  # nobody will answer what they were sent
                    asked = torch.full_like(asked, -inf)
                    continue
                decoded = codecs.up.decode(replies.answer.packet, key=state.model, refine=replies.refine)
                total += (self._weights(state, replies) * decoded).sum(dim=0)  # line 6
                exact.append(replies.answer.packet.exact)
                asked = asked.index_fill(0, replies.senders, -inf)
            state = ServerState(
                model=state.model - self.server_lr / self.sampled * total,  # lines 9-10
                buffers=torch.cat(exact).mean(dim=0),
                round=state.round + 1,
                extra={"asked": asked},
            )
            yield state

    def _weights(self, state: ServerState, replies: Replies) -> Tensor:
        """s(τ) = 1/√(1+τ), where τ is how many rounds ago the client started (section 3.2)."""
        age = state.round - replies.answer.round
        return (1 + age).float().rsqrt().unsqueeze(-1) if self.staleness else torch.ones(len(age), 1)

    # At the client

    def report(self, client: ClientState, note: Note) -> Model:
        """Δ_i = w^t − y_Q, what it started from less where it stands (Algorithm 2)."""
        return client.progress

    def adopt(self, client: ClientState, model: Model, buffers: Buffers, note: Note) -> ClientState:
        """y_0 ← w^t."""
        return rebase(client, model, buffers)


def _idle(asked: Tensor, available: Ids, before: float) -> Ids:
    """Clients present that have nothing to do, as far as the server knows: never asked, answered, or silent since."""
    return available[asked[available] <= before] if before > -inf else available[asked[available] == -inf]
