"""Decoding with bits that have to be asked for, where nobody may wait: an attempt says what it needs, and is made again
when that has come. Nothing else is kept of it."""

from quafl.codec.coders import RefineVector
from quafl.codec.seams import Packet

MOST_REPAIRS = 8  # of a vector: refinement needs six at most


class Wanted(Exception):
    """A message does not decode without this."""

    def __init__(self, place: int, request: Packet) -> None:
        self.place, self.request = place, request


def replay(known: list[Packet]) -> RefineVector:
    """What has been asked for, in order; then `Wanted`."""
    left = iter(tuple(known))

    def refine(place: int, row: int, request: Packet) -> Packet:
        for refinement in left:
            return refinement
        raise Wanted(place, request)

    return refine
