"""What FedBuff and its relatives share: displacements of clients that train all the time, gathered until there are
enough."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from quafl.core.client import begin
from quafl.core.conversation import Want
from quafl.core.defence import Defence
from quafl.core.messages import Message, Model, own, vector
from quafl.core.pieces import placed
from quafl.core.seams import ClientState, Counts, Ids, ServerState
from quafl.core.server import Turn, next_arrival
from quafl.core.structs import Struct


@dataclass(frozen=True, slots=True, kw_only=True)
class Down(Message):
    """Server to client."""

    model: Model = vector(near=own("base"))  # w^t; the client knows what it heard last


@dataclass(frozen=True, slots=True, kw_only=True)
class Up(Message):
    """Client to server."""

    displacement: Model = vector(near=None)  # Δ_i


@dataclass(frozen=True, slots=True)
class Gathered(Struct):
    """What waits in the buffer, a row per place."""

    senders: Ids
    up: Up  # with its weight
    distances: Mapping[str, Tensor]
    ages: Counts  # τ_i: rounds since the client was sent the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Server(ServerState):
    """w^t is `model`."""

    buffer: Gathered | None = None
    asked: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))


Weigh: TypeAlias = Callable[[Counts], Tensor]  # the weights of displacements of these ages


def alike(ages: Counts) -> Tensor:
    """All count 1."""
    return torch.ones(len(ages))


class Filling(NamedTuple):
    """What comes of `gather`."""

    buffer: Gathered | None
    full: bool
    asked: Tensor
    size: int  # n
    there: int  # clients that the server sees


def gather(
    server: Server, down: Message, places: int, patience: float, defence: Defence, weigh: Weigh = alike
) -> Generator[Want, Any, Filling]:
    """Displacements until the buffer is full, or until time has passed for nothing.

    Where displacements are bounded, a client has one place, and there are no more places than clients.
    """
    kept, asked = server.buffer, server.asked
    buffer = [] if kept is None else [kept[row : row + 1] for row in range(len(kept.senders))]
    while True:
        turn: Turn = yield from next_arrival(server, down, asked, patience)
        asked, there, replies = turn.asked, len(turn.clients.present), turn.replies
        ages = server.round - replies.round
        weight = placed(weigh(ages).unsqueeze(-1), replies.up.displacement.device)
        weighed = replace(replies.up, displacement=weight * replies.up.displacement)
        buffer = _put(buffer, Gathered(replies.senders, weighed, replies.distances, ages), alone=defence.bounded)
        full = len(buffer) >= (max(1, min(places, there)) if defence.bounded else places)
        if full or not len(replies.senders):
            return Filling(Gathered.join(buffer) if buffer else None, full, asked, turn.clients.size, there)


def _put(buffer: list[Gathered], new: Gathered, *, alone: bool) -> list[Gathered]:
    """A reply, if there is one, into the buffer. Where a client has one place, what it sends while it has one is added
    to it, or the fastest would fill the buffer by itself."""
    mine = [row for row in buffer if alone and torch.equal(row.senders, new.senders)]
    if not mine:
        return [*buffer, new] if len(new.senders) else buffer
    total = mine[0].up.displacement + new.up.displacement
    both = replace(new, up=replace(new.up, displacement=total))
    return [both if row is mine[0] else row for row in buffer]


# At the client


class Clients:
    """Their side."""

    __slots__ = ()
    local_steps: int
    direction: ClassVar[None] = None
    applied: ClassVar[None] = None

    def newcomer(self, client: ClientState, speed: Tensor) -> ClientState:
        """It does nothing before it is asked."""
        return client

    def hear(self, client: ClientState, down: Down) -> ClientState:
        """y_0 ← w^t, and then K steps."""
        return begin(client, down.model, down.statistics, self.local_steps)

    def answer(self, client: ClientState, down: Down) -> tuple[Up, ClientState]:
        """Δ_i = w^t − y_K, what it started from less where it stands."""
        up = Up(displacement=client.progress, statistics=client.buffers)
        return up, begin(client, client.base, client.buffers, 0)

    def lost(self, client: ClientState, up: Up) -> ClientState:
        """The next contact brings all that it needs."""
        return client
