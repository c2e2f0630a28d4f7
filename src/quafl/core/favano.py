"""FAVANO (Leconte, Nguyen and Moulines, "FAVANO: Federated Averaging with Asynchronous Nodes", 2023, Algorithm 1; first
called FAVAS).

As in QuAFL, clients train all the time and answer at once with whatever part of their local steps they have done. Each
one's progress is divided by how many steps that is, in expectation or in fact, so that the fast do not count more than
the slow; and a contacted client takes the server's model over.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Literal

import torch
from torch import Tensor

from quafl.core.client import begin, stopped
from quafl.core.conversation import Clients, Look, Round, Sleep
from quafl.core.defence import NO_DEFENCE, Defence
from quafl.core.messages import Buffers, Message, Model, heard, own, vector
from quafl.core.pieces import in_pieces, placed
from quafl.core.randomness import Generators
from quafl.core.seams import ClientState, Counts, Records, ServerState
from quafl.core.server import check_settings, exchange, proceed


@dataclass(frozen=True, slots=True, kw_only=True)
class Down(Message):
    """Server to client."""

    model: Model = vector(near=own("base"))  # w_{t−1}; the client alone knows its w^i_init


@dataclass(frozen=True, slots=True, kw_only=True)
class Up(Message):
    """Client to server."""

    report: Model = vector(near=heard("model"))  # w^i_unbiased


@dataclass(frozen=True, slots=True, kw_only=True)
class Client(ClientState):
    """w^i_init is `base`."""

    contacts: Counts
    expected_steps: Tensor  # E[E^i ∧ K], a running mean over contacts
    busy: Tensor  # P(E^i > 0), likewise


@dataclass(frozen=True, slots=True)
class FAVANO:
    """A round takes `wait` and the time of one exchange. `reweight` says what a client's progress is divided by:
    "steps" is α^i = P(E^i > 0)·(E^i ∧ K), with the steps done in fact, "mean" is α^i = E[E^i ∧ K]."""

    sampled: int = 5
    local_steps: int = 5  # K
    reweight: Literal["steps", "mean"] = "steps"
    wait: float = 0.0
    patience: float = inf  # how long the server waits for answers
    defence: Defence = NO_DEFENCE

    records: ClassVar = Records(Client, ServerState, Down, Up)
    direction: ClassVar[None] = None
    applied: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_settings(self.sampled, self.local_steps, self.patience)
        if self.reweight not in ("steps", "mean"):
            raise ValueError(f"reweight is {self.reweight!r}, must be 'steps' or 'mean'")
        if not self.wait >= 0:
            raise ValueError(f"wait is {self.wait}, must not be negative")

    # At the server

    def start(self, model: Model, buffers: Buffers) -> ServerState:
        """w_0."""
        return ServerState(model=model, buffers=buffers)

    def round(self, server: ServerState, rng: Generators) -> Round[ServerState]:
        """w_t = 1/(s+1) w_{t−1} + 1/(s+1) Σ w^i_unbiased (line 8); who has not answered counts as the server itself."""
        yield Sleep(self.wait)
        clients: Clients = yield Look()
        down = Down(model=server.model, statistics=server.buffers)
        replies = yield from exchange(server, down, clients, self.sampled, self.patience, rng)
        held = self.defence.hold(server, replies, {"report": server.model}, len(clients.present))

        def merged(mine: Tensor, theirs: Tensor) -> Tensor:
            return mine + (theirs - mine).sum(dim=0) / (self.sampled + 1)

        return proceed(
            server,
            held.distances,
            votes=held.votes,
            model=in_pieces(merged, server.model, held.up.report),
            buffers=merged(server.buffers, held.up.statistics),
        )

    # At the client

    def newcomer(self, client: ClientState, speed: Tensor) -> Client:
        """w^i = w_0, with K steps before it."""
        none = torch.zeros_like(client.steps)
        fresh = replace(client, budget=none + self.local_steps)
        return Client.extending(fresh, contacts=none, expected_steps=none.float(), busy=none.float())

    def hear(self, client: Client, down: Down) -> Client:
        """The client is interrupted."""
        return stopped(client)

    def answer(self, client: Client, down: Down) -> tuple[Up, Client]:
        """w^i_unbiased = w^i_init + (w^i − w^i_init)/α^i, and then w^i = w^i_init = what was heard (lines 21-25)."""
        contacts = client.contacts + 1
        steps, moved = client.taken.float(), (client.taken > 0).float()
        expected = client.expected_steps + (steps - client.expected_steps) / contacts
        busy = client.busy + (moved - client.busy) / contacts
        alpha = expected if self.reweight == "mean" else busy * steps
        weight = placed(alpha.reciprocal().where(client.taken > 0, 0.0).unsqueeze(-1), client.base.device)
        up = Up(report=client.base - weight * client.progress, statistics=client.buffers)
        after = begin(client, down.model, down.statistics, self.local_steps)
        return up, replace(after, contacts=contacts, expected_steps=expected, busy=busy)

    def lost(self, client: Client, up: Up) -> Client:
        """The next contact brings all that it needs."""
        return client
