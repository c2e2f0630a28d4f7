"""How long local steps take."""

import torch
from torch import Tensor

from quafl.core.seams import Counts, Ids


def fast_and_slow(clients: int, *, slow: float, means: tuple[float, float] = (2.0, 8.0)) -> Tensor:
    """Mean step times: the last round(slow·n) clients are slow."""
    result = torch.full((clients,), means[0])
    result[clients - round(slow * clients) :] = means[1]
    return result


class Exponential:
    """Step times ~ exp(1/mean), memoryless: the steps completed in a time Δ are Poisson(Δ/mean), and the step under
    way at a contact can be dropped and drawn anew without changing their law."""

    def __init__(self, means: Tensor, rng: torch.Generator) -> None:
        self.means = _positive(means)
        self._rng = rng

    def steps_within(self, ids: Ids, start: Tensor, stop: float, at_most: Counts) -> Counts:
        """min(Poisson, at_most)."""
        completed = torch.poisson((stop - start) / self.means[ids], generator=self._rng)
        return completed.to(torch.int64).minimum(at_most)

    def duration(self, ids: Ids, start: float, steps: Counts) -> Tensor:
        """The sum of that many step times."""
        most = int(steps.max()) if len(steps) else 0
        each = torch.empty(len(ids), most).exponential_(generator=self._rng)
        counted = torch.arange(most) < steps.unsqueeze(-1)
        return (each * counted).sum(dim=-1) * self.means[ids]


class Constant:
    """Every step of a client takes the same time."""

    def __init__(self, times: Tensor) -> None:
        self.times = _positive(times)

    def steps_within(self, ids: Ids, start: Tensor, stop: float, at_most: Counts) -> Counts:
        """⌊Δ/time⌋, forgiving the rounding of sums of times."""
        completed = ((stop - start).double() / self.times[ids].double() + 1e-6).floor()
        return completed.to(torch.int64).minimum(at_most)

    def duration(self, ids: Ids, start: float, steps: Counts) -> Tensor:
        """That many times."""
        return steps * self.times[ids]


def _positive(times: Tensor) -> Tensor:
    if not (times > 0).all():
        raise ValueError(f"step times must be positive, the smallest given is {float(times.min())}")
    return times
