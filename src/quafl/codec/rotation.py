"""The random rotation: coordinates interleaved into blocks of 1024, signs, and a Hadamard transform of each block.

Block w holds the coordinates x[r·W + w], r = 0 … 1023. Contiguous blocks would fail: a small layer with large values
would fill one of them. Always plain float32: TF32 would make two devices disagree about the lattice point.
"""

import torch
from torch import Tensor

from quafl.codec.hashing import BLOCK


def block_count(dim: int) -> int:
    """W = ⌈d/1024⌉."""
    return -(-dim // BLOCK)


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """R x: "... d" → "... 1024 W", orthonormal."""
    blocks = signs.shape[-1]
    padded = torch.nn.functional.pad(x, (0, BLOCK * blocks - x.shape[-1]))
    return _hadamard(padded.unflatten(-1, (BLOCK, blocks)) * signs)


def rotate_back(z: Tensor, signs: Tensor, dim: int) -> Tensor:
    """R⁻¹ z: "... 1024 W" → "... d"."""
    return (_hadamard(z) * signs).flatten(-2)[..., :dim]


def _hadamard(z: Tensor) -> Tensor:
    """Butterflies over the rows in a fixed order, so that every kernel gets the same bits; H·H = 1."""
    leading, blocks = z.shape[:-2], z.shape[-1]
    half = 1
    while half < BLOCK:
        pairs = z.reshape(*leading, BLOCK // (2 * half), 2, half, blocks)
        upper, lower = pairs.unbind(-3)
        z = torch.stack((upper + lower, upper - lower), dim=-3)
        half *= 2
    return z.reshape(*leading, BLOCK, blocks) * (1 / 32)  # 32 = √1024
