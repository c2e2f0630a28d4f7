"""The server's side of the protocol: who takes part, who was asked what, and what becomes of their answers.

The promise. A local step that a client reports is applied once or never, and never twice, whatever crashes: a reply is
taken for one ticket, from the client that was asked, while it owes it, and once. A reply that the server has taken
survives its crash: it is written down before anybody is told. A client knows which of its replies were applied: each
contact brings the receipt of the last one. What the algorithm is told is written down before it is told, so that a
restart asks the same questions again.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quafl.codec import wire
from quafl.codec.coders import Coders, Parcel
from quafl.codec.hashing import BLOCK
from quafl.core.conversation import Await, Clients, Look, Replies, Sleep, Tell
from quafl.core.messages import Buffers, Message, Model
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm, ServerState, Totals
from quafl.core.server import keyed
from quafl.protocol import log, messages
from quafl.protocol.carrier import Octets
from quafl.protocol.contacts import Contacts
from quafl.protocol.debts import Arrival, Question
from quafl.protocol.judge import Opinion
from quafl.protocol.judging import Judgement
from quafl.protocol.layout import Layout
from quafl.protocol.log import Entry, Gave, Idled, Joined, Looked, Missed, Returned, Took
from quafl.protocol.machine import ERROR, Compute, Flow, Until
from quafl.protocol.members import Limits, Member
from quafl.protocol.messages import Evaluate, Finished, Reply
from quafl.protocol.repairs import replay
from quafl.protocol.speech import as_heard

MOMENT = 0.5  # seconds that a server waits for answers that nobody owes: time must pass
TICK = 1e-6  # seconds, between two looks at least


class Ended(NamedTuple):
    """A round of the algorithm is over."""

    server: ServerState


class ServerSide(Contacts):
    """The server's machine. It runs the algorithm, round after round; after each, it waits until `go_on` is called.

    `layout` is of the model, `welcome` what a newcomer is told. `restore` takes up a run that was left.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        coders: Coders,
        server: ServerState,
        rng: Generators,
        layout: Layout,
        welcome: dict[str, Any],
        limits: Limits = Limits(),  # noqa: B008  # immutable
    ) -> None:
        super().__init__(algorithm, coders, server, layout, welcome, limits)
        self.failure: Exception | None = None
        self.reached = False  # a round is over, and whoever drives this has not said go on
        self.judgement: Judgement | None = None  # the last one that was asked for
        self._rng = rng
        self._serial = 0  # of the last question
        self._started = False
        self._back_until = -inf  # until when clients of before a restart are waited for; inf: not begun
        self._looked = 0.0  # when the algorithm did so last
        self._past = b""  # a name for all that it was told

    # What its driver does

    def begin(self) -> None:
        """Run the algorithm; effects come with the next event."""
        self._spawn(self._run())

    def can_start(self) -> bool:
        """Whether enough clients are there for the first round."""
        return len(self.members.live(self.now)) >= self._limits.start_with

    def go_on(self) -> None:
        """The round that was reached has been looked at."""
        self.reached = False

    def judge(self, model: Model, buffers: Buffers, steps: int = 0, *, anyway: bool = False) -> Judgement | None:
        """Ask everybody who is there how good that model is on data of their own, and what so many local steps make of
        it. It is over when all have answered, or had the time to. None, unless it is wanted `anyway`: nobody is there,
        or somebody may still come back after a restart."""
        asked = self.members.live(self.now)
        if asked:
            self._begin_to_wait()
        if not anyway and (not asked or any(map(self._may_come_back, self.members))):
            return None
        ticket = messages.digest(str((self._welcome["run"], int(self.server.round), self.now)).encode())
        octets = messages.to_bytes(Evaluate(ticket, steps, messages.model_to_bytes(model, buffers)))
        self.judgement = Judgement(ticket, octets, [member.name for member in asked])
        for member in asked:
            self._spawn(self._ask_to_judge(member, self.judgement))
        return self.judgement

    def finish(self, model: Model | None = None, buffers: Buffers | None = None) -> None:
        """Tell everybody that the run is over, and give them the final model, the server's own by default."""
        model, buffers = (
            self.server.model if model is None else model,
            self.server.buffers if buffers is None else buffers,
        )
        self.finished = messages.to_bytes(Finished(messages.model_to_bytes(model, buffers)))
        for member in self.members.live(self.now):
            self._spawn(self._tell_end(member))

    def gone(self, name: str) -> None:
        """A client's connection has ended: it is not asked before it says hello again."""
        member = self.members.get(name)
        if member is not None:
            member.unreached = True

    def room(self, name: str) -> int:
        """Octets of the largest message that this client may send unasked now: a greeting or a request for a repair;
        if it has begun to work, also its reply, and the same again."""
        member = self.members.get(name)
        small = 2 * messages.LONGEST_TEXT + 4 * (len(self.server.model) // BLOCK + 1)
        model = 4 * (len(self.server.model) + len(self.server.buffers))
        vectors = len(self._coders.up.vectors)
        return small + 2 * vectors * model if member is not None and member.accepted else small

    # What must survive

    def state(self) -> dict[str, Any]:
        """Of a machine whose round is over, for `restore`; the journal goes on from here. What is left to go through of
        an earlier process' journal is in it."""
        return {
            "server": self.server.tree(),
            "rng": self._rng.state(),
            "totals": asdict(self.totals),
            "serial": self._serial,
            "usual": self._judge.votes,
            "members": self.members.state(),
            "questions": [_plain(question) for question in self._questions.values()],
            "owes": {member.name: member.owes.hex() for member in self.members if member.owes},
            "arrived": [_plain_arrival(arrival) for arrival in self._arrived],
            "failed": list(self._failed),
            "started": self._started,
            "looked": self._looked,
            "past": self._past.hex(),
            "script": [_tensor(log.to_bytes(entry)) for entry in self._script],
        }

    def restore(self, state: dict[str, Any], entries: Sequence[Entry]) -> None:
        """Go on from a checkpoint, and from what was written down after it. Clients are there as soon as they say
        hello; those who owe something are then asked again."""
        records = self._algorithm.records
        self.server = records.server.from_tree(state["server"])
        self._rng.restore(state["rng"])
        self.totals = Totals(**state["totals"])
        self._serial, self._started = state["serial"], state["started"]
        for name, away in state["usual"].items():
            self._judge.learn(name, away)
        self.members.restore(state["members"])
        self._failed = list(state["failed"])
        for plain in state["questions"]:
            question = _question(plain, records.down)
            self._questions[question.ticket] = question
        for name, ticket in state["owes"].items():
            member = self.members[name]
            self._owe(member, self._questions[bytes.fromhex(ticket)])
            member.accepted = self._questions[member.owes].told is None  # it cannot be asked again, and may be at work
        for plain in state["arrived"]:
            member, question = self.members[plain["name"]], _question(plain["question"], records.down)
            opinion = Opinion(records.up.from_tree(plain["up"]), plain["steps"], plain["distances"], 0.0, 0)
            self._arrived.append(Arrival(member, question, opinion, bytes.fromhex(plain["receipt"])))
        self._looked, self._past = state["looked"], bytes.fromhex(state["past"])
        self.now = max(self.now, self._looked)
        self._script = deque((*(log.from_bytes(record.numpy().tobytes()) for record in state["script"]), *entries))
        self._back_until = inf

    # The algorithm

    def _run(self) -> Flow:
        try:
            yield from self._rounds()
        except Exception as error:  # of the algorithm: the run ends with it
            self.failure = error

    def _rounds(self) -> Flow:
        while True:
            round, back = self._algorithm.round(self.server, self._rng), None
            while not isinstance(want := (yield Compute(_step(round, back))), Ended):
                match want:
                    case Sleep(seconds):
                        back = None
                        if seconds and not self._script:
                            yield Until(_never, self.now + seconds)
                    case Look():
                        back = yield from self._look()
                    case Tell():
                        back = yield from self._tell(want)
                    case Await():
                        back = yield from self._await(want)
            self.server, self.reached = want.server, True
            yield Until(lambda: not self.reached)

    def _look(self) -> Flow:
        """Who is there; waits until somebody is."""
        entry = yield from self._replayed(Looked)
        if entry is None:
            enough = 1 if self._started else self._limits.start_with
            while len(live := self.members.live(self.now)) < enough:
                yield Until(lambda: len(self.members.live(self.now)) >= enough, self.now + MOMENT)
            present = sorted(member.number for member in live)
            entry = Looked(present, len(self.members), max(self.now, self._looked + TICK))
            yield from self._write(entry)
        self._started, self._looked, self._past = True, entry.now, past_after(self._past, entry)
        return Clients(torch.tensor(entry.present, dtype=torch.int64), entry.size, entry.now)

    def _tell(self, want: Tell) -> Flow:
        """Contact the clients, all at the same time."""
        coder, rng = self._coders.down, self._rng["dither"]
        parcel: Parcel = yield Compute(lambda: coder.pack(want.down, rng, want.server.expected))
        self._serial += 1
        chosen = set(want.to.tolist())
        asked = [member for member in self.members if member.number in chosen]
        for member in asked:
            self._give_up(member)
            self._drop([arrival for arrival in self._arrived if arrival.member is member])
        question = self._question(want, parcel)  # only now: what nobody owes is forgotten
        for member in asked:
            self._owe(member, question)
        self._failed = [number for number in self._failed if number not in chosen]  # that was about earlier questions
        if asked:
            question.octets = self._contact(question, parcel, asked)
        for member in asked:
            self._count(member, down=parcel.nbytes)
        if not self._script:
            for member in asked:
                self._ask_again(member)

    def _question(self, want: Tell, parcel: Parcel) -> Question:
        ticket = ticket_of(self._welcome["run"], self._looked, self._past, self._serial, parcel)
        told = want.down if self._coders.up.needs_keys or self._coders.down.needs_keys else None
        heard = None if told is None else as_heard(self._coders, told, parcel)
        return Question(ticket, self._serial, want.server.round, told, heard, asked_at=self.now)

    def _await(self, want: Await) -> Flow:
        """The earliest answers; nobody waits for clients that owe nothing or are gone, but for a moment, nor for those
        that take much longer than is usual to say anything."""
        entry = yield from self._replayed(Gave)
        if entry is None:
            yield from self._wait_for_answers(want)
            taken = self._arrived[: want.most]
            entry = Gave([[arrival.member.name, arrival.question.ticket.hex()] for arrival in taken], self._failed)
            self._failed = []
            yield from self._write(entry)
        else:
            self._drop_late(want.since)
            self._failed = []
        self._past = past_after(self._past, entry)
        given = {(name, ticket) for name, ticket in entry.replies}
        taken = [one for one in self._arrived if (one.member.name, one.question.ticket.hex()) in given]
        self._arrived = [one for one in self._arrived if one not in taken]
        for arrival in taken:
            self._apply(arrival)
        return self._replies(taken, entry.failed)

    def _wait_for_answers(self, want: Await) -> Flow:
        began = self.now
        self._begin_to_wait()
        while True:
            self._drop_late(want.since)
            hopeful = any(self._is_waited_for(member, began) for member in self.members)
            late = self.now >= began + want.within
            if len(self._arrived) >= want.most or late or (self._arrived and not hopeful):
                return
            if not hopeful:
                yield Until(lambda: bool(self._arrived), min(began + want.within, self.now + MOMENT))
                if not self._arrived:
                    return
                continue
            known = len(self._arrived), len(self._failed)
            deadline = min(began + want.within, self._patience_ends(began), self.now + MOMENT)
            yield Until(partial(self._has_news, known), deadline)

    def _has_news(self, known: tuple[int, int]) -> bool:
        return (len(self._arrived), len(self._failed)) != known

    def _is_waited_for(self, member: Member, began: float) -> bool:
        if not member.owes:
            return False
        if self._may_come_back(member):
            return True
        if not self.members.is_live(member, self.now):
            return False
        return member.accepted or self.now < began + self.members.prompt

    def _begin_to_wait(self) -> None:
        """For clients that were there before a restart, if that has not begun."""
        if self._back_until == inf:
            self._back_until = self.now + self.members.silence

    def _may_come_back(self, member: Member) -> bool:
        """It was there before a restart, and had little time to say hello since."""
        return member.heard == -inf and self.now < self._back_until

    def _patience_ends(self, began: float) -> float:
        end = began + self.members.prompt
        return end if end > self.now else inf

    def _apply(self, arrival: Arrival) -> None:
        """The algorithm is given the reply now: this, and nothing else, is what applying means."""
        member, opinion = arrival.member, arrival.opinion
        member.receipt = arrival.receipt
        member.steps += opinion.steps
        self.totals.contacts += 1
        self.totals.steps += opinion.steps
        self.totals.idle += opinion.steps == 0

    def _replies(self, taken: list[Arrival], failed: list[int]) -> Replies:
        model, buffers = self.server.model, self.server.buffers
        message = self._algorithm.records.up
        if taken:
            up = message.stack([arrival.opinion.up for arrival in taken])
        else:
            nothing = {one.name: model.new_empty(0, len(model)) for one in message.vectors()}
            nothing |= {one.name: torch.empty(0) for one in message.numbers()}
            up = message(statistics=buffers.new_empty(0, len(buffers)), **nothing)
        numbers = {one.name: getattr(up, one.name).float() for one in message.numbers()}
        return Replies(
            senders=_ints(arrival.member.number for arrival in taken),
            up=replace(up, **numbers),
            round=_ints(arrival.question.round for arrival in taken),
            steps=_ints(arrival.opinion.steps for arrival in taken),
            distances={
                name: torch.tensor([arrival.opinion.distances[name] for arrival in taken])
                for name in keyed(self._algorithm.records.down)
            },
            failed=_ints(failed),
        )

    # What was written down before

    def _replayed(self, kind: type[Any]) -> Flow:
        """The next entry of that kind in the script, after those that came before it; None when it is used up."""
        while self._script:
            entry = self._script[0]
            self.on_entry(entry)
            match entry:
                case Joined(name):
                    self.members.admit(name)
                case Returned() | Missed():
                    pass
                case Idled(name, ticket):
                    if self.members[name].owes.hex() == ticket:
                        self._take_idle(self.members[name])
                case Took():
                    yield from self._retake(entry)
                case _ if isinstance(entry, kind):
                    self._script.popleft()
                    if isinstance(entry, Looked):
                        self.now = max(self.now, entry.now)
                    return entry
                case _:
                    self._say(ERROR, "the journal does not fit to its checkpoint; what follows in it is left out")
                    self._script.clear()
                    return None
            self._script.popleft()
        return None

    def _retake(self, entry: Took) -> Flow:
        """A reply of an earlier process."""
        octets, repairs = entry.parts
        known = [wire.from_bytes(bits, self.server.model.device) for bits in repairs]
        member, question = self.members[entry.name], self._questions.get(bytes.fromhex(entry.ticket))
        if question is None or member.owes != question.ticket:
            return  # nobody waited for it any more
        message, spoken = messages.from_bytes(octets), self._spoken(question)
        assert isinstance(message, Reply)
        opinion = yield Compute(lambda: self._judge.read(message, spoken, replay(known), inf))  # it was believed
        self._take(member, question, opinion, octets)
        self.members.well_done(member, member.seconds, message.steps)


def past_after(past: bytes, entry: Looked | Gave) -> bytes:
    """A name for all that the algorithm was told, with this."""
    return messages.digest(past, log.to_bytes(entry))


def ticket_of(run: str, looked: float, past: bytes, serial: int, parcel: Parcel) -> bytes:
    """The name of a question. The same question after a restart has the same name. A later one has a greater name: so a
    client knows a question that was under way for long. A server that has lost some of its history to a full disk asks
    other questions, which have other names, because they have another past."""
    parts: list[Octets] = [str((run, serial)).encode(), past]
    parts += [wire.to_parts(packet)[0] for packet in parcel.packets]  # their headers
    return int(looked / TICK).to_bytes(8, "big") + messages.digest(*parts)[8:]


def _step(round: Any, back: Any) -> Callable[[], Any]:
    """The algorithm goes on, with what came of its last want, to its next one, or to the end of the round."""

    def step() -> Any:
        try:
            return round.send(back)
        except StopIteration as ended:
            return Ended(ended.value)

    return step


def _tensor(octets: bytes) -> Tensor:
    return torch.frombuffer(bytearray(octets), dtype=torch.uint8)


def _never() -> bool:
    return False


def _ints(values: Any) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _plain(question: Question) -> dict[str, Any]:
    return {
        "ticket": question.ticket.hex(),
        "serial": question.serial,
        "round": question.round,
        "told": None if question.told is None else question.told.tree(),
        "heard": None if question.heard is None else question.heard.tree(),
    }


def _question(plain: dict[str, Any], down: type[Message]) -> Question:
    told, heard = (None if plain[name] is None else down.from_tree(plain[name]) for name in ("told", "heard"))
    return Question(bytes.fromhex(plain["ticket"]), plain["serial"], plain["round"], told, heard)


def _plain_arrival(arrival: Arrival) -> dict[str, Any]:
    opinion = arrival.opinion
    return {
        "name": arrival.member.name,
        "question": _plain(arrival.question),
        "up": opinion.up.tree(),
        "steps": opinion.steps,
        "distances": opinion.distances,
        "receipt": arrival.receipt.hex(),
    }
