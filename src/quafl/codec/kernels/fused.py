"""Both codes in Triton, for CUDA: rotation, rounding, packing and checksum in one kernel.

A program has LANES blocks side by side: a tile "1024 lanes", 32 of its elements in the registers of a thread. Five
stages of the Hadamard transform are between rows that one thread has when every 32nd row is its own (COARSE), five when
32 neighbouring rows are (FINE), which are also the rows that share packed words; between the two the tile goes once
through shared memory. Layouts are said explicitly, in Gluon, Triton's own lower level; left to itself, the compiler
moves the tile at every stage. Under TRITON_INTERPRET=1 the same code runs as plain Triton, without layouts, on any
machine.

Products and sums are never fused: all kernels get the same symbols. A vector that is a single small block is left to
torch.
"""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from quafl.codec import gaussian
from quafl.codec.hashing import BLOCK
from quafl.codec.kernels import Decoded, Encoded, Rounded
from quafl.codec.kernels.oracle import Oracle
from quafl.codec.rotation import block_count, block_size

INTERPRETED = triton.knobs.runtime.interpret

if INTERPRETED:
    import triton.language as tl

    jit = triton.jit

    @jit
    def _index(COUNT: tl.constexpr, AXIS: tl.constexpr, LAYOUT: tl.constexpr):
        return tl.arange(0, COUNT)

    @jit
    def _inner(COUNT: tl.constexpr, AXIS: tl.constexpr, LAYOUT: tl.constexpr):
        return tl.arange(0, COUNT)

    @jit
    def _middle(COUNT: tl.constexpr, LAYOUT: tl.constexpr):
        return tl.arange(0, COUNT)

    @jit
    def _arrange(tile, LAYOUT: tl.constexpr):
        return tile

    @jit
    def _along(lanes, LAYOUT: tl.constexpr):
        return lanes

else:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as tl

    jit = gluon.jit

    @jit
    def _index(COUNT: tl.constexpr, AXIS: tl.constexpr, LAYOUT: tl.constexpr):
        return tl.arange(0, COUNT, layout=tl.SliceLayout(AXIS, LAYOUT))

    @jit
    def _inner(COUNT: tl.constexpr, AXIS: tl.constexpr, LAYOUT: tl.constexpr):
        return tl.arange(0, COUNT, layout=tl.SliceLayout(AXIS, tl.SliceLayout(1, LAYOUT)))

    @jit
    def _middle(COUNT: tl.constexpr, LAYOUT: tl.constexpr):
        return tl.arange(0, COUNT, layout=tl.SliceLayout(0, tl.SliceLayout(2, LAYOUT)))

    @jit
    def _arrange(tile, LAYOUT: tl.constexpr):
        return tl.convert_layout(tile, LAYOUT)

    @jit
    def _along(lanes, LAYOUT: tl.constexpr):
        return tl.convert_layout(lanes, tl.SliceLayout(0, LAYOUT))


_GOLDEN = tl.constexpr(0x9E3779B9)
_LIMIT_BITS = tl.constexpr(0x4A000000)  # LIMIT = 2^21 as the bits of a float


@jit
def _stir(v):
    v = (v ^ (v >> 16)) * 0x7FEB352D
    return (v ^ (v >> 15)) * 0x846CA68B


@jit
def _mix(v):
    v = _stir(v)
    return v ^ (v >> 16)


@jit
def _hash(seed, block, row):
    key = _mix(seed.to(tl.uint32)) ^ _mix((seed >> 32).to(tl.uint32) + _GOLDEN)
    return _stir(_mix(block.to(tl.uint32) * _GOLDEN + key) + row.to(tl.uint32) * _GOLDEN)


@jit
def _flip(value, word):
    """The value with the sign that the hash gives it."""
    return (value.to(tl.uint32, bitcast=True) ^ (word & 0x80000000)).to(tl.float32, bitcast=True)


