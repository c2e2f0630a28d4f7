"""The codec for people who have two models and a wire: tensors or state_dicts to octets and back.

>>> import torch
>>> from quafl.codec import decode, encode
>>> theirs = {"weight": torch.randn(200, 200), "bias": torch.zeros(200), "seen": torch.tensor(7)}
>>> mine = {"weight": theirs["weight"] + 0.01 * torch.randn(200, 200), "bias": torch.ones(200) / 50}
>>> mine["seen"] = torch.tensor(9)
>>> message = encode(mine, key=theirs)                     # about 4 bits a parameter instead of 32
>>> len(message) < 0.14 * 4 * 40_200
True
>>> received = decode(message, key=theirs)
>>> float((received["weight"] - mine["weight"]).norm() / (mine["weight"] - theirs["weight"]).norm()) < 0.3
True
>>> int(received["seen"])                                  # what is not a floating-point number is not sent
7

Where both ends have the same weights, the difference from them costs as many octets, and its error is a fifth or less:

>>> message = encode(mine, near=theirs)
>>> received = decode(message, near=theirs)
>>> float((received["weight"] - mine["weight"]).norm() / (mine["weight"] - theirs["weight"]).norm()) < 0.11
True

A sender that does not have the receiver's model says how far away it expects it to be:

>>> message = encode(torch.ones(5000), distance=1.0, bits=8)
>>> bool((decode(message, key=torch.ones(5000) + 0.01) - 1).abs().max() < 0.01)
True

A key that is too far away is noticed, never guessed:

>>> decode(message, key=torch.full((5000,), 3.0))
Traceback (most recent call last):
    ...
quafl.codec.seams.DecodeError: blocks [0, 1, 2, 3, 4] of 5 do not decode: ...
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from quafl.codec import wire
from quafl.codec.difference import Difference
from quafl.codec.identity import Identity
from quafl.codec.lattice import Lattice
from quafl.codec.packets import check_dtype
from quafl.codec.registry import codec_of
from quafl.codec.seams import Codec, DecodeError, Packet, WireError

Weights = TypeVar("Weights", Tensor, Mapping[str, Tensor])
Choose: TypeAlias = Callable[[str], bool]
ONE_WAY = 6.0  # a lattice's spread where a receiver cannot ask for more bits: of 10^8 coordinates, all are within it


def running_statistics(name: str) -> bool:
    """The batch-norm buffers of a state_dict: they travel in full precision."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def encode(
    weights: Weights,
    *,
    key: Weights | None = None,
    near: Weights | None = None,
    distance: float | None = None,
    bits: int = 4,
    resolution: float | None = None,
    spread: float = ONE_WAY,
    exact: Choose = running_statistics,
    rng: torch.Generator | None = None,
) -> bytes:
    """A message from which whoever has nearly the same weights can restore these.

    Give what both ends have (`near`), and the difference from it is sent, which has the smaller error; the receiver
    must have the very same, bit for bit. Where only the receiver has something near, give that (`key`), or how far from
    it these are (`distance`, ‖weights − key‖), or the lattice's side (`resolution`); a `spread` of 4 has less than half
    the error of 6, and needs a `refine` at the receiver. `bits` 32 sends everything as it is. Entries of a state_dict
    that `exact` names travel in full precision; those that are not floating-point numbers are not sent, and those that
    are must be float32, float16 or bfloat16.
    """
    _check_dtypes(weights)
    vector, buffers = flattened(weights, exact)
    if rng is None:
        rng = torch.Generator()
        rng.seed()
    if near is not None:
        if key is not None or distance is not None or resolution is not None:
            raise ValueError("near is what both ends have; a key, a distance or a resolution is for when only one has")
        reference = _same_size(vector, flattened(near, exact)[0], "near")
        packet = Difference(bits=bits).encode(vector - reference, rng, exact=buffers)
        return wire.to_bytes(replace(packet, near=name_of(reference)))
    if key is not None:
        distance = float((vector - _same_size(vector, flattened(key, exact)[0], "key")).norm())
    codec: Codec = Identity() if bits == Identity.bits else Lattice(bits=bits, resolution=resolution, spread=spread)
    return wire.to_bytes(codec.encode(vector, rng, distance=distance, exact=buffers))


