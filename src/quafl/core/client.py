"""A client's part in every algorithm: local steps, and the contact with the server. The same in both worlds."""

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quafl.core.rows import distance
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
        progress=_none(model),
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
        displacement = optimizer.factor(client.round).unsqueeze(-1).to(displacement.device) * displacement
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
        progress=_none(client.base),
        taken=torch.zeros_like(client.taken),
    )


def contact(
    clients: ClientState,
    heard: Model,
    packet: Packet,
    note: Note,
    *,
    algorithm: Algorithm,
    codecs: Codecs,
    optimizer: Optimizer,
    rng: torch.Generator,
    train: Callable[[ClientState], ClientState],
) -> Contact:
    """InteractWithServer, whole; `train` takes the clients' budgets of local steps, for algorithms that answer when
    done."""
    parts = interact(clients, heard, packet, note, algorithm=algorithm, codecs=codecs, optimizer=optimizer, rng=rng)
    try:
        parts.send(train(next(parts)))
    except StopIteration as ended:
        result: Contact = ended.value
        return result
    raise AssertionError("a contact has one time for local steps")


def interact(
    clients: ClientState,
    heard: Model,
    packet: Packet,
    note: Note,
    *,
    algorithm: Algorithm,
    codecs: Codecs,
    optimizer: Optimizer,
    rng: torch.Generator,
) -> Generator[ClientState, ClientState, Contact]:
    """InteractWithServer, for a row of clients each that have `heard` the server's model, decoded from the packet with
    their own as the key (line 5).

    Of an algorithm that answers when done, the clients are yielded once, and come back after their local steps. With
    one that answers at once, Y^i was frozen when the contact arrived; decoding the server's message before encoding the
    answer therefore changes nothing, and tells how far Y^i is from the server's key.

    A client whose progress is not finite does not answer: it drops what it has done and goes on from its base.
    """

    def adopted(clients: ClientState) -> ClientState:
        after = algorithm.adopt(clients, heard, packet.exact, note)
        after = replace(after, round=torch.full_like(after.round, note.round))
        return replace(after, optimizer=optimizer.init(after.base)) if optimizer.fresh else after

    noise = codecs.down.noise(packet)
    away_before = denoised(distance(heard, clients.base), noise)
    if algorithm.answers == "when done":
        clients = yield adopted(clients)
        noise = -noise  # Y^i then stands on what was heard: its error adds to the distance from X_t
    report = algorithm.report(clients, note)
    away = distance(report, heard)
    sound = (away.isfinite() & clients.buffers.isfinite().all(dim=-1)).cpu()
    gap = denoised(away, noise)
    mean_steps = clients.expected_steps + (clients.taken - clients.expected_steps) / (clients.contacts + 1)
    speed = mean_steps.where(clients.contacts + 1 >= SETTLED, torch.nan)
    all_sound = bool(sound.all())

    def answering(rows: Tensor) -> Tensor:
        return rows if all_sound else rows[sound]

    sent, steps = answering(report), answering(clients.taken)
    answer = Answer(
        packet=codecs.up.encode(sent, rng, distance=answering(gap), exact=answering(clients.buffers)),  # lines 2-3
        round=torch.full_like(steps, note.round),
        steps=steps,
        distance=answering(away_before),
        speed=answering(speed),
    )
    restarted = None
    if not all_sound:
        restarted = replace(
            rebase(clients, clients.base, packet.exact),
            optimizer=optimizer.init(clients.base),
            contacts=clients.contacts,
            expected_steps=clients.expected_steps,
        )
    if algorithm.answers == "at once":
        clients = replace(clients, base=report, progress=_none(report))  # where they stand with what they have sent
        clients = adopted(clients)  # line 6
    after = replace(clients, contacts=clients.contacts + 1, expected_steps=mean_steps)
    if restarted is not None:
        after = after.where(sound, restarted)
    return Contact(sound, answer, sent, after)


def _none(model: Model) -> Model:
    """No progress; takes no memory."""
    return model.new_zeros(()).expand_as(model)


def denoised(distance: Tensor, noise: Tensor) -> Tensor:
    """A measured distance without the codec's own error: else the lattice side would feed on its own noise."""
    return (distance.square() - noise).clamp(min=0).sqrt()
