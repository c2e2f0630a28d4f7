"""FedBuff (Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", 2022, Algorithm 1).

All clients train all the time. One that has finished sends how far it has come and starts again from the server's
current model; the server moves whenever its buffer is full.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from quafl.core.client import begin
from quafl.core.conversation import Replies, Round
from quafl.core.defence import NO_DEFENCE, Defence
from quafl.core.messages import Buffers, Message, Model, own, vector
from quafl.core.pieces import zeros
from quafl.core.randomness import Generators
from quafl.core.seams import ClientState, Ids, Records, ServerState
from quafl.core.server import Turn, check_settings, next_arrival, proceed
from quafl.core.structs import Struct


@dataclass(frozen=True, slots=True, kw_only=True)
class Down(Message):
    """Server to client."""

    model: Model = vector(near=own("base"), compressed=False)  # w^t; the paper compresses the way up alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Up(Message):
    """Client to server."""

    displacement: Model = vector(near=None)  # Δ_i


@dataclass(frozen=True, slots=True)
class Buffered(Struct):
    """What waits in the buffer, a row per place."""

    senders: Ids
    up: Up  # with s(τ_i) Δ_i
    distances: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server(ServerState):
    """w^t is `model`."""

    buffer: Buffered | None = None
    asked: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))


@dataclass(frozen=True, slots=True)
class FedBuff:
    """A round is one filling of the buffer with `sampled` displacements, after `local_steps` steps each."""

    sampled: int = 5
    local_steps: int = 5
    server_lr: float = 1.0  # η_g
    staleness: bool = False  # weigh a displacement that is τ rounds old by 1/√(1+τ)
    patience: float = inf  # after which a silent client is sent the model once more, and starts anew
    defence: Defence = NO_DEFENCE

    records: ClassVar = Records(ClientState, Server, Down, Up)
    wait: ClassVar[float] = 0.0
    direction: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_settings(self.sampled, self.local_steps, self.patience)
        if not self.server_lr > 0:
            raise ValueError(f"server_lr is {self.server_lr}, must be positive")

    # At the server

    def start(self, model: Model, buffers: Buffers) -> Server:
        """w^0, with an empty buffer."""
        return Server(model=model, buffers=buffers)

    def round(self, server: Server, rng: Generators) -> Round[Server]:
        """From w^t to w^{t+1}; to w^t, with what the buffer then has, if time has passed for nothing."""
        kept = server.buffer
        buffer = [] if kept is None else [kept[row : row + 1] for row in range(len(kept.senders))]
        asked, down = server.asked, Down(model=server.model, statistics=server.buffers)
        while True:
            turn: Turn = yield from next_arrival(server, down, asked, self.patience)  # lines 2 and 4
            asked, there = turn.asked, len(turn.clients.present)
            buffer = self._put(buffer, self._weighed(server, turn.replies))  # line 6
            if len(buffer) >= self._places(there):
                return replace(self._applied(server, Buffered.join(buffer), there), asked=asked)
            if not len(turn.replies.senders):
                return replace(server, asked=asked, buffer=Buffered.join(buffer) if buffer else None)

    def _places(self, there: int) -> int:
        """In the buffer: s, but no more than there are clients where each has one place."""
        return max(1, min(self.sampled, there)) if self.defence.bounded else self.sampled

    def _applied(self, server: Server, buffer: Buffered, there: int) -> Server:
        """w^{t+1} = w^t − η_g/s Σ s(τ_i) Δ_i, added up in order of arrival (lines 9-10)."""
        held = self.defence.hold(server, buffer, {"displacement": zeros(server.model)}, there)
        total = sum(held.up.displacement, torch.zeros_like(server.model))
        statistics = sum(held.up.statistics, torch.zeros_like(server.buffers))
        return proceed(
            server,
            held.distances,
            votes=held.votes,
            model=server.model - self.server_lr / len(buffer.senders) * total,
            buffers=statistics / len(buffer.senders),
            buffer=None,
        )

    def _put(self, buffer: list[Buffered], new: Buffered) -> list[Buffered]:
        """A reply, if there is one, into the buffer. Where displacements are bounded, a client has one place: what it
        sends while it has one is added to it, or the fastest would fill the buffer by itself."""
        mine = [row for row in buffer if self.defence.bounded and torch.equal(row.senders, new.senders)]
        if not mine:
            return [*buffer, new] if len(new.senders) else buffer
        total = mine[0].up.displacement + new.up.displacement
        both = replace(new, up=replace(new.up, displacement=total))
        return [both if row is mine[0] else row for row in buffer]

    def _weighed(self, server: Server, replies: Replies) -> Buffered:
        """With weight s(τ) = 1/√(1+τ), where τ is how many rounds ago the client started (section 3.2)."""
        age = server.round - replies.round
        weight = (1 + age).float().rsqrt().unsqueeze(-1) if self.staleness else torch.ones(len(age), 1)
        weighed = weight.to(replies.up.displacement.device) * replies.up.displacement
        return Buffered(replies.senders, replace(replies.up, displacement=weighed), replies.distances)

    # At the client

    def newcomer(self, client: ClientState, speed: Tensor) -> ClientState:
        """It does nothing before it is asked."""
        return client

    def hear(self, client: ClientState, down: Down) -> ClientState:
        """y_0 ← w^t, and then K steps."""
        return begin(client, down.model, down.statistics, self.local_steps)

    def answer(self, client: ClientState, down: Down) -> tuple[Up, ClientState]:
        """Δ_i = w^t − y_K, what it started from less where it stands (Algorithm 2)."""
        up = Up(displacement=client.progress, statistics=client.buffers)
        return up, begin(client, client.base, client.buffers, 0)

    def lost(self, client: ClientState, up: Up) -> ClientState:
        """The next contact brings all that it needs."""
        return client
