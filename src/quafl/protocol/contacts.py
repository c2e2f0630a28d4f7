"""A server's contacts: what clients are asked, what they say by themselves, and how an answer is taken."""

import re
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from quafl.codec import wire
from quafl.codec.coders import Coders, Parcel
from quafl.codec.seams import DecodeError, Packet, WireError
from quafl.core.seams import Algorithm, ServerState
from quafl.protocol import log, messages
from quafl.protocol.carrier import Octets, Unreachable
from quafl.protocol.debts import Arrival, Debts, Question
from quafl.protocol.judge import Judge, Opinion
from quafl.protocol.judging import Judgement, score_from
from quafl.protocol.layout import Layout, difference, digest_of
from quafl.protocol.log import Entry, Idled, Joined, Missed, Returned, Took
from quafl.protocol.machine import ERROR, INFO, WARNING, Ask, Asked, Compute, Flow, Until, Write
from quafl.protocol.members import Limits, Member
from quafl.protocol.messages import (
    Accepted,
    Broken,
    Contact,
    Evaluated,
    Hello,
    Idle,
    Received,
    Refinement,
    Refused,
    Rejected,
    Repair,
    Reply,
    WantsAll,
    Welcome,
)
from quafl.protocol.repairs import MOST_REPAIRS, Wanted, replay
from quafl.protocol.speech import Spoken


