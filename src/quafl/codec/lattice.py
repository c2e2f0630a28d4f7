"""The lattice codec: a random rotation, a dithered cubic lattice, and coordinates modulo 2^b.

The receiver finds the lattice point again from its own vector, the key, as long as that is near enough; a checksum over
the bits that were not sent tells when it is not. Unbiased, with an error that depends on the side γ alone: γ²/12 per
coordinate (the paper's Lemma "Lattice Quantization"; docs/codec.md explains it, docs/wire.md defines it).
"""

import warnings
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from math import inf, isfinite
from typing import ClassVar

import torch
from torch import Tensor

from quafl.codec import refinement
from quafl.codec.formats import KINDS, Header, Layout, expect
from quafl.codec.kernels import LIMIT, Kernel, kernel_for, kernel_named
from quafl.codec.packets import broadcast, check_finite, check_fits, draw_seeds, make_packet
from quafl.codec.rotation import block_count, block_size
from quafl.codec.seams import HEADER_BYTES, DecodeError, Packet, Refine, Sender
from quafl.core.checks import check_whole
from quafl.core.messages import Model
from quafl.core.pieces import placed
from quafl.core.questions import is_right

LATTICE = 1  # id on the wire
SMALLEST_SIDE = 2.0**-64
MOST_BITS = 16  # a coordinate, of a message


