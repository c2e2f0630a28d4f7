"""How an algorithm's server side talks to whoever runs it: it yields what it wants, and is sent what came.

A round is a generator without input, output or a clock. The simulator, a real server and a rehearsal all run the same
one, and each carries out the wants in its own way.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from quafl.core.messages import Message
from quafl.core.seams import Counts, Ids, ServerState

Server = TypeVar("Server", bound=ServerState)


class Sleep(NamedTuple):
    """Let time pass; nothing is sent back."""

    seconds: float


class Look(NamedTuple):
    """Who is there? `Clients` are sent back; a real server first waits until somebody is."""


class Tell(NamedTuple):
    """Send the message to these clients; nothing is sent back. A client that has not answered an earlier message yet is
    not waited for any more: it begins anew with this one."""

    to: Ids
    down: Message
    server: ServerState  # the state that the message was made of


class Await(NamedTuple):
    """The earliest answers, 0 to `most` of them, waiting at most `within`: `Replies` are sent back. Answers to rounds
    before `since` come too late, and are dropped."""

    most: int
    within: float
    since: int


Want: TypeAlias = Sleep | Look | Tell | Await
Round: TypeAlias = Generator[Want, Any, Server]  # ends with the state after it


class Clients(NamedTuple):
    """The answer to `Look`."""

    present: Ids  # can be contacted now
    size: int  # n: of all there are, whose numbers are below it
    now: float  # seconds since some beginning


@dataclass(frozen=True, slots=True)
class Replies:
    """The answer to `Await`: what some clients say, a row each, decoded."""

    senders: Ids
    up: Any  # a Message
    round: Counts  # of the message that each answers
    steps: Counts  # local steps behind it
    distances: Mapping[str, Tensor]  # of each vector that was near the client's own: how far, as the client measured it
    failed: Ids  # clients that have turned out to have nothing to answer
