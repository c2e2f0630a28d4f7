"""What happened in a federation, as far as its models depend on it: who was there, who was contacted with how many
steps, and what the algorithm was given. Small, and enough to compute the same models again (`sim.replay`)."""

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

from torch import Tensor

from quafl.protocol import messages
from quafl.protocol.log import Entry, Gave, Idled, Joined, Looked, Missed, Returned, Took


@dataclass(frozen=True, slots=True)
class Run:
    """Which run this is, and of which seed."""

    run: str
    seed: int


@dataclass(frozen=True, slots=True)
class Replied:
    """A client's reply has come, or that it has none: to which contact, in full precision or not, after how many
    steps."""

    name: str
    ticket: str
    whole: bool
    steps: int


@dataclass(frozen=True, slots=True)
class Reached:
    """The server's model after a round."""

    round: int
    model: str  # its digest


Line: TypeAlias = Run | Joined | Looked | Replied | Gave | Returned | Reached
_KINDS: dict[str, type[Any]] = {
    made.__name__.lower(): made for made in (Run, Joined, Looked, Replied, Gave, Returned, Reached)
}


def of_entry(entry: Entry) -> Line:
    """What is kept of an entry of the journal."""
    if isinstance(entry, Missed):
        return Replied(entry.name, entry.ticket, whole=False, steps=entry.steps)
    if isinstance(entry, Idled):
        return Replied(entry.name, entry.ticket, entry.whole, steps=0)
    if not isinstance(entry, Took):
        return entry
    reply = messages.from_bytes(entry.parts[0])
    assert isinstance(reply, messages.Reply)
    return Replied(entry.name, entry.ticket, entry.whole, reply.steps)


def digest(*tensors: Tensor) -> str:
    """Of a model and its buffers, bit for bit."""
    made = blake2b(digest_size=16)
    for tensor in tensors:
        made.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return made.hexdigest()


def to_text(line: Line) -> str:
    """A line of a file."""
    return json.dumps({type(line).__name__.lower(): asdict(line)}) + "\n"


def from_text(text: str) -> Line:
    """What `to_text` wrote, or ValueError."""
    try:
        ((kind, values),) = json.loads(text).items()
        line: Line = _KINDS[kind](**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a line of a history: {text[:100]!r}") from error
    return line
