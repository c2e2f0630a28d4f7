"""The lattice codec: a random rotation, a dithered cubic lattice, and coordinates modulo 2^b.

The receiver finds the lattice point again from its own vector, the key, as long as that is near enough; a checksum over
the bits that were not sent tells when it is not. Unbiased, with an error that depends on the side γ alone: γ²/12 per
coordinate (the paper's Lemma "Lattice Quantization"; the design is in docs/wire.md).
"""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from quafl.codec import hashing
from quafl.codec.guards import check_finite, check_fits, exact_part
from quafl.codec.identity import Identity
from quafl.codec.packing import pack, unpack
from quafl.codec.rotation import block_count, rotate, rotate_back
from quafl.core.seams import DecodeError, Model, Packet, Refine

LATTICE = 1  # id on the wire
LIMIT = 2.0**21  # of |z|/γ: float32 still resolves the place within a cell
SMALLEST_SIDE = 2.0**-64


class _Noise(NamedTuple):
    """What both ends derive from the seed."""

    sign: Tensor
    dither: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True)
class Lattice:
    """`bits` per coordinate. The side comes from the distance given at encoding, or is fixed by `resolution`.

    A key decodes exactly when max|R(x − key)| ≤ γ·(2^b − 1)/2; the side is chosen so that this is `spread` standard
    deviations of a rotated coordinate, σ = distance/√d: γ = 2·spread·σ/(2^b − 1).
    """

    bits: int = 4
    resolution: float | None = None
    spread: float = 6.0

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise ValueError(f"bits is {self.bits}, must be from 1 to 16; for uncompressed models use Identity()")
        if self.resolution is not None and not 0 < self.resolution < inf:
            raise ValueError(f"resolution is {self.resolution}, must be positive and finite")
        if not 0 < self.spread < inf:
            raise ValueError(f"spread is {self.spread}, must be positive and finite")

    def encode(
        self, x: Model, rng: torch.Generator, *, distance: Tensor | float | None = None, exact: Tensor | None = None
    ) -> Packet:
        """k = ⌊R x/γ + u⌋, of which k mod 2^b is sent, and Σ weight·⌊k/2^b⌋ of each block."""
        check_finite(x)
        seed = torch.randint(2**63 - 1, x.shape[:-1], generator=rng).to(x.device)
        noise = _noise(seed, block_count(x.shape[-1]))
        z = rotate(x, noise.sign)
        side = self._side(x, z, distance)
        t = z * side.reciprocal()[..., None, None]
        floor = t.floor()
        k = floor.to(torch.int32) + ((t - floor) + noise.dither >= 1)
        return Packet(
            codec=LATTICE,
            bits=self.bits,
            dim=x.shape[-1],
            symbols=pack(k & ((1 << self.bits) - 1), self.bits),
            checks=_checksum(k, self.bits, noise.weight),
            side=side,
            seed=seed,
            exact=exact_part(exact, x),
        )

    def _side(self, x: Tensor, z: Tensor, distance: Tensor | float | None) -> Tensor:
        """γ of each row; raised where the lattice would have more cells than float32 can tell apart."""
        if self.resolution is not None:
            side = torch.full(x.shape[:-1], self.resolution, device=x.device)
        elif distance is None:
            raise ValueError("encode needs a distance, or a Lattice with a fixed resolution")
        else:
            deviation = torch.as_tensor(distance, dtype=x.dtype, device=x.device) * max(x.shape[-1], 1) ** -0.5
            side = (2 * self.spread * deviation / (2**self.bits - 1)).expand(x.shape[:-1])
        if not (side.isfinite() & (side >= 0)).all():
            raise ValueError(f"distance is {distance}, must be finite and not negative")
        widest = z.abs().flatten(-2).amax(dim=-1) if z.numel() else side.new_zeros(side.shape)
        return side.maximum(widest / (LIMIT / 2)).clamp(min=SMALLEST_SIDE)

    def refine(self, x: Model, sent: Packet, failed: Tensor) -> Packet:
        """The rows with a failed block, in full precision."""
        return Identity().encode(x.expand(*failed.shape[:-1], -1)[failed.any(dim=-1)])

    def decode(self, packet: Packet, *, key: Model, refine: Refine | None = None) -> Model:
        """The lattice point k′ ≡ k (mod 2^b) nearest to the key, for every block whose checksum agrees.

        Rows that fail are asked for again through `refine`; without it they raise DecodeError.
        """
        check_fits(packet, LATTICE, key)
        if key.isnan().any():
            raise ValueError("the decoding key has NaN coordinates")
        model, failed = _nearest(packet, key)
        if not failed.any():
            return model
        if refine is None:
            raise DecodeError(
                f"blocks {failed.nonzero()[:, -1].unique().tolist()[:8]} of {failed.shape[-1]} do not decode: the key "
                f"is farther from the sender's vector than side {packet.side.min():.3g} and {packet.bits} bits reach"
            )
        rows = failed.any(dim=-1)
        model[rows] = Identity().decode(refine(failed), key=model[rows])
        return model

    def noise(self, packet: Packet) -> Tensor:
        """d·γ²/12: the error is uniform in a cell."""
        return packet.dim * packet.side.square() / 12


def _nearest(packet: Packet, key: Model) -> tuple[Model, Tensor]:
    """The decoded vector, and the blocks ("... W") in which it is wrong."""
    blocks, modulus = block_count(packet.dim), 1 << packet.bits
    noise = _noise(packet.seed, blocks)
    side = packet.side[..., None, None]
    t = rotate(key, noise.sign) * side.reciprocal()
    reachable = t.abs() < LIMIT
    t = t.where(reachable, 0.0)
    floor = t.floor()
    offset = (t - floor) + noise.dither - 0.5  # of the key in the dithered lattice, from -1/2 to 3/2
    further = offset >= 0.5
    cell = floor.to(torch.int32) + further  # the lattice point nearest to the key
    offset = offset - further.to(torch.float32)
    ahead = (unpack(packet.symbols, packet.bits, blocks) - cell) & (modulus - 1)
    ahead = torch.where(ahead - offset > modulus // 2, ahead - modulus, ahead)
    failed = _checksum(cell + ahead, packet.bits, noise.weight) != packet.checks
    return key + rotate_back(side * (ahead - offset), noise.sign, packet.dim), failed | ~reachable.all(dim=-2)


def _noise(seed: Tensor, blocks: int) -> _Noise:
    words = hashing.words(seed, blocks)
    return _Noise(hashing.sign(words), hashing.dither(words), hashing.weight(words))


def _checksum(k: Tensor, bits: int, weight: Tensor) -> Tensor:
    """Σ weight·⌊k/2^b⌋ mod 2³² of each block: over the bits that are not sent."""
    return (weight * (k >> bits)).sum(dim=-2, dtype=torch.int32)
