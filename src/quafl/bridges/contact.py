"""An algorithm's client where a framework wakes it, hands it a model, lets it train and takes its answer.

Such a client takes no steps between two contacts, and nobody interrupts it. So it always begins at the model that it is
sent, and answers when it has taken all its steps; one that an algorithm polls, too. What it remembers is handed over as
tensors, and kept by the framework.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from math import isnan
from typing import Any

import torch
from torch import Tensor

from quafl.codec import wire
from quafl.codec.coders import Coder, Parcel
from quafl.codec.seams import Codec, DecodeError, WireError
from quafl.core.client import begin, newcomers, speak
from quafl.core.messages import Heard, Message, Number
from quafl.core.pieces import is_finite, zeros
from quafl.core.seams import Algorithm, ClientState, Optimizer

_OWN = {one.name for one in fields(ClientState)}
_TRAINED_ELSEWHERE = Optimizer(init=lambda model: (), update=lambda gradient, state, model: (gradient, state))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client says, as octets: one message a vector, and the numbers."""

    octets: tuple[bytes, ...]
    numbers: tuple[float, ...]
    name: int  # of what it has heard

    def digest(self) -> str:
        """What a receipt names it by."""
        return blake2b(b"".join(self.octets), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Kept:
    """What a client remembers between two contacts."""

    steps: int = 0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # the algorithm's own
    last: Answer | None = None  # of which it does not know yet whether it was applied


def check_runs_here(algorithm: Algorithm) -> None:
    """Not all algorithms do where people take the local steps themselves."""
    if algorithm.direction is not None:
        raise ValueError(
            f"{type(algorithm).__name__} changes every local step, which a framework's users take themselves; choose "
            f"an algorithm that does not, or run it by `quafl server`"
        )


def up_coder(algorithm: Algorithm, codec: Codec) -> Coder:
    """Of the algorithm's answers."""
    return Coder(algorithm.records.up, codec, remembers=algorithm.applied is not None)


def arrive(algorithm: Algorithm, coder: Coder, kept: Kept, receipt: str, down: Any, before: Message | None) -> Any:
    """The client that has heard the server's message, with its steps before it. The receipt names the answer of its own
    that was applied last; `before` is the message that this one answered."""
    client = newcomers(algorithm, down.model, down.statistics, torch.ones(()))
    client = replace(client, steps=torch.tensor(kept.steps), left_out=coder.nothing_left_out(down.model))
    if kept.tensors:
        own = {name: value for name, value in kept.tensors.items() if not name.startswith("left_out.")}
        left = tuple(kept.tensors[f"left_out.{place}"] for place in range(len(client.left_out)))
        client = replace(client, **own, left_out=left)
    if kept.last is not None and (kept.last.name == 0 or before is not None):
        up = read(algorithm, coder, kept.last, down if before is None else before)
        if receipt != kept.last.digest():
            client = algorithm.lost(client, up)
        elif algorithm.applied is not None:
            client = algorithm.applied(client, up)
    client = algorithm.hear(client, down)
    return begin(client, down.model, down.statistics, algorithm.local_steps)


def depart(
    algorithm: Algorithm,
    coder: Coder,
    client: Any,
    down: Any,
    trained: tuple[Tensor, Tensor],
    steps: int,
    name: int,
    seed: int,
) -> tuple[Answer, Kept]:
    """The answer of a client that has come to this model, with these statistics, in so many steps."""
    model, statistics = trained
    count = torch.tensor(steps)
    there = replace(
        client, progress=client.base - model, buffers=statistics, taken=count, budget=count, steps=client.steps + count
    )
    said = speak(algorithm, _TRAINED_ELSEWHERE, type(there).stack([there]), down)
    if not said.answers.all():
        raise ValueError(
            "training has led to values that are NaN or infinite; is the learning rate too large?"
            if said.broken.any()
            else f"training took {steps} steps, and {type(algorithm).__name__} wants nothing of a client without one"
        )
    up, after = said.up[0], said.clients[0]
    away = {one: float(far[0]) for one, far in said.away.items()}
    rng = torch.Generator().manual_seed(seed)
    parcel, left = coder.pack_with(client.left_out, up, rng, away, heard=down, name=name)
    octets = tuple(wire.to_bytes(packet) for packet in parcel.packets)
    own = {one.name: getattr(after, one.name) for one in fields(after) if one.name not in _OWN}
    own |= {f"left_out.{place}": vector for place, vector in enumerate(left)}
    numbers = tuple(float(number) for number in parcel.numbers)
    answer = Answer(octets, numbers, name if coder.has_differences else 0)
    return answer, Kept(int(after.steps), own, answer)


def read(algorithm: Algorithm, coder: Coder, answer: Answer, told: Message) -> Any:
    """What a client has said to this message; or WireError, or DecodeError."""
    declared = algorithm.records.up.numbers()
    wanted, came = (len(coder.vectors), len(declared)), (len(answer.octets), len(answer.numbers))
    if came != wanted:
        raise WireError(f"the answer has {came} vectors and numbers, {type(algorithm).__name__} has {wanted}")
    for one, value in zip(declared, answer.numbers, strict=True):
        _check_number(algorithm, one, value)
    packets = tuple(map(wire.from_bytes, answer.octets))
    if len(packets[0].exact) != len(told.statistics):
        raise DecodeError(
            f"the answer has {len(packets[0].exact)} exact values, the model has {len(told.statistics)} statistics"
        )
    if any(packet.dtype != torch.float32 or packet.kind != "base" for packet in packets):
        raise WireError("the answer has a message that is no vector of float32")
    like = getattr(told, told.vectors()[0].name)
    keys = {
        one.name: getattr(told, one.near.name) if isinstance(one.near, Heard) else zeros(like) for one in coder.vectors
    }
    numbers = tuple(torch.tensor(value, dtype=torch.float64) for value in answer.numbers)
    up = coder.unpack(Parcel(packets, numbers), keys, name=answer.name)
    for vector in coder.vectors:
        if not is_finite(getattr(up, vector.name)):
            raise DecodeError(f"the {vector.name} has values that are NaN or infinite")
    return up


def _check_number(algorithm: Algorithm, one: Number, value: float) -> None:
    high = getattr(algorithm, one.high) if isinstance(one.high, str) else one.high
    if not (one.low <= value <= high or (one.private and isnan(value))):
        raise WireError(f"the answer's {one.name} is {value}, must be from {one.low} to {high}")
