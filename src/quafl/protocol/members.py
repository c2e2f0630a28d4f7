"""Who takes part: who is there, who is slow, who is left out for a while, and why."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, isnan, nan
from statistics import median
from typing import Any

from quafl.protocol.messages import HELLO_SECONDS

REMEMBERED = 8  # contacts
LONGEST_EXCLUSION = 3600.0  # seconds
MOST_EXCLUSIONS = 20  # after which they do not get longer
HELLOS, HELLOS_PER_SECOND = 20.0, 2.0  # at once, and in the long run
GREETED = 250.0  # clients a second, at most
FORGIVEN = 0.25  # of a strike, by each good reply
REFORMED = 20  # good replies that take back an exclusion
SURVIVING = (
    "number",
    "dropped",
    "contacts",
    "steps",
    "up",
    "down",
    "refined",
    "exclusions",
    "broken",
    "receipt",
    "session",
)  # of a member, in a checkpoint


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server puts up with."""

    clients: int = 1000  # most that can ever take part
    start_with: int = 1  # clients that must be there before the first round
    silence: float = 10.0  # seconds without a sign of life, after which a client is taken for gone
    contact_seconds: float = 30.0  # that a client may take to answer a message,
    judge_seconds: float = 60.0  # and to judge a model
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
    unreached: bool = False  # it could not be reached since then, or has said goodbye
    left_out_until: float = -inf
    exclusions: int = 0
    faults: int = 0  # in a row
    strikes: float = 0.0  # answers that were late, or none at all, and have not been made up for
    broken: int = 0  # answers that were not finite, since the last one that had a step in it and was
    seconds: float = nan  # that its last answer took
    hellos: float = HELLOS  # that it may still say at once
    hellos_at: float = -inf  # when that was so
    session: str = ""  # of its process
    # Of its contacts
    owes: bytes = b""  # the ticket of the one that it has not answered yet
    repairs: int = 0  # that it has asked for, of that one
    whole: bool = False  # it was sent that one in full precision
    accepted: bool = False  # it has begun, and answers that one when it is done
    asking: bytes = b""  # the ticket of the one that it is being asked at the moment
    judging: bytes = b""  # the ticket of the reply that is being read
    answered: deque[bytes] = field(
        default_factory=lambda: deque(maxlen=REMEMBERED)
    )  # tickets whose answers may come again
    done: deque[bytes] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # of those, the ones that have come
    receipt: bytes = b""  # of the answer that was applied last
    dropped: int = 0  # replies
    contacts: int = 0
    steps: int = 0
    up: int = 0  # octets of packets that it has sent,
    down: int = 0  # and was sent
    refined: int = 0  # messages to or from it that did not decode at first


class Members:
    """All who have ever been there, by name."""

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
        """For `restore`: plain values, as a checkpoint takes them."""
        return {
            member.name: {**{key: getattr(member, key) for key in SURVIVING}, "receipt": member.receipt.hex()}
            for member in self
        }

    def restore(self, state: dict[str, dict[str, Any]]) -> None:
        """They are known again, and there as soon as they say hello."""
        self._all = {
            name: Member(name, **{**values, "receipt": bytes.fromhex(values["receipt"])})
            for name, values in state.items()
        }

    # Who is there

    def live(self, now: float) -> list[Member]:
        """Those who can be contacted."""
        return [member for member in self if self.is_live(member, now)]

    def is_live(self, member: Member, now: float) -> bool:
        """Whether it can be contacted."""
        return not (member.unreached or self.is_silent(member, now) or self.is_left_out(member, now))

    def is_silent(self, member: Member, now: float) -> bool:
        """No sign of life has come for too long."""
        return now - member.heard >= self.silence

    def is_left_out(self, member: Member, now: float) -> bool:
        """For its faults."""
        return now < member.left_out_until

    @property
    def silence(self) -> float:
        """Seconds without a sign of life, after which a client is taken for gone."""
        return max(self._limits.silence, 3 * self.hello_seconds)

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

    def may_greet(self, member: Member, now: float) -> bool:
        """Whether it does not say hello too often."""
        since = max(0.0, now - member.hellos_at) if member.hellos_at > -inf else 0.0
        left = min(HELLOS, member.hellos + since * HELLOS_PER_SECOND)
        member.hellos, member.hellos_at = max(0.0, left - 1), now
        return left >= 1

    def well_done(self, member: Member, seconds: float, steps: int) -> None:
        """A good reply, after so many seconds and local steps. One without a step does not show that the client's
        steps are finite."""
        member.faults, member.contacts, member.seconds = 0, member.contacts + 1, seconds
        member.strikes = max(0.0, member.strikes - FORGIVEN)
        if steps:
            member.broken = 0
        if member.contacts % REFORMED == 0 and not member.broken:
            member.exclusions = max(0, member.exclusions - 1)

    def broke(self, member: Member, now: float) -> bool:
        """An answer that was not finite: a strike that only finite steps make up for. Who was left out for that, and
        has nothing better to say afterwards, is left out again at once; whether it is left out now."""
        member.strikes = max(member.strikes, member.broken)
        member.broken += 1
        return self.strike(member, now)

    def strike(self, member: Member, now: float) -> bool:
        """No fault, if it happens now and then; whether it is left out now."""
        member.strikes += 1
        if member.strikes >= self._limits.faults and self.is_live(member, now):
            self._leave_out(member, now)
            return True
        return False

    def fault(self, member: Member, now: float) -> bool:
        """Too many in a row leave it out; whether they do now."""
        member.faults += 1
        if member.faults >= self._limits.faults:
            self._leave_out(member, now)
            return True
        return False

    def _leave_out(self, member: Member, now: float) -> None:
        member.left_out_until = now + min(self._limits.exclusion * 2**member.exclusions, LONGEST_EXCLUSION)
        member.faults, member.strikes, member.exclusions = 0, 0.0, min(member.exclusions + 1, MOST_EXCLUSIONS)
