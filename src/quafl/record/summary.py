"""What recorded rows say: the numbers of the closing table and the report."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, isnan, nan
from os.path import commonpath
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from quafl.record.attendance import Attendance, read_attendance
from quafl.record.judged import Scores, read_scores
from quafl.record.rows import Row, by_seed, read_rows

SETTINGS, ROWS, VERSIONS = "settings.toml", "rows.csv", "versions.json"  # in a run folder
HISTORY = "history.jsonl"  # in that of a federation
REPORT = "report.html"  # beside the curves
MOST_NAMES = 4  # of settings, in a sentence


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
    goal: float | None = None  # in place of the target of the settings
    attendance: Attendance | None = None  # of a federation's clients
    clients: dict[int, Scores] = field(default_factory=dict)  # by seed: what each said of the last model, if asked

    @property
    def target(self) -> float:
        """The accuracy whose time is taken."""
        return float(self.settings["run"]["target"]) if self.goal is None else self.goal

    @property
    def aims(self) -> bool:
        """Whether the target is of what is measured: where the loss stands in for the usual metric, nobody has said
        one."""
        return self.goal is not None or self.metric == self.settings["run"]["metric"]

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

    @property
    def problem(self) -> dict[str, Any]:
        """What must be the same in curves that are compared: what is learned from which data, how they are dealt out,
        and what counts as an arrival."""
        run = {"metric": self.metric, "target": self.target, "lower_is_better": self.lower_is_better}
        clients = {"count": self.settings["clients"].get("count")}
        return {"task": self.settings.get("task", {}), "clients": clients, "run": run}

    def ended_at(self, seed: int) -> float:
        """Until when a seed was run; it may have diverged before its time, or was to stop at its target."""
        rows, run = self.seeds[seed], self.settings["run"]
        stopped = run.get("stop_at_target", False) and self._is_as_good(rows[-1], float(run["target"]))
        return rows[-1]["time"] if stopped or seed in self.troubles else self.end(rows)

    def end(self, rows: list[Row]) -> float:
        """Until when a seed's last evaluation stands: no later round has ended by the end of the run."""
        last = rows[-1]["time"]
        return last if self.real else float(self.settings["run"].get("until", last))

    def at_target(self, row: Row) -> bool:
        """Whether an evaluation is as good as the target."""
        return self.aims and self._is_as_good(row, self.target)

    def _is_as_good(self, row: Row, goal: float) -> bool:
        return row[self.metric] <= goal if self.lower_is_better else row[self.metric] >= goal


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


def read_curves(paths: Sequence[Path], target: float | None = None) -> list[Curve]:
    """All runs in the folders at any depth, ordered by path, with their own target or this one; a label that repeats
    gets its folder's path."""
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
    if target is not None:
        if not isfinite(target):
            raise RecordError(f"--target {target}: must be a finite number")
        curves = [replace(curve, goal=target) for curve in curves]
    targets = {curve.target for curve in curves}
    if len(targets) > 1:
        raise RecordError(
            f"the runs have different targets ({', '.join(map(str, sorted(targets)))}); choose one with --target, or "
            f"report them apart"
        )
    return curves


def check_showable(curves: Sequence[Curve]) -> None:
    """Whether they fit into one table and one picture; a RecordError if not."""
    metrics = {curve.metric for curve in curves}
    if len(metrics) > 1:
        raise RecordError(f"the runs measure different things ({', '.join(sorted(metrics))}); report them apart")
    if len({curve.real for curve in curves}) > 1:
        raise RecordError("some of the runs are simulated and some are real; report them apart")


