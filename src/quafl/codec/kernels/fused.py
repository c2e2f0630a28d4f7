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
from inspect import signature
from typing import Any

import torch
import triton
from torch import Tensor

from quafl.codec import gaussian
from quafl.codec.hashing import BLOCK
from quafl.codec.kernels import NOWHERE, Decoded, Encoded, Rounded, Transferred
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
    def _inner(tile, LAYOUT: tl.constexpr):
        return tile

    @jit
    def _middle(COUNT: tl.constexpr, LAYOUT: tl.constexpr):
        return tl.arange(0, COUNT)

    @jit
    def _arrange(tile, LAYOUT: tl.constexpr):
        return tile

    @jit
    def _along(lanes, LAYOUT: tl.constexpr):
        return lanes

    @jit
    def _floor(t):
        below = tl.floor(t)
        return below, below.to(tl.int32)

    @jit
    def _nearest_integer(place):
        return (place >= 0.5).to(tl.int32) + (place >= 1.5).to(tl.int32)

else:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as tl

    jit = gluon.jit

    @jit
    def _index(COUNT: tl.constexpr, AXIS: tl.constexpr, LAYOUT: tl.constexpr):
        return tl.arange(0, COUNT, layout=tl.SliceLayout(AXIS, LAYOUT))

    @jit
    def _inner(tile, LAYOUT: tl.constexpr):
        return tl.convert_layout(tile, tl.SliceLayout(1, LAYOUT))

    @jit
    def _middle(COUNT: tl.constexpr, LAYOUT: tl.constexpr):
        return tl.arange(0, COUNT, layout=tl.SliceLayout(0, tl.SliceLayout(2, LAYOUT)))

    @jit
    def _arrange(tile, LAYOUT: tl.constexpr):
        return tl.convert_layout(tile, LAYOUT)

    @jit
    def _along(lanes, LAYOUT: tl.constexpr):
        return tl.convert_layout(lanes, tl.SliceLayout(0, LAYOUT))

    @jit
    def _sum_down(x, y):
        """Rounded towards −∞."""
        return tl.inline_asm_elementwise("add.rm.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1)

    @jit
    def _floor(t):
        """⌊t⌋ as a float and as an integer, for |t| < 2^22: what is left of t + 1.5·2^23, in whose last place 1 is."""
        sum = _sum_down(t, 12582912.0)
        return sum - 12582912.0, sum.to(tl.int32, bitcast=True) - 0x4B400000

    @jit
    def _nearest_integer(place):
        """⌊place + ½⌋, from 0 to 2."""
        return _floor(_sum_down(place, 0.5))[1]


def _kernel(function: Any) -> Any:
    """Compiled once for its constants: whatever the sizes, and wherever a tensor's numbers begin."""
    values = [name for name, one in signature(function).parameters.items() if one.annotation is not tl.constexpr]
    return jit(do_not_specialize=values, do_not_specialize_on_alignment=values)(function)


_GOLDEN = tl.constexpr(0x9E3779B9)
_LIMIT_BITS = tl.constexpr(0x4A000000)  # LIMIT = 2^21 as the bits of a float
_NOWHERE = tl.constexpr(NOWHERE)


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
    near, far = (row & 31).to(tl.uint32), (row & 992).to(tl.uint32)  # of one, a thread has the same in all its rows
    return _stir(_mix(block.to(tl.uint32) * _GOLDEN + key) + near * _GOLDEN + far * _GOLDEN)


@jit
def _flip(value, word):
    """The value with the sign that the hash gives it."""
    return (value.to(tl.uint32, bitcast=True) ^ (word & 0x80000000)).to(tl.float32, bitcast=True)


@jit
def _plus_dither(value, word, SIGN: tl.constexpr):
    """value ± u; 2^31 u is a whole number, whose product is exact."""
    return tl.fma((word & 0x7FFFFF80).to(tl.int32).to(tl.float32), SIGN * 4.656612873077393e-10, value)


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
def _inside(row, block, blocks, whole, rest, LARGE: tl.constexpr):
    """Whether the rows of a block lie inside the vector: ⌊d/W⌋ of all, and one more of the first d mod W. Of a large
    vector, all but the last 32 do, and need not be compared."""
    rows = tl.where(block < blocks, whole + (block < rest).to(tl.int32), 0)
    return tl.where(row < 992, rows > 0, row < rows) if LARGE else row < rows


@jit
def _at(base, row, blocks):
    """Where the words of a row begin: one product and sum, in octets."""
    pitch = (blocks * 4).to(tl.uint32).to(tl.int64)
    near, far = (row & 31).to(tl.uint32).to(tl.int64), (row & -32).to(tl.uint32).to(tl.int64)
    return (base.to(tl.pointer_type(tl.int8)) + near * pitch + far * pitch).to(base.dtype)


@_kernel
def _encode(
    x_ptr,
    seed_ptr,
    reciprocal_ptr,
    symbols_ptr,
    checks_ptr,
    widest_ptr,
    dim,
    blocks,
    whole,
    rest,
    BITS: tl.constexpr,
    LARGE: tl.constexpr,
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
    x = tl.load(_at(column, row, blocks), mask=_inside(row, block, blocks, whole, rest, LARGE), other=0.0)
    z = _rotate(_flip(x, _hash(seed, block, row)), FINE, LANES)

    row = _index(1024, 1, FINE)[:, None]
    lane = first + _index(LANES, 0, FINE)
    t = z * (0.03125 * tl.load(reciprocal_ptr + message))
    tl.atomic_max(widest_ptr + message, tl.max(tl.max(tl.abs(t).to(tl.int32, bitcast=True), axis=0), axis=0))
    word = _hash(seed, lane[None, :], row)  # again: that takes less than to keep all of them
    k = _point(t, word)
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
        tl.store(_at(out + block, row, blocks), packed, mask=block < blocks)
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
            tl.store(_at(out + block, group * BITS + i, blocks), packed, mask=block < blocks)


@jit
def _symbols(
    words,
    first,
    blocks,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    FINE: tl.constexpr,
    UNPACKED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The symbols of a tile, not yet cut to their bits."""
    if 32 % BITS == 0:  # a thread's rows have its words to themselves
        block = first + _index(LANES, 0, WORDS)[None, :]
        place = _at(words + block, _index(32 * BITS, 1, WORDS)[:, None], blocks)
        packed = _inner(tl.load(place, mask=block < blocks, other=0), UNPACKED)
        shift = (_middle(32 // BITS, UNPACKED) * BITS)[None, :, None]
        symbol = packed.to(tl.uint32, bitcast=True)[:, None, :] >> shift.to(tl.uint32)
        return _arrange(tl.reshape(symbol, (1024, LANES)), FINE)
    else:
        block = first + _index(LANES, 0, FINE)[None, :]
        row = _index(1024, 1, FINE)[:, None]
        start = (row % 32) * BITS
        place = _at(words + block, (row // 32) * BITS + start // 32, blocks)
        had = 32 - start % 32
        low = tl.load(place, mask=block < blocks, other=0).to(tl.uint32, bitcast=True)
        high = tl.load(place + blocks, mask=(block < blocks) & (had < BITS), other=0).to(tl.uint32, bitcast=True)
        return (low >> (start % 32).to(tl.uint32)) | (high << (had % 32).to(tl.uint32))


@jit
def _point(t, word):
    """The lattice point of t: ⌊t⌋ + [frac(t) + u ≥ 1]."""
    below, k = _floor(t)
    return k + _floor(_plus_dither(t - below, word, 1))[1]


@jit
def _middle_of(t, word):
    """The point nearest to a key at t, which lies at ⌊t⌋ + place − ½."""
    below, k = _floor(t)
    return k + _nearest_integer(_plus_dither(t - below, word, 1))


@jit
def _center(k, word):
    """What a point stands for, in cells."""
    return _plus_dither(k.to(tl.float32), word, -1) + 0.5


@jit
def _nearest(t, symbol, word, BITS: tl.constexpr):
    """What the points stand for that are nearest to the key, and their part of the checksum."""
    first = _middle_of(t, word) - (1 << BITS) // 2
    k = first + ((symbol.to(tl.int32, bitcast=True) - first) & ((1 << BITS) - 1))
    return _center(k, word), (word | 1).to(tl.int32, bitcast=True) * (k >> BITS)


@_kernel
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
    whole,
    rest,
    message_step,
    key_step,
    BITS: tl.constexpr,
    LARGE: tl.constexpr,
    LANES: tl.constexpr,
    COARSE: tl.constexpr,
    FINE: tl.constexpr,
    UNPACKED: tl.constexpr,
    WORDS: tl.constexpr,
):
    number = tl.program_id(1).to(tl.int64)
    message = number * message_step
    first = tl.program_id(0).to(tl.int64) * LANES
    seed = tl.load(seed_ptr + message).to(tl.uint64)
    row = _index(1024, 1, COARSE)[:, None]
    block = first + _index(LANES, 0, COARSE)[None, :]
    column = key_ptr + number * key_step * dim + block
    key = tl.load(_at(column, row, blocks), mask=_inside(row, block, blocks, whole, rest, LARGE), other=0.0)
    lane = first + _index(LANES, 0, FINE)
    symbol = _symbols(symbols_ptr + message * (32 * BITS) * blocks, first, blocks, BITS, LANES, FINE, UNPACKED, WORDS)
    expected = tl.load(checks_ptr + message * blocks + lane, mask=lane < blocks, other=0)
    word = _hash(seed, block, row)
    t = _rotate(_flip(key, word), FINE, LANES) * (0.03125 * tl.load(reciprocal_ptr + message))
    size = tl.max(tl.abs(t).to(tl.int32, bitcast=True), axis=0)
    t, check = _nearest(t, symbol, _arrange(word, FINE), BITS)
    check = tl.sum(check, axis=0)
    failed = (check != expected) | (size >= _LIMIT_BITS)
    tl.store(failed_ptr + number * blocks + lane, failed.to(tl.int8), mask=lane < blocks)
    z = _rotate_back(t, COARSE, LANES) * (tl.load(side_ptr + message) * 0.03125)
    inside = _inside(row, block, blocks, whole, rest, LARGE)
    tl.store(_at(out_ptr + number * dim + block, row, blocks), _flip(z, word), mask=inside)


@_kernel
def _transfer(
    x_ptr,
    seed_ptr,
    side_ptr,
    reciprocal_ptr,
    key_ptr,
    out_ptr,
    apart_ptr,
    dim,
    blocks,
    whole,
    rest,
    vector_step,
    key_step,
    LARGE: tl.constexpr,
    LANES: tl.constexpr,
    COARSE: tl.constexpr,
    FINE: tl.constexpr,
):
    number = tl.program_id(1).to(tl.int64)
    vector = number * vector_step
    first = tl.program_id(0).to(tl.int64) * LANES
    seed = tl.load(seed_ptr + vector).to(tl.uint64)
    row = _index(1024, 1, COARSE)[:, None]
    block = first + _index(LANES, 0, COARSE)[None, :]
    inside = _inside(row, block, blocks, whole, rest, LARGE)
    coarse = _hash(seed, block, row)
    word = _arrange(coarse, FINE)
    scale = 0.03125 * tl.load(reciprocal_ptr + vector)
    x = tl.load(_at(x_ptr + vector * dim + block, row, blocks), mask=inside, other=0.0)
    k = _point(_rotate(_flip(x, coarse), FINE, LANES) * scale, word)
    key = tl.load(_at(key_ptr + number * key_step * dim + block, row, blocks), mask=inside, other=0.0)
    t = _rotate(_flip(key, coarse), FINE, LANES) * scale
    off = k - _middle_of(t, word)
    off = tl.where(tl.abs(t).to(tl.int32, bitcast=True) < _LIMIT_BITS, off ^ (off >> 31), _NOWHERE)
    lane = first + _index(LANES, 0, FINE)
    tl.store(apart_ptr + number * blocks + lane, tl.max(off, axis=0), mask=lane < blocks)
    if number == vector:  # who hears the same gets the same
        z = _rotate_back(_center(k, word), COARSE, LANES) * (tl.load(side_ptr + vector) * 0.03125)
        tl.store(_at(out_ptr + number * dim + block, row, blocks), _flip(z, coarse), mask=inside)


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


@_kernel
def _encode_difference(
    x_ptr,
    seed_ptr,
    levels_ptr,
    symbols_ptr,
    energy_ptr,
    match_ptr,
    dim,
    blocks,
    whole,
    rest,
    BITS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    SPREAD: tl.constexpr,
    LARGE: tl.constexpr,
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
    x = tl.load(_at(column, row, blocks), mask=_inside(row, block, blocks, whole, rest, LARGE), other=0.0)
    part = x * x
    for stage in tl.static_range(5):
        part = _halve(part, 1024 >> stage, LANES)
    part = _arrange(part, SPREAD)
    for stage in tl.static_range(4):
        part = _halve(part, 32 >> stage, LANES)
    energy = _along(tl.sum(part, axis=0), FINE)
    z = _rotate(_flip(x, _hash(seed, block, row)), FINE, LANES)

    row = _index(1024, 1, FINE)[:, None]
    lane = first + _index(LANES, 0, FINE)
    tl.store(energy_ptr + message * blocks + lane, energy, mask=lane < blocks)
    t = tl.abs(z) * (_inverse_root(energy * 0.0009765625) * 0.03125)[None, :]
    place = t * (t * (t * (t * D + C) + B) + A)
    place = tl.where(place < (1 << (BITS - 1)) - 1, place, (1 << (BITS - 1)) - 1.0)
    sign = (z.to(tl.uint32, bitcast=True) >> (32 - BITS)) & (1 << (BITS - 1))
    symbol = place.to(tl.int32).to(tl.uint32, bitcast=True) | sign
    match = z * tl.load(levels_ptr + symbol.to(tl.int32))
    match = tl.reshape(match, (64, 16, LANES))
    for stage in tl.static_range(4):
        match = tl.sum(tl.reshape(match, (64, 2, 8 >> stage, LANES)), axis=1)
    match = _arrange(tl.reshape(match, (64, LANES)), SPREAD)
    for stage in tl.static_range(5):
        match = _halve(match, 64 >> stage, LANES)
    match = _along(tl.sum(match, axis=0), FINE) * 0.03125
    tl.store(match_ptr + message * blocks + lane, match, mask=lane < blocks)
    _store_symbols(symbols_ptr + message * (32 * BITS) * blocks, symbol, row, first, blocks, BITS, LANES, WORDS, GROUPS)


@_kernel
def _decode_difference(
    symbols_ptr,
    scale_ptr,
    seed_ptr,
    levels_ptr,
    out_ptr,
    dim,
    blocks,
    whole,
    rest,
    BITS: tl.constexpr,
    LARGE: tl.constexpr,
    LANES: tl.constexpr,
    COARSE: tl.constexpr,
    FINE: tl.constexpr,
    UNPACKED: tl.constexpr,
    WORDS: tl.constexpr,
):
    message = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * LANES
    seed = tl.load(seed_ptr + message).to(tl.uint64)
    symbol = _symbols(symbols_ptr + message * (32 * BITS) * blocks, first, blocks, BITS, LANES, FINE, UNPACKED, WORDS)
    z = _rotate_back(tl.load(levels_ptr + (symbol & ((1 << BITS) - 1)).to(tl.int32)), COARSE, LANES)
    row = _index(1024, 1, COARSE)[:, None]
    block = first + _index(LANES, 0, COARSE)[None, :]
    scale = tl.load(scale_ptr + message * blocks + block, mask=block < blocks, other=0.0)
    inside = _inside(row, block, blocks, whole, rest, LARGE)
    z = _flip(z * (scale * 0.03125), _hash(seed, block, row))
    tl.store(_at(out_ptr + message * dim + block, row, blocks), z, mask=inside)


class Triton:
    """On a GPU; or anywhere under TRITON_INTERPRET=1, slowly, for tests."""

    # Blocks in a tile, and warps to work on it: 8 are 32 octets of every row, a sector of memory.
    encode_lanes = decode_lanes = transfer_lanes = difference_encode_lanes = 8
    difference_decode_lanes = 16
    # A thread's: about as few as hold what it computes with, so that several tiles are under way on a multiprocessor.
    encode_registers, decode_registers, transfer_registers = 72, 128, 128
    difference_encode_registers, difference_decode_registers = 64, 56

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
            _encode[(triton.cdiv(blocks, self.encode_lanes), rows)](
                x.contiguous(),
                seed.contiguous(),
                side.reciprocal(),
                symbols,
                checks,
                widest,
                dim,
                blocks,
                *divmod(dim, blocks),
                BITS=bits,
                WORDS=_layout(self.encode_lanes, bits),
                GROUPS=_layout(self.encode_lanes, 1),
                maxnreg=self.encode_registers,
                **_options(self.encode_lanes, blocks),
            )
        return Encoded(symbols, checks, widest.view(torch.float32))

    def decode(self, symbols: Tensor, checks: Tensor, seed: Tensor, side: Tensor, bits: int, key: Tensor) -> Decoded:
        """See Kernel."""
        rows, dim = max(len(symbols), len(key)) if len(symbols) and len(key) else 0, key.shape[-1]
        if block_size(dim) < BLOCK:
            return Oracle().decode(symbols, checks, seed, side, bits, key)
        blocks, apart = block_count(dim), 32 % bits == 0
        vectors = torch.empty((rows, dim), device=key.device)
        failed = torch.empty((rows, blocks), dtype=torch.bool, device=key.device)
        if rows * blocks:
            _decode[(triton.cdiv(blocks, self.decode_lanes), rows)](
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
                *divmod(dim, blocks),
                int(len(symbols) > 1),
                int(len(key) > 1),
                BITS=bits,
                UNPACKED=_unpacked(self.decode_lanes, bits, apart=apart),
                WORDS=_layout(self.decode_lanes, bits),
                maxnreg=self.decode_registers,
                **_options(self.decode_lanes, blocks, apart=apart),
            )
        return Decoded(vectors, failed)

    def transfer(self, x: Tensor, seed: Tensor, side: Tensor, key: Tensor) -> Transferred:
        """See Kernel."""
        rows, dim = max(len(x), len(key)) if len(x) and len(key) else 0, key.shape[-1]
        if block_size(dim) < BLOCK:
            return Oracle().transfer(x, seed, side, key)
        blocks = block_count(dim)
        vectors = torch.empty((min(rows, len(x)), dim), device=key.device)
        apart = torch.empty((rows, blocks), dtype=torch.int32, device=key.device)
        if rows * blocks:
            _transfer[(triton.cdiv(blocks, self.transfer_lanes), rows)](
                x.contiguous(),
                seed.contiguous(),
                side.contiguous(),
                side.reciprocal(),
                key.contiguous(),
                vectors,
                apart,
                dim,
                blocks,
                *divmod(dim, blocks),
                int(len(x) > 1),
                int(len(key) > 1),
                maxnreg=self.transfer_registers,
                **_options(self.transfer_lanes, blocks, apart=True),
            )
        return Transferred(vectors, apart)

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
            _encode_difference[(triton.cdiv(blocks, self.difference_encode_lanes), rows)](
                x.contiguous(),
                seed.contiguous(),
                _levels(bits, x.device),
                symbols,
                energy,
                match,
                dim,
                blocks,
                *divmod(dim, blocks),
                BITS=bits,
                A=a,
                B=b,
                C=c,
                D=d,
                SPREAD=_spread(self.difference_encode_lanes),
                WORDS=_layout(self.difference_encode_lanes, bits),
                GROUPS=_layout(self.difference_encode_lanes, 1),
                maxnreg=self.difference_encode_registers,
                **_options(self.difference_encode_lanes, blocks),
            )
        return Rounded(symbols, energy, match)

    def decode_difference(self, symbols: Tensor, scales: Tensor, seed: Tensor, bits: int, dim: int) -> Tensor:
        """See Kernel."""
        if block_size(dim) < BLOCK:
            return Oracle().decode_difference(symbols, scales, seed, bits, dim)
        rows, blocks = len(symbols), block_count(dim)
        vectors = torch.empty((rows, dim), device=symbols.device)
        if rows * blocks:
            _decode_difference[(triton.cdiv(blocks, self.difference_decode_lanes), rows)](
                symbols.contiguous(),
                scales.contiguous(),
                seed.contiguous(),
                _levels(bits, symbols.device),
                vectors,
                dim,
                blocks,
                *divmod(dim, blocks),
                BITS=bits,
                UNPACKED=_unpacked(self.difference_decode_lanes, bits),
                WORDS=_layout(self.difference_decode_lanes, bits),
                maxnreg=self.difference_decode_registers,
                **_options(self.difference_decode_lanes, blocks),
            )
        return vectors


def _options(lanes: int, blocks: int, *, apart: bool = False) -> dict[str, Any]:
    return {
        "LARGE": blocks >= 32,
        "LANES": lanes,
        "COARSE": _layout(lanes, 1),
        "FINE": _apart(lanes) if apart else _layout(lanes, 32),
        "num_warps": lanes,
        "enable_fp_fusion": False,
    }


@cache
def _levels(bits: int, device: torch.device) -> Tensor:
    """By symbol: those with a sign after those without."""
    size = gaussian.levels(bits)
    return torch.cat((size, -size)).to(device)


@cache
def _layout(lanes: int, neighbours: int) -> Any:
    """A thread has `neighbours` neighbouring rows, and again as many of every further 32·`neighbours` rows."""
    if INTERPRETED:
        return None
    return tl.BlockedLayout([neighbours, 1], [32 // lanes, lanes], [lanes, 1], [1, 0])


@cache
def _spread(lanes: int) -> Any:
    """Of few rows each warp has all, and a thread every (32/lanes)th."""
    if INTERPRETED:
        return None
    return tl.BlockedLayout([1, 1], [32 // lanes, lanes], [1, lanes], [1, 0])


@cache
def _apart(lanes: int) -> Any:
    """Like the fine layout, but a warp has a lane to itself: what is added up over a lane need not wait for others."""
    if INTERPRETED:
        return None
    return tl.BlockedLayout([32, 1], [32, 1], [1, lanes], [0, 1])


@cache
def _unpacked(lanes: int, bits: int, *, apart: bool = False) -> Any:
    """The fine layout, or that with the lanes apart, as "words symbols lanes", where a word has whole symbols."""
    if INTERPRETED or 32 % bits:
        return None
    part = [bits, 32 // bits, 1]
    if apart:
        return tl.BlockedLayout(part, [32, 1, 1], [1, 1, lanes], [1, 0, 2])
    return tl.BlockedLayout(part, [32 // lanes, 1, lanes], [lanes, 1, 1], [2, 1, 0])
