"""The server of a real federation: it runs the algorithm, and evaluates, records, checkpoints and stops."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from time import monotonic
from typing import Any

import torch

from quafl.codec import Identity
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm, Codecs, ServerState, Task
from quafl.deploy.clock import Stopped, TimeUp, WallClock
from quafl.deploy.fleet import NetworkFleet
from quafl.record.checkpoints import Checkpoints
from quafl.record.rows import Row, make_row, worth

_log = logging.getLogger(__name__)

SHARE = 0.05  # of the time, at most, goes into checkpoints


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how often, and what is looked at. All times are seconds."""

    until: float = inf
    rounds: int | None = None
    every: float = 10.0
    metric: str = "accuracy"
    target: float = 0.9
    lower_is_better: bool = False
    stop_at_target: bool = False
    checkpoint_seconds: float = 10.0
    seed: int = 0

    def worth(self, row: Row) -> float:
        """The higher, the better."""
        return worth(row, self.metric, lower_is_better=self.lower_is_better)

    def at_target(self, row: Row) -> bool:
        """Whether an evaluation is as good as the target."""
        if self.metric not in row:
            return False
        return row[self.metric] <= self.target if self.lower_is_better else row[self.metric] >= self.target


class Diverged(Exception):
    """Training has left the finite numbers."""


class Coordinator:
    """One run, from wherever it stands to its end; `rows` and `server` are what it has reached. `made_with` is kept in
    its checkpoints."""

    def __init__(
        self,
        task: Task,
        algorithm: Algorithm,
        codecs: Codecs,
        plan: Plan,
        fleet: NetworkFleet,
        clock: WallClock,
        checkpoints: Checkpoints,
        made_with: dict[str, str],
        on_row: Callable[[Row], None],
    ) -> None:
        self.server = self.best = ServerState(*task.initial())
        self.rows: list[Row] = []
        self._task, self._algorithm, self._codecs, self._plan = task, algorithm, codecs, plan
        self._fleet, self._clock, self._checkpoints, self._made_with = fleet, clock, checkpoints, made_with
        self._on_row = on_row
        self._rng = Generators(plan.seed)
        self._best_worth, self._due = -inf, 0.0

    @property
    def seconds(self) -> float:
        """Of running, so far."""
        return self._clock.now()

    def restore(self, kept: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.server, self.best = ServerState(**kept["server"]), ServerState(**kept["best"])
        self.rows = [dict(row) for row in kept["rows"]]
        self._best_worth, self._due = kept["best_worth"], kept["due"]
        self._rng.restore(kept["rng"])
        self._clock.restore(kept["clock"])
        self._fleet.reach(self.server)
        self._fleet.restore(kept["fleet"])

    def run(self) -> bool:
        """Until the end, which is True; False when asked to stop before."""
        codecs = Codecs(up=Identity(), down=self._codecs.down)  # the fleet has decoded what comes up
        saved_at = monotonic()
        self._reach(self.server)
        try:
            self._fleet.ends_at = monotonic() + self._plan.until - self._clock.now()
            if self.rows and self._is_over():
                _log.info("this run is over already; raise run.until or run.rounds, or choose another --out")
            elif self.rows:
                _log.info("going on from round %d, after %.0f s", self.server.round, self._clock.now())
                self._fleet.replay()
            else:
                self._fleet.available()  # the clock starts when there is somebody
                self._clock.restore(0.0)
                self._fleet.ends_at = monotonic() + self._plan.until
                self._evaluate()
            if not self._is_over():
                for state in self._algorithm.rounds(self.server, self._fleet, codecs, self._clock, self._rng):
                    self._reach(state)
                    if self._clock.now() >= self._due:
                        self._evaluate()
                    if self._is_over():
                        break
                    if monotonic() > saved_at:
                        saved_at = monotonic() + self._save()
        except TimeUp:
            _log.warning("nobody was there any more when the time was up")
            if not self.rows:
                self._evaluate()
        except Stopped:
            self._save(between_rounds=False)
            return False
        if self.rows[-1]["round"] != self.server.round:
            self._evaluate()
        self._save()
        self._fleet.finish()
        return True

    def _is_over(self) -> bool:
        plan, row = self._plan, self.rows[-1]
        rounds_done = plan.rounds is not None and self.server.round >= plan.rounds
        return rounds_done or self._clock.now() >= plan.until or (plan.stop_at_target and plan.at_target(row))

    def _reach(self, state: ServerState) -> None:
        """Where the run stands after a round: a checkpoint made later, in the middle of the next one, is of here."""
        if not (state.model.isfinite().all() and state.buffers.isfinite().all() and isfinite(state.distance)):
            raise Diverged(f"in round {state.round} the server's model is not finite; try a smaller lr")
        self.server = state
        self._fleet.reach(state)
        self._here = {"rng": self._rng.state(), "clock": self._clock.state(), "fleet": self._fleet.state()}

    def _evaluate(self) -> None:
        score = dict(self._task.evaluate(self.server.model, self.server.buffers))
        score.pop("train_loss", None)  # nobody learns from what the server has
        row = make_row(self._plan.seed, self._clock.now(), self.server, self._fleet.totals, score)
        self.rows.append(row)
        if score and self._plan.worth(row) > self._best_worth:
            self._best_worth, self.best = self._plan.worth(row), self.server
        self._due = self._plan.every * (self._clock.now() // self._plan.every + 1)
        self._on_row(row)

    def _save(self, *, between_rounds: bool = True) -> float:
        """Gives the seconds until the next time. A full disk must not end the run."""
        began = monotonic()
        try:
            self._checkpoints.save(
                {
                    **self._here,
                    "made_with": self._made_with,
                    "server": _plain(self.server),
                    "best": _plain(self.best),
                    "best_worth": self._best_worth,
                    "rows": self.rows,
                    "due": self._due,
                }
            )
            if between_rounds:  # else the journal has replies to the round that was left
                self._fleet.forget_applied()
        except OSError as error:
            _log.error("no checkpoint could be written: %s; going on without", error)
        return max(self._plan.checkpoint_seconds, (monotonic() - began) / SHARE)


def _plain(state: ServerState) -> dict[str, Any]:
    return {**asdict(replace(state, extra={})), "extra": {name: torch.as_tensor(v) for name, v in state.extra.items()}}
