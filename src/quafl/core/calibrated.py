"""Calibrated QuAFL: clients are contacted at random and answer at once, as in QuAFL; the server adds to what it hears
what it remembers of those it did not hear.

The estimator is FedVARP's (Jhunjhunwala et al., "FedVARP: Tackling the Variance Due to Partial Client Participation in
Federated Learning", UAI 2022); CA²FL (Wang et al., ICLR 2024) has it for arrivals in a buffer. Here clients answer with
partial progress, whoever is polled, and send quantized residuals; each client keeps its own memory, so that the server
has two vectors, however many clients there are. docs/algorithms/calibrated.md has the formulas.
"""

from dataclasses import dataclass, replace
from math import exp, inf, sqrt
from typing import ClassVar

import torch
from torch import Tensor

from quafl.core.client import begin, stopped
from quafl.core.conversation import Clients, Look, Replies, Round, Sleep
from quafl.core.defence import NO_DEFENCE, SKETCH, SLACK, Defence, sketched
from quafl.core.descent import PLAIN, Descent
from quafl.core.messages import Buffers, Message, Model, number, own, vector
from quafl.core.pieces import lengthened, weighted_sum, zeros
from quafl.core.randomness import Generators
from quafl.core.seams import ClientState, OptimizerState, Records, ServerState
from quafl.core.server import check_server_lr, check_settings, exchange, mean_or, proceed

HALFWAY = 5.0  # steps after which a displacement counts as much in a client's memory as all before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Down(Message):
    """Server to client."""

    model: Model = vector(near=own("base"))  # X_t; the client alone knows its X^i
    sweeps: Tensor = number(low=0)  # how often everybody has been contacted, in the mean: the memories' clock
    longest: Tensor = number(low=0)  # that a memory may be


@dataclass(frozen=True, slots=True, kw_only=True)
class Up(Message):
    """Client to server."""

    residual: Model = vector(near=None)  # d_i = δ_i − y_i
    share: Tensor = number(low=0, high=1)  # κ_i
    sweeps: Tensor = number(low=0)  # that were heard: of when both ends remember it


