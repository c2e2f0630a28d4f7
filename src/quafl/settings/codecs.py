"""[codec]: how models are packed."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from quafl.codec import QSGD, BFloat16, Codecs, Difference, Identity, Lattice, TopK, compressed
from quafl.codec.seams import Codec
from quafl.settings.base import Positive, Section


def _known_width(bits: int) -> int:
    if bits != Identity.bits and not 1 <= bits <= 16:
        raise ValueError("must be from 1 to 16, or 32 for no compression")
    return bits


Bits: TypeAlias = Annotated[int, AfterValidator(_known_width)]
DEFAULT_SPREAD = Lattice().spread


class DifferenceSettings(Section):
    """A difference from client to server, a lattice back; see codec.usual, codec.difference and codec.lattice."""

    name: Literal["difference"] = "difference"
    bits: Bits = 4  # a coordinate; 32: no compression
    spread: Positive = DEFAULT_SPREAD  # of the lattice: standard deviations that it reaches
    feedback: bool = False  # clients add to a message what the last one left out

    def build(self) -> Codecs:
        """The codecs."""
        both = compressed(self.bits, spread=self.spread)
        return both._replace(up=Difference(bits=self.bits, feedback=True)) if self.feedback else both


class LatticeSettings(Section):
    """See codec.lattice; 32 bits mean no compression."""

    name: Literal["lattice"] = "lattice"
    bits: Bits = 4  # a coordinate; 32: no compression
    resolution: Positive | None = None  # side of a cell; none: from the expected distance
    spread: Positive = DEFAULT_SPREAD  # standard deviations of a coordinate that it reaches

    def build(self) -> Codec:
        """The codec."""
        if self.bits == Identity.bits:
            return Identity()
        return Lattice(bits=self.bits, resolution=self.resolution, spread=self.spread)


class IdentitySettings(Section):
    """See codec.identity."""

    name: Literal["identity"]
    bits: Literal[32] = 32  # a coordinate

    def build(self) -> Codec:
        """The codec."""
        return Identity()


class BFloat16Settings(Section):
    """See codec.bfloat16."""

    name: Literal["bfloat16"]
    bits: Literal[16] = 16  # a coordinate

    def build(self) -> Codec:
        """The codec."""
        return BFloat16()


class QSGDSettings(Section):
    """See codec.qsgd."""

    name: Literal["qsgd"]
    bits: int = Field(default=8, ge=2, le=16)  # a coordinate
    norm: Literal["l2", "min-max"] = "min-max"  # what a bucket is scaled by
    bucket: int = Field(default=512, ge=32, lt=65536, multiple_of=32)  # coordinates that share a scale
    difference: bool = False  # of what both ends know, where they do

    def build(self) -> Codec:
        """The codec."""
        return QSGD(bits=self.bits, norm=self.norm, bucket=self.bucket, difference=self.difference)


class DifferenceUpSettings(Section):
    """See codec.difference."""

    name: Literal["difference"]
    bits: int = Field(default=4, ge=1, le=8)  # a coordinate
    feedback: bool = False  # clients add to a message what the last one left out

    def build(self) -> Codec:
        """The codec."""
        return Difference(bits=self.bits, feedback=self.feedback)


class TopKSettings(Section):
    """See codec.topk."""

    name: Literal["top-k"]
    share: float = Field(default=1 / 16, gt=0, le=1)  # of the coordinates that is sent
    feedback: bool = True  # clients add to a message what the last one left out

    def build(self) -> Codec:
        """The codec."""
        return TopK(share=self.share, feedback=self.feedback)


Up: TypeAlias = Annotated[
    DifferenceUpSettings | LatticeSettings | TopKSettings | QSGDSettings | BFloat16Settings | IdentitySettings,
    Field(discriminator="name"),
]
Down: TypeAlias = Annotated[
    LatticeSettings | QSGDSettings | BFloat16Settings | IdentitySettings, Field(discriminator="name")
]


class EachWaySettings(Section):
    """One codec from the clients to the server, another from the server to the clients; a lattice where nothing else is
    said, with the `bits` that are given for both."""

    name: Literal["each way"]
    bits: int = 4  # of both, where they do not say
    up: Up  # client to server
    down: Down  # server to client

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        bits = {"bits": raw["bits"]} if "bits" in raw else {}
        ways = {way: raw.get(way, {}) for way in ("up", "down")}
        return raw | {
            way: ({} if one.get("name") in _WITHOUT_BITS else bits) | {"name": "lattice", **one}
            for way, one in ways.items()
            if isinstance(one, dict)
        }

    def build(self) -> Codecs:
        """The codecs."""
        return Codecs(up=self.up.build(), down=self.down.build())


_WITHOUT_BITS = ("identity", "bfloat16", "top-k")
CodecChoice: TypeAlias = (
    DifferenceSettings | LatticeSettings | IdentitySettings | BFloat16Settings | QSGDSettings | EachWaySettings
)
DEFAULT = DifferenceSettings()
