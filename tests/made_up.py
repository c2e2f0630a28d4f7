"""Recorded curves, made up."""

from collections.abc import Callable, Sequence

import numpy as np

from quafl.record.rows import Row
from quafl.record.summary import Curve

TIMES = np.linspace(0, 100, 51)


def curve(
    label: str,
    accuracy: Callable[[float, int], float],
    seeds: Sequence[int] = range(5),
    until: float = 100.0,
    pace: float = 2.0,
    troubles: dict[int, str] | None = None,
) -> Curve:
    """Accuracy as a function of time and seed; a round takes `pace` time units, each of which sends a
    megabyte."""
    rows: dict[int, list[Row]] = {
        seed: [
            {
                "seed": seed,
                "time": time,
                "round": time / pace,
                "local_steps": 10 * time,
                "bytes_up": 500_000 * time,
                "bytes_down": 500_000 * time,
                "contacts": time,
                "zero_step_contacts": time / 4,
                "slow_contacts": time / 3,
                "slow_zero_step_contacts": time / 6,
                "accuracy": accuracy(time, seed),
                "loss": 1 - accuracy(time, seed),
            }
            for time in TIMES
            if time <= until
        ]
        for seed in seeds
    }
    run = {"until": until, "target": 0.8, "metric": "accuracy", "lower_is_better": False, "seeds": list(seeds)}
    return Curve(label, rows, {"run": run, "clients": {}}, {}, troubles or {})


def rising(speed: float, noise: float = 0.0) -> Callable[[float, int], float]:
    """Towards 1; each seed's speed is a little different, as the seed says."""
    return lambda time, seed: 1 - np.exp(-time * speed * (1 + noise * (seed % 3 - 1)))
