"""The simulated clients. Lazy: a client's local steps are drawn and computed when it is contacted, for all contacted
clients together, because nobody can tell before."""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from math import inf
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from quafl.codec.coders import Beside, Coders
from quafl.codec.seams import Packet
from quafl.core.client import newcomers
from quafl.core.conversation import Await, Clients, Look, Replies, Round, Sleep, Tell, Want
from quafl.core.messages import Message
from quafl.core.pieces import zeros
from quafl.core.questions import Questions, when_read
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm, Counts, Ids, Optimizer, ServerState, Task, Totals
from quafl.core.server import keyed
from quafl.protocol.speech import as_heard, keys_up
from quafl.sim.clock import VirtualClock
from quafl.sim.crew import Contact, Contacts, Crew, Repair, Soon, Telling, Words
from quafl.sim.executors import Choice
from quafl.sim.failures import Failure, Failures
from quafl.sim.link import Link
from quafl.sim.speeds import Speeds
from quafl.sim.store import MANY, Store
from quafl.sim.traffic import Sent, Told, Traffic, Trip

_log = logging.getLogger(__name__)
Server = TypeVar("Server", bound=ServerState)
Placing: TypeAlias = Callable[[Store], Contacts]  # of a store of newcomers, clients that are elsewhere
# Coordinates: clients are contacted in groups whose models stay in a processor's cache, or in a fraction of a GPU.
TOGETHER = defaultdict(lambda: 2**20, cuda=2**28)
AHEAD = defaultdict(bool, cuda=True)  # where rounds are begun before it is known that the one before went well
MOST_WANTS = 100  # of a round that is drawn to see whom it tells something
SLOW = 0.5  # of the fastest client's speed
GOLDEN = (5**0.5 - 1) / 2  # its multiples are spread evenly, however many there are


class Mark(NamedTuple):
    """Where a fleet stood."""

    totals: Totals
    mine: tuple[Any, ...]
    others: tuple[Any, ...]


class _Waiting(NamedTuple):
    """A contact whose answer is under way although the local steps behind it have not been computed yet: nobody knows
    it, and those of more clients can then be computed together."""

    number: int
    sent: Sent


class _Saying(NamedTuple):
    """What the fleet itself looks at in an answer."""

    octets: int
    steps: int


