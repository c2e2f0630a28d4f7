"""The lattice in Triton, for CUDA: rotation, dither, rounding, packing and checksum in one kernel.

A program has LANES blocks, a tile of 1024 rows. The Hadamard transform takes one bit of the row number after another from
the front of the tile's axes and puts it behind the others, so that R turns a tile "1024 lanes" into "lanes 1024", and R⁻¹
turns it back, without any other movement. Products and sums are never fused: all kernels get the same lattice points.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from quafl.codec.hashing import BLOCK
from quafl.codec.kernels import LIMIT, Decoded, Encoded
from quafl.codec.rotation import block_count

_GOLDEN = tl.constexpr(0x9E3779B9)
_LIMIT = tl.constexpr(LIMIT)


@triton.jit
def _mix(v):
    v = (v ^ (v >> 16)) * 0x7FEB352D
    v = (v ^ (v >> 15)) * 0x846CA68B
    return v ^ (v >> 16)


@triton.jit
def _hash(seed_ptr, message, block, row):
    seed = tl.load(seed_ptr + message).to(tl.uint64)
    key = _mix(seed.to(tl.uint32)) ^ _mix((seed >> 32).to(tl.uint32) + _GOLDEN)
    return _mix(_mix(block.to(tl.uint32) * _GOLDEN + key) + row.to(tl.uint32) * _GOLDEN)


@triton.jit
def _flip(value, word):
    """The value with the sign that the hash gives it."""
    return (value.to(tl.uint32, bitcast=True) ^ (word & 0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _dither(word):
    return (word & 0xFFFFFF).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def _rotate(z, LANES: tl.constexpr):
    """Butterflies from distance 512 to 1: "1024 lanes" → "lanes 1024"."""
    for stage in tl.static_range(10):
        z = tl.reshape(z, (2, 512 >> stage, LANES << stage))
        upper, lower = tl.split(tl.permute(z, (1, 2, 0)))
        z = tl.join(upper + lower, upper - lower)
    return tl.reshape(z, (LANES, 1024))


@triton.jit
def _rotate_back(z, LANES: tl.constexpr):
    """Butterflies from distance 1 to 512: "lanes 1024" → "1024 lanes"."""
    for stage in tl.static_range(10):
        upper, lower = tl.split(tl.reshape(z, (LANES << stage, 512 >> stage, 2)))
        z = tl.permute(tl.join(upper + lower, upper - lower), (2, 0, 1))
    return tl.reshape(z, (1024, LANES))


@triton.jit
def _encode(
    x_ptr, seed_ptr, side_ptr, symbols_ptr, checks_ptr, widest_ptr, dim, blocks, BITS: tl.constexpr, LANES: tl.constexpr
):
    message = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * LANES
    row = tl.arange(0, 1024)[:, None]
    block = first + tl.arange(0, LANES)[None, :]
    place = row * blocks + block
    word = _hash(seed_ptr, message, block, row)
    x = tl.load(x_ptr + message * dim + place, mask=(block < blocks) & (place < dim), other=0.0)
    z = _rotate(_flip(x, word), LANES)

    row = tl.arange(0, 1024)[None, :]
    block = first + tl.arange(0, LANES)[:, None]
    t = z * 0.03125 * (1.0 / tl.load(side_ptr + message))
    size = tl.abs(t)
    widest = tl.max(tl.max((size.to(tl.int32, bitcast=True)), axis=1), axis=0)
    tl.atomic_max(widest_ptr + message, widest)
    t = tl.where(size < _LIMIT, t, 0.0)
    word = _hash(seed_ptr, message, block, row)
    below = tl.floor(t)
    k = below.to(tl.int32) + ((t - below) + _dither(word) >= 1.0).to(tl.int32)
    check = tl.sum((word | 1).to(tl.int32) * (k >> BITS), axis=1)
    lane_block = first + tl.arange(0, LANES)
    tl.store(checks_ptr + message * blocks + lane_block, check, mask=lane_block < blocks)

    symbol = (k & ((1 << BITS) - 1)).to(tl.uint32)
    out = symbols_ptr + message * (32 * BITS) * blocks
    if 32 % BITS == 0:
        each: tl.constexpr = 32 // BITS
        shift = (tl.arange(0, each) * BITS).to(tl.uint32)[None, None, :]
        packed = tl.sum((tl.reshape(symbol, (LANES, 32 * BITS, each)) << shift).to(tl.int32), axis=2)
        place = tl.arange(0, 32 * BITS)[None, :] * blocks + block
        tl.store(out + place, packed, mask=block < blocks)
    else:
        groups = tl.reshape(symbol, (LANES, 32, 32))
        start = (tl.arange(0, 32) * BITS)[None, None, :]
        for i in tl.static_range(BITS):
            left = start - 32 * i
            inside = (left > -BITS) & (left < 32)
            left = tl.where(inside, left, 0)
            part = tl.where(left >= 0, groups << tl.maximum(left, 0), groups >> tl.maximum(-left, 0))
            packed = tl.sum(tl.where(inside, part, 0).to(tl.int32), axis=2)
            place = (tl.arange(0, 32)[None, :] * BITS + i) * blocks + block
            tl.store(out + place, packed, mask=block < blocks)


@triton.jit
def _decode(
    symbols_ptr,
    checks_ptr,
    seed_ptr,
    side_ptr,
    key_ptr,
    out_ptr,
    failed_ptr,
    dim,
    blocks,
    message_step,
    key_step,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
):
    number = tl.program_id(1).to(tl.int64)
    message = number * message_step
    first = tl.program_id(0).to(tl.int64) * LANES
    row = tl.arange(0, 1024)[:, None]
    block = first + tl.arange(0, LANES)[None, :]
    place = row * blocks + block
    inside = (block < blocks) & (place < dim)
    word = _hash(seed_ptr, message, block, row)
    key = tl.load(key_ptr + number * key_step * dim + place, mask=inside, other=0.0)
    z = _rotate(_flip(key, word), LANES)

    row = tl.arange(0, 1024)[None, :]
    block = first + tl.arange(0, LANES)[:, None]
    side = tl.load(side_ptr + message)
    t = z * 0.03125 * (1.0 / side)
    near = tl.abs(t) < _LIMIT
    t = tl.where(near, t, 0.0)
    word = _hash(seed_ptr, message, block, row)
    start = (row % 32) * BITS
    words = symbols_ptr + message * (32 * BITS) * blocks + ((row // 32) * BITS + start // 32) * blocks + block
    symbol = tl.load(words, mask=block < blocks, other=0).to(tl.uint32) >> (start % 32).to(tl.uint32)
    if 32 % BITS != 0:
        spill = 32 - start % 32
        rest = tl.load(words + blocks, mask=(block < blocks) & (spill < BITS), other=0).to(tl.uint32)
        symbol = symbol | tl.where(spill < BITS, rest << (spill % 32).to(tl.uint32), 0)
    below = tl.floor(t)
    offset = (t - below) + _dither(word) - 0.5
    further = offset >= 0.5
    cell = below.to(tl.int32) + further.to(tl.int32)
    offset = offset - further.to(tl.float32)
    ahead = (symbol.to(tl.int32) - cell) & ((1 << BITS) - 1)
    ahead = tl.where(ahead.to(tl.float32) - offset > (1 << BITS) // 2, ahead - (1 << BITS), ahead)
    check = tl.sum((word | 1).to(tl.int32) * ((cell + ahead) >> BITS), axis=1)
    lost = tl.max((near == 0).to(tl.int32), axis=1)
    lane_block = first + tl.arange(0, LANES)
    expected = tl.load(checks_ptr + message * blocks + lane_block, mask=lane_block < blocks, other=0)
    failed = (check != expected) | (lost > 0)
    tl.store(failed_ptr + number * blocks + lane_block, failed.to(tl.int8), mask=lane_block < blocks)

    z = _rotate_back(ahead.to(tl.float32) - offset, LANES)
    row = tl.arange(0, 1024)[:, None]
    block = first + tl.arange(0, LANES)[None, :]
    place = row * blocks + block
    inside = (block < blocks) & (place < dim)
    word = _hash(seed_ptr, message, block, row)
    key = tl.load(key_ptr + number * key_step * dim + place, mask=inside, other=0.0)
    tl.store(out_ptr + number * dim + place, key + _flip(z * (side * 0.03125), word), mask=inside)


class Triton:
    """On a GPU; or anywhere under TRITON_INTERPRET=1, slowly, for tests."""

    encode_tile = (8, 8)  # lanes, warps
    decode_tile = (4, 4)

    def __init__(self) -> None:
        if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
            raise ImportError("there is no CUDA device")

    def encode(self, x: Tensor, seed: Tensor, side: Tensor, bits: int) -> Encoded:
        """See Kernel."""
        rows, dim = x.shape
        blocks = block_count(dim)
        symbols = torch.empty((rows, BLOCK // 32 * bits * blocks), dtype=torch.int32, device=x.device)
        checks = torch.empty((rows, blocks), dtype=torch.int32, device=x.device)
        widest = torch.zeros(rows, dtype=torch.int32, device=x.device)
        lanes, warps = self.encode_tile
        if rows * blocks:
            _encode[(triton.cdiv(blocks, lanes), rows)](
                x.contiguous(),
                seed.contiguous(),
                side.contiguous(),
                symbols,
                checks,
                widest,
                dim,
                blocks,
                BITS=bits,
                LANES=lanes,
                num_warps=warps,
                enable_fp_fusion=False,
            )
        return Encoded(symbols, checks, widest.view(torch.float32))

    def decode(self, symbols: Tensor, checks: Tensor, seed: Tensor, side: Tensor, bits: int, key: Tensor) -> Decoded:
        """See Kernel."""
        rows, dim = max(len(symbols), len(key)) if len(symbols) and len(key) else 0, key.shape[-1]
        blocks = block_count(dim)
        vectors = torch.empty((rows, dim), device=key.device)
        failed = torch.empty((rows, blocks), dtype=torch.bool, device=key.device)
        lanes, warps = self.decode_tile
        if rows * blocks:
            _decode[(triton.cdiv(blocks, lanes), rows)](
                symbols.contiguous(),
                checks.contiguous(),
                seed.contiguous(),
                side.contiguous(),
                key.contiguous(),
                vectors,
                failed.view(torch.int8),
                dim,
                blocks,
                int(len(symbols) > 1),
                int(len(key) > 1),
                BITS=bits,
                LANES=lanes,
                num_warps=warps,
                enable_fp_fusion=False,
            )
        return Decoded(vectors, failed)
