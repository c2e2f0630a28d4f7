"""The real clients, as the server sees them. Replies are decoded and judged each in its own thread, as they arrive:
what the algorithm gets is sound, or is not there."""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf, nan
from threading import Condition, Event
from time import monotonic
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quafl.codec import Identity, wire
from quafl.codec.identity import IDENTITY
from quafl.codec.packets import make_packet
from quafl.core.seams import (
    Algorithm,
    Answer,
    Codecs,
    DecodeError,
    Ids,
    Note,
    Packet,
    Refine,
    Replies,
    ServerState,
    Totals,
    WireError,
)
from quafl.deploy import messages
from quafl.deploy.clock import Stopped, TimeUp
from quafl.deploy.journal import Journal
from quafl.deploy.judge import Judge
from quafl.deploy.messages import (
    Accepted,
    Broken,
    Contact,
    Finished,
    Hello,
    Message,
    Octets,
    Received,
    Refinement,
    Refused,
    Repair,
    Reply,
    WantsAll,
    Welcome,
)
from quafl.deploy.worker import Unreachable

_log = logging.getLogger(__name__)

AskClient: TypeAlias = Callable[[str, bytes, float], Octets]  # to whom, octets, seconds to wait; or Unreachable

RECENT = 8  # contacts
GLANCE = 0.5  # seconds between two looks at whether to stop
LONGEST_EXCLUSION = 3600.0  # seconds


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server puts up with."""

    clients: int = 1000  # most that can ever take part
    start_with: int = 1  # clients that must be there before the first round
    silence: float = 10.0  # seconds without a sign of life, after which a client is taken for gone
    contact_seconds: float = 30.0  # that a client may take to answer a message
    far: float = 20.0  # times the usual distance, from which on a reply is implausible
    faults: int = 3  # bad replies, or none at all, in a row, after which a client is left out
    exclusion: float = 60.0  # seconds, twice as many each further time


@dataclass(slots=True)
class Member:
    """A client, as far as the server knows it."""

    name: str
    number: int
    heard: float = -inf  # when it last gave a sign of life
    away: bool = False  # it could not be reached, or has said goodbye
    left_out_until: float = -inf
    exclusions: int = 0
    faults: int = 0  # in a row
    dropped: int = 0  # replies
    contacts: int = 0
    steps: int = 0
    speed: float = nan  # H_i
    session: str = ""  # of its process
    answered: bytes = b""  # the contact that it answered last
    asked: deque[bytes] = field(default_factory=lambda: deque(maxlen=RECENT))  # contacts whose answers may come late


@dataclass(slots=True)
class _Question:
    """A contact under way: one message to some clients."""

    serial: int
    note: Note
    refine: Refine | None
    server: ServerState | None  # whose model was sent: the key of the answers; None where there is no need of one
    whole: bytes = b""  # the same contact in full precision, once somebody has needed it


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A reply that was accepted."""

    member: Member
    ticket: bytes
    round: int
    vector: Tensor
    exact: Tensor
    steps: int
    distance: float
    speed: float


