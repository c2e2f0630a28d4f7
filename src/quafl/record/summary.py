"""What recorded rows say: the numbers of the closing table and the report."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isnan, nan
from os.path import commonpath
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from quafl.record.rows import Row, by_seed, read_rows

SETTINGS, ROWS, VERSIONS = "settings.toml", "rows.csv", "versions.json"  # in a run folder
HISTORY = "history.jsonl"  # in that of a federation
REPORT = "report.html"  # beside the curves


class RecordError(Exception):
    """A run folder that cannot be read, or must not be written."""


class RunError(Exception):
    """A run that could not go on."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A run folder, read."""

    label: str
    seeds: dict[int, list[Row]]
    settings: dict[str, Any]
    versions: dict[str, str]
    troubles: dict[int, str] = field(default_factory=dict)  # seeds that ended before their time, and why

    @property
    def target(self) -> float:
        """The accuracy whose time is taken."""
        return float(self.settings["run"]["target"])

    @property
    def talks(self) -> bool:
        """Whether anything is sent: a single simulated client has nobody to send it to."""
        return bool(self.settings["clients"].get("count") != 1)

    @property
    def real(self) -> bool:
        """Whether its time is that of a clock on the wall."""
        return bool(self.settings["run"].get("clock") == "wall")

    @property
    def metric(self) -> str:
        """What is shown beside the loss: the settings' metric, or the loss itself where there is no such column."""
        wanted = str(self.settings["run"]["metric"])
        return wanted if wanted in next(iter(self.seeds.values()))[0] else "loss"

    @property
    def lower_is_better(self) -> bool:
        """Of the metric."""
        return self.metric == "loss" or bool(self.settings["run"]["lower_is_better"])

    @property
    def planned(self) -> int:
        """Seeds that the settings ask for; fewer are here when the run was interrupted."""
        return len(self.settings["run"].get("seeds", [0]))

    def end(self, rows: list[Row]) -> float:
        """Until when a seed's last evaluation stands: no later round has ended by the end of the run."""
        last = rows[-1]["time"]
        return last if self.real else float(self.settings["run"].get("until", last))

    def at_target(self, row: Row) -> bool:
        """Whether an evaluation is as good as the target."""
        value = row[self.metric]
        return value <= self.target if self.lower_is_better else value >= self.target


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over seeds: mean and standard deviation (of one seed: nothing)."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """NaN if there is nothing to average, or one of the values is missing."""
        return mean(self.values) if self.values else nan

    @property
    def deviation(self) -> float:
        """Between seeds."""
        return stdev(self.values) if len(self.values) > 1 else nan

    def show(self, pattern: str) -> str:
        """Mean ± deviation, or a dash."""
        if isnan(self.mean):
            return "–"
        return pattern.format(self.mean) + ("" if isnan(self.deviation) else " ± " + pattern.format(self.deviation))


def read_curves(paths: Sequence[Path]) -> list[Curve]:
    """All runs in the folders at any depth, ordered by path; a label that repeats gets its folder's path."""
    found = sorted({folder.resolve().parent for path in paths for folder in path.rglob(ROWS)})
    if not found:
        raise RecordError(f"no finished run in {', '.join(map(str, paths))}; give folders that 'quafl run' wrote")
    curves = [read_curve(folder) for folder in found]
    labels = [curve.label for curve in curves]
    above = Path(commonpath(found))
    curves = [
        replace(curve, label=f"{curve.label} ({folder.relative_to(above)})") if labels.count(curve.label) > 1 else curve
        for curve, folder in zip(curves, found, strict=True)
    ]
    metrics, targets = {curve.metric for curve in curves}, {curve.target for curve in curves}
    if len(metrics) > 1:
        raise RecordError(f"the runs measure different things ({', '.join(sorted(metrics))}); report them apart")
    if len({curve.real for curve in curves}) > 1:
        raise RecordError("some of the runs are simulated and some are real; report them apart")
    if len(targets) > 1:
        raise RecordError(
            f"the runs have different targets ({', '.join(map(str, sorted(targets)))}); report them apart"
        )
    return curves


