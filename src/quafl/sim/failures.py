"""Clients that do not answer a message: their progress is not finite, or they have nothing to say."""

import logging
from collections.abc import Iterable
from math import inf
from typing import Any, NamedTuple

from quafl.record.evaluations import Diverged

_log = logging.getLogger(__name__)


class Failure(NamedTuple):
    """A client that does not answer."""

    when: float  # the server hears it
    client: int
    round: int  # of the message
    broken: bool  # its progress is not finite; else it has nothing to say


class Failures:
    """Those of which the server has not heard yet. It bears so many with broken progress in a row."""

    def __init__(self, bearable: int) -> None:
        self._coming: list[Failure] = []
        self._in_a_row, self._bearable = 0, bearable
        self._named: set[int] = set()  # clients whose broken progress has been told

    def add(self, failures: Iterable[Failure]) -> None:
        """The server will hear of them."""
        self._coming += failures

    @property
    def first(self) -> float:
        """When the server hears of the next one; infinity, if there is none."""
        return min((failure.when for failure in self._coming), default=inf)

    def heard(self, now: float, *, beside_steps: bool) -> list[Failure]:
        """Those of which the server has heard since it last asked, maybe beside somebody's finite steps."""
        heard = [failure for failure in self._coming if failure.when <= now]
        self._coming = [failure for failure in self._coming if failure.when > now]
        broken = [failure for failure in heard if failure.broken]
        for failure in sorted(broken, key=lambda one: (one.client, one.round)):
            if failure.client not in self._named:
                what = "its progress is not finite; that reply is dropped, later ones are only counted"
                _log.warning("client %d, round %d: %s", failure.client, failure.round, what)
            self._named.add(failure.client)
        self._in_a_row = 0 if beside_steps else self._in_a_row + len(broken)
        if self._in_a_row > self._bearable:
            raise Diverged(f"in round {broken[-1].round} no client's progress is finite any more")
        return heard

    def mark(self) -> tuple[Any, ...]:
        """For `back`."""
        return list(self._coming), self._in_a_row, set(self._named)

    def back(self, mark: tuple[Any, ...]) -> None:
        """As it was at the mark."""
        self._coming, self._in_a_row, self._named = mark

    def state(self) -> dict[str, Any]:
        """For `restore`."""
        return {"failed": [tuple(failure) for failure in self._coming], "failures": self._in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self._coming, self._in_a_row = [Failure(*failure) for failure in state["failed"]], state["failures"]
