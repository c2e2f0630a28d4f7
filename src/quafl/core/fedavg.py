"""FedAvg (McMahan et al., 2017, Algorithm 1), with a fixed number of local steps, as in the paper's comparison.

The sequential Baseline is FedAvg on one slow client that holds all the data: K = 1, s = 1, no interaction time.
"""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from torch import Tensor

from quafl.core.client import begin
from quafl.core.conversation import Clients, Look, Round
from quafl.core.defence import NO_DEFENCE, Defence
from quafl.core.messages import Buffers, Message, Model, heard, own, vector
from quafl.core.randomness import Generators
from quafl.core.seams import ClientState, Records, ServerState
from quafl.core.server import check_settings, exchange, mean_or, proceed


@dataclass(frozen=True, slots=True, kw_only=True)
class Down(Message):
    """Server to client."""

    model: Model = vector(near=own("base"))  # w_t


@dataclass(frozen=True, slots=True, kw_only=True)
class Up(Message):
    """Client to server."""

    model: Model = vector(near=heard("model"))  # w^k


@dataclass(frozen=True, slots=True)
class FedAvg:
    """Each round, `sampled` clients start from the server's model, take exactly `local_steps` steps, and the server
    adopts the mean of what they send back. The round lasts as long as the slowest of them, plus the exchange."""

    sampled: int = 5
    local_steps: int = 5
    patience: float = inf  # how long the server waits for answers
    defence: Defence = NO_DEFENCE

    records: ClassVar = Records(ClientState, ServerState, Down, Up)
    wait: ClassVar[float] = 0.0
    direction: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_settings(self.sampled, self.local_steps, self.patience)

    # At the server

    def start(self, model: Model, buffers: Buffers) -> ServerState:
        """w_0."""
        return ServerState(model=model, buffers=buffers)

    def round(self, server: ServerState, rng: Generators) -> Round[ServerState]:
        """w_{t+1} = Σ w^k/m over the m clients that answered; w_t if nobody did."""
        clients: Clients = yield Look()
        down = Down(model=server.model, statistics=server.buffers)
        replies = yield from exchange(server, down, clients, self.sampled, self.patience, rng)
        held = self.defence.hold(server, replies, {"model": server.model}, len(clients.present))
        return proceed(
            server,
            held.distances,
            votes=held.votes,
            model=mean_or(server.model, held.up.model),
            buffers=mean_or(server.buffers, held.up.statistics),
        )

    # At the client

    def newcomer(self, client: ClientState, speed: Tensor) -> ClientState:
        """It does nothing before it is asked."""
        return client

    def hear(self, client: ClientState, down: Down) -> ClientState:
        """w^k ← w_t, and then K steps."""
        return begin(client, down.model, down.statistics, self.local_steps)

    def answer(self, client: ClientState, down: Down) -> tuple[Up, ClientState]:
        """w^k after the local steps; it stays there until it is asked again."""
        up = Up(model=client.base - client.progress, statistics=client.buffers)
        return up, begin(client, client.base, client.buffers, 0)

    def lost(self, client: ClientState, up: Up) -> ClientState:
        """The next contact brings all that it needs."""
        return client
