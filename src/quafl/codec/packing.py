"""b-bit symbols in 32-bit words: 32 consecutive rows of a column fill exactly b words, for any b from 1 to 16."""

import torch
from torch import Tensor

_LANES = 32  # symbols in a group, and bits in a word


def pack(symbols: Tensor, bits: int) -> Tensor:
    """Values "... rows columns" below 2^b → "... words", int32. Bit j·b of a group's string is symbol j's lowest."""
    groups = symbols.to(torch.int64).unflatten(-2, (symbols.shape[-2] // _LANES, _LANES))
    word, shift = _places(bits, symbols.device)
    shape = (*groups.shape[:-2], bits + 1, groups.shape[-1])
    packed = torch.zeros(shape, dtype=torch.int64, device=symbols.device)
    packed.index_add_(-2, word, groups << shift)
    packed.index_add_(-2, word + 1, groups >> (_LANES - shift))
    return (packed[..., :bits, :] & 0xFFFFFFFF).flatten(-3).to(torch.int32)


def unpack(words: Tensor, bits: int, rows: int, columns: int) -> Tensor:
    """The inverse of `pack`: "... words" → "... rows columns", int32."""
    return unpack_groups(words.unflatten(-1, (rows // _LANES, bits, columns)), bits)


def unpack_groups(words: Tensor, bits: int) -> Tensor:
    """The same for words already laid out by group: "... groups b columns" → "... rows columns"."""
    packed = words.to(torch.int64) & 0xFFFFFFFF
    packed = torch.cat((packed, torch.zeros_like(packed[..., :1, :])), dim=-2)
    word, shift = _places(bits, words.device)
    low = packed.index_select(-2, word) >> shift
    high = packed.index_select(-2, word + 1) << (_LANES - shift)
    return ((low | high) & ((1 << bits) - 1)).flatten(-3, -2).to(torch.int32)


def _places(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For symbol j of a group: the word its lowest bit lies in, and the place in that word."""
    first = torch.arange(_LANES, device=device) * bits
    return first // _LANES, (first % _LANES).unsqueeze(-1)
