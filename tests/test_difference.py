"""The difference code: as small an error as its bits allow, and never around something else than the sender's."""

import pytest
import torch
from test_codecs import rng

from quafl import Calibrated, QuAFL
from quafl.codec import Codecs, DecodeError, Difference, Lattice, decode, encode, wire
from quafl.codec.coders import coders_for
from quafl.core.quafl import Up

BARS = {4: (0.0100, 4.06), 3: (0.0375, 3.06), 2: (0.14, 2.06), 1: (0.60, 1.06)}  # relative squared error, bits sent


@pytest.mark.parametrize("bits", BARS)
def test_the_error_is_that_of_the_best_quantizer_at_so_many_bits(bits: int) -> None:
    most, width = BARS[bits]
    for x in torch.randn(300_000, generator=rng()), torch.randn(300_000, generator=rng()) ** 3:
        packet = Difference(bits=bits).encode(x, rng(1))
        error = Difference(bits=bits).decode(packet, key=x) - x
        assert float(error.square().sum() / x.square().sum()) <= most
        assert 8 * packet.nbytes / len(x) <= width


def test_the_mean_of_many_is_the_vector() -> None:
    x, draws = torch.randn(1024, generator=rng()), 10_000
    for bits in BARS:
        codec = Difference(bits=bits)
        error = codec.decode(codec.encode(x.expand(draws, -1), rng(bits)), key=x) - x
        off = error.mean(dim=0) / (error.std(dim=0) / draws**0.5)
        assert off.square().mean() < 1.3
        assert off.abs().max() < 4.5  # of 1024


def test_a_coordinate_that_outweighs_its_block_is_off_by_little() -> None:
    x, draws = torch.randn(1024, generator=rng()), 10_000
    x[7] = 16.0  # a fifth of the block's square
    for bits in BARS:
        codec = Difference(bits=bits)
        mean = codec.decode(codec.encode(x.expand(draws, -1), rng(bits)), key=x).mean(dim=0)
        assert abs(float(mean[7]) / 16 - 1) < {1: 0.08, 2: 0.03, 3: 0.01, 4: 0.003}[bits]


def test_zeros_are_zeros_and_what_is_not_finite_is_refused() -> None:
    x = torch.zeros(3000)
    assert torch.equal(Difference().decode(Difference().encode(x, rng()), key=x), x)
    for bad, words in (torch.nan, "NaN or infinite"), (torch.inf, "NaN or infinite"), (1e30, "too large for float32"):
        x[7] = bad
        with pytest.raises(ValueError, match=words):
            Difference().encode(x, rng())
    with pytest.raises(ValueError, match="bits is 9, must be a whole number, from 1 to 8"):
        Difference(bits=9)


def test_a_short_vector_is_a_short_message() -> None:
    for codec in Difference(bits=4), Lattice(bits=4):
        sizes = [codec.encode(torch.ones(dim), rng(), distance=1.0).nbytes for dim in (1, 32, 33, 512, 513)]
        assert sizes == [80, 80, 96, 320, 576]


def test_near_is_named_and_another_one_is_an_error() -> None:
    common = {"weight": torch.randn(2000, generator=rng()), "running_mean": torch.zeros(3)}
    mine = {"weight": common["weight"] + 0.01 * torch.randn(2000, generator=rng(1)), "running_mean": torch.ones(3)}
    message = encode(mine, near=common, rng=rng())
    received = decode(message, near=common)
    moved = mine["weight"] - common["weight"]
    assert float((received["weight"] - mine["weight"]).square().sum() / moved.square().sum()) < 0.012
    assert torch.equal(received["running_mean"], torch.ones(3))
    other = {**common, "weight": common["weight"].clone()}
    other["weight"][5] = torch.nextafter(other["weight"][5], torch.tensor(9.0))
    with pytest.raises(DecodeError, match="difference from something else"):
        decode(message, near=other)
    with pytest.raises(DecodeError, match="difference from something else"):
        decode(message, key=common)
    with pytest.raises(DecodeError, match="sent without near"):
        decode(encode(mine, key=common), near=common)
    for wrong in {}, {"key": common, "near": common}:
        with pytest.raises(ValueError, match="needs a key, or what the sender gave as near"):
            decode(message, **wrong)
    with pytest.raises(ValueError, match="near is what both ends have"):
        encode(mine, near=common, distance=1.0)
    with pytest.raises(ValueError, match="near has 10 coordinates, the weights have 2000"):
        encode(torch.ones(2000), near=torch.ones(10))


def test_an_answer_is_decoded_around_what_it_answers_and_nothing_else() -> None:
    coder = coders_for(QuAFL(), Codecs(up=Difference(bits=4), down=Lattice(bits=4))).up
    heard = QuAFL().records.down(statistics=torch.empty(0), model=torch.randn(3000), slowest=torch.tensor(1.0))
    report = heard.model + 0.01 * torch.randn(3000)
    up = Up(statistics=torch.empty(0), report=report, speed=torch.tensor(1.0))
    parcel = coder.pack(up, rng(), {}, heard=heard, name=77)
    assert wire.from_bytes(wire.to_bytes(parcel.packets[0])).near == 77
    decoded = coder.unpack(parcel, {"report": heard.model}, name=77)
    assert float((decoded.report - report).norm() / (report - heard.model).norm()) < 0.11
    with pytest.raises(DecodeError, match="the report is a difference from 4d, expected 4e"):
        coder.unpack(parcel, {"report": heard.model}, name=78)


def test_a_displacement_is_a_difference_from_nothing() -> None:
    coder = coders_for(Calibrated(), Codecs(up=Difference(bits=4), down=Lattice(bits=4))).up
    assert not coder.has_differences
    one = torch.tensor(1.0)
    up = Calibrated().records.up(statistics=torch.empty(0), residual=torch.randn(3000), share=one, sweeps=one)
    parcel = coder.pack(up, rng(), {}, name=77)
    assert parcel.packets[0].near == 0
    coder.unpack(parcel, {"residual": torch.zeros(3000)}, name=78)


@pytest.mark.parametrize("dim", [40, 5000])
def test_everybody_decodes_the_same_bits_whatever_the_key(dim: int) -> None:
    x, codec = torch.randn(dim, generator=rng()), Lattice(bits=4)
    packet = codec.encode(x, rng(), distance=1.0)
    keys = x + 0.001 * torch.randn(5, dim, generator=rng(1))
    far = x + 0.3 * torch.randn(dim, generator=rng(2))  # which needs repairs
    decoded = codec.decode(packet, key=keys)
    assert all(torch.equal(row, decoded[0]) for row in decoded)
    repaired = codec.decode(packet, key=far, refine=lambda row, request: codec.refine(x, request))
    assert torch.equal(repaired, decoded[0])
