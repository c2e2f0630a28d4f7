"""The wire format: exact, stable, and closed to whatever else arrives."""

import random
import struct
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quafl.codec import QSGD, Identity, Lattice, Packet, WireError, wire
from quafl.core.seams import HEADER_BYTES

GOLDEN = Path(__file__).parent / "golden"


COMMON = "codec", "bits", "dim", "unit", "dtype", "kind", "sent"
TENSORS = "symbols", "checks", "scales", "side", "seed", "exact"


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sample(bits: int, dim: int, exact: int, seed: int = 0) -> Packet:
    x, more = torch.randn(dim, generator=rng(seed)), torch.randn(exact, generator=rng(seed + 1))
    if bits == 32:
        return Identity().encode(x, exact=more)
    return Lattice(bits=bits).encode(x, rng(seed), distance=1.0, exact=more)


def all_kinds() -> dict[str, Packet]:
    """A message of every codec and kind, over several blocks."""
    x = torch.randn(5000, generator=rng(1))
    lattice = sample(4, 5000, 2)
    blocks = torch.tensor([0, 2, 3], dtype=torch.int32)
    nothing = lattice.exact[:0]
    request = replace(lattice, kind="request", sent=4, bits=3, symbols=blocks, checks=lattice.checks[:0], exact=nothing)
    return {
        "identity": sample(32, 5000, 2),
        "lattice": lattice,
        "half": Lattice(bits=3).encode(x.half(), rng(), distance=1.0),
        "request": request,
        "refinement": Lattice(bits=4).refine(x, request),
        "l2": QSGD(bits=3, norm="l2").encode(x, rng(), exact=torch.ones(2)),
        "min-max": QSGD(bits=5, norm="min-max", bucket=64).encode(x, rng()),
    }


@pytest.mark.parametrize("name", all_kinds())
def test_every_kind_of_message_survives_its_octets(name: str) -> None:
    packet = all_kinds()[name]
    message = wire.to_bytes(packet)
    assert len(message) == packet.nbytes
    assert same(wire.from_bytes(message), packet)


def same(a: Packet, b: Packet) -> bool:
    common = all(getattr(a, name) == getattr(b, name) for name in COMMON)
    return common and all(
        torch.equal(getattr(a, name), getattr(b, name))
        for name in ("symbols", "checks", "scales", "side", "seed", "exact")
    )


