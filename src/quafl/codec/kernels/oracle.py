"""The codes in torch, on any device: the reference for the other kernels."""

import torch
from torch import Tensor

from quafl.codec import gaussian, hashing
from quafl.codec.kernels import LIMIT, NOWHERE, Decoded, Encoded, Rounded, Transferred
from quafl.codec.packing import pack, unpack
from quafl.codec.rotation import block_count, block_size, rotate, rotate_back, to_blocks

NEIGHBOURS = 16  # rows that are added up first


class Oracle:
    """Plain torch, several temporaries of the vector's size."""

    def encode(self, x: Tensor, seed: Tensor, side: Tensor, bits: int) -> Encoded:
        """See Kernel."""
        z = to_blocks(x)
        words = _words(seed, x.shape[-1])
        t = rotate(z, hashing.sign(words)) * side.reciprocal()[:, None, None]
        k = points(t, hashing.dither(words))
        widest = t.abs().flatten(1).amax(dim=1) if t.numel() else torch.zeros_like(side)
        return Encoded(pack(k & ((1 << bits) - 1), bits), checksum(k, bits, words), widest)

    def decode(self, symbols: Tensor, checks: Tensor, seed: Tensor, side: Tensor, bits: int, key: Tensor) -> Decoded:
        """See Kernel."""
        z = to_blocks(key)
        words = _words(seed, key.shape[-1])
        signs, side = hashing.sign(words), side[:, None, None]
        t = rotate(z, signs) * side.reciprocal()
        k, reachable = nearest(unpack(symbols, bits, *z.shape[-2:]), bits, t, hashing.dither(words))
        failed = (checksum(k, bits, words) != checks) | ~reachable.all(dim=-2)
        vectors = rotate_back(centers(k, words), signs, side).flatten(-2)[..., : key.shape[-1]]
        return Decoded(vectors.contiguous(), failed)

    def transfer(self, x: Tensor, seed: Tensor, side: Tensor, key: Tensor) -> Transferred:
        """See Kernel."""
        words = _words(seed, x.shape[-1])
        signs, side, dither = hashing.sign(words), side[:, None, None], hashing.dither(words)
        k = points(rotate(to_blocks(x), signs) * side.reciprocal(), dither)
        middle, reachable = around(rotate(to_blocks(key), signs) * side.reciprocal(), dither)
        off = k - middle
        apart = (off ^ (off >> 31)).where(reachable, NOWHERE).amax(dim=-2)
        vectors = rotate_back(centers(k, words), signs, side).flatten(-2)[..., : x.shape[-1]]
        return Transferred(vectors[: len(apart)].contiguous(), apart)

    def encode_difference(self, x: Tensor, seed: Tensor, bits: int) -> Rounded:
        """See Kernel."""
        blocks = to_blocks(x)
        z = rotate(blocks, hashing.sign(_words(seed, x.shape[-1])))
        energy = _sum(blocks.square())
        size = z.abs()
        cell = gaussian.cells(size * gaussian.inverse_root(energy * (1 / z.shape[-2])).unsqueeze(-2), bits)
        found = size * gaussian.levels(bits).to(x.device)[cell]
        groups = _sum(found.unflatten(-2, (found.shape[-2] // NEIGHBOURS, NEIGHBOURS)))
        symbols = cell | (z.signbit().to(torch.int32) << (bits - 1))
        return Rounded(pack(symbols, bits), energy, _sum(groups))

    def decode_difference(self, symbols: Tensor, scales: Tensor, seed: Tensor, bits: int, dim: int) -> Tensor:
        """See Kernel."""
        found = unpack(symbols, bits, block_size(dim), block_count(dim))
        size = gaussian.levels(bits).to(symbols.device)[found & ((1 << (bits - 1)) - 1)]
        level = torch.where(found >> (bits - 1) == 1, -size, size)
        blocks = rotate_back(level, hashing.sign(_words(seed, dim)), scales.unsqueeze(-2))
        return blocks.flatten(-2)[..., :dim].contiguous()


def _words(seed: Tensor, dim: int) -> Tensor:
    return hashing.words(seed, torch.arange(block_count(dim), device=seed.device), block_size(dim))


def _sum(rows: Tensor) -> Tensor:
    """Over "… rows m", the two halves first, then theirs: an order that every kernel can keep to."""
    while rows.shape[-2] > 1:
        upper, lower = rows.unflatten(-2, (2, rows.shape[-2] // 2)).unbind(-3)
        rows = upper + lower
    return rows.squeeze(-2)


def points(t: Tensor, dither: Tensor) -> Tensor:
    """k = ⌊t⌋ + [frac(t) + u ≥ 1], int32: the lattice points of t = z/γ; 0 where |t| is out of range."""
    t = t.where(t.abs() < LIMIT, 0.0)
    floor = t.floor()
    return floor.to(torch.int32) + ((t - floor) + dither >= 1)


def nearest(residues: Tensor, bits: int, t: Tensor, dither: Tensor) -> tuple[Tensor, Tensor]:
    """The k ≡ residue (mod 2^b) nearest to the key's t + u − ½, and where the key is near enough to tell."""
    middle, reachable = around(t, dither)
    first = middle - (1 << (bits - 1))  # of the 2^b points around it
    return first + ((residues - first) & ((1 << bits) - 1)), reachable


def around(t: Tensor, dither: Tensor) -> tuple[Tensor, Tensor]:
    """The point nearest to the key's t + u − ½, and where the key is near enough to tell."""
    reachable = t.abs() < LIMIT
    t = t.where(reachable, 0.0)
    floor = t.floor()
    place = (t - floor) + dither  # the key is at ⌊t⌋ + place − ½
    return floor.to(torch.int32) + (place >= 0.5) + (place >= 1.5), reachable


def centers(k: Tensor, words: Tensor) -> Tensor:
    """k − u + ½: what lattice points stand for, in cells, whatever the key. Everybody who decodes a message gets the
    same vector, bit for bit."""
    return (k.to(torch.float32) - hashing.dither(words)) + 0.5


def checksum(k: Tensor, bits: int, words: Tensor) -> Tensor:
    """Σ weight·⌊k/2^b⌋ mod 2³² of each block: over the bits that are not sent."""
    return (hashing.weight(words) * (k >> bits)).sum(dim=-2, dtype=torch.int32)
