"""FedAvg (McMahan et al., 2017, Algorithm 1), with a fixed number of local steps, as in the paper's comparison.

The sequential Baseline is FedAvg on one slow client that holds all the data: K = 1, s = 1, no interaction time.
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
from quafl.core.seams import Buffers, ClientState, Clock, Codecs, Counts, Fleet, Model, Note, ServerState
from quafl.core.server import Exchange, check_settings, synchronous


@dataclass(frozen=True, slots=True)
class FedAvg:
    """Each round, `sampled` clients start from the server's model, take exactly `local_steps` steps, and the server
    adopts the mean of what they send back. The round lasts as long as the slowest of them, plus the exchange."""

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
        """K, whoever it is."""
        return torch.full(speed.shape, self.local_steps)

    def rounds(
        self, state: ServerState, fleet: Fleet, codecs: Codecs, clock: Clock, rng: Generators
    ) -> Iterator[ServerState]:
        """w_0, w_1, …: one state a round, from the one given on."""
        return synchronous(
            state, fleet, codecs, rng, _mean, sampled=self.sampled, patience=self.patience, defence=self.defence
        )

    def report(self, client: ClientState, note: Note) -> Model:
        """w^k after the local steps."""
        return client.base - client.progress

    def adopt(self, client: ClientState, model: Model, buffers: Buffers, note: Note) -> ClientState:
        """w^k ← w_t."""
        return rebase(client, model, buffers)


def _mean(mine: Model, back: Exchange) -> Model:
    """w_{t+1} = Σ w^k/m over the m clients that answered."""
    return back.heard.vectors.mean(dim=0)
