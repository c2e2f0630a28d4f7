"""Between the wire and the codecs: the header that all messages share, and the format that each codec declares.

A codec's own file says what its messages look like, `codec.registry` finds that by the id in the header, and
`codec.wire` does what is the same for all of them.
"""

from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch

from quafl.codec.seams import Codec, Packet, WireError

Kind: TypeAlias = Literal["base", "request", "refinement"]
KINDS: tuple[Kind, ...] = ("base", "request", "refinement")  # as numbered in the header, like the dtypes
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Header(NamedTuple):
    """The header of a message in its order, except for the crc; docs/wire.md has the types."""

    magic: bytes
    version: int
    codec: int
    dtype: int  # in DTYPES
    bits: int
    sent: int
    kind: int  # in KINDS
    unit: int
    exact: int
    dim: int
    seed: int
    side: float
    blocks: int
    near: int
    length: int


class Layout(NamedTuple):
    """Words, of 4 octets, in each section of the payload before the exact values."""

    symbols: int
    checks: int = 0
    scales: int = 0


class Format(Protocol):
    """How the packets of a codec travel. A codec of one's own is made known with `quafl.codec.register`."""

    @property
    def id(self) -> int:
        """The codec's number in the header."""

    @property
    def name(self) -> str:
        """What people call it, in error messages."""

    def layout(self, header: Header) -> Layout:
        """The payload that the header promises, or a WireError if it says something that this codec never does.

        Called when codec, dtype and kind are known, seed and near are below 2^63 and d below 2^62. The length is not
        compared yet: it must make room for nothing.
        """

    def blocks(self, packet: Packet) -> int:
        """What the header says of the blocks that the packet is about; 0 for a codec without blocks."""

    def check(self, packet: Packet) -> None:
        """A WireError if the words that came cannot be right. Scales and exact values are finite already."""

    def codec(self, packet: Packet) -> Codec:
        """What decodes the packet, or answers it if it is a request."""


def expect(holds: bool, otherwise: str) -> None:
    """A WireError that says what a peer has sent, and what is right."""
    if not holds:
        raise WireError(otherwise)


def expect_plain(header: Header, name: str) -> None:
    """For codecs that are done with one message, and have neither a side nor a seed that the receiver needs."""
    expect(header.kind == header.sent == 0, f"{name} message has kind {header.kind} and {header.sent} bits before it")
    expect(header.side == 0, f"{name} message has side {header.side}, must have 0")
    expect(header.seed == 0, f"{name} message has seed {header.seed}, must have 0")
