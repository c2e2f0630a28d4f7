"""FedBuff (Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", 2022, Algorithm 1).

All clients train all the time. One that has finished sends how far it has come and starts again from the server's
current model; the server moves whenever its buffer is full.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Literal

import torch
from torch import Tensor

from quafl.core.client import rebase
from quafl.core.randomness import Generators
from quafl.core.rows import lengthened
from quafl.core.seams import Buffers, ClientState, Clock, Codecs, Counts, Fleet, Ids, Model, Note, Replies, ServerState
from quafl.core.server import check_settings, tell


@dataclass(frozen=True, slots=True)
class FedBuff:
    """A round is one filling of the buffer with `sampled` displacements, after `local_steps` steps each."""

    sampled: int = 5
    local_steps: int = 5
    server_lr: float = 1.0  # η_g
    staleness: bool = False  # weigh a displacement that is τ rounds old by 1/√(1+τ)
    patience: float = inf  # after which a silent client is sent the model once more, and starts anew

    answers: ClassVar[Literal["at once", "when done"]] = "when done"
    wait: ClassVar[float] = 0.0
    compressed: ClassVar[Literal["both ways", "uplink"]] = "uplink"

    def __post_init__(self) -> None:
        check_settings(self.sampled, self.local_steps, self.patience)
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
        asked = lengthened(state.extra.get("asked", torch.empty(0, dtype=torch.float64)), fleet.size, -inf)
        buffer = state.extra.get("buffer", torch.zeros_like(state.model))  # Σ s(τ_i) Δ_i
        exact = state.extra.get("exact", torch.zeros_like(state.buffers))
        filled = int(state.extra.get("filled", 0))
        while True:
            idle = _idle(asked, fleet.available(), clock.now() - self.patience)
            if len(idle):  # line 2: they start from the current w^t
                tell(state, idle, fleet, codecs, rng, Note(round=state.round, sampled=self.sampled, slowest=inf))
                asked = asked.index_fill(0, idle, clock.now())
            replies = fleet.receive(1, within=self.patience, since=0)  # line 4
            asked = asked.index_fill(0, replies.failed, -inf).index_fill(0, replies.senders, -inf)
            if not len(replies.senders) and self.patience == inf:  # nobody will answer what they were sent
                asked = torch.full_like(asked, -inf)
            decoded = codecs.up.decode(replies.answer.packet, key=state.model, refine=replies.refine)
            buffer = buffer + (self._weights(state, replies).to(decoded.device) * decoded).sum(dim=0)  # line 6
            exact = exact + replies.answer.packet.exact.sum(dim=0)
            filled += len(replies.senders)
            if filled == self.sampled:
                model = state.model - self.server_lr / self.sampled * buffer  # lines 9-10
                state = ServerState(model=model, buffers=exact / self.sampled, round=state.round + 1)
                buffer, exact, filled = torch.zeros_like(buffer), torch.zeros_like(exact), 0
            if filled == 0 or not len(replies.senders):  # a round is over, or time has passed for nothing
                extra = {"asked": asked, "buffer": buffer, "exact": exact, "filled": torch.tensor(filled)}
                state = replace(state, extra=extra)
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
