"""Models to messages and back. `encode` and `decode` do it for tensors and state_dicts. `Lattice` (where the receiver
alone has something near) and `Difference` (where both ends have it) are the codecs behind them; `TopK`, `QSGD`,
`BFloat16` and `Identity` are others. `compressed` is the pair to begin with. `wire` is the format, and `register` adds
a codec to it."""

from quafl.codec import wire
from quafl.codec.bfloat16 import BFloat16
from quafl.codec.difference import Difference
from quafl.codec.formats import Format, Header, Layout
from quafl.codec.identity import Identity
from quafl.codec.lattice import Lattice
from quafl.codec.messages import answer, decode, encode
from quafl.codec.qsgd import QSGD
from quafl.codec.registry import register
from quafl.codec.seams import Codecs, DecodeError, Packet, WireError
from quafl.codec.topk import TopK
from quafl.codec.usual import compressed

__all__ = [
    "QSGD",
    "BFloat16",
    "Codecs",
    "DecodeError",
    "Difference",
    "Format",
    "Header",
    "Identity",
    "Lattice",
    "Layout",
    "Packet",
    "TopK",
    "WireError",
    "answer",
    "compressed",
    "decode",
    "encode",
    "register",
    "wire",
]
