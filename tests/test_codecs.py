"""The contract of every codec that can travel, and the registry that finds them.

The contract itself is in quafl.testing. A codec is under test when it is in CASES; that none is forgotten is tested
too. What only one codec promises is in its own file: test_codec (the lattice), test_refinement, test_qsgd.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from quafl.codec import (
    QSGD,
    BFloat16,
    DecodeError,
    Difference,
    Header,
    Identity,
    Lattice,
    Layout,
    Packet,
    TopK,
    WireError,
    decode,
    encode,
    register,
    wire,
)
from quafl.codec.formats import expect, expect_plain
from quafl.codec.packets import check_finite, check_fits, make_packet
from quafl.codec.registry import FORMATS, codec_of
from quafl.codec.seams import HEADER_BYTES, Codec, Refine
from quafl.testing import codecs
from quafl.testing.codecs import FIELDS, signed


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# A codec from elsewhere: all that somebody who adds one has to write


@dataclass(frozen=True, slots=True)
class Halves:
    """bfloat16, rounded at random so that the mean is right; two coordinates a word."""

    bits: ClassVar[int] = 16
    keyed: ClassVar[bool] = False
    difference: ClassVar[bool] = False
    whole: ClassVar[bool] = True
    feedback: ClassVar[bool] = False

    def encode(
        self, x: Tensor, rng: torch.Generator, *, distance: Tensor | float | None = None, exact: Tensor | None = None
    ) -> Packet:
        check_finite(x)
        padded = torch.nn.functional.pad(x.to(torch.float32), (0, x.shape[-1] % 2)).view(torch.int32)
        halves = (padded + torch.randint(1 << 16, padded.shape, generator=rng, dtype=torch.int32)) >> 16
        low, high = halves.unflatten(-1, (-1 if x.shape[-1] else 0, 2)).unbind(dim=-1)
        return make_packet(x, HalvesFormat.id, self.bits, 0, (low & 0xFFFF) | (high << 16), exact=exact)

    def refine(self, x: Tensor, request: Packet) -> Packet:
        raise DecodeError("has no next bits")

    def decode(self, packet: Packet, *, key: Tensor, refine: Refine | None = None) -> Tensor:
        check_fits(packet, HalvesFormat.id, key)
        shape = torch.broadcast_shapes((*packet.side.shape, packet.dim), key.shape)
        return self.values(packet).to(packet.dtype).expand(shape)

    def noise(self, packet: Packet) -> Tensor:
        """A sixth of a step squared for each coordinate; a step is 2^−7 of the power of two below it."""
        values = self.values(packet)
        _, exponent = torch.frexp(values)
        return (torch.ldexp(torch.ones_like(values), exponent - 8).square() / 6).sum(dim=-1)

    @staticmethod
    def values(packet: Packet) -> Tensor:
        both = torch.stack((packet.symbols << 16, packet.symbols & -(1 << 16)), dim=-1)
        return both.flatten(-2)[..., : packet.dim].view(torch.float32)


class HalvesFormat:
    id: ClassVar[int] = 200
    name: ClassVar[str] = "halves"

    def layout(self, header: Header) -> Layout:
        expect_plain(header, self.name)
        expect(header.bits == Halves.bits, f"halves message has {header.bits} bits, must have 16")
        expect(header.unit == header.blocks == 0, f"halves message has {header.blocks} blocks of {header.unit}")
        return Layout(symbols=-(-header.dim // 2))

    def blocks(self, packet: Packet) -> int:
        return 0

    def check(self, packet: Packet) -> None:
        expect(bool(Halves.values(packet).isfinite().all()), "message has coordinates that are NaN or infinite")

    def codec(self, packet: Packet) -> Halves:
        return Halves()


register(HalvesFormat())


# What is under test

Lie = tuple[str, int | float | bytes, str]  # a field of the header, a value that is wrong in it, what the error says

EVERYWHERE: list[Lie] = [
    ("magic", b"HTTP", "begins with b'HTTP'"),
    ("version", 9, "format version 9"),
    ("codec", 77, "codec 77"),
    ("dtype", 3, "dtype 3"),
    ("kind", 5, "kind 5"),
    ("exact", 2**31, "with 2147483648 exact values"),
    ("d", 2**60, "d=1152921504606846976"),
    ("d", 2**63, "d=9223372036854775808, must be below 2^62"),
    ("seed", 2**63, "seed 9223372036854775808, must be below 2^63"),
    ("near", 2**63, "near 9223372036854775808, must be below 2^63"),
    ("length", 2**50, "promises 1125899906842624"),
]
PLAIN: list[Lie] = [  # codecs without refinements, side and seed
    ("sent", 3, "3 bits before"),
    ("kind", 1, "kind 1"),
    ("seed", 5, "seed 5"),
    ("side", 0.5, "side 0.5"),
    ("side", float("nan"), "side nan"),
]
UNDIVIDED: list[Lie] = [("unit", 512, "blocks of 512"), ("blocks", 7, "7 blocks"), ("bits", 17, "17 bits, must have")]
BUCKETS: list[Lie] = [
    ("bits", 17, "17 bits, must have"),
    ("unit", 0, "buckets of 0"),
    ("unit", 100, "buckets of 100"),
    ("blocks", 1, "1 buckets"),
]


@dataclass(frozen=True)
class Case:
    make: Callable[[int], Codec]
    widths: Sequence[int]
    lies: Sequence[Lie]
    noise: dict[int, float]  # at these widths the noise is as told, within this share

    @property
    def codec(self) -> Codec:
        return self.make(self.widths[len(self.widths) // 4])  # 32, or few bits

    def encode(self, x: Tensor, seed: int = 0, *, exact: Tensor | None = None) -> Packet:
        return self.codec.encode(x, rng(seed), distance=1.0, exact=exact)


CASES = {
    "identity": Case(lambda bits: Identity(), [32], [*PLAIN, *UNDIVIDED], {32: 0}),
    "lattice": Case(
        lambda bits: Lattice(bits=bits, spread=6.0 if bits > 2 else 5.0),  # of use at that width
        range(2, 17),
        [
            ("bits", 0, "0 bits, must have 1 to 16"),
            ("bits", 17, "17 bits, must have 1 to 16"),
            ("sent", 3, "3 bits went before"),
            ("unit", 512, "blocks of 512"),
            ("side", -1.0, "side -1.0"),
            ("side", 0.0, "side 0.0"),
            ("side", float("nan"), "side nan"),
            ("side", float("inf"), "side inf"),
            ("blocks", 1, "1 block checksums"),
        ],
        {2: 0.05, 4: 0.05, 8: 0.05},
    ),
    "QSGD l2": Case(
        lambda bits: QSGD(bits=bits, norm="l2"),
        range(2, 17),
        [*PLAIN, *BUCKETS, ("bits", 1, "1 bits, must have 2")],
        {2: torch.inf, 4: torch.inf, 8: 0.25},  # at few levels most places lie below the first, which is not uniform
    ),
    "QSGD min-max": Case(
        lambda bits: QSGD(bits=bits, bucket=64),
        range(1, 17),
        [*PLAIN, *BUCKETS, ("bits", 0, "0 bits, must have")],
        {1: 0.25, 2: 0.25, 4: 0.25, 8: 0.25},
    ),
    "QSGD min-max in lattice-sized buckets": Case(
        lambda bits: QSGD(bits=bits, bucket=1024),
        [1, 4, 16],
        [*PLAIN, *BUCKETS, ("bits", 0, "0 bits, must have")],
        {4: 0.25},
    ),
    "difference": Case(
        lambda bits: Difference(bits=bits),
        range(1, 9),
        [
            *(lie for lie in PLAIN if lie[0] != "seed"),
            ("bits", 0, "0 bits, must have 1 to 8"),
            ("bits", 9, "9 bits, must have 1 to 8"),
            ("unit", 512, "blocks of 512"),
            ("blocks", 1, "1 blocks"),
        ],
        {1: 0.1, 2: 0.1, 4: 0.1, 8: 0.1},  # of 600 coordinates; the padding has a little less than its share
    ),
    "bfloat16": Case(lambda bits: BFloat16(), [16], [*PLAIN, *UNDIVIDED], {16: 0.1}),
    "top-k": Case(
        lambda bits: TopK(share=bits / 64),
        [4, 16, 64],
        [
            *PLAIN,
            ("bits", 0, "0 bits, must have 1 to 64"),
            ("unit", 512, "unit of 512"),
            ("blocks", 0, "0 coordinates, must have 1 to"),
            ("blocks", 2**20, "1048576 coordinates"),
        ],
        {64: 0},  # with less it is biased
    ),
    "one from elsewhere": Case(lambda bits: Halves(), [16], [*PLAIN, *UNDIVIDED], {16: 0.1}),
}
every_codec = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def test_every_codec_that_can_travel_is_under_test() -> None:
    assert {case.encode(torch.ones(3)).codec for case in CASES.values()} == set(FORMATS)
    for case in CASES.values():
        assert {field for field, *_ in (*EVERYWHERE, *case.lies)} == set(FIELDS)


# The contract


@every_codec
@pytest.mark.parametrize("check", codecs.CHECKS, ids=lambda check: check.__name__)
def test_every_codec_keeps_the_contract(case: Case, check: Callable[[Codec], None]) -> None:
    check(case.codec)


@every_codec
def test_a_message_of_every_width_comes_back_from_its_octets(case: Case) -> None:
    for bits in case.widths:
        codecs.comes_back_from_its_octets(case.make(bits))


@every_codec
def test_the_mean_over_seeds_is_the_vector_and_the_noise_as_told(case: Case) -> None:
    for bits, share in case.noise.items():
        codecs.is_unbiased(case.make(bits), share)


# What a peer may send


@every_codec
def test_a_lying_header_with_a_good_crc_is_refused_with_its_value(case: Case) -> None:
    message = wire.to_bytes(case.encode(torch.ones(1500), exact=torch.ones(2)))
    for field, value, reason in (*EVERYWHERE, *case.lies):
        lying, (offset, kind) = bytearray(message), FIELDS[field]
        struct.pack_into("<" + kind, lying, offset, value)
        with pytest.raises(WireError) as refusal:
            wire.from_bytes(signed(lying))
        assert reason in str(refusal.value)


@every_codec
def test_a_packet_of_another_codec_or_size_is_refused(case: Case) -> None:
    x = torch.ones(8)
    packet = case.encode(x)
    for other in CASES.values():
        if (wanted := other.encode(x).codec) != packet.codec:
            with pytest.raises(DecodeError, match=f"a base of codec {packet.codec}, expected a base of codec {wanted}"):
                other.codec.decode(packet, key=x)
    with pytest.raises(DecodeError, match="d=8, the key d=9"):
        case.codec.decode(packet, key=torch.ones(9))


# What our caller may give


@every_codec
def test_what_cannot_be_sent_is_a_value_error(case: Case) -> None:
    for bad in torch.nan, torch.inf, -torch.inf:
        with pytest.raises(ValueError, match="vector to encode has NaN or infinite coordinates"):
            case.encode(torch.tensor([1.0, bad]))
        with pytest.raises(ValueError, match="full-precision values have NaN or infinite ones"):
            case.encode(torch.ones(2), exact=torch.tensor([bad]))
    for dtype in torch.float64, torch.int32:
        with pytest.raises(ValueError, match=rf"has dtype {dtype}, messages carry .*; convert it first") as refusal:
            case.encode(torch.ones(2, dtype=dtype))
        assert "torch.float32, torch.float16, torch.bfloat16" in str(refusal.value)
        with pytest.raises(ValueError, match=f"packet has dtype {dtype}, messages carry"):
            wire.to_bytes(replace(case.encode(torch.ones(2)), dtype=dtype))


@pytest.mark.parametrize("bits", [4, 32])
def test_weights_of_a_dtype_that_does_not_travel_are_refused_by_name(bits: int) -> None:
    x = torch.ones(10)
    with pytest.raises(ValueError, match=r"the tensor to encode has dtype torch.float64, .* convert it first"):
        encode(x.double(), key=x, bits=bits)
    with pytest.raises(ValueError, match=r"the tensor to encode has dtype torch.int64"):
        encode(x.long(), key=x, bits=bits)
    with pytest.raises(ValueError, match=r"entry 'b.running_var' has dtype torch.float64"):
        encode({"a": x, "b.running_var": x.double(), "n": torch.tensor(3)}, distance=1.0, bits=bits)
    encode({"a": x, "n": torch.tensor(3)}, distance=1.0, bits=bits)  # integers are not sent


# The registry


@dataclass(frozen=True)
class Renumbered(HalvesFormat):
    id: int  # type: ignore[misc]  # not the class's, as in HalvesFormat


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 200])
def test_an_id_belongs_to_whoever_was_first(taken: int) -> None:
    before = FORMATS[taken]
    with pytest.raises(ValueError, match=f"codec id {taken} of 'halves' is taken by '{before.name}'; choose another"):
        register(Renumbered(taken))
    assert FORMATS[taken] is before


@pytest.mark.parametrize("id", [-1, 4, 127, 256])
def test_ids_that_are_reserved_or_do_not_fit_into_the_header_are_refused(id: int) -> None:
    with pytest.raises(ValueError, match=f"codec id of 'halves' is {id}, must be from 128 to 255"):
        register(Renumbered(id))
    assert id not in FORMATS


def test_a_codec_that_nobody_registered_neither_travels_nor_decodes() -> None:
    packet = replace(Identity().encode(torch.ones(3)), codec=77)
    for use in wire.to_bytes, codec_of:
        with pytest.raises(ValueError, match=r"packet is of codec 77, known are .*; register its format first"):
            use(packet)
    with pytest.raises(TypeError):
        FORMATS[77] = HalvesFormat()  # type: ignore[index]  # the table is to be read; `register` writes it


def test_a_codec_from_elsewhere_travels_and_decodes_as_ours_do() -> None:
    mine = {"weight": torch.randn(7, 9, generator=rng()), "seen": torch.tensor(3)}
    message = wire.to_bytes(Halves().encode(mine["weight"].flatten(), rng()))
    assert len(message) == HEADER_BYTES + 4 * 32
    assert message[5] == HalvesFormat.id
    received = decode(message, key={"weight": torch.zeros(7, 9), "seen": torch.tensor(5)})
    torch.testing.assert_close(received["weight"], mine["weight"], rtol=2**-7, atol=0)
    assert int(received["seen"]) == 5
