"""What recorded rows say: the numbers of the closing table and the report."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from quafl.record.rows import Row, by_seed, read_rows


class RecordError(Exception):
    """A run folder that cannot be read, or must not be written."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A run folder, read."""

    label: str
    seeds: dict[int, list[Row]]
    settings: dict[str, Any]
    versions: dict[str, str]

    @property
    def target(self) -> float:
        """The accuracy whose time is taken."""
        return float(self.settings["run"]["target"])

    @property
    def clients(self) -> int:
        """n."""
        return int(self.settings["clients"]["count"])

    @property
    def metric(self) -> str:
        """What is shown beside the loss: the first measure after it."""
        columns = list(next(iter(self.seeds.values()))[0])
        return columns[columns.index("loss") + 1]


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
    """All runs in the folders, at any depth, in the order of their paths."""
    found = [folder for path in paths for folder in sorted({p.parent for p in path.rglob("rows.csv")})]
    if not found:
        raise RecordError(f"no finished run in {', '.join(map(str, paths))}; give folders that 'quafl run' wrote")
    return [read_curve(folder) for folder in found]


def read_curve(folder: Path) -> Curve:
    """One run folder."""
    try:
        settings = tomllib.loads((folder / "settings.toml").read_text(encoding="utf-8"))
        versions = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
        return Curve(settings["label"], by_seed(read_rows(folder / "rows.csv")), settings, versions)
    except (OSError, ValueError, KeyError) as error:
        raise RecordError(f"{folder} does not hold a complete run ({error}); run it again") from error


def final(curve: Curve, column: str) -> Spread:
    """The column's last value of each seed."""
    return Spread(tuple(rows[-1][column] for rows in curve.seeds.values()))


def sent(row: Row) -> float:
    """Megabytes in both directions until then."""
    return (row["bytes_up"] + row["bytes_down"]) / 1e6


def megabytes(curve: Curve) -> Spread:
    """Sent until the end; a single client sends nothing to anybody."""
    return Spread(tuple(sent(rows[-1]) for rows in curve.seeds.values()) if curve.clients > 1 else ())


def megabytes_to_target(curve: Curve) -> Spread:
    """Sent until the target was reached; only of the seeds that did."""
    return Spread(tuple(sent(row) for row in _at_target(curve)) if curve.clients > 1 else ())


def zero_step_share(curve: Curve) -> Spread:
    """Of all contacts, those that found a client without a completed step."""
    return Spread(tuple(rows[-1]["zero_step_contacts"] / max(rows[-1]["contacts"], 1) for rows in curve.seeds.values()))


def time_to_target(curve: Curve) -> Spread:
    """When each seed first evaluated at the target or better; only of the seeds that did."""
    return Spread(tuple(row["time"] for row in _at_target(curve)))


def _at_target(curve: Curve) -> list[Row]:
    firsts = (next((row for row in rows if row[curve.metric] >= curve.target), None) for rows in curve.seeds.values())
    return [row for row in firsts if row is not None]


def ranked(curves: Sequence[Curve]) -> list[Curve]:
    """Soonest at the target first; a curve of which a seed never got there comes after those that always did."""

    def key(curve: Curve) -> tuple[int, float]:
        times = time_to_target(curve)
        return len(curve.seeds) - len(times.values), times.mean if times.values else -final(curve, curve.metric).mean

    return sorted(curves, key=key)


def verdict(curves: Sequence[Curve]) -> str:
    """Who came first per simulated time, in a sentence."""
    order = ranked(curves)
    reached = [(curve, time_to_target(curve)) for curve in order]
    reached = [(curve, times) for curve, times in reached if len(times.values) == len(curve.seeds)]
    goal = f"{order[0].metric} {order[0].target:g}"
    if not reached:
        return f"No algorithm reached {goal} with every seed."
    sentence = ", then ".join(f"{curve.label} after {times.show('{:.0f}')}" for curve, times in reached)
    late = [curve.label for curve in order if curve not in [curve for curve, _ in reached]]
    missed = f" Not with every seed: {', '.join(late)}." if late else ""
    return f"First at {goal} per simulated time: {sentence} time units.{missed}"
