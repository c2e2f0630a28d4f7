"""Three implementations of one format: torch (the oracle, any device), C (CPU), Triton (CUDA).

A kernel works on rows: vectors "n d", float32. Each decodes what the others have encoded, and their encoders agree bit
for bit.
"""

import logging
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

LIMIT = 2.0**21  # of |t| = |z|/γ: float32 still resolves the place within a cell; senders keep half of it


class Encoded(NamedTuple):
    """Rows, encoded."""

    symbols: Tensor  # "n words", int32
    checks: Tensor  # "n W", int32
    widest: Tensor  # "n": max |t|; what lies beyond LIMIT was not encoded, and NaN or Inf went in where it is that


class Decoded(NamedTuple):
    """Rows, decoded."""

    vectors: Tensor  # "n d"
    failed: Tensor  # "n W", bool: blocks that are not right


class Kernel(Protocol):
    """What encodes and decodes. In `decode`, messages or keys may be a single row for all."""

    def encode(self, x: Tensor, seed: Tensor, side: Tensor, bits: int) -> Encoded:
        """Lattice points of R x/γ, modulo 2^b."""

    def decode(self, symbols: Tensor, checks: Tensor, seed: Tensor, side: Tensor, bits: int, key: Tensor) -> Decoded:
        """The points nearest to the key."""


def kernel_for(device: torch.device) -> Kernel:
    """The fastest that serves the device here."""
    for name in ("c",) if device.type == "cpu" else ("triton",) if device.type == "cuda" else ():
        kernel = _available(name)
        if kernel is not None:
            return kernel
    return kernel_named("torch")


def kernel_named(name: str) -> Kernel:
    """A particular one: "torch", "c" or "triton"."""
    kernel = _available(name)
    if kernel is None:
        raise ValueError(f"kernel {name!r} is not available here; this installation has {', '.join(available())}")
    return kernel


def available() -> list[str]:
    """The kernels that can be used on this machine."""
    return [name for name in ("torch", "c", "triton") if _available(name) is not None]


@cache
def _available(name: str) -> Kernel | None:
    """A missing kernel is said once; torch serves instead."""
    if name == "torch":
        from quafl.codec.kernels.oracle import Oracle

        return Oracle()
    try:
        if name == "c":
            from quafl.codec.kernels.native import Native

            return Native()
        if name == "triton":
            from quafl.codec.kernels.fused import Triton

            return Triton()
    except (ImportError, OSError) as error:
        logging.getLogger("quafl").warning("the %s kernel is not available (%s); torch serves instead", name, error)
        return None
    raise ValueError(f"kernel is {name!r}, must be 'torch', 'c' or 'triton'")
