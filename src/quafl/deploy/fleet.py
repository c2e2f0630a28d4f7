"""The real clients, as the server sees them. Replies are decoded and judged as they arrive: what the algorithm gets is
sound, or is not there.

The algorithm runs in a thread of its own. Contacts are coroutines of the carrier's loop, however many there are; what
takes time to compute goes to a few threads. No client has a thread, or more memory than its last message takes.
"""

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from math import inf
from threading import Condition, Event
from time import monotonic
from typing import Any, TypeVar

import torch
from torch import Tensor

from quafl.codec import Identity, wire
from quafl.codec.hashing import BLOCK
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
from quafl.deploy.carrier import Carrier, Loop, Octets, Unreachable
from quafl.deploy.clock import Stopped, TimeUp
from quafl.deploy.journal import Journal
from quafl.deploy.judge import Judge
from quafl.deploy.members import Limits, Member, Members
from quafl.deploy.messages import (
    Accepted,
    Broken,
    Contact,
    Finished,
    Hello,
    Message,
    Received,
    Refinement,
    Refused,
    Repair,
    Reply,
    WantsAll,
    Welcome,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")

GLANCE = 0.5  # seconds between two looks at whether to stop
MOST_REPAIRS = 8  # of a message: refinement needs six at most
FINISH_SECONDS = 5.0  # for telling everybody that the run is over


@dataclass(slots=True)
class _Question:
    """A contact under way: one message to some clients."""

    serial: int
    note: Note
    refine: Refine | None
    server: ServerState | None  # whose model was sent: the key of the answers; None where there is no need of one
    asked_at: float = inf  # monotonic seconds
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


class _Wanted(Exception):
    """A message does not decode without this."""

    def __init__(self, request: Packet) -> None:
        self.request = request


class NetworkFleet:
    """Clients that dial in. The carrier reaches one by its name; what they say by themselves comes to `hear`, with the
    name that the carrier has proved. `welcome` is what a newcomer is told."""

    def __init__(
        self,
        carrier: Carrier,
        loop: Loop,
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
        self._carrier, self._loop = carrier, loop
        self._codecs, self._journal, self._welcome = codecs, journal, welcome
        self._limits, self._stop = limits, stop
        self._judge = Judge(algorithm, codecs.up, limits.far)
        self._answers_later = algorithm.answers == "when done"
        self._server = start
        self._changed = Condition()  # guards what follows
        self._members = Members(limits)
        self._questions: dict[bytes, _Question] = {}  # by ticket
        self._owing: dict[str, bytes] = {}  # by name: the contact that the client has not answered yet
        self._arrived: list[_Arrival] = []
        self._failed: list[int] = []
        self._started = False
        self._serial = 0  # of the last contact
        self.ends_at = inf  # when nobody is waited for any more, in monotonic seconds
        self._pool = ThreadPoolExecutor(max_workers=1 + (os.cpu_count() or 1), thread_name_prefix="codec")

    # What the algorithm sees

    def available(self) -> Ids:
        """Clients that are there and not left out; waits until somebody is, or raises TimeUp."""
        with self._changed:
            while True:
                live = sorted(member.number for member in self._members if self._members.is_live(member))
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
                self._serial, note, refine if keyed else None, self._server if keyed else None, monotonic()
            )
            members = [member for member in self._members if member.number in chosen]
            for member in members:
                if member.name in self._owing:  # it is not waited for any more
                    self.totals.lost += 1
                    self._members.strike(member, "late answers")
                self._owe(member, ticket)
            self._forget_answered()
        for member in members:
            self._loop.spawn(self._contact(member, ticket, octets))

    def receive(self, count: int, within: float, since: int) -> Replies:
        """The earliest answers; nobody waits for clients that owe nothing or are gone, but for a moment, nor for those
        that take much longer than is usual."""
        with self._changed:
            deadline = monotonic() + min(within, inf if self._answers_later else self._members.prompt)
            self._drop_late(since)
            while len(self._arrived) < count and monotonic() < deadline:
                waiting = any(self._members.is_live(self._members[name]) for name in self._owing)
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
            return list(self._members)

    def is_live(self, member: Member) -> bool:
        """Whether it can be contacted now."""
        with self._changed:
            return self._members.is_live(member)

    def is_left_out(self, member: Member) -> bool:
        """For its faults."""
        return self._members.is_left_out(member)

    def finish(self) -> None:
        """Tell everybody that the run is over."""
        self.finished = True
        live = [member for member in self.members() if self.is_live(member)]
        wait([self._loop.spawn(self._tell_end(member)) for member in live], timeout=FINISH_SECONDS)

    def close(self) -> None:
        """No more contacts."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._journal.close()

    def state(self) -> dict[str, Any]:
        """For `restore`."""
        with self._changed:
            owing = [(name, ticket, self._questions[ticket].note.round) for name, ticket in self._owing.items()]
            arrived = [(arrival.member.name, arrival.ticket, arrival.round) for arrival in self._arrived]
            return {
                "totals": asdict(self.totals),
                "serial": self._serial,
                "usual": self._judge.votes(),
                "members": self._members.state(),
                "owing": {name: {"ticket": ticket.hex(), "round": asked} for name, ticket, asked in (*owing, *arrived)},
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from there: the clients are known again, and there as soon as they say hello. What those who owe
        nothing were asked since, nobody knows: they have failed."""
        with self._changed:
            self.totals = Totals(**state["totals"])
            self._serial = state["serial"]
            self._judge.learn(state["usual"])
            self._members.restore(state["members"])
            self.size = max(self.size, len(self._members))
            for name, owed in state["owing"].items():
                ticket = bytes.fromhex(owed["ticket"])
                self._owe(self._members[name], ticket)
                self._questions[ticket] = _Question(0, Note(owed["round"], 0, inf), None, None)
            self._failed = [member.number for member in self._members if member.name not in self._owing]

    def replay(self) -> None:
        """Take the replies that were accepted, but not applied, before a restart."""
        with self._changed:
            owing = list(self._owing.items())
        for name, ticket in owing:
            octets = self._journal.get(name, ticket)
            if octets is not None:
                self._loop.run(self._answered(self._members[name], ticket, octets))

    def forget_applied(self) -> None:
        """A checkpoint was made: replies that the algorithm has taken are in it."""
        with self._changed:
            self._journal.keep([(arrival.member.name, arrival.ticket) for arrival in self._arrived])

    # What clients say by themselves

    async def hear(self, name: str, octets: Octets) -> bytes:
        """The answer to a message from a client."""
        ticket = None
        try:
            message = messages.from_bytes(octets)
            ticket = getattr(message, "ticket", None)
            answer: Message = await self._hear(name, message, octets)
        except (WireError, DecodeError, Unreachable) as error:
            member = self._members.get(name)
            if member is not None:
                self._fault(member, str(error), ticket)
            else:
                _log.warning("%s, who is not a member: %s; its message is dropped", name, error)
            answer = Refused(str(error).encode(errors="replace"))
        except Exception:
            _log.exception("a message from %s", name)
            answer = Refused(b"something went wrong at the server")
        back = messages.to_bytes(answer)
        with self._changed:
            self.totals.up += len(octets)
            self.totals.down += len(back)
        return back

    def room(self, name: str) -> int:
        """For greetings and requests for repairs; for members that send their model when they are done, also for that,
        and for saying it again."""
        small = 2 * messages.LONGEST_TEXT + 4 * (len(self._server.model) // BLOCK + 1)
        model = 4 * (len(self._server.model) + len(self._server.buffers))
        return small + 2 * model if self._answers_later and self._members.get(name) else small

    def gone(self, name: str) -> None:
        """It is not asked before it says hello again."""
        with self._changed:
            member = self._members.get(name)
            if member is not None:
                member.away = True
                self._changed.notify_all()

    async def _hear(self, name: str, message: Message, octets: Octets) -> Message:
        if isinstance(message, Hello):
            return self._greet(name, messages.from_text(message.text))
        with self._changed:
            member = self._members.get(name)
        if member is None:
            raise WireError("said something before its Hello")
        match message:
            case Repair():
                return await self._repair(member, message)
            case Reply() | Broken() | WantsAll():
                await self._take(member, message, octets)
                return Received()
        raise WireError(f"a {type(message).__name__} is nothing that a client says")

    def _greet(self, name: str, hello: dict[str, Any]) -> Message:
        session, leaving = hello.get("session"), hello.get("leaving", False)
        if not (isinstance(session, str) and re.fullmatch(r"[0-9a-f]{1,32}", session) and isinstance(leaving, bool)):
            raise WireError("says hello without saying which process it is, or whether it leaves")
        mine, theirs = (len(self._server.model), len(self._server.buffers)), (hello.get("dim"), hello.get("buffers"))
        if mine != theirs:
            reason = f"the server's model has {mine[0]} parameters and {mine[1]} buffers, that of {name} another number"
            return Refused(f"{reason}; use the same model".encode())
        if self.finished:
            return Finished()
        with self._changed:
            member = self._members.admit(name)
            if member is None:
                return Refused(f"there are {self._limits.clients} clients already, which is the limit".encode())
            if not member.hellos.has():
                raise WireError("says hello too often")
            if (member.away or self._members.is_silent(member)) and not leaving:
                _log.info("%s is there", name)
            if member.session not in ("", session):
                self._lose(member, self._owing.get(name))  # restarted, it has forgotten what it was asked
            member.session, member.heard, member.away = session, monotonic(), leaving
            if leaving:
                _log.info("%s has left", name)
                self._lose(member, self._owing.get(name))
            self._changed.notify_all()
            return Welcome(messages.as_text({**self._welcome, "hello_seconds": self._members.hello_seconds}))

    async def _repair(self, member: Member, message: Repair) -> Message:
        with self._changed:
            question = self._questions.get(message.ticket)
            asked = self._owing.get(member.name) == message.ticket
            member.repairs += asked
        if not asked or question is None or question.refine is None:
            raise WireError("asked for a repair of something that it was not sent")
        if member.repairs > MOST_REPAIRS:
            raise WireError(f"asked for more than {MOST_REPAIRS} repairs of one message")
        request = wire.from_bytes(message.packet)
        if request.kind != "request" or request.dim != len(self._server.model):
            raise WireError(f"asked for a repair with a {request.kind} about d={request.dim}")
        refine = question.refine
        refinement = await self._computed(lambda: wire.to_bytes(refine(0, request)))
        with self._changed:
            self.totals.refined += request.sent == self._codecs.down.bits
        return Refinement(refinement)

    # A contact

    async def _contact(self, member: Member, ticket: bytes, octets: bytes) -> None:
        with self._changed:
            owed = self._owing.get(member.name) == ticket
        if owed:
            kept = await self._computed(lambda: self._journal.get(member.name, ticket))
            await self._guarded(member, ticket, self._exchange(member, ticket, octets, kept))

    async def _answered(self, member: Member, ticket: bytes, octets: Octets) -> None:
        await self._guarded(member, ticket, self._exchange(member, ticket, b"", octets))

    async def _exchange(self, member: Member, ticket: bytes, octets: bytes, kept: Octets | None) -> None:
        """Ask, unless the answer is known, and take what comes."""
        async with asyncio.timeout(self._limits.contact_seconds):
            back = kept if kept is not None else await self._ask(member, octets)
            match messages.from_bytes(back):
                case Reply() | Broken() | WantsAll() as message:
                    await self._take(member, message, back)
                case Accepted() if self._answers_later:
                    pass
                case Refused() as refusal:
                    _log.warning("%s refused the contact: %s", member.name, messages.sentence(refusal))
                    self._miss(member, ticket)
                    with self._changed:
                        self._members.strike(member, "refusals")
                case other:
                    raise WireError(f"answered a contact with a {type(other).__name__}")

    async def _guarded(self, member: Member, ticket: bytes, exchange: Awaitable[None]) -> None:
        """Whatever goes wrong is the client's loss."""
        try:
            await exchange
        except (Unreachable, TimeoutError) as error:
            _log.warning("%s %s", member.name, str(error) or "did not answer in time")
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
        self._loop.spawn(self._contact(member, whole, question.whole))

    async def _take(self, member: Member, message: Reply | Broken | WantsAll, octets: Octets) -> None:
        """An answer to a contact: judged, decoded, written down, and only then given to the algorithm."""
        ticket = message.ticket
        with self._changed:
            question = self._questions.get(ticket)
            if question is None or self._owing.get(member.name) != ticket:
                if ticket != member.answered and ticket not in member.asked:
                    raise WireError("answers something that it was not asked")
                return  # late, or said again because it has not heard that it was taken: it is not applied
            if member.judging == ticket:
                return  # said again while the first is being read
            if isinstance(message, Broken):
                self._settle(member, ticket)
                self._failed.append(member.number)
                self.totals.broken += 1
                self.totals.lost += 1
                self._members.strike(member, "answers that were not finite")
                self._changed.notify_all()
                _log.warning("%s, round %d: its progress was not finite", member.name, question.note.round)
                return
            if isinstance(message, Reply):
                member.judging = ticket
        if isinstance(message, WantsAll):
            await self._computed(lambda: self._contact_in_full(member, ticket))
            return
        try:
            await self._read(member, question, message, octets)
        except (WireError, DecodeError, Unreachable):
            if self._owing.get(member.name) == ticket:  # else nobody waits for it, and it may have let go of it
                raise
        finally:
            if member.judging == ticket:
                member.judging = b""

    async def _read(self, member: Member, question: _Question, message: Reply, octets: Octets) -> None:
        asked, server = question.note.round, self._server if question.server is None else question.server
        ticket, known = message.ticket, list[Packet]()
        while not isinstance(read := await self._attempt(member, message, asked, server, known), tuple):
            if len(known) == MOST_REPAIRS:
                raise DecodeError(f"does not decode after {MOST_REPAIRS} repairs")
            known.append(await self._refinement(member, ticket, read))
        arrival = _Arrival(member, ticket, asked, *read, max(message.steps, 0), message.distance, message.speed)
        await self._computed(lambda: self._journal.add(member.name, ticket, octets))
        with self._changed:
            if not self._settle(member, ticket):
                return  # too late
            self._members.well_done(member, monotonic() - question.asked_at)
            member.speed = arrival.speed
            member.steps += arrival.steps
            self.totals.contacts += 1
            self.totals.steps += arrival.steps
            self.totals.idle += message.steps == 0
            self._arrived.append(arrival)
            self._changed.notify_all()

    async def _attempt(
        self, member: Member, message: Reply, asked: int, server: ServerState, known: list[Packet]
    ) -> tuple[Tensor, Tensor] | Packet:
        """What a reply says; or what has to be asked for first. Nothing else is kept of the attempt."""
        try:
            return await self._computed(lambda: self._judge.read(member.name, message, asked, server, _replay(known)))
        except _Wanted as wanted:
            return wanted.request

    async def _refinement(self, member: Member, ticket: bytes, request: Packet) -> Packet:
        question = messages.to_bytes(Repair(ticket, wire.to_bytes(request)))
        kept = await self._computed(lambda: self._journal.get(member.name, question))
        back = kept or await self._ask(member, question)
        match messages.from_bytes(back):
            case Refinement(bits):
                refinement = wire.from_bytes(bits)
            case other:
                raise DecodeError(f"was asked for a repair, sent a {type(other).__name__}")
        await self._computed(lambda: self._journal.add(member.name, question, back))
        with self._changed:
            self.totals.refined += request.sent == self._codecs.up.bits
        return refinement

    async def _ask(self, member: Member, octets: bytes) -> Octets:
        with self._changed:
            self.totals.down += len(octets)
        back = await self._carrier.ask(member.name, octets, self._limits.contact_seconds)
        with self._changed:
            self.totals.up += len(back)
        return back

    async def _tell_end(self, member: Member) -> None:
        try:
            await self._ask(member, messages.to_bytes(Finished()))
        except Unreachable:
            _log.info("%s could not be told that the run is over", member.name)

    async def _computed(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    # Under the lock

    def _wait(self, seconds: float) -> None:
        if self._stop.is_set():
            raise Stopped
        self._changed.wait(seconds)

    def _owe(self, member: Member, ticket: bytes) -> None:
        self._owing[member.name] = ticket
        member.repairs = 0
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
                self._members.strike(self._members[name], "late answers")
                self._lose(self._members[name], ticket)

    # Without it

    def _miss(self, member: Member, ticket: bytes) -> None:
        """It does not answer; it is not asked again before it says hello, unless it has come back meanwhile."""
        with self._changed:
            question = self._questions.get(ticket)
            member.away = question is None or member.heard <= question.asked_at
            self._lose(member, ticket)

    def _fault(self, member: Member, reason: str, ticket: bytes | None = None) -> None:
        _log.warning("%s: %s; its message is dropped", member.name, reason)
        with self._changed:
            member.dropped += 1
            self._lose(member, ticket)
        self._count_fault(member)

    def _count_fault(self, member: Member) -> None:
        with self._changed:
            self._members.fault(member)
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


def _replay(known: list[Packet]) -> Refine:
    """What has been asked for, in order; then `_Wanted`."""
    left = iter(known)

    def refine(row: int, request: Packet) -> Packet:
        for refinement in left:
            return refinement
        raise _Wanted(request)

    return refine
