"""The codec that does not compress: float32, bit for bit."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quafl.codec.packets import check_finite, check_fits, make_packet
from quafl.core.seams import DecodeError, Model, Packet, Refine

IDENTITY = 0  # id on the wire


@dataclass(frozen=True, slots=True)
class Identity:
    """32 bits per coordinate; needs no key and loses nothing."""

    bits: ClassVar[int] = 32
    keyed: ClassVar[bool] = False

    def encode(
        self,
        x: Model,
        rng: torch.Generator | None = None,
        *,
        distance: Tensor | float | None = None,
        exact: Tensor | None = None,
    ) -> Packet:
        """x itself, not a copy where it is float32 already."""
        check_finite(x)
        symbols = x.to(torch.float32).contiguous().view(torch.int32)
        return make_packet(x, IDENTITY, self.bits, 0, symbols, exact=exact)

    def refine(self, x: Model, request: Packet) -> Packet:
        """Nothing fails, so there is nothing to add."""
        raise DecodeError("a full-precision message has no next bits")

    def decode(self, packet: Packet, *, key: Model, refine: Refine | None = None) -> Model:
        """x itself, whatever the key."""
        check_fits(packet, IDENTITY, key)
        shape = torch.broadcast_shapes(packet.symbols.shape, key.shape)
        return packet.symbols.view(torch.float32).to(packet.dtype).expand(shape)

    def noise(self, packet: Packet) -> Tensor:
        """None."""
        return torch.zeros_like(packet.side)
