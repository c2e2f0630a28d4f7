"""Three implementations of the lattice and of the difference code: torch (the oracle, any device), C (CPU), Triton
(CUDA).

A kernel works on rows: vectors "n d", float32. Each decodes what the others have encoded; encoders agree bit for bit,
and so do decoders.
"""

import logging
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

LIMIT = 2.0**21  # of |t| = |z|/γ: float32 still resolves the place within a cell; senders keep half of it

NOWHERE = 1 << 30  # cells between a point and a key of which float32 cannot tell where it is


class Encoded(NamedTuple):
    """Rows, encoded."""

    symbols: Tensor  # "n words", int32
    checks: Tensor  # "n W", int32
    widest: Tensor  # "n": max |t|; what lies beyond LIMIT was not encoded, and NaN or Inf went in where it is that


class Decoded(NamedTuple):
    """Rows, decoded."""

    vectors: Tensor  # "n d"
    failed: Tensor  # "n W", bool: blocks that are not right


class Transferred(NamedTuple):
    """What receivers have, after all repairs."""

    vectors: Tensor  # "n d", or a single row for all
    apart: (
        Tensor  # "n W", int32: b bits do for the block if this is less than 2^(b−1); cells from the key's point to it
    )


class Rounded(NamedTuple):
    """Rows, rounded to the levels of a Gaussian."""

    symbols: Tensor  # "n words", int32
    energy: Tensor  # "n W": ‖block‖²
    match: Tensor  # "n W": Σ |z|·level


class Kernel(Protocol):
    """What encodes and decodes. In `decode`, messages or keys may be a single row for all."""

    def encode(self, x: Tensor, seed: Tensor, side: Tensor, bits: int) -> Encoded:
        """Lattice points of R x/γ, modulo 2^b."""

    def decode(self, symbols: Tensor, checks: Tensor, seed: Tensor, side: Tensor, bits: int, key: Tensor) -> Decoded:
        """The points nearest to the key, R⁻¹ γ(k − u + ½): the same bits for every key that is near enough."""

    def transfer(self, x: Tensor, seed: Tensor, side: Tensor, key: Tensor) -> Transferred:
        """Where both ends are here: what a message of x decodes to once it is repaired, and how far off the key is. A
        vector, with its seed and its side, or a key may be a single row for all."""

    def encode_difference(self, x: Tensor, seed: Tensor, bits: int) -> Rounded:
        """Signs and cells of R x, in units of √(‖block‖²/rows)."""

    def decode_difference(self, symbols: Tensor, scales: Tensor, seed: Tensor, bits: int, dim: int) -> Tensor:
        """R⁻¹ of the levels times the scale of each block, "n d"."""


@cache
def kernel_for(device: torch.device) -> Kernel:
    """The fastest that serves the device here; if that is not the one made for it, one log line says why."""
    name = {"cpu": "c", "cuda": "triton"}.get(device.type, "torch")
    kernel = _load(name)
    if isinstance(kernel, str):
        logging.getLogger("quafl").warning("the %s kernel is not available (%s); torch serves, slower", name, kernel)
        return kernel_named("torch")
    return kernel


def kernel_named(name: str) -> Kernel:
    """A particular one: "torch", "c" or "triton"."""
    kernel = _load(name)
    if isinstance(kernel, str):
        raise ValueError(f"kernel {name!r} is not available here ({kernel}); there are {', '.join(available())}")
    return kernel


def available() -> list[str]:
    """The kernels that can be used on this machine."""
    return [name for name in ("torch", "c", "triton") if not isinstance(_load(name), str)]


@cache
def _load(name: str) -> Kernel | str:
    """The kernel, or why there is none."""
    try:
        if name == "torch":
            from quafl.codec.kernels.oracle import Oracle

            return Oracle()
        if name == "c":
            from quafl.codec.kernels.native import Native

            return Native()
        if name == "triton":
            import triton

            if not hasattr(triton, "knobs"):
                return f"Triton {triton.__version__} is too old; it takes 3.6 or newer"
            from quafl.codec.kernels.fused import Triton

            return Triton()
    except (ImportError, OSError) as error:
        return str(error)
    raise ValueError(f"kernel is {name!r}, must be 'torch', 'c' or 'triton'")
