"""The same 32 random bits for (seed, block, row) on every device.

One word a coordinate serves three uses: its top bit is the rotation's sign, the 24 bits below are the dither, and the
whole word, made odd, is the weight in the block's checksum.
"""

import torch
from torch import Tensor

from quafl.core.counter import GOLDEN, int32, mix, shift_right, stir

BLOCK = 1024  # coordinates that are rotated together


def words(seed: Tensor, blocks: Tensor) -> Tensor:
    """The hash of every coordinate, "... 1024 m", int32, for seeds "..." and m blocks, given by their numbers."""
    low, high = seed.to(torch.int32), (seed >> 32).to(torch.int32)
    key = mix(low) ^ mix(high + int32(GOLDEN))
    row = torch.arange(BLOCK, dtype=torch.int32, device=seed.device)
    block_key = mix(key.unsqueeze(-1) + blocks.to(torch.int32) * int32(GOLDEN))
    return stir(block_key.unsqueeze(-2) + (row * int32(GOLDEN)).unsqueeze(-1))


def sign(word: Tensor) -> Tensor:
    """±1 from the top bit."""
    return 1.0 - 2.0 * shift_right(word, 31)


def dither(word: Tensor) -> Tensor:
    """u ∈ [0, 1) from the 24 bits below the top one, exact in float32."""
    return ((word >> 7) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def weight(word: Tensor) -> Tensor:
    """An odd number: one wrong coordinate always changes the checksum."""
    return word | 1
