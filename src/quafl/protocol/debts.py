"""Who owes the server what: questions, the clients that have not answered them yet, and answers that wait."""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from quafl.core.messages import Message
from quafl.core.seams import Algorithm, ServerState, Totals
from quafl.protocol.judge import Opinion
from quafl.protocol.machine import WARNING, Machine
from quafl.protocol.members import Limits, Member, Members


@dataclass(slots=True)
class Question:
    """One message of the algorithm to some clients."""

    ticket: bytes
    serial: int
    round: int
    told: Message | None  # what was said: the key of the answers, and what repairs are made of; None: nobody needs it
    heard: Message | None  # the same as its receivers know it
    octets: bytes = b""  # of the contact; empty after a restart, until somebody has to be asked again
    whole: bytes = b""  # the same in full precision, once somebody has needed it,
    whole_nbytes: int = 0  # and the octets of its packets
    asked_at: float = inf


class Arrival(NamedTuple):
    """A reply that was taken, and waits for the algorithm."""

    member: Member
    question: Question
    opinion: Opinion
    receipt: bytes


class Debts(Machine):
    """A machine that keeps them. A client owes one answer at a time; what nobody owes is forgotten."""

    def __init__(self, algorithm: Algorithm, server: ServerState, limits: Limits) -> None:
        super().__init__()
        self.server = server
        self.totals = Totals()
        self.members = Members(limits)
        self._algorithm, self._limits = algorithm, limits
        self._questions: dict[bytes, Question] = {}  # by ticket; those that somebody owes
        self._arrived: list[Arrival] = []
        self._failed: list[int] = []  # clients whose answers will not come

    def _count(self, member: Member, *, up: int = 0, down: int = 0, refined: bool = False) -> None:
        """What was sent, and refined, between a client and the server."""
        both: tuple[Totals | Member, ...] = self.totals, member
        for counted in both:
            counted.up += up
            counted.down += down
            counted.refined += refined

    def _owe(self, member: Member, question: Question) -> None:
        member.owes, member.repairs, member.accepted, member.whole = question.ticket, 0, False, False
        member.answered.append(question.ticket)
        self._questions[question.ticket] = question

    def _release(self, member: Member) -> None:
        """It owes nothing; what nobody owes is forgotten."""
        member.owes, member.accepted = b"", False
        owed = {other.owes for other in self.members}
        self._questions = {ticket: question for ticket, question in self._questions.items() if ticket in owed}

    def _lose(self, member: Member) -> None:
        """What it owes, if anything, will not come, or is not wanted any more."""
        if member.owes:
            self._release(member)
            self.totals.lost += 1
            self._failed.append(member.number)

    def _take_idle(self, member: Member) -> None:
        """It was contacted, and has nothing to answer."""
        self._release(member)
        self.totals.contacts += 1
        self.totals.idle += 1
        self._failed.append(member.number)

    def _give_up(self, member: Member) -> None:
        """What it owes, if anything, is not waited for any more. Who was sent the whole model may take its time."""
        if member.owes:
            self._lose(member)
            if not member.whole:
                self._strike(member, "late answers")

    def _drop(self, arrivals: list[Arrival]) -> None:
        """Replies that came too late for the algorithm: they are not applied."""
        self.totals.lost += len(arrivals)
        self._arrived = [arrival for arrival in self._arrived if arrival not in arrivals]

    def _drop_late(self, since: int) -> None:
        self._drop([arrival for arrival in self._arrived if arrival.question.round < since])
        for member in self.members:
            if member.owes and self._questions[member.owes].round < since:
                self._give_up(member)

    def _miss(self, member: Member, question: Question) -> None:
        """It does not answer; it is not asked again before it says hello, unless it has come back meanwhile."""
        member.unreached = member.heard <= question.asked_at
        if member.owes == question.ticket:
            self._lose(member)

    def _fault(self, member: Member, reason: str, ticket: bytes) -> None:
        self._say(WARNING, "%s: %s; its message is dropped", member.name, reason)
        member.dropped += 1
        if ticket and member.owes == ticket:
            self._lose(member)
        member.accepted = False  # it may have been its reply, which nobody could read: it is asked again
        self._count_fault(member)

    def _count_fault(self, member: Member) -> None:
        if self.members.fault(member, self.now):
            self._left_out(member, "faults in a row")

    def _strike(self, member: Member, what: str) -> None:
        if self.members.strike(member, self.now):
            self._left_out(member, what)

    def _left_out(self, member: Member, why: str) -> None:
        seconds = member.left_out_until - self.now
        self._say(WARNING, "%s is left out for %.0f s: %d %s", member.name, seconds, self._limits.faults, why)
