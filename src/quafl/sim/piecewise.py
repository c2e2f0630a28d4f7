"""Quantities of clients that change with time: those that jump now and then, and those of day and night."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quafl.core.seams import Ids


class Piecewise:
    """v_i(t) for every client i: `values[i, j]` from `times[i, j]` on. Times increase along a row from 0; a row with
    fewer pieces ends with infinite ones."""

    def __init__(self, times: Tensor, values: Tensor) -> None:
        self.times, self.values = times.double(), values.double()
        if (self.values < 0).any() or self.values.isnan().any():
            raise ValueError(f"speeds and bandwidths must not be negative, the smallest is {float(values.min())}")
        self._sums = torch.zeros(1, 1, dtype=torch.float64).expand(len(values), 1)
        if self.is_steady:
            return
        lengths = self.times.diff(dim=-1).nan_to_num(nan=0.0)  # between two infinite times: no piece
        areas = torch.where(self.values[:, :-1] == 0, 0.0, self.values[:, :-1] * lengths)
        self._sums = torch.cat((torch.zeros(len(areas), 1), areas.cumsum(dim=-1)), dim=-1).double()

    @staticmethod
    def steady(values: Tensor) -> "Piecewise":
        """The same for ever."""
        return Piecewise(torch.zeros(1, 1, dtype=torch.float64).expand(len(values), 1), values.unsqueeze(-1))

    @property
    def is_steady(self) -> bool:
        """Nothing ever changes."""
        return self.values.shape[-1] == 1

    @staticmethod
    def of(pieces: Sequence[Sequence[tuple[float, float]]]) -> "Piecewise":
        """From each client's list of (time, value)."""
        longest = max(map(len, pieces))
        times = torch.full((len(pieces), longest), torch.inf, dtype=torch.float64)
        values = torch.zeros(len(pieces), longest, dtype=torch.float64)
        for row, mine in enumerate(pieces):
            times[row, : len(mine)] = torch.tensor([time for time, _ in mine], dtype=torch.float64)
            values[row, : len(mine)] = torch.tensor([value for _, value in mine], dtype=torch.float64)
        return Piecewise(times, values)

    def at(self, ids: Ids, time: float) -> Tensor:
        """v_i(time)."""
        return self.values[ids, self._piece(ids, torch.full((len(ids),), time, dtype=torch.float64))]

    def integral(self, ids: Ids, start: Tensor, stop: float) -> Tensor:
        """∫ v_i dt from start to stop."""
        return self._until(ids, torch.full((len(ids),), stop, dtype=torch.float64)) - self._until(ids, start.double())

    def reached(self, ids: Ids, start: float, amount: Tensor) -> Tensor:
        """When ∫ v_i dt from `start` comes to the amount; infinite if never."""
        begun = torch.full((len(ids),), start, dtype=torch.float64)
        goal = self._until(ids, begun) + amount.double()
        sums = self._sums[ids]
        piece = (torch.searchsorted(sums, goal.unsqueeze(-1)).squeeze(-1) - 1).clamp(min=0)
        rest = (goal - sums.gather(1, piece.unsqueeze(-1)).squeeze(-1)) / self.values[ids, piece]
        return torch.where(amount > 0, self.times[ids, piece] + rest, begun)

    def next_rise(self, after: float) -> float:
        """When some client's value next leaves zero; infinite if never."""
        rises = (self.values[:, 1:] > 0) & (self.values[:, :-1] == 0) & (self.times[:, 1:] > after)
        return float(self.times[:, 1:][rises].min()) if rises.any() else torch.inf

    def _piece(self, ids: Ids, time: Tensor) -> Tensor:
        if self.is_steady:
            return torch.zeros_like(ids)
        return torch.searchsorted(self.times[ids], time.unsqueeze(-1), right=True).squeeze(-1) - 1

    def _until(self, ids: Ids, time: Tensor) -> Tensor:
        piece = self._piece(ids, time)
        return self._sums[ids, piece] + self.values[ids, piece] * (time - self.times[ids, piece])


class Daily:
    """v_i(t) for clients that are there for the same share of every day, each from an hour of its own on: `values[i]`
    then, and 0 for the rest of the day. A client's day begins when it comes, at −`phases[i]` of a day."""

    is_steady = False

    def __init__(self, values: Tensor, phases: Tensor, day: float, share: float) -> None:
        self.values, self._phases, self._day, self._share = values.double().unsqueeze(-1), phases.double(), day, share

    def at(self, ids: Ids, time: float) -> Tensor:
        """v_i(time)."""
        there = self._days(ids, torch.tensor(time, dtype=torch.float64)).frac() < self._share
        return self.values[ids, 0] * there

    def integral(self, ids: Ids, start: Tensor, stop: float) -> Tensor:
        """∫ v_i dt from start to stop."""
        return self.values[ids, 0] * (self._until(ids, torch.full_like(start.double(), stop)) - self._until(ids, start))

    def reached(self, ids: Ids, start: float, amount: Tensor) -> Tensor:
        """When ∫ v_i dt from `start` comes to the amount."""
        begun = torch.full((len(ids),), start, dtype=torch.float64)
        goal = (self._until(ids, begun) + amount.double() / self.values[ids, 0]) / (self._day * self._share)
        days = goal.ceil() - 1  # whole ones before; at the end of a stay, not at the beginning of the next
        when = (days + (goal - days) * self._share - self._phases[ids]) * self._day
        return torch.where(amount > 0, when.maximum(begun), begun)

    def next_rise(self, after: float) -> float:
        """When some client next comes."""
        days = self._days(slice(None), torch.tensor(after, dtype=torch.float64))
        return float(((days.floor() + 1 - self._phases) * self._day).min())

    def _days(self, ids: Ids | slice, time: Tensor) -> Tensor:
        return time / self._day + self._phases[ids]

    def _until(self, ids: Ids, time: Tensor) -> Tensor:
        """Time for which clients have been there, since their first day began."""
        days = self._days(ids, time.double())
        return self._day * (days.floor() * self._share + days.frac().clamp(max=self._share))
