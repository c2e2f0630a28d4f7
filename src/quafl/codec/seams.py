"""The seams of the codecs: packets, and what turns vectors into them and back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from quafl.core.messages import Model
from quafl.core.structs import Struct

HEADER_BYTES = 60  # of every message; the layout is codec.wire's


class WireError(Exception):
    """Octets from a peer that are not a well-formed message."""


class DecodeError(Exception):
    """A well-formed message that this key cannot decode."""


@dataclass(frozen=True, slots=True)
class Packet(Struct):
    """One encoded vector per row, as it travels; a message to many receivers is a packet without leading axes.

    Beside the first message about a vector there are requests for more bits of some blocks (their numbers are the
    symbols), and the refinements that answer them.
    """

    codec: int  # the codec's id on the wire
    bits: int  # per coordinate
    dim: int  # d
    unit: int  # coordinates in a block
    symbols: Tensor  # "... words", int32: packed coordinates
    checks: Tensor  # "... blocks", int32: block checksums
    scales: Tensor  # "... blocks·k", float32: what a block's symbols are multiples of
    side: Tensor  # "...", float32: side γ of the lattice
    seed: Tensor  # "...", int64: what the sender's randomness was made from
    exact: Tensor  # "... e", float32: parts that travel in full precision
    dtype: torch.dtype = torch.float32  # of the vector
    kind: Literal["base", "request", "refinement"] = "base"
    sent: int = 0  # bits of the same coordinates that went before
    near: int = 0  # name of the vector from which this is a difference; 0: none

    @property
    def nbytes(self) -> int:
        """Octets on the wire of all rows together: Σ len(wire.to_bytes(row))."""
        words = sum(part.shape[-1] for part in (self.symbols, self.checks, self.scales, self.exact))
        return self.side.numel() * (HEADER_BYTES + 4 * words)


# A row, and the request of its receiver for more bits -> the sender's refinement.
Refine: TypeAlias = Callable[[int, Packet], Packet]


@dataclass(frozen=True, slots=True)
class Sender:
    """A Refine of one process: the sender's vectors are here, one for all rows or one each, so that a codec need not
    ask for every row by itself. It is told of every repair in any case."""

    x: Model
    codec: "Codec"
    repaired: Callable[[int, int, int, int], None]  # a row, octets asked and answered, and the bits sent before

    def __call__(self, row: int, request: Packet) -> Packet:
        """What it answers to one row's receiver."""
        x = self.x if self.x.dim() == 1 else self.x.reshape(-1, self.x.shape[-1])[row]
        reply = self.codec.refine(x, request)
        self.repaired(row, request.nbytes, reply.nbytes, request.sent)
        return reply


class Codec(Protocol):
    """Vectors to packets and back."""

    @property
    def bits(self) -> int:
        """b, per coordinate."""

    @property
    def keyed(self) -> bool:
        """Whether decoding needs a vector near the encoded one."""

    @property
    def difference(self) -> bool:
        """Whether the difference is coded where both ends know a vector near the encoded one."""

    @property
    def whole(self) -> bool:
        """Whether it serves a model that the sender has nothing near to, as the server's on its way to the clients."""

    @property
    def feedback(self) -> bool:
        """Whether a client keeps what a message leaves out, and adds it to its next one. Not for a codec with keys."""

    def encode(
        self, x: Model, rng: torch.Generator, *, distance: Tensor | float | None = None, exact: Tensor | None = None
    ) -> Packet:
        """A fresh message; `distance` is the sender's estimate of ‖x − the receiver's key‖, where the codec is
        `keyed`: else receivers do not measure it. To serve
        `run.workers`, where some rows are encoded apart from the others, draw by `codec.packets.draw_seeds(x, rng)`."""

    def refine(self, x: Model, request: Packet) -> Packet:
        """What the receiver of an encoding of x asks for; stateless."""

    def decode(self, packet: Packet, *, key: Model, refine: Refine | None = None) -> Model:
        """The vector, or DecodeError; never a guess."""

    def noise(self, packet: Packet) -> Tensor:
        """E‖Q(x) − x‖² of each row."""


class Codecs(NamedTuple):
    """One codec a direction: `up` from client to server, `down` from server to client."""

    up: Codec
    down: Codec