class Contacts(Debts):
    """A machine that has them. What is taken is written down before."""

    def __init__(
        self,
        algorithm: Algorithm,
        coders: Coders,
        server: ServerState,
        layout: Layout,
        welcome: dict[str, Any],
        limits: Limits,
    ) -> None:
        super().__init__(algorithm, server, limits)
        self.finished = b""  # what is said to everybody when the run is over
        self.on_entry: Callable[[Entry], None] = lambda entry: None  # sees what is written down, or replayed
        self._coders, self._welcome = coders, welcome
        self._layout, self._layout_digest = layout, digest_of(layout)
        self._judge = Judge(algorithm, coders, limits.far)
        self._script: deque[Entry] = deque()  # of an earlier process, until it is used up
        self._unwritten = False  # the journal has a gap: what comes after it does not survive a crash

    # What clients say by themselves

    def _asked(self, event: Asked) -> None:
        self._spawn(self._hear(event))

    def _hear(self, event: Asked) -> Flow:
        name, ticket = event.name, b""
        if self._script:  # what an earlier process has heard comes first
            yield Until(lambda: not self._script)
        try:
            message = messages.from_bytes(event.octets)
            ticket = getattr(message, "ticket", b"")
            answer = yield from self._reaction(name, message, event.octets)
        except (WireError, DecodeError, Unreachable) as error:
            member = self.members.get(name)
            if member is None:
                self._say(WARNING, "%s, who is not a member: %s; its message is dropped", name, error)
            else:
                self._fault(member, str(error), ticket)
            answer = Refused(str(error).encode(errors="replace"))
        self._answer(event.call, messages.to_bytes(answer))

    def _reaction(self, name: str, message: messages.Message, octets: Octets) -> Flow:
        if isinstance(message, Hello):
            return (yield from self._greet(name, messages.from_text(message.body)))
        member = self.members.get(name)
        if member is None:
            raise WireError("said something before its Hello")
        match message:
            case Repair():
                return (yield from self._repair(member, message))
            case Reply() | Broken() | Idle() | WantsAll():
                yield from self._settle(member, message, octets)
                return Received()
        raise WireError(f"a {type(message).__name__} is nothing that a client says")

    def _greet(self, name: str, hello: dict[str, Any]) -> Flow:
        session, leaving = hello.get("session"), hello.get("leaving", False)
        if not (isinstance(session, str) and re.fullmatch(r"[0-9a-f]{1,32}", session) and isinstance(leaving, bool)):
            raise WireError("says hello without saying which process it is, or whether it leaves")
        if hello.get("layout") != self._layout_digest:
            reason = f"{difference(self._layout, name, hello.get('tensors'))}; use the same model at both ends"
            self._say(WARNING, "%s cannot take part: %s", name, reason)
            return Rejected(reason.encode())
        if self.finished:
            return messages.from_bytes(self.finished)
        new = self.members.get(name) is None
        member = self.members.admit(name)
        if member is None:
            return Rejected(f"there are {self._limits.clients} clients already, which is the limit".encode())
        if new:
            yield from self._write(Joined(name))
        if not self.members.may_greet(member, self.now):
            raise WireError("says hello too often")
        if not leaving and (member.unreached or self.members.is_silent(member, self.now)):
            self._say(INFO, "%s is there", name)
        if member.session not in ("", session):
            member.accepted, member.repairs = False, 0  # it has forgotten what it was doing: it is asked again
            yield from self._write(Returned(name))
        if hello.get("busy", member.owes.hex()) != member.owes.hex():
            member.accepted = False  # it has given up what it had begun: it is asked again
        member.session, member.heard, member.unreached = session, self.now, leaving
        if leaving:
            self._say(INFO, "%s has left", name)
            self._lose(member)
        else:
            self._ask_again(member)
        return Welcome(messages.as_text({**self._welcome, "hello_seconds": self.members.hello_seconds}))

    def _ask_again(self, member: Member) -> None:
        """One that owes an answer, and may not have heard the question, if it is there."""
        question = self._questions.get(member.owes)
        if question is None or member.accepted or not self.members.is_live(member, self.now):
            return
        if question.ticket in (member.asking, member.judging):  # it is being asked, or its answer is being read
            return
        if question.octets:
            self._spawn(self._exchange(member, question, question.octets))
        elif question.told is not None:
            self._spawn(self._whole(member, question))
        else:
            self._lose(member)

    def _repair(self, member: Member, message: Repair) -> Flow:
        question = self._questions.get(message.ticket)
        if member.owes != message.ticket and message.ticket in member.answered:
            return Refused(b"nobody waits for the answer to that any more")  # it is late, which is no fault
        if member.owes != message.ticket or question is None or question.told is None:
            raise WireError("asked for a repair of something that it was not sent")
        member.repairs += 1
        vectors = len(self._coders.down.vectors)
        if member.repairs > MOST_REPAIRS * vectors:
            raise WireError(f"asked for more than {MOST_REPAIRS * vectors} repairs of one message")
        request = wire.from_bytes(message.body)
        if request.kind != "request" or request.dim != len(self.server.model) or message.place >= vectors:
            raise WireError(f"asked for a repair of vector {message.place} with a {request.kind} about d={request.dim}")
        told, coder, place = question.told, self._coders.down, message.place
        refinement: Packet = yield Compute(lambda: coder.refine(told, place, request))
        self._count(member, up=len(message.body), down=refinement.nbytes, refined=request.sent == coder.bits)
        return Refinement(wire.to_bytes(refinement))

    # A contact

    def _exchange(self, member: Member, question: Question, octets: bytes) -> Flow:
        """Ask, and take what comes. Whatever goes wrong is the client's loss."""
        member.asking, question.asked_at = question.ticket, min(question.asked_at, self.now)
        try:
            try:
                back = yield Ask(member.name, octets, self._limits.contact_seconds)
            finally:
                if member.asking == question.ticket:
                    member.asking = b""
            match messages.from_bytes(back):
                case Reply() | Broken() | Idle() | WantsAll() as message if message.ticket == question.ticket:
                    yield from self._settle(member, message, back)
                case Accepted():
                    if member.owes == question.ticket:
                        member.accepted, member.seconds = True, self.now - question.asked_at
                case Refused() as refusal:
                    if member.owes != question.ticket:
                        self._say(INFO, "%s dropped a contact for a newer one", member.name)
                    else:
                        self._say(WARNING, "%s refused the contact: %s", member.name, messages.sentence(refusal))
                        self._strike(member, "refusals")
                        self._miss(member, question)
                case other:
                    raise WireError(f"answered a contact with a {type(other).__name__} that does not fit to it")
        except Unreachable as error:
            self._say(WARNING, "%s %s", member.name, str(error) or "did not answer in time")
            self._miss(member, question)
            self._count_fault(member)
        except (WireError, DecodeError) as error:
            self._fault(member, str(error), question.ticket)

    def _whole(self, member: Member, question: Question) -> Flow:
        """The contact in full precision, for a client that has no model, or one that is too far away."""
        told, coder = question.told, self._coders.down.in_full()
        if told is None:
            raise WireError("asks for the whole model, which it has been sent")
        if not question.whole:
            parcel = yield Compute(lambda: coder.pack(told, torch.Generator(), {}))
            asked = [other for other in self.members if other.owes == question.ticket]
            question.whole = self._contact(question, parcel, asked, whole=True)
            question.whole_nbytes = parcel.nbytes
            question.octets = question.octets or question.whole
        if member.owes == question.ticket:
            member.whole = True
            self._say(INFO, "%s gets the whole model", member.name)
            self._count(member, down=question.whole_nbytes)
            self._spawn(self._exchange(member, question, question.whole))

    def _settle(self, member: Member, message: Reply | Broken | Idle | WantsAll, octets: Octets) -> Flow:
        """An answer to a contact."""
        ticket = message.ticket
        question = self._questions.get(ticket)
        if question is None or member.owes != ticket:
            if ticket not in member.answered:
                raise WireError("answers something that it was not asked")
            if isinstance(message, Reply | Idle) and ticket not in member.done:  # late: it is not applied
                member.done.append(ticket)
                steps = message.steps if isinstance(message, Reply) else 0
                yield from self._write(Missed(member.name, ticket.hex(), steps))
            return  # or said again, because it has not heard that it was taken
        match message:
            case WantsAll():
                if member.repairs < 0:
                    raise WireError("asks for the whole model, which it has just been sent")
                member.repairs = -MOST_REPAIRS
                yield from self._whole(member, question)
            case Broken():
                self._hear_broken(member, question)
            case Idle() | Reply() if member.judging == ticket:
                yield Until(lambda: member.judging != ticket)  # said again while the first is being taken
            case Idle() | Reply():
                member.judging = ticket
                try:
                    if isinstance(message, Idle):
                        yield from self._hear_idle(member, question)
                    else:
                        yield from self._hear_reply(member, question, message, octets)
                finally:
                    if member.judging == ticket:
                        member.judging = b""

    def _hear_broken(self, member: Member, question: Question) -> None:
        """That it has come to what is no number."""
        self.totals.broken += 1
        self._lose(member)
        self._say(WARNING, "%s, round %d: its progress was not finite", member.name, question.round)
        if self.members.broke(member, self.now):
            self._left_out(member, "answers that were not finite; look at its data, or try a smaller lr")

    def _hear_idle(self, member: Member, question: Question) -> Flow:
        """That it has nothing to answer: written down, and only then taken."""
        if self._algorithm.records.idle:
            raise WireError("says that it has taken no step, and has to answer all the same")
        yield from self._write(Idled(member.name, question.ticket.hex(), member.whole))
        if member.owes == question.ticket:  # else nobody waits for it any more
            self.members.well_done(member, self.now - question.asked_at, steps=0)
            self._take_idle(member)

    def _hear_reply(self, member: Member, question: Question, message: Reply, octets: Octets) -> Flow:
        """A reply: judged, decoded, written down, and only then taken."""
        ticket = question.ticket
        try:
            opinion, repairs = yield from self._read(member, question, message)
            yield from self._write(Took.made(member.name, ticket, octets, repairs, whole=member.whole))
        except (WireError, DecodeError, Unreachable):
            if member.owes == ticket:  # else it may have let go of it
                raise
            return
        if member.owes == ticket:  # else nobody waits for it any more
            seconds = member.seconds if member.accepted else self.now - question.asked_at
            self._take(member, question, opinion, octets)
            self.members.well_done(member, seconds, message.steps)

    def _take(self, member: Member, question: Question, opinion: Opinion, octets: Octets) -> None:
        """It owes nothing any more."""
        self._judge.learn(member.name, opinion.away)
        member.done.append(question.ticket)
        self._count(member, up=opinion.octets)
        self._release(member)
        self._arrived.append(Arrival(member, question, opinion, messages.digest(octets)))

    def _read(self, member: Member, question: Question, message: Reply) -> Flow:
        """What a reply says. Bits that are missing are asked for; nothing else is kept of an attempt without them."""
        bits, known, spoken, usual = list[bytes](), list[Packet](), self._spoken(question), self._judge.usual()
        while True:
            try:
                read = lambda: self._judge.read(message, spoken, replay(known), usual)  # noqa: E731
                opinion = yield Compute(read)
            except Wanted as wanted:
                if len(known) >= MOST_REPAIRS * len(self._coders.up.vectors):
                    raise DecodeError(f"does not decode after {len(known)} repairs") from None
                bits.append((yield from self._refinement(member, question, wanted)))
                known.append(wire.from_bytes(bits[-1], self.server.model.device))
            else:
                return opinion, bits

    def _refinement(self, member: Member, question: Question, wanted: Wanted) -> Flow:
        request = wire.to_bytes(wanted.request)
        octets = messages.to_bytes(Repair(question.ticket, wanted.place, request))
        self._count(member, down=len(request))
        back = yield Ask(member.name, octets, self._limits.contact_seconds)
        match messages.from_bytes(back):
            case Refinement(bits):
                pass
            case other:
                raise DecodeError(f"was asked for a repair, sent a {type(other).__name__}")
        self._count(member, up=len(bits), refined=wanted.request.sent == self._coders.up.bits)
        return bytes(bits)

    def _spoken(self, question: Question) -> Spoken:
        """What the answers to a question are near to; where nobody needs that, something of the same shape."""
        if question.heard is not None and question.told is not None:
            return Spoken(question.ticket, question.heard, question.told)
        down, unknown = self._algorithm.records.down, torch.tensor(torch.nan)
        vectors = {one.name: getattr(self.server, one.name) for one in down.vectors()}
        told = down(statistics=self.server.buffers, **vectors, **{one.name: unknown for one in down.numbers()})
        return Spoken(question.ticket, told, told)

    def _tell_end(self, member: Member) -> Flow:
        try:
            yield Ask(member.name, self.finished, self._limits.contact_seconds)
        except Unreachable:
            self._say(INFO, "%s could not be told that the run is over", member.name)

    def _ask_to_judge(self, member: Member, judgement: Judgement) -> Flow:
        """How good a model is on a client's own data. Nobody's fault, if it says nothing."""
        try:
            judgement.nbytes += len(judgement.octets)
            back = yield Ask(member.name, judgement.octets, self._limits.judge_seconds)
            judgement.nbytes += len(back)
            match messages.from_bytes(back):
                case Evaluated(ticket, text) if ticket == judgement.ticket:
                    score = score_from(text)
                    if score is not None:
                        judgement.scores[member.name] = score
                case Refused() as refusal:
                    self._say(WARNING, "%s does not judge the model: %s", member.name, messages.sentence(refusal))
                case other:
                    raise WireError(f"was asked to judge a model, sent a {type(other).__name__}")
        except Unreachable as error:
            self._say(WARNING, "%s has not judged the model: %s", member.name, str(error) or "it took too long")
        except WireError as error:
            self._say(WARNING, "%s %s; that is left out", member.name, error)
        finally:
            judgement.waiting.discard(member.name)

    def _contact(self, question: Question, parcel: Parcel, asked: list[Member], *, whole: bool = False) -> bytes:
        """The octets of a contact."""
        receipts = messages.receipts_to_bytes({member.name: member.receipt for member in asked if member.receipt})
        head = Contact(question.ticket, question.round, whole, len(receipts), receipts)
        return messages.to_bytes(head, *messages.parcel_parts(parcel))

    # What must survive

    def _write(self, entry: Entry) -> Flow:
        """Before it is used. A full disk must not end the run: what comes then does not survive a crash."""
        if not self._unwritten:
            try:
                yield Write(log.to_bytes(entry))
            except OSError as error:
                if not self._unwritten:
                    what = "the journal cannot be written (%s): the run goes on, and what comes until the next "
                    self._say(ERROR, what + "checkpoint would be lost in a crash", error.strerror or str(error))
                self._unwritten = True
        self.on_entry(entry)

    def write_no_more(self) -> None:
        """Until the next checkpoint: the journal has nothing to follow."""
        self._unwritten = True

    def checkpointed(self) -> None:
        """What was not written down is in a checkpoint now."""
        self._unwritten = False
