"""What a server and its clients say to each other: a few octets around an algorithm's messages (docs/wire.md).

Everything that arrives is read here, by fixed layouts: nothing is unpickled, nothing executed.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quafl.codec import wire
from quafl.codec.coders import Parcel
from quafl.codec.seams import WireError
from quafl.protocol.carrier import Octets

MAGIC = b"QFED"
VERSION = 5
TICKET = 16  # octets
LONGEST_TEXT = 65536  # octets
MARGIN = 1_000_000  # octets of a message beside its vectors
MOST_VECTORS = 4  # of a message
HELLO_SECONDS = 2.0  # between two signs of life of a client, if there are few
NOT_TOLD = -1  # steps of a client that keeps its speed to itself

_HEADER = struct.Struct("<4sBBH")  # magic, version, kind, zero


@dataclass(frozen=True, slots=True)
class Contact:
    """What the algorithm says to a client: the start of a contact, which the ticket names. `whole`: in full precision.
    The body begins with so many octets of receipts: what was applied of what the clients have answered before."""

    ticket: bytes
    round: int
    whole: bool
    receipts: int
    body: Octets


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client says to the contact that the ticket names, after so many local steps."""

    ticket: bytes
    steps: int
    body: Octets


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
class Idle:
    """The client has heard the contact, and has nothing to answer: it has not taken a step."""

    ticket: bytes


@dataclass(frozen=True, slots=True)
class Repair:
    """A request for more bits of a vector that was sent with, or as the answer to, the contact that the ticket names;
    its place among the message's vectors."""

    ticket: bytes
    place: int
    body: Octets


@dataclass(frozen=True, slots=True)
class Refinement:
    """Those bits."""

    body: Octets


@dataclass(frozen=True, slots=True)
class Hello:
    """A client is there (or is leaving): said when it starts and every few seconds."""

    body: Octets


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a client needs to take part."""

    body: Octets


@dataclass(frozen=True, slots=True)
class Received:
    """An answer that came by itself has been taken, now or before."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a message was not taken, in a sentence; another one may be."""

    body: Octets


@dataclass(frozen=True, slots=True)
class Rejected:
    """Why this client cannot take part, in a sentence."""

    body: Octets


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is over; its body is the final model, or nothing."""

    body: Octets


@dataclass(frozen=True, slots=True)
class Evaluate:
    """How good is the model in the body on the client's own data, as it is and after so many local steps of its own?"""

    ticket: bytes
    steps: int
    body: Octets


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Measures of that model by their names; none, if the client has nothing to judge by."""

    ticket: bytes
    body: Octets


Message: TypeAlias = (
    Contact
    | Reply
    | Accepted
    | WantsAll
    | Broken
    | Idle
    | Repair
    | Refinement
    | Hello
    | Welcome
    | Received
    | Refused
    | Rejected
    | Finished
    | Evaluate
    | Evaluated
)
_LAYOUTS: dict[type[Message], struct.Struct] = {  # of the fields before the body; their order is the kind's number
    Contact: struct.Struct(f"<{TICKET}sQ?I"),
    Reply: struct.Struct(f"<{TICKET}sq"),
    Accepted: struct.Struct(""),
    WantsAll: struct.Struct(f"<{TICKET}s"),
    Broken: struct.Struct(f"<{TICKET}s"),
    Idle: struct.Struct(f"<{TICKET}s"),
    Repair: struct.Struct(f"<{TICKET}sB"),
    Refinement: struct.Struct(""),
    Hello: struct.Struct(""),
    Welcome: struct.Struct(""),
    Received: struct.Struct(""),
    Refused: struct.Struct(""),
    Rejected: struct.Struct(""),
    Finished: struct.Struct(""),
    Evaluate: struct.Struct(f"<{TICKET}sI"),
    Evaluated: struct.Struct(f"<{TICKET}s"),
}
_KINDS = tuple(_LAYOUTS)
_WITH_BODY = frozenset(made for made in _KINDS if any(f.name == "body" for f in fields(made)))
_COUNTS, _LENGTH, _RECEIPT = struct.Struct("<HH"), struct.Struct("<Q"), struct.Struct(f"<8s{TICKET}s")


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


# Bodies


def parcel_parts(parcel: Parcel, more: Sequence[float] = ()) -> list[Octets]:
    """A single message of an algorithm as octets, in pieces; the long ones are not copied. `more` are numbers of the
    protocol's own."""
    numbers = [*(float(number) for number in parcel.numbers), *more]
    parts: list[Octets] = [_COUNTS.pack(len(parcel.packets), len(numbers)), struct.pack(f"<{len(numbers)}d", *numbers)]
    for packet in parcel.packets:
        pieces = wire.to_parts(packet)
        parts += [_LENGTH.pack(sum(memoryview(piece).nbytes for piece in pieces)), *pieces]
    return parts


