"""Packets as octets. The layout, little-endian, is documented in docs/wire.md; everything a peer sends is checked here
before it is used."""

import math
import struct
import zlib
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quafl.codec.hashing import BLOCK
from quafl.codec.identity import IDENTITY, Identity
from quafl.codec.lattice import LATTICE
from quafl.codec.packets import is_finite
from quafl.codec.qsgd import QSGD_L2, QSGD_MINMAX
from quafl.codec.refinement import FULL
from quafl.codec.rotation import block_count
from quafl.core.seams import HEADER_BYTES, Packet, WireError

MAGIC = b"QAFL"
VERSION = 1
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS: tuple[Literal["base", "request", "refinement"], ...] = ("base", "request", "refinement")
NAMES = {IDENTITY: "identity", LATTICE: "lattice", QSGD_L2: "QSGD l2", QSGD_MINMAX: "QSGD min-max"}

# magic, version, codec, dtype, bits, bits sent before, kind, unit, exact count, d, seed, side, blocks, payload octets
_HEADER = struct.Struct("<4sBBBBBBHIQQfIQ")
_CRC = struct.Struct("<I")
assert _HEADER.size + _CRC.size == HEADER_BYTES


class _Header(NamedTuple):
    magic: bytes
    version: int
    codec: int
    dtype: int
    bits: int
    sent: int
    kind: int
    unit: int
    exact: int
    dim: int
    seed: int
    side: float
    blocks: int
    length: int


class _Layout(NamedTuple):
    """Words of each section of the payload, before the exact values."""

    symbols: int
    checks: int
    scales: int


def to_bytes(packet: Packet) -> bytes:
    """The octets of a single message."""
    return b"".join(to_parts(packet))


def to_parts(packet: Packet) -> list[bytes | memoryview]:
    """The same in pieces, the long ones not copied."""
    if packet.side.dim() != 0:
        raise ValueError(f"to_bytes takes one message, this packet has {packet.side.numel()}; index it first")
    payload = [_octets(part) for part in (packet.symbols, packet.checks, packet.scales, packet.exact)]
    header = _HEADER.pack(
        *_Header(
            magic=MAGIC,
            version=VERSION,
            codec=packet.codec,
            dtype=DTYPES.index(packet.dtype),
            bits=packet.bits,
            sent=packet.sent,
            kind=KINDS.index(packet.kind),
            unit=packet.unit,
            exact=packet.exact.shape[-1],
            dim=packet.dim,
            seed=int(packet.seed),
            side=float(packet.side),
            blocks=_block_count(packet),
            length=sum(part.nbytes for part in payload),
        )
    )
    crc = zlib.crc32(header)
    for part in payload:
        crc = zlib.crc32(part, crc)
    return [header, _CRC.pack(crc), *payload]


def from_bytes(message: bytes | bytearray | memoryview) -> Packet:
    """The packet, or a WireError that says what is wrong with the message. Where this can be written to, the packet is
    not a copy of it."""
    if len(message) < HEADER_BYTES:
        raise WireError(f"message has {len(message)} octets, a header alone has {HEADER_BYTES}; was it cut off?")
    raw, payload = message[: _HEADER.size], memoryview(message)[HEADER_BYTES:]
    head = _Header(*_HEADER.unpack(raw))
    _expect(head.magic == MAGIC, f"message begins with {head.magic!r}, expected {MAGIC!r}; is the peer a QuAFL node?")
    _expect(
        head.version == VERSION,
        f"message has format version {head.version}, this end speaks {VERSION}; upgrade the older",
    )
    _expect(
        len(payload) == head.length,
        f"message has {len(payload)} octets after its header, which promises {head.length}; was it cut off?",
    )
    (crc,) = _CRC.unpack(message[_HEADER.size : HEADER_BYTES])
    _expect(crc == zlib.crc32(payload, zlib.crc32(raw)), "message fails its crc32; it was damaged on the way")
    layout = _check(head)
    words = sum(layout) + head.exact
    _expect(
        head.length == 4 * words,
        f"message has {head.length} octets of payload, d={head.dim} at {head.bits} bits with {head.exact} exact values "
        f"needs {4 * words}",
    )
    words_sent = np.frombuffer(payload, dtype="<i4")
    content = torch.from_numpy(words_sent.astype(np.int32, copy=not words_sent.flags.writeable))
    symbols, checks, scales, exact = content.split([*layout, head.exact])
    for name, values in ("scales", scales), ("full-precision values", exact):
        _expect(_finite(values), f"message has {name} that are NaN or infinite")
    if head.codec == IDENTITY:
        _expect(_finite(symbols), "message has coordinates that are NaN or infinite")
    if KINDS[head.kind] == "request":
        inside = (symbols >= 0) & (symbols < _blocks(head))
        _expect(bool(inside.all() and (symbols.diff() > 0).all()), "request names blocks out of range or out of order")
    return Packet(
        codec=head.codec,
        bits=head.bits,
        dim=head.dim,
        unit=head.unit,
        symbols=symbols,
        checks=checks,
        scales=scales.view(torch.float32),
        side=torch.tensor(head.side, dtype=torch.float32),
        seed=torch.tensor(head.seed, dtype=torch.int64),
        exact=exact.view(torch.float32),
        dtype=DTYPES[head.dtype],
        kind=KINDS[head.kind],
        sent=head.sent,
    )