class SimulatedFleet:
    """n clients in virtual time; all start training from the task's initial model when they first appear.

    The server's link carries the exchanges of `sampled` clients at a time, or any number if not `limited`.
    `unreachable` is the probability that a contact is lost on its way to the client, which then knows nothing of it.
    `given` are numbers of the clients that the world knows in advance. Local steps are taken by the `executor`. Beyond
    `memory` octets, what clients keep is on disk.
    """

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        algorithm: Algorithm,
        coders: Coders,
        clock: VirtualClock,
        speeds: Speeds,
        rng: Generators,
        *,
        link: Link = Link(),  # noqa: B008  # immutable
        limited: bool = True,
        unreachable: float = 0.0,
        given: Mapping[str, Tensor] | None = None,
        executor: str = "auto",
        spread: Placing | None = None,
        memory: float = inf,
    ) -> None:
        self.totals = Totals()
        everybody = newcomers(algorithm, *task.initial(), speeds.relative())
        somebody = replace(
            everybody[0],
            optimizer=optimizer.init(everybody.base[0]),
            left_out=coders.up.nothing_left_out(everybody.base[0]),
        )
        store = Store(everybody, somebody, memory, **(given or {}))
        self._slow = (speeds.relative() <= SLOW).numpy()  # asked one by one
        self._there, self._present = torch.empty(0, dtype=torch.bool), torch.empty(0, dtype=torch.int64)
        self._contacts = 0  # ever, of clients together
        self._waiting: list[_Waiting] = []  # contacts whose local steps have not been computed yet
        self._busy: set[int] = set()  # clients in them
        self.size = len(store)
        self._since = torch.zeros(self.size, dtype=torch.float64)  # when each client's local steps began
        self._traffic = Traffic(link, algorithm.sampled if limited else self.size, algorithm.records.down)
        self._failures = Failures(bearable=min(self.size, 4 * algorithm.sampled))
        self._silence = 0.0  # when all who were asked last would have answered, if nothing had been lost
        self._together = max(1, TOGETHER[somebody.base.device.type] // max(len(somebody.base), 1))
        self._algorithm, self._coders = algorithm, coders
        self._clock, self._speeds, self._rng = clock, speeds, rng
        self._link, self._unreachable = link, unreachable
        few = memory == inf and self.size < MANY
        self._takes_back = AHEAD[somebody.base.device.type] and few and link.weightless

        def typical() -> Counts:
            """Steps that each client may have to take when it is contacted."""
            everybody = store.outline(torch.arange(self.size))
            round_time = link.latency + algorithm.wait
            if not everybody.budget.any() or not round_time:
                return self._asked_for(everybody) if not everybody.budget.any() else everybody.budget
            expected = speeds.expected_steps(algorithm.sampled / self.size, round_time, int(everybody.budget.max()))
            spread = 2 * (torch.arange(self.size) * GOLDEN % 1)  # from none to twice as many, as waiting times are
            return (expected * spread).round().long().minimum(everybody.budget)

        if spread is None:
            sampled = min(algorithm.sampled, self._together)
            choice = Choice(task, optimizer, algorithm.direction, somebody, self.size, sampled, typical)
            self.crew: Contacts = Crew(task, optimizer, algorithm, coders, store, choice.make(executor))
        else:
            self.crew = spread(store)
        self._patience = self._together if spread is None else self.size  # workers have room for all, and one call each
        one, heard = (_blank(message, somebody) for message in (algorithm.records.up, algorithm.records.down))
        far = {vector.name: torch.zeros(1) for vector in one.vectors()}
        self._zero = zeros(somebody.base)
        self._reply_bytes = coders.up.pack(one, torch.Generator(), far, heard=heard).nbytes
        nobody = torch.empty(0, dtype=torch.int64)
        told = {name: torch.empty(0) for name in keyed(algorithm.records.down)}
        self._nothing = Replies(senders=nobody, up=one[:0], round=nobody, steps=nobody, distances=told, failed=nobody)

    # What the server's side wants

    def run(self, round: Round[Server]) -> Server:
        """A round of the algorithm, in virtual time."""
        back = None
        while True:
            try:
                back = self._carry_out(round.send(back))
            except StopIteration as ended:
                server: Server = ended.value
                return server

    def _carry_out(self, want: Want) -> Any:
        match want:
            case Sleep(seconds):
                return self._clock.sleep(seconds)
            case Look():
                return Clients(self.available(), self.size, self._clock.now())
            case Tell():
                return self.tell(want)
            case Await(count, within, since):
                return self.receive(count, within, since)

    def available(self) -> Ids:
        """Clients that are there."""
        there = self._speeds.present(self._clock.now())
        if there is not self._there:
            self._there, self._present = there, there.nonzero().squeeze(-1)
        return self._present

    def tell(self, want: Tell) -> None:
        """Contact the clients; what they answer is then under way."""
        now, to, coder = self._clock.now(), want.to, self._coders.down
        parcel = coder.pack(want.down, self._rng["dither"], want.server.expected)
        self.totals.down += parcel.nbytes * len(to)
        self._silence = now + self._link.latency + _longest(self._link.transfer(to, now, parcel.nbytes, parcel.nbytes))
        reached = self._reached(to)
        self.totals.lost += len(to) - len(reached)
        if not self._busy.isdisjoint(reached.tolist()):
            self._compute()  # they go on from what they have become
        outline, steps = self._taken_since(reached, now)
        self._since[reached] = now
        more = self._asked_for(replace(outline, taken=steps))
        ready = torch.full((len(reached),), now, dtype=torch.float64)
        if more.any():
            ready = ready + self._speeds.duration(reached, now, more)
        keys = as_heard(self._coders, want.down, parcel) if self._coders.up.needs_keys else None
        question, telling = Told(want.server.round, keys), Telling(want.server.round, parcel, want.down, coder)
        answers, contacts = [], []
        for start in range(0, len(reached), self._together):
            group = slice(start, start + self._together)
            sent = self._sent(reached[group], ready[group], parcel.nbytes, question)
            self._traffic.void(sent.sender)
            self._traffic.depart(sent)
            answers.append(sent)
            contacts.append(self._next_contact(sent, steps[group], more[group]))
        begun = outline.budget.any()  # else nobody takes a step before the message
        self._contact(answers, contacts, telling, partial(self._foreseen, want.server) if begun else None)

    def _reached(self, to: Ids) -> Ids:
        """Those who hear of a message."""
        return to[torch.rand(len(to), generator=self._rng["losses"]) >= self._unreachable]

    def _taken_since(self, ids: Ids, now: float) -> tuple[Any, Counts]:
        """Those clients' numbers, and the steps that they have taken since they were last contacted."""
        outline = self.crew.outline(ids)
        if not outline.budget.any():
            return outline, torch.zeros_like(ids)
        return outline, self._speeds.steps_within(ids, self._since[ids], now, outline.budget)

    def _foreseen(self, server: ServerState) -> tuple[Ids, Counts]:
        """Who will hear the next message, and the steps that they will have taken by then, as far as that can be told
        now: the next round is drawn from this one's state, and its draws are taken back."""
        clock, rng = self._clock.state(), self._rng.state()
        try:
            self._clock.sleep_until(self._silence)
            round = self._algorithm.round(replace(server, round=server.round + 1), self._rng)
            ids = self._reached(self._told_by(round))
            return ids, self._taken_since(ids, self._clock.now())[1]
        finally:
            self._clock.restore(clock)
            self._rng.restore(rng)

    def _told_by(self, round: Round[ServerState]) -> Ids:
        """Whom a round tells something before it waits for answers. It may be one that will never begin: whatever goes
        wrong in it is of no matter."""
        back = None
        try:
            for _ in range(MOST_WANTS):
                match want := round.send(back):
                    case Tell():
                        return want.to
                    case Await():
                        break
                back = self._carry_out(want)
        except Exception:  # also of a round that ends
            _log.debug("the next round cannot be foreseen", exc_info=True)
        finally:
            round.close()
        return self._nothing.senders

    def _asked_for(self, outline: Any) -> Counts:
        """Local steps that those clients take before they answer."""
        vectors = {one.name: torch.empty(0) for one in self._algorithm.records.down.vectors()}
        numbers = {one.name: torch.zeros(()) for one in self._algorithm.records.down.numbers()}
        heard = self._algorithm.hear(
            outline, self._algorithm.records.down(statistics=torch.empty(0), **vectors, **numbers)
        )
        more: Counts = heard.budget - heard.taken
        return more

    @property
    def clients(self) -> Store:
        """As they are now."""
        self._compute()
        return self.crew.everybody()

    def _sent(self, ids: Ids, ready: Tensor, octets: int, question: Told) -> Sent:
        """Answers that nobody knows yet, to a message of so many octets."""
        down, up = torch.full((len(ids),), octets), torch.full((len(ids),), self._reply_bytes)
        return Sent(ready, down, up, ids, silent=torch.zeros(len(ids), dtype=torch.bool), question=question)

    def _next_contact(self, sent: Sent, steps: Counts, more: Counts) -> Contact:
        self._contacts += 1
        return Contact(self._contacts, sent.sender, steps, more)

    def _contact(
        self, answers: Sequence[Sent], contacts: Sequence[Contact], telling: Telling, soon: Soon | None = None
    ) -> None:
        """Clients hear the message, and answer at once, or when they have taken more steps."""
        heard = self.crew.contact(contacts, telling, soon)
        for sent, contact, repairs in zip(answers, contacts, heard, strict=True):
            when_read(partial(self._account_for, repairs, sent))
            one = _Waiting(contact.number, sent)
            if not contact.more.any():
                self._compute()  # answers are drawn in the order of contacts, however many clients have room
                self._settle([[one]], at_once=True)
                continue
            self._waiting.append(one)
            self._busy.update(sent.sender.tolist())
            if len(self._busy) >= self._patience:
                self._compute()

    def _account_for(self, repairs: Sequence[Repair], sent: Sent) -> None:
        """Of the message that these answer."""
        for repair in repairs:
            self.totals.refined += repair.first
            self.totals.up += repair.asked
            self.totals.down += repair.answered
            sent.up[repair.row] += repair.asked
            sent.down[repair.row] += repair.answered

    def _compute(self) -> None:
        """The local steps of all who have been asked and have not answered yet, together."""
        if not self._waiting:
            return
        waiting, self._waiting, self._busy = self._waiting, [], set()
        groups: list[list[_Waiting]] = []
        room = 0
        for one in waiting:
            if len(one.sent.sender) > room:
                groups.append([])
                room = self._together
            groups[-1].append(one)
            room -= len(one.sent.sender)
        self._settle(groups, at_once=False)

    def _settle(self, groups: Sequence[Sequence[_Waiting]], *, at_once: bool) -> None:
        """What clients have become, and what they say."""
        voices = self.crew.compute([[one.number for one in group] for group in groups])
        for (number, sent), (answers, broken) in zip(chain.from_iterable(groups), voices, strict=True):
            answer = self.crew.say(number, self._dither(sent), at_once=at_once)
            if not answers.all():
                self._keep_silent(sent, answers, broken)
                rows = (answers.cumsum(0) - 1).clamp(min=0) if answers.any() else torch.empty(0, dtype=torch.int64)
                answer = answer[rows]  # a row for each, the silent ones' of no meaning
            sent.answer = answer

    def _keep_silent(self, sent: Sent, answers: Tensor, broken: Tensor) -> None:
        """Some clients do not answer, and the server hears that instead."""
        sent.silent = ~answers
        known = (sent.ready + self._link.latency).tolist()
        rows = zip(known, sent.sender.tolist(), broken.tolist(), strict=True)
        self._failures.add(
            Failure(when, who, sent.question.round, broken=broken)
            for (when, who, broken), silent in zip(rows, sent.silent.tolist(), strict=True)
            if silent
        )
        self._traffic.void(sent.sender[sent.silent])

    def _dither(self, sent: Sent) -> torch.Generator:
        """Whence those clients draw what they round with."""
        return self._rng["dither of clients"]

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
        if self._traffic.is_void(trip) or trip.sent.question.round < since:
            self.totals.lost += 1
            return False
        self.totals.steps += said.steps
        self._count_contact(trip.client, idle=said.steps == 0)
        return True

    def _count_contact(self, client: int, *, idle: bool) -> None:
        self.totals.contacts += 1
        self.totals.idle += idle
        if self._slow[client]:
            self.totals.slow_contacts += 1
            self.totals.slow_idle += idle

    def mark(self) -> Mark | None:
        """For `back`: where everything stands, if a round that is begun now can be taken back. It cannot where numbers
        that are put off would be needed to tell the time, or where too much would have to be kept."""
        if not (self._takes_back and isinstance(self.crew, Crew)) or self._waiting or len(self._traffic):
            return None
        mine = self._since.clone(), self._contacts, self._silence
        others = self._failures.mark(), self._traffic.mark(), self.crew.mark(), self._clock.state(), self._rng.state()
        return Mark(replace(self.totals), mine, others)

    def back(self, mark: Mark) -> None:
        """As it was at the mark."""
        assert isinstance(self.crew, Crew)  # as it was then
        self.totals, self._waiting, self._busy = mark.totals, [], set()
        self._since, self._contacts, self._silence = mark.mine
        failures, traffic, crew, clock, rng = mark.others
        self._failures.back(failures)
        self._traffic.back(traffic)
        self.crew.back(crew)
        self._clock.restore(clock)
        self._rng.restore(rng)

    def settle(self, questions: Questions, after: Mark | None) -> bool:
        """Whether all was right in a round whose questions were put off; what it has cost is then known, also at a mark
        that was made after it."""
        before = asdict(self.totals)
        right = questions.are_right()
        if after is not None:
            for name, count in asdict(self.totals).items():
                setattr(after.totals, name, getattr(after.totals, name) + count - before[name])
        return right

    def state(self) -> dict[str, Any]:
        """For `restore`."""
        self._compute()
        return {
            "totals": asdict(self.totals),
            **self.crew.state(),
            "traffic": self._traffic.state(),
            "since": self._since.clone(),
            "silence": self._silence,
            **self._failures.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.totals = Totals(**state["totals"])
        self._waiting, self._busy = [], set()
        self.crew.restore(state)
        self._traffic.restore(state["traffic"])
        self._since, self._silence = state["since"].clone(), state["silence"]
        self._failures.restore(state)

    def _end_of_waiting(self) -> float:
        """Until when a server of endless patience waits although nothing more will come."""
        if self._failures.first < inf:
            return max(self._silence, self._failures.first)
        if len(self.available()):
            return self._silence
        back = self._speeds.next_return(self._clock.now())
        return max(self._silence, back) if back < inf else self._silence

    def _replies(self, arrived: list[Trip]) -> Replies:
        since = self._clock.now()
        replies = self._decoded(arrived, since) if arrived else self._nothing
        heard = self._failures.heard(since, beside_steps=bool((replies.steps > 0).any()))
        for failure in heard:
            if failure.broken:
                self.totals.broken += 1
                self.totals.lost += 1
            else:
                self._count_contact(failure.client, idle=True)
        return replace(replies, failed=torch.tensor([failure.client for failure in heard], dtype=torch.int64))

    def _decoded(self, arrived: list[Trip], since: float) -> Replies:
        senders, answer = _gather(arrived)
        spent = torch.zeros(len(arrived), dtype=torch.float64)

        def repaired(place: int, row: int, asked: int, answered: int, sent: int) -> None:
            self.totals.refined += sent == answer.parcel.packets[place].bits
            self.totals.down += asked
            self.totals.up += answered
            if not self._link.weightless:
                spent[row] += float(self._link.transfer(senders[row : row + 1], since, asked, answered))
                self._clock.sleep_until(since + float(spent[row]))  # repairs of different clients go side by side

        def refine(place: int, row: int, request: Packet) -> Packet:
            refinement = self.crew.refine(int(senders[row]), place, request)
            repaired(place, row, request.nbytes, refinement.nbytes, request.sent)
            return refinement

        told = self.crew.said(senders)
        up = self._coders.up.unpack(
            answer.parcel, self._keys(arrived), refine if told is None else Beside(told, repaired)
        )
        self.crew.taken(senders, up)
        return Replies(
            senders=senders,
            up=up,
            round=torch.tensor([trip.sent.question.round for trip in arrived]),
            steps=answer.steps,
            distances=answer.distances,
            failed=self._nothing.failed,
        )

    def _keys(self, arrived: list[Trip]) -> dict[str, Tensor]:
        """What both ends know of the messages that were answered."""
        coder, told = self._coders.up, [trip.sent.question.down for trip in arrived]
        if told[0] is None:
            return {one.name: self._zero for one in coder.vectors}
        if all(one is told[0] for one in told):
            return keys_up(coder, told[0])
        each = [keys_up(coder, one) for one in told if one is not None]
        return {name: torch.stack([keys[name] for keys in each]) for name in each[0]}


def _gather(trips: list[Trip]) -> tuple[Ids, Words]:
    first, rows = trips[0].sent, [trip.row for trip in trips]
    if any(trip.sent is not first for trip in trips):
        first, rows = Sent.gather([(trip.sent, trip.row) for trip in trips]), list(range(len(trips)))
    assert first.answer is not None  # they have arrived
    if rows == list(range(len(first.ready))):
        return first.sender, first.answer
    chosen = torch.tensor(rows)
    return first.sender[chosen], first.answer[chosen]


def _sayings(sent: Sent) -> list[_Saying]:
    """Of each of the answers."""
    assert sent.answer is not None  # it has arrived
    octets = sent.answer.parcel.nbytes // len(sent.answer.steps)
    return [_Saying(octets, steps) for steps in sent.answer.steps.tolist()]


def _saying(sent: Sent, row: int) -> _Saying:
    """Of one of them."""
    assert sent.answer is not None  # it has arrived
    return _Saying(sent.answer.parcel.nbytes // len(sent.answer.steps), int(sent.answer.steps[row]))


def _blank(message: type[Message], somebody: Any) -> Message:
    """Of one row, in the shape of those that will come."""
    vectors = {one.name: somebody.base[None] for one in message.vectors()}
    return message(
        statistics=somebody.buffers[None], **vectors, **{one.name: torch.zeros(1) for one in message.numbers()}
    )


def _longest(seconds: Tensor) -> float:
    return float(seconds.max()) if len(seconds) else 0.0
