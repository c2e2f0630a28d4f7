"""FedNova (Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", 2020).

Clients take different numbers of local steps; each one's displacement is divided by its number before averaging, so
that those who took more do not pull the model towards their own minimum.
"""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from quafl.core.client import begin
from quafl.core.conversation import Clients, Look, Replies, Round
from quafl.core.defence import NO_DEFENCE, Defence
from quafl.core.messages import Buffers, Message, Model, heard, own, vector
from quafl.core.pieces import placed
from quafl.core.randomness import Generators
from quafl.core.seams import ClientState, Counts, Records, ServerState
from quafl.core.server import check_settings, exchange, mean_or, proceed


@dataclass(frozen=True, slots=True, kw_only=True)
class Down(Message):
    """Server to client."""

    model: Model = vector(near=own("base"))  # x^(t,0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Up(Message):
    """Client to server."""

    model: Model = vector(near=heard("model"))  # x_i^(t,τ_i)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client(ClientState):
    """A client that knows how fast it is."""

    pace: Counts  # τ_i


@dataclass(frozen=True, slots=True)
class FedNova:
    """Rounds as in FedAvg, but client i takes τ_i steps: `local_steps` (K) if it is the fastest, fewer in proportion if
    it is slower, at least one."""

    sampled: int = 5
    local_steps: int = 5
    patience: float = inf  # how long the server waits for answers
    defence: Defence = NO_DEFENCE

    records: ClassVar = Records(Client, ServerState, Down, Up)
    wait: ClassVar[float] = 0.0
    direction: ClassVar[None] = None
    applied: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_settings(self.sampled, self.local_steps, self.patience)

    # At the server

    def start(self, model: Model, buffers: Buffers) -> ServerState:
        """x^(0,0)."""
        return ServerState(model=model, buffers=buffers)

    def round(self, server: ServerState, rng: Generators) -> Round[ServerState]:
        """From x^(t,0) to x^(t+1,0)."""
        clients: Clients = yield Look()
        down = Down(model=server.model, statistics=server.buffers)
        replies = yield from exchange(server, down, clients, self.sampled, self.patience, rng)
        held = self.defence.hold(server, replies, {"model": server.model}, len(clients.present), unit=_steps(replies))
        return proceed(
            server,
            held.distances,
            votes=held.votes,
            model=_normalised_mean(server.model, held.up.model, _steps(replies)),
            buffers=mean_or(server.buffers, held.up.statistics),
        )

    # At the client

    def newcomer(self, client: ClientState, speed: Tensor) -> Client:
        """τ_i = max(1, round(K·speed)). It does nothing before it is asked."""
        return Client.extending(client, pace=(self.local_steps * speed).round().clamp(min=1).to(torch.int64))

    def hear(self, client: Client, down: Down) -> Client:
        """x_i^(t,0) ← x^(t,0), and then τ_i steps."""
        return begin(client, down.model, down.statistics, client.pace)

    def answer(self, client: Client, down: Down) -> tuple[Up, Client]:
        """x_i^(t,τ_i); it stays where it began until it is asked again."""
        up = Up(model=client.base - client.progress, statistics=client.buffers)
        return up, begin(client, client.base, client.buffers, 0)

    def lost(self, client: Client, up: Up) -> Client:
        """The next contact brings all that it needs."""
        return client


def _normalised_mean(mine: Model, theirs: Model, steps: Tensor) -> Model:
    """x^(t+1,0) = x^(t,0) − τ_eff Σ p_i η d_i with η d_i = (x^(t,0) − x_i^(t,τ_i))/τ_i, τ_eff = Σ p_i τ_i and p_i = 1/m
    (equations 5 and 7, with ‖a_i‖₁ = τ_i, which is local SGD's)."""
    if not len(theirs):
        return mine
    directions = (mine - theirs) / steps
    return mine - steps.float().mean() * directions.mean(dim=0)


def _steps(replies: Replies) -> Tensor:
    """τ_i, a column; one at least, whatever somebody says."""
    return placed(replies.steps.clamp(min=1).unsqueeze(-1), replies.up.statistics.device)
