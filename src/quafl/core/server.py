"""The server's part that algorithms share."""

from collections.abc import Generator, Mapping
from dataclasses import replace
from math import inf
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from quafl.core.checks import check_positive, check_whole
from quafl.core.conversation import Await, Clients, Look, Replies, Tell, Want
from quafl.core.messages import Message, Own
from quafl.core.pieces import distance, lengthened
from quafl.core.questions import number
from quafl.core.randomness import Generators
from quafl.core.seams import Ids, ServerState

Server = TypeVar("Server", bound=ServerState)

MANY = 100_000  # clients, of whom a sample is drawn without a permutation of all


def check_settings(sampled: int, local_steps: int, patience: float) -> None:
    """What all algorithms have."""
    for name, value in ("sampled", sampled), ("local_steps", local_steps):
        check_whole(name, value, 1)
    if not isinstance(patience, Real) or not patience > 0:
        raise ValueError(f"patience is {patience!r}, must be a positive number, or math.inf to wait for everybody")


def check_server_lr(server_lr: float) -> None:
    """What algorithms have whose server moves at a rate of its own."""
    check_positive("server_lr", server_lr)


def sample(present: Ids, count: int, rng: torch.Generator) -> Ids:
    """`count` clients uniformly at random, or all of them when there are no more."""
    if len(present) <= MANY or count > len(present) // 2:
        return present[torch.randperm(len(present), generator=rng)[:count]]
    places: dict[int, None] = {}  # in the order in which they are first drawn
    while len(places) < count:
        places |= dict.fromkeys(torch.randint(len(present), (count,), generator=rng).tolist())
    return present[torch.tensor(list(places)[:count])]


def exchange(
    server: ServerState, down: Message, clients: Clients, sampled: int, patience: float, rng: Generators
) -> Generator[Want, Any, Replies]:
    """One exchange with a sample of the clients (Algorithm 1, server, lines 2-6)."""
    chosen = sample(clients.present, sampled, rng["sampling"])  # line 2
    yield Tell(chosen, down, server)  # lines 3-4
    replies: Replies = yield Await(len(chosen), within=patience, since=server.round)  # lines 5-6
    return replies


class Turn(NamedTuple):
    """What comes of `next_arrival`."""

    clients: Clients
    replies: Replies  # one, or none
    asked: Tensor  # when each client was asked what it has not answered yet; −∞: it was not


def next_arrival(server: Any, down: Message, asked: Tensor, patience: float) -> Generator[Want, Any, Turn]:
    """The next answer where all clients train all the time: whoever has nothing to do is sent the message, and starts
    anew. So is, after `patience`, one that is silent."""
    clients: Clients = yield Look()
    asked = lengthened(asked, clients.size, -inf)
    before, mine = clients.now - patience, asked[clients.present]
    idle = clients.present[mine <= before if before > -inf else mine == -inf]
    if len(idle):
        yield Tell(idle, down, server)
        asked = asked.index_fill(0, idle, clients.now)
    replies: Replies = yield Await(1, within=patience, since=0)
    asked = asked.index_fill(0, replies.failed, -inf).index_fill(0, replies.senders, -inf)
    if not len(replies.senders) and patience == inf:  # nobody will answer what they were sent
        asked = torch.full_like(asked, -inf)
    return Turn(clients, replies, asked)


def proceed(server: Server, distances: Mapping[str, Tensor], **changes: Any) -> Server:
    """The next round's state, with the changes, of a server to which clients have told these distances.

    ‖X_{t+1} − X^i‖ to be expected at the next contact: what the clients measured, and the way that the server has gone
    since, at right angles. It is what the next downlink's lattice side is made from.
    """
    after = replace(server, round=server.round + 1, **changes)
    expected = {
        name: number((told.square().mean() + distance(getattr(after, name), getattr(server, name)).square()).sqrt())
        for name, told in distances.items()
        if len(told)
    }
    return replace(after, expected={**server.expected, **expected})


def mean_or(mine: Tensor, theirs: Tensor, weights: Tensor | None = None) -> Tensor:
    """The mean of what came, Σ n_k x_k / Σ n_k with weights n_k; mine if nothing did."""
    if not len(theirs):
        return mine
    if weights is None:
        return theirs.mean(dim=0)
    shares = (weights / weights.sum()).to(theirs)
    return (shares.unsqueeze(-1) * theirs).sum(dim=0)


def keyed(down: type[Message]) -> tuple[str, ...]:
    """Vectors of a message that are near something that the receiver alone has."""
    return tuple(one.name for one in down.vectors() if isinstance(one.near, Own))
