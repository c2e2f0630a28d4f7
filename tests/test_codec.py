"""The lattice: near keys decode within a cell; far keys raise; nothing is wrong in silence.

What it has in common with every codec is in test_codecs."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from quafl.codec import QSGD, DecodeError, Difference, Identity, Lattice, Packet, compressed, hashing
from quafl.codec.packing import pack, unpack
from quafl.codec.rotation import block_count, rotate, rotate_back, to_blocks

DIMS = st.sampled_from([0, 1, 2, 31, 1023, 1024, 1025, 3000])
BITS = st.integers(1, 16)
SEEDS = st.integers(0, 2**32)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def direction(dim: int, seed: int) -> Tensor:
    v = torch.randn(dim, generator=rng(seed + 1))
    unit: Tensor = v / v.norm().clamp(min=1e-9)
    return unit


def cells_off(packet: Packet, decoded: Tensor, x: Tensor) -> float:
    """The error of a rotated coordinate, in lattice cells; exact rounding gives at most a half.

    Where the last block is padded, part of each coordinate's error is cut off with the padding: then the root mean
    square over all coordinates, else the largest.
    """
    blocks = block_count(packet.dim)
    if packet.dim % hashing.BLOCK:
        return float((decoded - x).norm() / (blocks * hashing.BLOCK) ** 0.5 / packet.side)
    return float((rotate(to_blocks(decoded - x), signs(packet)).abs() / packet.side).max()) if blocks else 0.0


def signs(packet: Packet) -> Tensor:
    return hashing.sign(hashing.words(packet.seed, torch.arange(block_count(packet.dim))))


@given(dim=DIMS, bits=BITS, seed=SEEDS, share=st.floats(0, 0.999))
def test_decode_of_encode_lies_within_a_cell_when_the_key_is_within_reach(
    dim: int, bits: int, seed: int, share: float
) -> None:
    codec = Lattice(bits=bits, resolution=1e-3)
    x = torch.randn(dim, generator=rng(seed))
    reach = 1e-3 * (2**bits - 1) / 2  # of every rotated coordinate, so the more of the norm
    key = x + share * reach * direction(dim, seed)
    packet = codec.encode(x, rng(seed))
    assert cells_off(packet, codec.decode(packet, key=key), x) < 0.51


@given(dim=DIMS.filter(bool), bits=BITS, seed=SEEDS, far=st.floats(0, 8))
def test_a_key_at_any_distance_decodes_within_a_cell_or_raises(dim: int, bits: int, seed: int, far: float) -> None:
    codec = Lattice(bits=bits, resolution=1e-3)
    x = torch.randn(dim, generator=rng(seed))
    key = x + 10**far * 1e-3 * 2**bits * direction(dim, seed)
    packet = codec.encode(x, rng(seed))
    try:
        decoded = codec.decode(packet, key=key)
    except DecodeError:
        return
    assert cells_off(packet, decoded, x) < 0.6


@given(bits=BITS, seed=SEEDS, wraps=st.integers(1, 5))
def test_one_coordinate_out_of_reach_is_always_noticed(bits: int, seed: int, wraps: int) -> None:
    """Shifted by whole multiples of the modulus, the symbols are the same: only the checksum can tell."""
    codec = Lattice(bits=bits, resolution=2.0**-10)
    packet = codec.encode(torch.zeros(1024), rng(seed))
    shift = torch.zeros(1024, 1)
    shift[seed % 1024] = wraps * 2.0 ** (bits - 10)
    with pytest.raises(DecodeError, match=r"blocks \[0\] of 1"):
        codec.decode(packet, key=rotate_back(shift, signs(packet)).flatten())


@given(dim=DIMS, bits=BITS, seed=SEEDS)
def test_the_result_does_not_depend_on_the_key(dim: int, bits: int, seed: int) -> None:
    codec = Lattice(bits=bits, resolution=1e-3)
    x = torch.randn(dim, generator=rng(seed))
    packet = codec.encode(x, rng(seed))
    reach = 0.9e-3 * (2**bits - 1) / 2
    keys = x, x + reach * direction(dim, seed)
    torch.testing.assert_close(*(codec.decode(packet, key=key) for key in keys), atol=1e-5, rtol=0)


def test_the_side_makes_the_key_reach_so_many_standard_deviations() -> None:
    x = torch.randn(4096, generator=rng())
    packet = Lattice(bits=4, spread=5.0).encode(x, rng(), distance=2.0)
    assert packet.side.item() == pytest.approx(2 * 5.0 * (2.0 / 64) / 15)


def test_a_key_at_the_distance_given_decodes_at_every_width() -> None:
    for bits in range(3, 17):
        x = torch.randn(20, 50_000, generator=rng(bits))
        key = x + 0.01 * torch.randn(50_000, generator=rng())
        packet = Lattice(bits=bits, spread=6.0).encode(x, rng(), distance=(x - key).norm(dim=-1))
        Lattice(bits=bits).decode(packet, key=key)


def test_a_lattice_that_brings_nobody_nearer_says_so() -> None:
    x = torch.randn(5000, generator=rng())
    for codec in Lattice(bits=1), Lattice(bits=2, spread=6.0):
        with pytest.warns(RuntimeWarning, match=r"squared error of .* times the squared distance: .* use more bits"):
            codec.encode(x, rng(), distance=1.0)
    Lattice(bits=2).encode(x, rng(), distance=1.0)


def test_an_outlier_that_spoils_the_rest_is_told_and_a_model_that_stands_still_is_not() -> None:
    x = torch.randn(100_000, generator=rng())
    for still in 0.0, 1e-6, 2.6:
        Lattice(bits=4).encode(x, rng(), distance=still)
    x[7] = 1e8
    with pytest.warns(RuntimeWarning, match=r"largest coordinate is 1e\+08, the usual one 0.67.*send .* apart"):
        Lattice(bits=4).encode(x, rng(), distance=2.6)


def test_distance_zero_gives_a_side_that_float32_can_still_resolve() -> None:
    x = 100 * torch.randn(2000, generator=rng())
    packet = Lattice(bits=4).encode(x, rng(), distance=0.0)
    assert packet.side > 0
    torch.testing.assert_close(Lattice(bits=4).decode(packet, key=x), x, atol=1e-2, rtol=0)
    nothing = torch.zeros(10)
    packet = Lattice(bits=4).encode(nothing, rng(), distance=0.0)
    torch.testing.assert_close(Lattice(bits=4).decode(packet, key=nothing), nothing)


def test_a_side_too_small_for_float32_is_raised() -> None:
    x = torch.randn(3, 3000, generator=rng())
    x[1] *= 1e6
    with pytest.warns(RuntimeWarning, match="on none that is finer"):
        packet = Lattice(bits=8, resolution=1e-4).encode(x, rng())
    assert packet.side.tolist()[::2] == pytest.approx([1e-4, 1e-4])
    assert packet.side[1] > 1e6 * 3 / 2**20
    decoded = Lattice(bits=8).decode(packet, key=x)
    assert ((decoded - x).norm(dim=-1) < 0.35 * packet.side * 3000**0.5).all()


@given(bits=BITS, blocks=st.integers(0, 3), seed=SEEDS)
def test_unpack_is_the_inverse_of_pack(bits: int, blocks: int, seed: int) -> None:
    symbols = torch.randint(2**bits, (2, 1024, blocks), generator=rng(seed), dtype=torch.int32)
    words = pack(symbols, bits)
    assert words.shape == (2, 32 * bits * blocks)
    assert torch.equal(unpack(words, bits, 1024, blocks), symbols)


def test_rotation_is_orthonormal() -> None:
    x = torch.randn(5000, generator=rng(), dtype=torch.float64)
    signs = hashing.sign(hashing.words(torch.tensor(123456789), torch.arange(5)))
    z = rotate(to_blocks(x), signs)
    assert z.norm().item() == pytest.approx(x.norm().item())
    torch.testing.assert_close(rotate_back(z, signs).flatten()[:5000], x)


def test_hash_is_balanced_and_its_uses_are_uncorrelated() -> None:
    words = hashing.words(torch.tensor([5, 2**40 + 5]), torch.arange(64))
    sign, dither = hashing.sign(words), hashing.dither(words)
    count = sign[0].numel()
    assert abs(sign.mean()) < 4 / (2 * count) ** 0.5
    assert abs(dither.mean() - 0.5) < 4 * (1 / 12 / (2 * count)) ** 0.5
    assert abs((sign * (dither - 0.5)).mean()) < 4 * (1 / 12 / (2 * count)) ** 0.5
    assert (words[0] == words[1]).float().mean() < 1e-3  # both halves of the seed count
    assert (words[0, :, :-1] == words[0, :, 1:]).float().mean() < 1e-3


@pytest.mark.parametrize(
    ("distance", "message"),
    [
        (None, "needs a distance"),
        (-1.0, "must be finite and not negative"),
        (torch.nan, "must be finite and not negative"),
    ],
)
def test_a_distance_that_is_none_is_a_value_error(distance: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lattice(bits=4).encode(torch.ones(2), rng(), distance=distance)


def test_a_key_with_nan_is_a_value_error() -> None:
    packet = Lattice(bits=4).encode(torch.ones(2), rng(), distance=1.0)
    with pytest.raises(ValueError, match="key has NaN"):
        Lattice(bits=4).decode(packet, key=torch.tensor([1.0, torch.nan]))


@pytest.mark.parametrize("bits", [0, -1, 17, 32, 4.0, None, "4"])
def test_widths_that_are_no_whole_numbers_from_1_to_16_are_refused(bits: Any) -> None:
    for codec in Lattice, Difference, QSGD:
        with pytest.raises(ValueError, match=f"bits is {bits!r}, must be a whole number, from 1 to"):
            codec(bits=bits)
    if bits != 32:
        with pytest.raises(ValueError, match=f"bits is {bits!r}, must be a whole number"):
            compressed(bits=bits)


@given(dim=DIMS, seed=SEEDS)
def test_identity_loses_nothing(dim: int, seed: int) -> None:
    assume(dim > 0)
    x = torch.randn(3, dim, generator=rng(seed))
    packet = Identity().encode(x)
    assert torch.equal(Identity().decode(packet, key=torch.zeros(dim)), x)
    assert Identity().noise(packet).tolist() == [0, 0, 0]
