"""The theorem's parameters, by hand."""

from math import sqrt

import pytest

from quafl.theory import lattice_side, learning_rate


def test_learning_rate_and_side_equal_a_hand_computation() -> None:
    """n = 2, H = (1, 2), s = 1, T = 36: η = 3/6; Σ η_i²/n = (1 + 1/4)/2; R = 2 + 36^(3/3) for d = 3."""
    assert learning_rate(speeds=[1, 2], sampled=1, rounds=36) == pytest.approx(0.5)
    side = lattice_side(
        speeds=[1, 2],
        sampled=1,
        rounds=36,
        local_steps=5,
        dim=3,
        variance=8.0,
        dissimilarity=0.5,
        gap=6.0,
        smoothness=2.0,
    )
    assert side == pytest.approx(0.5 * sqrt(0.625 * 8 + 2 * 5 * 0.5 + 3) / (38**2 + 7))
