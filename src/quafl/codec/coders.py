"""An algorithm's messages as packets, and back: each declared vector by the codec that suits what it is near to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quafl.codec.identity import Identity
from quafl.codec.seams import Codec, Codecs, DecodeError, Packet, Refine, Sender
from quafl.core.messages import Heard, Message, Own, Vector
from quafl.core.seams import Algorithm
from quafl.core.structs import Struct

# Which of a message's vectors, its row, and the receiver's request for more bits -> the sender's refinement.
RefineVector: TypeAlias = Callable[[int, int, Packet], Packet]
# Which of a message's vectors, its row, octets asked and answered, and the bits sent before: a repair that was made.
Repaired: TypeAlias = Callable[[int, int, int, int, int], None]
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


class Beside(NamedTuple):
    """Instead of a RefineVector, where the sender is in the same process: what it has told, in full precision."""

    told: Message
    repaired: Repaired


class Coder:
    """One direction of an algorithm's messages.

    A vector near something that the receiver alone knows is decoded with that as the key; one near what both ends know,
    with that, or as a difference from it; a displacement with zero. What a codec without keys needs of this is nothing.

    With feedback, what a message leaves out of a vector is given back to its sender. Displacements that the sender's
    algorithm `remembers` as they arrived need none: what is left out of them is in the next one by itself.

    Receivers measure how far its messages are from what they have, if the next ones are to be coded by that.
    """

    def __init__(
        self, message: type[Message], codec: Codec, *, remembers: bool = False, measures: bool | None = None
    ) -> None:
        self.message = message
        self.vectors = message.vectors()
        self.measures = codec.keyed if measures is None else measures
        self._codec = codec
        given_back = [one for one in self.vectors if codec.feedback and not (remembers and one.near is None)]
        self._given_back = {one.name: place for place, one in enumerate(given_back)}
        if not codec.whole and any(isinstance(one.near, Own) for one in self.vectors):
            raise ValueError(
                f"codec is {codec}, which codes differences from what both ends have; of what the server sends, they "
                f"have none: use it on the way up alone, as in Codecs(up={type(codec).__name__}(), down=Lattice())"
            )

    @property
    def bits(self) -> int:
        """Of each vector, per coordinate."""
        return self._codec.bits

    @property
    def total_bits(self) -> int:
        """Of all vectors together, per coordinate."""
        return len(self.vectors) * self.bits

    @property
    def needs_keys(self) -> bool:
        """Whether some vector needs something near it."""
        return self._codec.keyed or self._codec.difference

    @property
    def has_differences(self) -> bool:
        """Whether some vector is coded as a difference from what the sender of the answer has heard."""
        return any(map(self._is_difference, self.vectors))

    def nothing_left_out(self, like: Tensor) -> tuple[Tensor, ...]:
        """What a client that has sent nothing yet has left out: zeros for each vector that is given back."""
        return tuple(torch.zeros_like(like) for _ in self._given_back)

    def _is_difference(self, vector: Vector) -> bool:
        return self._codec.difference and isinstance(vector.near, Heard)

    def in_full(self) -> "Coder":
        """The same messages in full precision: for a receiver that has nothing near them."""
        return Coder(self.message, Identity(), measures=self.measures)

    def pack(
        self,
        message: Message,
        rng: torch.Generator,
        distances: Mapping[str, Distance],
        heard: Message | None = None,
        name: int = 0,
    ) -> Parcel:
        """A fresh message. `distances` are the sender's estimates of how far each vector is from the receiver's key;
        `heard` is the message that it answers, `name` what both ends call it."""
        return self.pack_with((), message, rng, distances, heard, name)[0]

    def pack_with(
        self,
        left_out: tuple[Tensor, ...],
        message: Message,
        rng: torch.Generator,
        distances: Mapping[str, Distance],
        heard: Message | None = None,
        name: int = 0,
    ) -> tuple[Parcel, tuple[Tensor, ...]]:
        """The same with what earlier messages have left out, or with nothing; and what this one leaves out."""
        packets, left = [], []
        for place, vector in enumerate(self.vectors):
            x = getattr(message, vector.name)
            if self._is_difference(vector):
                x = x - getattr(heard, vector.near.name)  # type: ignore[union-attr]  # it is Heard
            given_back = self._given_back.get(vector.name) if left_out else None
            if given_back is not None:
                x = x + left_out[given_back]
            exact = message.statistics if place == 0 else None
            packet = self._codec.encode(x, rng, distance=distances.get(vector.name, 0.0), exact=exact)
            packets.append(replace(packet, near=self._near(vector, name)))
            if given_back is not None:
                left.append(x - self._codec.decode(packet, key=x))
        numbers = tuple(getattr(message, one.name) for one in message.numbers())
        return Parcel(tuple(packets), numbers), tuple(left)

    def _near(self, vector: Vector, name: int) -> int:
        return name if self._is_difference(vector) else 0

    def unpack(
        self, parcel: Parcel, keys: Mapping[str, Tensor], refine: "RefineVector | Beside | None" = None, name: int = 0
    ) -> Message:
        """The message, with keys by the names of its vectors; or DecodeError, also if it is a difference from something
        else than what has this name."""
        decoded = {}
        for place, vector in enumerate(self.vectors):
            key, near = keys[vector.name], parcel.packets[place].near
            if near != self._near(vector, name):
                raise DecodeError(f"the {vector.name} is a difference from {near:x}, expected {name:x}")
            x = self._codec.decode(parcel.packets[place], key=key, refine=self._refine(refine, place))
            decoded[vector.name] = x + key if self._is_difference(vector) else x
        numbers = {one.name: value for one, value in zip(self.message.numbers(), parcel.numbers, strict=True)}
        return self.message(statistics=parcel.packets[0].exact, **decoded, **numbers)

    def displacements(self, parcel: Parcel, refine: RefineVector) -> dict[str, Tensor]:
        """The vectors of a message that are near nothing: whoever has the message can decode them."""
        return {
            vector.name: self._codec.decode(
                packet, key=packet.side.new_zeros(packet.dim), refine=self._refine(refine, place)
            )
            for place, (vector, packet) in enumerate(zip(self.vectors, parcel.packets, strict=True))
            if vector.near is None
        }

    def refine(self, message: Message, place: int, request: Packet) -> Packet:
        """What the receiver of the message asks for, of its vector of that place."""
        return self._codec.refine(getattr(message, self.vectors[place].name), request)

    def _refine(self, refine: "RefineVector | Beside | None", place: int) -> Refine | None:
        if isinstance(refine, Beside):
            x = getattr(refine.told, self.vectors[place].name)
            return Sender(x, self._codec, partial(refine.repaired, place))
        return None if refine is None else partial(refine, place)

    def noise(self, parcel: Parcel) -> dict[str, Tensor]:
        """E‖Q(x) − x‖² of each vector."""
        return {
            vector.name: self._codec.noise(packet) for vector, packet in zip(self.vectors, parcel.packets, strict=True)
        }


class Coders(NamedTuple):
    """One a direction."""

    up: Coder
    down: Coder


def coders_for(algorithm: Algorithm, codec: Codec | Codecs) -> Coders:
    """For one codec both ways, or for one each way."""
    up, down = codec if isinstance(codec, Codecs) else (codec, codec)
    remembers = algorithm.applied is not None
    return Coders(Coder(algorithm.records.up, up, remembers=remembers), Coder(algorithm.records.down, down))
