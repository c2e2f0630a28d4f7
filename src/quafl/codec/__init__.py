"""Models to messages and back. `encode` and `decode` do it for tensors and state_dicts; `Lattice` (where the receiver
has a key), `Difference` (from what both ends have), `QSGD` and `Identity` are the codecs behind them, `wire` the
format, and `register` adds a codec to it."""

from quafl.codec import wire
from quafl.codec.difference import Difference
from quafl.codec.formats import Format, Header, Layout
from quafl.codec.identity import Identity
from quafl.codec.lattice import Lattice
from quafl.codec.messages import answer, decode, encode
from quafl.codec.qsgd import QSGD
from quafl.codec.registry import register
from quafl.codec.seams import Codecs, DecodeError, Packet, WireError

__all__ = [
    "QSGD",
    "Codecs",
    "DecodeError",
    "Difference",
    "Format",
    "Header",
    "Identity",
    "Lattice",
    "Layout",
    "Packet",
    "WireError",
    "answer",
    "decode",
    "encode",
    "register",
    "wire",
]
