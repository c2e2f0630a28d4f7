"""An algorithm's messages as packets, and back: each declared vector by the codec that suits what it is near to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quafl.codec.identity import Identity
from quafl.codec.seams import Codec, Codecs, Packet, Refine
from quafl.core.messages import Heard, Message, Vector
from quafl.core.seams import Algorithm
from quafl.core.structs import Struct

# Which of a message's vectors, its row, and the receiver's request for more bits -> the sender's refinement.
RefineVector: TypeAlias = Callable[[int, int, Packet], Packet]
Distance: TypeAlias = Tensor | float


@dataclass(frozen=True, slots=True)
class Parcel(Struct):
    """A message as it travels: a packet for each vector, the first with the statistics, and the numbers."""

    packets: tuple[Packet, ...]
    numbers: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Octets of the packets, of all rows together."""
        return sum(packet.nbytes for packet in self.packets)


class Coder:
    """One direction of an algorithm's messages.

    A vector near something that the receiver alone knows is decoded with that as the key; one near what both ends know,
    with that, or as a difference from it; a displacement with zero. What a codec without keys needs of this is nothing.
    """

    def __init__(self, message: type[Message], codec: Codec, *, everything: bool = False) -> None:
        self.message = message
        self.vectors = message.vectors()
        self._codecs = [codec if one.compressed or everything else Identity() for one in self.vectors]

    @property
    def bits(self) -> int:
        """Of all vectors together, per coordinate."""
        return sum(codec.bits for codec in self._codecs)

    @property
    def by_vector(self) -> tuple[int, ...]:
        """Bits of each vector, per coordinate."""
        return tuple(codec.bits for codec in self._codecs)

    @property
    def needs_keys(self) -> bool:
        """Whether some vector needs something near it."""
        return any(codec.keyed or codec.difference for codec in self._codecs)

    @property
    def has_differences(self) -> bool:
        """Whether some vector is coded as a difference from what the sender of the answer has heard."""
        return any(self._is_difference(*pair) for pair in zip(self.vectors, self._codecs, strict=True))

    @staticmethod
    def _is_difference(vector: Vector, codec: Codec) -> bool:
        return codec.difference and isinstance(vector.near, Heard)

    def in_full(self) -> "Coder":
        """The same messages in full precision: for a receiver that has nothing near them."""
        return Coder(self.message, Identity(), everything=True)

    def pack(
        self,
        message: Message,
        rng: torch.Generator,
        distances: Mapping[str, Distance],
        heard: Message | None = None,
    ) -> Parcel:
        """A fresh message. `distances` are the sender's estimates of how far each vector is from the receiver's key;
        `heard` is the message that it answers."""
        packets = []
        for place, (vector, codec) in enumerate(zip(self.vectors, self._codecs, strict=True)):
            x = getattr(message, vector.name)
            if self._is_difference(vector, codec):
                x = x - getattr(heard, vector.near.name)  # type: ignore[union-attr]  # it is Heard
            exact = message.statistics if place == 0 else None
            packets.append(codec.encode(x, rng, distance=distances.get(vector.name, 0.0), exact=exact))
        return Parcel(tuple(packets), tuple(getattr(message, one.name) for one in message.numbers()))

    def unpack(self, parcel: Parcel, keys: Mapping[str, Tensor], refine: RefineVector | None = None) -> Message:
        """The message, with keys by the names of its vectors; or DecodeError."""
        decoded = {}
        for place, (vector, codec) in enumerate(zip(self.vectors, self._codecs, strict=True)):
            packet, key = parcel.packets[place], keys[vector.name]
            x = codec.decode(packet, key=key, refine=None if refine is None else _of(refine, place))
            decoded[vector.name] = x + key if self._is_difference(vector, codec) else x
        numbers = {one.name: value for one, value in zip(self.message.numbers(), parcel.numbers, strict=True)}
        return self.message(statistics=parcel.packets[0].exact, **decoded, **numbers)

    def refine(self, message: Message, place: int, request: Packet) -> Packet:
        """What the receiver of the message asks for, of its vector of that place."""
        return self._codecs[place].refine(getattr(message, self.vectors[place].name), request)

    def noise(self, parcel: Parcel) -> dict[str, Tensor]:
        """E‖Q(x) − x‖² of each vector."""
        parts = zip(self.vectors, self._codecs, parcel.packets, strict=True)
        return {vector.name: codec.noise(packet) for vector, codec, packet in parts}


def _of(refine: RefineVector, place: int) -> Refine:
    return lambda row, request: refine(place, row, request)


class Coders(NamedTuple):
    """One a direction."""

    up: Coder
    down: Coder


def coders_for(algorithm: Algorithm, codec: Codec | Codecs) -> Coders:
    """For a codec, wherever the algorithm compresses; or for one a direction, which then compresses everything."""
    if isinstance(codec, Codecs):
        return Coders(
            Coder(algorithm.records.up, codec.up, everything=True),
            Coder(algorithm.records.down, codec.down, everything=True),
        )
    return Coders(Coder(algorithm.records.up, codec), Coder(algorithm.records.down, codec))
