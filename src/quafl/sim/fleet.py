"""The simulated clients. Lazy: a client's local steps are drawn and computed when it is contacted, for all contacted
clients together, because nobody can tell before."""

import logging
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quafl.core.client import Contact, interact, newcomer
from quafl.core.randomness import Generators
from quafl.core.seams import (
    Algorithm,
    Answer,
    ClientState,
    Codecs,
    Counts,
    Ids,
    Note,
    Optimizer,
    Packet,
    Refine,
    Replies,
    Speeds,
    Task,
    Totals,
)
from quafl.sim.clock import VirtualClock
from quafl.sim.executors import Choice
from quafl.sim.link import Link
from quafl.sim.store import Store
from quafl.sim.traffic import Sent, Traffic, Trip

_log = logging.getLogger(__name__)
# Coordinates: clients are contacted in groups whose models stay in a processor's cache, or in a fraction of a GPU.
TOGETHER = defaultdict(lambda: 2**20, cuda=2**28)
SLOW = 0.5  # of the fastest client's speed
GOLDEN = (5**0.5 - 1) / 2  # its multiples are spread evenly, however many there are
_CERTAIN = 2**40  # contacts behind a mean that one more does not change


class Diverged(Exception):
    """Training has left the finite numbers."""

    rows: Sequence[Mapping[str, float]] = ()  # until then, if whoever ran it has kept them


class _Waiting(NamedTuple):
    """A contact whose answer is under way although the local steps behind it have not been computed yet: nobody knows
    it, and those of more clients can then be computed together."""

    parts: Generator[ClientState, ClientState, Contact]
    clients: ClientState
    steps: Counts
    sent: Sent
    note: Note


class _Saying(NamedTuple):
    """What the fleet itself looks at in an answer."""

    octets: int
    round: int
    steps: int


