"""Too far a key: the next bits of the same lattice points, never a guess."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quafl.codec import DecodeError, Lattice, Packet, WireError, answer, decode, encode, wire
from quafl.codec.seams import HEADER_BYTES, Refine, Sender


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sender(codec: Lattice, x: Tensor, log: list[Packet]) -> Refine:
    """A sender that keeps nothing but its vectors; everything passes through octets."""

    def refine(row: int, request: Packet) -> Packet:
        heard = wire.from_bytes(wire.to_bytes(request))
        reply = wire.from_bytes(wire.to_bytes(codec.refine(x[row] if x.dim() > 1 else x, heard)))
        log.extend((request, reply))
        return reply

    return refine


@given(
    dim=st.sampled_from([1, 50, 1023, 1024, 1025, 5000]),
    bits=st.integers(1, 16),
    seed=st.integers(0, 2**32),
    far=st.floats(-2, 9),
)
def test_a_refined_message_decodes_to_the_point_it_stood_for(dim: int, bits: int, seed: int, far: float) -> None:
    """At any distance of the key, the result is what the nearest key would have given."""
    codec = Lattice(bits=bits, resolution=1e-3)
    x = torch.randn(dim, generator=rng(seed))
    packet = codec.encode(x, rng(seed))
    key = x + 10**far * 1e-3 * 2**bits * torch.randn(dim, generator=rng(seed + 1)) / dim**0.5
    decoded = codec.decode(packet, key=key, refine=sender(codec, x, []))
    torch.testing.assert_close(decoded, codec.decode(packet, key=x), atol=1e-5, rtol=1e-5)


def test_only_the_failed_blocks_are_asked_for_and_one_bit_is_enough_when_the_key_is_just_too_far() -> None:
    codec, x = Lattice(bits=4, spread=3.5), torch.randn(200_000, generator=rng())
    key = x + 0.01 * torch.randn(200_000, generator=rng(1))
    packet = codec.encode(x, rng(2), distance=(x - key).norm())
    log: list[Packet] = []
    decoded = codec.decode(packet, key=key, refine=sender(codec, x, log))
    request, reply = log
    share = len(request.symbols) / packet.checks.shape[-1]
    assert 0.1 < share < 0.3  # 1 − P(1024 normals stay within 3.5·16/15 deviations, on average over the dither) = 0.18
    assert (request.bits, request.sent) == (1, 4)
    assert reply.nbytes == len(wire.to_bytes(reply)) == HEADER_BYTES + 4 * len(request.symbols) * 33
    assert ((decoded - x).square().sum() / codec.noise(packet)).item() == pytest.approx(1, abs=0.02)


def test_several_in_a_row_send_only_new_bits_of_blocks_that_still_fail() -> None:
    codec, x = Lattice(bits=4, resolution=1e-3), torch.randn(10 * 1024, generator=rng())
    key = x.clone().view(1024, 10)
    key[:, 3] += 0.02
    key[:, 7] += 50.0
    log: list[Packet] = []
    decoded = codec.decode(codec.encode(x, rng(1)), key=key.flatten(), refine=sender(codec, x, log))
    asked = [(request.sent, request.bits, request.symbols.tolist()) for request in log[::2]]
    assert asked == [(4, 1, [3, 7]), (5, 2, [3, 7]), (7, 4, [7]), (11, 8, [7])]
    assert (decoded - x).abs().max() < 0.01


def test_refinement_adds_no_bias() -> None:
    draws, x = 2000, torch.randn(30, generator=rng())
    codec = Lattice(bits=2, resolution=0.05)
    packet = codec.encode(x.expand(draws, -1), rng(1))
    repairs: list[int] = []
    here = Sender(x.expand(draws, -1), codec, lambda row, *_: repairs.append(row))
    decoded = codec.decode(packet, key=x + 0.3, refine=here)
    assert len(set(repairs)) == draws
    error = decoded - x
    assert (error.mean(dim=0).abs() < 4.5 * error.std(dim=0) / draws**0.5).all()


def test_rows_that_decode_are_left_alone() -> None:
    codec, x = Lattice(bits=4, resolution=1e-3), torch.randn(3, 2000, generator=rng())
    key = x.clone()
    key[1] += 5.0
    packet = codec.encode(x, rng(1))
    rows: list[int] = []
    inner = sender(codec, x, [])

    def refine(row: int, request: Packet) -> Packet:
        rows.append(row)
        return inner(row, request)

    decoded = codec.decode(packet, key=key, refine=refine)
    assert set(rows) == {1}
    torch.testing.assert_close(decoded, x, atol=0.01, rtol=0)


def test_one_message_to_many_is_refined_for_each_that_needs_it() -> None:
    codec, x = Lattice(bits=4, resolution=1e-3), torch.randn(2000, generator=rng())
    packet = codec.encode(x, rng(1))
    for key in x + 5.0, torch.stack((x, x + 5.0, x - 3.0)):
        decoded = codec.decode(packet, key=key, refine=lambda row, request: codec.refine(x, request))
        assert decoded.shape == key.shape
        torch.testing.assert_close(decoded, x.expand_as(key), atol=0.01, rtol=0)


def test_an_answer_to_something_else_is_refused() -> None:
    codec, x = Lattice(bits=4, resolution=1e-3), torch.randn(5000, generator=rng())
    packet = codec.encode(x, rng(1))
    with pytest.raises(DecodeError, match="got something else"):
        codec.decode(packet, key=x + 1, refine=lambda row, request: packet)

    def wrong(row: int, request: Packet) -> Packet:
        reply = codec.refine(x, request)
        return replace(reply, checks=reply.checks + 1)

    with pytest.raises(DecodeError, match="do not decode even from all their bits"):
        codec.decode(packet, key=x + 1, refine=wrong)


def test_a_request_or_refinement_that_lies_about_its_bits_or_blocks_is_refused() -> None:
    codec, x = Lattice(bits=4, resolution=1e-3), torch.randn(5000, generator=rng())
    log: list[Packet] = []
    codec.decode(codec.encode(x, rng(1)), key=x + 0.02, refine=sender(codec, x, log))
    none = torch.empty(0, dtype=torch.int32)
    for packet, kind in zip(log[:2], ("request", "refinement"), strict=True):
        for lie, reason in [
            (replace(packet, sent=0), f"{kind} of bits 0 to 1, must be within 1 to 24"),
            (replace(packet, sent=24), f"{kind} of bits 24 to 25, must be within 1 to 24"),
            (replace(packet, exact=torch.ones(3)), f"{kind} has 3 exact values, must have none"),
            (replace(packet, dim=4096), f"{kind} of 5 blocks, d=4096 has 4"),
            (replace(packet, symbols=none, checks=none), f"{kind} of 0 blocks, d=5000 has 5"),
        ]:
            with pytest.raises(WireError, match=reason):
                wire.from_bytes(wire.to_bytes(lie))


def test_tensors_and_state_dicts_are_refined_over_a_wire() -> None:
    torch.manual_seed(0)
    mine = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40)).state_dict()
    theirs = {name: weight + 1 if weight.is_floating_point() else weight for name, weight in mine.items()}
    message = encode(mine, resolution=1e-3, rng=rng())
    with pytest.raises(DecodeError, match="do not decode"):
        decode(message, key=theirs)
    received = decode(message, key=theirs, refine=lambda request: answer(request, mine))
    assert received.keys() == mine.keys()
    for name, weight in mine.items():
        torch.testing.assert_close(received[name], weight, atol=0.01, rtol=0)
    assert torch.equal(received["1.running_mean"], mine["1.running_mean"])
    with pytest.raises(WireError, match="expected a request"):
        answer(message, mine)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_accepted_and_restored(dtype: torch.dtype) -> None:
    x = torch.randn(3000, generator=rng()).to(dtype)
    for bits in (8, 32):
        received = decode(encode(x, key=x, bits=bits, rng=rng()), key=x)
        assert received.dtype == dtype


@given(
    dim=st.sampled_from([1, 50, 1025, 5000]),
    bits=st.integers(1, 16),
    seed=st.integers(0, 2**32),
    far=st.floats(-2, 5),
    single=st.booleans(),
    kernel=st.sampled_from(["torch", "c"]),
)
def test_a_sender_that_is_here_repairs_all_rows_together_to_the_same_bits_and_octets(
    dim: int, bits: int, seed: int, far: float, single: bool, kernel: str
) -> None:
    codec = Lattice(bits=bits, resolution=1e-3, kernel=kernel)
    x = torch.randn(*(() if single else (4,)), dim, generator=rng(seed))
    packet = codec.encode(x, rng(seed))
    reach = torch.tensor([0.0, 1.0, 10.0, 1e4]).unsqueeze(-1)
    key = x + reach * 10**far * 1e-3 * torch.randn(4, dim, generator=rng(seed + 1))
    wanted, found = [], []

    def apart(row: int, request: Packet) -> Packet:
        reply = codec.refine(x if single else x[row], request)
        wanted.append((row, request.nbytes, reply.nbytes, request.sent))
        return reply

    here = Sender(x, codec, lambda *repair: found.append(repair))
    assert torch.equal(codec.decode(packet, key=key, refine=here), codec.decode(packet, key=key, refine=apart))
    assert sorted(found) == sorted(wanted)
