"""Models to messages and back. `encode` and `decode` do it for tensors and state_dicts; `Lattice` (about b bits a
coordinate), `QSGD` and `Identity` are the codecs behind them, `wire` the format."""

from quafl.codec import wire
from quafl.codec.identity import Identity
from quafl.codec.lattice import Lattice
from quafl.codec.messages import answer, decode, encode
from quafl.codec.qsgd import QSGD
from quafl.core.seams import DecodeError, Packet, WireError

__all__ = ["QSGD", "DecodeError", "Identity", "Lattice", "Packet", "WireError", "answer", "decode", "encode", "wire"]
