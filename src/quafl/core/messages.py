"""What travels, declared: a message is named vectors, numbers, and statistics in full precision.

A vector says what it is near to, and who knows that. From this, and from the settings, follows how it is coded. An
algorithm never sees a packet.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True, slots=True, kw_only=True)
... class Up(Message):
...     report: Model = vector(near=heard("model"))  # both ends know what was heard
...     speed: Tensor = number(private=True)  # NaN, if the client does not tell
>>> [one.name for one in (*Up.vectors(), *Up.numbers())]
['report', 'speed']
"""

from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from quafl.core.structs import Struct

Model: TypeAlias = Tensor  # "... d", float32
Buffers: TypeAlias = Tensor  # "... e", float32: what a model carries but does not train (batch-norm statistics)


class Own(NamedTuple):
    """A vector that the receiver of a message alone has: this field of its state."""

    name: str


class Heard(NamedTuple):
    """A vector that both ends have: this one of the message that is being answered."""

    name: str


Near: TypeAlias = Own | Heard | None  # None: zero, and so a displacement


class Vector(NamedTuple):
    """A declared vector."""

    name: str
    near: Near


class Number(NamedTuple):
    """A declared number."""

    name: str
    private: bool
    low: float
    high: float | str


def own(name: str) -> Own:
    """Near a vector that the receiver alone has."""
    return Own(name)


def heard(name: str) -> Heard:
    """Near a vector of the message that is being answered."""
    return Heard(name)


def vector(*, near: Near) -> Any:
    """A field of a message."""
    return field(metadata={"near": near})


def number(*, private: bool = False, low: float = -inf, high: float | str = inf) -> Any:
    """A field of a message, a scalar a row, within bounds; a bound may be the name of a setting of the algorithm. A
    client may keep a `private` one to itself: it then says NaN."""
    return field(metadata={"private": private, "low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(Struct):
    """Base of what an algorithm's two sides say to each other."""

    statistics: Buffers  # in full precision

    @classmethod
    def vectors(cls) -> tuple[Vector, ...]:
        """In the order of their declaration."""
        return tuple(Vector(f.name, f.metadata["near"]) for f in fields(cls) if "near" in f.metadata)

    @classmethod
    def numbers(cls) -> tuple[Number, ...]:
        """In the order of their declaration."""
        return tuple(
            Number(f.name, f.metadata["private"], f.metadata["low"], f.metadata["high"])
            for f in fields(cls)
            if "private" in f.metadata
        )
