"""The paper's bounds, term by term, and from how many rounds on each of them holds.

Everywhere D = (Σ η_i²/n)·σ² + 2KG² (`Problem.spread`), Δ = f(μ_0) − f_* (`gap`) and q = (R²+7)²γ².
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt

from quafl.theory.parameters import Problem


@dataclass(frozen=True, slots=True)
class Term:
    """A summand of a bound."""

    name: str
    formula: str
    value: float
    remedy: str  # what makes it smaller


@dataclass(frozen=True, slots=True)
class Condition:
    """What a proof assumes of the step size, and the T from which that is so."""

    formula: str
    place: str  # in the paper
    largest_step: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Bound:
    """An upper bound on a mean of squared gradients, over all rounds."""

    name: str
    of: str  # what is bounded
    place: str  # in the paper
    terms: tuple[Term, ...]
    remark: str = ""  # where the paper disagrees with itself, or leaves something out

    @property
    def value(self) -> float:
        """Their sum."""
        return sum(term.value for term in self.terms)

    def share(self, term: Term) -> float:
        """Of the whole."""
        return term.value / self.value if self.value else 0.0

    @property
    def largest(self) -> Term:
        """The term that decides."""
        return max(self.terms, key=lambda term: term.value)


START, NOISE, DRIFT, DRIFT_OF_START, CODE = (
    "distance to go",
    "noise and dissimilarity",
    "models apart",
    "models apart at first",
    "quantization",
)
_OF_MEAN = "(1/T) Σ E‖∇f(μ_t)‖², at the mean of all models"
_LONGER = "more rounds (T) or more clients a round (s); a better initial model"
_NOISE = "larger batches (σ²), more alike data (G²), fewer local steps (K), slow clients less slow (H_min)"
_APART = "more rounds: it falls as 1/T; fewer clients (n³), fewer local steps, slow clients less slow (H_min³)"
_CODE = "a finer lattice: more bits"


def main_theorem(p: Problem) -> Bound:
    """Theorem "thm:quantized", with the constants of Lemma "lem:lemmamainconvergence", which its O(·) hides."""
    n, s, k, h, root = p.clients, p.sampled, p.local_steps, p.slowest, sqrt(p.sampled * p.rounds)
    common = n * (n + 1) ** 2 * k * p.smoothness / (h**3 * p.rounds)
    return Bound(
        "main theorem",
        _OF_MEAN,
        'Theorem "thm:quantized"; constants: Lemma "lem:lemmamainconvergence"',
        (
            Term(START, "4Δ/√(sT)", 4 * p.gap / root, _LONGER),
            Term(NOISE, "36KLD/(H_min²√(sT))", 36 * k * p.smoothness * p.spread / (h**2 * root), _NOISE),
            Term(DRIFT, "1608n(n+1)²K²L²D/(H_min³T)", 1608 * common * k * p.smoothness * p.spread, _APART),
            Term(DRIFT_OF_START, "800n(n+1)²KLΔ/(sH_min³T)", 800 * common * p.gap / s, _APART),
        ),
        "Its proof needs sH_min² ≥ 1 to put 2Δ/(s√s·H_min²√T) into the first term, and leaves out "
        "2LD/(s√s·H_min²√T), at most 1/18 of the second; the full theorem has both.",
    )


def full_theorem(p: Problem) -> Bound:
    """Theorem "thm:convergence" as its proof ends, equation "eqn:finalboundonconvergence": η = (n+1)/(H_min√(sT)), and
    any γ; here the main theorem's."""
    n, s, k, h, root = p.clients, p.sampled, p.local_steps, p.slowest, sqrt(p.sampled * p.rounds)
    level, code = p.smoothness * p.spread, p.error**2
    return Bound(
        "full theorem",
        _OF_MEAN,
        'Theorem "thm:convergence", as its proof ends: equation "eqn:finalboundonconvergence"',
        (
            Term(START, "2Δ/√(sT)", 2 * p.gap / root, _LONGER),
            Term(NOISE, "36KLD/(H_min²√(sT))", 36 * k * level / (h**2 * root), _NOISE),
            Term(
                DRIFT,
                "808n(n+1)²K²L²D/(H_min³T)",
                808 * n * (n + 1) ** 2 * k**2 * p.smoothness * level / (h**3 * p.rounds),
                _APART,
            ),
            Term(f"{CODE}, models apart", "800nKL²q/H_min", 800 * n * k * p.smoothness**2 * code / h, _CODE),
            Term(
                f"{CODE}, mean moved",
                "2Lq√T/(√s(n+1)²)",
                2 * p.smoothness * code * sqrt(p.rounds / s) / (n + 1) ** 2,
                _CODE,
            ),
        ),
        "For η = (n+1)/(H_min√(sT)), with which the proof ends.",
    )


def full_theorem_as_printed(p: Problem) -> Bound:
    """Theorem "thm:convergence" as it is stated, for η = (n+1)/(sH_min√T), with the main theorem's γ."""
    n, s, k, h, root = p.clients, p.sampled, p.local_steps, p.slowest, sqrt(p.rounds)
    level, code = p.smoothness * p.spread, p.error**2
    return Bound(
        "full theorem, as printed",
        _OF_MEAN,
        'Theorem "thm:convergence", its statement',
        (
            Term(START, "2Δ/√T", 2 * p.gap / root, _LONGER),
            Term(NOISE, "6KLD/(H_min²√T)", 6 * k * level / (h**2 * root), _NOISE),
            Term(
                DRIFT,
                "808n(n+1)²K²L²D/(sH_min³T)",
                808 * n * (n + 1) ** 2 * k**2 * p.smoothness * level / (s * h**3 * p.rounds),
                _APART,
            ),
            Term(f"{CODE}, models apart", "800nKL²q/H_min", 800 * n * k * p.smoothness**2 * code / h, _CODE),
            Term(
                f"{CODE}, mean moved",
                "2Lq√T/((n+1)²sH_min)",
                2 * p.smoothness * code * root / ((n + 1) ** 2 * s * h),
                _CODE,
            ),
        ),
        "For η = (n+1)/(sH_min√T). With that η the proof gives 36KLD/(sH_min²√T) for the second term and "
        "2Lq√T/(n+1)² for the last one.",
    )