class NetworkFleet:
    """Clients that dial in. `ask` reaches one by its name; what they say by themselves comes to `hear`, with the name
    that their certificate proves. `welcome` is what a newcomer is told."""

    def __init__(
        self,
        ask: AskClient,
        algorithm: Algorithm,
        codecs: Codecs,
        start: ServerState,
        journal: Journal,
        welcome: dict[str, Any],
        stop: Event,
        limits: Limits = Limits(),  # noqa: B008  # immutable
    ) -> None:
        self.size = limits.clients
        self.totals = Totals()
        self.finished = False
        self._ask_client, self._codecs, self._journal, self._welcome = ask, codecs, journal, welcome
        self._limits, self._stop = limits, stop
        self._judge = Judge(algorithm, codecs.up, limits.far)
        self._answers_later = algorithm.answers == "when done"
        self._server = start
        self._changed = Condition()  # guards what follows
        self._members: dict[str, Member] = {}
        self._questions: dict[bytes, _Question] = {}  # by ticket
        self._owing: dict[str, bytes] = {}  # by name: the contact that the client has not answered yet
        self._arrived: list[_Arrival] = []
        self._failed: list[int] = []
        self._started = False
        self._serial = 0  # of the last contact
        self.ends_at = inf  # when nobody is waited for any more, in monotonic seconds
        self._pool = ThreadPoolExecutor(max_workers=64, thread_name_prefix="contact")

    # What the algorithm sees

    def available(self) -> Ids:
        """Clients that are there and not left out; waits until somebody is, or raises TimeUp."""
        with self._changed:
            while True:
                live = sorted(member.number for member in self._members.values() if self._is_live(member))
                if len(live) >= (1 if self._started else self._limits.start_with):
                    self._started = True
                    return torch.tensor(live, dtype=torch.int64)
                if monotonic() >= self.ends_at:
                    raise TimeUp
                self._wait(GLANCE)

    def send(self, to: Ids, packet: Packet, note: Note, refine: Refine) -> None:
        """Contact the clients, all at the same time."""
        chosen = set(to.tolist())
        self._serial += 1
        octets = _contact(packet, note, self._serial)
        ticket = messages.ticket_of(octets)
        keyed = self._codecs.down.keyed
        with self._changed:
            self._questions[ticket] = _Question(
                self._serial, note, refine if keyed else None, self._server if keyed else None
            )
            members = [member for member in self._members.values() if member.number in chosen]
            for member in members:
                self.totals.lost += member.name in self._owing  # it is not waited for any more
                self._owe(member, ticket)
            self._forget_answered()
        for member in members:
            self._pool.submit(self._contact, member, ticket, octets)

    def receive(self, count: int, within: float, since: int) -> Replies:
        """The earliest answers; nobody waits for clients that owe nothing or are gone, but for a moment."""
        deadline = monotonic() + within
        with self._changed:
            self._drop_late(since)
            while len(self._arrived) < count and monotonic() < deadline:
                waiting = any(self._is_live(self._members[name]) for name in self._owing)
                if not waiting and self._arrived:
                    break
                self._wait(min(GLANCE, max(deadline - monotonic(), 0.0)))
                self._drop_late(since)
                if not waiting:
                    break
            taken, self._arrived = self._arrived[:count], self._arrived[count:]
            failed, self._failed = self._failed, []
        return self._replies(taken, failed)

    # What the coordinator does

    def reach(self, state: ServerState) -> None:
        """The server's model has become this one."""
        self._server = state

    def members(self) -> list[Member]:
        """Everybody who has ever been there, in the order of their coming."""
        with self._changed:
            return sorted(self._members.values(), key=lambda member: member.number)

    def is_live(self, member: Member) -> bool:
        """Whether it can be contacted now."""
        with self._changed:
            return self._is_live(member)

    def is_left_out(self, member: Member) -> bool:
        """For its faults."""
        return monotonic() < member.left_out_until

    def finish(self) -> None:
        """Tell everybody that the run is over."""
        self.finished = True
        live = [member for member in self.members() if self.is_live(member)]
        for told in [self._pool.submit(self._tell_end, member) for member in live]:
            told.result()

    def close(self) -> None:
        """No more contacts."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._journal.close()

    def state(self) -> dict[str, Any]:
        """For `restore`."""
        with self._changed:
            kept = ("number", "dropped", "contacts", "steps", "speed", "exclusions")
            owing = [(name, ticket, self._questions[ticket].note.round) for name, ticket in self._owing.items()]
            arrived = [(arrival.member.name, arrival.ticket, arrival.round) for arrival in self._arrived]
            return {
                "totals": asdict(self.totals),
                "serial": self._serial,
                "usual": self._judge.usual(),
                "members": {name: {key: getattr(m, key) for key in kept} for name, m in self._members.items()},
                "owing": {name: {"ticket": ticket.hex(), "round": asked} for name, ticket, asked in (*owing, *arrived)},
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from there: the clients are known again, and there as soon as they say hello. What those who owe
        nothing were asked since, nobody knows: they have failed."""
        with self._changed:
            self.totals = Totals(**state["totals"])
            self._serial = state["serial"]
            self._judge.learn(state["usual"])
            self._members = {name: Member(name, **values) for name, values in state["members"].items()}
            self.size = max(self.size, len(self._members))
            for name, owed in state["owing"].items():
                ticket = bytes.fromhex(owed["ticket"])
                self._owe(self._members[name], ticket)
                self._questions[ticket] = _Question(0, Note(owed["round"], 0, inf), None, None)
            self._failed = [member.number for name, member in self._members.items() if name not in self._owing]

    def replay(self) -> None:
        """Take the replies that were accepted, but not applied, before a restart."""
        with self._changed:
            owing = list(self._owing.items())
        for name, ticket in owing:
            self._guarded(self._members[name], ticket, partial(self._journal.get, name, ticket))

    def forget_applied(self) -> None:
        """A checkpoint was made: replies that the algorithm has taken are in it."""
        with self._changed:
            self._journal.keep([(arrival.member.name, arrival.ticket) for arrival in self._arrived])

    # What clients say by themselves

    def hear(self, name: str, octets: Octets) -> bytes:
        """The answer to a message from a client."""
        try:
            answer: Message = self._hear(name, octets)
        except (WireError, DecodeError, Unreachable) as error:
            member = self._members.get(name)
            if member is not None:
                self._fault(member, str(error))
            else:
                _log.warning("%s, who is not a member: %s; its message is dropped", name, error)
            answer = Refused(str(error).encode())
        except Exception:
            _log.exception("a message from %s", name)
            answer = Refused(b"something went wrong at the server")
        back = messages.to_bytes(answer)
        with self._changed:
            self.totals.up += len(octets)
            self.totals.down += len(back)
        return back

    def _hear(self, name: str, octets: Octets) -> Message:
        message = messages.from_bytes(octets)
        if isinstance(message, Hello):
            return self._greet(name, messages.from_text(message.text))
        with self._changed:
            member = self._members.get(name)
            owed = self._owing.get(name)
        if member is None:
            raise WireError("said something before its Hello")
        match message:
            case Repair():
                return self._repair(message, owed)
            case Reply() | Broken() | WantsAll():
                self._take(member, message, octets)
                return Received()
        raise WireError(f"a {type(message).__name__} is nothing that a client says")

    def _greet(self, name: str, hello: dict[str, Any]) -> Message:
        mine, theirs = (len(self._server.model), len(self._server.buffers)), (hello.get("dim"), hello.get("buffers"))
        if mine != theirs:
            reason = (
                f"the server's model has {mine[0]} parameters and {mine[1]} buffers, that of {name} {theirs[0]} and "
            )
            return Refused(f"{reason}{theirs[1]}; use the same model".encode())
        if self.finished:
            return Finished()
        with self._changed:
            member = self._members.get(name)
            if member is None and len(self._members) >= self._limits.clients:
                return Refused(f"there are {self._limits.clients} clients already, which is the limit".encode())
            if member is None:
                member = self._members[name] = Member(name, number=len(self._members))
            gone = member.away or monotonic() - member.heard >= self._limits.silence
            if gone and not hello.get("leaving"):
                _log.info("%s is there", name)
            if member.session not in ("", hello.get("session")):
                self._lose(member, self._owing.get(name))  # restarted, it has forgotten what it was asked
            member.session = str(hello.get("session"))
            member.heard, member.away = monotonic(), bool(hello.get("leaving"))
            if member.away:
                _log.info("%s has left", name)
                self._lose(member, self._owing.get(name))
            self._changed.notify_all()
        return Welcome(messages.as_text(self._welcome))

    def _repair(self, message: Repair, owed: bytes | None) -> Message:
        with self._changed:
            question = self._questions.get(message.ticket)
        if owed != message.ticket or question is None or question.refine is None:
            raise WireError("asked for a repair of something that it was not sent")
        request = wire.from_bytes(message.packet)
        if request.kind != "request" or request.dim != len(self._server.model):
            raise WireError(f"asked for a repair with a {request.kind} about d={request.dim}")
        refinement = question.refine(0, request)
        with self._changed:
            self.totals.refined += request.sent == self._codecs.down.bits
        return Refinement(wire.to_bytes(refinement))

    # A contact, in a thread of the pool

    def _contact(self, member: Member, ticket: bytes, octets: bytes) -> None:
        self._guarded(member, ticket, lambda: self._journal.get(member.name, ticket) or self._ask(member, octets))

    def _guarded(self, member: Member, ticket: bytes, answer: Callable[[], Octets | None]) -> None:
        """Get an answer, if there is one, and take it; whatever goes wrong is the client's loss."""
        try:
            octets = answer()
            if octets is None:
                return
            match messages.from_bytes(octets):
                case Reply() | Broken() | WantsAll() as message:
                    self._take(member, message, octets)
                case Accepted() if self._answers_later:
                    pass
                case Refused() as refusal:
                    _log.warning("%s refused the contact: %s", member.name, messages.sentence(refusal))
                    self._miss(member, ticket)
                case other:
                    raise WireError(f"answered a contact with a {type(other).__name__}")
        except Unreachable as error:
            _log.warning("%s %s", member.name, error)
            self._miss(member, ticket)
            self._count_fault(member)
        except (WireError, DecodeError) as error:
            self._fault(member, str(error), ticket)
        except Exception:
            _log.exception("contact with %s", member.name)
            self._miss(member, ticket)

    def _contact_in_full(self, member: Member, ticket: bytes) -> None:
        """For a client that has no model, or one that is too far away."""
        with self._changed:
            question = self._questions.get(ticket)
        if question is None or question.server is None:
            raise WireError("asks for the whole model, which it has been sent")
        if not question.whole:
            packet = Identity().encode(question.server.model, exact=question.server.buffers)
            question.whole = _contact(packet, question.note, question.serial)
        whole = messages.ticket_of(question.whole)
        if whole == ticket:
            raise WireError("asks for the whole model, which it has just been sent")
        with self._changed:
            if self._owing.get(member.name) != ticket:
                return
            self._questions[whole] = question
            self._owe(member, whole)
        _log.info("%s gets the whole model", member.name)
        self._pool.submit(self._contact, member, whole, question.whole)

    def _take(self, member: Member, message: Reply | Broken | WantsAll, octets: Octets) -> None:
        """An answer to a contact: judged, decoded, written down, and only then given to the algorithm."""
        ticket = message.ticket
        with self._changed:
            question = self._questions.get(ticket)
            if question is None or self._owing.get(member.name) != ticket:
                if ticket != member.answered and ticket not in member.asked:
                    raise WireError("answers something that it was not asked")
                return None  # late, or said again because it has not heard that it was taken: it is not applied
        if isinstance(message, WantsAll):
            return self._contact_in_full(member, ticket)
        if isinstance(message, Broken):
            with self._changed:
                if self._settle(member, ticket):
                    self._failed.append(member.number)
                    self.totals.broken += 1
                    self.totals.lost += 1
            _log.warning("%s, round %d: its progress was not finite", member.name, question.note.round)
            return None
        asked, server = question.note.round, self._server if question.server is None else question.server
        vector, exact = self._judge.read(message, asked, server, self._refine_of(member, ticket))
        steps = max(message.steps, 0)
        arrival = _Arrival(member, ticket, asked, vector, exact, steps, message.distance, message.speed)
        self._journal.add(member.name, ticket, octets)
        with self._changed:
            if not self._settle(member, ticket):
                return None  # the same reply has come twice, or too late
            member.faults, member.contacts, member.speed = 0, member.contacts + 1, arrival.speed
            member.steps += arrival.steps
            self.totals.contacts += 1
            self.totals.steps += arrival.steps
            self.totals.idle += message.steps == 0
            self._arrived.append(arrival)
            self._changed.notify_all()
        return None

    def _refine_of(self, member: Member, ticket: bytes) -> Refine:
        def refine(row: int, request: Packet) -> Packet:
            question = messages.to_bytes(Repair(ticket, wire.to_bytes(request)))
            back = self._journal.get(member.name, question) or self._ask(member, question)
            match messages.from_bytes(back):
                case Refinement(bits):
                    refinement = wire.from_bytes(bits)
                case other:
                    raise DecodeError(f"was asked for a repair, sent a {type(other).__name__}")
            self._journal.add(member.name, question, back)
            with self._changed:
                self.totals.refined += request.sent == self._codecs.up.bits
            return refinement

        return refine

    def _ask(self, member: Member, octets: bytes) -> Octets:
        with self._changed:
            self.totals.down += len(octets)
        back = self._ask_client(member.name, octets, self._limits.contact_seconds)
        with self._changed:
            self.totals.up += len(back)
        return back

    def _tell_end(self, member: Member) -> None:
        try:
            self._ask(member, messages.to_bytes(Finished()))
        except Unreachable:
            _log.info("%s could not be told that the run is over", member.name)

    # Under the lock

    def _is_live(self, member: Member) -> bool:
        now = monotonic()
        return not member.away and now - member.heard < self._limits.silence and now >= member.left_out_until

    def _wait(self, seconds: float) -> None:
        if self._stop.is_set():
            raise Stopped
        self._changed.wait(seconds)

    def _owe(self, member: Member, ticket: bytes) -> None:
        self._owing[member.name] = ticket
        member.asked.append(ticket)

    def _settle(self, member: Member, ticket: bytes) -> bool:
        """It owes nothing any more; whether it did."""
        if self._owing.get(member.name) != ticket:
            return False
        member.answered = ticket
        del self._owing[member.name]
        self._forget_answered()
        return True

    def _lose(self, member: Member, ticket: bytes | None) -> None:
        """What it owes will not come, if it is this."""
        if ticket is not None and self._owing.get(member.name) == ticket:
            del self._owing[member.name]
            self._forget_answered()
            self.totals.lost += 1
            self._failed.append(member.number)
            self._changed.notify_all()

    def _forget_answered(self) -> None:
        owed = set(self._owing.values())
        self._questions = {ticket: question for ticket, question in self._questions.items() if ticket in owed}

    def _drop_late(self, since: int) -> None:
        late = [arrival for arrival in self._arrived if arrival.round < since]
        self.totals.lost += len(late)
        self.totals.contacts -= len(late)
        self._arrived = [arrival for arrival in self._arrived if arrival.round >= since]
        for name, ticket in list(self._owing.items()):
            if self._questions[ticket].note.round < since:
                self._lose(self._members[name], ticket)

    # Without it

    def _miss(self, member: Member, ticket: bytes) -> None:
        """It does not answer; it is not asked again before it says hello."""
        with self._changed:
            member.away = True
            self._lose(member, ticket)

    def _fault(self, member: Member, reason: str, ticket: bytes | None = None) -> None:
        _log.warning("%s: %s; its message is dropped", member.name, reason)
        with self._changed:
            member.dropped += 1
            self._lose(member, ticket)
        self._count_fault(member)

    def _count_fault(self, member: Member) -> None:
        with self._changed:
            member.faults += 1
            if member.faults >= self._limits.faults:
                seconds = min(self._limits.exclusion * 2**member.exclusions, LONGEST_EXCLUSION)
                member.left_out_until = monotonic() + seconds
                member.faults, member.exclusions = 0, member.exclusions + 1
                _log.warning("%s is left out for %.0f s: %d faults in a row", member.name, seconds, self._limits.faults)
            self._changed.notify_all()

    def _replies(self, taken: list[_Arrival], failed: list[int]) -> Replies:
        """A row each, already decoded: the algorithm's own decoding is then none."""
        if not taken:
            vectors, exact = self._server.model.new_empty(0, len(self._server.model)), self._server.buffers[None][:0]
        elif len(taken) == 1:
            vectors, exact = taken[0].vector[None], taken[0].exact[None]
        else:
            vectors = torch.stack([arrival.vector for arrival in taken])
            exact = torch.stack([arrival.exact for arrival in taken])

        def nothing_to_refine(row: int, request: Packet) -> Packet:
            raise DecodeError("a full-precision message has no next bits")

        return Replies(
            senders=torch.tensor([arrival.member.number for arrival in taken], dtype=torch.int64),
            answer=Answer(
                packet=make_packet(vectors, IDENTITY, Identity.bits, 0, vectors.view(torch.int32), exact=exact),
                round=torch.tensor([arrival.round for arrival in taken], dtype=torch.int64),
                steps=torch.tensor([arrival.steps for arrival in taken], dtype=torch.int64),
                distance=torch.tensor([arrival.distance for arrival in taken]),
                speed=torch.tensor([arrival.speed for arrival in taken]),
            ),
            refine=nothing_to_refine,
            failed=torch.tensor(failed, dtype=torch.int64),
        )


def _contact(packet: Packet, note: Note, serial: int) -> bytes:
    return messages.to_bytes(Contact(serial, note.round, note.sampled, note.slowest, b""), *wire.to_parts(packet))
