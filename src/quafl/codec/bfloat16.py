"""Coordinates rounded to bfloat16 at random, so that the mean is right: half the octets, whatever the key."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quafl.codec.formats import Header, Layout, expect, expect_plain
from quafl.codec.packets import broadcast, check_finite, check_fits, draw_words, make_packet
from quafl.codec.seams import DecodeError, Packet, Refine
from quafl.core.messages import Model
from quafl.core.pieces import is_finite

BFLOAT16 = 6  # id on the wire


@dataclass(frozen=True, slots=True)
class BFloat16:
    """16 bits per coordinate; needs no key. Unbiased; a coordinate is off by less than 2^−7 of itself."""

    bits: ClassVar[int] = 16
    keyed: ClassVar[bool] = False
    difference: ClassVar[bool] = False
    whole: ClassVar[bool] = True
    feedback: ClassVar[bool] = False

    def encode(
        self, x: Model, rng: torch.Generator, *, distance: Tensor | float | None = None, exact: Tensor | None = None
    ) -> Packet:
        """The upper half of each float32 after random bits are added to the lower, which may carry; two a word."""
        check_finite(x)
        chance = (draw_words(x, rng) >> 16) & 0xFFFF
        upper = (x.to(torch.float32).contiguous().view(torch.int32) + chance) >> 16
        even, odd = (
            torch.nn.functional.pad(upper, (0, x.shape[-1] % 2)).unflatten(-1, (-(-x.shape[-1] // 2), 2)).unbind(-1)
        )
        packet = make_packet(x, BFLOAT16, self.bits, 0, (even & 0xFFFF) | (odd << 16), exact=exact)
        check_finite(_halves(packet))  # the largest float32 are beyond the largest bfloat16
        return packet

    def refine(self, x: Model, request: Packet) -> Packet:
        """Nothing fails, so there is nothing to add."""
        raise DecodeError("a bfloat16 message has no next bits")

    def decode(self, packet: Packet, *, key: Model, refine: Refine | None = None) -> Model:
        """The rounded coordinates, whatever the key."""
        check_fits(packet, BFLOAT16, key)
        vector = _halves(packet)[..., : packet.dim].to(packet.dtype)
        return vector.expand(broadcast(vector.shape, key.shape))

    def noise(self, packet: Packet) -> Tensor:
        """A sixth of a step squared for each coordinate; a step is 2^−7 of the power of two below it."""
        values = _halves(packet).float()
        step = torch.ldexp(torch.ones_like(values), torch.frexp(values).exponent - 8)
        return step.square().sum(dim=-1) / 6


@dataclass(frozen=True, slots=True)
class BFloat16Format:
    """d bfloat16, two a word, the first in the lower half."""

    id: ClassVar[int] = BFLOAT16
    name: ClassVar[str] = "bfloat16"

    def layout(self, header: Header) -> Layout:
        """⌈d/2⌉ words."""
        expect_plain(header, self.name)
        expect(header.bits == BFloat16.bits, f"{self.name} message has {header.bits} bits, must have {BFloat16.bits}")
        expect(header.unit == header.blocks == 0, f"{self.name} message has {header.blocks} blocks of {header.unit}")
        return Layout(symbols=-(-header.dim // 2))

    def blocks(self, packet: Packet) -> int:
        """The vector is not divided."""
        return 0

    def check(self, packet: Packet) -> None:
        """What a diverged sender would send is refused, and so is something in the padding."""
        halves = _halves(packet)
        expect(is_finite(halves), "message has coordinates that are NaN or infinite")
        expect(not halves[packet.dim :].view(torch.int16).any(), "message has something behind its last coordinate")

    def codec(self, packet: Packet) -> BFloat16:
        """There is only one."""
        return BFloat16()


def _halves(packet: Packet) -> Tensor:
    both = torch.stack((packet.symbols, packet.symbols >> 16), dim=-1).flatten(-2)
    return both.to(torch.int16).view(torch.bfloat16)
