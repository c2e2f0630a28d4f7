"""What a party writes down between two checkpoints, so that a restart goes on as if nothing had happened.

At the server, a round is a function of what its algorithm was told: who was there and when, and which replies it was
given. These, and the replies themselves, are written down before they are used. A restart runs the algorithm again from
the checkpoint, tells it the same, and so asks the same questions again, with the same tickets.

A client writes down which steps are in a reply before it leaves, so that none is reported twice; and the reply itself,
if its algorithm remembers what was applied.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from quafl.codec.seams import WireError
from quafl.protocol.carrier import Octets

_HEAD = struct.Struct("<BI")  # kind, octets of the text; what follows is the message


@dataclass(frozen=True, slots=True)
class Joined:
    """A client is known from now on, by the next number."""

    name: str


@dataclass(frozen=True, slots=True)
class Returned:
    """A client has come back as another process: nobody here knows what it has kept."""

    name: str


@dataclass(frozen=True, slots=True)
class Looked:
    """What the algorithm was told when it looked."""

    present: list[int]
    size: int
    now: float


@dataclass(frozen=True, slots=True)
class Took:
    """A reply was accepted, to a contact in full precision or not; its octets are followed by those of its repairs, of
    these lengths."""

    name: str
    ticket: str
    whole: bool
    repairs: list[int]
    octets: Octets

    @classmethod
    def made(cls, name: str, ticket: bytes, reply: Octets, repairs: Sequence[Octets], *, whole: bool) -> "Took":
        """Of a reply, and the bits that had to be asked for."""
        return cls(name, ticket.hex(), whole, [len(bits) for bits in repairs], b"".join((reply, *repairs)))

    @property
    def parts(self) -> tuple[memoryview, list[memoryview]]:
        """The reply, and its repairs."""
        return _parts(self.octets, self.repairs)


@dataclass(frozen=True, slots=True)
class Idled:
    """A client has heard a contact, in full precision or not, and had nothing to answer."""

    name: str
    ticket: str
    whole: bool


@dataclass(frozen=True, slots=True)
class Missed:
    """A reply came when nobody waited for it any more: it is not applied."""

    name: str
    ticket: str
    steps: int


@dataclass(frozen=True, slots=True)
class Gave:
    """The algorithm was given these replies, by client and ticket, and told that these clients have failed."""

    replies: list[list[str]]
    failed: list[int]


@dataclass(frozen=True, slots=True)
class Reported:
    """A client is about to reply: of this run, steps up to this number are then reported. It knows what has become of
    its last reply before. The reply's octets, and those of what it takes to decode it with nothing near it, are here if
    the client remembers what is applied; `fresh`: it remembers nothing from before."""

    run: str
    steps: int
    ticket: str
    fresh: bool
    before: Literal["applied", "lost"]  # or nobody knows, which is as good as lost
    repairs: list[int]
    octets: Octets

    @property
    def parts(self) -> tuple[memoryview, list[memoryview]]:
        """The reply, and its repairs."""
        return _parts(self.octets, self.repairs)


Entry: TypeAlias = Joined | Returned | Looked | Took | Idled | Missed | Gave  # of a server
_KINDS: tuple[type[Any], ...] = (Joined, Returned, Looked, Took, Idled, Missed, Gave, Reported)


def _parts(octets: Octets, repairs: Sequence[int]) -> tuple[memoryview, list[memoryview]]:
    """Octets that end with pieces of these lengths."""
    view = memoryview(octets)
    ends = list(accumulate((len(view) - sum(repairs), *repairs)))
    pieces = [view[start:stop] for start, stop in zip((0, *ends), ends, strict=False)]
    return pieces[0], pieces[1:]


def to_bytes(entry: Entry | Reported) -> bytes:
    """As octets."""
    values = {f.name: getattr(entry, f.name) for f in fields(entry) if f.name != "octets"}
    text = json.dumps(values).encode()
    return b"".join((_HEAD.pack(_KINDS.index(type(entry)), len(text)), text, getattr(entry, "octets", b"")))


def from_bytes(octets: Octets) -> Any:
    """The entry that `to_bytes` wrote, or WireError."""
    try:
        kind, length = _HEAD.unpack_from(octets)
        view = memoryview(octets)[_HEAD.size :]
        values = json.loads(bytes(view[:length]))
        more = {"octets": view[length:]} if _KINDS[kind] in (Took, Reported) else {}
        entry = _KINDS[kind](**values, **more)
    except (struct.error, ValueError, TypeError, IndexError) as error:
        raise WireError(f"a record of the journal cannot be read ({type(error).__name__})") from error
    return entry
