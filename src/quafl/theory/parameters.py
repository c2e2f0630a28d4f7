"""What the theorems take for given, and the parameters that they ask for: step size, lattice, bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, log2, sqrt
from typing import Literal, TypeAlias

Reading: TypeAlias = Literal["main text", "appendix"]  # of what the paper prints in two ways


def learning_rate(*, speeds: Sequence[float], sampled: int, rounds: int, reading: Reading = "main text") -> float:
    """η = (n+1)/(H_min·√(sT)), as the main theorem and all proofs have it.

    The statement of the appendix's theorem "thm:convergence" prints (n+1)/(s·H_min·√T), which is √s times smaller.
    """
    root = sqrt(sampled * rounds) if reading == "main text" else sampled * sqrt(rounds)
    return (len(speeds) + 1) / (min(speeds) * root)


def damping(speeds: Sequence[float], reading: Reading = "appendix") -> float:
    """(1/n) Σ η_i² with η_i = H_min/H_i, the factor of σ², as the appendix has it: at most 1.

    The main theorem's γ prints (1/n) Σ H_i²/H² instead, upside down: at least 1, if H is H_min.
    """
    ratios = [min(speeds) / speed if reading == "appendix" else speed / min(speeds) for speed in speeds]
    return sum(ratio**2 for ratio in ratios) / len(ratios)


def reach(rounds: int, dim: int) -> float:
    """R = 2 + T^(3/d)."""
    return 2.0 + float(rounds ** (3 / dim))


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
    reading: Reading = "appendix",
) -> float:
    """γ with γ² = η²/(R²+7)²·(v·σ² + 2KG² + (f(μ_0) − f_*)/L) and R = 2 + T^(3/d); v is `damping`.

    The theorem prints Σ H_i²/(nH²) for v; the appendix, from which it follows, has Σ η_i²/n.
    """
    error: float = damping(speeds, reading) * variance + 2 * local_steps * dissimilarity + gap / smoothness
    step = learning_rate(speeds=speeds, sampled=sampled, rounds=rounds)
    return step * sqrt(error) / (reach(rounds, dim) ** 2 + 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """All that the theorems take for given: who takes part, for how long, and what is learned.

    >>> problem = Problem(speeds=(1.0, 2.0), sampled=1, local_steps=5, rounds=36, dim=3, smoothness=2.0, variance=8.0,
    ...                   dissimilarity=0.5, gap=6.0)
    >>> problem.step
    0.5
    """

    speeds: tuple[float, ...]  # H_i: mean steps of each client between two contacts
    sampled: int  # s
    local_steps: int  # K
    rounds: int  # T
    dim: int  # d
    smoothness: float  # L: ‖∇f_i(x) − ∇f_i(y)‖ ≤ L‖x − y‖
    variance: float = 0.0  # σ²: E‖g̃_i − ∇f_i‖² ≤ σ²
    dissimilarity: float = 0.0  # G², and
    stretch: float = 1.0  # B²: (1/n) Σ ‖∇f_i‖² ≤ G² + B²‖∇f‖²
    gap: float  # f(μ_0) − f_*

    def __post_init__(self) -> None:
        n = len(self.speeds)
        if not n or not all(0 < speed <= self.local_steps * (1 + 1e-9) for speed in self.speeds):
            raise ValueError(
                f"speeds are {self.speeds}: each client's H_i must be positive and at most K = {self.local_steps}; a "
                f"client that makes no steps stops the theorem"
            )
        for name, least in ("sampled", 1), ("local_steps", 1), ("rounds", 1), ("dim", 1):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least {least}")
        if self.sampled > n:
            raise ValueError(f"sampled is {self.sampled}, there are only {n} clients; sample at most all of them")
        for name in "variance", "dissimilarity", "gap":
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}, must not be negative, and finite")
        if not (0 < self.smoothness < inf and 1 <= self.stretch < inf):
            raise ValueError(
                f"smoothness is {self.smoothness} and stretch {self.stretch}: L must be positive, B² at least 1"
            )

    @property
    def clients(self) -> int:
        """n."""
        return len(self.speeds)

    @property
    def slowest(self) -> float:
        """H_min."""
        return min(self.speeds)

    @property
    def step(self) -> float:
        """η of the main theorem."""
        return learning_rate(speeds=self.speeds, sampled=self.sampled, rounds=self.rounds)

    @property
    def reach(self) -> float:
        """R."""
        return reach(self.rounds, self.dim)

    @property
    def spread(self) -> float:
        """D = (Σ η_i²/n)·σ² + 2KG², of which all bounds are made."""
        return damping(self.speeds) * self.variance + 2 * self.local_steps * self.dissimilarity

    @property
    def side(self) -> float:
        """γ, with the appendix's sum."""
        return self.side_as("appendix")

    def side_as(self, reading: Reading) -> float:
        """γ, with the sum of ratios of one reading or the other."""
        return lattice_side(
            speeds=self.speeds,
            sampled=self.sampled,
            rounds=self.rounds,
            local_steps=self.local_steps,
            dim=self.dim,
            variance=self.variance,
            dissimilarity=self.dissimilarity,
            gap=self.gap,
            smoothness=self.smoothness,
            reading=reading,
        )

    @property
    def error(self) -> float:
        """(R²+7)γ, how far a decoded vector may be from what was sent (Lemma "Lattice Quantization")."""
        return (self.reach**2 + 7) * self.side

    def bits_of_a_message(self) -> float:
        """d·log₂(R²(1000n³s(R²+7)² + 10000B²n³s³H_min²K²L(R²+7)²))/2, the last line of the proof of Lemma
        "lem:bitsquantized", whose O(·) is taken for a factor of one, the logarithm being of a square."""
        n, s, power = self.clients, self.sampled, (self.reach**2 + 7) ** 2
        second = 10000 * self.stretch * n**3 * s**3 * (self.slowest * self.local_steps) ** 2 * self.smoothness * power
        return self.dim * log2(self.reach**2 * (1000 * n**3 * s * power + second)) / 2

    def bits_in_all(self) -> float:
        """Of 2sT messages: the theorem's O(sT(d log n + log T)), with that factor of one."""
        return 2 * self.sampled * self.rounds * self.bits_of_a_message()

    def bits_a_coordinate(self, distance: float, deviations: float = 4.0) -> float:
        """What the lattice of this library needs, if its error is to be (R²+7)γ and models are so far apart.

        Its side g has the error √(d/12)·g and decodes up to g(2^b − 1)/2, which is to be `deviations` times the
        usual coordinate, distance/√d: b = log₂(1 + 2·deviations·distance/(√12·error)).
        """
        return log2(1 + 2 * deviations * distance / (sqrt(12) * self.error)) if isfinite(self.error) else inf
