"""Randomness that is counted, not drawn: a function of a key and of the place where it is used, without any state.

Whoever computes it, in whatever order and on whatever device, for one client or for many at once, gets the same bits.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF  # words have 32 bits; they are computed in 64, where no product overflows
_GOLDEN = 0x9E3779B9
_HALVES = 6  # of Feistel's rounds
_WALK = 6  # a place is outside one time in √size; after all of these, once in millions, the last one is taken instead


def _mix(word: Tensor) -> Tensor:
    """A bijection of words, of the form of lowbias32 (Wellons, hash-prospector)."""
    word = (word ^ (word >> 16)) * 0x7FEB352D & _MASK
    word = (word ^ (word >> 15)) * 0x31848BAB & _MASK
    return word ^ (word >> 16)


def count(key: Tensor, number: Tensor | int) -> Tensor:
    """The key's word of that number: for keys "... 2" and numbers that broadcast with "..."; all are int64."""
    low, high = key.unbind(-1)
    return _mix(_mix(low + number & _MASK) ^ high)


def subkey(key: Tensor, number: Tensor | int) -> Tensor:
    """A key of its own for each number, "... 2"."""
    first = count(key, number)
    return torch.stack((first, _mix(first ^ key[..., 0] ^ _GOLDEN)), dim=-1)


def key_from(seed: int) -> Tensor:
    """The key that a 64-bit seed stands for."""
    return torch.tensor([seed & _MASK, seed >> 32 & _MASK])


def permuted(key: Tensor, places: Tensor, size: Tensor, *, blind: bool = False) -> Tensor:
    """Where the places below `size` are in an order of the key's own; keys "... 2", places and sizes that broadcast.
    `blind`: without looking at values, so that it can be traced.

    A place is written as two digits, and each is moved by a hash of the other, some times over: a bijection of the
    numbers below √size·⌈√size⌉, nearly (Black and Rogaway, 2002). What lands at or beyond the size is moved on.
    """
    words = count(key.unsqueeze(-2), torch.arange(_HALVES, device=key.device)).unbind(-1)
    columns = size.double().sqrt().to(torch.int64)
    rows = (size + columns - 1) // columns

    def moved(place: Tensor) -> Tensor:
        mine, other = (place // columns, rows), (place % columns, columns)
        for word in words:
            mine, other = other, ((mine[0] + _mix(other[0] + word & _MASK)) % mine[1], mine[1])
        return mine[0] * columns + other[0]  # as many halves as there are, an even number, each is where it was

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
        return (self._words(shape) >> 8).to(torch.float32) * 2.0**-24

    def integers(self, below: int, *shape: int) -> Tensor:
        """From 0 on, all equally likely."""
        return (self.uniform(*shape) * below).to(torch.int64)

    def generator(self) -> torch.Generator:
        """For code that needs one; such code cannot be vectorised."""
        low, high = subkey(self._key, self._next()).tolist()
        return torch.Generator().manual_seed((high << 32 | low) >> 1)

    def _words(self, shape: tuple[int, ...]) -> Tensor:
        numbers = torch.arange(torch.Size(shape).numel(), device=self._key.device).view(shape)
        return count(subkey(self._key, self._next()), numbers)

    def _next(self) -> int:
        self._calls += 1
        return self._calls
