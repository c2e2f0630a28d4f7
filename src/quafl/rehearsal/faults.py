"""What breaks, and when: drawn once, at the beginning of a schedule. After a while, nothing breaks any more."""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

ONGOING = {  # kinds that strike by chance, and how often at most: of messages, of what a machine does, of restarts
    "lost": 0.06,
    "late": 0.05,
    "doubled": 0.1,
    "cut off": 0.02,
    "killed at an effect": 0.01,
    "killed again": 0.6,  # soon after it has come back
}
INCIDENTS = {  # kinds that strike at drawn times, and how many there are at most
    "server killed": 3,
    "client killed": 5,
    "client left": 1,
    "partition": 2,
    "server's disk full": 2,
    "client's disk full": 2,
    "client's disk lost": 1,
    "checkpoint damaged": 2,
    "clock jumped": 3,
    "connection closed": 2,
}
ACTIVE = 0.5  # of the kinds, in a schedule
SHORTEST, LONGEST = 5.0, 16.0  # seconds until nothing breaks any more


class Incident(NamedTuple):
    """One fault at one time, for so long."""

    at: float
    kind: str
    victim: str
    seconds: float


class Faults:
    """The plan. `happened` counts those that have really struck."""

    def __init__(self, rng: Random, clients: Sequence[str]) -> None:
        self.until = rng.uniform(SHORTEST, LONGEST)
        self.on = True
        self.happened: Counter[str] = Counter()
        self._rng = rng
        self._rates = {kind: rng.uniform(0, most) for kind, most in ONGOING.items() if rng.random() < ACTIVE}
        self.incidents = [
            Incident(rng.uniform(0, self.until), kind, rng.choice(clients), rng.uniform(0.5, 5.0))
            for kind, most in INCIDENTS.items()
            if rng.random() < ACTIVE
            for _ in range(rng.randint(1, most))
        ]

    def strikes(self, kind: str) -> bool:
        """Whether this one happens now."""
        rate = self._rates.get(kind, 0.0) if self.on else 0.0
        if not rate or self._rng.random() >= rate:
            return False
        self.happened[kind] += 1
        return True
