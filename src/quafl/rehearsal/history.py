"""What has happened in a schedule, to be read by people."""

from collections import deque
from typing import Any

from quafl.codec.seams import WireError
from quafl.protocol import messages
from quafl.protocol.machine import Answer, Ask, Asked, Compute, Do, Done, Say, Wake, Woken, Write

LAST = 30  # events that are kept, unless all are


class History:
    """Events and what came of them. They are put into words when somebody reads them."""

    def __init__(self, *, keep: bool) -> None:
        self._all: deque[tuple[float, str, Any, Any]] = deque(maxlen=None if keep else LAST)

    def note(self, now: float, name: str, event: Any, effects: Any = ()) -> None:
        """Something has happened."""
        self._all.append((now, name, event, effects))

    def lines(self) -> list[str]:
        """In the order of time."""
        lines = []
        for now, name, event, effects in self._all:
            lines.append(f"{now:9.3f} {name or 'world':9} {_words(event)}")
            lines += [f"{'':19}   → {_words(effect)}" for effect in effects if not isinstance(effect, Wake)]
        return lines


def kind(octets: Any) -> type | None:
    """Of message; None: it is none."""
    try:
        return type(messages.from_bytes(octets))
    except WireError:
        return None


def _words(what: Any) -> str:
    match what:
        case Asked(call, name, octets):
            words = f"is told by {name}, call {call}: {_message(octets)}"
        case Done(number, result):
            words = f"{number} is done: {_result(result)}"
        case Woken():
            words = "wakes"
        case Do(number, Ask(name, octets, within)):
            words = f"{number} asks {name} within {within:.1f} s: {_message(octets)}"
        case Do(number, Compute()):
            words = f"{number} computes"
        case Do(number, Write(record)):
            words = f"{number} writes {record[:100]!a}"
        case Answer(call, octets):
            words = f"answers call {call}: {_message(octets)}"
        case Say(_, sentence):
            words = f"says: {sentence}"
        case _:
            words = str(what)
    return words


def _result(result: Any) -> str:
    if isinstance(result, bytes):
        return _message(result)
    return f"{type(result).__name__} {result}" if isinstance(result, Exception) else type(result).__name__


def _message(octets: Any) -> str:
    try:
        message = messages.from_bytes(octets)
    except Exception as error:
        return f"{len(octets)} octets ({error})"
    ticket = getattr(message, "ticket", b"").hex()[10:22]
    more = f" {messages.digest(octets).hex()[:6]}" if isinstance(message, messages.Reply) else ""
    if isinstance(message, (messages.Refused, messages.Rejected)):
        more = f" {messages.sentence(message)}"
    return f"{type(message).__name__} {ticket}{more}, {len(octets)} octets"
