"""One codec a direction."""

from quafl.codec.identity import Identity
from quafl.core.seams import Algorithm, Codec, Codecs


def codecs_for(algorithm: Algorithm, codec: Codec) -> Codecs:
    """The codec in the directions in which the algorithm uses it; full precision in the other."""
    if algorithm.compressed == "both ways":
        return Codecs(up=codec, down=codec)
    if codec.keyed:
        raise ValueError(
            f"{type(algorithm).__name__} sends displacements, for which the server has no key: "
            f"{type(codec).__name__} cannot decode them; use QSGD or no compression"
        )
    return Codecs(up=codec, down=Identity())
