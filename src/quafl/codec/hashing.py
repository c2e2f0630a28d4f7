"""A counter-based hash: the same 32 random bits for (seed, block, row) on every device, without any state.

One word a coordinate serves three uses: its top bit is the rotation's sign, the 24 bits below are the dither, and the
whole word, made odd, is the weight in the block's checksum.
"""

import torch
from torch import Tensor

BLOCK = 1024  # coordinates that are rotated together, where there are so many
_GOLDEN = 0x9E3779B9


def _int32(word: int) -> int:
    """An unsigned 32-bit constant as torch's int32 holds it."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _shift_right(word: Tensor, by: int) -> Tensor:
    return (word >> by) & ((1 << (32 - by)) - 1)


def _stir(word: Tensor) -> Tensor:
    """lowbias32 (Wellons, hash-prospector), a bijection with nearly ideal avalanche, up to its last multiplication: the
    upper bits, which are the ones used, need no more."""
    word = (word ^ _shift_right(word, 16)) * _int32(0x7FEB352D)
    return (word ^ _shift_right(word, 15)) * _int32(0x846CA68B)


def _mix(word: Tensor) -> Tensor:
    """lowbias32 whole."""
    word = _stir(word)
    return word ^ _shift_right(word, 16)


def words(seed: Tensor, blocks: Tensor, rows: int = BLOCK) -> Tensor:
    """The hash of every coordinate, "... rows m", int32, for seeds "..." and m blocks, given by their numbers."""
    low, high = seed.to(torch.int32), (seed >> 32).to(torch.int32)
    key = _mix(low) ^ _mix(high + _int32(_GOLDEN))
    row = torch.arange(rows, dtype=torch.int32, device=seed.device)
    block_key = _mix(key.unsqueeze(-1) + blocks.to(torch.int32) * _int32(_GOLDEN))
    return _stir(block_key.unsqueeze(-2) + (row * _int32(_GOLDEN)).unsqueeze(-1))


def sign(word: Tensor) -> Tensor:
    """±1 from the top bit."""
    return 1.0 - 2.0 * _shift_right(word, 31)


def dither(word: Tensor) -> Tensor:
    """u ∈ [0, 1) from the 24 bits below the top one, exact in float32."""
    return ((word >> 7) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def weight(word: Tensor) -> Tensor:
    """An odd number: one wrong coordinate always changes the checksum."""
    return word | 1
