"""FedNova (Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", 2020).

Clients take different numbers of local steps; each one's displacement is divided by its number before averaging, so
that those who took more do not pull the model towards their own minimum.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal

import torch
from torch import Tensor

from quafl.core.client import rebase
from quafl.core.defence import NO_DEFENCE, Defence
from quafl.core.randomness import Generators
from quafl.core.seams import Answer, Buffers, ClientState, Clock, Codecs, Counts, Fleet, Model, Note, ServerState
from quafl.core.server import Exchange, check_settings, synchronous


@dataclass(frozen=True, slots=True)
class FedNova:
    """Rounds as in FedAvg, but client i takes τ_i steps: `local_steps` (K) if it is the fastest, fewer in proportion if
    it is slower, at least one."""

    sampled: int = 5
    local_steps: int = 5
    patience: float = inf  # how long the server waits for answers
    defence: Defence = NO_DEFENCE

    answers: ClassVar[Literal["at once", "when done"]] = "when done"
    wait: ClassVar[float] = 0.0
    compressed: ClassVar[Literal["both ways", "uplink"]] = "both ways"

    def __post_init__(self) -> None:
        check_settings(self.sampled, self.local_steps, self.patience)

    def budget(self, speed: Tensor) -> Counts:
        """τ_i = max(1, round(K·speed))."""
        return (self.local_steps * speed).round().clamp(min=1).to(torch.int64)

    def rounds(
        self, state: ServerState, fleet: Fleet, codecs: Codecs, clock: Clock, rng: Generators
    ) -> Iterator[ServerState]:
        """x^(0,0), x^(1,0), …: one state a round, from the one given on."""
        return synchronous(
            state,
            fleet,
            codecs,
            rng,
            _normalised_mean,
            sampled=self.sampled,
            patience=self.patience,
            defence=self.defence,
            unit=_steps,
        )

    def report(self, client: ClientState, note: Note) -> Model:
        """x_i^(t,τ_i) after the local steps."""
        return client.base - client.progress

    def adopt(self, client: ClientState, model: Model, buffers: Buffers, note: Note) -> ClientState:
        """x_i^(t,0) ← x^(t,0)."""
        return rebase(client, model, buffers)


def _normalised_mean(mine: Model, back: Exchange) -> Model:
    """x^(t+1,0) = x^(t,0) − τ_eff Σ p_i η d_i with η d_i = (x^(t,0) − x_i^(t,τ_i))/τ_i, τ_eff = Σ p_i τ_i and p_i = 1/m
    (equations 5 and 7, with ‖a_i‖₁ = τ_i, which is local SGD's)."""
    steps = _steps(back.replies.answer).to(mine.device)
    directions = (mine - back.heard.vectors) / steps
    return mine - steps.float().mean() * directions.mean(dim=0)


def _steps(answer: Answer) -> Tensor:
    """τ_i, a column; one at least, whatever somebody says."""
    return answer.steps.clamp(min=1).unsqueeze(-1).to(answer.packet.exact.device)
