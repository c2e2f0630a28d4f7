"""What the server does about clients that lie: what they send is held within what is usual among the others.

A client may lie in four things: its vector (how far it says that training has led), its statistics (buffers of batch
norm, say), the distance that it has measured, and its speed. The first three are bounded by a multiple of the median
over clients, which a minority cannot move; the speed that counts for all is a quantile.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quafl.core.rows import Rows, distance, piecewise
from quafl.core.seams import Buffers, Ids, Model, ServerState

RECENT = 32  # different clients, those heard last, that have a vote
QUORUM = 5  # votes, without which two liars who come first would say what is usual
MOVED = 2.0**-17  # of ‖X_t‖: less may be rounding, says nothing about what is usual, and does no harm
LIARS = 10  # one in so many voters, and two in any case, may lie about a sign
ITERATIONS = 16  # of Weiszfeld's
CHUNK = 2**18  # coordinates


@dataclass(frozen=True, slots=True)
class Heard(Rows):
    """What clients have said that the server computes with, a row per reply."""

    senders: Ids
    vectors: Model  # decoded
    statistics: Buffers
    distances: Tensor  # that the clients have measured


class Held(NamedTuple):
    """The same, within bounds."""

    heard: Heard
    votes: Mapping[str, Tensor]  # for the next state's `extra`


@dataclass(frozen=True, slots=True)
class Defence:
    """Bounds for what clients send; by default none, and the algorithm's own mean.

    - `clip`: a displacement is at most `clip` times as long as is usual. The usual norm is the lower median over the
      last 32 different clients, one vote each: the norm of the last displacement of each, this round's included. Those
      who have not moved do not vote. A longer one is scaled down. Statistics are bounded in the same way, coordinate by
      coordinate, and so are the distances that clients report.
    - `mean`: in place of the mean of what came in a round, for "trimmed" the mean of each coordinate without the
      largest and the smallest ⌊trim·m⌋ of its m values, for "geometric" the point with the least sum of distances.
    - `speeds`: H_min is read at this share of the sorted speeds; 0 is the paper's minimum.

    What is within its bounds is left as it is, bit for bit.
    """

    clip: float = inf
    mean: Literal["mean", "trimmed", "geometric"] = "mean"
    trim: float = 0.2
    speeds: float = 0.0

    def __post_init__(self) -> None:
        if not self.clip >= 1:
            raise ValueError(f"clip is {self.clip}, must be at least 1 (the usual norm), or inf for no bound")
        if self.mean not in ("mean", "trimmed", "geometric"):
            raise ValueError(f"mean is {self.mean!r}, must be 'mean', 'trimmed' or 'geometric'")
        if not 0 <= self.trim < 0.5:
            raise ValueError(f"trim is {self.trim}, must be at least 0 and below 0.5: that much goes at either end")
        if not 0 <= self.speeds < 1:
            raise ValueError(f"speeds is {self.speeds}, must be from 0 (the minimum) to less than 1")

    @property
    def bounded(self) -> bool:
        """Whether there is a bound at all."""
        return self.clip < inf

    def hold(self, state: ServerState, heard: Heard, origin: Model, *, there: int, unit: Tensor | float = 1.0) -> Held:
        """What was heard, within bounds.

        A displacement is (vector − origin)/unit, where the unit is one for all or a column. `there` is how many clients
        the server sees, for `_usual`.
        """
        held = self._clipped(state, heard, origin, there, unit) if self.bounded else Held(heard, {})
        if self.mean == "mean" or not len(heard.senders):
            return held
        vectors = self._robust(held.heard.vectors, origin, unit)
        statistics = self._robust(held.heard.statistics, state.buffers, 1.0)
        return held._replace(heard=replace(held.heard, vectors=vectors, statistics=statistics))

    def slowest(self, speeds: Tensor) -> float:
        """H_min: of n speeds, the one with int(share·n) below it; if n ≥ 4 and the share is not 0, at least one."""
        n = len(speeds)
        index = max(int(self.speeds * n), int(n >= 4 and self.speeds > 0))
        return float(speeds.sort().values[index])

    # Clipping

    def _clipped(self, state: ServerState, heard: Heard, origin: Model, there: int, unit: Tensor | float) -> Held:
        away = distance(heard.vectors, origin).cpu() / torch.as_tensor(unit).cpu().reshape(-1)
        told = heard.distances.where(heard.distances.isfinite(), 0.0)
        statistics = heard.statistics.where(heard.statistics.isfinite(), state.buffers)
        votes = _counted(state.extra, heard.senders, {"norms": away, "distances": told, "statistics": statistics})
        least = MOVED * float(state.model.norm())
        longest, farthest = (self._limit(votes[name], least, there) for name in ("norms", "distances"))
        within = Heard(
            senders=heard.senders,
            vectors=_shortened(heard.vectors, origin, away, longest),
            statistics=self._near(statistics, state.buffers, votes["statistics"], there),
            distances=told.clamp(max=farthest),
        )
        return Held(within, votes)

    def _limit(self, votes: Tensor, least: float, there: int) -> float:
        """clip times the usual, at least what is no movement at all."""
        return max(least, self.clip * float(_usual(votes[votes.isfinite() & (votes > least)], there)))

    def _near(self, theirs: Buffers, mine: Buffers, votes: Tensor, there: int) -> Buffers:
        """|b_i − b|_j ≤ clip times the usual |b_v − b|_j, among the voters v that have statistics of their own.

        What is not negative at the server and at nearly all voters, such as a variance, is not negative afterwards.
        """
        apart = (votes - mine).abs()
        bound = self.clip * _usual(apart[(apart > 0).any(dim=-1)], there)
        low = mine - bound
        positive = (mine >= 0) & ((votes < 0).sum(dim=0) <= max(2, len(votes) // LIARS))
        return theirs.clamp(min=torch.where(positive, low.clamp(min=0), low), max=mine + bound)

    # Robust means

    def _robust(self, vectors: Tensor, origin: Tensor, unit: Tensor | float) -> Tensor:
        """Every row moved by the robust mean of all displacements, so that this is what the algorithm's own mean of the
        rows becomes."""
        if self.mean == "geometric":
            weights = _weiszfeld(_gram(vectors, origin, unit)).to(vectors.dtype)

            def mean(displacements: Tensor) -> Tensor:
                return weights @ displacements

        else:
            cut = int(self.trim * len(vectors) + 1e-9)

            def mean(displacements: Tensor) -> Tensor:
                return displacements.sort(dim=0).values[cut : len(displacements) - cut].mean(dim=0)

        moved = piecewise(lambda rows, origin: origin + mean((rows - origin) / unit), vectors, origin)
        if isinstance(unit, Tensor):
            return origin + unit * (moved - origin)
        return moved.expand_as(vectors)


NO_DEFENCE = Defence()  # the algorithms of the papers


def _counted(kept: Mapping[str, Tensor], senders: Ids, told: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The votes with this round's: of each client the last, of the clients those heard last."""
    last = {client: row for row, client in enumerate(senders.tolist())}
    old = [row for row, client in enumerate(kept["voters"].tolist()) if client not in last] if "voters" in kept else []
    most = max(RECENT, len(last))
    votes = {"voters": senders, **told}
    return {
        name: torch.cat((kept.get(name, rows).to(rows.device)[old], rows[list(last.values())]))[-most:]
        for name, rows in votes.items()
    }