@dataclass(frozen=True, slots=True)
class Lattice:
    """`bits` per coordinate. The side comes from the distance given at encoding, or is fixed by `resolution`.

    A key decodes exactly when max|R(x − key)| ≤ γ·(2^b − 1)/2; the side is chosen so that this is `spread` standard
    deviations of a rotated coordinate, σ = distance/√d: γ = 2·spread·σ/(2^b − 1). A smaller spread has a smaller error
    and needs more refinements: 4 costs least where both are counted (docs/results/codec.md). `kernel` forces one
    ("torch", "c", "triton") instead of the fastest at hand.
    """

    bits: int = 4
    resolution: float | None = None
    spread: float = 4.0
    kernel: str | None = None

    keyed: ClassVar[bool] = True
    difference: ClassVar[bool] = False
    whole: ClassVar[bool] = True
    feedback: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_whole("bits", self.bits, 1, MOST_BITS, "for uncompressed models use Identity()")
        if self.resolution is not None and not 0 < self.resolution < inf:
            raise ValueError(f"resolution is {self.resolution}, must be positive and finite")
        if not 0 < self.spread < inf:
            raise ValueError(f"spread is {self.spread}, must be positive and finite")

    def encode(
        self, x: Model, rng: torch.Generator, *, distance: Tensor | float | None = None, exact: Tensor | None = None
    ) -> Packet:
        """k = ⌊R x/γ + u⌋, of which k mod 2^b is sent, and Σ weight·⌊k/2^b⌋ of each block."""
        leading = x.shape[:-1]
        rows = x.reshape(leading.numel(), x.shape[-1]).to(torch.float32)
        seed = draw_seeds(x, rng).reshape(-1)
        side = self._side(x, distance).reshape(-1)
        kernel = self._kernel(x)
        encoded = kernel.encode(rows, seed, side, self.bits)
        if not _is_sound(encoded.widest, side, exact):
            check_finite(x, exact)
            _check_distance(distance)
            side = side * (encoded.widest * (1.001 / (LIMIT / 2))).clamp(min=1)
            self._warn_of_outliers(x, side, distance)
            encoded = kernel.encode(rows, seed, side, self.bits)
        return make_packet(
            x,
            LATTICE,
            self.bits,
            block_size(x.shape[-1]),
            encoded.symbols.view(*leading, encoded.symbols.shape[-1]),
            checks=encoded.checks.view(*leading, encoded.checks.shape[-1]),
            side=side.view(leading),
            seed=seed.view(leading),
            exact=exact,
            checked=True,
        )

    def _side(self, x: Tensor, distance: Tensor | float | None) -> Tensor:
        """γ of each row."""
        if self.resolution is not None:
            return torch.full(x.shape[:-1], self.resolution, device=x.device)
        if distance is None:
            raise ValueError(
                "a lattice needs a distance to what the receiver has: give key=, distance= or resolution=; or near=, "
                "what both ends have"
            )
        if (share := self.spread**2 / (3 * ((1 << self.bits) - 1) ** 2)) > 1:
            warnings.warn(
                f"a lattice of {self.bits} bits and spread {self.spread:g} has a squared error of {share:.2g} times "
                f"the squared distance: the message brings nobody nearer; use more bits, or a difference (near=...) "
                f"where both ends have the same",
                RuntimeWarning,
                stacklevel=4,
            )
        far = torch.as_tensor(distance, dtype=torch.float32)
        if far.device.type == "cpu":  # what a GPU has is looked at together with what comes of it
            _check_distance(far)
        deviation = far * max(x.shape[-1], 1) ** -0.5
        steps = torch.full((), (1 << self.bits) - 1, dtype=far.dtype, device=far.device)  # a GPU multiplies by 1/number
        side: Tensor = (2 * self.spread * deviation / steps).clamp(min=SMALLEST_SIDE)
        return placed(side, x.device).expand(x.shape[:-1])

    def _warn_of_outliers(self, x: Tensor, side: Tensor, distance: Tensor | float | None) -> None:
        """If a few coordinates have made the side so large that the message is of no use for the others. A distance
        below what float32 resolves of the others is no reason: nothing has moved."""
        usual = float(x.abs().median()) if x.numel() else 0.0
        error = float(side.max()) * (x.shape[-1] / 12) ** 0.5
        far = 0.0 if distance is None else float(torch.as_tensor(distance).max())
        if self.resolution is not None or (error > far > 2.0**-18 * usual * x.shape[-1] ** 0.5):
            warnings.warn(
                f"the largest coordinate is {float(x.abs().max()):.3g}, the usual one {usual:.3g}: float32 holds both "
                f"on a lattice of side {float(side.max()):.3g}, whose error over the whole vector is {error:.3g}, and "
                f"on none that is finer; send what is so large apart, in full precision",
                RuntimeWarning,
                stacklevel=4,
            )

    def refine(self, x: Model, request: Packet) -> Packet:
        """The next bits of the same lattice points, in the blocks asked for."""
        return refinement.answer(x.to(torch.float32), request)

    def decode(self, packet: Packet, *, key: Model, refine: Refine | None = None) -> Model:
        """The lattice point k′ ≡ k (mod 2^b) nearest to the key, for every block whose checksum agrees.

        For the others, more bits are asked for through `refine`; without it, DecodeError. Of a Sender's x it is known
        what that comes to: the message itself is not read, and the sender is told what would have been asked.
        """
        check_fits(packet, LATTICE, key)
        leading = broadcast(packet.side.shape, key.shape[:-1])
        keys = _rows(key.to(torch.float32), leading, 1)
        seed, side = _rows(packet.seed, leading, 0), _rows(packet.side, leading, 0)
        if isinstance(refine, Sender):
            x = _rows(refine.x.to(torch.float32), leading, 1)
            vectors, apart = self._kernel(key).transfer(x.expand(max(len(x), len(seed)), -1), seed, side, keys)
            _tell(refine, apart, packet, keys)
            return vectors.expand(len(apart), -1).view(*leading, packet.dim).to(packet.dtype)
        symbols, checks = _rows(packet.symbols, leading, 1), _rows(packet.checks, leading, 1)
        vectors, failed = self._kernel(key).decode(symbols, checks, seed, side, packet.bits, keys)
        found = failed.sum(dim=-1)
        left = {} if is_right(found, lambda counts: not any(counts)) else _some(found.tolist())
        for row in left:
            own_key, message = keys[min(row, len(keys) - 1)], packet[_index(row, leading, packet.side.shape)]
            _check_number(own_key)
            if refine is None:
                blocks = failed[row].nonzero().squeeze(-1).tolist()
                raise DecodeError(
                    f"blocks {blocks[:8]} of {failed.shape[-1]} do not decode: the key is farther from the sender's "
                    f"vector than side {float(message.side):.3g} and {packet.bits} bits reach"
                )
            refinement.repair(vectors[row], message, own_key, failed[row], partial(refine, row))
        return vectors.view(*leading, packet.dim).to(packet.dtype)

    def noise(self, packet: Packet) -> Tensor:
        """d·γ²/12: the error is uniform in a cell."""
        return packet.dim * packet.side.square() / 12

    def _kernel(self, x: Tensor) -> Kernel:
        return kernel_for(x.device) if self.kernel is None else kernel_named(self.kernel)


