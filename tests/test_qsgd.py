"""QSGD: packed, within a level, without a key. What it has in common with every codec is in test_codecs."""

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quafl.codec import QSGD, DecodeError, decode, wire
from quafl.codec.registry import codec_of
from quafl.codec.seams import HEADER_BYTES

Norm = Literal["l2", "min-max"]
NORMS = st.sampled_from(["l2", "min-max"])


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(
    dim=st.sampled_from([0, 1, 511, 512, 513, 2000]), bits=st.integers(2, 16), norm=NORMS, seed=st.integers(0, 2**32)
)
def test_every_coordinate_comes_back_within_a_level_through_octets(dim: int, bits: int, norm: Norm, seed: int) -> None:
    codec = QSGD(bits=bits, norm=norm)
    x = torch.randn(dim, generator=rng(seed))
    decoded = decode(wire.to_bytes(codec.encode(x, rng(seed))), key=torch.zeros(dim))
    levels = 2 ** (bits - 1) - 1 if norm == "l2" else 2**bits - 1
    for bucket in range(0, dim, 512):
        part = x[bucket : bucket + 512]
        step = (part.norm() if norm == "l2" else part.max() - part.min()) / levels
        assert (decoded[bucket : bucket + 512] - part).abs().max() <= 1.001 * step + 1e-6


def test_buckets_of_zeros_or_of_one_value_are_exact() -> None:
    for norm in "l2", "min-max":
        codec = QSGD(bits=4, norm=norm)
        for value in (0.0,) if norm == "l2" else (0.0, 3.25):
            x = torch.full((700,), value)
            assert torch.equal(codec.decode(codec.encode(x, rng()), key=x), x)


@pytest.mark.parametrize("norm", ["l2", "min-max"])
@pytest.mark.parametrize("bucket", [32, 1024, 65504])
def test_a_message_is_decoded_by_its_codec_and_not_by_the_size_of_its_buckets(norm: Norm, bucket: int) -> None:
    """1024 is also what a block of the lattice has."""
    x = torch.randn(3000, generator=rng())
    codec = QSGD(bits=6, norm=norm, bucket=bucket)
    packet = codec.encode(x, rng(1))
    assert codec_of(packet) == codec
    assert torch.equal(decode(wire.to_bytes(packet), key=torch.zeros(3000)), codec.decode(packet, key=x))


def test_a_message_has_its_bits_and_its_scales() -> None:
    packet = QSGD(bits=3, norm="min-max").encode(torch.randn(2, 5120, generator=rng()), rng())
    assert packet[0].nbytes == HEADER_BYTES + 5120 * 3 // 8 + 10 * 2 * 4
    assert QSGD(bits=3, norm="l2").encode(torch.randn(5120), rng()).nbytes == HEADER_BYTES + 5120 * 3 // 8 + 10 * 4


def test_misuse_is_said() -> None:
    with pytest.raises(ValueError, match="bits is 1, must be a whole number, from 2 to 16"):
        QSGD(bits=1, norm="l2")
    with pytest.raises(ValueError, match="bits is 17, must be a whole number, from 1 to 16"):
        QSGD(bits=17)
    with pytest.raises(ValueError, match="multiple of 32"):
        QSGD(bucket=100)
    packet = QSGD(bits=4).encode(torch.ones(5), rng())
    with pytest.raises(DecodeError, match="4 bits, expected 8"):
        QSGD(bits=8).decode(packet, key=torch.ones(5))
