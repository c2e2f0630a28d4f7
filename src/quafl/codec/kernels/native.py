"""The lattice in C, for CPUs: one pass over memory, a workspace of 132 kB."""

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from quafl.codec.hashing import BLOCK
from quafl.codec.kernels import Decoded, Encoded
from quafl.codec.rotation import block_count

INSTRUCTION_SETS = ("plain", "avx2", "avx512")


class Native:
    """lattice.c, compiled when the package was installed. `at_most` names the newest instruction set to use."""

    def __init__(self, at_most: str = INSTRUCTION_SETS[-1]) -> None:
        self._library = _load()
        self._set = int(self._library.quafl_instruction_set(INSTRUCTION_SETS.index(at_most)))

    @property
    def instruction_set(self) -> str:
        """The one in use."""
        return INSTRUCTION_SETS[self._set]

    def encode(self, x: Tensor, seed: Tensor, side: Tensor, bits: int) -> Encoded:
        """See Kernel."""
        rows, dim = x.shape
        blocks = block_count(dim)
        symbols = torch.empty((rows, BLOCK // 32 * bits * blocks), dtype=torch.int32)
        checks = torch.empty((rows, blocks), dtype=torch.int32)
        widest = torch.zeros(rows)
        x, seed, side = x.contiguous(), seed.contiguous(), side.contiguous()
        self._library.quafl_encode(
            self._set,
            rows,
            x.data_ptr(),
            dim,
            blocks,
            seed.data_ptr(),
            side.data_ptr(),
            bits,
            symbols.data_ptr(),
            checks.data_ptr(),
            widest.data_ptr(),
        )
        return Encoded(symbols, checks, widest)

    def decode(self, symbols: Tensor, checks: Tensor, seed: Tensor, side: Tensor, bits: int, key: Tensor) -> Decoded:
        """See Kernel."""
        rows, dim = max(len(symbols), len(key)) if len(symbols) and len(key) else 0, key.shape[-1]
        blocks = block_count(dim)
        vectors = torch.empty((rows, dim))
        failed = torch.empty((rows, blocks), dtype=torch.bool)
        parts = [part.contiguous() for part in (symbols, checks, key, seed, side)]
        symbols, checks, key, seed, side = parts
        self._library.quafl_decode(
            self._set,
            rows,
            int(len(symbols) > 1),
            int(len(key) > 1),
            symbols.data_ptr(),
            checks.data_ptr(),
            key.data_ptr(),
            dim,
            blocks,
            seed.data_ptr(),
            side.data_ptr(),
            bits,
            vectors.data_ptr(),
            failed.data_ptr(),
        )
        return Decoded(vectors, failed)


def _load() -> ctypes.CDLL:
    here = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = here / f"_lattice{suffix}"
        if path.exists():
            library = ctypes.CDLL(str(path))
            break
    else:
        raise ImportError("it was not built, for want of a C compiler when the package was installed")
    number, address, whole = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
    library.quafl_instruction_set.argtypes = [number]
    library.quafl_encode.restype = None
    library.quafl_encode.argtypes = [
        *(number, whole, address, whole, whole, address, address, number, address, address, address)
    ]
    library.quafl_decode.restype = whole
    library.quafl_decode.argtypes = [
        *(number, whole, number, number, address, address, address, whole, whole),
        *(address, address, number, address, address),
    ]
    return library