def decode(
    message: bytes,
    *,
    key: Weights | None = None,
    near: Weights | None = None,
    exact: Choose = running_statistics,
    refine: Callable[[bytes], bytes] | None = None,
) -> Weights:
    """The sender's weights, shaped like `key`, the receiver's own, or like `near`, what both ends have.

    `refine`, where there is a way back to the sender, carries a request to it and returns what `answer` there makes of
    it; without it, a key too far away raises DecodeError. So does another `near` than the sender's.
    """
    mine = key if near is None else near
    if mine is None or (key is not None and near is not None):
        raise ValueError("decode needs a key, or what the sender gave as near, and not both")
    packet = wire.from_bytes(message)
    vector, buffers = flattened(mine, exact)
    if packet.exact.shape != buffers.shape:
        raise DecodeError(f"message has {packet.exact.shape[-1]} exact values, the key {buffers.shape[-1]}")
    if packet.near != (0 if near is None else name_of(vector)):
        raise DecodeError(
            "the message is a difference from something else than this: give as near, at both ends, the same weights"
            if packet.near
            else "the message is no difference: it was sent without near, and is to be decoded with a key"
        )

    def ask(row: int, request: Packet) -> Packet:
        assert refine is not None
        return wire.from_bytes(refine(wire.to_bytes(request)))

    decoded = codec_of(packet).decode(packet, key=vector, refine=ask if refine else None)
    return shaped_like(mine, decoded if near is None else vector + decoded, packet.exact, exact)


def name_of(reference: Tensor) -> int:
    """What messages call a vector that they are a difference from: a digest of it, not 0 and below 2^63."""
    digest = blake2b(reference.cpu().numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 or 1


def _same_size(vector: Tensor, other: Tensor, name: str) -> Tensor:
    if vector.shape != other.shape:
        raise ValueError(f"{name} has {len(other)} coordinates, the weights have {len(vector)}; is it of this model?")
    return other


def answer(request: bytes, weights: Weights, *, exact: Choose = running_statistics) -> bytes:
    """What a sender returns to a receiver that asks for more bits of these weights."""
    packet = wire.from_bytes(request)
    vector, _ = flattened(weights, exact)
    if packet.kind != "request" or packet.dim != len(vector):
        raise WireError(f"message is a {packet.kind} about d={packet.dim}, expected a request about d={len(vector)}")
    return wire.to_bytes(codec_of(packet).refine(vector, packet))


def _check_dtypes(weights: Tensor | Mapping[str, Tensor]) -> None:
    """What is sent has a dtype that messages carry."""
    if isinstance(weights, Tensor):
        sent = {"the tensor to encode": weights}
    else:
        sent = {f"entry {name!r}": tensor for name, tensor in weights.items() if tensor.is_floating_point()}
    for whose, tensor in sent.items():
        check_dtype(tensor.dtype, whose)


def flattened(weights: Tensor | Mapping[str, Tensor], exact: Choose = running_statistics) -> tuple[Tensor, Tensor]:
    """The coordinates that are quantized, and those that are not."""
    if isinstance(weights, Tensor):
        return weights.detach().flatten().to(torch.float32), torch.empty(0)
    floating = {
        name: tensor.detach().flatten().float() for name, tensor in weights.items() if tensor.is_floating_point()
    }
    parts = [[tensor for name, tensor in floating.items() if exact(name) == wanted] for wanted in (False, True)]
    vector, buffers = (torch.cat(part) if part else torch.empty(0) for part in parts)
    return vector, buffers


def shaped_like(key: Weights, vector: Tensor, buffers: Tensor, exact: Choose = running_statistics) -> Weights:
    """What `flattened` made these of, with names and shapes as the key's, and its entries that are not floating."""
    if isinstance(key, Tensor):
        return vector.view(key.shape).to(key.dtype)
    places = {False: 0, True: 0}
    result = {}
    for name, tensor in key.items():
        result[name] = tensor
        if tensor.is_floating_point():
            source, start = (buffers if exact(name) else vector), places[exact(name)]
            places[exact(name)] = start + tensor.numel()
            result[name] = source[start : start + tensor.numel()].view(tensor.shape).to(tensor.dtype)
    return result
