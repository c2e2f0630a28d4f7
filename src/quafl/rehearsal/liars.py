"""A client that lies: an honest machine, whose messages are twisted on their way out."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import torch

from quafl.codec.coders import Parcel
from quafl.codec.seams import WireError
from quafl.core.messages import Message
from quafl.protocol import messages
from quafl.protocol.messages import Contact, Hello, Reply, WantsAll

LIES = 0.4  # of its messages
FLOOD = 40  # greetings at once
HUGE = 1e30


class Liar:
    """What becomes of what it says. `overheard` are replies of others."""

    def __init__(self, rng: Random, up: type[Message]) -> None:
        self._rng = rng
        self._vectors, self._numbers = len(up.vectors()), len(up.numbers())
        self._said: list[bytes] = []

    def twist(self, octets: bytes, heard: bytes, overheard: Sequence[bytes]) -> list[bytes]:
        """What it sends in place of its message, which answers what it has `heard`, if anything."""
        message = messages.from_bytes(octets)
        if isinstance(message, Reply):
            self._said.append(octets)
        if self._rng.random() >= LIES:
            return [octets]
        if isinstance(message, Hello):
            return [octets] * (FLOOD if self._rng.random() < 0.1 else 1)
        try:
            asked = messages.from_bytes(heard) if heard else None
        except WireError:
            asked = None
        if isinstance(asked, Contact) and self._rng.random() < 0.2:
            return [messages.to_bytes(WantsAll(asked.ticket))]
        if not isinstance(message, Reply):
            return [octets]
        return [self._other(message, octets, overheard)]

    def _other(self, message: Reply, octets: bytes, overheard: Sequence[bytes]) -> bytes:
        rng = self._rng
        theirs = rng.choice(overheard) if overheard else octets
        other = messages.from_bytes(theirs)
        assert isinstance(other, Reply)
        lies: list[Callable[[], bytes]] = [
            lambda: messages.to_bytes(replace(message, ticket=rng.randbytes(messages.TICKET))),
            lambda: messages.to_bytes(replace(message, body=rng.randbytes(rng.randrange(400)))),
            lambda: messages.to_bytes(replace(message, steps=rng.choice((-7, 99, 2**40)))),
            lambda: messages.to_bytes(replace(other, ticket=message.ticket)),
            lambda: self._with(message, rng.choice((torch.nan, torch.inf, HUGE))),
            lambda: rng.randbytes(rng.randrange(100)),
            lambda: rng.choice(self._said),
            lambda: theirs,
        ]
        return rng.choice(lies)()

    def _with(self, message: Reply, value: float) -> bytes:
        """Some of its words are that number; the checksums fit."""
        counts = struct.unpack_from("<HH", message.body)
        parcel, more = messages.parcel_from(message.body, self._vectors, self._numbers, counts[1] - self._numbers)
        place = self._rng.randrange(self._vectors)
        packet = parcel.packets[place]
        symbols = packet.symbols.clone()
        if len(symbols):
            symbols.view(torch.float32)[self._rng.randrange(len(symbols))] = value
        packets = list(parcel.packets)
        packets[place] = replace(packet, symbols=symbols)
        body = messages.parcel_parts(Parcel(tuple(packets), parcel.numbers), more)
        return messages.to_bytes(replace(message, body=b""), *body)
