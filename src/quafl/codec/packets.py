"""What all codecs do with packets: making them, and refusing what does not fit."""

from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from quafl.codec import hashing
from quafl.codec.formats import DTYPES
from quafl.codec.seams import DecodeError, Packet
from quafl.core.messages import Model
from quafl.core.pieces import is_finite, placed


def make_packet(
    x: Model,
    codec: int,
    bits: int,
    unit: int,
    symbols: Tensor,
    *,
    checks: Tensor | None = None,
    scales: Tensor | None = None,
    side: Tensor | None = None,
    seed: Tensor | None = None,
    exact: Tensor | None = None,
    checked: bool = False,
) -> Packet:
    """A first message about x; what a codec does not use stays empty. The exact values must be finite, which may have
    been `checked` together with other numbers."""
    rows = x.shape[:-1]
    check_dtype(x.dtype)
    if not checked:
        _refuse_infinite(exact, "full-precision values have NaN or infinite ones among them")
    nothing = torch.empty((*rows, 0), device=x.device)
    return Packet(
        codec=codec,
        bits=bits,
        dim=x.shape[-1],
        unit=unit,
        symbols=symbols,
        checks=nothing.to(torch.int32) if checks is None else checks,
        scales=nothing if scales is None else scales,
        side=torch.zeros(rows, device=x.device) if side is None else side,
        seed=torch.zeros(rows, dtype=torch.int64, device=x.device) if seed is None else seed,
        exact=nothing if exact is None else exact.to(torch.float32),
        dtype=x.dtype,
    )


def check_finite(x: Model, exact: Tensor | None = None) -> None:
    """Numbers that are NaN or Inf are the caller's mistake; they must not reach the wire."""
    if not is_finite(x, exact):
        _refuse_infinite(x, "vector to encode has NaN or infinite coordinates")
        _refuse_infinite(exact, "full-precision values have NaN or infinite ones among them")


def _refuse_infinite(numbers: Tensor | None, what: str) -> None:
    if not is_finite(numbers):
        raise ValueError(f"the {what}; did training diverge?")


def check_dtype(dtype: torch.dtype, whose: str = "the vector to encode") -> None:
    """A message says which of a few dtypes its vector has."""
    if dtype not in DTYPES:
        names = ", ".join(map(str, DTYPES))
        raise ValueError(f"{whose} has dtype {dtype}, messages carry {names}; convert it first, as with .float()")


def check_fits(packet: Packet, codec: int, key: Model) -> None:
    """A packet of another codec or another model is the peer's."""
    if (packet.codec, packet.kind) != (codec, "base"):
        raise DecodeError(
            f"packet is a {packet.kind} of codec {packet.codec}, expected a base of codec {codec}; "
            f"do both ends use the same settings?"
        )
    if packet.dim != key.shape[-1]:
        raise DecodeError(f"packet has d={packet.dim}, the key d={key.shape[-1]}; do both ends use the same model?")


def broadcast(one: torch.Size, other: torch.Size) -> torch.Size:
    """torch.broadcast_shapes, whose first call imports a computer algebra system, which takes a client a second, and
    whose others take longer than the launch of a kernel."""
    if one == other:
        return one
    sizes = [(a, b) for a, b in zip_longest(reversed(one), reversed(other), fillvalue=1)]
    if any(a != b and 1 not in (a, b) for a, b in sizes):
        raise ValueError(f"shapes {tuple(one)} and {tuple(other)} do not fit to each other")
    return torch.Size(b if a == 1 else a for a, b in reversed(sizes))


class Share(NamedTuple):
    """Whence some of a message's rows draw what they would have drawn beside all others."""

    generator: torch.Generator
    total: int  # of rows
    mine: Tensor  # their places among all


def draw_seeds(x: Model, rng: torch.Generator | Share) -> Tensor:
    """A fresh seed for each row."""
    if isinstance(rng, Share):
        return placed(torch.randint(2**63 - 1, (rng.total,), generator=rng.generator)[rng.mine], x.device)
    return placed(torch.randint(2**63 - 1, x.shape[:-1], generator=rng, device=rng.device), x.device)


def draw_words(x: Model, rng: torch.Generator) -> Tensor:
    """32 random bits for each coordinate, the same on every device."""
    blocks = -(-x.shape[-1] // hashing.BLOCK)
    words = hashing.words(draw_seeds(x, rng), torch.arange(blocks, device=x.device))
    return words.flatten(-2)[..., : x.shape[-1]]
