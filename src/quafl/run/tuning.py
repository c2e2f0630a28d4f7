"""Learning rates by the same rule for everybody: grids of one size, judged on a part of the training set."""

import csv
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from quafl.record.files import write_atomically
from quafl.record.summary import Curve, RecordError, final, ranked, read_curve, time_to_target
from quafl.record.verdicts import areas
from quafl.run.folders import RunFolder
from quafl.run.sweeps import Point, Swept, sweep
from quafl.settings.base import SettingsError
from quafl.settings.curve import Settings
from quafl.settings.figures import Measure, Reproduction
from quafl.settings.reading import checked, load
from quafl.settings.tasks import ClassTask

GRID = "grid.csv"
SEEDS = [100]  # of what is tried for settings of one's own
NO_PART = "has no part of the training set to judge by"


class Tried(NamedTuple):
    """A point, and what came of it."""

    point: Point
    curve: Curve
    chosen: bool = False


def grid(wanted: Reproduction) -> list[Settings]:
    """For each kind of curve of a figure, its first one with every point of its grid, on seeds of their own."""
    tuning = wanted.tuning
    return [
        _variant(curve, dict(zip(own, values, strict=True)), wanted)
        for curve in _firsts(wanted).values()
        for own in [tuning.grid(curve.label, curve.algorithm.name)]
        for values in product(*own.values())
    ]


def around(wanted: Reproduction, folders: Sequence[RunFolder], *, beyond: bool = False) -> list[Settings]:
    """The neighbours of each kind's best point that have not been tried: half a step down and up in each setting that
    is a number, and a whole one beyond the grid where the best is at its edge, if there is anything.

    `beyond`: only those beyond all that has been tried, until there are none: the edge of a grid is not a result.
    """
    found: list[Settings] = []
    for kind, curve in _firsts(wanted).items():
        own = wanted.tuning.grid(curve.label, curve.algorithm.name)
        mine = [folder for folder in folders if _kind(folder.settings, wanted) == kind]
        best = _best(mine, wanted)
        point = {name: getattr(best.algorithm, name) for name in own}
        tried = [{name: getattr(folder.settings.algorithm, name) for name in own} for folder in mine]
        for name, grid_of in own.items():
            values = list({one[name] for one in tried}) if beyond else grid_of
            for beside in _beside(point[name], values, beyond=beyond):
                new = {**point, name: beside}
                with suppress(SettingsError):  # there is nothing beyond
                    if new not in tried:
                        found.append(_variant(curve, new, wanted))
    return found


def _beside(value: Any, values: Sequence[Any], *, beyond: bool = False) -> list[Any]:
    """What is tried on both sides of a value of a grid: halfway to the next one, or beyond the last; or that alone."""
    if isinstance(value, bool | str) or len(values) < 2:
        return []
    ordered = sorted(values)
    place = ordered.index(value)
    result: list[float] = []
    for other, opposite in (place - 1, place + 1), (place + 1, place - 1):
        if 0 <= other < len(ordered):
            if beyond:
                continue
            result.append((value * ordered[other]) ** 0.5 if min(ordered) > 0 else (value + ordered[other]) / 2)
        elif min(ordered) > 0:
            result.append(value * value / ordered[opposite])
        else:
            result.append(2 * value - ordered[opposite])
    whole = all(isinstance(one, int) for one in values)
    return [round(one) if whole else float(f"{one:.2g}") for one in result]


def _firsts(wanted: Reproduction) -> dict[str, Settings]:
    """The first curve of each kind."""
    found: dict[str, Settings] = {}
    for curve in wanted.curves:
        found.setdefault(_kind(curve, wanted), curve)
    return found


def _kind(curve: Settings, wanted: Reproduction) -> str:
    """What has rates of its own: an algorithm, and a curve with a grid of its own."""
    weighted = getattr(curve.algorithm, "weighted", False)
    return f"{wanted.tuning.name(curve.label) or curve.algorithm.name} {weighted} {curve.clients.count == 1}"


