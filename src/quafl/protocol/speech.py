"""A contact at the client's end: packets in, packets out, and the distances that the codecs live on."""

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quafl.codec.coders import Beside, Coder, Coders, Parcel, RefineVector
from quafl.codec.seams import Packet
from quafl.core.client import Said
from quafl.core.messages import Heard, Message, Own, Vector
from quafl.core.pieces import distance, placed, zeros


class Hearing(NamedTuple):
    """What clients have heard, a row each."""

    down: Any  # a Message
    measured: Mapping[str, Tensor]  # how far its vectors were from the clients' own, the codec's noise taken off
    noise: Mapping[str, Tensor]  # E‖Q(x) − x‖² of its vectors


def decode_down(coder: Coder, parcel: Parcel, clients: Any, refine: RefineVector | Beside | None) -> Hearing:
    """The server's message, decoded with what each client alone has (client, line 5)."""
    keys = {one.name: _own(one, clients) for one in coder.vectors}
    down, noise = coder.unpack(parcel, keys, refine), coder.noise(parcel)
    if coder.measures:
        return measured(down, noise, clients)
    nothing = clients.base.new_zeros(len(clients.base))
    return Hearing(down, {one.name: nothing for one in down.vectors() if isinstance(one.near, Own)}, noise)


def measured(down: Message, noise: Mapping[str, Tensor], clients: Any) -> Hearing:
    """A message, and how far it is from what these clients have."""
    far = {
        one.name: denoised(distance(getattr(down, one.name), _own(one, clients)), noise[one.name])
        for one in down.vectors()
        if isinstance(one.near, Own)
    }
    return Hearing(down, far, noise)


def model_of(down: Message) -> Tensor:
    """The one vector of a message that is near a client's base: the server's model."""
    (name,) = (one.name for one in down.vectors() if one.near == Own("base"))
    model: Tensor = getattr(down, name)
    return model


class Spoken(NamedTuple):
    """What the server has said with a ticket, as its answers may know it."""

    ticket: bytes
    heard: Message  # as it was decoded
    told: Message  # in full precision, as those know it who have asked for that

    def meant(self, parcel: Parcel) -> tuple[int, Message]:
        """The one that an answer is a difference from, by its name, and that name."""
        whole = name_of(self.ticket, whole=True)
        if any(packet.near == whole for packet in parcel.packets):
            return whole, self.told
        return name_of(self.ticket, whole=False), self.heard


def name_of(ticket: bytes, *, whole: bool) -> int:
    """What both ends call a message, as packets carry it. Its ticket is made of a digest of its octets."""
    return int.from_bytes(blake2b(ticket + bytes([whole]), digest_size=8).digest(), "little") >> 1 or 1


def encode_up(
    coders: Coders, said: Said, hearing: Hearing, *, at_once: bool, rng: torch.Generator, name: int = 0
) -> tuple[Parcel, Any]:
    """The answers (client, line 3), and the clients afterwards, with what they have left out. `said` has a row for each
    client that answers, and so must the hearing. `name` is what both ends call the message that they answer.

    How far a vector is from the server's key, the client knows up to the noise of what it has heard. A vector that was
    there before the message came has nothing of that noise; one that stands on the message has it in addition.
    """

    def gap(one: Vector) -> Tensor:
        away = said.away[one.name]
        if not isinstance(one.near, Heard):
            return away
        noise = hearing.noise[one.near.name]
        return denoised(away, noise if at_once else -noise)

    gaps = {one.name: gap(one) for one in coders.up.vectors}
    before, rows = said.clients.left_out, said.answers.nonzero().squeeze(-1)
    mine = tuple(vectors[placed(rows, vectors.device)] for vectors in before)
    parcel, left = coders.up.pack_with(mine, said.up, rng, gaps, heard=hearing.down, name=name)
    after = tuple(old.index_copy(0, placed(rows, old.device), new) for old, new in zip(before, left, strict=True))
    return parcel, replace(said.clients, left_out=after)


def keys_up(coder: Coder, told: Message) -> dict[str, Tensor]:
    """The keys of answers to a message: what both ends know of it."""
    like = getattr(told, told.vectors()[0].name)
    return {
        one.name: getattr(told, one.near.name) if isinstance(one.near, Heard) else zeros(like) for one in coder.vectors
    }


def understood(coder: Coder, up: Message, parcel: Parcel) -> tuple[Message, list[Packet]]:
    """A client's own answers with the displacements as the server will decode them, and the refinements that this
    takes."""
    refinements: list[Packet] = []

    def refine(place: int, row: int, request: Packet) -> Packet:
        refinements.append(coder.refine(up[row], place, request))
        return refinements[-1]

    return replace(up, **coder.displacements(parcel, refine)), refinements


def as_heard(coders: Coders, told: Message, parcel: Parcel) -> Message:
    """A message as its receivers know it, where answers are coded as differences from that; else as it was told."""
    if not coders.up.has_differences:
        return told
    keys = {one.name: getattr(told, one.name) for one in coders.down.vectors}
    return coders.down.unpack(parcel, keys)


def only(hearing: Hearing, rows: Tensor) -> Hearing:
    """Of some of the clients."""
    vectors = {one.name: getattr(hearing.down, one.name)[rows] for one in hearing.down.vectors()}
    measured = {name: values[rows] for name, values in hearing.measured.items()}
    return Hearing(replace(hearing.down, **vectors), measured, hearing.noise)


def denoised(distance: Tensor, noise: Tensor) -> Tensor:
    """A measured distance without the codec's own error: else the lattice side would feed on its own noise."""
    return (distance.square() - noise).clamp(min=0).sqrt()


def _own(vector: Vector, clients: Any) -> Tensor:
    return getattr(clients, vector.near.name) if isinstance(vector.near, Own) else zeros(clients.base)