class SimulatedFleet:
    """n clients in virtual time; all start training from the task's initial model when they first appear.

    The server's link carries the exchanges of `sampled` clients at a time, or any number if not `limited`.
    `unreachable` is the probability that a contact is lost on its way to the client, which then knows nothing of it.
    `expected_steps` are the H_i, where the world knows them in advance. Local steps are taken by the `executor`.
    """

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        algorithm: Algorithm,
        codecs: Codecs,
        clock: VirtualClock,
        speeds: Speeds,
        rng: Generators,
        *,
        link: Link = Link(),  # noqa: B008  # immutable
        limited: bool = True,
        unreachable: float = 0.0,
        expected_steps: Tensor | None = None,
        executor: str = "auto",
    ) -> None:
        given = {}
        if expected_steps is not None:
            given = {"expected_steps": expected_steps, "contacts": torch.full((len(expected_steps),), _CERTAIN)}
        self.totals = Totals()
        somebody, budget = newcomer(*task.initial(), optimizer), algorithm.budget(speeds.relative())
        self._slow = (speeds.relative() <= SLOW).tolist()
        self._store = Store(somebody, budget, **given)
        self._waiting: list[_Waiting] = []  # contacts whose local steps have not been computed yet
        self._busy: set[int] = set()  # clients in them
        self.size = len(self._store)
        self._since = torch.zeros(self.size, dtype=torch.float64)  # when each client's local steps began
        self._traffic = Traffic(link, algorithm.sampled if limited else self.size)
        self._named: set[int] = set()  # clients whose broken progress has been told
        self._failed: list[tuple[float, int, int]] = []  # when the server hears whose progress of which round is broken
        self._failures = 0  # of clients that had taken a step, in a row
        self._bearable = min(self.size, 4 * algorithm.sampled)
        self._silence = 0.0  # when all who were asked last would have answered, if nothing had been lost
        self._together = max(1, TOGETHER[somebody.base.device.type] // max(len(somebody.base), 1))

        def typical() -> Counts:
            round_time = link.latency + algorithm.wait
            if algorithm.answers == "when done" or not round_time:
                return budget
            expected = speeds.expected_steps(algorithm.sampled / self.size, round_time, int(budget.max()))
            spread = 2 * (torch.arange(self.size) * GOLDEN % 1)  # from none to twice as many, as waiting times are
            return (expected * spread).round().long().minimum(budget)

        sampled = min(algorithm.sampled, self._together)
        self.execute = Choice(task, optimizer, somebody, self.size, sampled, typical).make(executor)
        self._silent = _no_answer(self._store[torch.empty(0, dtype=torch.int64)], codecs)
        self._reply_bytes = _no_answer(self._store[torch.zeros(1, dtype=torch.int64)], codecs).packet.nbytes
        self._optimizer, self._algorithm, self._codecs = optimizer, algorithm, codecs
        self._clock, self._speeds, self._rng = clock, speeds, rng
        self._link, self._unreachable = link, unreachable

    def available(self) -> Ids:
        """Clients that are there."""
        return self._speeds.present(self._clock.now()).nonzero().squeeze(-1)

    def send(self, to: Ids, packet: Packet, note: Note, refine: Refine) -> None:
        """Contact the clients; what they answer is then under way."""
        now = self._clock.now()
        self.totals.down += packet.nbytes * len(to)
        self._silence = now + self._link.latency + _longest(self._link.transfer(to, now, packet.nbytes, packet.nbytes))
        reached = to[torch.rand(len(to), generator=self._rng["losses"]) >= self._unreachable]
        self.totals.lost += len(to) - len(reached)
        if not self._busy.isdisjoint(reached.tolist()):
            self._compute()  # they go on from what they have become
        budget = self._store.budget[reached]
        if self._algorithm.answers == "at once":
            steps = self._speeds.steps_within(reached, self._since[reached], now, budget)
            duration = torch.zeros(len(reached), dtype=torch.float64)
        else:
            steps, duration = budget, self._speeds.duration(reached, now, budget)
        for start in range(0, len(reached), self._together):
            group = slice(start, start + self._together)
            self._contact(reached[group], steps[group], now + duration[group], packet, note, refine)
        self._since[reached] = now

    @property
    def clients(self) -> Store:
        """As they are now."""
        self._compute()
        return self._store

    def _contact(self, ids: Ids, steps: Counts, ready: Tensor, packet: Packet, note: Note, refine: Refine) -> None:
        down, up = torch.full((len(ids),), packet.nbytes), torch.full((len(ids),), self._reply_bytes)

        def repair(row: int, request: Packet) -> Packet:
            refinement = refine(row, request)
            self.totals.refined += request.sent == packet.bits
            self.totals.up += request.nbytes
            self.totals.down += refinement.nbytes
            up[row] += request.nbytes
            down[row] += refinement.nbytes
            return refinement

        clients = self._store[ids]
        heard = self._codecs.down.decode(packet, key=clients.base, refine=repair)
        parts = interact(
            self.execute(clients, ids, steps) if self._algorithm.answers == "at once" else clients,
            heard,
            packet,
            note,
            algorithm=self._algorithm,
            codecs=self._codecs,
            optimizer=self._optimizer,
            rng=self._rng["dither of clients"],
        )
        sent = Sent(ready, down, up, ids, silent=torch.zeros(len(ids), dtype=torch.bool))
        self._traffic.void(ids)
        self._traffic.depart(sent)
        try:
            self._waiting.append(_Waiting(parts, next(parts), steps, sent, note))
            self._busy.update(ids.tolist())
            if len(self._busy) >= self._together:
                self._compute()
        except StopIteration as ended:  # it answered at once
            self._settle(sent, note, ended.value)

    def _compute(self) -> None:
        """The local steps of all who have been asked and have not answered yet, together."""
        waiting, self._waiting, self._busy = self._waiting, [], set()
        groups: list[list[_Waiting]] = []
        room = 0
        for one in waiting:
            if len(one.steps) > room:
                groups.append([])
                room = self._together
            groups[-1].append(one)
            room -= len(one.steps)
        for group in groups:
            ids, steps = torch.cat([one.sent.sender for one in group]), torch.cat([one.steps for one in group])
            trained = self.execute(ClientState.join([one.clients for one in group]), ids, steps)
            start = 0
            for one in group:
                mine, start = slice(start, start + len(one.steps)), start + len(one.steps)
                try:
                    one.parts.send(trained[mine])
                except StopIteration as ended:
                    self._settle(one.sent, one.note, ended.value)

    def _settle(self, sent: Sent, note: Note, result: Contact) -> None:
        """What clients have become, and what they say."""
        sound, answer = result.sound, result.answer
        self._store.put(sent.sender, result.clients)
        known = (sent.ready + self._link.latency)[~sound].tolist()
        self._failed += [
            (when, client, note.round) for when, client in zip(known, sent.sender[~sound].tolist(), strict=True)
        ]
        report = result.report if self._codecs.up.keyed else result.report.new_empty(len(result.report), 0)
        if not sound.all():
            self._traffic.void(sent.sender[~sound])
            sent.silent = ~sound
            rows = (sound.cumsum(0) - 1).clamp(min=0) if sound.any() else torch.empty(0, dtype=torch.int64)
            answer, report = answer[rows], report[rows]  # a row for each, the silent ones' of no meaning
        sent.answer, sent.report = answer, report

    def receive(self, count: int, within: float, since: int) -> Replies:
        """The earliest answers under way. Nobody waits longer than an exchange takes for answers that will never come;
        when nobody is there at all, the server waits until somebody is."""
        deadline = self._clock.now() + within
        arrived: list[Trip] = []
        said: dict[int, list[_Saying]] = {}
        while len(arrived) < count and (trip := self._traffic.next(deadline)) is not None:
            if not trip.sent.computed:
                self._compute()
                continue
            if id(trip.sent) not in said:
                said[id(trip.sent)] = _sayings(trip.sent) if count > 1 else []
            all_said = said[id(trip.sent)]
            if self._counted(trip, all_said[trip.row] if all_said else _saying(trip.sent, trip.row), since):
                arrived.append(trip)
        if arrived:
            self._clock.sleep_until(arrived[-1].when)
        if len(arrived) < max(count, 1):
            self._clock.sleep_until(deadline if deadline < inf else self._end_of_waiting())
        return self._replies(arrived)

    def _counted(self, trip: Trip, said: _Saying, since: int) -> bool:
        """Whether an answer that has arrived counts, or was too late, and so is lost."""
        self.totals.up += said.octets
        if self._traffic.is_void(trip) or said.round < since:
            self.totals.lost += 1
            return False
        self.totals.contacts += 1
        self.totals.steps += said.steps
        self.totals.idle += said.steps == 0
        if self._slow[trip.client]:
            self.totals.slow_contacts += 1
            self.totals.slow_idle += said.steps == 0
        return True

    def state(self) -> dict[str, Any]:
        """For `restore`."""
        self._compute()
        return {
            "totals": asdict(self.totals),
            "clients": self._store.state(),
            "traffic": self._traffic.state(),
            "since": self._since.clone(),
            "silence": self._silence,
            "failed": list(self._failed),
            "failures": self._failures,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.totals = Totals(**state["totals"])
        self._waiting, self._busy = [], set()
        self._store.restore(state["clients"])
        self._traffic.restore(state["traffic"])
        self._since, self._silence = state["since"].clone(), state["silence"]
        self._failed, self._failures = list(state["failed"]), state["failures"]

    def _drop(self, broken: Sequence[tuple[int, int]]) -> None:
        self.totals.broken += len(broken)
        self.totals.lost += len(broken)
        for client, asked in sorted(broken):
            if client not in self._named:
                what = "its progress is not finite; that reply is dropped, later ones are only counted"
                _log.warning("client %d, round %d: %s", client, asked, what)
            self._named.add(client)

    def _end_of_waiting(self) -> float:
        """Until when a server of endless patience waits although nothing more will come."""
        if self._failed:
            return max(self._silence, min(self._failed)[0])
        if len(self.available()):
            return self._silence
        back = self._speeds.next_return(self._clock.now())
        return max(self._silence, back) if back < inf else self._silence

    def _replies(self, arrived: list[Trip]) -> Replies:
        senders, answer = self._gather(arrived)
        since, spent = self._clock.now(), torch.zeros(len(arrived), dtype=torch.float64)

        def refine(row: int, request: Packet) -> Packet:
            trip = arrived[row]
            assert trip.sent.report is not None  # it has arrived
            refinement = self._codecs.up.refine(trip.sent.report[trip.row], request)
            self.totals.refined += request.sent == answer.packet.bits
            self.totals.down += request.nbytes
            self.totals.up += refinement.nbytes
            sender = senders[row : row + 1]
            spent[row] += float(self._link.transfer(sender, since, request.nbytes, refinement.nbytes))
            self._clock.sleep_until(since + float(spent[row]))  # repairs of different clients go side by side
            return refinement

        heard = [(client, asked) for when, client, asked in self._failed if when <= since]
        self._failed = [failure for failure in self._failed if failure[0] > since]
        failed = torch.tensor([client for client, _ in heard], dtype=torch.int64)
        self._drop(heard)
        self._failures = 0 if (answer.steps > 0).any() else self._failures + len(heard)
        if self._failures > self._bearable:
            raise Diverged(f"in round {heard[-1][1]} no client's progress is finite any more")
        return Replies(senders=senders, answer=answer, refine=refine, failed=failed)

    def _gather(self, trips: list[Trip]) -> tuple[Ids, Answer]:
        if not trips:
            return torch.empty(0, dtype=torch.int64), self._silent
        first, rows = trips[0].sent, [trip.row for trip in trips]
        if any(trip.sent is not first for trip in trips):
            first, rows = Sent.stack([trip.sent[trip.row] for trip in trips]), list(range(len(trips)))
        assert first.answer is not None  # they have arrived
        if rows == list(range(len(first.ready))):
            return first.sender, first.answer
        chosen = torch.tensor(rows)
        return first.sender[chosen], first.answer[chosen]


def _sayings(sent: Sent) -> list[_Saying]:
    """Of each of the answers."""
    assert sent.answer is not None  # it has arrived
    octets = sent.answer.packet.nbytes // len(sent.answer.steps)
    rows = zip(sent.answer.round.tolist(), sent.answer.steps.tolist(), strict=True)
    return [_Saying(octets, asked, steps) for asked, steps in rows]


def _saying(sent: Sent, row: int) -> _Saying:
    """Of one of them."""
    assert sent.answer is not None  # it has arrived
    octets = sent.answer.packet.nbytes // len(sent.answer.steps)
    return _Saying(octets, int(sent.answer.round[row]), int(sent.answer.steps[row]))


def _no_answer(nobody: ClientState, codecs: Codecs) -> Answer:
    """In the shape of some, but without rows."""
    packet = codecs.up.encode(nobody.base, torch.Generator(), distance=nobody.expected_steps, exact=nobody.buffers)
    none = nobody.expected_steps
    return Answer(packet=packet, round=nobody.taken, steps=nobody.taken, distance=none, speed=none)


def _longest(seconds: Tensor) -> float:
    return float(seconds.max()) if len(seconds) else 0.0
