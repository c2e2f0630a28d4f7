"""[codec]: how models are packed."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from quafl.codec import QSGD, Difference, Identity, Lattice
from quafl.codec.seams import Codec, Codecs
from quafl.settings.base import Positive, Section


class LatticeSettings(Section):
    """See codec.lattice; 32 bits mean no compression."""

    name: Literal["lattice"] = "lattice"
    bits: int = 4
    resolution: Positive | None = None
    spread: Positive = 6.0

    @field_validator("bits")
    @classmethod
    def _known_width(cls, bits: int) -> int:
        if bits != Identity.bits and not 1 <= bits <= 16:
            raise ValueError("must be from 1 to 16, or 32 for no compression")
        return bits

    def build(self) -> Codec:
        """The codec."""
        if self.bits == Identity.bits:
            return Identity()
        return Lattice(bits=self.bits, resolution=self.resolution, spread=self.spread)


class IdentitySettings(Section):
    """See codec.identity."""

    name: Literal["identity"]
    bits: Literal[32] = 32

    def build(self) -> Codec:
        """The codec."""
        return Identity()


class QSGDSettings(Section):
    """See codec.qsgd."""

    name: Literal["qsgd"]
    bits: int = Field(default=8, ge=2, le=16)
    norm: Literal["l2", "min-max"] = "min-max"
    bucket: int = Field(default=512, ge=32, lt=65536, multiple_of=32)
    difference: bool = False

    def build(self) -> Codec:
        """The codec."""
        return QSGD(bits=self.bits, norm=self.norm, bucket=self.bucket, difference=self.difference)


class DifferenceSettings(Section):
    """See codec.difference."""

    name: Literal["difference"]
    bits: int = Field(default=4, ge=1, le=8)

    def build(self) -> Codec:
        """The codec."""
        return Difference(bits=self.bits)


OneWay: TypeAlias = Annotated[
    LatticeSettings | DifferenceSettings | IdentitySettings | QSGDSettings, Field(discriminator="name")
]


class EachWaySettings(Section):
    """One codec from the clients to the server, another from the server to the clients; a lattice where nothing else is
    said, with the `bits` that are given for both."""

    name: Literal["each way"]
    bits: int = 4
    up: OneWay
    down: OneWay

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        bits = {"bits": raw["bits"]} if "bits" in raw else {}
        ways = {way: raw.get(way, {}) for way in ("up", "down")}
        return raw | {
            way: ({} if one.get("name") == "identity" else bits) | {"name": "lattice", **one}
            for way, one in ways.items()
            if isinstance(one, dict)
        }

    def build(self) -> Codecs:
        """The codecs."""
        return Codecs(up=self.up.build(), down=self.down.build())


CodecChoice: TypeAlias = LatticeSettings | IdentitySettings | QSGDSettings | EachWaySettings
