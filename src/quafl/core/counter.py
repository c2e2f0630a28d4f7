"""Randomness that is counted, not drawn: a function of a key and of the place where it is used, without any state.

Whoever computes it, in whatever order and on whatever device, for one client or for many at once, gets the same bits.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B9
_ROUNDS = 4
_WALK = 40  # a number is outside less than half of the time; in vain once in 10^12


def int32(word: int) -> int:
    """An unsigned 32-bit constant as torch's int32 holds it."""
    return word - (1 << 32) if word >= 1 << 31 else word


def shift_right(word: Tensor, by: int) -> Tensor:
    """Zeros come in from the left."""
    return (word >> by) & ((1 << (32 - by)) - 1)


def stir(word: Tensor) -> Tensor:
    """lowbias32 (Wellons, hash-prospector), a bijection with nearly ideal avalanche, up to its last multiplication: for
    those who use the upper bits alone."""
    word = (word ^ shift_right(word, 16)) * int32(0x7FEB352D)
    return (word ^ shift_right(word, 15)) * int32(0x846CA68B)


def mix(word: Tensor) -> Tensor:
    """lowbias32 whole."""
    word = stir(word)
    return word ^ shift_right(word, 16)


def count(key: Tensor, number: Tensor | int) -> Tensor:
    """The key's word of that number: for keys "... 2", int32, and numbers that broadcast with "..."."""
    low, high = key.unbind(-1)
    step = int32(number * GOLDEN & 0xFFFFFFFF) if isinstance(number, int) else number * int32(GOLDEN)
    return mix(mix(low + step) ^ high)


def subkey(key: Tensor, number: Tensor | int) -> Tensor:
    """A key of its own for each number, "... 2"."""
    first = count(key, number)
    return torch.stack((first, mix(first ^ key[..., 0] ^ int32(GOLDEN))), dim=-1)


def key_from(seed: int) -> Tensor:
    """The key that a 64-bit seed stands for."""
    return torch.tensor([int32(seed & 0xFFFFFFFF), int32((seed >> 32) & 0xFFFFFFFF)], dtype=torch.int32)


def permuted(key: Tensor, places: Tensor, size: Tensor, *, blind: bool = False) -> Tensor:
    """Where the places below `size` are in an order of the key's own; keys "... 2", places and sizes that broadcast.
    `blind`: without looking at values, so that it can be traced.

    A bijection of the numbers below the next power of two, keyed: an odd factor, a sum and a shift, some times over.
    What lands at or beyond the size is sent on until it does not (cycle walking; Black and Rogaway, 2002).
    """
    numbers = torch.arange(2 * _ROUNDS, dtype=torch.int32, device=key.device)
    words = (count(key.unsqueeze(-2), numbers).to(torch.int64) & 0x3FFFFFFF).unbind(-1)
    bits = torch.frexp((size - 1).double()).exponent.to(torch.int64)
    top = (torch.ones_like(bits) << bits) - 1
    half = (bits + 1) // 2

    def moved(place: Tensor) -> Tensor:
        for factor, term in zip(words[::2], words[1::2], strict=True):
            place = (place * (factor | 1) + term) & top
            place = place ^ (place >> half)
        return place

    place = moved(places)
    for _ in range(_WALK):
        inside = place < size
        if not blind and inside.all():
            break
        place = torch.where(inside, place, moved(place))
    return torch.minimum(place, size - 1)


class Draws:
    """Random numbers for one use of a key; each call gives others, the same ones in every run."""

    def __init__(self, key: Tensor) -> None:
        self._key = key
        self._calls = 0

    def uniform(self, *shape: int) -> Tensor:
        """From 0 to 1, without 1."""
        return shift_right(self._words(shape), 8).to(torch.float32) * 2.0**-24

    def integers(self, below: int, *shape: int) -> Tensor:
        """From 0 on, all equally likely."""
        return (self.uniform(*shape) * below).to(torch.int64)

    def generator(self) -> torch.Generator:
        """For code that needs one; such code cannot be vectorised."""
        low, high = subkey(self._key, self._next()).tolist()
        return torch.Generator().manual_seed((high & 0x7FFFFFFF) << 32 | low & 0xFFFFFFFF)

    def _words(self, shape: tuple[int, ...]) -> Tensor:
        numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.int32, device=self._key.device).view(shape)
        return count(subkey(self._key, self._next()), numbers)

    def _next(self) -> int:
        self._calls += 1
        return self._calls
