"""Packets as octets. The layout, little-endian, is documented in docs/wire.md; everything a peer sends is checked here
before it is used: what is the same for all codecs by this file, the rest by the format that `registry` has for the
codec."""

import struct
import zlib

import numpy as np
import torch
from torch import Tensor

from quafl.codec.formats import DTYPES, KINDS, Format, Header, expect
from quafl.codec.packets import check_dtype
from quafl.codec.registry import FORMATS, format_of, names
from quafl.codec.seams import HEADER_BYTES, Packet, WireError
from quafl.core.pieces import is_finite

MAGIC = b"QAFL"
VERSION = 2

# magic, version, codec, dtype, bits, bits sent before, kind, unit, exact, d, seed, side, blocks, near, payload octets
_HEADER = struct.Struct("<4sBBBBBBHIQQfIQQ")
_CRC = struct.Struct("<I")
assert _HEADER.size + _CRC.size == HEADER_BYTES


def to_bytes(packet: Packet) -> bytes:
    """The octets of a single message."""
    return b"".join(to_parts(packet))


def to_parts(packet: Packet) -> list[bytes | memoryview]:
    """The same in pieces, the long ones not copied."""
    if packet.side.dim() != 0:
        raise ValueError(f"to_bytes takes one message, this packet has {packet.side.numel()}; index it first")
    check_dtype(packet.dtype, "packet")
    payload = [_octets(part) for part in (packet.symbols, packet.checks, packet.scales, packet.exact)]
    header = _HEADER.pack(
        *Header(
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
            blocks=format_of(packet).blocks(packet),
            near=packet.near,
            length=sum(part.nbytes for part in payload),
        )
    )
    crc = zlib.crc32(header)
    for part in payload:
        crc = zlib.crc32(part, crc)
    return [header, _CRC.pack(crc), *payload]


def from_bytes(message: bytes | bytearray | memoryview, device: torch.device | str = "cpu") -> Packet:
    """The packet, its tensors on the device, or a WireError that says what is wrong with the message. Where this can be
    written to, a packet on the CPU is not a copy of it."""
    if len(message) < HEADER_BYTES:
        raise WireError(f"message has {len(message)} octets, a header alone has {HEADER_BYTES}; was it cut off?")
    raw, payload = message[: _HEADER.size], memoryview(message)[HEADER_BYTES:]
    head = Header(*_HEADER.unpack(raw))
    expect(head.magic == MAGIC, f"message begins with {head.magic!r}, expected {MAGIC!r}; is the peer a QuAFL node?")
    expect(
        head.version == VERSION,
        f"message has format version {head.version}, this end speaks {VERSION}; upgrade the older",
    )
    expect(
        len(payload) == head.length,
        f"message has {len(payload)} octets after its header, which promises {head.length}; was it cut off?",
    )
    (crc,) = _CRC.unpack(message[_HEADER.size : HEADER_BYTES])
    expect(crc == zlib.crc32(payload, zlib.crc32(raw)), "message fails its crc32; it was damaged on the way")
    found = _format(head)
    layout = found.layout(head)
    words = sum(layout) + head.exact
    expect(
        head.length == 4 * words,
        f"message has {head.length} octets of payload, d={head.dim} at {head.bits} bits with {head.exact} exact values "
        f"needs {4 * words}",
    )
    words_sent = np.frombuffer(payload, dtype="<i4")
    content = torch.from_numpy(words_sent.astype(np.int32, copy=not words_sent.flags.writeable))
    symbols, checks, scales, exact = content.split([*layout, head.exact])
    packet = Packet(
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
        near=head.near,
    )
    for name, values in ("scales", packet.scales), ("full-precision values", packet.exact):
        expect(is_finite(values), f"message has {name} that are NaN or infinite")
    found.check(packet)
    return packet if torch.device(device).type == "cpu" else packet.each(lambda tensor: tensor.to(device))


def _format(head: Header) -> Format:
    """Of a message whose header says nothing that no codec does."""
    found = FORMATS.get(head.codec)
    if found is None:
        raise WireError(f"message is of codec {head.codec}, known are {names()}")
    expect(head.dtype < len(DTYPES), f"message has dtype {head.dtype}, known are 0 to {len(DTYPES) - 1}")
    expect(head.kind < len(KINDS), f"message is of kind {head.kind}, known are {KINDS}")
    expect(head.seed < 2**63, f"message has seed {head.seed}, must be below 2^63")
    expect(head.near < 2**63, f"message is near {head.near}, must be below 2^63")
    expect(head.near == 0 or head.kind == 0, f"{KINDS[head.kind]} is near {head.near}, must be 0")
    expect(head.dim < 2**62, f"message has d={head.dim}, must be below 2^62")
    return found


def _octets(part: Tensor) -> memoryview:
    """Not a copy, where the machine is little-endian."""
    array = part.detach().cpu().contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).view(np.uint8).data