def _check(head: _Header) -> _Layout:
    """What a header may say, and the payload it then promises."""
    _expect(head.codec in NAMES, f"message is of codec {head.codec}, known are {NAMES}")
    _expect(head.dtype < len(DTYPES), f"message has dtype {head.dtype}, known are 0 to {len(DTYPES) - 1}")
    _expect(head.kind < len(KINDS), f"message is of kind {head.kind}, known are {KINDS}")
    _expect(head.seed < 2**63, f"message has seed {head.seed}, must be below 2^63")
    _expect(head.dim < 2**62, f"message has d={head.dim}, must be below 2^62")
    if head.codec == LATTICE:
        return _check_lattice(head, KINDS[head.kind])
    name = NAMES[head.codec]
    _expect(head.kind == head.sent == 0, f"{name} message has kind {head.kind} and {head.sent} bits before it")
    _expect(head.side == 0, f"{name} message has side {head.side}, must have 0")
    if head.codec == IDENTITY:
        _expect(head.bits == Identity.bits, f"{name} message has {head.bits} bits, must have {Identity.bits}")
        _expect(head.unit == head.blocks == 0, f"{name} message has {head.blocks} blocks of {head.unit}")
        return _Layout(head.dim, 0, 0)
    least, scales = (2, 1) if head.codec == QSGD_L2 else (1, 2)
    _expect(least <= head.bits <= 16, f"{name} message has {head.bits} bits, must have {least} to 16")
    _expect(head.unit > 0 and head.unit % 32 == 0, f"{name} message has buckets of {head.unit}, not a multiple of 32")
    _expect(head.blocks == _blocks(head), f"message has {head.blocks} buckets, d={head.dim} needs {_blocks(head)}")
    return _Layout(head.blocks * head.unit // 32 * head.bits, 0, scales * head.blocks)


def _check_lattice(head: _Header, kind: str) -> _Layout:
    _expect(1 <= head.bits <= 16, f"lattice message has {head.bits} bits, must have 1 to 16")
    _expect(0 < head.side < math.inf, f"lattice message has side {head.side}, must be positive and finite")
    _expect(head.unit == BLOCK, f"lattice message has blocks of {head.unit}, must have {BLOCK}")
    whole, last = _blocks(head), head.sent + head.bits
    if kind == "base":
        _expect(head.sent == 0, f"first message says that {head.sent} bits went before it")
        _expect(head.blocks == whole, f"message has {head.blocks} block checksums, d={head.dim} needs {whole}")
    else:
        _expect(head.sent >= 1 and last <= FULL, f"{kind} of bits {head.sent} to {last}, must be within 1 to {FULL}")
        _expect(head.exact == 0, f"{kind} has {head.exact} exact values, must have none")
        _expect(1 <= head.blocks <= whole, f"{kind} of {head.blocks} blocks, d={head.dim} has {whole}")
    if kind == "request":
        return _Layout(head.blocks, 0, 0)
    return _Layout(BLOCK // 32 * head.bits * head.blocks, head.blocks, 0)


def _blocks(head: _Header) -> int:
    return block_count(head.dim) if head.codec == LATTICE else -(-head.dim // head.unit)


def _block_count(packet: Packet) -> int:
    """Of the blocks that a message is about."""
    if packet.kind == "request":
        return packet.symbols.shape[-1]
    return packet.checks.shape[-1] or (-(-packet.dim // packet.unit) if packet.unit else 0)


def _finite(words: Tensor) -> bool:
    return is_finite(words.view(torch.float32))


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise WireError(otherwise)


def _octets(part: Tensor) -> memoryview:
    """Not a copy, where the machine is little-endian."""
    array = part.detach().cpu().contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).view(np.uint8).data
