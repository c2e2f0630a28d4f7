"""Who takes part: who is there, who is slow, who is left out for a while, and why. Nothing here knows of messages."""

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, isnan, nan
from statistics import median
from time import monotonic
from typing import Any

from quafl.deploy.line import Bucket
from quafl.deploy.messages import HELLO_SECONDS

_log = logging.getLogger(__name__)

RECENT = 8  # contacts
LONGEST_EXCLUSION = 3600.0  # seconds
MOST_EXCLUSIONS = 20  # after which they do not get longer
HELLOS = 2.0, 20.0  # a second, at once
GREETED = 250.0  # clients a second, at most
FORGIVEN = 0.25  # of a strike, by each good reply
REFORMED = 20  # good replies that take back an exclusion
KEPT = ("number", "dropped", "contacts", "steps", "speed", "exclusions")  # of a member, in a checkpoint


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server puts up with."""

    clients: int = 1000  # most that can ever take part
    start_with: int = 1  # clients that must be there before the first round
    silence: float = 10.0  # seconds without a sign of life, after which a client is taken for gone
    contact_seconds: float = 30.0  # that a client may take to answer a message
    slow: float = 10.0  # times the usual time, from which on an answer is too late, where clients answer at once,
    prompt: float = 0.25  # but never fewer seconds than that
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
    strikes: float = 0.0  # answers that were late, or none at all, and have not been made up for
    seconds: float = nan  # that its last answer took
    repairs: int = 0  # that it has asked for, of the contact that it owes
    judging: bytes = b""  # the contact to which its reply is being read
    dropped: int = 0  # replies
    contacts: int = 0
    steps: int = 0
    speed: float = nan  # H_i
    session: str = ""  # of its process
    answered: bytes = b""  # the contact that it answered last
    asked: deque[bytes] = field(default_factory=lambda: deque(maxlen=RECENT))  # contacts whose answers may come late
    hellos: Bucket = field(default_factory=lambda: Bucket(*HELLOS))


class Members:
    """All who have ever been there, by name. Whoever calls holds a lock."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._all: dict[str, Member] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Member]:
        """In the order of their coming."""
        return iter(self._all.values())

    def __getitem__(self, name: str) -> Member:
        return self._all[name]

    def get(self, name: str) -> Member | None:
        """None: it has not said hello yet."""
        return self._all.get(name)

    def admit(self, name: str) -> Member | None:
        """That one, or a new one, if there is room."""
        if name not in self._all and len(self._all) < self._limits.clients:
            self._all[name] = Member(name, number=len(self._all))
        return self._all.get(name)

    def state(self) -> dict[str, dict[str, Any]]:
        """For `restore`."""
        return {member.name: {key: getattr(member, key) for key in KEPT} for member in self}

    def restore(self, state: dict[str, dict[str, Any]]) -> None:
        """They are known again, and there as soon as they say hello."""
        self._all = {name: Member(name, **values) for name, values in state.items()}

    # Who is there

    def is_live(self, member: Member) -> bool:
        """Whether it can be contacted now."""
        return not (member.away or self.is_silent(member) or self.is_left_out(member))

    def is_silent(self, member: Member) -> bool:
        """No sign of life has come for too long."""
        return monotonic() - member.heard >= max(self._limits.silence, 3 * self.hello_seconds)

    def is_left_out(self, member: Member) -> bool:
        """For its faults."""
        return monotonic() < member.left_out_until

    @property
    def hello_seconds(self) -> float:
        """Between two signs of life: the more clients, the longer."""
        return max(HELLO_SECONDS, len(self) / GREETED)

    @property
    def prompt(self) -> float:
        """Seconds after which an answer is slow: `slow` times what is usual, one vote a client."""
        known = [member.seconds for member in self if not isnan(member.seconds)]
        return max(self._limits.prompt, self._limits.slow * median(known)) if known else inf

    # What they do

    def well_done(self, member: Member, seconds: float) -> None:
        """A good reply, after so many seconds."""
        member.faults, member.contacts, member.seconds = 0, member.contacts + 1, seconds
        member.strikes = max(0.0, member.strikes - FORGIVEN)
        if member.contacts % REFORMED == 0:
            member.exclusions = max(0, member.exclusions - 1)

    def strike(self, member: Member, what: str) -> None:
        """No fault, if it happens now and then."""
        member.strikes += 1
        if member.strikes >= self._limits.faults and self.is_live(member):
            self._leave_out(member, what)

    def fault(self, member: Member) -> None:
        """Too many in a row leave it out."""
        member.faults += 1
        if member.faults >= self._limits.faults:
            self._leave_out(member, "faults in a row")

    def _leave_out(self, member: Member, why: str) -> None:
        seconds = min(self._limits.exclusion * 2**member.exclusions, LONGEST_EXCLUSION)
        member.left_out_until = monotonic() + seconds
        member.faults, member.strikes, member.exclusions = 0, 0.0, min(member.exclusions + 1, MOST_EXCLUSIONS)
        _log.warning("%s is left out for %.0f s: %d %s", member.name, seconds, self._limits.faults, why)
