"""Models to messages and back: `Lattice` packs a coordinate into a few bits, `Identity` leaves it as it is.

>>> import torch
>>> from quafl.codec import Lattice, wire
>>> key = torch.randn(5000)                                   # what the receiver has
>>> x = key + 0.01 * torch.randn(5000)                        # what the sender has
>>> packet = Lattice(bits=4).encode(x, torch.Generator().manual_seed(0), distance=(x - key).norm())
>>> message = wire.to_bytes(packet)
>>> len(message) == packet.nbytes < 0.15 * 4 * len(x)
True
>>> decoded = Lattice(bits=4).decode(wire.from_bytes(message), key=key)
>>> bool((decoded - x).norm() < 0.3 * (x - key).norm())
True
"""

from quafl.codec import wire
from quafl.codec.identity import Identity
from quafl.codec.lattice import Lattice
from quafl.codec.qsgd import QSGD
from quafl.core.seams import DecodeError, Packet, WireError

__all__ = ["QSGD", "DecodeError", "Identity", "Lattice", "Packet", "WireError", "wire"]
