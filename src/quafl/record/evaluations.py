"""The evaluations of a run, in either world: its rows, its best state, and when the next one is due."""

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from quafl.core.pieces import is_finite
from quafl.core.seams import ServerState, Task, Totals
from quafl.record.rows import Row, make_row, worth


class Diverged(Exception):
    """Training has left the finite numbers."""

    rows: "list[Row]" = []  # noqa: RUF012  # until then, if whoever ran it has kept them


@dataclass(frozen=True, slots=True)
class Best:
    """The best state evaluated so far."""

    worth: float
    server: ServerState


class Evaluations:
    """Every so much time there is one. The best state is the one with the highest `metric`, or lowest, or with the
    lowest loss where the task does not have the metric. `trains`: clients learn from what the task here has."""

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
    ) -> None:
        self.rows: list[Row] = []
        self.best = Best(-inf, start)
        self.due = 0.0  # when the next is
        self._task, self._every, self._seed, self._trains = task, every, seed, trains
        self._metric, self._lower_is_better = metric, lower_is_better

    def evaluate(self, time: float, server: ServerState, totals: Totals, **more: float) -> Row:
        """The row of a state at a time; Diverged, if its loss is not finite."""
        score = dict(self._task.evaluate(server.model, server.buffers))
        if not self._trains:
            score.pop("train_loss", None)
        if not isfinite(score.get("loss", 0.0)):
            if not self.rows:
                raise ValueError(f"the loss of the initial model is {score['loss']}; look at the model and the data")
            raise Diverged(f"in round {server.round} the loss is {score['loss']}; try a smaller lr")
        row = {**make_row(self._seed, time, server, totals, score), **more}
        self.rows.append(row)
        if score:
            value = worth(row, self._metric, lower_is_better=self._lower_is_better)
            if value > self.best.worth:
                self.best = Best(value, server)
        self.due = self._every * (time // self._every + 1)
        return row

    def check(self, server: ServerState) -> None:
        """Diverged, if it is."""
        finite = all(map(isfinite, server.expected.values()))
        if not (finite and is_finite(server.model) and is_finite(server.buffers)):
            raise Diverged(f"in round {server.round} the server's model is not finite; try a smaller lr")

    def state(self) -> dict[str, Any]:
        """For `restore`."""
        return {
            "rows": [dict(row) for row in self.rows],
            "best": {"worth": self.best.worth, "server": self.best.server.tree()},
            "due": self.due,
        }

    def restore(self, state: dict[str, Any], made: type[Any]) -> None:
        """Continue from there; servers are of that record."""
        self.rows = [dict(row) for row in state["rows"]]
        self.best = Best(state["best"]["worth"], made.from_tree(state["best"]["server"]))
        self.due = state["due"]
