"""QSGD (Alistarh et al., 2017): private stochastic rounding of buckets, to multiples of their norm or of their range.

Needs no key; its error grows with the vector, not with its distance from anything. The comparison, and FedBuff's codec.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from quafl.codec import hashing
from quafl.codec.formats import Header, Layout, expect, expect_plain
from quafl.codec.packets import broadcast, check_finite, check_fits, draw_words, make_packet
from quafl.codec.packing import pack, unpack
from quafl.codec.seams import DecodeError, Packet, Refine
from quafl.core.checks import check_whole
from quafl.core.messages import Model

QSGD_L2 = 2  # ids on the wire
QSGD_MINMAX = 3


@dataclass(frozen=True, slots=True)
class QSGD:
    """`bits` per coordinate and a scale or two per bucket.

    "l2": a sign and ξ ∈ {0 … s}, s = 2^(b−1) − 1, for ‖bucket‖·ξ/s. "min-max": ξ ∈ {0 … s}, s = 2^b − 1, for
    min + (max − min)·ξ/s. Both unbiased. With `difference`, the difference to what both ends know is coded, where a
    message has such a vector.
    """

    bits: int = 8
    norm: Literal["l2", "min-max"] = "min-max"
    bucket: int = 512
    difference: bool = False

    keyed: ClassVar[bool] = False
    whole: ClassVar[bool] = True
    feedback: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_whole("bits", self.bits, 2 if self.norm == "l2" else 1, 16, "for uncompressed models use Identity()")
        if self.norm not in ("l2", "min-max"):
            raise ValueError(f"norm is {self.norm!r}, must be 'l2' or 'min-max'")
        if self.bucket % 32 or not 32 <= self.bucket < 2**16:
            raise ValueError(f"bucket is {self.bucket}, must be a multiple of 32 below 65536")

    @property
    def _codec(self) -> int:
        return QSGD_L2 if self.norm == "l2" else QSGD_MINMAX

    @property
    def _levels(self) -> int:
        return (1 << (self.bits - 1 if self.norm == "l2" else self.bits)) - 1

    def encode(
        self, x: Model, rng: torch.Generator, *, distance: Tensor | float | None = None, exact: Tensor | None = None
    ) -> Packet:
        """Each coordinate to one of the two levels beside it, at random so that the mean is right."""
        check_finite(x)
        count = -(-x.shape[-1] // self.bucket)
        last = x[..., -1:] if self.norm == "min-max" else x.new_zeros((*x.shape[:-1], 1))
        padding = last.expand(*x.shape[:-1], count * self.bucket - x.shape[-1]) if count else x
        buckets = torch.cat((x, padding), dim=-1).to(torch.float32).unflatten(-1, (count, self.bucket))
        if self.norm == "l2":
            scales = buckets.norm(dim=-1, keepdim=True)
            position = buckets.abs() / scales * self._levels
        else:
            low, high = buckets.amin(dim=-1, keepdim=True), buckets.amax(dim=-1, keepdim=True)
            scales = torch.cat((low, high), dim=-1)
            position = (buckets - low) / (high - low) * self._levels
        chance = hashing.dither(draw_words(buckets.flatten(-2), rng)).reshape(buckets.shape)
        position = position.nan_to_num(0.0)  # a bucket of zeros, or of one value
        below = position.floor()
        level = below + (position - below + chance >= 1)
        symbols = level.to(torch.int32).clamp(max=self._levels)
        if self.norm == "l2":
            symbols = symbols | ((buckets < 0).to(torch.int32) << (self.bits - 1))
        packed = pack(symbols.flatten(-2).unsqueeze(-1), self.bits)
        return make_packet(x, self._codec, self.bits, self.bucket, packed, scales=scales.flatten(-2), exact=exact)

    def refine(self, x: Model, request: Packet) -> Packet:
        """Nothing fails, so there is nothing to add."""
        raise DecodeError("a QSGD message has no next bits")

    def decode(self, packet: Packet, *, key: Model, refine: Refine | None = None) -> Model:
        """The levels, whatever the key."""
        check_fits(packet, self._codec, key)
        if packet.bits != self.bits:
            raise DecodeError(f"packet has {packet.bits} bits, expected {self.bits}; do both ends agree?")
        count = -(-packet.dim // packet.unit)
        symbols = unpack(packet.symbols, packet.bits, count * packet.unit, 1).squeeze(-1)
        symbols = symbols.unflatten(-1, (count, packet.unit))
        scales = packet.scales.unflatten(-1, (count, -1 if count else 1))
        if self.norm == "l2":
            sign = 1 - 2 * (symbols >> (packet.bits - 1))
            values = scales * (sign * (symbols & self._levels)) / self._levels
        else:
            low, high = scales[..., :1], scales[..., -1:]
            values = low + (high - low) * symbols / self._levels
        vector = values.flatten(-2)[..., : packet.dim]
        shape = broadcast(vector.shape, key.shape)
        result: Tensor = vector.to(packet.dtype).expand(shape)
        return result

    def noise(self, packet: Packet) -> Tensor:
        """A sixth of a level squared for each coordinate: the mean of p(1 − p), were p uniform."""
        if self.norm == "l2":
            step = packet.scales / self._levels
        else:
            step = packet.scales.unflatten(-1, (-1, 2)).diff(dim=-1).squeeze(-1) / self._levels
        sizes = torch.full_like(step, self.bucket)
        sizes[..., -1:] -= self.bucket * step.shape[-1] - packet.dim
        return (sizes * step.square()).sum(dim=-1) / 6


@dataclass(frozen=True, slots=True)
class QSGDFormat:
    """Symbols, then the scales of each bucket; the bucket is the header's unit."""

    id: int
    norm: Literal["l2", "min-max"]
    least: int  # bits
    scales: int  # of a bucket

    @property
    def name(self) -> str:
        """With its norm."""
        return f"QSGD {self.norm}"

    def layout(self, header: Header) -> Layout:
        """unit·b/32 words of symbols a bucket, and its scales."""
        expect_plain(header, self.name)
        bits, unit = header.bits, header.unit
        expect(self.least <= bits <= 16, f"{self.name} message has {bits} bits, must have {self.least} to 16")
        expect(unit > 0 and unit % 32 == 0, f"{self.name} message has buckets of {unit}, not a multiple of 32")
        whole = -(-header.dim // unit)
        expect(header.blocks == whole, f"message has {header.blocks} buckets, d={header.dim} needs {whole}")
        return Layout(symbols=whole * unit // 32 * bits, scales=self.scales * whole)

    def blocks(self, packet: Packet) -> int:
        """⌈d/bucket⌉."""
        return -(-packet.dim // packet.unit)

    def check(self, packet: Packet) -> None:
        """Nothing can be wrong: every symbol is a level."""

    def codec(self, packet: Packet) -> QSGD:
        """With the bits and the bucket of the packet."""
        return QSGD(bits=packet.bits, norm=self.norm, bucket=packet.unit)


L2_FORMAT = QSGDFormat(QSGD_L2, "l2", least=2, scales=1)
MINMAX_FORMAT = QSGDFormat(QSGD_MINMAX, "min-max", least=1, scales=2)
