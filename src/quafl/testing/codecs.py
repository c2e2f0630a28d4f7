"""The contract of every codec that can travel."""

import struct
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from quafl.codec import wire
from quafl.codec.messages import decode
from quafl.codec.seams import HEADER_BYTES, Codec, DecodeError, Packet, WireError
from quafl.testing.claims import claim, refused

SIZES = 0, 1, 31, 1023, 1024, 1025, 5000
DRAWS = 2000
FIELDS = {  # of the header: offset and type
    "magic": (0, "4s"),
    "version": (4, "B"),
    "codec": (5, "B"),
    "dtype": (6, "B"),
    "bits": (7, "B"),
    "sent": (8, "B"),
    "kind": (9, "B"),
    "unit": (10, "H"),
    "exact": (12, "I"),
    "d": (16, "Q"),
    "seed": (24, "Q"),
    "side": (32, "f"),
    "blocks": (36, "I"),
    "near": (40, "Q"),
    "length": (48, "Q"),
}


def check_codec(codec: Codec, *, noise: float | None = 0.25) -> None:
    """That the codec keeps its contract. Its format must be registered (`quafl.codec.register`).

    Args:
      codec: the codec.
      noise: the share by which E‖Q(x) − x‖² may be off from what its `noise` says. None: the codec does not claim to
        be unbiased, as Top-K does not.

    Raises:
      AssertionError: that says what is not kept.
    """
    for check in CHECKS:
        check(codec)
    if noise is not None:
        is_unbiased(codec, noise)


def comes_back_from_its_octets(codec: Codec) -> None:
    """A message of any size: as many octets as are counted, and the same packet and vector from them."""
    for dim in SIZES:
        mine = {"weight": torch.randn(dim, generator=_rng(dim)), "running_mean": torch.randn(dim % 3, generator=_rng())}
        packet = codec.encode(mine["weight"], _rng(codec.bits), distance=1.0, exact=mine["running_mean"])
        message = wire.to_bytes(packet)
        claim(len(message) == packet.nbytes, f"d={dim}: a message has {len(message)} octets, nbytes is {packet.nbytes}")
        claim(same(wire.from_bytes(message), packet), f"d={dim}: the packet read from its octets is another one")
        received = decode(message, key=mine)
        claim(
            torch.equal(received["weight"], codec.decode(packet, key=mine["weight"])),
            f"d={dim}: the format's codec decodes another vector than the codec itself; look at Format.codec",
        )
        claim(
            torch.equal(received["running_mean"], mine["running_mean"]), f"d={dim}: the exact values have not arrived"
        )


def carries_the_dtype(codec: Codec) -> None:
    """Of its vector."""
    for dtype in torch.float32, torch.float16, torch.bfloat16:
        x = torch.randn(100, generator=_rng()).to(dtype)
        packet = wire.from_bytes(wire.to_bytes(_encoded(codec, x)))
        got = codec.decode(packet, key=x).dtype
        claim(got == dtype, f"a vector of {dtype} is decoded as {got}")


def stacks(codec: Codec) -> None:
    """Stacked rows are the messages of single vectors, drawn one after another."""
    x = torch.randn(2, 3, 1500, generator=_rng(4))
    generator, stacked = _rng(), _encoded(codec, x, exact=x[..., :2])
    together = codec.decode(stacked, key=x)
    claim(together.shape == x.shape, f"a stack of shape {tuple(x.shape)} is decoded as {tuple(together.shape)}")
    octets = sum(len(wire.to_bytes(stacked[i][j])) for i in range(2) for j in range(3))
    claim(stacked.nbytes == octets, f"nbytes of a stack is {stacked.nbytes}, its rows have {octets} octets")
    for i in range(2):
        for j in range(3):
            single = codec.encode(x[i, j], generator, distance=1.0, exact=x[i, j, :2])
            claim(same(single, stacked[i][j]), f"row {i}, {j} of a stack is not the message of that vector alone")
            alone = codec.decode(single, key=x[i, j])
            claim(torch.equal(alone, together[i, j]), f"row {i}, {j} of a stack is decoded otherwise than alone")


def serves_many_keys(codec: Codec) -> None:
    """One message, decoded by many receivers at once, each as it would by itself."""
    x = torch.randn(1500, generator=_rng(3))
    keys = x + 0.001 * torch.randn(4, 1500, generator=_rng(4))
    packet = _encoded(codec, x)
    decoded = codec.decode(packet, key=keys)
    claim(decoded.shape == keys.shape, f"with keys of {tuple(keys.shape)} it decodes {tuple(decoded.shape)}")
    for key, one in zip(keys, decoded, strict=True):
        claim(torch.equal(one, codec.decode(packet, key=key)), "among many keys, one decodes otherwise than alone")