def _variant(curve: Settings, point: dict[str, Any], wanted: Reproduction) -> Settings:
    task = curve.task
    if not isinstance(task, ClassTask):
        raise RecordError(f"{wanted.name} cannot be tuned: {task.name} {NO_PART}")
    said = " ".join(f"{name} {value:g}" if not isinstance(value, str) else value for name, value in point.items())
    settings = {**curve.algorithm.model_dump(), **point}
    update = {
        "task": task.model_copy(update={"judge": "validation"}),
        "run": curve.run.model_copy(update={"seeds": wanted.tuning.seeds}),
        "label": f"{curve.label} {said}",
        "algorithm": checked(type(curve.algorithm), settings, f" (in [tuning] of {wanted.name})"),
    }
    return curve.model_copy(update=update)


def _best(folders: Sequence[RunFolder], wanted: Reproduction) -> Settings:
    curves = {folder.settings.label: read_curve(folder.path) for folder in folders}
    best = _ranked(list(curves.values()), wanted.tuning.measure)[0].label
    return next(folder.settings for folder in folders if folder.settings.label == best)


def _ranked(curves: Sequence[Curve], measure: Measure) -> list[Curve]:
    """The best first: the soonest at the target with every seed, and of equally soon ones, or if there is none, the one
    that ends best; or the one with the highest mean over time."""
    return ranked(curves) if measure == "to target" else sorted(curves, key=lambda curve: -area(curve))


def area(curve: Curve) -> float:
    """The mean of the metric over time and seeds; negative where lower is better."""
    means = areas([curve], curve.metric)[0].values()
    return fmean(means) * (-1 if curve.lower_is_better else 1)


def choose(wanted: Reproduction, folders: Sequence[RunFolder], out: Path) -> list[Tried]:
    """All that was tried for a figure, in which the best of each kind is marked."""
    kinds: dict[str, list[Tried]] = {}
    for folder in folders:
        algorithm = folder.settings.algorithm
        own = wanted.tuning.grid(folder.settings.label, algorithm.name)
        point = {name: getattr(algorithm, name) for name in own}
        kinds.setdefault(_kind(folder.settings, wanted), []).append(Tried(point, read_curve(folder.path)))
    return mark(kinds.values(), wanted.tuning.measure, out)


def mark(kinds: Iterable[Sequence[Tried]], measure: Measure, out: Path) -> list[Tried]:
    """All that was tried, the best of each kind marked, none if all are alike; also written as a table."""
    marked = []
    for tried in kinds:
        best = _ranked([one.curve for one in tried], measure)[0].label
        ends = {(time_to_target(one.curve), final(one.curve, one.curve.metric)) for one in tried}
        alike = len(tried) > 1 and len(ends) == 1
        marked += [one._replace(chosen=one.curve.label == best and not alike) for one in tried]
    lines = [shown(one) for one in marked]
    with write_atomically(out / GRID) as stream:
        writer = csv.DictWriter(stream, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return marked


def shown(tried: Tried) -> dict[str, str]:
    """For people: mean ± standard deviation over seeds."""
    curve = tried.curve
    return {
        "curve": curve.label,
        "point": json.dumps(tried.point),
        "time_to_target": time_to_target(curve).show("{:.0f}"),
        "mean": f"{area(curve):.4f}",
        "final": final(curve, curve.metric).show("{:.4f}"),
        "seeds": " ".join(map(str, curve.seeds)),
        "chosen": "yes" if tried.chosen else "",
    }


def validated(source: str, overrides: Sequence[str], points: Sequence[Point]) -> list[Swept]:
    """The curves of some settings at each point, on seeds of their own, judged by a part of the training set."""
    for curve in load(source, overrides):
        if not hasattr(curve.task, "judge"):
            raise SettingsError(f"{source} cannot be tuned: {curve.task.name} {NO_PART}")
    return sweep(source, [*overrides, "task.judge=validation", f"run.seeds={SEEDS}"], points)
