"""Named tensors between a server and its clients, whatever framework carries them.

Down: in full to a client that has nothing, else by the lattice, with what the client heard last as the key. Up: the
difference from what was heard, which both ends have, bit for bit. A message names what it stands for by a digest, and
whoever decodes it compares: nothing decodes wrongly in silence.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quafl.codec.gaussian import MOST_BITS
from quafl.codec.messages import decode, encode, flattened
from quafl.codec.packets import check_dtype
from quafl.codec.seams import DecodeError
from quafl.core.checks import check_whole
from quafl.core.defence import sketched
from quafl.core.pieces import is_finite
from quafl.core.randomness import derive

Weights: TypeAlias = Mapping[str, Tensor]  # floating-point ones, by name, in their order
FULL, NEAR, SAME = "full", "near", "same"  # how a record comes: as it is, by the lattice, or not at all, being there
AS_IT_IS = "neither float32 nor float16"  # in place of the dtype of an array that is not encoded
SLACK = 1.1  # for the distance to a client's model, which a sketch knows to about 4 %
MOST_OWED = 8  # models, from which answers may be differences
FEWEST_DOWN = 3  # bits of a lattice whose error is smaller than the distance, where nobody can ask for more


class LostError(Exception):
    """The receiver has nothing that decodes this; it is to be sent in full."""


class Sent(NamedTuple):
    """A record on its way to a client."""

    how: str  # FULL, NEAR or SAME
    name: str  # of what the client has afterwards
    octets: bytes  # where it is NEAR


class Version(NamedTuple):
    """What some clients have."""

    layout: str
    source: str  # the server's own, of which it was made
    sketch: Tensor  # of it


@dataclass(slots=True)
class _Made:
    """The encodings of one model of the server's, by what the receivers had."""

    source: str
    sent: dict[str, Sent] = field(default_factory=dict)


def check_bits(up: int, down: int = FEWEST_DOWN) -> None:
    """Of a difference, and of a lattice without refinements."""
    check_whole("bits", up, 1, MOST_BITS, "with more, there is little to gain")
    check_whole("down_bits", down, FEWEST_DOWN, 16, "with fewer, a lattice's error is larger than what is new")