@dataclass(frozen=True, slots=True)
class LatticeFormat:
    """Symbols and a checksum for each block; also requests, which name blocks, and the refinements that answer them."""

    id: ClassVar[int] = LATTICE
    name: ClassVar[str] = "lattice"

    def layout(self, header: Header) -> Layout:
        """32·b words of symbols and one checksum a block; a block's number for each in a request."""
        expect(1 <= header.bits <= 16, f"lattice message has {header.bits} bits, must have 1 to 16")
        expect(0 < header.side < inf, f"lattice message has side {header.side}, must be positive and finite")
        size = block_size(header.dim)
        expect(header.unit == size, f"lattice message has blocks of {header.unit}, d={header.dim} has {size}")
        kind, blocks = KINDS[header.kind], header.blocks
        whole, last, most = block_count(header.dim), header.sent + header.bits, refinement.FULL
        if kind == "base":
            expect(header.sent == 0, f"first message says that {header.sent} bits went before it")
            expect(blocks == whole, f"message has {blocks} block checksums, d={header.dim} needs {whole}")
        else:
            within = header.sent >= 1 and last <= most
            expect(within, f"{kind} of bits {header.sent} to {last}, must be within 1 to {most}")
            expect(header.exact == 0, f"{kind} has {header.exact} exact values, must have none")
            expect(1 <= blocks <= whole, f"{kind} of {blocks} blocks, d={header.dim} has {whole}")
        if kind == "request":
            return Layout(symbols=blocks)
        return Layout(symbols=size // 32 * header.bits * blocks, checks=blocks)

    def blocks(self, packet: Packet) -> int:
        """All of them in a first message, those asked for in the others."""
        return (packet.symbols if packet.kind == "request" else packet.checks).shape[-1]

    def check(self, packet: Packet) -> None:
        """A request names blocks that exist, each once and in their order."""
        if packet.kind == "request":
            numbers = packet.symbols
            inside = (numbers >= 0) & (numbers < block_count(packet.dim))
            rising = numbers.diff() > 0
            expect(bool(inside.all() and rising.all()), "request names blocks out of range or out of order")

    def codec(self, packet: Packet) -> Lattice:
        """The side and the seed are in the packet."""
        return Lattice(bits=packet.bits)


def _tell(sender: Sender, apart: Tensor, packet: Packet, keys: Tensor) -> None:
    """A message's sender, of the repairs that receivers would have asked for whose keys are that far apart from it. One
    who would need all bits may have a key that is no number."""
    widths, size = refinement.widths(packet.bits), block_size(packet.dim)

    def right(found: list[list[int]]) -> bool:
        for (sent, known), counts in zip(pairwise(widths), found, strict=True):
            for row, blocks in _some(counts).items():
                words = (size // 32 * (known - sent) + 1) * blocks
                sender.repaired(row, HEADER_BYTES + 4 * blocks, HEADER_BYTES + 4 * words, sent)
        return not any(found[-1])

    if not is_right((apart >= _reached(packet.bits, apart.device)).sum(dim=-1), right):
        _check_number(keys)


@cache
def _reached(bits: int, device: torch.device) -> Tensor:
    """By how many cells a key must miss so that bits are too few, for each number of them that may be known."""
    cells = [1 << (width - 1) for width in refinement.widths(bits)[:-1]]
    return torch.tensor(cells, dtype=torch.int32, device=device)[:, None, None]


def _check_number(key: Tensor) -> None:
    if key.isnan().any():
        raise ValueError("the decoding key has NaN coordinates")


def _is_sound(widest: Tensor, side: Tensor, exact: Tensor | None) -> bool:
    """Whether all went well: no more cells than float32 can tell apart, all numbers finite. A GPU is asked once."""
    ends = () if exact is None or not exact.numel() else exact.aminmax()

    def right(found: list[float]) -> bool:
        cells, others = found[: len(widest)], found[len(widest) :]
        return all(most <= LIMIT / 2 for most in cells) and all(map(isfinite, others))

    return is_right(torch.cat((widest, side, *(end.float().view(1) for end in ends))), right)


def _check_distance(distance: Tensor | float | None) -> None:
    far = torch.as_tensor(0.0 if distance is None else distance)
    if not ((far >= 0) & (far < inf)).all():
        raise ValueError(f"distance is {float(far.max())}, must be finite and not negative; did training diverge?")


def _some(counts: list[int]) -> dict[int, int]:
    return {row: blocks for row, blocks in enumerate(counts) if blocks}


def _rows(tensor: Tensor, leading: torch.Size, own_axes: int) -> Tensor:
    """With one leading axis: a row for each of the leading ones, or a single row that serves all."""
    split = tensor.dim() - own_axes
    if split == 1 and (len(tensor) == 1 or leading == tensor.shape[:1]):
        return tensor
    if tensor.shape[:split].numel() == 1:
        return tensor.reshape(1, *tensor.shape[split:])
    return tensor.expand(*leading, *tensor.shape[split:]).reshape(leading.numel(), *tensor.shape[split:])


def _index(row: int, leading: torch.Size, shape: torch.Size) -> tuple[int, ...]:
    """Where row number `row` of the leading axes lies in something of a shape that broadcasts to them."""
    whole = torch.unravel_index(torch.tensor(row), leading)
    return tuple(0 if size == 1 else int(i) for i, size in zip(whole[len(whole) - len(shape) :], shape, strict=True))
