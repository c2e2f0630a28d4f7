"""QSGD: unbiased, packed, without a key."""

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quafl.codec import QSGD, DecodeError, wire

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
    packet = codec.encode(x, rng(seed))
    message = wire.to_bytes(packet)
    assert len(message) == packet.nbytes
    decoded = codec.decode(wire.from_bytes(message), key=torch.zeros(dim))
    levels = 2 ** (bits - 1) - 1 if norm == "l2" else 2**bits - 1
    for bucket in range(0, dim, 512):
        part = x[bucket : bucket + 512]
        step = (part.norm() if norm == "l2" else part.max() - part.min()) / levels
        assert (decoded[bucket : bucket + 512] - part).abs().max() <= 1.001 * step + 1e-6


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("norm", ["l2", "min-max"])
def test_the_mean_over_seeds_is_unbiased_and_the_noise_as_told(norm: Norm, bits: int) -> None:
    draws, x = 3000, torch.randn(600, generator=rng(7))
    codec = QSGD(bits=bits, norm=norm)
    packet = codec.encode(x.expand(draws, -1), rng())
    error = codec.decode(packet, key=x) - x
    spread = error.std(dim=0)
    spread = spread.maximum(0.2 * spread.mean())  # a level that was hardly ever drawn has no spread to go by
    assert (error.mean(dim=0).abs() < 5 * spread / draws**0.5).all()
    if bits == 8 or norm == "min-max":  # at few l2 levels most places lie below the first, which is not uniform
        assert error.square().sum(dim=-1).mean().item() == pytest.approx(codec.noise(packet).mean().item(), rel=0.25)


def test_buckets_of_zeros_or_of_one_value_are_exact() -> None:
    for norm in "l2", "min-max":
        codec = QSGD(bits=4, norm=norm)
        for value in (0.0,) if norm == "l2" else (0.0, 3.25):
            x = torch.full((700,), value)
            assert torch.equal(codec.decode(codec.encode(x, rng()), key=x), x)


def test_a_message_has_its_bits_and_its_scales() -> None:
    packet = QSGD(bits=3, norm="min-max").encode(torch.randn(2, 5120, generator=rng()), rng())
    assert packet[0].nbytes == 52 + 5120 * 3 // 8 + 10 * 2 * 4
    assert QSGD(bits=3, norm="l2").encode(torch.randn(5120), rng()).nbytes == 52 + 5120 * 3 // 8 + 10 * 4


def test_misuse_is_said() -> None:
    for wrong, message in [({"bits": 1, "norm": "l2"}, "from 2 to 16"), ({"bits": 17}, "from 1 to 16")]:
        with pytest.raises(ValueError, match=message):
            QSGD(**wrong)
    with pytest.raises(ValueError, match="multiple of 32"):
        QSGD(bucket=100)
    with pytest.raises(ValueError, match="NaN"):
        QSGD().encode(torch.tensor([torch.nan]), rng())
    packet = QSGD(bits=4).encode(torch.ones(5), rng())
    with pytest.raises(DecodeError, match="4 bits, expected 8"):
        QSGD(bits=8).decode(packet, key=torch.ones(5))
