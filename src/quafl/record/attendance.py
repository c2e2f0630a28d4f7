"""Who was there in a federation, and when: a row for each change, and what is read of them again."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

STATUS, EVENTS = "status.json", "events.csv"  # in a server's run folder
JOINED, THERE, AWAY, LEFT_OUT = "joined", "there", "away", "left out"
STARTED, STOPPED = "server started", "server stopped"


class Event(NamedTuple):
    """What became of a client, or of the server, which has no name: after so many seconds of the run, at a time of the
    wall clock, in a round."""

    time: float
    at: str
    round: int
    client: str
    event: str


class Stay(NamedTuple):
    """A client was there, or left out, from then on, until then."""

    client: str
    state: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Attendance:
    """What a federation's folder says of its clients: the last counts of each, and all events."""

    clients: list[dict[str, Any]]
    events: list[Event]
    seconds: float  # of the run

    def stays(self) -> list[Stay]:
        """When each client was there, or left out."""
        found, since = list[Stay](), dict[str, Event]()
        for event in self.events:
            ended = list(since) if event.event in (STARTED, STOPPED) else [event.client]
            found += [_stay(since.pop(name), event.time) for name in ended if name in since]
            if event.event in (JOINED, THERE, LEFT_OUT):
                since[event.client] = event
        return found + [_stay(event, self.seconds) for event in since.values()]


def _stay(event: Event, stop: float) -> Stay:
    state = LEFT_OUT if event.event == LEFT_OUT else THERE
    return Stay(event.client, state, event.time, max(event.time, stop))


class Book:
    """The file of events, written whenever a look at the server's status finds something new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._events = read_events(path)
        self._states: dict[str, str] = {}  # of clients that are known since the server started
        self._started = False

    def look(self, status: Mapping[str, Any]) -> None:
        """What has changed since the last look; OSError, if it cannot be written."""
        seconds, fresh = status["seconds"], list[Event]()
        late = any(event.time > seconds for event in self._events)

        def note(client: str, event: str) -> None:
            at = datetime.fromtimestamp(status["at"], UTC).isoformat(timespec="seconds")
            fresh.append(Event(round(seconds, 1), at, status["round"], client, event))

        if status["running"] and not self._started:
            note("", STARTED)
        for member in status["clients"]:
            name, state = member["name"], _state(member)
            if state != self._states.get(name, AWAY):
                known = any(event.client == name for event in self._events)
                note(name, JOINED if state == THERE and not known else state)
            self._states[name] = state
        if self._started and not status["running"]:
            note("", STOPPED)
        self._started = status["running"]
        if late:  # the clock starts with the first round, and again from a checkpoint: time does not run backwards
            self._events = [event._replace(time=min(event.time, round(seconds, 1))) for event in self._events]
        self._events += fresh
        if fresh or late:
            self._write(fresh, whole=late)

    def _write(self, fresh: Sequence[Event], *, whole: bool) -> None:
        mode = "w" if whole or not self._path.exists() else "a"
        with self._path.open(mode, newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            if mode == "w":
                writer.writerow(Event._fields)
            writer.writerows(self._events if mode == "w" else fresh)


def _state(member: Mapping[str, Any]) -> str:
    return LEFT_OUT if member["left_out"] else THERE if member["there"] else AWAY


def read_events(path: Path) -> list[Event]:
    """All that are whole; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        rows = [row for row in csv.reader(stream) if len(row) == len(Event._fields)]
    return [Event(float(time), at, int(round), client, event) for time, at, round, client, event in rows[1:]]


def read_attendance(folder: Path) -> Attendance | None:
    """Of a server's run folder; None if there is nothing."""
    if not (folder / STATUS).exists():
        return None
    status = json.loads((folder / STATUS).read_text(encoding="utf-8"))
    return Attendance(status["clients"], read_events(folder / EVENTS), float(status["seconds"]))
