"""FedAsync (Xie et al., "Asynchronous Federated Optimization", 2019, Algorithm 1).

All clients train all the time. The server mixes each model that arrives into its own, the less the staler it is.
"""

from dataclasses import dataclass, field, replace
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from quafl.core.client import begin, proximal
from quafl.core.conversation import Round
from quafl.core.defence import NO_DEFENCE, Defence
from quafl.core.messages import Buffers, Message, Model, heard, own, vector
from quafl.core.randomness import Generators
from quafl.core.seams import ClientState, Direction, Records, ServerState
from quafl.core.server import check_settings, next_arrival, proceed


@dataclass(frozen=True, slots=True, kw_only=True)
class Down(Message):
    """Server to client."""

    model: Model = vector(near=own("base"))  # x_t


@dataclass(frozen=True, slots=True, kw_only=True)
class Up(Message):
    """Client to server."""

    model: Model = vector(near=heard("model"))  # x_new


@dataclass(frozen=True, slots=True, kw_only=True)
class Server(ServerState):
    """x_t is `model`."""

    asked: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))


@dataclass(frozen=True, slots=True)
class FedAsync:
    """A round is one answer, after `local_steps` steps. `sampled` clients talk to the server at a time."""

    sampled: int = 5
    local_steps: int = 5
    mixing: float = 0.6  # α
    staleness: float = 0.5  # a, of the polynomial weight (1 + τ)^−a
    proximity: float = 0.0  # ρ: how strongly a local step is pulled to what it started from
    patience: float = inf  # after which a silent client is sent the model once more, and starts anew
    defence: Defence = NO_DEFENCE

    records: ClassVar = Records(ClientState, Server, Down, Up)
    wait: ClassVar[float] = 0.0
    applied: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_settings(self.sampled, self.local_steps, self.patience)
        if not 0 < self.mixing <= 1:
            raise ValueError(
                f"mixing is {self.mixing}, must be above 0 and at most 1 (the client's model replaces the server's)"
            )
        for name, value in ("staleness", self.staleness), ("proximity", self.proximity):
            if not 0 <= value < inf:
                raise ValueError(f"{name} is {value}, must not be negative, and finite")

    # At the server

    def start(self, model: Model, buffers: Buffers) -> Server:
        """x_0."""
        return Server(model=model, buffers=buffers)

    def round(self, server: Server, rng: Generators) -> Round[Server]:
        """x_t = (1 − α_t) x_{t−1} + α_t x_new, α_t = α (1 + t − τ)^−a; x_{t−1} if time has passed for nothing."""
        down = Down(model=server.model, statistics=server.buffers)
        clients, replies, asked = yield from next_arrival(server, down, server.asked, self.patience)
        if not len(replies.senders):
            return replace(server, asked=asked)
        held = self.defence.hold(server, replies, {"model": server.model}, len(clients.present))
        share = self.mixing * float(1 + server.round - replies.round) ** -self.staleness
        return proceed(
            server,
            held.distances,
            votes=held.votes,
            model=torch.lerp(server.model, held.up.model[0], share),
            buffers=torch.lerp(server.buffers, held.up.statistics[0], share),
            asked=asked,
        )

    # At the client

    def newcomer(self, client: ClientState, speed: Tensor) -> ClientState:
        """It does nothing before it is asked."""
        return client

    def hear(self, client: ClientState, down: Down) -> ClientState:
        """x ← x_t, and then K steps."""
        return begin(client, down.model, down.statistics, self.local_steps)

    @property
    def direction(self) -> Direction | None:
        """∇ of f + ρ/2 ‖x − x_t‖²."""
        return proximal(self.proximity)

    def answer(self, client: ClientState, down: Down) -> tuple[Up, ClientState]:
        """x_new; it stays where it began until it is asked again."""
        up = Up(model=client.base - client.progress, statistics=client.buffers)
        return up, begin(client, client.base, client.buffers, 0)

    def lost(self, client: ClientState, up: Up) -> ClientState:
        """The next contact brings all that it needs."""
        return client
