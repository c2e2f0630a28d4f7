"""Where the algorithms go on quadratics, in closed form: f_i(x) = ½ a (x − c_i)², one coordinate at a time.

A step is x ← x − ηa(x − c_i) + ηξ, so that h steps bring a client from x to c_i + r^h (x − c_i) with r = 1 − ηa.
Everything is then linear in the models, with coefficients that depend on who is contacted and how many steps that
finds, and not on the models: means and variances obey linear recursions, and their fixed points are weighted means of
the c_i.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt
from typing import TypeAlias

import torch
from torch import Tensor

from quafl.theory.polling import Polling

Matrix: TypeAlias = Tensor  # over the n+1 models, the server's first, in float64


def weighted_mean(weights: Sequence[float], centers: Tensor) -> Tensor:
    """Σ w_i c_i / Σ w_i: a fixed point, from its weights."""
    w = torch.tensor(weights, dtype=torch.float64)
    return (w.unsqueeze(-1) * centers.double()).sum(dim=0) / w.sum()


def averaging_weights(
    laws: Sequence[Polling], sampled: int, rate: float, curvature: float, *, weighted: bool = False
) -> list[float]:
    """w_i of the fixed point of E X_t, for the algorithm of the paper.

    With ε_i = η_i·(1 − E r^h), the share of the way to its own minimum that a client comes in the mean, the mean
    models obey x̄ = (1/n) Σ ȳ_i, ȳ_i = m_i − ε_i (m_i − c_i) and m_i = (x̄ + s·ȳ_i)/(s+1), so that
    w_i = ε_i/(1 + s·ε_i). For small steps ε_i ≈ ηaH_i: without weights, the fixed point is weighted by speed; with
    η_i = H_min/H_i, it is the true minimum, but for ηaK.
    """
    slowest = min(law.expected_steps for law in laws)
    weights = []
    for law in laws:
        moved = law.mean(1 - (1 - rate * curvature) ** law.steps)
        share = moved * (slowest / law.expected_steps if weighted else 1.0)
        weights.append(share / (1 + sampled * share))
    return weights


def calibrated_weights(
    laws: Sequence[Polling],
    sampled: int,
    rate: float,
    curvature: float,
    *,
    forget: float = 0.02,
    halfway: float = 5.0,
) -> list[float]:
    """w_i of the fixed point of E X_t, for calibrated clients.

    Contacted g rounds after the last time, with h steps, i says d = δ − φ^g y with δ = (1 − r^h)(X − c_i), and
    remembers φ^g y + κd, κ = h/(h + 5); it says nothing if h = 0. φ = e^(−forget·s/n) is what is left of a memory
    after a round, u = 1/√(1 + gs/n) counts what is old for less. In the mean

        ȳ_i = M_i (x̄ − c_i),  M_i = E[κ(1 − r^h)]/(1 − E[(1 − κ)φ^g])
        w_i = E[u(1 − r^h)] + M_i·(E[φ^g] − E[u φ^g; h > 0])

    which is not the true minimum where speeds differ: fast clients' displacements are longer.
    """
    fade, pace = exp(-forget * sampled / len(laws)), sampled / len(laws)
    weights = []
    for law in laws:
        h, g = law.steps, law.rounds
        moved, share, old = 1 - (1 - rate * curvature) ** h, h / (h + halfway), fade**g
        count = (1 + g * pace).rsqrt()
        memory = law.mean(share * moved) / (1 - law.mean((1 - share) * old))
        weights.append(law.mean(count * moved) + memory * (law.mean(old) - law.mean(count * old * (h > 0))))
    return weights


@dataclass(frozen=True, slots=True)
class Moments:
    """Means and covariances of a coordinate of the n+1 models."""

    mean: Tensor  # "n+1 ..."
    covariance: Matrix


@dataclass(frozen=True, slots=True)
class Linear:
    """The algorithm of the paper on quadratics of one curvature: what a contact does to the moments."""

    centers: Tensor  # "n ...", of each client's minimum
    sampled: int  # s
    rate: float  # η
    curvature: float  # a
    deviation: float = 0.0  # of a gradient's coordinate: σ/√d
    side: float = 0.0  # of the lattice, both ways: its errors have the variance γ²/12 a coordinate
    damping: tuple[float, ...] | None = None  # η_i; 1 without weights

    def start(self, model: Tensor) -> Moments:
        """All n+1 models are the same."""
        n = len(self.centers)
        at = model.double().expand(n + 1, *model.shape)
        return Moments(at, torch.zeros(n + 1, n + 1, dtype=torch.float64))

    def contact(self, before: Moments, senders: Sequence[int], steps: Sequence[int]) -> Moments:
        """Y^i = X^i − η_i (1 − r^h)(X^i − c_i);  X ← (X + Σ Y^i)/(s+1);  X^i ← X/(s+1) + s/(s+1)·Y^i.

        Noise ξ of h steps is η Σ r^q ξ_q at the client, and goes into Y^i with η_i. Q(X) has one error, which all who
        are contacted share; each Q(Y^i) has its own.
        """
        n, s = len(self.centers), self.sampled
        move = torch.eye(n + 1, dtype=torch.float64)
        shift = torch.zeros(n + 1, *self.centers.shape[1:], dtype=torch.float64)
        noise = torch.zeros(n + 1, n + 1, dtype=torch.float64)
        move[0, 0] = 1 / (s + 1) + (s - len(senders)) / (s + 1)  # who does not answer leaves the server where it is
        ratio = 1 - self.rate * self.curvature
        sent = torch.zeros(n + 1, dtype=torch.float64)  # what the error of Q(X) does
        for i, h in zip(senders, steps, strict=True):
            damped = 1.0 if self.damping is None else self.damping[i]
            share = damped * (1 - ratio**h)
            move[0, i + 1] = (1 - share) / (s + 1)
            move[i + 1, 0] = 1 / (s + 1)
            move[i + 1, i + 1] = (1 - share) * s / (s + 1)
            own = torch.zeros(n + 1, dtype=torch.float64)
            own[0], own[i + 1] = 1 / (s + 1), s / (s + 1)
            shift += share * own.view(-1, *[1] * (shift.dim() - 1)) * self.centers[i].double()
            stepped = sum(ratio ** (2 * q) for q in range(h))
            noise += (damped * self.rate * self.deviation) ** 2 * stepped * torch.outer(own, own)
            noise[0, 0] += self.side**2 / 12 / (s + 1) ** 2
            sent[i + 1] = 1 / (s + 1)
        noise += self.side**2 / 12 * torch.outer(sent, sent)
        mean = torch.tensordot(move, before.mean, dims=1) + shift
        return Moments(mean, move @ before.covariance @ move.T + noise)

    def floor(self, steps: Sequence[int], rounds: int = 10_000) -> float:
        """The variance of a coordinate of X_t that is left for ever, when all clients are contacted in every round and
        have taken so many steps: what noise and quantization add to the squared distance from the fixed point."""
        now = self.start(torch.zeros(self.centers.shape[1:]))
        everybody = range(len(self.centers))
        for _ in range(rounds):
            after = self.contact(now, everybody, steps)
            if torch.allclose(after.covariance, now.covariance, rtol=1e-10, atol=0):
                break
            now = after
        return float(after.covariance[0, 0])


def deviation(noise: float, dim: int) -> float:
    """σ/√d: of a coordinate of a gradient, where E‖g̃ − ∇f_i‖² = σ²."""
    return noise / sqrt(dim)
