"""Top-k: the coordinates of the largest magnitude, and where they are; the others are taken for zero.

Biased: alone, what is always small never arrives. With `feedback`, a client adds what it has left out to its next
message, so that all of it arrives in the end (Stich et al., NeurIPS 2018). For displacements and for differences from
what both ends have: a whole model would lose most of its coordinates.
"""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from quafl.codec.formats import Header, Layout, expect, expect_plain
from quafl.codec.packets import broadcast, check_finite, check_fits, make_packet
from quafl.codec.seams import DecodeError, Packet, Refine
from quafl.core.messages import Model

TOP_K = 7  # id on the wire
LONGEST = 2**31  # coordinates: a place is a word
KEPT_BITS = 64  # of a coordinate that is sent: its place and its value


@dataclass(frozen=True, slots=True)
class TopK:
    """The `share` of all coordinates that are largest, 64 bits each: a share of 1/16 is 4 bits per coordinate."""

    share: float = 1 / 16
    feedback: bool = True

    keyed: ClassVar[bool] = False
    difference: ClassVar[bool] = True
    whole: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}, must be above 0 and at most 1, the share of coordinates to send")

    @property
    def bits(self) -> int:
        """Per coordinate of the vector, rounded, and at least one."""
        return max(1, round(KEPT_BITS * self.share))

    def kept(self, dim: int) -> int:
        """k: how many coordinates of such a vector are sent."""
        return ceil(self.share * dim)

    def encode(
        self,
        x: Model,
        rng: torch.Generator | None = None,
        *,
        distance: Tensor | float | None = None,
        exact: Tensor | None = None,
    ) -> Packet:
        """The k largest, in the order of their places."""
        check_finite(x)
        if x.shape[-1] >= LONGEST:
            raise ValueError(f"the vector to encode has {x.shape[-1]} coordinates, top-k takes less than {LONGEST}")
        places = x.abs().topk(self.kept(x.shape[-1]), dim=-1).indices.sort(dim=-1).values
        values = x.gather(-1, places).to(torch.float32)
        return make_packet(x, TOP_K, self.bits, 0, places.to(torch.int32), scales=values, exact=exact)

    def refine(self, x: Model, request: Packet) -> Packet:
        """Nothing fails, so there is nothing to add."""
        raise DecodeError("a top-k message has no next bits")

    def decode(self, packet: Packet, *, key: Model, refine: Refine | None = None) -> Model:
        """The coordinates that were sent, zero elsewhere, whatever the key."""
        check_fits(packet, TOP_K, key)
        vector = packet.scales.new_zeros((*packet.side.shape, packet.dim))
        vector = vector.scatter(-1, packet.symbols.to(torch.int64), packet.scales).to(packet.dtype)
        return vector.expand(broadcast(vector.shape, key.shape))

    def noise(self, packet: Packet) -> Tensor:
        """A third of the least square that was sent, for each that was not: as if those were uniform below it."""
        if not packet.scales.shape[-1]:
            return torch.zeros_like(packet.side)
        return (packet.dim - packet.scales.shape[-1]) * packet.scales.square().amin(dim=-1) / 3


@dataclass(frozen=True, slots=True)
class TopKFormat:
    """k places, rising, as symbols, and k values as scales; the header's blocks are k."""

    id: ClassVar[int] = TOP_K
    name: ClassVar[str] = "top-k"

    def layout(self, header: Header) -> Layout:
        """Two words a coordinate that is sent."""
        expect_plain(header, self.name)
        expect(header.unit == 0, f"{self.name} message has a unit of {header.unit}, must have 0")
        expect(1 <= header.bits <= KEPT_BITS, f"{self.name} message has {header.bits} bits, must have 1 to {KEPT_BITS}")
        expect(header.dim < LONGEST, f"{self.name} message has d={header.dim}, must be below {LONGEST}")
        least = min(header.dim, 1)
        expect(
            least <= header.blocks <= header.dim,
            f"{self.name} message has {header.blocks} coordinates, must have {least} to {header.dim}",
        )
        return Layout(symbols=header.blocks, scales=header.blocks)

    def blocks(self, packet: Packet) -> int:
        """k."""
        return packet.symbols.shape[-1]

    def check(self, packet: Packet) -> None:
        """Each place is named once, in their order."""
        places = packet.symbols
        inside = (places >= 0) & (places < packet.dim)
        expect(bool(inside.all() and (places.diff() > 0).all()), "message names places out of range or out of order")

    def codec(self, packet: Packet) -> TopK:
        """With the share of the packet."""
        return TopK(share=max(packet.symbols.shape[-1], 1) / max(packet.dim, 1))
