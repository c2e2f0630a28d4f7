"""When a key is too far away: the next bits of the same lattice points, for the blocks that failed.

The result is the one the first message stood for, so that repairs add no bias. The sender needs the vector and the
request, nothing else. One bit doubles the reach, which is nearly always enough; each further request asks for twice as
many, until the points are known without any key: a repair always ends. Torch serves; few blocks, as there nearly always
are, are repaired on the CPU wherever the vectors are, because launching so many small operations takes a GPU longer.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from quafl.codec import hashing
from quafl.codec.kernels.oracle import centers, checksum, nearest, points
from quafl.codec.packing import pack, unpack, unpack_groups
from quafl.codec.rotation import block_count, block_size, places, rotate, rotate_back
from quafl.codec.seams import DecodeError, Packet

FULL = 24  # bits that tell a lattice point from all others: |k| < 2^21
MOST = 16  # bits asked for at once
FEW = 32  # blocks


def widths(bits: int) -> list[int]:
    """How many bits are known of a message's points, and after each request, until they are known without any key."""
    known, wanted = [bits], 1
    while known[-1] < FULL:
        known.append(known[-1] + min(wanted, MOST, FULL - known[-1]))
        wanted *= 2
    return known


def answer(x: Tensor, request: Packet) -> Packet:
    """The sender's part: the bits from `request.sent` on of the points in the blocks asked for."""
    blocks = request.symbols.to(torch.int64)
    place, inside = places(request.dim, blocks)
    words = hashing.words(request.seed, blocks, block_size(request.dim))
    t = rotate(_values(x, place) * inside, hashing.sign(words)) * request.side.reciprocal()
    k = points(t, hashing.dither(words))
    total = request.sent + request.bits
    return replace(
        request,
        kind="refinement",
        symbols=pack((k >> request.sent) & ((1 << request.bits) - 1), request.bits),
        checks=checksum(k, total, words),
    )


def repair(vector: Tensor, packet: Packet, key: Tensor, failed: Tensor, ask: Callable[[Packet], Packet]) -> None:
    """The receiver's part: put what the failed blocks ("W", bool) stand for into the vector."""
    blocks = failed.nonzero().squeeze(-1)
    here = torch.device("cpu") if len(blocks) <= FEW else vector.device
    blocks, packet = blocks.to(here), packet.each(lambda tensor: tensor.to(here))
    size = block_size(packet.dim)
    layout = packet.symbols.view(size // 32, packet.bits, block_count(packet.dim))
    residues = unpack_groups(layout[..., blocks], packet.bits)
    for sent, total in pairwise(widths(packet.bits)):
        if not len(blocks):
            return
        request = replace(
            packet,
            kind="request",
            sent=sent,
            bits=total - sent,
            symbols=blocks.to(torch.int32),
            checks=packet.checks[:0],
            exact=packet.exact[:0],
        )
        reply = ask(request)
        _check_reply(reply, request)
        residues = residues | (unpack(reply.symbols, total - sent, size, len(blocks)) << sent)
        words = hashing.words(packet.seed, blocks, size)
        k, known = _points(residues, total, packet, key, blocks, words)
        right = known & (checksum(k, total, words) == reply.checks)
        if total == FULL and not right.all():
            raise DecodeError(f"blocks {blocks[~right].tolist()[:8]} do not decode even from all their bits")
        _put(vector, packet, k[:, right], blocks[right], words[:, right])
        blocks, residues = blocks[~right], residues[:, ~right]


def _points(
    residues: Tensor, sent: int, packet: Packet, key: Tensor, blocks: Tensor, words: Tensor
) -> tuple[Tensor, Tensor]:
    """The lattice points as far as the bits tell, and the blocks for which the key is near enough to say so."""
    if sent == FULL:
        wrapped = torch.where(residues >= 1 << (FULL - 1), residues - (1 << FULL), residues)
        return wrapped, torch.ones_like(blocks, dtype=torch.bool)
    place, inside = places(packet.dim, blocks)
    t = rotate(_values(key, place) * inside, hashing.sign(words)) * packet.side.reciprocal()
    k, reachable = nearest(residues, sent, t, hashing.dither(words))
    return k, reachable.all(dim=-2)


def _values(vector: Tensor, place: Tensor) -> Tensor:
    """What stands there, on the device of the places."""
    return vector[place.to(vector.device)].to(place.device)


def _put(vector: Tensor, packet: Packet, k: Tensor, blocks: Tensor, words: Tensor) -> None:
    """R⁻¹[γ(k − u + ½)] into its places, as the kernels have it."""
    place, inside = places(packet.dim, blocks)
    values = rotate_back(centers(k, words), hashing.sign(words), packet.side)
    vector[place[inside].to(vector.device)] = values[inside].to(vector.device, vector.dtype)


def _check_reply(reply: Packet, request: Packet) -> None:
    same = ("codec", "dim", "bits", "sent")
    if reply.kind != "refinement" or any(getattr(reply, name) != getattr(request, name) for name in same):
        raise DecodeError(f"asked for bits {request.sent} to {request.sent + request.bits}, got something else")
    if reply.checks.shape != request.symbols.shape or not torch.equal(reply.seed, request.seed):
        raise DecodeError(f"asked for {len(request.symbols)} blocks, got {reply.checks.shape[-1]} or another message's")
