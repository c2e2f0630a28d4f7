"""How long local steps take, and when clients are there to take them."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quafl.core.seams import Counts, Ids
from quafl.sim.piecewise import Daily, Piecewise


class Speeds(Protocol):
    """How fast clients take local steps, and when they are there at all."""

    def present(self, time: float) -> Tensor:
        """Whether each client is there."""

    def next_return(self, after: float) -> float:
        """When somebody comes back, or for the first time."""

    def relative(self) -> Tensor:
        """Each client's speed when it first appears, over that of the fastest."""

    def steps_within(self, ids: Ids, start: Tensor, stop: float, at_most: Counts) -> Counts:
        """Steps completed in (start, stop]; the one under way at `stop` is dropped."""

    def duration(self, ids: Ids, start: float, steps: Counts) -> Tensor:
        """Time until `steps` steps are completed."""

    def expected_steps(self, chance: float, round_time: float, budget: int) -> Tensor:
        """H_i: each client's mean number of steps between two contacts, if it goes on as it begins, and takes part in a
        round with this probability."""


def fast_and_slow(clients: int, *, slow: float, means: tuple[float, float] = (2.0, 8.0)) -> Tensor:
    """Mean step times: the last round(slow·n) clients are slow."""
    result = torch.full((clients,), means[0])
    result[clients - round(slow * clients) :] = means[1]
    return result


class _Rated:
    """What laws of step times share: v_i(t) steps per time unit; none while a client is away."""

    def __init__(self, rates: Piecewise | Daily) -> None:
        self.rates = rates
        self._everybody = torch.arange(len(rates.values))
        self._always = rates.values[:, 0] > 0 if rates.is_steady else None

    def present(self, time: float) -> Tensor:
        """Whether each client is there; the same tensor, if nothing ever changes."""
        return self.rates.at(self._everybody, time) > 0 if self._always is None else self._always

    def next_return(self, after: float) -> float:
        """When somebody comes back, or for the first time."""
        return self.rates.next_rise(after)

    def relative(self) -> Tensor:
        """Each client's speed when it first appears, over that of the fastest."""
        first = (self.rates.values > 0).int().argmax(dim=-1)
        speed = self.rates.values[self._everybody, first]
        return speed / speed.max()


class Exponential(_Rated):
    """Step times ~ exp(v), memoryless: the steps completed in a time are Poisson(∫ v dt), and the step under way at a
    contact can be dropped and drawn anew without changing their law."""

    def __init__(self, rates: Piecewise | Daily, rng: torch.Generator) -> None:
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

    def expected_steps(self, chance: float, round_time: float, budget: int) -> Tensor:
        """H_i of steady clients, in closed form.

        A client that takes part in a round with probability p was last contacted G rounds ago, G geometric, and has
        made N = Poisson(G λ) steps since, λ = v·T. With a_j = P(Poisson(λ) = j), c_j = P(N = j) solves
        c_j = p a_j + (1−p) Σ_i a_i c_{j−i}; H_i = E min(N, K) = K − Σ_j<K (K − j) c_j.
        """
        work = self.rates.values[:, :1] * round_time
        numbers = torch.arange(budget, dtype=torch.float64)
        arrive = torch.exp(torch.xlogy(numbers, work) - work - torch.lgamma(numbers + 1))
        done: list[Tensor] = []
        for j in range(budget):
            carried = sum((arrive[:, i] * done[j - i] for i in range(1, j + 1)), torch.zeros(len(work)))
            done.append((chance * arrive[:, j] + (1 - chance) * carried) / (1 - (1 - chance) * arrive[:, 0]))
        return budget - torch.stack([(budget - j) * part for j, part in enumerate(done)]).sum(dim=0)


class Constant(_Rated):
    """Every step of a client takes the same time, as long as its speed does not change."""

    def steps_within(self, ids: Ids, start: Tensor, stop: float, at_most: Counts) -> Counts:
        """⌊∫ v dt⌋, forgiving the rounding of sums of times."""
        return (self.rates.integral(ids, start, stop) + 1e-6).floor().to(torch.int64).minimum(at_most)

    def duration(self, ids: Ids, start: float, steps: Counts) -> Tensor:
        """Until ∫ v dt comes to that many."""
        return self.rates.reached(ids, start, steps) - start

    def expected_steps(self, chance: float, round_time: float, budget: int) -> Tensor:
        """H_i of steady clients, in closed form: the k-th step is done if the last contact was ⌈k/(v·T)⌉ rounds ago or
        more, so that H_i = Σ_k≤K (1−p)^(⌈k/(v·T)⌉ − 1)."""
        work = self.rates.values[:, :1] * round_time
        rounds = (torch.arange(1, budget + 1) / work - 1e-6).ceil()
        return ((1 - chance) ** (rounds - 1)).sum(dim=-1)


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
