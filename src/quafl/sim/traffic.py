"""Answers on their way to the server, over a link that carries only so many exchanges at a time."""

from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from math import inf
from typing import Any, NamedTuple

from torch import Tensor

from quafl.codec.coders import Parcel
from quafl.core.messages import Message
from quafl.core.seams import Counts, Ids
from quafl.core.structs import Struct
from quafl.sim.crew import Words
from quafl.sim.link import Link


@dataclass(frozen=True, slots=True)
class Told:
    """A message of the server to some clients, as far as their answers need it."""

    round: int
    down: Message | None  # what the answers are near to; None where nobody needs it


@dataclass(slots=True)
class Sent(Struct):
    """Answers of clients that were contacted together; what they say may be found out only when the first arrives."""

    ready: Tensor  # when each begins to wait for the server's link
    down: Counts  # octets of its exchange
    up: Counts
    sender: Ids
    silent: Tensor  # bool: rows that have turned out to have nothing to say
    question: Told
    answer: Words | None = None

    @property
    def computed(self) -> bool:
        """Whether it is known what they say."""
        return self.answer is not None


class Trip(NamedTuple):
    """One answer under way, ordered by the time of what happens to it next."""

    when: float
    number: int  # the first of several at the same time is the one sent first
    client: int
    row: int
    sent: Sent


class Traffic:
    """Exchanges begin in the order in which the clients are ready, `lanes` at a time."""

    def __init__(self, link: Link, lanes: int, down: type[Message]) -> None:
        self._link, self._down = link, down
        self._waiting: list[Trip] = []  # for the link, by the time they are ready
        self._moving: list[Trip] = []  # by the time they arrive
        self._free = [0.0] * lanes  # when each lane is
        self._trips = 0  # ever
        self._latest: dict[int, int] = {}  # each client's last trip

    def __len__(self) -> int:
        return len(self._waiting) + len(self._moving)

    def depart(self, sent: Sent) -> None:
        """These answers are under way, from when they are ready."""
        for row, (ready, client) in enumerate(zip(sent.ready.tolist(), sent.sender.tolist(), strict=True)):
            self._latest[client] = self._trips
            heappush(self._waiting, Trip(ready, self._trips, client, row, sent))
            self._trips += 1

    def void(self, ids: Ids) -> None:
        """Clients that are asked again forget what they were doing."""
        for client in ids.tolist():
            self._latest.pop(client, None)

    def is_void(self, trip: Trip) -> bool:
        """Whether its client has been asked again since."""
        return self._latest.get(trip.client) != trip.number

    def next(self, deadline: float) -> Trip | None:
        """The answer that arrives next, if one does by then; or one that is about to begin its way although it is not
        known yet what it says: it stays where it is until then."""
        while True:
            departure = max(self._waiting[0].when, self._free[0]) if self._waiting else inf
            arrival = self._moving[0].when if self._moving else inf
            if min(departure, arrival) > deadline or min(departure, arrival) == inf:
                return None
            if arrival < departure:
                return heappop(self._moving)
            if not self._waiting[0].sent.computed:
                return self._waiting[0]
            self._begin(heappop(self._waiting), departure)

    def mark(self) -> tuple[Any, ...]:
        """For `back`, while nothing is under way."""
        return list(self._free), self._trips, dict(self._latest)

    def back(self, mark: tuple[Any, ...]) -> None:
        """As it was at the mark."""
        self._free, self._trips, self._latest = mark
        self._waiting, self._moving = [], []

    def state(self) -> dict[str, Any]:
        """For `restore`."""
        waiting, moving = (
            sorted(trip for trip in trips if not trip.sent.silent[trip.row]) for trips in (self._waiting, self._moving)
        )
        trips = [*waiting, *moving]
        return {
            "free": list(self._free),
            "trips": self._trips,
            "latest": dict(self._latest),
            "waiting": len(waiting),
            "trips under way": [_plain(trip) for trip in trips],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self._free, self._trips, self._latest = list(state["free"]), state["trips"], dict(state["latest"])
        trips = [self._trip(**plain) for plain in state["trips under way"]]
        self._waiting, self._moving = trips[: state["waiting"]], trips[state["waiting"] :]  # sorted: heaps

    def _trip(
        self,
        when: float,
        number: int,
        round: int,
        told: dict[str, Any] | None,
        **sent: Any,
    ) -> Trip:
        """What `_plain` wrote down."""
        question = Told(round, None if told is None else self._down.from_tree(told))
        answer = Words(
            parcel=Parcel.from_tree(sent.pop("parcel")),
            steps=sent.pop("steps"),
            distances=sent.pop("distances"),
        )
        one = Sent(**sent, question=question, answer=answer)
        return Trip(when, number, int(one.sender), 0, one.each(lambda tensor: tensor.unsqueeze(0)))

    def _begin(self, trip: Trip, departure: float) -> None:
        if self.is_void(trip):
            return
        sent, place = trip.sent, slice(trip.row, trip.row + 1)
        end = departure + self._link.latency
        if not self._link.weightless:
            end += float(self._link.transfer(sent.sender[place], departure, sent.down[place], sent.up[place]))
        heapreplace(self._free, end)
        heappush(self._moving, trip._replace(when=end))


def _plain(trip: Trip) -> dict[str, Any]:
    """One answer under way, as dictionaries, tensors and numbers."""
    one, question = trip.sent[trip.row], trip.sent.question
    assert one.answer is not None  # it has been computed
    sent = {name: getattr(one, name) for name in ("ready", "down", "up", "sender", "silent")}
    return {
        "when": trip.when,
        "number": trip.number,
        "round": question.round,
        "told": None if question.down is None else question.down.tree(),
        "parcel": one.answer.parcel.each(Tensor.clone).tree(),  # uncompressed, it is what was said, of another type
        "steps": one.answer.steps,
        "distances": dict(one.answer.distances),
        **sent,
    }
