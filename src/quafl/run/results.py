"""What the front doors give back: rows, models, tables and pictures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from quafl.record.judged import Scores
from quafl.record.rows import Row, worth
from quafl.record.summary import Curve, final, megabytes, ranked, time_to_target

if TYPE_CHECKING:
    from quafl.record.plots import Picture

PLOTS = "plots need matplotlib, which is not installed: pip install 'quafl[figures]'"
FRAMES = "a frame needs pandas, which is not installed: pip install 'quafl[notebook]'; `rows` is a list of dictionaries"


class Models(NamedTuple):
    """Of a seed."""

    last: nn.Module
    best: nn.Module  # of all that were evaluated


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """What `simulate` gives back.

    Attributes:
      curve: the rows by seed (`curve.seeds`), and the settings that they were computed with.
      models: by seed, the last model and the best one evaluated.
      interrupted: whether it was stopped, by Ctrl-C or by its callback, before its end.
    """

    curve: Curve
    models: Mapping[int, Models]
    interrupted: bool = False

    @property
    def rows(self) -> list[Row]:
        """A dictionary per evaluation, one seed after another."""
        return [row for rows in self.curve.seeds.values() for row in rows]

    @property
    def clients(self) -> Mapping[int, Scores]:
        """By seed, what each client said of the last model, by its number; nothing, if none was asked."""
        return self.curve.clients

    @property
    def model(self) -> nn.Module:
        """The last model of the first seed."""
        return next(iter(self.models.values())).last

    @property
    def best(self) -> nn.Module:
        """The best model of all seeds and evaluations."""
        seed = max(self.models, key=lambda seed: max(self._worth(row) for row in self.curve.seeds[seed]))
        return self.models[seed].best

    def _worth(self, row: Row) -> float:
        return worth(row, self.curve.metric, lower_is_better=self.curve.lower_is_better)

    @property
    def frame(self) -> Any:
        """The rows as a pandas.DataFrame."""
        return _frame(self.rows)

    def plot(self, y: str | None = None, *, x: str = "time") -> "Picture":
        """The mean over seeds, and a band of one standard deviation.

        Args:
          y: a column of the rows; by default the metric that the best model is chosen by.
          x: "time", "rounds", "local steps" or "megabytes".

        Returns:
          A matplotlib figure, which a notebook shows.
        """
        return _plot([self.curve], y, x)

    def __repr__(self) -> str:
        curve, seeds = self.curve, len(self.curve.seeds)
        end = f"{curve.label}, {seeds} seed{'s' * (seeds > 1)} until time {_last(curve):g}"
        score = f"{curve.metric} {final(curve, curve.metric).show('{:.3f}')}"
        sent = f"{megabytes(curve).show('{:.2f}')} MB sent"
        return f"<Result: {end}: {score}, {sent}{', interrupted' * self.interrupted}>"


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """What `compare` gives back: a result for each curve, by its label.

    Attributes:
      results: a `Result` for each.
    """

    results: Mapping[str, Result]

    def __getitem__(self, label: str) -> Result:
        return self.results[label]

    @property
    def curves(self) -> list[Curve]:
        """The curves, as recorded."""
        return [result.curve for result in self.results.values()]

    @property
    def interrupted(self) -> bool:
        """Whether some of them were stopped before their end."""
        return any(result.interrupted for result in self.results.values())

    @property
    def frame(self) -> Any:
        """All rows as a pandas.DataFrame, with a column for the curve."""
        return _frame([{"curve": label, **row} for label, result in self.results.items() for row in result.rows])

    def plot(self, y: str | None = None, *, x: str = "time") -> "Picture":
        """A line for each curve; arguments and figure are those of `Result.plot`."""
        return _plot(self.curves, y, x)

    def __repr__(self) -> str:
        return _table(ranked(self.curves), {})


@dataclass(frozen=True, slots=True, repr=False)
class Tuning(Comparison):
    """What `tune` gives back: a result for each point of the grid, judged on what the clients did not learn from.

    Attributes:
      points: by label, the arguments of `simulate` that were tried.
      scores: by label, the mean of the metric over time and seeds; negative where lower is better.
    """

    points: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def best(self) -> dict[str, Any]:
        """The arguments that were best: `quafl.simulate(**{**arguments, **tuned.best})`."""
        return dict(self.points[max(self.scores, key=self.scores.__getitem__)])

    def __repr__(self) -> str:
        order = sorted(self.curves, key=lambda curve: -self.scores[curve.label])
        return _table(order, {f"mean {order[0].metric}": lambda curve: f"{abs(self.scores[curve.label]):.3f}"})


def _last(curve: Curve) -> float:
    return max(rows[-1]["time"] for rows in curve.seeds.values())


def _table(curves: Sequence[Curve], more: Mapping[str, Callable[[Curve], str]]) -> str:
    """A line for each curve."""
    columns: dict[str, Callable[[Curve], str]] = {
        "": lambda curve: f"{curve.label}{' (diverged)' * bool(curve.troubles)}",
        **more,
        f"final {curves[0].metric}": lambda curve: final(curve, curve.metric).show("{:.3f}"),
        f"time to {curves[0].target:g}": lambda curve: time_to_target(curve).show("{:.0f}"),
        "MB sent": lambda curve: megabytes(curve).show("{:.2f}"),
    }
    lines = [list(columns), *([show(curve) for show in columns.values()] for curve in curves)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _frame(rows: list[dict[str, Any]]) -> Any:
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(FRAMES, name="pandas") from error
    return pandas.DataFrame(rows)


def _plot(curves: Sequence[Curve], y: str | None, x: str) -> "Picture":
    try:
        from quafl.record import plots
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(PLOTS, name=error.name) from error
    metric = y or curves[0].metric
    columns = list(next(iter(curves[0].seeds.values()))[0])
    if metric not in columns:
        raise ValueError(f"y is {y!r}, must be a column of the rows: {', '.join(columns)}")
    if x not in plots.AXES:
        raise ValueError(f"x is {x!r}, must be one of {', '.join(plots.AXES)}")
    return plots.draw(curves, plots.AXES[x], plots.column(metric))
