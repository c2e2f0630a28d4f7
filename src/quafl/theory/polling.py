"""Clients that are polled at random, in closed form: how many steps a contact finds, and how many contacts find none.

In rounds of length τ, s of n clients are contacted; a client's last contact was G rounds ago, P(G = g) = p(1−p)^(g−1)
with p = s/n, and since then it has taken h steps, at most K: min(K, Poisson(Gvτ)) where step times are exponential
with mean 1/v, min(K, ⌊Gvτ⌋) where they are constant.
"""

from dataclasses import dataclass
from math import ceil, exp, floor, lgamma, log
from typing import Literal

import torch
from torch import Tensor

REST = 1e-12  # of the probability, that is left out


@dataclass(frozen=True, slots=True)
class Polling:
    """The joint law of G and h of one client. A row for each g from 1 on, a column for each h from 0 to K."""

    joint: Tensor  # P(G = g, h)

    @property
    def steps(self) -> Tensor:
        """0, 1, ..., K."""
        return torch.arange(self.joint.shape[1], dtype=torch.float64)

    @property
    def rounds(self) -> Tensor:
        """1, 2, ..., as a column."""
        return torch.arange(1, len(self.joint) + 1, dtype=torch.float64).unsqueeze(-1)

    @property
    def expected_steps(self) -> float:
        """H_i = E h."""
        return float((self.joint * self.steps).sum())

    @property
    def idle(self) -> float:
        """P(h = 0): the share of contacts that find no completed step."""
        return float(self.joint[:, 0].sum())

    @property
    def full(self) -> float:
        """P(h = K): the share of contacts that find the client stopped, or just about to."""
        return float(self.joint[:, -1].sum())

    def mean(self, values: Tensor) -> float:
        """Of a function of (g, h), given as a table that broadcasts to theirs."""
        return float((self.joint * values).sum())


def polling(
    *,
    speed: float,
    sampled: int,
    clients: int,
    round_time: float,
    local_steps: int,
    law: Literal["exponential", "constant"] = "exponential",
) -> Polling:
    """Of a client that takes `speed` steps a time unit.

    >>> round(polling(speed=0.5, sampled=5, clients=20, round_time=1.25, local_steps=5).expected_steps, 2)
    2.12
    """
    chance, work = sampled / clients, speed * round_time
    most = 1 if chance == 1 else ceil(log(REST) / log(1 - chance))
    geometric = [chance * (1 - chance) ** (g - 1) for g in range(1, most + 1)]
    rows = [_at_most(work * g, local_steps, law) for g in range(1, most + 1)]
    joint = torch.tensor(rows, dtype=torch.float64) * torch.tensor(geometric, dtype=torch.float64).unsqueeze(-1)
    return Polling(joint / joint.sum())


def _at_most(work: float, most: int, law: str) -> list[float]:
    """P(min(K, N) = 0), ..., P(min(K, N) = K)."""
    if law == "constant":
        done = min(most, floor(work + 1e-6))
        return [float(h == done) for h in range(most + 1)]
    below = [exp(h * log(work) - work - lgamma(h + 1)) if work else float(h == 0) for h in range(most)]
    return [*below, max(0.0, 1 - sum(below))]
