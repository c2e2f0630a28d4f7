"""The random rotation: coordinates interleaved into blocks of 1024, signs, and a Hadamard transform of each block.

Block w holds the coordinates x[r·W + w], r = 0 … 1023. Contiguous blocks would fail: a small layer with large values
would fill one of them. A vector of at most 512 coordinates is one block, of the least power of two that holds it, from
32 on. Always plain float32: TF32 would make two devices disagree about the lattice point.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from quafl.codec.hashing import BLOCK

SMALLEST = 32  # coordinates in a block: their symbols fill whole words


def block_size(dim: int) -> int:
    """Coordinates in a block of such a vector."""
    return min(BLOCK, max(SMALLEST, 1 << max(dim - 1, 0).bit_length()))


def block_count(dim: int) -> int:
    """W = ⌈d/1024⌉; from 4096 on rounded up to a multiple of 16, so that rows of blocks begin with a cache line."""
    blocks = -(-dim // BLOCK)
    return blocks if blocks < 4096 else -(-blocks // 16) * 16


def to_blocks(x: Tensor) -> Tensor:
    """A vector "... d" as blocks "... rows W", padded with zeros."""
    rows, blocks = block_size(x.shape[-1]), block_count(x.shape[-1])
    padded = torch.nn.functional.pad(x, (0, rows * blocks - x.shape[-1]))
    return padded.reshape(*x.shape[:-1], rows, blocks)


def places(dim: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Where the coordinates of some blocks lie in the vector, "rows m", and whether they do (or are padding)."""
    row = torch.arange(block_size(dim), device=blocks.device).unsqueeze(-1)
    place = row * block_count(dim) + blocks
    return place.clamp(max=dim - 1), place < dim


def rotate(blocks: Tensor, signs: Tensor) -> Tensor:
    """R: orthonormal, on blocks "... rows m". Butterflies in a fixed order, so that every kernel gets the same bits."""
    return _butterflies(blocks * signs, reversed(_distances(blocks))) * _norm(blocks)


def rotate_back(blocks: Tensor, signs: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """R⁻¹ times a scale, its butterflies in the opposite order."""
    return _butterflies(blocks, _distances(blocks)) * (scale * _norm(blocks)) * signs


def _distances(blocks: Tensor) -> list[int]:
    return [1 << stage for stage in range(blocks.shape[-2].bit_length() - 1)]


def _norm(blocks: Tensor) -> float:
    """1/√rows: that of 1024 is 1/32."""
    return float(blocks.shape[-2] ** -0.5)


def _butterflies(z: Tensor, distances: Iterable[int]) -> Tensor:
    leading, rows, count = z.shape[:-2], z.shape[-2], z.shape[-1]
    for distance in distances:
        upper, lower = z.reshape(*leading, rows // (2 * distance), 2, distance, count).unbind(-3)
        z = torch.stack((upper + lower, upper - lower), dim=-3)
    return z.reshape(*leading, rows, count)
