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
from quafl.core.defence import NO_DEFENCE, Defence, Heard
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
    defence: Defence = NO_DEFENCE

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
        buffer = _kept(state)
        while True:
            available = fleet.available()
            idle = _idle(asked, available, clock.now() - self.patience)
            if len(idle):  # line 2: they start from the current w^t
                tell(state, idle, fleet, codecs, rng, Note(round=state.round, sampled=self.sampled, slowest=inf))
                asked = asked.index_fill(0, idle, clock.now())
            replies = fleet.receive(1, within=self.patience, since=0)  # line 4
            asked = asked.index_fill(0, replies.failed, -inf).index_fill(0, replies.senders, -inf)
            if not len(replies.senders) and self.patience == inf:  # nobody will answer what they were sent
                asked = torch.full_like(asked, -inf)
            decoded = codecs.up.decode(replies.answer.packet, key=state.model, refine=replies.refine)
            weighted = self._weights(state, replies).to(decoded.device) * decoded
            heard = Heard(replies.senders, weighted, replies.answer.packet.exact, torch.zeros(len(decoded)))
            buffer = self._put(buffer, heard)  # line 6
            if len(buffer) >= self._places(len(available)):
                state = self._applied(state, Heard.join(buffer), there=len(available))
                buffer = []
            if not buffer or not len(replies.senders):  # a round is over, or time has passed for nothing
                state = replace(state, extra={**state.extra, "asked": asked, **_extra(buffer, heard)})
                yield state

    def _places(self, there: int) -> int:
        """In the buffer: s, but no more than there are clients where each has one place."""
        return max(1, min(self.sampled, there)) if self.defence.bounded else self.sampled

    def _applied(self, state: ServerState, buffer: Heard, there: int) -> ServerState:
        """w^{t+1} = w^t − η_g/s Σ s(τ_i) Δ_i, added up in order of arrival (lines 9-10)."""
        held, votes = self.defence.hold(state, buffer, state.model.new_zeros(()).expand_as(state.model), there=there)
        total = sum(held.vectors, torch.zeros_like(state.model))
        statistics = sum(held.statistics, torch.zeros_like(state.buffers))
        return ServerState(
            model=state.model - self.server_lr / len(held.senders) * total,
            buffers=statistics / len(held.senders),
            round=state.round + 1,
            extra=votes,
        )

    def _put(self, buffer: list[Heard], heard: Heard) -> list[Heard]:
        """A reply, if there is one, into the buffer. Where displacements are bounded, a client has one place: what it
        sends while it has one is added to it, or the fastest would fill the buffer by itself."""
        mine = [row for row in buffer if self.defence.bounded and torch.equal(row.senders, heard.senders)]
        if not mine:
            return [*buffer, heard] if len(heard.senders) else buffer
        both = replace(heard, vectors=mine[0].vectors + heard.vectors)
        return [both if row is mine[0] else row for row in buffer]

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


def _kept(state: ServerState) -> list[Heard]:
    """The buffer that a state was left with."""
    if "senders" not in state.extra:
        return []
    senders, vectors, statistics = (state.extra[name] for name in ("senders", "buffer", "exact"))
    rows = Heard(senders, vectors, statistics, torch.zeros(len(senders)))
    return [rows[place : place + 1] for place in range(len(senders))]


def _extra(buffer: list[Heard], empty: Heard) -> dict[str, Tensor]:
    """The buffer, for `_kept`."""
    rows = Heard.join(buffer) if buffer else empty[:0].each(torch.clone)  # not a view that keeps a whole row
    return {"senders": rows.senders, "buffer": rows.vectors, "exact": rows.statistics}


def _idle(asked: Tensor, available: Ids, before: float) -> Ids:
    """Clients present that have nothing to do, as far as the server knows: never asked, answered, or silent since."""
    return available[asked[available] <= before] if before > -inf else available[asked[available] == -inf]
