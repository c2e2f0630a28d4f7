"""The lattice in torch, on any device: the reference for the other kernels."""

import torch
from torch import Tensor

from quafl.codec import hashing
from quafl.codec.kernels import LIMIT, Decoded, Encoded
from quafl.codec.packing import pack, unpack
from quafl.codec.rotation import rotate, rotate_back, to_blocks


class Oracle:
    """Plain torch, several temporaries of the vector's size."""

    def encode(self, x: Tensor, seed: Tensor, side: Tensor, bits: int) -> Encoded:
        """See Kernel."""
        z = to_blocks(x)
        words = hashing.words(seed, torch.arange(z.shape[-1], device=x.device))
        t = rotate(z, hashing.sign(words)) * side.reciprocal()[:, None, None]
        k = points(t, hashing.dither(words))
        widest = t.abs().flatten(1).amax(dim=1) if t.numel() else torch.zeros_like(side)
        return Encoded(pack(k & ((1 << bits) - 1), bits), checksum(k, bits, words), widest)

    def decode(self, symbols: Tensor, checks: Tensor, seed: Tensor, side: Tensor, bits: int, key: Tensor) -> Decoded:
        """See Kernel."""
        z = to_blocks(key)
        words = hashing.words(seed, torch.arange(z.shape[-1], device=key.device))
        signs, side = hashing.sign(words), side[:, None, None]
        t = rotate(z, signs) * side.reciprocal()
        k, ahead, reachable = nearest(unpack(symbols, bits, *z.shape[-2:]), bits, t, hashing.dither(words))
        failed = (checksum(k, bits, words) != checks) | ~reachable.all(dim=-2)
        moved = rotate_back(ahead, signs, side).flatten(-2)[..., : key.shape[-1]]
        return Decoded(key + moved, failed)


def points(t: Tensor, dither: Tensor) -> Tensor:
    """k = ⌊t⌋ + [frac(t) + u ≥ 1], int32: the lattice points of t = z/γ; 0 where |t| is out of range."""
    t = t.where(t.abs() < LIMIT, 0.0)
    floor = t.floor()
    return floor.to(torch.int32) + ((t - floor) + dither >= 1)


def nearest(residues: Tensor, bits: int, t: Tensor, dither: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The k ≡ residue (mod 2^b) nearest to the key's t + u − ½; how far ahead of the key it lies, in cells; and where
    the key is near enough to tell."""
    modulus = 1 << bits
    reachable = t.abs() < LIMIT
    t = t.where(reachable, 0.0)
    floor = t.floor()
    offset = (t - floor) + dither - 0.5  # of the key in the dithered lattice, from -1/2 to 3/2
    further = offset >= 0.5
    cell = floor.to(torch.int32) + further  # the lattice point nearest to the key
    offset = offset - further.to(t.dtype)
    ahead = (residues - cell) & (modulus - 1)
    ahead = torch.where(ahead - offset > modulus // 2, ahead - modulus, ahead)
    return cell + ahead, ahead - offset, reachable


def checksum(k: Tensor, bits: int, words: Tensor) -> Tensor:
    """Σ weight·⌊k/2^b⌋ mod 2³² of each block: over the bits that are not sent."""
    return (hashing.weight(words) * (k >> bits)).sum(dim=-2, dtype=torch.int32)
