"""How much nearer a round brings all models when nobody takes a step: exactly, and as the lemma says."""

from quafl.record.diagnostics import least_contraction as lemma

__all__ = ["clients_apart", "contraction", "lemma", "potential_after", "server_apart"]


def contraction(clients: int, sampled: int) -> float:
    """The least 1 − E[Φ_{t+1}]/Φ_t over all positions of n+1 models, when s of n clients are contacted, nobody has
    moved and nothing is quantized; Φ_t = ‖X_t − μ_t‖² + Σ ‖X^i − μ_t‖².

    E[Φ_{t+1}] is a quadratic form that is the same for all clients. So it has two factors: one of positions in which
    the server is at the mean (z = e_1 − e_2 shows it), one of those in which all clients are at the same point:
    (n−s)/(n(s+1)).

    >>> contraction(clients=4, sampled=1), lemma(4)
    (0.125, 0.0625)
    """
    return 1 - max(clients_apart(clients, sampled), server_apart(clients, sampled))


def clients_apart(n: int, s: int) -> float:
    """E[Φ_{t+1}]/Φ_t where X_t = μ_t. For z = e_1 − e_2: neither client is contacted, or one, or both."""
    if n == 1:
        return 0.0
    both, one = s * (s - 1) / (n * (n - 1)), 2 * s * (n - s) / (n * (n - 1))
    after_one = 1 + (1 + s**2) / (s + 1) ** 2
    after_both = 2 * s**2 / (s + 1) ** 2
    return (both * after_both + one * after_one + (1 - both - one) * 2) / 2


def server_apart(n: int, s: int) -> float:
    """E[Φ_{t+1}]/Φ_t where all clients are at one point: (n−s)/(n(s+1)), whoever is contacted."""
    return (n - s) / (n * (s + 1))


def potential_after(
    before: float, *, clients: int, sampled: int, step: float, progress: float, error: float = 0.0
) -> float:
    """The lemma's bound on E[Φ_{t+1}]: (1 − 1/(4n))·Φ_t + 8sη²·Σ η_i²‖h̃_i‖² + 16n(R²+7)²γ².

    `progress` is Σ η_i²‖h̃_i‖² over all clients, `error` is (R²+7)γ. The appendix prints the sum without η_i².
    """
    return (1 - lemma(clients)) * before + 8 * sampled * step**2 * progress + 16 * clients * error**2
