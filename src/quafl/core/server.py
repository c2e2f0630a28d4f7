"""The server's part that algorithms share: one exchange with a sample of the clients, and rounds that wait for it."""

from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from quafl.core.defence import Defence, Heard
from quafl.core.randomness import Generators
from quafl.core.rows import distance
from quafl.core.seams import Answer, Codecs, Fleet, Ids, Model, Note, Replies, ServerState


class Exchange(NamedTuple):
    """What came back, within the bounds of the defence."""

    replies: Replies
    heard: Heard  # of the replies; the vectors are Q(Y^i)
    votes: Mapping[str, Tensor]  # of the defence, for the next state


def check_settings(sampled: int, local_steps: int, patience: float) -> None:
    """What all algorithms have."""
    for name, value in ("sampled", sampled), ("local_steps", local_steps):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value}, must be a whole number, at least 1")
    if not patience > 0:
        raise ValueError(f"patience is {patience}, must be positive")


def sample(available: Ids, count: int, rng: torch.Generator) -> Ids:
    """`count` clients uniformly at random, or all of them when there are no more."""
    return available[torch.randperm(len(available), generator=rng)[:count]]


def tell(state: ServerState, to: Ids, fleet: Fleet, codecs: Codecs, rng: Generators, note: Note) -> None:
    """Enc(X_t) to those clients."""
    packet = codecs.down.encode(state.model, rng["dither"], distance=state.distance, exact=state.buffers)
    fleet.send(to, packet, note, lambda row, request: codecs.down.refine(state.model, request))


def exchange(
    state: ServerState,
    fleet: Fleet,
    codecs: Codecs,
    rng: Generators,
    note: Note,
    patience: float,
    defence: Defence,
    unit: Callable[[Answer], Tensor | float] = lambda answer: 1.0,
) -> Exchange:
    """One contact with `note.sampled` clients (Algorithm 1, server, lines 2-6). `unit` is what the algorithm divides a
    client's displacement by."""
    available = fleet.available()
    chosen = sample(available, note.sampled, rng["sampling"])  # line 2
    tell(state, chosen, fleet, codecs, rng, note)  # lines 3-4
    replies = fleet.receive(len(chosen), within=patience, since=note.round)  # line 5
    decoded = codecs.up.decode(replies.answer.packet, key=state.model, refine=replies.refine)  # line 6
    heard = Heard(replies.senders, decoded, replies.answer.packet.exact, replies.answer.distance)
    return Exchange(replies, *defence.hold(state, heard, state.model, there=len(available), unit=unit(replies.answer)))


def expected_distance(state: ServerState, heard: Heard, model: Model) -> float:
    """‖X_{t+1} − X^i‖ to be expected at the next contact: what this round's clients measured, and the way that the
    server has gone since, at right angles. It is what the next downlink's lattice side is made from."""
    if len(heard.senders) == 0:
        return state.distance
    measured = heard.distances.square().mean()
    return float((measured + distance(model, state.model).square()).sqrt())


def synchronous(
    state: ServerState,
    fleet: Fleet,
    codecs: Codecs,
    rng: Generators,
    merge: Callable[[Model, Exchange], Model],
    *,
    sampled: int,
    patience: float,
    defence: Defence,
    unit: Callable[[Answer], Tensor | float] = lambda answer: 1.0,
) -> Iterator[ServerState]:
    """Rounds that wait for their clients: one exchange, then `merge` makes w_{t+1} of w_t and what came back; w_t stays
    if nobody answered. Buffers are averaged."""
    while True:
        note = Note(round=state.round, sampled=sampled, slowest=inf)
        back = exchange(state, fleet, codecs, rng, note, patience, defence, unit)
        model = merge(state.model, back) if len(back.heard.senders) else state.model
        state = ServerState(
            model=model,
            buffers=mean_or(state.buffers, back.heard.statistics),
            round=state.round + 1,
            distance=expected_distance(state, back.heard, model),
            extra=back.votes,
        )
        yield state


def mean_or(mine: Tensor, theirs: Tensor) -> Tensor:
    """The mean of what came; mine if nothing did."""
    return theirs.mean(dim=0) if len(theirs) else mine