def _usual(votes: Tensor, there: int) -> Tensor:
    """The lower median of the votes ("v ...").

    In the beginning, when few have moved, those who are there and have not vote 0, until there are five votes: of four
    clients or more, the first two wait for a third, and the shortest of three is usual; of two or three, the first
    waits for a second; one that is alone is not bounded.
    """
    missing = max(min(QUORUM, there) - len(votes), 0 if len(votes) else 1)
    return torch.cat((votes.new_zeros((missing, *votes.shape[1:])), votes)).median(dim=0).values


def _shortened(vectors: Model, origin: Model, away: Tensor, longest: float) -> Model:
    """Displacements that are too long scaled down to the bound; what is not finite does not count at all."""
    long = [row for row, length in enumerate(away.tolist()) if not length <= longest]
    if not long:
        return vectors
    vectors = vectors.clone()
    for row in long:
        share = longest / float(away[row]) if away[row].isfinite() else 0.0
        vectors[row] = torch.lerp(origin, vectors[row], share) if share else origin
    return vectors


def _gram(vectors: Tensor, origin: Tensor, unit: Tensor | float) -> Tensor:
    """⟨Δ_i, Δ_j⟩ of the displacements, "m m", in double precision."""
    gram = torch.zeros(len(vectors), len(vectors), dtype=torch.float64, device=vectors.device)
    for rows, start in zip(vectors.split(CHUNK, dim=-1), origin.split(CHUNK, dim=-1), strict=True):
        displacements = ((rows - start) / unit).double()
        gram += displacements @ displacements.T
    return gram


def _weiszfeld(gram: Tensor) -> Tensor:
    """The weights w of the geometric median z = Σ w_i Δ_i: w_i ∝ 1/max(ν, ‖Δ_i − z‖), from the mean on, with ν a
    millionth of the longest (Pillutla et al., "Robust Aggregation for Federated Learning", 2022, Algorithm 2)."""
    squares = gram.diagonal()
    smallest = squares.max().sqrt() * 1e-6
    weights = torch.full_like(squares, 1 / len(squares))
    if smallest == 0:
        return weights
    for _ in range(ITERATIONS):
        apart = (squares - 2 * gram @ weights + weights @ gram @ weights).clamp(min=0).sqrt()
        weights = 1 / apart.clamp(min=float(smallest))
        weights = weights / weights.sum()
    return weights
