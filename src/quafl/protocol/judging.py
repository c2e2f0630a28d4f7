"""What clients say of a model that the server has sent them to be judged."""

from collections.abc import Iterable
from math import isfinite

from quafl.codec.seams import WireError
from quafl.core.seams import EXAMPLES, Score
from quafl.protocol import messages
from quafl.protocol.carrier import Octets

MOST_MEASURES, LONGEST_NAME = 64, 100
MOST_EXAMPLES = 10**9  # of a client
LARGEST = 1e30  # measure


class Judgement:
    """Of one model: who is still being asked, and what the others have said."""

    def __init__(self, ticket: bytes, octets: bytes, asked: Iterable[str]) -> None:
        self.ticket, self.octets = ticket, octets
        self.waiting = set(asked)
        self.scores: dict[str, Score] = {}
        self.nbytes = 0  # that it took, both ways

    @property
    def is_over(self) -> bool:
        """Nobody is being asked any more."""
        return not self.waiting


def score_to_bytes(score: Score | None) -> bytes:
    """As a text; measures that are not finite are left out."""
    return messages.as_text({name: value for name, value in (score or {}).items() if isfinite(value)})


def score_from(text: Octets) -> Score | None:
    """What a client has said, or a WireError; None: it has nothing to judge by."""
    values = messages.from_text(text)
    if not values:
        return None
    if len(values) > MOST_MEASURES or any(len(name) > LONGEST_NAME for name in values):
        raise WireError(f"judges by {len(values)} measures, must be at most {MOST_MEASURES} with short names")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise WireError(f"judges the model by {name[:40]!r} = {str(value)[:40]!r}, must be a finite number")
    if not 0 < values.get(EXAMPLES, 0) <= MOST_EXAMPLES:
        raise WireError(f"judges by {values.get(EXAMPLES, 0)} examples, must be from 1 to {MOST_EXAMPLES}")
    return {name: float(value) for name, value in values.items()}
