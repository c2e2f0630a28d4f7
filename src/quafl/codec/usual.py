"""The codecs to begin with."""

from quafl.codec.difference import Difference
from quafl.codec.gaussian import MOST_BITS
from quafl.codec.identity import Identity
from quafl.codec.lattice import Lattice
from quafl.codec.seams import Codecs


def compressed(bits: int = 4, *, spread: float | None = None) -> Codecs:
    """`bits` a coordinate both ways: a difference from client to server, as both ends know what it is near to, and a
    lattice from server to client, as the client alone does. From 9 to 16 bits, a lattice both ways; with 32, nothing is
    compressed. `spread` is the lattice's.

    >>> compressed(bits=2).up
    Difference(bits=2, feedback=False, kernel=None)
    """
    if bits == Identity.bits:
        return Codecs(up=Identity(), down=Identity())
    down = Lattice(bits=bits) if spread is None else Lattice(bits=bits, spread=spread)
    return Codecs(up=Difference(bits=bits) if bits <= MOST_BITS else down, down=down)
