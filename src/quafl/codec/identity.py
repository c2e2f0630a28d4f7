"""The codec that does not compress: float32, bit for bit."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quafl.codec.guards import check_finite, check_fits, exact_part
from quafl.core.seams import DecodeError, Model, Packet, Refine

IDENTITY = 0  # id on the wire


@dataclass(frozen=True, slots=True)
class Identity:
    """32 bits per coordinate; needs no key and loses nothing."""

    bits: ClassVar[int] = 32

    def encode(
        self,
        x: Model,
        rng: torch.Generator | None = None,
        *,
        distance: Tensor | float | None = None,
        exact: Tensor | None = None,
    ) -> Packet:
        """x itself."""
        check_finite(x)
        rows = x.shape[:-1]
        return Packet(
            codec=IDENTITY,
            bits=self.bits,
            dim=x.shape[-1],
            symbols=x.to(torch.float32).contiguous().view(torch.int32),
            checks=torch.empty((*rows, 0), dtype=torch.int32, device=x.device),
            side=torch.zeros(rows, device=x.device),
            seed=torch.zeros(rows, dtype=torch.int64, device=x.device),
            exact=exact_part(exact, x),
        )

    def refine(self, x: Model, sent: Packet, failed: Tensor) -> Packet:
        """Nothing fails, so there is nothing to add."""
        raise DecodeError("a full-precision message has no next bits")

    def decode(self, packet: Packet, *, key: Model, refine: Refine | None = None) -> Model:
        """x itself, whatever the key."""
        check_fits(packet, IDENTITY, key)
        shape = torch.broadcast_shapes(packet.symbols.shape, key.shape)
        return packet.symbols.view(torch.float32).expand(shape)

    def noise(self, packet: Packet) -> Tensor:
        """None."""
        return torch.zeros_like(packet.side)