@jit
def _dither(word):
    return ((word >> 7) & 0xFFFFFF).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@jit
def _butterfly(z, DISTANCE: tl.constexpr, LANES: tl.constexpr):
    pairs = tl.reshape(z, (512 // DISTANCE, 2, DISTANCE, LANES))
    upper, lower = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
    pairs = tl.permute(tl.join(upper + lower, upper - lower), (0, 3, 1, 2))
    return tl.reshape(pairs, (1024, LANES))


@jit
def _rotate(z, FINE: tl.constexpr, LANES: tl.constexpr):
    """Butterflies from distance 512 to 1, from a coarse tile to a fine one."""
    for stage in tl.static_range(5):
        z = _butterfly(z, 512 >> stage, LANES)
    z = _arrange(z, FINE)
    for stage in tl.static_range(5):
        z = _butterfly(z, 16 >> stage, LANES)
    return _arrange(z, FINE)


@jit
def _rotate_back(z, COARSE: tl.constexpr, LANES: tl.constexpr):
    """Butterflies from distance 1 to 512, from a fine tile to a coarse one."""
    for stage in tl.static_range(5):
        z = _butterfly(z, 1 << stage, LANES)
    z = _arrange(z, COARSE)
    for stage in tl.static_range(5):
        z = _butterfly(z, 32 << stage, LANES)
    return _arrange(z, COARSE)


@jit
def _column(blocks, dim, block):
    """How many rows of a block lie inside the vector: those below (d − w)/W."""
    rows = (dim - block + blocks - 1) // blocks
    return tl.where(block < blocks, rows, 0).to(tl.int32)


@jit
def _offset(row, blocks):
    """row·W, in 64 bits."""
    return row.to(tl.uint32).to(tl.int64) * blocks.to(tl.uint32).to(tl.int64)


@jit(do_not_specialize=["dim", "blocks"])
def _encode(
    x_ptr,
    seed_ptr,
    reciprocal_ptr,
    symbols_ptr,
    checks_ptr,
    widest_ptr,
    dim,
    blocks,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    COARSE: tl.constexpr,
    FINE: tl.constexpr,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    message = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * LANES
    seed = tl.load(seed_ptr + message).to(tl.uint64)
    row = _index(1024, 1, COARSE)[:, None]
    block = first + _index(LANES, 0, COARSE)[None, :]
    column = x_ptr + message * dim + block
    x = tl.load(column + _offset(row, blocks), mask=row < _column(blocks, dim, block), other=0.0)
    word = _hash(seed, block, row)
    z = _rotate(_flip(x, word), FINE, LANES)

    row = _index(1024, 1, FINE)[:, None]
    lane = first + _index(LANES, 0, FINE)
    t = z * 0.03125 * tl.load(reciprocal_ptr + message)
    tl.atomic_max(widest_ptr + message, tl.max(tl.max(tl.abs(t).to(tl.int32, bitcast=True), axis=0), axis=0))
    word = _hash(seed, lane[None, :], row)
    below = tl.floor(t)
    k = below.to(tl.int32) + ((t - below) + _dither(word) >= 1.0).to(tl.int32)
    check = tl.sum((word | 1).to(tl.int32, bitcast=True) * (k >> BITS), axis=0)
    tl.store(checks_ptr + message * blocks + lane, check, mask=lane < blocks)

    symbol = (k & ((1 << BITS) - 1)).to(tl.uint32)
    _store_symbols(symbols_ptr + message * (32 * BITS) * blocks, symbol, row, first, blocks, BITS, LANES, WORDS, GROUPS)


@jit
def _store_symbols(
    out,
    symbol,
    row,
    first,
    blocks,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The symbols of a fine tile, packed."""
    if 32 % BITS == 0:
        part = symbol << ((row * BITS) % 32).to(tl.uint32)
        packed = tl.sum(tl.reshape(part.to(tl.int32, bitcast=True), (32 * BITS, 32 // BITS, LANES)), axis=1)
        packed = _arrange(packed, WORDS)
        block = first + _index(LANES, 0, WORDS)[None, :]
        row = _index(32 * BITS, 1, WORDS)[:, None]
        tl.store(out + block + _offset(row, blocks), packed, mask=block < blocks)
    else:
        block = first + _index(LANES, 0, GROUPS)[None, :]
        group = _index(32, 1, GROUPS)[:, None]
        for i in tl.static_range(BITS):
            left = (row % 32) * BITS - 32 * i
            part = tl.where(
                left >= 0,
                symbol << tl.minimum(tl.maximum(left, 0), 31).to(tl.uint32),
                symbol >> tl.minimum(tl.maximum(-left, 0), 31).to(tl.uint32),
            )
            part = tl.where(left < 32, part, 0).to(tl.int32, bitcast=True)
            packed = _arrange(tl.sum(tl.reshape(part, (32, 32, LANES)), axis=1), GROUPS)
            tl.store(out + block + _offset(group * BITS + i, blocks), packed, mask=block < blocks)


@jit
def _halves(tile, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Of each thread's ROWS neighbouring rows, the first and the second half."""
    return tl.split(tl.permute(tl.reshape(tile, (32, 2, ROWS // 2, LANES)), (0, 2, 3, 1)))


@jit
def _whole(first, second, ROWS: tl.constexpr, LANES: tl.constexpr):
    pairs = tl.permute(tl.join(first, second), (0, 3, 1, 2))
    return tl.reshape(pairs, (32, ROWS, LANES))


@jit
def _symbols(
    words,
    first,
    blocks,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    FINE: tl.constexpr,
    UNPACKED: tl.constexpr,
):
    """The symbols of a tile, not yet cut to their bits."""
    if 32 % BITS == 0:  # a thread's rows have its words to themselves
        block = first + _inner(LANES, 0, UNPACKED)[None, :]
        place = words + block + _offset(_inner(32 * BITS, 1, UNPACKED)[:, None], blocks)
        packed = tl.load(place, mask=block < blocks, other=0)
        shift = (_middle(32 // BITS, UNPACKED) * BITS)[None, :, None]
        symbol = packed.to(tl.uint32, bitcast=True)[:, None, :] >> shift.to(tl.uint32)
        return _arrange(tl.reshape(symbol, (1024, LANES)), FINE)
    else:
        block = first + _index(LANES, 0, FINE)[None, :]
        row = _index(1024, 1, FINE)[:, None]
        start = (row % 32) * BITS
        place = words + block + _offset((row // 32) * BITS + start // 32, blocks)
        had = 32 - start % 32
        low = tl.load(place, mask=block < blocks, other=0).to(tl.uint32, bitcast=True)
        high = tl.load(place + blocks, mask=(block < blocks) & (had < BITS), other=0).to(tl.uint32, bitcast=True)
        return (low >> (start % 32).to(tl.uint32)) | (high << (had % 32).to(tl.uint32))


@jit
def _nearest(t, symbol, seed, block, row, BITS: tl.constexpr):
    """For some rows of a tile: what the points stand for, their part of the checksum, and max |t|."""
    word = _hash(seed, block, row)
    below = tl.floor(t)
    place = (t - below) + _dither(word)  # the key is at below + place − ½
    first = below.to(tl.int32) + (place >= 0.5).to(tl.int32) + (place >= 1.5).to(tl.int32) - (1 << BITS) // 2
    k = first + ((symbol.to(tl.int32, bitcast=True) - first) & ((1 << BITS) - 1))
    check = (word | 1).to(tl.int32, bitcast=True) * (k >> BITS)
    center = (k.to(tl.float32) - _dither(word)) + 0.5
    return center, tl.sum(check, axis=1), tl.max(tl.abs(t).to(tl.int32, bitcast=True), axis=1)


@jit
def _top_halves(tile, ROWS: tl.constexpr, LANES: tl.constexpr):
    """The first and the second half of the rows."""
    return tl.split(tl.permute(tl.reshape(tile, (2, ROWS // 2, LANES)), (1, 2, 0)))


@jit
def _put(out_ptr, z, seed, block, row, dim, blocks):
    """Some rows of a coarse tile, with their signs."""
    place = out_ptr + block + _offset(row, blocks)
    tl.store(place, _flip(z, _hash(seed, block, row)), mask=row < _column(blocks, dim, block))


@jit
def _store_rotated_back(out_ptr, z, seed, first, dim, blocks, zero, LANES: tl.constexpr, COARSE: tl.constexpr):
    """A coarse tile into its places, a quarter of its rows after another."""
    # `zero` is 0, which the compiler does not know: so it computes hashes and addresses again instead of keeping them.
    row = _index(1024, 1, COARSE)[:, None] + tl.zeros_like(z).to(tl.int32) + zero
    block = first + zero + _index(LANES, 0, COARSE)[None, :] + tl.zeros_like(z).to(tl.int64)
    z0, z1 = _top_halves(z, 1024, LANES)
    r0, r1 = _top_halves(row, 1024, LANES)
    b0, b1 = _top_halves(block, 1024, LANES)
    z00, z01 = _top_halves(z0, 512, LANES)
    z10, z11 = _top_halves(z1, 512, LANES)
    r00, r01 = _top_halves(r0, 512, LANES)
    r10, r11 = _top_halves(r1, 512, LANES)
    b00, b01 = _top_halves(b0, 512, LANES)
    _put(out_ptr, z00, seed, b00, r00, dim, blocks)
    _put(out_ptr, z01, seed, b00, r01, dim, blocks)
    _put(out_ptr, z10, seed, b00, r10, dim, blocks)
    _put(out_ptr, z11, seed, b00, r11, dim, blocks)


@jit(do_not_specialize=["dim", "blocks", "message_step", "key_step", "zero"])
def _decode(
    symbols_ptr,
    checks_ptr,
    seed_ptr,
    side_ptr,
    reciprocal_ptr,
    key_ptr,
    out_ptr,
    failed_ptr,
    dim,
    blocks,
    message_step,
    key_step,
    zero,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    COARSE: tl.constexpr,
    FINE: tl.constexpr,
    UNPACKED: tl.constexpr,
):
    number = tl.program_id(1).to(tl.int64)
    message = number * message_step
    first = tl.program_id(0).to(tl.int64) * LANES
    seed = tl.load(seed_ptr + message).to(tl.uint64)
    row = _index(1024, 1, COARSE)[:, None]
    block = first + _index(LANES, 0, COARSE)[None, :]
    column = key_ptr + number * key_step * dim + block
    key = tl.load(column + _offset(row, blocks), mask=row < _column(blocks, dim, block), other=0.0)
    word = _hash(seed, block, row)
    t = _rotate(_flip(key, word), FINE, LANES) * 0.03125 * tl.load(reciprocal_ptr + message)

    # A quarter of a thread's rows after another, to need fewer registers.
    lane = first + _index(LANES, 0, FINE)
    symbol = _symbols(symbols_ptr + message * (32 * BITS) * blocks, first, blocks, BITS, LANES, FINE, UNPACKED)
    block = (lane[None, :] + tl.zeros_like(symbol)).to(tl.uint32)
    row = _index(1024, 1, FINE)[:, None] + tl.zeros_like(symbol).to(tl.int32)
    t0, t1 = _halves(t, 32, LANES)
    s0, s1 = _halves(symbol, 32, LANES)
    b0, b1 = _halves(block, 32, LANES)
    r0, r1 = _halves(row, 32, LANES)
    t00, t01 = _halves(t0, 16, LANES)
    t10, t11 = _halves(t1, 16, LANES)
    s00, s01 = _halves(s0, 16, LANES)
    s10, s11 = _halves(s1, 16, LANES)
    b00, b01 = _halves(b0, 16, LANES)
    r00, r01 = _halves(r0, 16, LANES)
    r10, r11 = _halves(r1, 16, LANES)
    t00, check00, size00 = _nearest(t00, s00, seed, b00, r00, BITS)
    t01, check01, size01 = _nearest(t01, s01, seed, b00, r01, BITS)
    t10, check10, size10 = _nearest(t10, s10, seed, b00, r10, BITS)
    t11, check11, size11 = _nearest(t11, s11, seed, b00, r11, BITS)
    t = _whole(_whole(t00, t01, 16, LANES), _whole(t10, t11, 16, LANES), 32, LANES)
    t = tl.reshape(t, (1024, LANES))
    check = _along(tl.sum(check00 + check01 + check10 + check11, axis=0), FINE)
    size = tl.maximum(tl.maximum(size00, size01), tl.maximum(size10, size11))
    size = _along(tl.max(size, axis=0), FINE)
    expected = tl.load(checks_ptr + message * blocks + lane, mask=lane < blocks, other=0)
    failed = (check != expected) | (size >= _LIMIT_BITS)
    tl.store(failed_ptr + number * blocks + lane, failed.to(tl.int8), mask=lane < blocks)

    z = _rotate_back(t, COARSE, LANES) * (tl.load(side_ptr + message) * 0.03125)
    _store_rotated_back(out_ptr + number * dim, z, seed, first, dim, blocks, zero, LANES, COARSE)


@jit
def _halve(rows, COUNT: tl.constexpr, LANES: tl.constexpr):
    """The first half of "COUNT lanes" added to the second: a sum of two has no order."""
    return tl.sum(tl.reshape(rows, (2, COUNT // 2, LANES)), axis=0)


@jit
def _inverse_root(s):
    guess = (0x5F375A86 - (s.to(tl.int32, bitcast=True) >> 1)).to(tl.float32, bitcast=True)
    half = s * 0.5
    guess = guess * (1.5 - (half * guess) * guess)
    return guess * (1.5 - (half * guess) * guess)


@jit(do_not_specialize=["dim", "blocks"])
def _encode_difference(
    x_ptr,
    seed_ptr,
    levels_ptr,
    symbols_ptr,
    energy_ptr,
    match_ptr,
    dim,
    blocks,
    BITS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    ALL: tl.constexpr,
    LANES: tl.constexpr,
    COARSE: tl.constexpr,
    FINE: tl.constexpr,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    message = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * LANES
    seed = tl.load(seed_ptr + message).to(tl.uint64)
    row = _index(1024, 1, COARSE)[:, None]
    block = first + _index(LANES, 0, COARSE)[None, :]
    column = x_ptr + message * dim + block
    x = tl.load(column + _offset(row, blocks), mask=row < _column(blocks, dim, block), other=0.0)
    part = x * x
    for stage in tl.static_range(5):
        part = _halve(part, 1024 >> stage, LANES)
    part = _arrange(part, ALL)
    for stage in tl.static_range(4):
        part = _halve(part, 32 >> stage, LANES)
    energy = _along(tl.sum(part, axis=0), FINE)
    z = _rotate(_flip(x, _hash(seed, block, row)), FINE, LANES)

    row = _index(1024, 1, FINE)[:, None]
    lane = first + _index(LANES, 0, FINE)
    tl.store(energy_ptr + message * blocks + lane, energy, mask=lane < blocks)
    value = z * 0.03125
    size = tl.abs(value)
    t = size * _inverse_root(energy * 0.0009765625)[None, :]
    place = t * (t * (t * (t * D + C) + B) + A)
    place = tl.where(place > 0, place, 0.0)
    place = tl.where(place < (1 << (BITS - 1)) - 1, place, (1 << (BITS - 1)) - 1.0)
    cell = place.to(tl.int32)
    match = size * tl.load(levels_ptr + cell)
    match = tl.reshape(match, (64, 16, LANES))
    for stage in tl.static_range(4):
        match = tl.sum(tl.reshape(match, (64, 2, 8 >> stage, LANES)), axis=1)
    match = _arrange(tl.reshape(match, (64, LANES)), ALL)
    for stage in tl.static_range(5):
        match = _halve(match, 64 >> stage, LANES)
    match = _along(tl.sum(match, axis=0), FINE)
    tl.store(match_ptr + message * blocks + lane, match, mask=lane < blocks)
    symbol = cell.to(tl.uint32) | ((value.to(tl.uint32, bitcast=True) >> 31) << (BITS - 1))
    _store_symbols(symbols_ptr + message * (32 * BITS) * blocks, symbol, row, first, blocks, BITS, LANES, WORDS, GROUPS)


@jit(do_not_specialize=["dim", "blocks", "zero"])
def _decode_difference(
    symbols_ptr,
    scale_ptr,
    seed_ptr,
    levels_ptr,
    out_ptr,
    dim,
    blocks,
    zero,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    COARSE: tl.constexpr,
    FINE: tl.constexpr,
    UNPACKED: tl.constexpr,
):
    message = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * LANES
    seed = tl.load(seed_ptr + message).to(tl.uint64)
    symbol = _symbols(symbols_ptr + message * (32 * BITS) * blocks, first, blocks, BITS, LANES, FINE, UNPACKED)
    level = tl.load(levels_ptr + (symbol & ((1 << (BITS - 1)) - 1)).to(tl.int32))
    z = _rotate_back(_flip(level, (symbol >> (BITS - 1)) << 31), COARSE, LANES)
    lane = first + _index(LANES, 0, COARSE)
    scale = tl.load(scale_ptr + message * blocks + lane, mask=lane < blocks, other=0.0) * 0.03125
    z = z * scale[None, :]
    _store_rotated_back(out_ptr + message * dim, z, seed, first, dim, blocks, zero, LANES, COARSE)


class Triton:
    """On a GPU; or anywhere under TRITON_INTERPRET=1, slowly, for tests."""

    lanes = 8  # blocks in a tile, and warps to work on it: 32 octets of every row, a sector of memory
    encode_registers, decode_registers = 72, 128  # a thread's; the fastest of those tried on an H200

    def __init__(self) -> None:
        if not INTERPRETED and not torch.cuda.is_available():
            raise ImportError("there is no CUDA device")

    def encode(self, x: Tensor, seed: Tensor, side: Tensor, bits: int) -> Encoded:
        """See Kernel."""
        rows, dim = x.shape
        if block_size(dim) < BLOCK:
            return Oracle().encode(x, seed, side, bits)
        blocks = block_count(dim)
        symbols = torch.empty((rows, BLOCK // 32 * bits * blocks), dtype=torch.int32, device=x.device)
        checks = torch.empty((rows, blocks), dtype=torch.int32, device=x.device)
        widest = torch.zeros(rows, dtype=torch.int32, device=x.device)
        if rows * blocks:
            _encode[(triton.cdiv(blocks, self.lanes), rows)](
                x.contiguous(),
                seed.contiguous(),
                side.reciprocal(),
                symbols,
                checks,
                widest,
                dim,
                blocks,
                BITS=bits,
                WORDS=_layout(self.lanes, bits),
                GROUPS=_layout(self.lanes, 1),
                maxnreg=self.encode_registers,
                **self._options(),
            )
        return Encoded(symbols, checks, widest.view(torch.float32))

    def decode(self, symbols: Tensor, checks: Tensor, seed: Tensor, side: Tensor, bits: int, key: Tensor) -> Decoded:
        """See Kernel."""
        rows, dim = max(len(symbols), len(key)) if len(symbols) and len(key) else 0, key.shape[-1]
        if block_size(dim) < BLOCK:
            return Oracle().decode(symbols, checks, seed, side, bits, key)
        blocks = block_count(dim)
        vectors = torch.empty((rows, dim), device=key.device)
        failed = torch.empty((rows, blocks), dtype=torch.bool, device=key.device)
        if rows * blocks:
            _decode[(triton.cdiv(blocks, self.lanes), rows)](
                symbols.contiguous(),
                checks.contiguous(),
                seed.contiguous(),
                side.contiguous(),
                side.reciprocal(),
                key.contiguous(),
                vectors,
                failed.view(torch.int8),
                dim,
                blocks,
                int(len(symbols) > 1),
                int(len(key) > 1),
                0,
                BITS=bits,
                UNPACKED=_unpacked(self.lanes, bits),
                maxnreg=self.decode_registers,
                **self._options(),
            )
        return Decoded(vectors, failed)

    def encode_difference(self, x: Tensor, seed: Tensor, bits: int) -> Rounded:
        """See Kernel."""
        rows, dim = x.shape
        if block_size(dim) < BLOCK:
            return Oracle().encode_difference(x, seed, bits)
        blocks = block_count(dim)
        symbols = torch.empty((rows, BLOCK // 32 * bits * blocks), dtype=torch.int32, device=x.device)
        energy, match = (torch.empty((rows, blocks), device=x.device) for _ in range(2))
        if rows * blocks:
            a, b, c, d = gaussian.curve(bits).tolist()
            _encode_difference[(triton.cdiv(blocks, self.lanes), rows)](
                x.contiguous(),
                seed.contiguous(),
                _levels(bits, x.device),
                symbols,
                energy,
                match,
                dim,
                blocks,
                BITS=bits,
                A=a,
                B=b,
                C=c,
                D=d,
                ALL=_layout(self.lanes, 64),
                WORDS=_layout(self.lanes, bits),
                GROUPS=_layout(self.lanes, 1),
                maxnreg=self.encode_registers,
                **self._options(),
            )
        return Rounded(symbols, energy, match)

    def decode_difference(self, symbols: Tensor, scales: Tensor, seed: Tensor, bits: int, dim: int) -> Tensor:
        """See Kernel."""
        if block_size(dim) < BLOCK:
            return Oracle().decode_difference(symbols, scales, seed, bits, dim)
        rows, blocks = len(symbols), block_count(dim)
        vectors = torch.empty((rows, dim), device=symbols.device)
        if rows * blocks:
            _decode_difference[(triton.cdiv(blocks, self.lanes), rows)](
                symbols.contiguous(),
                scales.contiguous(),
                seed.contiguous(),
                _levels(bits, symbols.device),
                vectors,
                dim,
                blocks,
                0,
                BITS=bits,
                UNPACKED=_unpacked(self.lanes, bits),
                maxnreg=self.decode_registers,
                **self._options(),
            )
        return vectors

    def _options(self) -> dict[str, Any]:
        return {
            "LANES": self.lanes,
            "COARSE": _layout(self.lanes, 1),
            "FINE": _layout(self.lanes, 32),
            "num_warps": self.lanes,
            "enable_fp_fusion": False,
        }


@cache
def _levels(bits: int, device: torch.device) -> Tensor:
    return gaussian.levels(bits).to(device)


@cache
def _layout(lanes: int, neighbours: int) -> Any:
    """A thread has `neighbours` neighbouring rows, and again as many of every further 32·`neighbours` rows."""
    if INTERPRETED:
        return None
    return tl.BlockedLayout([neighbours, 1], [32 // lanes, lanes], [lanes, 1], [1, 0])


@cache
def _unpacked(lanes: int, bits: int) -> Any:
    """The fine layout as "words symbols lanes", where a word has whole symbols."""
    if INTERPRETED or 32 % bits:
        return None
    return tl.BlockedLayout([bits, 32 // bits, 1], [32 // lanes, 1, lanes], [lanes, 1, 1], [2, 1, 0])