def is_unbiased(codec: Codec, share: float = 0.25) -> None:
    """The mean over seeds is the vector, and the noise is as told, within that share."""
    key = torch.randn(600, generator=_rng(7))
    x = key + 0.1 * torch.randn(600, generator=_rng(2))
    packet = codec.encode(x.expand(DRAWS, -1), _rng(), distance=(x - key).norm())
    error = codec.decode(packet, key=key) - x
    spread = error.std(dim=0)
    spread = spread.maximum(0.2 * spread.mean())  # a level that was hardly ever drawn has no spread to go by
    off = error.mean(dim=0).abs() - 5 * spread / DRAWS**0.5
    worst = int(off.argmax())
    claim(
        float(off[worst]) <= 0,
        f"it is biased: over {DRAWS} seeds, coordinate {worst} is {float(error.mean(dim=0)[worst]):.2g} off in the "
        f"mean, with a spread of {float(spread[worst]):.2g}",
    )
    real, told = error.square().sum(dim=-1).mean().item(), codec.noise(packet).mean().item()
    claim(abs(real - told) <= share * told, f"E‖Q(x) − x‖² is {real:.4g}, noise says {told:.4g}")


def notices_damage(codec: Codec) -> None:
    """Every flipped octet and every missing end."""
    x = torch.randn(100, generator=_rng())
    message = wire.to_bytes(_encoded(codec, x))
    decode(message, key=x)
    for place in range(len(message)):
        flipped = bytearray(message)
        flipped[place] ^= 0xFF
        for damaged, how in (bytes(flipped), "flipped"), (message[:place], "and all after it missing"):
            with refused((WireError, DecodeError), f"a message with octet {place} {how} must not be decoded"):
                decode(damaged, key=x)


def allocates_nothing_that_is_only_promised(codec: Codec) -> None:
    """A header that speaks of 2^36 coordinates, with its crc right, is refused without making room for them."""
    packet = _encoded(codec, torch.ones(1500))
    message = bytearray(wire.to_bytes(packet))
    for field, value in ("d", 2**36), ("blocks", 2**36 // packet.unit if packet.unit else 0):
        struct.pack_into("<" + FIELDS[field][1], message, FIELDS[field][0], value)
    lying = signed(message)
    tracemalloc.start()
    try:
        with refused(WireError, "a header with d=2^36 in front of 1500 coordinates must be refused"):
            wire.from_bytes(lying)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    claim(peak < 50_000, f"a header that promises 2^36 coordinates makes the receiver allocate {peak:,} octets")


def refuses_values_that_are_not_finite(codec: Codec) -> None:
    """From a peer: in what travels exactly, and in what symbols are multiples of."""
    packet = _encoded(codec, torch.ones(40), exact=torch.ones(1))
    bad = {"exact values": replace(packet, exact=torch.full((1,), torch.nan))}
    if packet.scales.numel():
        bad["scales"] = replace(packet, scales=torch.full_like(packet.scales, torch.inf))
    elif not packet.checks.numel():
        bad["symbols"] = replace(packet, symbols=torch.full_like(packet.symbols, -1))  # NaN, in 32 bits and in 16
    for what, lie in bad.items():
        with refused(WireError, f"a message whose {what} are NaN or infinite must be refused"):
            wire.from_bytes(wire.to_bytes(lie))


def refuses_what_does_not_fit(codec: Codec) -> None:
    """A packet of another codec, or one for a vector of another size."""
    packet = _encoded(codec, torch.ones(8))
    with refused(DecodeError, "a packet of another codec must be refused"):
        codec.decode(replace(packet, codec=packet.codec ^ 0xFF), key=torch.ones(8))
    with refused(DecodeError, "a packet with d=8 and a key with d=9 must be refused"):
        codec.decode(packet, key=torch.ones(9))


def refuses_what_cannot_be_sent(codec: Codec) -> None:
    """By its caller: a ValueError."""
    for bad in torch.nan, torch.inf, -torch.inf:
        with refused(ValueError, f"a vector with {bad} in it must not be encoded; call check_finite"):
            _encoded(codec, torch.tensor([1.0, bad]))
        with refused(ValueError, f"exact values with {bad} among them must not be encoded; use make_packet"):
            _encoded(codec, torch.ones(2), exact=torch.tensor([bad]))
    for dtype in torch.float64, torch.int32:
        with refused(ValueError, f"a vector of {dtype} must not be encoded; use make_packet"):
            _encoded(codec, torch.ones(2, dtype=dtype))


CHECKS: tuple[Callable[[Codec], None], ...] = (
    comes_back_from_its_octets,
    carries_the_dtype,
    stacks,
    serves_many_keys,
    notices_damage,
    allocates_nothing_that_is_only_promised,
    refuses_values_that_are_not_finite,
    refuses_what_does_not_fit,
    refuses_what_cannot_be_sent,
)


def same(a: Packet, b: Packet) -> bool:
    """In every field."""
    pairs = [(getattr(a, field.name), getattr(b, field.name)) for field in fields(Packet)]
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


def signed(message: bytearray) -> bytes:
    """The message with the crc that belongs to it."""
    crc_at = HEADER_BYTES - 4
    struct.pack_into("<I", message, crc_at, zlib.crc32(message[HEADER_BYTES:], zlib.crc32(message[:crc_at])))
    return bytes(message)


def _encoded(codec: Codec, x: Tensor, *, exact: Tensor | None = None) -> Packet:
    return codec.encode(x, _rng(), distance=1.0, exact=exact)


def _rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
