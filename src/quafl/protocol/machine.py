"""A machine without input or output: what happened, and when, goes in; what to do comes out.

What a machine does over time is written as flows: generators that yield what they wait for. Two machines that are told
the same events in the same order do the same. Whoever drives one gives it the time, carries its effects out, and tells
it what came of them: `deploy` with a real network, disk and processors, `rehearsal` with virtual ones.
"""

from collections.abc import Callable, Generator
from math import inf
from typing import Any, NamedTuple, TypeAlias

from quafl.protocol.carrier import Octets

INFO, WARNING, ERROR = 20, 30, 40  # levels of what is said, as the standard library's logging has them

# What a flow may wait for. Each is an effect, too: the driver is given it with the flow's number.


class Ask(NamedTuple):
    """Octets to a party, by its name: its answer comes back, or Unreachable after so many seconds."""

    name: str
    octets: bytes
    within: float


class Compute(NamedTuple):
    """Something that takes long; it has no side effects."""

    work: Callable[[], Any]


class Write(NamedTuple):
    """A record that must survive the end of this process: the flow goes on when it does, or with an OSError."""

    record: bytes


class Until(NamedTuple):
    """Something of the machine's own is so, or it is that late; nothing comes back."""

    holds: Callable[[], bool]
    deadline: float = inf


Wait: TypeAlias = Ask | Compute | Write | Until
Flow: TypeAlias = Generator[Wait, Any, Any]

# Effects that nobody waits for.


class Answer(NamedTuple):
    """To what a party has asked under that number."""

    call: int
    octets: bytes


class Wake(NamedTuple):
    """Tell the machine when it is that late: `Woken`."""

    at: float


class Say(NamedTuple):
    """Something that people should know, for the log."""

    level: int
    sentence: str


class Do(NamedTuple):
    """An Ask, a Compute or a Write, under the number of the flow that waits for it."""

    number: int
    wait: Ask | Compute | Write


Effect: TypeAlias = Do | Answer | Wake | Say

# Events that every machine knows.


class Asked(NamedTuple):
    """A party says something by itself; the `call` is the driver's number for it."""

    call: int
    name: str
    octets: Octets


class Done(NamedTuple):
    """What came of a `Do`: a result, or an exception."""

    number: int
    result: Any


class Woken(NamedTuple):
    """Some time has come."""


class Machine:
    """Runs flows. A subclass hears what parties say, in `_asked`."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds since some beginning; it never runs backwards
        self._effects: list[Effect] = []
        self._numbers = 0
        self._flows: dict[int, Flow] = {}  # that wait for something done
        self._waiting: list[tuple[Flow, Until]] = []
        self._woken_at = inf  # the earliest time for which a Wake was asked for

    def happen(self, now: float, event: Any) -> list[Effect]:
        """What to do about an event."""
        self.now = max(self.now, now)
        match event:
            case Asked():
                self._asked(event)
            case Done(number, result):
                flow = self._flows.pop(number, None)
                if flow is not None:
                    self._resume(flow, result)
            case Woken():
                self._woken_at = inf
        self._look_around()
        effects, self._effects = self._effects, []
        return effects

    def _asked(self, event: Asked) -> None:
        raise NotImplementedError

    def _spawn(self, flow: Flow) -> None:
        """Begin it now."""
        self._resume(flow, None)

    def _resume(self, flow: Flow, result: Any) -> None:
        try:
            wait = flow.throw(result) if isinstance(result, Exception) else flow.send(result)
        except StopIteration:
            return
        if isinstance(wait, Until):
            self._waiting.append((flow, wait))
            return
        self._numbers += 1
        self._flows[self._numbers] = flow
        self._effects.append(Do(self._numbers, wait))

    def _look_around(self) -> None:
        """Let those go on whose time has come, or whose wish has come true."""
        while True:
            ready = next((one for one in self._waiting if self.now >= one[1].deadline or one[1].holds()), None)
            if ready is None:
                break
            self._waiting.remove(ready)
            self._resume(ready[0], None)
        earliest = min((wait.deadline for _, wait in self._waiting), default=inf)
        if earliest < self._woken_at:
            self._woken_at = earliest
            self._effects.append(Wake(earliest))

    def _answer(self, call: int, octets: bytes) -> None:
        self._effects.append(Answer(call, octets))

    def _say(self, level: int, sentence: str, *values: object) -> None:
        self._effects.append(Say(level, sentence % values if values else sentence))
