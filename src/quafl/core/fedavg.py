"""FedAvg (McMahan et al., 2017, Algorithm 1), with a fixed number of local steps, as in the paper's comparison.

The sequential Baseline is FedAvg on one slow client that holds all the data: K = 1, s = 1, no interaction time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal

from torch import Tensor

from quafl.core.client import rebase
from quafl.core.randomness import Generators
from quafl.core.seams import Buffers, ClientState, Clock, Codecs, Fleet, Model, Note, ServerState
from quafl.core.server import check_counts, exchange, expected_distance


@dataclass(frozen=True, slots=True)
class FedAvg:
    """Each round, `sampled` clients start from the server's model, take exactly `local_steps` steps, and the server
    adopts the mean of what they send back. The round lasts as long as the slowest of them, plus the exchange."""

    sampled: int = 5
    local_steps: int = 5
    patience: float = inf  # how long the server waits for answers

    answers: ClassVar[Literal["at once", "when done"]] = "when done"

    def __post_init__(self) -> None:
        check_counts(self.sampled, self.local_steps)

    def rounds(
        self, state: ServerState, fleet: Fleet, codecs: Codecs, clock: Clock, rng: Generators
    ) -> Iterator[ServerState]:
        """w_0, w_1, …: one state a round, from the one given on."""
        while True:
            note = Note(round=state.round, sampled=self.sampled, slowest=inf)
            replies, decoded = exchange(state, fleet, codecs, rng, note, self.patience)
            model = _mean(decoded, state.model)
            state = ServerState(
                model=model,
                buffers=_mean(replies.answer.packet.exact, state.buffers),
                round=state.round + 1,
                distance=expected_distance(state, replies, model),
            )
            yield state

    def report(self, client: ClientState, note: Note) -> Model:
        """w^k after the local steps."""
        return client.base - client.progress

    def adopt(self, client: ClientState, model: Model, buffers: Buffers, note: Note) -> ClientState:
        """w^k ← w_t."""
        return rebase(client, model.expand_as(client.base), buffers.expand_as(client.buffers))


def _mean(theirs: Tensor, mine: Tensor) -> Tensor:
    """w_{t+1} = Σ w^k/m over the m clients that answered; w_t if none did."""
    return theirs.mean(dim=0) if len(theirs) else mine
