"""Both codes in C, for CPUs: one pass over memory, a workspace of at most 136 kB."""

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from quafl.codec import gaussian
from quafl.codec.kernels import Decoded, Encoded, Rounded, Transferred
from quafl.codec.rotation import block_count, block_size

VERSION = 2  # of what kernels.c's functions take and do
INSTRUCTION_SETS = ("plain", "avx2", "avx512")


class Native:
    """kernels.c, compiled when the package was installed. `at_most` names the newest instruction set to use."""

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
        size, blocks = block_size(dim), block_count(dim)
        symbols = torch.empty((rows, size // 32 * bits * blocks), dtype=torch.int32)
        checks, widest = torch.empty((rows, blocks), dtype=torch.int32), torch.zeros(rows)
        self._call("encode", rows, x, dim, blocks, size, seed, side, bits, symbols, checks, widest)
        return Encoded(symbols, checks, widest)

    def decode(self, symbols: Tensor, checks: Tensor, seed: Tensor, side: Tensor, bits: int, key: Tensor) -> Decoded:
        """See Kernel."""
        rows, dim = max(len(symbols), len(key)) if len(symbols) and len(key) else 0, key.shape[-1]
        size, blocks = block_size(dim), block_count(dim)
        vectors, failed = torch.empty((rows, dim)), torch.empty((rows, blocks), dtype=torch.bool)
        messages, keys = int(len(symbols) > 1), int(len(key) > 1)
        form = dim, blocks, size
        self._call("decode", rows, messages, keys, symbols, checks, key, *form, seed, side, bits, vectors, failed)
        return Decoded(vectors, failed)

    def transfer(self, x: Tensor, seed: Tensor, side: Tensor, key: Tensor) -> Transferred:
        """See Kernel."""
        rows, dim = max(len(x), len(key)) if len(x) and len(key) else 0, key.shape[-1]
        form = dim, block_count(dim), block_size(dim)
        vectors, apart = torch.empty((min(rows, len(x)), dim)), torch.empty((rows, form[1]), dtype=torch.int32)
        self._call("transfer", rows, int(len(x) > 1), int(len(key) > 1), x, key, *form, seed, side, vectors, apart)
        return Transferred(vectors, apart)

    def encode_difference(self, x: Tensor, seed: Tensor, bits: int) -> Rounded:
        """See Kernel."""
        rows, dim = x.shape
        size, blocks = block_size(dim), block_count(dim)
        symbols = torch.empty((rows, size // 32 * bits * blocks), dtype=torch.int32)
        energy, match = torch.empty((rows, blocks)), torch.empty((rows, blocks))
        code = bits, gaussian.curve(bits), gaussian.levels(bits)
        self._call("encode_difference", rows, x, dim, blocks, size, seed, *code, symbols, energy, match)
        return Rounded(symbols, energy, match)

    def decode_difference(self, symbols: Tensor, scales: Tensor, seed: Tensor, bits: int, dim: int) -> Tensor:
        """See Kernel."""
        rows, form = len(symbols), (dim, block_count(dim), block_size(dim))
        vectors = torch.empty((rows, dim))
        self._call("decode_difference", rows, symbols, scales, *form, seed, bits, gaussian.levels(bits), vectors)
        return vectors

    def _call(self, name: str, *arguments: int | Tensor) -> None:
        """A function of the library, with the addresses of what tensors hold."""
        held = [one.contiguous() if isinstance(one, Tensor) else one for one in arguments]
        passed = [one.data_ptr() if isinstance(one, Tensor) else one for one in held]
        getattr(self._library, f"quafl_{name}")(self._set, *passed)


def _load() -> ctypes.CDLL:
    here = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = here / f"_kernels{suffix}"
        if path.exists():
            library = ctypes.CDLL(str(path))
            break
    else:
        raise ImportError("it was not built, for want of a C compiler when the package was installed")
    if getattr(library, "quafl_version", int)() != VERSION:
        raise ImportError("it was built from other sources: install the package again")
    number, address, whole = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
    form = whole, whole, number  # d, W, coordinates in a block
    library.quafl_instruction_set.argtypes = [number]
    takes: dict[str, list[type]] = {
        "encode": [whole, address, *form, address, address, number, *3 * (address,)],
        "decode": [whole, number, number, *3 * (address,), *form, address, address, number, address, address],
        "transfer": [whole, number, number, address, address, *form, *4 * (address,)],
        "encode_difference": [whole, address, *form, address, number, *5 * (address,)],
        "decode_difference": [whole, address, address, *form, address, number, address, address],
    }
    for name, types in takes.items():
        function = getattr(library, f"quafl_{name}")
        function.restype, function.argtypes = None, [number, *types]
    return library
