"""The evaluations of a run, in either world: its rows, its best model, and when the next one is due."""

from collections.abc import Mapping
from dataclasses import replace
from math import expm1, inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quafl.core.judgement import across, weighted
from quafl.core.messages import Buffers, Model
from quafl.core.pieces import is_finite
from quafl.core.seams import Score, ServerState, Task, Totals
from quafl.record.rows import COUNTED, METRIC, Row, make_row, worth

JUDGES = "clients_judging"  # a column: how many of them have
LOST = 1e9  # times the loss of the initial model, or one: who is there will not come back


class Diverged(Exception):
    """Training has left the finite numbers, or all sense."""

    rows: "list[Row]" = []  # noqa: RUF012  # until then, if whoever ran it has kept them


class Standing(NamedTuple):
    """A model that is shown: evaluated, and exported."""

    round: int
    model: Model
    buffers: Buffers


class Pending(NamedTuple):
    """A model that is to be judged, where the run stood then."""

    shown: Standing
    time: float
    totals: Totals


class Best(NamedTuple):
    """The best model evaluated so far."""

    worth: float
    shown: Standing


def is_sound(server: ServerState) -> bool:
    """Whether its numbers are finite."""
    known = [far for far in server.expected.values() if not isinstance(far, Tensor)]
    return all(map(isfinite, known)) and is_finite(server.model, server.buffers)


class Evaluations:
    """Every so much time there is one. The best model is the one with the highest `metric`, or lowest; or with the
    lowest loss where the task does not have the usual metric, and the run does not `stop` at a value of it. `trains`:
    clients learn from what the task here has.

    With an `average`, what is shown is an average of the server's models over time, with that time constant τ:
    a_k = a_{k−1} + (1 − e^{−(t_k − t_{k−1})/τ})·(X_k − a_{k−1}). What the clients get is X_k all the same.
    """

    def __init__(
        self,
        task: Task,
        start: ServerState,
        *,
        every: float,
        seed: int,
        metric: str,
        lower_is_better: bool,
        trains: bool,
        stops: bool = False,
        average: float = 0.0,
    ) -> None:
        self.rows: list[Row] = []
        self.clients: dict[str, Score] = {}  # the scores of the last evaluation that clients have made
        self.shown = Standing(start.round, start.model, start.buffers)
        self.best = Best(-inf, self.shown)
        self.due = 0.0  # when the next is
        self.time = 0.0  # of what is shown
        self._task, self._every, self._seed, self._trains, self._stops = task, every, seed, trains, stops
        self._metric, self._lower_is_better, self._average = metric, lower_is_better, average

    def reach(self, time: float, server: ServerState, *, checked: bool = False) -> None:
        """A round is over; Diverged, if the model is no longer finite and that has not been looked at."""
        if not (checked or is_sound(server)):
            raise Diverged(f"in round {server.round} the server's model is not finite; try a smaller lr")
        model, buffers = server.model, server.buffers
        if self._average:
            share = -expm1((self.time - time) / self._average)
            model = torch.lerp(self.shown.model, model, share)
            buffers = torch.lerp(self.shown.buffers, buffers, share)
        self.shown, self.time = Standing(server.round, model, buffers), time

    def begin(self, totals: Totals) -> Pending:
        """An evaluation of what is shown now; it is a row when it is concluded."""
        self.due = self._every * (self.time // self._every + 1)
        return Pending(self.shown, self.time, replace(totals))

    def evaluate(self, totals: Totals, **more: float) -> Row:
        """The row of what is shown; Diverged, if its loss is not finite."""
        return self.conclude(self.begin(totals), None, **more)

    def conclude(self, pending: Pending, clients: Mapping[str, Score] | None, **more: float) -> Row:
        """The row of what was shown then, with the scores that clients gave it, by their names; Diverged, if its loss
        is not finite. Where nobody else has judged it, the clients have."""
        shown, time = pending.shown, pending.time
        score = dict(self._task.evaluate(shown.model, shown.buffers))
        if not self._trains:
            score.pop("train_loss", None)
        believed = dict(score)  # what real clients say does not end a run
        if clients is not None:
            self.clients = dict(clients)
            by_them = {} if "loss" in score else weighted(clients.values())
            mine = {name: value for name, value in by_them.items() if name not in COUNTED}
            score = {**mine, **score, **across(clients.values(), lower_is_better=self._lower_is_better)}
            score[JUDGES] = len(clients)
        if self._trains or believed or clients is None:
            self._check(score if self._trains else believed, shown.round)
        row = {**make_row(self._seed, time, shown.round, pending.totals, score), **more}
        self.rows.append(row)
        if "loss" in score:
            value = worth(row, self._metric, lower_is_better=self._lower_is_better)
            if value > self.best.worth:
                self.best = Best(value, shown)
        return row

    def _check(self, score: Score, round: int) -> None:
        if not self.rows:
            check_first(score, self._metric, stops=self._stops)
            return
        loss = score.get("loss", 0.0)
        if not abs(loss) <= LOST * max(1.0, abs(self.rows[0].get("loss", 0.0))):
            raise Diverged(f"in round {round} the loss is {loss:.3g}; try a smaller lr")

    def state(self) -> dict[str, Any]:
        """For `restore`."""
        return {
            "rows": [dict(row) for row in self.rows],
            "clients": {name: dict(score) for name, score in self.clients.items()},
            "shown": tuple(self.shown),
            "best": {"worth": self.best.worth, "shown": tuple(self.best.shown)},
            "due": self.due,
            "time": self.time,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.rows = [dict(row) for row in state["rows"]]
        self.clients = {name: dict(score) for name, score in state["clients"].items()}
        self.shown = Standing(*state["shown"])
        self.best = Best(state["best"]["worth"], Standing(*state["best"]["shown"]))
        self.due, self.time = state["due"], state["time"]


def check_first(score: Score, metric: str, *, stops: bool) -> None:
    """Whether the initial model can be judged by that, and a run can go on from it; a ValueError if not."""
    if not isfinite(score.get("loss", 0.0)):
        raise ValueError(f"the loss of the initial model is {score['loss']}; look at the model and the data")
    if metric not in score and (stops or (score and metric != METRIC)):
        measured = ", ".join(score) or "nothing"
        raise ValueError(f"the metric is {metric!r}, the task measures {measured}; choose one of these")
