"""A client's part in every algorithm: local steps, and what surrounds a contact. For one client, or a stack of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from quafl.core.messages import Buffers, Heard, Message, Model
from quafl.core.pieces import distance, length, placed, zeros
from quafl.core.questions import is_right
from quafl.core.seams import Algorithm, Batch, ClientState, Counts, Direction, Ids, Optimizer, Task, examples_of

Client = TypeVar("Client", bound=ClientState)


def newcomers(algorithm: Algorithm, model: Model, buffers: Buffers, speed: Tensor) -> Any:
    """A client for each relative speed "...", that has just received this model. They share it; they have no optimizer
    yet."""
    zero = torch.zeros(speed.shape, dtype=torch.int64)
    base = model.expand(*speed.shape, *model.shape)
    plain = ClientState(
        base=base,
        progress=zeros(base),
        buffers=buffers.expand(*speed.shape, *buffers.shape),
        optimizer=(),
        steps=zero,
        taken=zero,
        budget=zero,
        round=zero - 1,
    )
    return algorithm.newcomer(plain, speed)


def local_step(
    client: Client, task: Task, batch: Batch, optimizer: Optimizer, direction: Direction | None = None
) -> Client:
    """One pass of LocalUpdates, lines 4-5: g̃_i at X^i − progress, added to the progress."""
    model = client.base - client.progress
    gradient, buffers = task.gradient(model, client.buffers, batch)
    if direction is not None:
        gradient = direction(client, gradient)
    displacement, optimizer_state = optimizer.update(gradient, client.optimizer, model)
    if optimizer.rate != 1:
        displacement = optimizer.rate * displacement
    if optimizer.factor is not None:
        displacement = placed(optimizer.factor(client.round).unsqueeze(-1), displacement.device) * displacement
    return replace(
        client,
        progress=client.progress + displacement,
        buffers=buffers,
        optimizer=optimizer_state,
        steps=client.steps + 1,
        taken=client.taken + 1,
    )


# What algorithms call


def begin(client: Client, base: Model, buffers: Buffers, steps: Counts | int, **own: Any) -> Client:
    """The client at a new base, with so many local steps before it; they begin anew (LocalUpdates, line 2)."""
    return replace(
        client,
        base=base.expand_as(client.base),
        buffers=buffers.expand_as(client.buffers),
        progress=zeros(client.base),
        taken=torch.zeros_like(client.taken),
        budget=torch.zeros_like(client.taken) + steps,
        **own,
    )


def proximal(strength: float) -> Direction | None:
    """∇ of f + ρ/2 ‖x − X^i‖²: the gradient, and ρ times how far the client has come from its base."""
    return (lambda client, gradient: gradient - strength * client.progress) if strength else None


def stopped(client: Client) -> Client:
    """The client as it is: it takes no more steps before it answers."""
    return replace(client, budget=client.taken)


# What those who run algorithms call


def counted(clients: Any, task: Task, ids: Ids) -> Any:
    """The clients with the numbers of their `examples`, where the algorithm has them know these."""
    if not hasattr(clients, "examples"):
        return clients
    found = torch.tensor([examples_of(task, client) for client in ids.tolist()])
    return replace(clients, examples=found.to(clients.examples))


class Said(NamedTuple):
    """What comes of a contact."""

    answers: Tensor  # which clients answer
    broken: Tensor  # which do not because their progress is not finite; the others have nothing to say
    up: Any  # a Message, with a row for each of those
    steps: Counts  # behind it, likewise
    away: Mapping[str, Tensor]  # of its vectors: how far from what they are near to, as the client knows it
    clients: Any  # all of them, afterwards


def listen(algorithm: Algorithm, optimizer: Optimizer, clients: Any, down: Message, round: int) -> Any:
    """The clients that have heard the server's message of a round, with the steps that they take before they answer."""
    clients = algorithm.hear(clients, down)
    clients = replace(clients, round=torch.full_like(clients.round, round))
    return replace(clients, optimizer=optimizer.init(clients.base)) if optimizer.fresh else clients


def speak(algorithm: Algorithm, optimizer: Optimizer, clients: Any, down: Message) -> Said:
    """The answers of clients that have taken their steps. One whose progress is not finite does not answer: it drops
    what it has done, and goes on from its base. Nor does one that has taken no step, if that is nothing to speak of."""
    up, after = algorithm.answer(clients, down)
    away = {one.name: _away(getattr(up, one.name), one.near, down) for one in up.vectors()}
    ends = up.statistics.aminmax(dim=-1) if up.statistics.shape[-1] else ()
    numbers = torch.stack((*ends, *away.values()))
    if is_right(numbers, lambda found: bool(torch.tensor(found).isfinite().all())):
        sound = torch.ones(numbers.shape[1:], dtype=torch.bool)
    else:
        sound = numbers.cpu().isfinite().all(dim=0)
    answers = sound if algorithm.records.idle else sound & (clients.taken > 0)
    if not sound.all():
        restarted = begin(clients, clients.base, down.statistics, after.budget)
        after = after.where(sound, replace(restarted, optimizer=optimizer.init(restarted.base)))
    if answers.all():
        return Said(answers, ~sound, up, clients.taken, away, after)
    away = {name: reach[answers] for name, reach in away.items()}
    return Said(answers, ~sound, up[answers], clients.taken[answers], away, after)


def _away(vector: Model, near: Any, down: Message) -> Tensor:
    if isinstance(near, Heard):
        return distance(vector, getattr(down, near.name))
    return length(vector)