def parcel_from(
    body: Octets, vectors: int, numbers: int, more: int = 0, device: torch.device | str = "cpu"
) -> tuple[Parcel, list[float]]:
    """What `parcel_parts` wrote, of so many vectors and numbers, with the vectors on the device; or a WireError."""
    view = memoryview(body)
    try:
        counts = _COUNTS.unpack_from(view)
        if counts != (vectors, numbers + more):
            raise WireError(
                f"message has {counts[0]} vectors and {counts[1]} numbers, expected {(vectors, numbers + more)}"
            )
        told = struct.unpack_from(f"<{counts[1]}d", view, _COUNTS.size)
        place, packets = _COUNTS.size + 8 * counts[1], []
        for _ in range(vectors):
            (length,) = _LENGTH.unpack_from(view, place)
            place += _LENGTH.size
            packets.append(wire.from_bytes(view[place : place + length], device))
            place += length
    except struct.error:
        raise WireError(f"message has a body of {len(view)} octets, which is too short") from None
    if place != len(view):
        raise WireError(f"message has a body of {len(view)} octets, expected {place}")
    values = tuple(torch.tensor(value, dtype=torch.float64) for value in told[:numbers])
    return Parcel(tuple(packets), values), list(told[numbers:])


def model_to_bytes(model: Tensor, buffers: Tensor) -> bytes:
    """A model and its buffers in full precision, little-endian."""
    both = torch.cat((model.detach().cpu(), buffers.detach().cpu())).to(torch.float32)
    return both.numpy().astype("<f4").tobytes()


def model_from(body: Octets, parameters: int, buffers: int) -> tuple[Tensor, Tensor]:
    """What `model_to_bytes` wrote, of so many numbers; or a WireError."""
    if len(body) != 4 * (parameters + buffers):
        raise WireError(f"a model has {len(body)} octets, expected {4 * (parameters + buffers)}")
    both = torch.frombuffer(bytearray(body), dtype=torch.float32)
    if not both.isfinite().all():
        raise WireError("a model has numbers that are not finite")
    return both[:parameters], both[parameters:]


def receipts_to_bytes(receipts: Mapping[str, bytes]) -> bytes:
    """What was applied last of each client's answers, by its name."""
    return b"".join(_RECEIPT.pack(_name(name), receipt) for name, receipt in receipts.items())


def receipt_for(name: str, receipts: Octets) -> bytes:
    """Of the answers of the client of this name, which was applied last; empty: none was."""
    mine = _name(name)
    if len(receipts) % _RECEIPT.size:
        raise WireError(f"message has {len(receipts)} octets of receipts, must be a multiple of {_RECEIPT.size}")
    return next((receipt for owner, receipt in _RECEIPT.iter_unpack(receipts) if owner == mine), b"")


def digest(*parts: Octets) -> bytes:
    """A name for octets."""
    made = blake2b(digest_size=TICKET)
    for part in parts:
        made.update(part)
    return made.digest()


def _name(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=8).digest()


# Texts


def largest_message(parameters: int, buffers: int, vectors: int = MOST_VECTORS) -> int:
    """Octets: so many vectors in full precision are the largest thing that anybody sends."""
    return 4 * (vectors * parameters + buffers) + MARGIN


def sentence(refused: Refused | Rejected) -> str:
    """What a peer gives as its reason, fit for a log."""
    return repr(bytes(refused.body[:300]).decode(errors="replace"))


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
    return made in _WITH_BODY
