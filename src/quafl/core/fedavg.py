"""FedAvg (McMahan et al., 2017, Algorithm 1), with a fixed number of local steps, as in the paper's comparison.

With a proximal term at the clients it is FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", 2020),
with momentum or Adam at the server FedOpt (Reddi et al., "Adaptive Federated Optimization", 2021). The sequential
Baseline is FedAvg on one slow client that holds all the data: K = 1, s = 1, no interaction time.
"""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from quafl.core.client import begin, proximal
from quafl.core.conversation import Clients, Look, Round
from quafl.core.defence import NO_DEFENCE, Defence
from quafl.core.descent import Descent
from quafl.core.messages import Buffers, Message, Model, heard, number, own, vector
from quafl.core.randomness import Generators
from quafl.core.seams import ClientState, Counts, Direction, OptimizerState, Records, ServerState
from quafl.core.server import check_server_lr, check_settings, exchange, mean_or, proceed

MOST = 2**40  # examples that anybody may say to have


@dataclass(frozen=True, slots=True, kw_only=True)
class Down(Message):
    """Server to client."""

    model: Model = vector(near=own("base"))  # w_t


@dataclass(frozen=True, slots=True, kw_only=True)
class Up(Message):
    """Client to server."""

    model: Model = vector(near=heard("model"))  # w^k


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedUp(Up):
    """The same, from a client that says how much it has learned from."""

    examples: Tensor = number(low=1, high=MOST)  # n_k


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedClient(ClientState):
    """A client that knows how many examples it has."""

    examples: Counts  # n_k


@dataclass(frozen=True, slots=True, kw_only=True)
class Server(ServerState):
    """w_t is `model`."""

    descent: OptimizerState = ()


PLAIN = Records(ClientState, Server, Down, Up)
COUNTED = Records(CountedClient, Server, Down, CountedUp)


@dataclass(frozen=True, slots=True)
class FedAvg:
    """Each round, `sampled` clients start from the server's model, take exactly `local_steps` steps, and the server
    adopts the mean of what they send back, or moves towards it. The round lasts as long as the slowest of them, plus
    the exchange. If `weighted`, clients tell how many examples they have, and count by that."""

    sampled: int = 5
    local_steps: int = 5
    proximity: float = 0.0  # μ: how strongly a local step is pulled to what it started from
    server_lr: float = 1.0  # η, where the server does not just adopt the mean
    server: Descent | None = None  # how it then moves
    patience: float = inf  # how long the server waits for answers
    defence: Defence = NO_DEFENCE
    weighted: bool = False  # clients count by their numbers of examples, as in the paper; else alike

    wait: ClassVar[float] = 0.0
    applied: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_settings(self.sampled, self.local_steps, self.patience)
        check_server_lr(self.server_lr)
        if not 0 <= self.proximity < inf:
            raise ValueError(f"proximity is {self.proximity}, must not be negative, and finite")
        if self.server is None and self.server_lr != 1:
            raise ValueError(
                f"server_lr is {self.server_lr}, must be 1 where the server adopts the mean; give a server"
            )

    @property
    def records(self) -> Records:
        """Numbers of examples are told where they count."""
        return COUNTED if self.weighted else PLAIN

    # At the server

    def start(self, model: Model, buffers: Buffers) -> Server:
        """w_0."""
        return Server(model=model, buffers=buffers, descent=() if self.server is None else self.server.init(model))

    def round(self, server: Server, rng: Generators) -> Round[Server]:
        """w_{t+1} = Σ w^k/m over the m clients that answered; if weighted, Σ n_k w^k / Σ n_k; w_t if nobody did."""
        clients: Clients = yield Look()
        down = Down(model=server.model, statistics=server.buffers)
        replies = yield from exchange(server, down, clients, self.sampled, self.patience, rng)
        held = self.defence.hold(server, replies, {"model": server.model}, len(clients.present))
        weights = self.defence.usual_at_most(held.up.examples) if self.weighted else None
        model, descent = self._moved(server, mean_or(server.model, held.up.model, weights))
        return proceed(
            server,
            held.distances,
            votes=held.votes,
            model=model,
            descent=descent,
            buffers=mean_or(server.buffers, held.up.statistics, weights),
        )

    def _moved(self, server: Server, mean: Model) -> tuple[Model, OptimizerState]:
        """To the mean; or along w_t − mean, by FedOpt's ServerOpt (Algorithm 1)."""
        if self.server is None:
            return mean, ()
        step, descent = self.server.update(server.model - mean, server.descent)
        return server.model - self.server_lr * step, descent

    # At the client

    def newcomer(self, client: ClientState, speed: Tensor) -> ClientState:
        """It does nothing before it is asked."""
        return CountedClient.extending(client, examples=torch.ones_like(client.steps)) if self.weighted else client

    def hear(self, client: ClientState, down: Down) -> ClientState:
        """w^k ← w_t, and then K steps."""
        return begin(client, down.model, down.statistics, self.local_steps)

    @property
    def direction(self) -> Direction | None:
        """∇ of f + μ/2 ‖w − w_t‖² (FedProx, equation 2)."""
        return proximal(self.proximity)

    def answer(self, client: ClientState, down: Down) -> tuple[Up, ClientState]:
        """w^k after the local steps; it stays there until it is asked again."""
        up = Up(model=client.base - client.progress, statistics=client.buffers)
        if isinstance(client, CountedClient):
            up = CountedUp.extending(up, examples=client.examples.double())
        return up, begin(client, client.base, client.buffers, 0)

    def lost(self, client: ClientState, up: Up) -> ClientState:
        """The next contact brings all that it needs."""
        return client
