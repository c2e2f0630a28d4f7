"""The difference code: for vectors that are near something both ends have, and for displacements.

What is coded is the difference, rotated as for the lattice, so that its coordinates are nearly Gaussian, and rounded to
the levels of the best scalar quantizer. No room is left for a key that the sender does not know: at 4 bits the squared
error is 0.0096 of the difference's square, the lattice's 0.024 or more. Each block has a scale S = ‖z‖²/⟨z, levels⟩,
with which the code is unbiased (EDEN; Vargaftik et al., ICML 2022), as far as the rotation makes a block Gaussian.
Where one coordinate has a fifth of its block's square, it is off by 6 % at 1 bit, and by 0.2 % at 4. docs/codec.md
explains it, docs/wire.md defines it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quafl.codec import gaussian
from quafl.codec.formats import Header, Layout, expect
from quafl.codec.kernels import Kernel, kernel_for, kernel_named
from quafl.codec.packets import broadcast, check_finite, check_fits, draw_seeds, make_packet
from quafl.codec.rotation import block_count, block_size
from quafl.codec.seams import DecodeError, Packet, Refine
from quafl.core.checks import check_whole
from quafl.core.messages import Model
from quafl.core.pieces import is_finite

DIFFERENCE = 5  # id on the wire


@dataclass(frozen=True, slots=True)
class Difference:
    """`bits` per coordinate, from 1 to 8, and a scale for each block of 1024.

    Relative squared errors at 1, 2, 3, 4 bits: 0.571, 0.133, 0.036, 0.0096. With `feedback`, a client adds what a
    message leaves out to its next one. `kernel` forces one ("torch", "c", "triton") instead of the fastest at hand.
    """

    bits: int = 4
    feedback: bool = False
    kernel: str | None = None

    keyed: ClassVar[bool] = False
    difference: ClassVar[bool] = True
    whole: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_whole("bits", self.bits, 1, gaussian.MOST_BITS, "for more, use a Lattice")

    def encode(
        self, x: Model, rng: torch.Generator, *, distance: Tensor | float | None = None, exact: Tensor | None = None
    ) -> Packet:
        """The signs and cells of R x, and S of each block."""
        leading = x.shape[:-1]
        rows = x.reshape(leading.numel(), x.shape[-1]).to(torch.float32)
        seed = draw_seeds(x, rng)
        symbols, energy, match = self._kernel(x).encode_difference(rows, seed.reshape(-1), self.bits)
        scales = torch.where(energy == 0, 0.0, energy / match)  # a block of zeros has no direction
        if not is_finite(scales, exact):
            check_finite(x, exact)
            raise ValueError(
                f"the vector to encode has coordinates up to {float(x.abs().max()):.3g}, whose squares are too large "
                f"for float32; did training diverge?"
            )
        return make_packet(
            x,
            DIFFERENCE,
            self.bits,
            block_size(x.shape[-1]),
            symbols.view(*leading, symbols.shape[-1]),
            scales=scales.view(*leading, scales.shape[-1]),
            seed=seed,
            exact=exact,
            checked=True,
        )

    def refine(self, x: Model, request: Packet) -> Packet:
        """Nothing fails, so there is nothing to add."""
        raise DecodeError("a message with a difference has no next bits")

    def decode(self, packet: Packet, *, key: Model, refine: Refine | None = None) -> Model:
        """The difference, whatever the key."""
        check_fits(packet, DIFFERENCE, key)
        leading = packet.side.shape
        rows = leading.numel()
        vectors = self._kernel(packet.symbols).decode_difference(
            packet.symbols.reshape(rows, packet.symbols.shape[-1]),
            packet.scales.reshape(rows, packet.scales.shape[-1]),
            packet.seed.reshape(rows),
            packet.bits,
            packet.dim,
        )
        vector = vectors.view(*leading, packet.dim).to(packet.dtype)
        return vector.expand(broadcast(vector.shape, key.shape))

    def noise(self, packet: Packet) -> Tensor:
        """D/(1 − D) of the square of what was coded, where D is the quantizer's error: of a Gaussian block, that square
        is rows·S²(1 − D)². What falls on padding is dropped."""
        share, blocks = gaussian.distortion(packet.bits), max(packet.scales.shape[-1], 1)
        return share * (1 - share) * packet.dim * packet.scales.square().sum(dim=-1) / blocks

    def _kernel(self, x: Tensor) -> Kernel:
        return kernel_for(x.device) if self.kernel is None else kernel_named(self.kernel)


@dataclass(frozen=True, slots=True)
class DifferenceFormat:
    """Symbols, then the scale of each block."""

    id: ClassVar[int] = DIFFERENCE
    name: ClassVar[str] = "difference"

    def layout(self, header: Header) -> Layout:
        """unit·b/32 words of symbols and one scale a block."""
        bits, size, whole = header.bits, block_size(header.dim), block_count(header.dim)
        plain = header.kind == header.sent == 0
        expect(plain, f"{self.name} message has kind {header.kind} and {header.sent} bits before it")
        expect(header.side == 0, f"{self.name} message has side {header.side}, must have 0")
        most = gaussian.MOST_BITS
        expect(1 <= bits <= most, f"{self.name} message has {bits} bits, must have 1 to {most}")
        expect(header.unit == size, f"{self.name} message has blocks of {header.unit}, d={header.dim} has {size}")
        expect(header.blocks == whole, f"message has {header.blocks} blocks, d={header.dim} needs {whole}")
        return Layout(symbols=size // 32 * bits * whole, scales=whole)

    def blocks(self, packet: Packet) -> int:
        """⌈d/1024⌉, as the rotation has them."""
        return block_count(packet.dim)

    def check(self, packet: Packet) -> None:
        """A scale has no sign: that is in the symbols."""
        expect(bool((packet.scales >= 0).all()), "message has negative scales")

    def codec(self, packet: Packet) -> Difference:
        """With the bits of the packet."""
        return Difference(bits=packet.bits)
