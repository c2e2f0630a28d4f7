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
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from quafl.codec import wire
from quafl.codec.identity import Identity
from quafl.codec.lattice import Lattice
from quafl.codec.packets import check_dtype
from quafl.codec.registry import codec_of
from quafl.codec.seams import Codec, DecodeError, Packet, WireError

Weights = TypeVar("Weights", Tensor, Mapping[str, Tensor])
Choose: TypeAlias = Callable[[str], bool]


def running_statistics(name: str) -> bool:
    """The batch-norm buffers of a state_dict: they travel in full precision."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def encode(
    weights: Weights,
    *,
    key: Weights | None = None,
    distance: float | None = None,
    bits: int = 4,
    resolution: float | None = None,
    exact: Choose = running_statistics,
    rng: torch.Generator | None = None,
) -> bytes:
    """A message from which whoever has nearly the same weights can restore these.

    Give the receiver's weights (`key`), or how far from them these are (`distance`, ‖weights − key‖), or the lattice's
    side (`resolution`). `bits` 32 sends everything as it is. Entries of a state_dict that `exact` names travel in full
    precision; those that are not floating-point numbers are not sent, and those that are must be float32, float16 or
    bfloat16.
    """
    _check_dtypes(weights)
    vector, buffers = _flatten(weights, exact)
    if key is not None:
        distance = float((vector - _flatten(key, exact)[0]).norm())
    codec: Codec = Identity() if bits == Identity.bits else Lattice(bits=bits, resolution=resolution)
    if rng is None:
        rng = torch.Generator()
        rng.seed()
    return wire.to_bytes(codec.encode(vector, rng, distance=distance, exact=buffers))


def decode(
    message: bytes,
    *,
    key: Weights,
    exact: Choose = running_statistics,
    refine: Callable[[bytes], bytes] | None = None,
) -> Weights:
    """The sender's weights, shaped like `key`, the receiver's own.

    `refine`, where there is a way back to the sender, carries a request to it and returns what `answer` there makes of
    it; without it, a key too far away raises DecodeError.
    """
    packet = wire.from_bytes(message)
    vector, buffers = _flatten(key, exact)
    if packet.exact.shape != buffers.shape:
        raise DecodeError(f"message has {packet.exact.shape[-1]} exact values, the key {buffers.shape[-1]}")

    def ask(row: int, request: Packet) -> Packet:
        assert refine is not None
        return wire.from_bytes(refine(wire.to_bytes(request)))

    decoded = codec_of(packet).decode(packet, key=vector, refine=ask if refine else None)
    return _like(key, decoded, packet.exact, exact)


def answer(request: bytes, weights: Weights, *, exact: Choose = running_statistics) -> bytes:
    """What a sender returns to a receiver that asks for more bits of these weights."""
    packet = wire.from_bytes(request)
    vector, _ = _flatten(weights, exact)
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


def _flatten(weights: Tensor | Mapping[str, Tensor], exact: Choose) -> tuple[Tensor, Tensor]:
    """The coordinates that are quantized, and those that are not."""
    if isinstance(weights, Tensor):
        return weights.detach().flatten().to(torch.float32), torch.empty(0)
    floating = {
        name: tensor.detach().flatten().float() for name, tensor in weights.items() if tensor.is_floating_point()
    }
    parts = [[tensor for name, tensor in floating.items() if exact(name) == wanted] for wanted in (False, True)]
    vector, buffers = (torch.cat(part) if part else torch.empty(0) for part in parts)
    return vector, buffers


def _like(key: Weights, vector: Tensor, buffers: Tensor, exact: Choose) -> Weights:
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
