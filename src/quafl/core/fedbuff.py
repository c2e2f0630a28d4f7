"""FedBuff (Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", 2022, Algorithm 1).

All clients train all the time. One that has finished sends how far it has come and starts again from the server's
current model; the server moves whenever its buffer is full. With Adam at the server it is FADAS (Wang et al., "FADAS:
Towards Federated Adaptive Asynchronous Optimization", 2024, Algorithms 1 and 2).
"""

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from quafl.core import buffer
from quafl.core.buffer import Down, Filling, Gathered, Up, alike, gather
from quafl.core.conversation import Round
from quafl.core.defence import NO_DEFENCE, Defence
from quafl.core.descent import PLAIN, Descent
from quafl.core.messages import Buffers, Model
from quafl.core.pieces import zeros
from quafl.core.randomness import Generators
from quafl.core.seams import ClientState, Counts, OptimizerState, Records
from quafl.core.server import check_server_lr, check_settings, proceed


@dataclass(frozen=True, slots=True, kw_only=True)
class Server(buffer.Server):
    """w^t is `model`."""

    descent: OptimizerState


@dataclass(frozen=True, slots=True)
class FedBuff(buffer.Clients):
    """A round is one filling of the buffer with `sampled` displacements, after `local_steps` steps each."""

    sampled: int = 5
    local_steps: int = 5
    server_lr: float = 1.0  # η_g
    server: Descent = PLAIN  # how the server moves
    staleness: bool = False  # weigh a displacement that is τ rounds old by 1/√(1+τ)
    delay: float = inf  # τ_c: η_g is at most 1/τ where the oldest displacement is τ > τ_c rounds old (FADAS)
    patience: float = inf  # after which a silent client is sent the model once more, and starts anew
    defence: Defence = NO_DEFENCE

    records: ClassVar = Records(ClientState, Server, Down, Up)
    wait: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        check_settings(self.sampled, self.local_steps, self.patience)
        check_server_lr(self.server_lr)
        if not self.delay >= 1:
            raise ValueError(f"delay is {self.delay}, must be at least 1 round, or inf for the same rate always")

    def start(self, model: Model, buffers: Buffers) -> Server:
        """w^0, with an empty buffer."""
        return Server(model=model, buffers=buffers, descent=self.server.init(model))

    def round(self, server: Server, rng: Generators) -> Round[Server]:
        """From w^t to w^{t+1}; to w^t, with what the buffer then has, if time has passed for nothing."""
        down, weigh = Down(model=server.model, statistics=server.buffers), _fading if self.staleness else alike
        filling: Filling = yield from gather(server, down, self.sampled, self.patience, self.defence, weigh)
        if filling.buffer is None or not filling.full:
            return replace(server, asked=filling.asked, buffer=filling.buffer)
        return replace(self._moved(server, filling.buffer, filling.there), asked=filling.asked, buffer=None)

    def _moved(self, server: Server, gathered: Gathered, there: int) -> Server:
        """w^{t+1} = w^t − η_g/s Σ s(τ_i) Δ_i, added up in order of arrival (lines 9-10)."""
        held = self.defence.hold(server, gathered, {"displacement": zeros(server.model)}, there)
        places = len(gathered.senders)
        total = sum(held.up.displacement, torch.zeros_like(server.model))
        statistics = sum(held.up.statistics, torch.zeros_like(server.buffers))
        step, descent = self.server.update(total / places, server.descent)
        return proceed(
            server,
            held.distances,
            votes=held.votes,
            model=server.model - self._rate(gathered.ages) * step,
            buffers=statistics / places,
            descent=descent,
        )

    def _rate(self, ages: Counts) -> float:
        """η_t = η if the largest delay is at most τ_c, else min(η, 1/the largest delay) (FADAS, equation 4)."""
        oldest = int(ages.max())
        return min(self.server_lr, 1 / oldest) if oldest > self.delay else self.server_lr


def _fading(ages: Counts) -> Tensor:
    """s(τ) = 1/√(1+τ) (section 3.2)."""
    return (1 + ages).float().rsqrt()
