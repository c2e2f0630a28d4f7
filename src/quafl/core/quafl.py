"""QuAFL, Algorithm 1 of "Communication-Efficient Federated Learning With Data and Client Heterogeneity" (AISTATS 2024).

Line numbers are those of the paper's pseudocode: "server" for the main loop, "client" for InteractWithServer. A pass of
LocalUpdates is `core.client.local_step`.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from quafl.core.client import begin, stopped
from quafl.core.conversation import Clients, Look, Round, Sleep
from quafl.core.defence import NO_DEFENCE, Defence
from quafl.core.messages import Buffers, Message, Model, heard, number, own, vector
from quafl.core.pieces import in_pieces, lengthened, placed
from quafl.core.randomness import Generators
from quafl.core.seams import ClientState, Counts, Records, ServerState
from quafl.core.server import check_settings, exchange, mean_or, proceed

SETTLED = 5  # contacts after which a client's mean number of steps is taken for its speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Down(Message):
    """Server to client."""

    model: Model = vector(near=own("base"))  # X_t; the client alone knows its X^i
    slowest: Tensor = number()  # H_min; infinite until some client has told its speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Up(Message):
    """Client to server."""

    report: Model = vector(near=heard("model"))  # Y^i
    speed: Tensor = number(private=True, low=0, high="local_steps")  # H_i; NaN: not told


@dataclass(frozen=True, slots=True, kw_only=True)
class Client(ClientState):
    """X^i is `base`, η h̃_i is `progress`."""

    contacts: Counts  # that the mean below stands on
    expected_steps: Tensor  # H_i, a running mean over contacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Server(ServerState):
    """X_t is `model`."""

    speeds: Tensor  # H_i as each client has told it; NaN: not told


@dataclass(frozen=True, slots=True)
class QuAFL:
    """Both sides of QuAFL.

    A round takes `wait` (swt) and the time of one exchange: clients answer at once, with whatever part of their
    `local_steps` (K) they have done. `weighted` damps fast clients by η_i = H_min/H_i. The two averagings can be
    weakened one by one, from the paper's (1) to none (0); the end points are the variants of Figure "averaging".
    """

    sampled: int = 5
    local_steps: int = 5
    weighted: bool = False
    server_averaging: float = 1.0
    client_averaging: float = 1.0
    wait: float = 0.0
    patience: float = inf  # how long the server waits for answers
    slowest_floor: float = 0.1  # H_min is never taken for less: a client that makes no steps must not stop the others
    defence: Defence = NO_DEFENCE

    records: ClassVar = Records(Client, Server, Down, Up)
    direction: ClassVar[None] = None
    applied: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_settings(self.sampled, self.local_steps, self.patience)
        for name, value in ("server_averaging", self.server_averaging), ("client_averaging", self.client_averaging):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}, must be from 0 (none) to 1 (the paper's)")
        if not self.wait >= 0:
            raise ValueError(f"wait is {self.wait}, must not be negative")

    # At the server

    def start(self, model: Model, buffers: Buffers) -> Server:
        """X_0; no speed is known."""
        return Server(model=model, buffers=buffers, speeds=torch.empty(0))

    def round(self, server: Server, rng: Generators) -> Round[Server]:
        """From X_t to X_{t+1} (server, lines 1-8)."""
        yield Sleep(self.wait)
        clients: Clients = yield Look()
        speeds = lengthened(server.speeds, clients.size, torch.nan)
        down = Down(model=server.model, statistics=server.buffers, slowest=self._slowest(speeds, clients))
        replies = yield from exchange(server, down, clients, self.sampled, self.patience, rng)  # lines 2-6
        held = self.defence.hold(server, replies, {"report": server.model}, len(clients.present))
        return proceed(
            server,
            held.distances,
            votes=held.votes,
            model=self._merge(server.model, held.up.report),  # line 8
            buffers=self._merge(server.buffers, held.up.statistics),
            speeds=speeds.index_copy(0, replies.senders, replies.up.speed),
        )

    def _merge(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """X_{t+1} = X_t/(s+1) + Σ Q(Y^i)/(s+1) (server, line 8).

        Written with displacements: the same when all s have answered, and when some have not, the mean of all n+1
        models still stays where it is, because only those who answered adopt. Without averaging: the mean of Q(Y^i).
        """

        def merged(mine: Tensor, theirs: Tensor) -> Tensor:
            averaged = mine + (theirs - mine).sum(dim=0) / (self.sampled + 1)
            if self.server_averaging == 1:
                return averaged
            return torch.lerp(mean_or(mine, theirs), averaged, self.server_averaging)

        return in_pieces(merged, mine, theirs)

    def _slowest(self, speeds: Tensor, clients: Clients) -> Tensor:
        """H_min, the smallest speed that the clients present have told, or nearly; infinite while nobody has."""
        told = speeds[clients.present]
        told = told[~told.isnan()]
        return torch.tensor(
            max(self.slowest_floor, self.defence.slowest(told)) if len(told) else inf, dtype=torch.float64
        )

    # At the client

    def newcomer(self, client: ClientState, speed: Tensor) -> Client:
        """X^i = X_0, with K steps before it."""
        none = torch.zeros_like(client.steps)
        fresh = replace(client, budget=none + self.local_steps)
        return Client.extending(fresh, contacts=none, expected_steps=none.float())

    def hear(self, client: Client, down: Down) -> Client:
        """InteractWithServer begins: Y^i is what the client has come to by now."""
        return stopped(client)

    def answer(self, client: Client, down: Down) -> tuple[Up, Client]:
        """Y^i (client, lines 1-3), and X^i = Q(X_t)/(s+1) + s/(s+1)·Y^i (line 6). Without averaging: X^i = Q(X_t)."""
        contacts = client.contacts + 1
        mean_steps = client.expected_steps + (client.taken - client.expected_steps) / contacts
        report = self._report(client, down)
        speed = mean_steps.where(contacts >= SETTLED, torch.nan)
        kept = self.client_averaging * self.sampled / (self.sampled + 1)
        base, buffers = torch.lerp(down.model, report, kept), torch.lerp(down.statistics, client.buffers, kept)
        return (
            Up(report=report, statistics=client.buffers, speed=speed),
            begin(client, base, buffers, self.local_steps, contacts=contacts, expected_steps=mean_steps),
        )

    def _report(self, client: Client, down: Down) -> Model:
        """Y^i = X^i − η η_i h̃_i (client, line 2), with η_i = min(1, H_min/H_i); 1 until the client has seen enough
        contacts to know its H_i."""
        if not self.weighted:
            return client.base - client.progress
        damping = (client.expected_steps.reciprocal() * down.slowest).clamp(max=1.0)
        damping = damping.where(client.contacts >= SETTLED, 1.0)
        return client.base - placed(damping.unsqueeze(-1), client.base.device) * client.progress

    def lost(self, client: Client, up: Up) -> Client:
        """The server has not moved: the client goes back to its Y^i, so that the mean of all models stays."""
        return replace(client, base=up.report, buffers=up.statistics)
