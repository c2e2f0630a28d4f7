"""SCAFFOLD (Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", 2020, Algorithm 1).

Each client and the server keep a control variate: how the gradient at the client, and in the mean over all clients,
usually points. Local steps are corrected by their difference, so that clients do not drift to their own minima.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from quafl.core.client import begin
from quafl.core.conversation import Clients, Look, Round
from quafl.core.defence import NO_DEFENCE, SLACK, Defence
from quafl.core.messages import Buffers, Message, Model, heard, number, own, vector
from quafl.core.pieces import zeros
from quafl.core.randomness import Generators
from quafl.core.seams import ClientState, Records, ServerState
from quafl.core.server import check_settings, exchange, mean_or, proceed


@dataclass(frozen=True, slots=True, kw_only=True)
class Down(Message):
    """Server to client."""

    model: Model = vector(near=own("base"))  # x
    control: Model = vector(near=own("common"))  # c
    longest: Tensor = number(low=0)  # that Δc_i may be


@dataclass(frozen=True, slots=True, kw_only=True)
class Up(Message):
    """Client to server."""

    model: Model = vector(near=heard("model"))  # y_i
    change: Model = vector(near=None)  # Δc_i


@dataclass(frozen=True, slots=True, kw_only=True)
class Client(ClientState):
    """y_i is the local model."""

    control: Model  # c_i
    common: Model  # c, as it was heard last


@dataclass(frozen=True, slots=True, kw_only=True)
class Server(ServerState):
    """x is `model`."""

    control: Model  # c


@dataclass(frozen=True, slots=True)
class SCAFFOLD:
    """Rounds as in FedAvg. The clients' optimizer must be SGD with this learning rate `lr` (η_l), which says what
    gradient a displacement stands for."""

    sampled: int = 5
    local_steps: int = 5
    lr: float = 0.1  # η_l
    server_lr: float = 1.0  # η_g
    patience: float = inf  # how long the server waits for answers
    defence: Defence = NO_DEFENCE

    records: ClassVar = Records(Client, Server, Down, Up)
    wait: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        check_settings(self.sampled, self.local_steps, self.patience)
        for name, value in ("lr", self.lr), ("server_lr", self.server_lr):
            if not 0 < value < inf:
                raise ValueError(f"{name} is {value}, must be positive and finite")

    # At the server

    def start(self, model: Model, buffers: Buffers) -> Server:
        """x_0, and c = 0."""
        return Server(model=model, buffers=buffers, control=torch.zeros_like(model))

    def round(self, server: Server, rng: Generators) -> Round[Server]:
        """x ← x + η_g/|S| Σ (y_i − x), c ← c + 1/N Σ Δc_i (lines 16-17)."""
        clients: Clients = yield Look()
        longest = self._longest(server, len(clients.present))
        down = Down(
            model=server.model,
            control=server.control,
            statistics=server.buffers,
            longest=torch.tensor(longest, dtype=torch.float64),
        )
        replies = yield from exchange(server, down, clients, self.sampled, self.patience, rng)
        near = {"model": server.model, "change": zeros(server.model)}
        held = self.defence.hold(server, replies, near, len(clients.present))
        mean, changes = mean_or(server.model, held.up.model), held.up.change
        if self.defence.mean == "mean":  # as both ends move them; a robust mean is nobody's
            changes = replies.up.change[replies.up.change.norm(dim=-1) <= SLACK * longest]
        return proceed(
            server,
            held.distances,
            votes=held.votes,
            model=mean if self.server_lr == 1 else torch.lerp(server.model, mean, self.server_lr),
            control=server.control + changes.sum(dim=0) / max(clients.size, 1),
            buffers=mean_or(server.buffers, held.up.statistics),
        )

    def _longest(self, server: Server, there: int) -> float:
        """‖Δc_i‖ ≤ ‖gradient‖ + ‖c‖, where clients' displacements say what gradients are usual. Clients keep to it, so
        that both ends move their control variates alike."""
        usual = self.defence.longest(server.votes.get("norm of model"), there)
        return usual / (self.local_steps * self.lr) + float(server.control.norm())

    # At the client

    def newcomer(self, client: ClientState, speed: Tensor) -> Client:
        """c_i = 0. It does nothing before it is asked."""
        return Client.extending(client, control=zeros(client.base), common=zeros(client.base))

    def hear(self, client: Client, down: Down) -> Client:
        """y_i ← x, and then K steps (line 7)."""
        return begin(client, down.model, down.statistics, self.local_steps, common=down.control.expand_as(client.base))

    @staticmethod
    def direction(client: Client, gradient: Model) -> Model:
        """g_i(y_i) − c_i + c (line 10)."""
        return gradient - client.control + client.common

    def answer(self, client: Client, down: Down) -> tuple[Up, Client]:
        """c_i⁺ = c_i − c + (x − y_i)/(K η_l) (line 12, option II); y_i and Δc_i = c_i⁺ − c_i are sent (line 14)."""
        change = client.progress / (self.local_steps * self.lr) - client.common
        if down.longest < inf:
            long = change.norm(dim=-1, keepdim=True)
            change = change * (down.longest.to(long) / long).clamp(max=1).where(long > 0, 1.0)
        up = Up(model=client.base - client.progress, change=change, statistics=client.buffers)
        return up, begin(client, client.base, client.buffers, 0)

    @staticmethod
    def applied(client: Client, up: Up) -> Client:
        """c_i ← c_i + Q(Δc_i): what the server has added to c, so that c stays the mean of all c_i."""
        return replace(client, control=client.control + up.change)

    def lost(self, client: Client, up: Up) -> Client:
        """The server has not moved c, nor does the client move its c_i."""
        return client
