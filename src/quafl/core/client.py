"""A client's part in every algorithm: local steps, and the contact with the server. The same in both worlds."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quafl.core.seams import (
    Algorithm,
    Answer,
    Batch,
    Buffers,
    ClientState,
    Codecs,
    Model,
    Note,
    Optimizer,
    Packet,
    Refine,
    Task,
)

SETTLED = 5  # contacts after which a client's mean number of steps is taken for its speed


class Contact(NamedTuple):
    """What comes of a contact: the answers, the vectors Y^i behind them, and the clients afterwards."""

    sound: Tensor  # which clients have answered; the progress of the others was not finite
    answer: Answer  # a row for each of those
    report: Model  # likewise
    clients: ClientState  # all of them


def newcomer(model: Model, buffers: Buffers, optimizer: Optimizer) -> ClientState:
    """A client that has just received the initial model; the world says what its budget is."""
    zero = torch.zeros((), dtype=torch.int64)
    return ClientState(
        base=model,
        progress=torch.zeros_like(model),
        buffers=buffers,
        optimizer=optimizer.init(model),
        steps=zero,
        taken=zero,
        budget=zero,
        round=zero,
        contacts=zero,
        expected_steps=torch.zeros(()),
    )


def local_step(client: ClientState, task: Task, batch: Batch, optimizer: Optimizer) -> ClientState:
    """One pass of LocalUpdates, lines 4-5: g̃_i at X^i − progress, added to the progress."""
    gradient, buffers = task.gradient(client.base - client.progress, client.buffers, batch)
    displacement, optimizer_state = optimizer.update(gradient, client.optimizer)
    if optimizer.factor is not None:
        displacement = optimizer.factor(client.round).unsqueeze(-1) * displacement
    return replace(
        client,
        progress=client.progress + displacement,
        buffers=buffers,
        optimizer=optimizer_state,
        steps=client.steps + 1,
        taken=client.taken + 1,
    )


def rebase(client: ClientState, base: Model, buffers: Buffers) -> ClientState:
    """The client at a new base; local steps begin anew (LocalUpdates, line 2)."""
    return replace(
        client,
        base=base.expand_as(client.base),
        buffers=buffers.expand_as(client.buffers),
        progress=torch.zeros_like(client.base),
        taken=torch.zeros_like(client.taken),
    )


def contact(
    clients: ClientState,
    packet: Packet,
    note: Note,
    refine: Refine,
    *,
    algorithm: Algorithm,
    codecs: Codecs,
    optimizer: Optimizer,
    rng: torch.Generator,
    train: Callable[[ClientState], ClientState],
) -> Contact:
    """InteractWithServer, for a row of clients each.

    `train` takes the clients' budgets of local steps, for algorithms that answer when done. One that answers at once
    had its Y^i frozen when the contact arrived; decoding the server's message before encoding the answer therefore
    changes nothing, and tells how far Y^i is from the server's key.

    A client whose progress is not finite does not answer: it drops what it has done and goes on from its base.
    """

    def adopted(clients: ClientState) -> ClientState:
        after = algorithm.adopt(clients, heard, packet.exact, note)
        after = replace(after, round=torch.full_like(after.round, note.round))
        return replace(after, optimizer=optimizer.init(after.base)) if optimizer.fresh else after

    heard = codecs.down.decode(packet, key=clients.base, refine=refine)  # line 5
    noise = codecs.down.noise(packet)
    distance = denoised((heard - clients.base).norm(dim=-1), noise)
    if algorithm.answers == "when done":
        clients = train(adopted(clients))
        noise = -noise  # Y^i then stands on what was heard: its error adds to the distance from X_t
    report = algorithm.report(clients, note)
    away = (report - heard).norm(dim=-1)
    sound = away.isfinite() & clients.buffers.isfinite().all(dim=-1)
    gap = denoised(away, noise)
    mean_steps = clients.expected_steps + (clients.taken - clients.expected_steps) / (clients.contacts + 1)
    speed = mean_steps.where(clients.contacts + 1 >= SETTLED, torch.nan)
    answering = slice(None) if sound.all() else sound
    report = report[answering]
    answer = Answer(
        packet=codecs.up.encode(report, rng, distance=gap[answering], exact=clients.buffers[answering]),  # lines 2-3
        round=torch.full_like(clients.taken[answering], note.round),
        steps=clients.taken[answering],
        distance=distance[answering],
        speed=speed[answering],
    )
    after = adopted(clients) if algorithm.answers == "at once" else clients  # line 6
    after = replace(after, contacts=clients.contacts + 1, expected_steps=mean_steps)
    if not sound.all():
        restarted = rebase(clients, clients.base, packet.exact)
        after = after.where(sound, replace(restarted, optimizer=optimizer.init(clients.base)))
    return Contact(sound, answer, report, after)


def denoised(distance: Tensor, noise: Tensor) -> Tensor:
    """A measured distance without the codec's own error: else the lattice side would feed on its own noise."""
    return (distance.square() - noise).clamp(min=0).sqrt()
