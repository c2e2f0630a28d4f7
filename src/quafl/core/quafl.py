"""QuAFL, Algorithm 1 of "Communication-Efficient Federated Learning With Data and Client Heterogeneity" (AISTATS 2024).

Line numbers are those of the paper's pseudocode: "server" for the main loop, "client" for InteractWithServer. Lines 2-6
of the server are `core.server.exchange`, LocalUpdates is `core.client.local_step`, and the order of a client's steps
within a contact is `core.client.contact`. What makes the algorithm is here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal

import torch
from torch import Tensor

from quafl.core.client import SETTLED, rebase
from quafl.core.defence import NO_DEFENCE, Defence
from quafl.core.randomness import Generators
from quafl.core.rows import lengthened, piecewise
from quafl.core.seams import Buffers, ClientState, Clock, Codecs, Counts, Fleet, Model, Note, ServerState
from quafl.core.server import check_settings, exchange, expected_distance, mean_or


@dataclass(frozen=True, slots=True)
class QuAFL:
    """Both sides of QuAFL.

    A round takes `wait` (swt) and the time of one exchange: clients answer at once, with whatever part of their
    `local_steps` (K) they have done. `weighted` damps fast clients by η_i = H_min/H_i. The two averagings can be
    weakened one by one, from the paper's (1) to none (0); the end points are the variants of Figure "averaging".
    """

    sampled: int = 5
    local_steps: int = 5
    weighted: bool = False
    server_averaging: float = 1.0
    client_averaging: float = 1.0
    wait: float = 0.0
    patience: float = inf  # how long the server waits for answers
    slowest_floor: float = 0.1  # H_min is never taken for less: a client that makes no steps must not stop the others
    defence: Defence = NO_DEFENCE

    answers: ClassVar[Literal["at once", "when done"]] = "at once"
    compressed: ClassVar[Literal["both ways", "uplink"]] = "both ways"

    def __post_init__(self) -> None:
        check_settings(self.sampled, self.local_steps, self.patience)
        for name, value in ("server_averaging", self.server_averaging), ("client_averaging", self.client_averaging):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}, must be from 0 (none) to 1 (the paper's)")
        if not self.wait >= 0:
            raise ValueError(f"wait is {self.wait}, must not be negative")

    # At the server

    def budget(self, speed: Tensor) -> Counts:
        """K, whoever it is."""
        return torch.full(speed.shape, self.local_steps)

    def rounds(
        self, state: ServerState, fleet: Fleet, codecs: Codecs, clock: Clock, rng: Generators
    ) -> Iterator[ServerState]:
        """X_0, X_1, …: one state a round, from the one given on."""
        speeds = lengthened(state.extra.get("speeds", torch.empty(0)), fleet.size, torch.nan)
        while True:  # server, line 1
            clock.sleep(self.wait)
            note = Note(round=state.round, sampled=self.sampled, slowest=self._slowest(speeds, fleet))
            replies, heard, votes = exchange(state, fleet, codecs, rng, note, self.patience, self.defence)  # lines 2-6
            model = self._merge(state.model, heard.vectors)  # line 8
            speeds = speeds.index_copy(0, replies.senders, replies.answer.speed)
            state = ServerState(
                model=model,
                buffers=self._merge(state.buffers, heard.statistics),
                round=state.round + 1,
                distance=expected_distance(state, heard, model),
                extra={"speeds": speeds, **votes},
            )
            yield state

    def _merge(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """X_{t+1} = X_t/(s+1) + Σ Q(Y^i)/(s+1) (server, line 8).

        Written with displacements: the same when all s have answered, and when some have not, the mean of all n+1
        models still stays where it is, because only those who answered adopt. Without averaging: the mean of Q(Y^i).
        """

        def merged(mine: Tensor, theirs: Tensor) -> Tensor:
            averaged = mine + (theirs - mine).sum(dim=0) / (self.sampled + 1)
            if self.server_averaging == 1:
                return averaged
            return torch.lerp(mean_or(mine, theirs), averaged, self.server_averaging)

        return piecewise(merged, mine, theirs)

    def _slowest(self, speeds: Tensor, fleet: Fleet) -> float:
        """H_min, the smallest speed that the clients present have told, or nearly; infinite while nobody has."""
        told = speeds[fleet.available()]
        told = told[~told.isnan()]
        return max(self.slowest_floor, self.defence.slowest(told)) if len(told) else inf

    # At the client

    def report(self, client: ClientState, note: Note) -> Model:
        """Y^i = X^i − η η_i h̃_i (client, line 2)."""
        if not self.weighted:
            return client.base - client.progress
        return client.base - self._damping(client, note).unsqueeze(-1).to(client.base.device) * client.progress

    def adopt(self, client: ClientState, model: Model, buffers: Buffers, note: Note) -> ClientState:
        """X^i = Q(X_t)/(s+1) + s/(s+1)·(X^i − η η_i h̃_i) (client, line 6). Without averaging: Q(X_t)."""
        kept = self.client_averaging * note.sampled / (note.sampled + 1)
        report = self.report(client, note)
        base = torch.lerp(model, report, kept, out=report)
        return rebase(client, base, torch.lerp(buffers, client.buffers, kept))

    def _damping(self, client: ClientState, note: Note) -> Tensor:
        """η_i = min(1, H_min/H_i); 1 until the client has seen enough contacts to know its H_i."""
        damping = (note.slowest / client.expected_steps).clamp(max=1.0)
        return damping.where(client.contacts >= SETTLED, 1.0)
