"""An entropy-coded difference, to compare with: what a variable number of bits would be worth.

The same rotation and scale as `quafl.codec.Difference`, a uniform quantizer instead of the best one of a fixed width,
and its cells coded by asymmetric numeral systems (the library `constriction`), with the probabilities that a Gaussian
gives them. Octets are those of real code words.
"""

from itertools import pairwise
from math import erfc, exp, inf, pi, sqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quafl.codec import hashing
from quafl.codec.rotation import block_count, block_size, rotate, rotate_back, to_blocks
from quafl.codec.seams import HEADER_BYTES

CELLS = 255  # odd: the middle one is around zero


class Coded(NamedTuple):
    octets: int
    vector: Tensor


def coded(x: Tensor, step: float, seed: int) -> Coded:
    """x through cells of so many standard deviations, and back."""
    import constriction  # the extra `bench`: only this needs it

    dim = len(x)
    words = hashing.words(torch.tensor(seed), torch.arange(block_count(dim)), block_size(dim))
    signs, blocks = hashing.sign(words), to_blocks(x)
    z = rotate(blocks, signs)
    deviation = z.square().mean(dim=-2, keepdim=True).sqrt()
    half = CELLS // 2
    cell = (z / deviation / step).round().clamp(-half, half).nan_to_num(0).to(torch.int64) + half
    shares, centers = _cells(step)
    level = torch.tensor(centers, dtype=torch.float32)[cell]
    scale = z.square().sum(dim=-2, keepdim=True) / (z * level).sum(dim=-2, keepdim=True)
    model = constriction.stream.model.Categorical(np.array(shares, dtype=np.float32), perfect=False)
    symbols = cell.flatten().numpy().astype(np.int32)
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(symbols, model)
    words_sent = coder.get_compressed()
    again = constriction.stream.stack.AnsCoder(words_sent).decode(model, len(symbols))
    assert (again == symbols).all()
    vector = rotate_back(level, signs, scale.nan_to_num(0)).flatten()[:dim]
    return Coded(HEADER_BYTES + 4 * len(words_sent) + 4 * block_count(dim), vector)


def at(x: Tensor, bits: float, seed: int) -> Coded:
    """With the finest cells that take no more than so many bits a coordinate."""
    low, high = 0.01, 4.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if 8 * coded(x, middle, seed).octets / len(x) <= bits else (middle, high)
    return coded(x, high, seed)


def _cells(step: float) -> tuple[list[float], list[float]]:
    """The share of a standard normal in each cell, and its mean there."""
    half = CELLS // 2
    edges = [-inf, *((place - half - 0.5) * step for place in range(1, CELLS)), inf]
    shares = [_beyond(low) - _beyond(high) for low, high in pairwise(edges)]
    middles = [(place - half) * step for place in range(CELLS)]
    means = [
        (_density(low) - _density(high)) / share if share > 1e-12 else middle
        for (low, high), share, middle in zip(pairwise(edges), shares, middles, strict=True)
    ]
    return [max(share, 1e-9) for share in shares], means


def _density(t: float) -> float:
    return exp(-t * t / 2) / sqrt(2 * pi)


def _beyond(t: float) -> float:
    return erfc(t / sqrt(2)) / 2
