"""Whether a client's reply can be, and is to be believed."""

from dataclasses import replace
from math import isfinite, isnan
from statistics import median
from typing import Any, NamedTuple

import torch

from quafl.codec.coders import Coders, RefineVector
from quafl.codec.seams import Packet, WireError
from quafl.core.messages import Message, Number
from quafl.core.pieces import distance
from quafl.core.seams import Algorithm
from quafl.core.server import keyed
from quafl.protocol.messages import NOT_TOLD, Reply, parcel_from
from quafl.protocol.speech import Spoken, keys_up

STILL = 1e-9  # the codec's own error, where nobody has moved
ENOUGH = 3  # clients, below which nobody knows what is usual


class Opinion(NamedTuple):
    """What a reply says, if it is believed."""

    up: Any  # a Message
    steps: int
    distances: dict[str, float]
    away: float  # how far its steps have brought it, by the farthest of its vectors
    octets: int  # of its packets


class Judge:
    """Reads replies. What is `far` times as far away as is usual is not believed."""

    def __init__(self, algorithm: Algorithm, coders: Coders, far: float) -> None:
        self._algorithm, self._coder, self._far = algorithm, coders.up, far
        self._keyed = keyed(algorithm.records.down)
        self._votes: dict[str, float] = {}

    @property
    def votes(self) -> dict[str, float]:
        """How far the last reply of each client was that was accepted and had moved at all."""
        return dict(self._votes)

    def learn(self, name: str, away: float) -> None:
        """What is usual; a client has one vote."""
        if away > STILL:
            self._votes[name] = away

    def read(self, reply: Reply, spoken: Spoken, refine: RefineVector, usual: float | None) -> Opinion:
        """What it says, decoded with what both ends know of the message that it answers; WireError or DecodeError for
        what cannot be, or is not to be believed. Nothing of the judge is changed."""
        if not (reply.steps == NOT_TOLD or 0 <= reply.steps <= self._algorithm.local_steps):
            raise WireError(f"says that it took {reply.steps} steps, could take at most {self._algorithm.local_steps}")
        declared = self._coder.message.numbers()
        here = spoken.heard.statistics.device
        parcel, more = parcel_from(reply.body, len(self._coder.vectors), len(declared), len(self._keyed), here)
        distances = dict(zip(self._keyed, more, strict=True))
        called, told = spoken.meant(parcel)
        for name, far in distances.items():
            if not (isfinite(far) and far >= 0):
                raise WireError(f"measured a distance of {far} to the {name}")
        for one, value in zip(declared, parcel.numbers, strict=True):
            self._check_number(one, float(value))
        for place, packet in enumerate(parcel.packets):
            self._check_form(place, packet, told)
        keys = keys_up(self._coder, told)
        up = self._coder.unpack(parcel, keys, refine, called)
        up = replace(up, statistics=up.statistics.clone())  # not a view that keeps the whole message
        reaches = [float(distance(getattr(up, name), key)) for name, key in keys.items()]
        for far in (*reaches, *distances.values()):
            self._check_distance(far, told, usual)
        away = 0.0 if reply.steps == 0 else max(reaches)  # without a step, it is the codec's error, and says nothing
        return Opinion(up, max(reply.steps, 0), distances, away, parcel.nbytes)

    def usual(self) -> float | None:
        """The usual distance; None while nobody knows."""
        return median(self._votes.values()) if len(self._votes) >= ENOUGH else None

    def _check_number(self, one: Number, value: float) -> None:
        high = getattr(self._algorithm, one.high) if isinstance(one.high, str) else one.high
        if isnan(value) and one.private:
            return
        if not one.low <= value <= high:
            raise WireError(f"says that its {one.name} is {value}, must be from {one.low} to {high}")

    def _check_form(self, place: int, packet: Packet, told: Message) -> None:
        exact = len(told.statistics) if place == 0 else 0
        dim = getattr(told, told.vectors()[0].name).shape[-1]
        form = (packet.kind, packet.bits, packet.dtype, packet.dim)
        expected = ("base", self._coder.bits, torch.float32, dim)
        if form != expected or len(packet.exact) != exact:
            raise WireError(
                f"sent a message of the form {form} with {len(packet.exact)} exact values, expected {expected} with "
                f"{exact}"
            )

    def _check_distance(self, away: float, told: Message, usual: float | None) -> None:
        """Compare with the usual distance. A client that was away for long may well be as far as the model is large."""
        model = getattr(told, told.vectors()[0].name)
        size = float(model.norm())
        most = max(size, model.shape[-1] ** 0.5) if usual is None else usual
        if not isfinite(away) or away > max(self._far * most, 2 * size):
            raise WireError(f"its model is {away:.3g} away, more than {self._far:g} times the usual {most:.3g}")