def layout_of(entries: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """A line for each of a record's arrays, of whatever dtype, in their order."""
    return "\n".join(
        f"{name} {dtype}" if dtype == AS_IT_IS else f"{name} {'x'.join(map(str, shape)) or 'scalar'} {dtype}"
        for name, shape, dtype in entries
    )


def check_encoded(dtypes: Mapping[str, str], spared: Iterable[str]) -> None:
    """Doubles would travel in full. Those that a server has made of integers may."""
    for name, dtype in dtypes.items():
        if dtype == "float64" and name not in spared:
            check_dtype(torch.float64, f"array {name!r}")


def short(text: str) -> str:
    """A digest, 16 hexadecimal digits."""
    return blake2b(text.encode(), digest_size=8).hexdigest()


def check_layout(mine: str, theirs: str, whose: str) -> None:
    """That two records have the same arrays; or which is the first that they have not."""
    if mine == theirs:
        return
    ours, others = mine.splitlines(), theirs.splitlines()
    for place in range(max(len(ours), len(others))):
        one, other = (lines[place] if place < len(lines) else "nothing" for lines in (ours, others))
        if one != other:
            raise ValueError(
                f"{whose} has '{other}' where the model that was sent has '{one}'; return the same arrays, in the same "
                f"order, with the same shapes and dtypes"
            )


def fingerprint(weights: Weights) -> str:
    """Of all values."""
    digest = blake2b(digest_size=8)
    for tensor in weights.values():
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# At the client


def hear(sent: Sent, held: Weights | None) -> dict[str, Tensor]:
    """What the server meant; LostError if what is held here does not decode it."""
    if held is None:
        raise LostError("there is no model here that was heard before")
    if sent.how == SAME:
        weights = dict(held)
    else:
        try:
            weights = dict(decode(sent.octets, key=held))
        except DecodeError as error:
            raise LostError(f"the model held here does not decode it: {error}") from error
    if fingerprint(weights) != sent.name:
        raise LostError("the model held here is another one than the server thinks")
    return weights


def tell(weights: Weights, heard: Weights, bits: int, seed: int) -> bytes:
    """What the client has come to, as a difference from what it has heard."""
    for name, tensor in weights.items():
        check_dtype(tensor.dtype, f"array {name!r}")
        if not is_finite(tensor.float()):
            raise ValueError(f"array {name!r} has NaN or infinite values; did training diverge?")
    return encode(weights, near=heard, bits=bits, rng=torch.Generator().manual_seed(seed))


# At the server


class Sender:
    """The server's end: who has heard what, and what clients' answers are differences from.

    Of what clients have it keeps a sketch, 256 numbers, that says how far the server's model is from it. Models are
    kept as long as an answer to them may come.
    """

    def __init__(self, bits: int = 4, seed: int = 0) -> None:
        self.bits, self._seed, self._count = bits, seed, 0
        self._made: dict[str, _Made] = {}
        self._versions: dict[str, Version] = {}
        self._references: dict[str, dict[str, Tensor]] = {}
        self._heard: dict[tuple[int | str, str], str] = {}
        self._owed: dict[tuple[int | str, str], str] = {}

    def send(self, node: int | str, key: str, layout: str, weights: Weights, *, in_full: bool = False) -> Sent:
        """The record `key` for a client, in as few octets as it can decode."""
        source = fingerprint(weights)
        made = self._made.get(key)
        if made is None or made.source != source:
            for name, tensor in weights.items():
                check_dtype(tensor.dtype, f"array {name!r}")
            made = self._made[key] = _Made(source)
        known = "" if in_full else self._heard.get((node, key), "")
        version = self._versions.get(known)
        if version is None or version.layout != layout:
            known, version = "", None
        if known not in made.sent:
            made.sent[known] = self._make(known, version, layout, source, weights)
        sent = made.sent[known]
        self._owed.pop((node, key), None)
        self._owed[node, key] = sent.name  # the last one
        self._drop_what_nobody_needs()
        return sent

    def heard(self, node: int | str, key: str, name: str) -> None:
        """A client has said that it has this now."""
        if name in self._versions:
            self._heard[node, key] = name

    def forget(self, node: int | str) -> None:
        """A client has turned out to have nothing."""
        for mine in [mine for mine in self._heard if mine[0] == node]:
            del self._heard[mine]

    def reference(self, node: int | str, key: str) -> dict[str, Tensor]:
        """What the client was sent last, as it decodes it."""
        name = self._owed.get((node, key))
        if name is None:
            raise DecodeError(f"an answer about {key!r}, of which this client was sent nothing, or long ago")
        return self._references[name]

    def receive(self, node: int | str, key: str, octets: bytes) -> dict[str, Tensor]:
        """The client's weights, or DecodeError: a difference from something else than what it was sent last."""
        reference = self.reference(node, key)
        return dict(decode(octets, near=reference))

    def answered(self, node: int | str) -> None:
        """A client owes nothing any more."""
        self._owed = {mine: name for mine, name in self._owed.items() if mine[0] != node}

    def _make(self, known: str, version: Version | None, layout: str, source: str, weights: Weights) -> Sent:
        """And whoever has it then is known to have it."""
        if version is None:
            sent, heard = Sent(FULL, source, b""), dict(weights)
        elif version.source == source and known in self._references:
            sent = Sent(SAME, known, b"")
            heard = self._references[known]
        else:
            far = SLACK * float((_sketch(weights) - version.sketch).norm())
            self._count += 1
            rng = torch.Generator().manual_seed(derive(self._seed, "down", self._count))
            octets = encode(weights, distance=far, bits=self.bits, rng=rng)
            heard = dict(decode(octets, key=weights))
            sent = Sent(NEAR, fingerprint(heard), octets)
        if sent.name not in self._versions:
            self._versions[sent.name] = Version(layout, source, _sketch(heard))
        self._references[sent.name] = heard
        return sent

    def _drop_what_nobody_needs(self) -> None:
        waited_for = list(dict.fromkeys(self._owed.values()))[-MOST_OWED:]  # clients that are silent for long are not
        self._owed = {mine: name for mine, name in self._owed.items() if name in waited_for}
        latest = {sent.name for made in self._made.values() for sent in made.sent.values()}
        owed = latest.union(self._owed.values())
        self._references = {name: kept for name, kept in self._references.items() if name in owed}
        known = owed.union(self._heard.values())
        self._versions = {name: kept for name, kept in self._versions.items() if name in known}


def _sketch(weights: Weights) -> Tensor:
    return sketched(flattened(weights)[0].double())
