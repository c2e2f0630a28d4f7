"""The codecs that can travel, by the id in their messages' header."""

from collections.abc import Mapping
from types import MappingProxyType

from quafl.codec.bfloat16 import BFloat16Format
from quafl.codec.difference import DifferenceFormat
from quafl.codec.formats import Format
from quafl.codec.identity import IdentityFormat
from quafl.codec.lattice import LatticeFormat
from quafl.codec.qsgd import L2_FORMAT, MINMAX_FORMAT
from quafl.codec.seams import Codec, Packet
from quafl.codec.topk import TopKFormat

FREE = range(128, 256)  # ids for codecs from elsewhere; those below are this project's, 4 among them for an E8 lattice

_OURS: tuple[Format, ...] = (
    *(IdentityFormat(), LatticeFormat(), L2_FORMAT, MINMAX_FORMAT, DifferenceFormat(), BFloat16Format(), TopKFormat()),
)
_formats: dict[int, Format] = {one.id: one for one in _OURS}
FORMATS: Mapping[int, Format] = MappingProxyType(_formats)


def register(new: Format) -> None:
    """Make a codec of one's own known to `wire` and `decode`, in this process; both ends of a wire must do so."""
    if new.id in FORMATS:
        raise ValueError(f"codec id {new.id} of {new.name!r} is taken by {FORMATS[new.id].name!r}; choose another")
    if new.id not in FREE:
        raise ValueError(f"codec id of {new.name!r} is {new.id}, must be from {FREE[0]} to {FREE[-1]}; choose another")
    _formats[new.id] = new


def names() -> dict[int, str]:
    """What the codecs are called, by id."""
    return {id: known.name for id, known in FORMATS.items()}


def format_of(packet: Packet) -> Format:
    """How the packet travels."""
    if packet.codec not in FORMATS:
        raise ValueError(f"packet is of codec {packet.codec}, known are {names()}; register its format first")
    return FORMATS[packet.codec]


def codec_of(packet: Packet) -> Codec:
    """What decodes a packet, by its own header."""
    return format_of(packet).codec(packet)
