"""What the server does about clients that lie: what they send is held within what is usual among the others.

A client may lie in four things: its vector (how far it says that training has led), its statistics (buffers of batch
norm, say), the distance that it has measured, and its speed. The first three are bounded by a multiple of the median
over clients, which a minority cannot move; the speed that counts for all is a quantile.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from quafl.core.messages import Buffers, Model
from quafl.core.pieces import distance, in_pieces
from quafl.core.seams import Ids, ServerState

VOTERS = 32  # different clients, those heard last, that have a vote
QUORUM = 5  # votes, without which two liars who come first would say what is usual
MOVED = 2.0**-17  # of ‖X_t‖: less may be rounding, says nothing about what is usual, and does no harm
LIARS = 10  # one in so many voters, and two in any case, may lie about a sign
ITERATIONS = 16  # of Weiszfeld's
CHUNK = 2**18  # coordinates
SKETCH = 256  # numbers that stand for a long vector: its length is known to about 4 %
SLACK = 2.0  # as what clients are told may be shorter than the bound: a codec of two bits and a sketch may add so much


class Reports(Protocol):
    """What clients have said, a row per reply."""

    @property
    def senders(self) -> Ids:
        """Whose it is."""

    @property
    def up(self) -> Any:
        """A Message, decoded."""

    @property
    def distances(self) -> Mapping[str, Tensor]:
        """That the clients have measured, by the vector that they are about."""


class Held(NamedTuple):
    """The same, within bounds."""

    up: Any
    distances: Mapping[str, Tensor]
    votes: Mapping[str, Tensor]  # for the next state


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

    def hold(
        self, server: ServerState, heard: Reports, near: Mapping[str, Model], there: int, unit: Tensor | float = 1.0
    ) -> Held:
        """What was heard, within bounds.

        A displacement is (vector − what it is near to)/unit, where the unit is one for all or a column. `near` names
        the vectors that are held. `there` is how many clients the server sees, for `_usual`.
        """
        held = self._clipped(server, heard, near, there, unit) if self.bounded else Held(heard.up, heard.distances, {})
        if self.mean == "mean" or not len(heard.senders):
            return held
        robust = {name: self._robust(getattr(held.up, name), origin, unit) for name, origin in near.items()}
        statistics = self._robust(held.up.statistics, server.buffers, 1.0)
        return held._replace(up=replace(held.up, statistics=statistics, **robust))

    def longest(self, votes: Tensor | None, there: int) -> float:
        """How long something may be that both ends remember, for the clients to keep to: so much below the bound that a
        client that does is within it. What is beyond is a lie, and need not be remembered."""
        if not self.bounded:
            return inf
        return 0.0 if votes is None else self._limit(votes, 0.0, there) / SLACK

    def slowest(self, speeds: Tensor) -> float:
        """H_min: of n speeds, the one with int(share·n) below it; if n ≥ 4 and the share is not 0, at least one."""
        n = len(speeds)
        index = max(int(self.speeds * n), int(n >= 4 and self.speeds > 0))
        return float(speeds.sort().values[index])

    def usual_at_most(self, examples: Tensor) -> Tensor:
        """Numbers of examples that clients of a round say they have: at most `clip` times the lower median of them."""
        return examples.clamp(max=self.clip * float(examples.median())) if self.bounded and len(examples) else examples

    # Clipping

    def _clipped(
        self, server: ServerState, heard: Reports, near: Mapping[str, Model], there: int, unit: Tensor | float
    ) -> Held:
        column = torch.as_tensor(unit).cpu().reshape(-1)
        norms = {name: distance(getattr(heard.up, name), origin).cpu() / column for name, origin in near.items()}
        told = {name: far.where(far.isfinite(), 0.0) for name, far in heard.distances.items()}
        statistics = heard.up.statistics.where(heard.up.statistics.isfinite(), server.buffers)
        now = {f"norm of {name}": away for name, away in norms.items()}
        now |= {f"distance of {name}": far for name, far in told.items()}
        votes = _counted(server.votes, heard.senders, {**now, "statistics": statistics})
        least = MOVED * float(server.model.norm())
        longest = {name: self._limit(votes[name], least, there) for name in now}
        clipped = {
            name: _shortened(getattr(heard.up, name), origin, norms[name], longest[f"norm of {name}"])
            for name, origin in near.items()
        }
        return Held(
            up=replace(
                heard.up,
                statistics=self._near(statistics, server.buffers, votes["statistics"], there),
                **clipped,
            ),
            distances={name: far.clamp(max=longest[f"distance of {name}"]) for name, far in told.items()},
            votes=votes,
        )

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

        moved = in_pieces(lambda rows, origin: origin + mean((rows - origin) / unit), vectors, origin)
        if isinstance(unit, Tensor):
            return origin + unit * (moved - origin)
        return moved.expand_as(vectors)


NO_DEFENCE = Defence()  # the algorithms of the papers


@cache
def _signs(dim: int) -> Tensor:
    rows = -(-dim // SKETCH)
    return torch.randint(0, 2, (rows, SKETCH), generator=torch.Generator().manual_seed(SKETCH)).float() * 2 - 1


def sketched(vectors: Tensor) -> Tensor:
    """Vectors "... d" as "... 256": Σ of coordinates with random signs, every 256th in one place (Charikar et al.,
    "Finding Frequent Items in Data Streams", 2002). Linear, and about as long."""
    dim = vectors.shape[-1]
    signs = _signs(dim).to(vectors.device)
    padded = functional.pad(vectors, (0, signs.numel() - dim)).unflatten(-1, tuple(signs.shape))
    sums: Tensor = (padded * signs).sum(dim=-2)
    return sums.cpu()


def _counted(kept: Mapping[str, Tensor], senders: Ids, told: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The votes with this round's: of each client the last, of the clients those heard last."""
    last = {client: row for row, client in enumerate(senders.tolist())}
    old = [row for row, client in enumerate(kept["voters"].tolist()) if client not in last] if "voters" in kept else []
    most = max(VOTERS, len(last))
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
