"""The codec that does not compress: float32, bit for bit."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quafl.codec.formats import Header, Layout, expect, expect_plain
from quafl.codec.packets import broadcast, check_finite, check_fits, make_packet
from quafl.codec.seams import DecodeError, Packet, Refine
from quafl.core.messages import Model
from quafl.core.pieces import is_finite

IDENTITY = 0  # id on the wire


@dataclass(frozen=True, slots=True)
class Identity:
    """32 bits per coordinate; needs no key and loses nothing."""

    bits: ClassVar[int] = 32
    keyed: ClassVar[bool] = False
    difference: ClassVar[bool] = False
    whole: ClassVar[bool] = True
    feedback: ClassVar[bool] = False

    def encode(
        self,
        x: Model,
        rng: torch.Generator | None = None,
        *,
        distance: Tensor | float | None = None,
        exact: Tensor | None = None,
    ) -> Packet:
        """x itself, not a copy where it is float32 already."""
        check_finite(x, exact)
        symbols = x.to(torch.float32).contiguous().view(torch.int32)
        return make_packet(x, IDENTITY, self.bits, 0, symbols, exact=exact, checked=True)

    def refine(self, x: Model, request: Packet) -> Packet:
        """Nothing fails, so there is nothing to add."""
        raise DecodeError("a full-precision message has no next bits")

    def decode(self, packet: Packet, *, key: Model, refine: Refine | None = None) -> Model:
        """x itself, whatever the key."""
        check_fits(packet, IDENTITY, key)
        shape = broadcast(packet.symbols.shape, key.shape)
        return packet.symbols.view(torch.float32).to(packet.dtype).expand(shape)

    def noise(self, packet: Packet) -> Tensor:
        """None."""
        return torch.zeros_like(packet.side)


@dataclass(frozen=True, slots=True)
class IdentityFormat:
    """d float32, as they are."""

    id: ClassVar[int] = IDENTITY
    name: ClassVar[str] = "identity"

    def layout(self, header: Header) -> Layout:
        """A word a coordinate."""
        expect_plain(header, self.name)
        expect(header.bits == Identity.bits, f"{self.name} message has {header.bits} bits, must have {Identity.bits}")
        expect(header.unit == header.blocks == 0, f"{self.name} message has {header.blocks} blocks of {header.unit}")
        return Layout(symbols=header.dim)

    def blocks(self, packet: Packet) -> int:
        """The vector is not divided."""
        return 0

    def check(self, packet: Packet) -> None:
        """What a diverged sender would send is refused."""
        expect(is_finite(packet.symbols.view(torch.float32)), "message has coordinates that are NaN or infinite")

    def codec(self, packet: Packet) -> Identity:
        """There is only one."""
        return Identity()
