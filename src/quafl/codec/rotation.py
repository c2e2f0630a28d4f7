"""The random rotation: coordinates interleaved into blocks of 1024, signs, and a Hadamard transform of each block.

Block w holds the coordinates x[r·W + w], r = 0 … 1023. Contiguous blocks would fail: a small layer with large values
would fill one of them. Always plain float32 (or more): TF32 would make two devices disagree about the lattice point.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from quafl.codec.hashing import BLOCK

_DISTANCES = [1 << stage for stage in range(10)]


def block_count(dim: int) -> int:
    """W = ⌈d/1024⌉; from 4096 on rounded up to a multiple of 16, so that rows of blocks begin with a cache line."""
    blocks = -(-dim // BLOCK)
    return blocks if blocks < 4096 else -(-blocks // 16) * 16


def to_blocks(x: Tensor) -> Tensor:
    """A vector "... d" as blocks "... 1024 W", padded with zeros."""
    blocks = block_count(x.shape[-1])
    padded = torch.nn.functional.pad(x, (0, BLOCK * blocks - x.shape[-1]))
    return padded.reshape(*x.shape[:-1], BLOCK, blocks)


def places(dim: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Where the coordinates of some blocks lie in the vector, "1024 m", and whether they do (or are padding)."""
    row = torch.arange(BLOCK, device=blocks.device).unsqueeze(-1)
    place = row * block_count(dim) + blocks
    return place.clamp(max=dim - 1), place < dim


def rotate(blocks: Tensor, signs: Tensor) -> Tensor:
    """R: orthonormal, on blocks "... 1024 m". Butterflies in a fixed order, so that every kernel gets the same bits."""
    return _butterflies(blocks * signs, reversed(_DISTANCES)) * (1 / 32)  # 32 = √1024


def rotate_back(blocks: Tensor, signs: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """R⁻¹ times a scale, its butterflies in the opposite order."""
    return _butterflies(blocks, _DISTANCES) * (scale * (1 / 32)) * signs


def _butterflies(z: Tensor, distances: Iterable[int]) -> Tensor:
    leading, count = z.shape[:-2], z.shape[-1]
    for distance in distances:
        upper, lower = z.reshape(*leading, BLOCK // (2 * distance), 2, distance, count).unbind(-3)
        z = torch.stack((upper + lower, upper - lower), dim=-3)
    return z.reshape(*leading, BLOCK, count)
