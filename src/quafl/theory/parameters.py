"""The parameters for which Theorem "thm:quantized" and Lemma "lem:lemmamainconvergence" hold."""

from collections.abc import Sequence
from math import sqrt


def learning_rate(*, speeds: Sequence[float], sampled: int, rounds: int) -> float:
    """η = (n+1)/(H_min·√(sT))."""
    return (len(speeds) + 1) / (min(speeds) * sqrt(sampled * rounds))


def lattice_side(
    *,
    speeds: Sequence[float],  # H_i
    sampled: int,  # s
    rounds: int,  # T
    local_steps: int,  # K
    dim: int,  # d
    variance: float,  # σ²
    dissimilarity: float,  # G²
    gap: float,  # f(μ_0) − f_*
    smoothness: float,  # L
) -> float:
    """γ with γ² = η²/(R²+7)²·((Σ η_i²/n)·σ² + 2KG² + (f(μ_0) − f_*)/L) and R = 2 + T^(3/d), η_i = H_min/H_i.

    The theorem prints the first sum as Σ H_i²/(nH²); the appendix, from which it follows, has Σ η_i²/n.
    """
    damping = sum((min(speeds) / speed) ** 2 for speed in speeds) / len(speeds)
    reach: float = 2 + rounds ** (3 / dim)
    error: float = damping * variance + 2 * local_steps * dissimilarity + gap / smoothness
    return learning_rate(speeds=speeds, sampled=sampled, rounds=rounds) * sqrt(error) / (reach**2 + 7)
