"""How long local steps take, and when clients are there to take them."""

from collections.abc import Sequence
from math import ceil
from typing import Protocol

import torch
from torch import Tensor

from quafl.core.seams import Counts, Ids
from quafl.sim.piecewise import Piecewise


def fast_and_slow(clients: int, *, slow: float, means: tuple[float, float] = (2.0, 8.0)) -> Tensor:
    """Mean step times: the last round(slow·n) clients are slow."""
    result = torch.full((clients,), means[0])
    result[clients - round(slow * clients) :] = means[1]
    return result


def steady(times: Tensor) -> Piecewise:
    """Steps per time unit, from mean step times that never change."""
    if not (times > 0).all():
        raise ValueError(f"step times must be positive, the smallest given is {float(times.min())}")
    return Piecewise.steady(1 / times.double())


class _Rated:
    """What laws of step times share: v_i(t) steps per time unit; none while a client is away."""

    def __init__(self, rates: Piecewise) -> None:
        self.rates = rates
        self._everybody = torch.arange(len(rates.values))

    def present(self, time: float) -> Tensor:
        """Whether each client is there."""
        return self.rates.at(self._everybody, time) > 0

    def next_return(self, after: float) -> float:
        """When somebody comes back, or for the first time."""
        return self.rates.next_rise(after)

    def relative(self) -> Tensor:
        """Each client's best speed over that of the fastest."""
        best = self.rates.values.max(dim=-1).values
        return best / best.max()


class Exponential(_Rated):
    """Step times ~ exp(v), memoryless: the steps completed in a time are Poisson(∫ v dt), and the step under way at a
    contact can be dropped and drawn anew without changing their law."""

    def __init__(self, rates: Piecewise, rng: torch.Generator) -> None:
        super().__init__(rates)
        self._rng = rng

    def steps_within(self, ids: Ids, start: Tensor, stop: float, at_most: Counts) -> Counts:
        """min(Poisson, at_most)."""
        completed = torch.poisson(self.rates.integral(ids, start, stop), generator=self._rng)
        return completed.to(torch.int64).minimum(at_most)

    def duration(self, ids: Ids, start: float, steps: Counts) -> Tensor:
        """The sum of that many step times."""
        most = int(steps.max()) if len(steps) else 0
        each = torch.empty(len(ids), most, dtype=torch.float64).exponential_(generator=self._rng)
        counted = torch.arange(most) < steps.unsqueeze(-1)
        return self.rates.reached(ids, start, (each * counted).sum(dim=-1)) - start

    def mean_steps(self, times: Tensor, at_most: Counts) -> Tensor:
        """E min(N, K) = Σ_k≤K P(N ≥ k) for N Poisson(v·t): a row per client, a column per time."""
        work = self.rates.values[:, 0, None] * times.double()
        reached = [
            torch.special.gammainc(torch.full_like(work, k), work) * (at_most >= k).unsqueeze(-1)
            for k in range(1, int(at_most.max()) + 1)
        ]
        return torch.stack(reached).sum(dim=0)


class Constant(_Rated):
    """Every step of a client takes the same time, as long as its speed does not change."""

    def steps_within(self, ids: Ids, start: Tensor, stop: float, at_most: Counts) -> Counts:
        """⌊∫ v dt⌋, forgiving the rounding of sums of times."""
        return (self.rates.integral(ids, start, stop) + 1e-6).floor().to(torch.int64).minimum(at_most)

    def duration(self, ids: Ids, start: float, steps: Counts) -> Tensor:
        """Until ∫ v dt comes to that many."""
        return self.rates.reached(ids, start, steps) - start

    def mean_steps(self, times: Tensor, at_most: Counts) -> Tensor:
        """⌊v·t⌋, at most K: a row per client, a column per time."""
        work = self.rates.values[:, 0, None] * times.double()
        return (work + 1e-6).floor().minimum(at_most.unsqueeze(-1))


class Steady(Protocol):
    """A law whose speeds never change: E[steps] is then known in advance."""

    def mean_steps(self, times: Tensor, at_most: Counts) -> Tensor:
        """Expected steps within each of the times: a row per client."""


def expected_steps(speeds: Steady, *, chance: float, round_time: float, budget: Counts) -> Tensor:
    """H_i in closed form: a client that takes part in a round with probability p was contacted G rounds ago, G
    geometric, so H_i = Σ_g p (1−p)^(g−1) E[steps within g rounds]."""
    rounds = 1 + torch.arange(ceil(30 / chance), dtype=torch.float64)  # the chance of more is below e^−30
    return speeds.mean_steps(rounds * round_time, budget) @ (chance * (1 - chance) ** (rounds - 1))


def interrupted(
    pieces: list[tuple[float, float]], absences: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """A client's (time, speed) pieces with speed 0 from each absence's first time to its second."""
    for start, stop in sorted(absences):
        before = [piece for piece in pieces if piece[0] < start]
        during = [piece for piece in pieces if start <= piece[0] <= stop]
        after = [piece for piece in pieces if piece[0] > stop]
        speed = (during or before)[-1][1]
        pieces = [*before, (start, 0.0), (stop, speed), *after]
    return pieces
