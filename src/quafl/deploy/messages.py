"""What a server and its clients say to each other: a few octets around the codec's packets (docs/wire.md).

Everything that arrives is read here, by fixed layouts: nothing is unpickled, nothing executed.
"""

import json
import struct
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any, TypeAlias

from quafl.core.seams import HEADER_BYTES, WireError
from quafl.deploy.carrier import Octets

MAGIC = b"QFED"
VERSION = 1
TICKET = 16  # octets
LONGEST_TEXT = 65536  # octets
HELLO_SECONDS = 2.0  # between two signs of life of a client, if there are few
NOT_TOLD = -1  # steps of a client that keeps its speed to itself

_HEADER = struct.Struct("<4sBBH")  # magic, version, kind, zero


@dataclass(frozen=True, slots=True)
class Contact:
    """The server's model, and what rides along with it: InteractWithServer. No two contacts of a run have the same
    serial number."""

    serial: int
    round: int
    sampled: int
    slowest: float
    packet: Octets


@dataclass(frozen=True, slots=True)
class Reply:
    """A client's answer to the contact that the ticket names."""

    ticket: bytes
    round: int
    steps: int
    distance: float
    speed: float
    packet: Octets


@dataclass(frozen=True, slots=True)
class Accepted:
    """The client has begun; its answer follows when it is done."""


@dataclass(frozen=True, slots=True)
class WantsAll:
    """The client has no model yet, or one that is too far away: it needs the server's in full precision."""

    ticket: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """The client's progress was not finite; it has dropped it and has nothing to answer."""

    ticket: bytes


@dataclass(frozen=True, slots=True)
class Repair:
    """A request for more bits of what was sent with, or as the answer to, the contact that the ticket names."""

    ticket: bytes
    packet: Octets


@dataclass(frozen=True, slots=True)
class Refinement:
    """Those bits."""

    packet: Octets


@dataclass(frozen=True, slots=True)
class Hello:
    """A client is there (or is leaving): said when it starts and every few seconds."""

    text: Octets


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a client needs to take part."""

    text: Octets


@dataclass(frozen=True, slots=True)
class Received:
    """An answer that came by itself has been taken, now or before."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a message was not taken, in a sentence."""

    text: Octets


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is over."""


Message: TypeAlias = (
    Contact
    | Reply
    | Accepted
    | WantsAll
    | Broken
    | Repair
    | Refinement
    | Hello
    | Welcome
    | Received
    | Refused
    | Finished
)
_LAYOUTS: dict[type[Message], struct.Struct] = {  # of the fields before the body; their order is the kind's number
    Contact: struct.Struct("<QQId"),
    Reply: struct.Struct(f"<{TICKET}sQqdd"),
    Accepted: struct.Struct(""),
    WantsAll: struct.Struct(f"<{TICKET}s"),
    Broken: struct.Struct(f"<{TICKET}s"),
    Repair: struct.Struct(f"<{TICKET}s"),
    Refinement: struct.Struct(""),
    Hello: struct.Struct(""),
    Welcome: struct.Struct(""),
    Received: struct.Struct(""),
    Refused: struct.Struct(""),
    Finished: struct.Struct(""),
}
_KINDS = tuple(_LAYOUTS)
_HEADS = _HEADER.size + _LAYOUTS[Contact].size + HEADER_BYTES  # of a contact and its packet
_BODIES = ("packet", "text")  # what may stand at the end, of any length


def to_bytes(message: Message, *more: Octets) -> bytes:
    """The octets of a message; `more` are pieces of its body that are not yet in one place."""
    made = type(message)
    values = [getattr(message, f.name) for f in fields(made)]
    body = values.pop() if _has_body(made) else b""
    head = _HEADER.pack(MAGIC, VERSION, _KINDS.index(made), 0), _LAYOUTS[made].pack(*values)
    return b"".join((*head, body, *more))


def from_bytes(octets: Octets) -> Message:
    """The message, or a WireError that says what is wrong with it."""
    if len(octets) < _HEADER.size:
        raise WireError(f"message has {len(octets)} octets, a header alone has {_HEADER.size}; was it cut off?")
    view = memoryview(octets)
    magic, version, kind, zero = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise WireError(f"message begins with {magic!r}, expected {MAGIC!r}; is the peer a QuAFL node?")
    if version != VERSION:
        raise WireError(f"message has version {version}, this end speaks {VERSION}; upgrade the older")
    if zero:
        raise WireError(f"message has {zero:#06x} where zeros belong")
    if kind >= len(_KINDS):
        raise WireError(f"message is of kind {kind}, known are 0 to {len(_KINDS) - 1}")
    made: Any = _KINDS[kind]
    layout, rest = _LAYOUTS[made], view[_HEADER.size :]
    if len(rest) < layout.size or (len(rest) > layout.size and not _has_body(made)):
        raise WireError(f"a {made.__name__} has {len(rest)} octets after its header, expected {layout.size}")
    body = (rest[layout.size :],) if _has_body(made) else ()
    message: Message = made(*layout.unpack_from(rest), *body)
    return message


def ticket_of(contact: Octets) -> bytes:
    """The name of a contact: a digest of its headers, which have its number, its round, and the packet's seed and
    checksum. The same question after a restart has the same name, another model or another time another."""
    return blake2b(memoryview(contact)[:_HEADS], digest_size=TICKET).digest()


def sentence(refused: Refused) -> str:
    """What a peer gives as its reason, fit for a log."""
    return repr(bytes(refused.text[:300]).decode(errors="replace"))


def as_text(values: dict[str, Any]) -> bytes:
    """For the body of a Hello or a Welcome."""
    return json.dumps(values).encode()


def from_text(text: Octets) -> dict[str, Any]:
    """What `as_text` wrote, or a WireError."""
    if len(text) > LONGEST_TEXT:
        raise WireError(f"message has a text of {len(text)} octets, must have at most {LONGEST_TEXT}")
    try:
        values = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise WireError(f"message has a text that is not JSON ({type(error).__name__})") from error
    if not isinstance(values, dict):
        raise WireError("message has a text that is not a table")
    return values


def _has_body(made: type[Message]) -> bool:
    names = [f.name for f in fields(made)]
    return bool(names) and names[-1] in _BODIES
