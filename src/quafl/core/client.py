"""A client's part in every algorithm: local steps, and the contact with the server. The same in both worlds."""

from collections.abc import Callable
from dataclasses import replace

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


def newcomers(count: int, model: Model, buffers: Buffers, *, budget: int, optimizer: Optimizer) -> ClientState:
    """`count` clients that have just received the initial model."""
    base = model.expand(count, -1).clone()
    zeros = torch.zeros(count, dtype=torch.int64)
    return ClientState(
        base=base,
        progress=torch.zeros_like(base),
        buffers=buffers.expand(count, -1).clone(),
        optimizer=optimizer.init(base),
        steps=zeros,
        taken=zeros.clone(),
        budget=torch.full_like(zeros, budget),
        contacts=zeros.clone(),
        expected_steps=torch.zeros(count),
    )


def local_step(client: ClientState, task: Task, batch: Batch, optimizer: Optimizer) -> ClientState:
    """One pass of LocalUpdates, lines 4-5: g̃_i at X^i − progress, added to the progress."""
    gradient, buffers = task.gradient(client.base - client.progress, client.buffers, batch)
    displacement, optimizer_state = optimizer.update(gradient, client.optimizer)
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
        client, base=base, buffers=buffers, progress=torch.zeros_like(base), taken=torch.zeros_like(client.taken)
    )


def contact(
    client: ClientState,
    packet: Packet,
    note: Note,
    refine: Refine,
    *,
    algorithm: Algorithm,
    codecs: Codecs,
    rng: torch.Generator,
    train: Callable[[ClientState], ClientState],
) -> tuple[Answer, Model, ClientState]:
    """InteractWithServer: the client's answer, the vector Y^i behind it, and the client afterwards.

    `train` takes the client's budget of local steps, for algorithms that answer when done. One that answers at once
    had its Y^i frozen when the contact arrived; decoding the server's message before encoding the answer therefore
    changes nothing, and tells how far Y^i is from the server's key.
    """
    heard = codecs.down.decode(packet, key=client.base, refine=refine)  # line 5
    noise = codecs.down.noise(packet)
    distance = denoised((heard - client.base).norm(dim=-1), noise)
    if algorithm.answers == "when done":
        client = train(algorithm.adopt(client, heard, packet.exact, note))
        noise = -noise  # Y^i then stands on what was heard: its error adds to the distance from X_t
    report = algorithm.report(client, note)
    gap = denoised((report - heard).norm(dim=-1), noise)
    encoded = codecs.up.encode(report, rng, distance=gap, exact=client.buffers)  # lines 2-3
    mean_steps = client.expected_steps + (client.taken - client.expected_steps) / (client.contacts + 1)
    speed = mean_steps.where(client.contacts + 1 >= SETTLED, torch.nan)
    rounds = torch.full_like(client.taken, note.round)
    answer = Answer(packet=encoded, round=rounds, steps=client.taken, distance=distance, speed=speed)
    if algorithm.answers == "at once":
        client = algorithm.adopt(client, heard, packet.exact, note)  # line 6
    return answer, report, replace(client, contacts=client.contacts + 1, expected_steps=mean_steps)


def denoised(distance: Tensor, noise: Tensor) -> Tensor:
    """A measured distance without the codec's own error: else the lattice side would feed on its own noise."""
    return (distance.square() - noise).clamp(min=0).sqrt()