def read_curve(folder: Path) -> Curve:
    """One run folder."""
    try:
        settings = tomllib.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        versions = json.loads((folder / VERSIONS).read_text(encoding="utf-8"))
        troubles = folder / "troubles.json"
        known = json.loads(troubles.read_text(encoding="utf-8")) if troubles.exists() else {}
        ended = {int(seed): str(trouble) for seed, trouble in known.items()}
        rows, attendance = by_seed(read_rows(folder / ROWS)), read_attendance(folder)
        scores = read_scores(folder, list(rows))
        curve = Curve(str(settings["label"]), rows, settings, versions, ended, attendance=attendance, clients=scores)
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
    there comes after those that always did. What cannot be compared stays apart, in the order given."""
    return [curve for group in comparable(curves) for curve in _ranked(group)]


def _ranked(curves: Sequence[Curve]) -> list[Curve]:
    """Of curves that can be compared."""

    def key(curve: Curve) -> tuple[int, float, float]:
        times, end = time_to_target(curve), final(curve, curve.metric).mean
        soonest = times.mean if times.values else 0.0
        return curve.planned - len(times.values), soonest, end if curve.lower_is_better else -end

    return sorted(curves, key=key)


def comparable(curves: Sequence[Curve]) -> list[list[Curve]]:
    """Groups of those that have the same problem."""
    groups: list[list[Curve]] = []
    for curve in sorted(curves, key=lambda curve: not curve.talks):  # a single client is compared with the first group
        same = (group for group in groups if not _apart(group[0], curve))
        found = next(same, None)
        if found is None:
            groups.append([curve])
        else:
            found.append(curve)
    return groups


def _apart(one: Curve, other: Curve) -> list[str]:
    """The settings for which they cannot be compared. A single client has all the data."""
    names = different(one.problem, other.problem)
    return names if one.talks and other.talks else [name for name in names if name != "clients.count"]


def different(one: Any, other: Any, path: str = "") -> list[str]:
    """The names of settings that are not the same in two tables."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return [] if one == other else [path]
    keys = dict.fromkeys([*one, *other])
    return [name for key in keys for name in different(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))]


def verdict(curves: Sequence[Curve]) -> str:
    """Who came first per simulated time, in a sentence; where not all can be compared, in one for each group that can,
    after another that says why."""
    groups = comparable(curves)
    if len(groups) == 1:
        return _verdict(groups[0])
    names = list(dict.fromkeys(name for group in groups[1:] for name in _apart(groups[0][0], group[0])))
    many = len(names) > MOST_NAMES
    why = ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more settings" if many else "")
    told = " ".join(f"{', '.join(curve.label for curve in _ranked(group))}: {_verdict(group)}" for group in groups)
    return f"Not all are compared: they differ in {why}. {told}"


def _verdict(curves: Sequence[Curve]) -> str:
    """Of curves that can be compared."""
    order = _ranked(curves)
    reached = [curve for curve in order if len(time_to_target(curve).values) == curve.planned]
    others = [curve for curve in order if curve not in reached]
    longest = max(curve.ended_at(seed) for curve in curves for seed in curve.seeds)
    short = [curve for curve in others if ended_without(curve) < longest]
    late = [curve for curve in others if curve not in short]
    some = [curve.label for curve in late if time_to_target(curve).values]
    never = [curve.label for curve in late if curve.label not in some]
    said = [_arrivals(reached, order[0])]
    said += [f"Not with every seed: {'; '.join(some)}."] if some and reached else []
    said += [f"Not reached: {'; '.join(never)}."] if never and reached else []
    said += [f"{curve.label} ended before, at time {ended_without(curve):g}." for curve in short if curve.aims]
    return " ".join([*said, *_other_worlds(curves)])


def _arrivals(reached: Sequence[Curve], one: Curve) -> str:
    """Who got to the target with every seed, and when; `one` is any of all curves."""
    goal = f"{one.metric} {one.target:g}"
    if not one.aims:
        wanted = one.settings["run"]["metric"]
        return f"There is no {wanted}, and no target for the {one.metric}: set run.metric and run.target, or --target."
    if not reached:
        return f"No algorithm reached {goal} with every seed."
    sentence = ", then ".join(f"{curve.label} after {time_to_target(curve).show('{:.0f}')}" for curve in reached)
    if one.real:
        return f"At {goal}: {sentence} seconds."
    return f"First at {goal} per simulated time: {sentence} time units."


def _other_worlds(curves: Sequence[Curve]) -> list[str]:
    """A sentence, if the simulated clients do not have the same speeds and links."""
    worlds = [curve.settings["clients"] for curve in curves if curve.talks and not curve.real]
    names = dict.fromkeys(name for world in worlds[1:] for name in different(worlds[0], world, "clients"))
    return [f"They differ in {', '.join(names)}, too."] if names else []


def ended_without(curve: Curve) -> float:
    """When the last of its seeds ended that has not got to the target; NaN if all have that are there."""
    return max((curve.ended_at(seed) for seed in curve.seeds if arrival(curve, seed) is None), default=nan)