@given(
    bits=st.sampled_from([*range(1, 17), 32]),
    dim=st.sampled_from([0, 1, 1023, 1024, 1025, 2500]),
    exact=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_from_bytes_of_to_bytes_is_the_identity_and_bytes_counted_are_bytes_sent(
    bits: int, dim: int, exact: int, seed: int
) -> None:
    packet = sample(bits, dim, exact, seed)
    message = wire.to_bytes(packet)
    assert len(message) == packet.nbytes
    assert same(wire.from_bytes(message), packet)


def test_a_request_for_blocks_that_do_not_exist_is_refused() -> None:
    request = all_kinds()["request"]
    for blocks in [0, 9, 10], [2, 1, 3], [1, 1, 2], [-1, 0, 1]:
        message = wire.to_bytes(replace(request, symbols=torch.tensor(blocks, dtype=torch.int32)))
        with pytest.raises(WireError, match="blocks out of range or out of order"):
            wire.from_bytes(message)


def test_nothing_is_allocated_for_a_size_that_is_only_promised() -> None:
    """A header that speaks of 2^50 coordinates, with its crc right, is refused without making room for them."""
    message = bytearray(wire.to_bytes(sample(4, 1500, 2)))
    struct.pack_into("<Q", message, 16, 2**50)
    struct.pack_into("<I", message, 36, 2**32 - 1)
    tracemalloc.start()
    with pytest.raises(WireError):
        wire.from_bytes(signed(message))
    assert tracemalloc.get_traced_memory()[1] < 10 * len(message)
    tracemalloc.stop()


@pytest.mark.parametrize("bits", [4, 7, 32])
def test_golden_messages_are_still_written_and_read(bits: int) -> None:
    golden = (GOLDEN / f"v1-{bits}bits.bin").read_bytes()
    x = torch.linspace(-1, 2, 2050) ** 3  # three blocks
    codec = Identity() if bits == 32 else Lattice(bits=bits, resolution=2.0**-6)
    packet = codec.encode(x, rng(42), exact=torch.tensor([2.5]))
    assert wire.to_bytes(packet) == golden
    decoded = codec.decode(wire.from_bytes(golden), key=x)
    torch.testing.assert_close(decoded, x, atol=2.0**-6 * 32 / 2, rtol=0)


def test_a_batch_is_sent_row_by_row() -> None:
    packet = Lattice(bits=4).encode(torch.randn(3, 100, generator=rng()), rng(), distance=1.0)
    with pytest.raises(ValueError, match="takes one message, this packet has 3"):
        wire.to_bytes(packet)
    assert sum(len(wire.to_bytes(packet[i])) for i in range(3)) == packet.nbytes


def test_fourteen_thousand_mutated_messages_are_all_refused() -> None:
    chance = random.Random(1)
    originals = [wire.to_bytes(packet) for packet in all_kinds().values()]
    for number in range(14_000):
        message = bytearray(originals[number % len(originals)])
        kind = number % 5  # 5 kinds of damage, 7 kinds of message
        if kind == 0:
            message = message[: chance.randrange(len(message))]
        elif kind == 1:
            message += chance.randbytes(chance.randrange(1, 9))
        elif kind == 2:
            message[chance.randrange(len(message))] ^= 1 << chance.randrange(8)
        elif kind == 3:
            place = chance.randrange(HEADER_BYTES)
            message[place : place + 4] = bytes(b ^ 0xFF for b in message[place : place + 4])
        else:
            start = chance.randrange(len(message))
            length = min(chance.randrange(1, 40), len(message) - start)
            fresh = chance.randbytes(length)
            if fresh == message[start : start + length]:
                continue
            message[start : start + length] = fresh
        with pytest.raises(WireError):
            wire.from_bytes(bytes(message))


def signed(message: bytearray) -> bytes:
    """The message with the crc that belongs to it."""
    crc_at = HEADER_BYTES - 4
    struct.pack_into("<I", message, crc_at, zlib.crc32(message[HEADER_BYTES:], zlib.crc32(message[:crc_at])))
    return bytes(message)


FIELDS = {  # name: (offset, format, a value that cannot be right, what the error says)
    "magic": (0, "4s", b"HTTP", "begins with b'HTTP'"),
    "version": (4, "B", 9, "format version 9"),
    "codec": (5, "B", 77, "codec 77"),
    "dtype": (6, "B", 3, "dtype 3"),
    "bits": (7, "B", 17, "17 bits"),
    "kind": (9, "B", 5, "kind 5"),
    "exact": (12, "I", 2**31, "octets of payload"),
    "unit": (10, "H", 512, "blocks of 512"),
    "sent": (8, "B", 3, "3 bits went before"),
    "d": (16, "Q", 2**60, "block checksums"),
    "d too large": (16, "Q", 2**63, "below 2\\^62"),
    "seed": (24, "Q", 2**63, "seed"),
    "side": (32, "f", -1.0, "side -1.0"),
    "side nan": (32, "f", float("nan"), "side nan"),
    "side zero": (32, "f", 0.0, "side 0.0"),
    "blocks": (36, "I", 1, "1 block checksums"),
    "length": (40, "Q", 2**50, "promises"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_lying_header_with_a_good_crc_is_refused_with_its_reason(field: str) -> None:
    offset, kind, value, reason = FIELDS[field]
    message = bytearray(wire.to_bytes(sample(4, 1500, 2)))
    struct.pack_into("<" + kind, message, offset, value)
    with pytest.raises(WireError, match=reason):
        wire.from_bytes(signed(message))


def test_values_that_are_not_finite_are_refused() -> None:
    message = bytearray(wire.to_bytes(sample(32, 4, 1)))
    for place in HEADER_BYTES, HEADER_BYTES + 16:
        bad = bytearray(message)
        struct.pack_into("<f", bad, place, float("inf"))
        with pytest.raises(WireError, match="NaN or infinite"):
            wire.from_bytes(signed(bad))


def test_an_honest_error_for_a_message_cut_off() -> None:
    with pytest.raises(WireError, match="message has 10 octets, a header alone has 52; was it cut off"):
        wire.from_bytes(bytes(10))