@dataclass(frozen=True, slots=True, kw_only=True)
class Client(ClientState):
    """X^i is `base`, δ_i is `progress`: displacements are to be descended."""

    memory: Model  # y_i, as it was
    clock: Tensor  # at this time, in sweeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Server(ServerState):
    """X_t is `model`."""

    memory: Model  # Σ y_i, as of now
    contacted: Tensor  # when each client was contacted last, in sweeps, whatever it answered; −∞: never
    shares: Tensor  # "n w": a sketch of each client's share of the memory; w = 0 without a defence
    descent: OptimizerState
    sweeps: float = 0.0


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Both sides of calibrated QuAFL.

    A round takes `wait` and the time of one exchange. Clients answer with whatever part of their `local_steps` (K) they
    have done; one that has done nothing does not answer. `forget` is the share of all memories that fades in a sweep,
    the time in which everybody is contacted once in the mean.
    """

    sampled: int = 5
    local_steps: int = 10
    server_lr: float = 1.0
    server: Descent = PLAIN  # how the server moves along the calibrated direction
    forget: float = 0.02
    wait: float = 0.0
    patience: float = inf  # how long the server waits for answers
    defence: Defence = NO_DEFENCE

    records: ClassVar = Records(Client, Server, Down, Up, idle=False)
    direction: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_settings(self.sampled, self.local_steps, self.patience)
        check_server_lr(self.server_lr)
        if not 0 <= self.forget < inf:
            raise ValueError(f"forget is {self.forget}, must not be negative, and finite; 0 to remember for ever")
        if not self.wait >= 0:
            raise ValueError(f"wait is {self.wait}, must not be negative")

    # At the server

    def start(self, model: Model, buffers: Buffers) -> Server:
        """X_0; nothing is remembered."""
        return Server(
            model=model,
            buffers=buffers,
            memory=torch.zeros_like(model),
            contacted=torch.empty(0, dtype=torch.float64),
            shares=torch.zeros(0, SKETCH if self.defence.bounded else 0),
            descent=self.server.init(model),
        )

    def round(self, server: Server, rng: Generators) -> Round[Server]:
        """From X_t to X_{t+1}, and from Σ y_i to what both ends then remember."""
        yield Sleep(self.wait)
        clients: Clients = yield Look()
        longest = self._longest(server, clients)
        down = Down(
            model=server.model,
            statistics=server.buffers,
            sweeps=torch.tensor(server.sweeps, dtype=torch.float64),
            longest=torch.tensor(longest, dtype=torch.float64),
        )
        replies: Replies = yield from exchange(server, down, clients, self.sampled, self.patience, rng)
        before = lengthened(server.contacted, clients.size, -inf)
        contacted, size = min(self.sampled, len(clients.present)), self._size(before, clients, server.sweeps)
        held = self.defence.hold(server, replies, {"residual": zeros(server.model)}, len(clients.present))
        age = server.sweeps - before[replies.senders].clamp(min=0)
        fresh = weighted_sum((1 + age).rsqrt() / contacted, held.up.residual)
        step, descent = self.server.update(fresh + server.memory / size, server.descent)
        memory, shares = self._remembered(server, replies, clients, longest)
        fade = exp(-self.forget * contacted / size)
        return proceed(
            server,
            held.distances,
            votes=held.votes,
            model=server.model - self._length(contacted / size, server.sweeps) * step,
            buffers=mean_or(server.buffers, held.up.statistics),
            memory=fade * memory,
            shares=fade * shares,
            contacted=before.index_fill(0, torch.cat((replies.senders, replies.failed)), server.sweeps),
            descent=descent,
            sweeps=server.sweeps + contacted / size,
        )

    def _length(self, share: float, sweeps: float) -> float:
        """η_s times what settles at √(2s/n), and is 1 at first, while there is no memory in the direction."""
        settled = sqrt(2 * share)
        return self.server_lr * (settled + max(0.0, 1 - settled) * exp(-sweeps))

    def _size(self, before: Tensor, clients: Clients, sweeps: float) -> int:
        """n: those who are there, and those who were contacted before their memory has faded."""
        known = sweeps - before < (1 / self.forget if self.forget else inf)
        return max(1, int(known.index_fill(0, clients.present, True).sum()))

    def _longest(self, server: Server, clients: Clients) -> float:
        """The larger of what is usual among memories, of which there are none at first, and among residuals."""
        known = server.shares.norm(dim=-1), server.votes.get("norm of residual")
        return max(self.defence.longest(lengths, len(clients.present)) for lengths in known)

    def _remembered(self, server: Server, replies: Replies, clients: Clients, longest: float) -> tuple[Model, Tensor]:
        """Σ y_i with what has come: y_i + κ_i d_i. What makes a share longer than its client was told is left out."""
        share, shares = replies.up.share, server.shares
        if self.defence.bounded:
            shares = torch.cat((shares, shares.new_zeros(clients.size - len(shares), SKETCH)))
            new = shares[replies.senders] + share.unsqueeze(-1) * sketched(replies.up.residual)
            believed = (new.norm(dim=-1) <= SLACK * longest) | (share == 0)
            share = share * believed
            shares = shares.index_copy(0, replies.senders[believed], new[believed])
        return server.memory + weighted_sum(share, replies.up.residual), shares

    # At the client

    def newcomer(self, client: ClientState, speed: Tensor) -> Client:
        """X^i = X_0, with K steps before it; y_i = 0."""
        none = torch.zeros_like(client.steps)
        fresh = replace(client, budget=none + self.local_steps)
        return Client.extending(fresh, memory=zeros(client.base), clock=none.double())

    def hear(self, client: Client, down: Down) -> Client:
        """δ_i is what the client has come to by now."""
        return stopped(client)

    def answer(self, client: Client, down: Down) -> tuple[Up, Client]:
        """d_i = δ_i − y_i with κ_i = h_i/(h_i + 5), or less, so that y_i does not get too long; and X^i = Q(X_t)."""
        memory = self._faded(client, down.sweeps)
        residual, share = client.progress - memory, client.taken / (client.taken + HALFWAY)
        if down.longest < inf:
            share = share.minimum(_reach(memory, residual, float(down.longest)))
        up = Up(
            residual=residual,
            share=share,
            sweeps=down.sweeps.expand_as(client.clock),
            statistics=client.buffers,
        )
        return up, begin(client, down.model, down.statistics, self.local_steps)

    def applied(self, client: Client, up: Up) -> Client:
        """y_i ← y_i + κ_i Q(d_i): what the server has remembered."""
        share = up.share.unsqueeze(-1).to(up.residual)
        return replace(client, memory=self._faded(client, up.sweeps) + share * up.residual, clock=up.sweeps.double())

    def lost(self, client: Client, up: Up) -> Client:
        """The server has not remembered it, nor does the client."""
        return client

    def _faded(self, client: Client, sweeps: Tensor) -> Model:
        """y_i as of then."""
        if not self.forget:
            return client.memory
        fade = torch.exp(self.forget * (client.clock - sweeps)).unsqueeze(-1)
        return fade.to(client.memory.device, client.memory.dtype) * client.memory


def _reach(memory: Model, residual: Model, longest: float) -> Tensor:
    """The largest κ for which y + κ d is at most so long; 0 if y itself is longer."""
    square, along = residual.square().sum(dim=-1), (memory * residual).sum(dim=-1)
    room = longest**2 - memory.square().sum(dim=-1)
    reach = ((along.square() + square * room.clamp(min=0)).sqrt() - along) / square.clamp(min=1e-30)
    return reach.where(room > 0, 0.0).cpu()
