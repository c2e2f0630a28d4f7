"""CA²FL (Wang et al., "Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update
Calibration", ICLR 2024, Algorithm 2).

As FedBuff, but the server keeps each client's last displacement. To those that have arrived it adds what it remembers
of all the others, so that fast clients do not pull the model towards their own minima.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from quafl.core import buffer
from quafl.core.buffer import Down, Filling, Gathered, Up, gather
from quafl.core.conversation import Round
from quafl.core.defence import NO_DEFENCE, Defence
from quafl.core.messages import Buffers, Model
from quafl.core.pieces import placed, zeros
from quafl.core.randomness import Generators
from quafl.core.seams import ClientState, Records
from quafl.core.server import check_server_lr, check_settings, proceed


@dataclass(frozen=True, slots=True, kw_only=True)
class Server(buffer.Server):
    """x_t is `model`."""

    cache: Tensor  # "n d": h^i, each client's last displacement; 0 before its first


@dataclass(frozen=True, slots=True)
class CA2FL(buffer.Clients):
    """A round is one filling of the buffer with `sampled` displacements (M), after `local_steps` steps each."""

    sampled: int = 5
    local_steps: int = 5
    server_lr: float = 1.0  # η
    patience: float = inf  # after which a silent client is sent the model once more, and starts anew
    defence: Defence = NO_DEFENCE

    records: ClassVar = Records(ClientState, Server, Down, Up)
    wait: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        check_settings(self.sampled, self.local_steps, self.patience)
        check_server_lr(self.server_lr)

    def start(self, model: Model, buffers: Buffers) -> Server:
        """x_1; nothing is remembered."""
        return Server(model=model, buffers=buffers, cache=model.new_empty(0, len(model)))

    def round(self, server: Server, rng: Generators) -> Round[Server]:
        """From x_t to x_{t+1}; to x_t, with what the buffer then has, if time has passed for nothing."""
        down = Down(model=server.model, statistics=server.buffers)
        filling: Filling = yield from gather(server, down, self.sampled, self.patience, self.defence)
        if filling.buffer is None or not filling.full:
            return replace(server, asked=filling.asked, buffer=filling.buffer)
        after = self._moved(server, filling.buffer, filling.size, filling.there)
        return replace(after, asked=filling.asked, buffer=None)

    def _moved(self, server: Server, gathered: Gathered, size: int, there: int) -> Server:
        """x_{t+1} = x_t − η v_t with v_t = h_t + 1/M Σ (Δ_i − h^i_t) and h_t = 1/n Σ h^i_t; then h^i_{t+1} = Δ_i for
        those that have arrived (lines 12-15)."""
        held = self.defence.hold(server, gathered, {"displacement": zeros(server.model)}, there)
        arrived, senders = held.up.displacement, placed(gathered.senders, server.model.device)
        cache = torch.cat((server.cache, server.model.new_zeros(size - len(server.cache), len(server.model))))
        step = cache.mean(dim=0) + (arrived - cache[senders]).mean(dim=0)
        last = {client: row for row, client in enumerate(gathered.senders.tolist())}  # of several, the latest
        return proceed(
            server,
            held.distances,
            votes=held.votes,
            model=server.model - self.server_lr * step,
            buffers=held.up.statistics.mean(dim=0),
            cache=cache.index_copy(0, senders[list(last.values())], arrived[list(last.values())]),
        )