def read_curve(folder: Path) -> Curve:
    """One run folder."""
    try:
        settings = tomllib.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        versions = json.loads((folder / VERSIONS).read_text(encoding="utf-8"))
        troubles = folder / "troubles.json"
        known = json.loads(troubles.read_text(encoding="utf-8")) if troubles.exists() else {}
        ended = {int(seed): str(trouble) for seed, trouble in known.items()}
        curve = Curve(str(settings["label"]), by_seed(read_rows(folder / ROWS)), settings, versions, ended)
        if not curve.seeds:
            raise ValueError("no rows")
        time_to_target(curve), megabytes(curve), curve.planned  # what every reader needs
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{folder} does not hold a complete run ({error!r}); run it again") from error
    return curve


def final(curve: Curve, column: str) -> Spread:
    """The column's last value of each seed."""
    return Spread(tuple(rows[-1][column] for rows in curve.seeds.values()))


def sent(row: Row) -> float:
    """Megabytes in both directions until then."""
    return (row["bytes_up"] + row["bytes_down"]) / 1e6


def megabytes(curve: Curve) -> Spread:
    """Sent until the end; a single client sends nothing to anybody."""
    return Spread(tuple(sent(rows[-1]) for rows in curve.seeds.values()) if curve.talks else ())


def megabytes_to_target(curve: Curve) -> Spread:
    """Sent until the target was reached; only of the seeds that did."""
    return Spread(tuple(sent(row) for row in _at_target(curve)) if curve.talks else ())


def zero_step_share(curve: Curve) -> Spread:
    """Of all contacts, those that found a client without a completed step."""
    return Spread(tuple(zero_step_shares(curve).values()))


def zero_step_shares(curve: Curve) -> dict[int, float]:
    """The same by seed."""
    return _shares(curve, "zero_step_contacts", "contacts")


def slow_zero_step_shares(curve: Curve) -> dict[int, float]:
    """Of the contacts of slow clients, by seed."""
    return _shares(curve, "slow_zero_step_contacts", "slow_contacts")


def _shares(curve: Curve, part: str, whole: str) -> dict[int, float]:
    lasts = {seed: rows[-1] for seed, rows in curve.seeds.items()}
    return {seed: row.get(part, nan) / max(row.get(whole, nan), 1) for seed, row in lasts.items()}


def time_to_target(curve: Curve) -> Spread:
    """When each seed first evaluated at the target or better; only of the seeds that did, and did not diverge."""
    return Spread(tuple(row["time"] for row in _at_target(curve)))


def _at_target(curve: Curve) -> list[Row]:
    firsts = (arrival(curve, seed) for seed in curve.seeds)
    return [row for row in firsts if row is not None]


def arrival(curve: Curve, seed: int) -> Row | None:
    """A seed's first evaluation at the target or better, if it got there and did not diverge."""
    rows = () if seed in curve.troubles else curve.seeds[seed]
    return next((row for row in rows if curve.at_target(row)), None)


def ranked(curves: Sequence[Curve]) -> list[Curve]:
    """Soonest at the target first, and of equally soon ones the one that ends best; a curve of which a seed never got
    there comes after those that always did."""

    def key(curve: Curve) -> tuple[int, float, float]:
        times, end = time_to_target(curve), final(curve, curve.metric).mean
        soonest = times.mean if times.values else 0.0
        return curve.planned - len(times.values), soonest, end if curve.lower_is_better else -end

    return sorted(curves, key=key)


def verdict(curves: Sequence[Curve]) -> str:
    """Who came first per simulated time, in a sentence."""
    order = ranked(curves)
    reached = [(curve, time_to_target(curve)) for curve in order]
    reached = [(curve, times) for curve, times in reached if len(times.values) == curve.planned]
    goal = f"{order[0].metric} {order[0].target:g}"
    if not reached:
        return f"No algorithm reached {goal} with every seed."
    sentence = ", then ".join(f"{curve.label} after {times.show('{:.0f}')}" for curve, times in reached)
    late = [curve.label for curve in order if curve not in [curve for curve, _ in reached]]
    missed = f" Not with every seed: {', '.join(late)}." if late else ""
    if order[0].real:
        return f"At {goal}: {sentence} seconds.{missed}"
    return f"First at {goal} per simulated time: {sentence} time units.{missed}"
