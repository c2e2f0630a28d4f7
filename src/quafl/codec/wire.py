"""Packets as octets. The layout, little-endian, is documented in docs/wire.md; everything a peer sends is checked here
before it is used."""

import math
import struct
import zlib

import numpy as np
import torch
from torch import Tensor

from quafl.codec.identity import IDENTITY, Identity
from quafl.codec.lattice import LATTICE
from quafl.codec.rotation import block_count
from quafl.core.seams import HEADER_BYTES, Packet, WireError

MAGIC = b"QAFL"
VERSION = 1
FLOAT32 = 0  # dtype of the vector
BASE = 0  # kind of message: the first about a vector

# magic, version, codec, dtype, bits, bits sent before, kind, flags, exact count, d, seed, side, blocks, payload octets
_HEADER = struct.Struct("<4sBBBBBBHIQQfIQ")
_CRC = struct.Struct("<I")
assert _HEADER.size + _CRC.size == HEADER_BYTES


def to_bytes(packet: Packet) -> bytes:
    """The octets of a single message."""
    if packet.side.dim() != 0:
        raise ValueError(f"to_bytes takes one message, this packet has {len(packet.side)}; index it first")
    payload = b"".join(_octets(part) for part in (packet.symbols, packet.checks, packet.exact))
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        packet.codec,
        FLOAT32,
        packet.bits,
        0,
        BASE,
        0,
        packet.exact.shape[-1],
        packet.dim,
        int(packet.seed),
        float(packet.side),
        packet.checks.shape[-1],
        len(payload),
    )
    return header + _CRC.pack(zlib.crc32(payload, zlib.crc32(header))) + payload


def from_bytes(message: bytes) -> Packet:
    """The packet, or a WireError that says what is wrong with the message."""
    if len(message) < HEADER_BYTES:
        raise WireError(f"message has {len(message)} octets, a header alone has {HEADER_BYTES}; was it cut off?")
    header, payload = message[: _HEADER.size], message[HEADER_BYTES:]
    magic, version, codec, dtype, bits, sent, kind, flags, exact, dim, seed, side, blocks, length = _HEADER.unpack(
        header
    )
    _expect(magic == MAGIC, f"message begins with {magic!r}, expected {MAGIC!r}; is the peer a QuAFL node?")
    _expect(version == VERSION, f"message has format version {version}, this end speaks {VERSION}; upgrade the older")
    (crc,) = _CRC.unpack(message[_HEADER.size : HEADER_BYTES])
    _expect(len(payload) == length, f"message has {len(payload)} octets after its header, which promises {length}")
    _expect(crc == zlib.crc32(payload, zlib.crc32(header)), "message fails its crc32; it was damaged on the way")
    _expect((dtype, sent, kind, flags) == (FLOAT32, 0, BASE, 0), "message uses a dtype, kind or flag unknown here")
    symbols, checks = _layout(codec, bits, dim, side)
    _expect(blocks == checks, f"message has {blocks} block checksums, d={dim} needs {checks}")
    words = symbols + checks + exact
    _expect(
        length == 4 * words,
        f"message has {length} octets of payload, d={dim} at {bits} bits with {exact} exact values needs {4 * words}",
    )
    _expect(seed < 2**63, f"message has seed {seed}, must be below 2^63")
    content = torch.from_numpy(np.frombuffer(payload, dtype="<i4").astype(np.int32))
    exact_values = content[symbols + checks :].view(torch.float32)
    _expect(bool(exact_values.isfinite().all()), "message has NaN or infinite full-precision values")
    if codec == IDENTITY:
        _expect(bool(content[:symbols].view(torch.float32).isfinite().all()), "message has NaN or infinite coordinates")
    return Packet(
        codec=codec,
        bits=bits,
        dim=dim,
        symbols=content[:symbols],
        checks=content[symbols : symbols + checks],
        side=torch.tensor(side, dtype=torch.float32),
        seed=torch.tensor(seed, dtype=torch.int64),
        exact=exact_values,
    )


def _layout(codec: int, bits: int, dim: int, side: float) -> tuple[int, int]:
    """How many words of symbols and of checksums a codec's message has."""
    if codec == IDENTITY:
        _expect(bits == Identity.bits, f"uncompressed message has {bits} bits, must have {Identity.bits}")
        _expect(side == 0, f"uncompressed message has side {side}, must have 0")
        return dim, 0
    _expect(codec == LATTICE, f"message is of codec {codec}, known are {IDENTITY} (identity) and {LATTICE} (lattice)")
    _expect(1 <= bits <= 16, f"lattice message has {bits} bits, must have 1 to 16")
    _expect(0 < side < math.inf, f"lattice message has side {side}, must be positive and finite")
    return 32 * bits * block_count(dim), block_count(dim)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise WireError(otherwise)


def _octets(part: Tensor) -> bytes:
    array = part.cpu().contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
