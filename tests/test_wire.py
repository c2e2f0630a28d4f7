"""The wire format: stable, and closed to whatever else arrives. What every codec promises is in test_codecs."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quafl.codec import QSGD, BFloat16, Difference, Identity, Lattice, Packet, TopK, WireError, wire
from quafl.codec.seams import HEADER_BYTES, Codec
from quafl.testing.codecs import same

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_CODECS: dict[str, Codec] = {
    "identity": Identity(),
    "lattice-4": Lattice(bits=4, resolution=2.0**-6),
    "lattice-7": Lattice(bits=7, resolution=2.0**-6),
    "lattice-4-small": Lattice(bits=4, resolution=2.0**-6),
    "difference-4": Difference(bits=4),
    "difference-3-small": Difference(bits=3),
    "bfloat16": BFloat16(),
    "top-k": TopK(share=0.4),
}


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
        "difference": replace(Difference(bits=3).encode(x, rng(), exact=torch.ones(2)), near=77),
        "bfloat16": BFloat16().encode(x, rng(), exact=torch.ones(2)),
        "top-k": replace(TopK(share=0.1).encode(x), near=77),
    }


@pytest.mark.parametrize("name", all_kinds())
def test_every_kind_of_message_survives_its_octets(name: str) -> None:
    packet = all_kinds()[name]
    message = wire.to_bytes(packet)
    assert len(message) == packet.nbytes
    assert same(wire.from_bytes(message), packet)


def test_a_request_for_blocks_that_do_not_exist_is_refused() -> None:
    request = all_kinds()["request"]
    for blocks in [0, 9, 10], [2, 1, 3], [1, 1, 2], [-1, 0, 1]:
        message = wire.to_bytes(replace(request, symbols=torch.tensor(blocks, dtype=torch.int32)))
        with pytest.raises(WireError, match="blocks out of range or out of order"):
            wire.from_bytes(message)


@pytest.mark.parametrize("name", GOLDEN_CODECS)
def test_golden_messages_are_still_written_and_read(name: str) -> None:
    golden = (GOLDEN / f"v2-{name}.bin").read_bytes()
    x = torch.linspace(-1, 2, 100 if "small" in name else 2050) ** 3  # a small block, or three
    codec = GOLDEN_CODECS[name]
    packet = codec.encode(x, rng(42), exact=torch.tensor([2.5]))
    assert wire.to_bytes(packet) == golden
    decoded = codec.decode(wire.from_bytes(golden), key=x)
    assert (decoded - x).norm() < 0.2 * x.norm()


def test_a_batch_is_sent_row_by_row() -> None:
    packet = Lattice(bits=4).encode(torch.randn(3, 100, generator=rng()), rng(), distance=1.0)
    with pytest.raises(ValueError, match="takes one message, this packet has 3; index it first"):
        wire.to_bytes(packet)


def test_twenty_thousand_mutated_messages_are_all_refused() -> None:
    chance = random.Random(1)
    originals = [wire.to_bytes(packet) for packet in all_kinds().values()]
    for number in range(20_000):
        message = bytearray(originals[number % len(originals)])
        kind = number // len(originals) % 5
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


def test_an_honest_error_for_a_message_cut_off() -> None:
    with pytest.raises(WireError, match="message has 10 octets, a header alone has 60; was it cut off"):
        wire.from_bytes(bytes(10))