def server_corollary(p: Problem) -> Bound:
    """Corollary "cor:quant" with the constants of Lemma "lem:mainlemmaserver"."""
    n, s, k, h, root = p.clients, p.sampled, p.local_steps, p.slowest, sqrt(p.sampled * p.rounds)
    common, lip = n * (n + 1) ** 2 * p.smoothness / (h**2 * p.rounds), p.smoothness
    return Bound(
        "server's corollary",
        "(1/T) Σ E‖∇f(X_t)‖², at the server's model",
        'Corollary "cor:quant"; constants: Lemma "lem:mainlemmaserver"',
        (
            Term(START, "12Δ/√(sT)", 12 * p.gap / root, _LONGER),
            Term(NOISE, "108KLD/(H_min²√(sT))", 108 * k * lip * p.spread / (h**2 * root), _NOISE),
            Term(
                DRIFT,
                "(4824K/H_min + 320n)·n(n+1)²KL²D/(H_min²T)",
                (4824 * k / h + 320 * n) * common * k * lip * p.spread,
                _APART,
            ),
            Term(
                DRIFT_OF_START,
                "(2400K/H_min + 160n)·n(n+1)²LΔ/(sH_min²T)",
                (2400 * k / h + 160 * n) * common * p.gap / s,
                _APART,
            ),
        ),
        "The lemma prints 160n²(n+1)²L²Δ/(sH_min²T) in the last term; its proof gives L, as units demand.",
    )


def conditions(p: Problem) -> tuple[Condition, ...]:
    """What the proof of the main theorem assumes of η. With η = (n+1)/(H_min√(sT)), each is a number of rounds."""
    n, s, k, lip, b2 = p.clients, p.sampled, p.local_steps, p.smoothness, p.stretch
    linear = 64 * b2 * s * k**2 * lip / (n + 1)
    square = lip**2 * k**3 * b2 * (8 + 800 * n * s)
    descent = (sqrt(linear**2 + square * p.slowest) - linear) / (2 * square)  # root of square·η² + linear·η = H_min/4
    return (
        _from(p, "η < 1/(4LK²)", 'Lemma "lem:sumofstochasticFixed"', 1 / (4 * lip * k**2)),
        _from(
            p,
            "64sL²K²η² ≤ 1/(20n), the theorem's T ≥ Ω(n³)",
            'Lemma "lem:PhiBoundPerStepAsync2"',
            1 / (sqrt(1280 * n * s) * lip * k),
        ),
        _from(p, "η ≤ (n+1)/(32sKL)", 'proof of "thm:convergence", first simplification', (n + 1) / (32 * s * k * lip)),
        _from(p, "η < 1/(100B√(ns)K²L)", 'proof of "thm:convergence"', 1 / (100 * sqrt(b2 * n * s) * k**2 * lip)),
        _from(
            p,
            "8B²L²K³η² + 64B²sK²Lη/(n+1) + 800B²nsK³L²η² ≤ H_min/4",
            'proof of "thm:convergence": what the condition before it is for; it does not follow where H_min is small',
            descent,
        ),
    )


def server_condition(p: Problem) -> Condition:
    """What the corollary needs beyond that: 2L²·160B²n²sK²η² ≤ 1, which is the corollary's T ≥ Ω(n⁴)."""
    largest = 1 / (p.smoothness * p.local_steps * p.clients * sqrt(320 * p.stretch * p.sampled))
    return _from(p, "320B²n²sK²L²η² ≤ 1, the corollary's T ≥ Ω(n⁴)", 'Lemma "lem:mainlemmaserver"', largest)


def holds_from(needed: Sequence[Condition]) -> int:
    """The T from which all of them are met."""
    return max(condition.rounds for condition in needed)


def _from(p: Problem, formula: str, place: str, largest: float) -> Condition:
    """T with (n+1)/(H_min√(sT)) at most so large."""
    return Condition(formula, place, largest, ceil(((p.clients + 1) / (p.slowest * largest)) ** 2 / p.sampled))


def potential_bound(p: Problem, gradients: float) -> float:
    """(1/T) Σ E[Φ_t] ≤ 80n²q + 80n²sKη²D + 160B²n²sK²η²·(1/T) Σ E‖∇f(μ_t)‖² (Lemma "lem:PhiBoundGlobal")."""
    moved = p.spread + 2 * p.stretch * p.local_steps * gradients
    return 80 * p.clients**2 * (p.error**2 + p.sampled * p.local_steps * p.step**2 * moved)


def rounds_for(p: Problem, goal: float, most: int = 2**80) -> int | None:
    """The fewest rounds whose main theorem is at most that, and holds; None beyond all `most`."""
    least = holds_from(conditions(p))

    def enough(rounds: int) -> bool:
        return main_theorem(replace(p, rounds=rounds)).value <= goal

    high = max(least, 1)
    if enough(high):
        return high
    while not enough(high):
        high *= 2
        if high > most:
            return None
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
