"""Learning rates by the same rule for everybody: grids of one size, judged on a part of the training set."""

import csv
import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from quafl.record.files import write_atomically
from quafl.record.summary import Curve, RecordError, final, ranked, read_curve, time_to_target
from quafl.record.verdicts import areas
from quafl.run.folders import RunFolder
from quafl.settings.base import SettingsError
from quafl.settings.curve import Settings
from quafl.settings.figures import Reproduction
from quafl.settings.reading import checked
from quafl.settings.tasks import ClassTask

GRID = "grid.csv"


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
        raise RecordError(f"{wanted.name} cannot be tuned: {task.name} has no part of the training set to judge by")
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
    best = _ranked(list(curves.values()), wanted)[0].label
    return next(folder.settings for folder in folders if folder.settings.label == best)


def _ranked(curves: Sequence[Curve], wanted: Reproduction) -> list[Curve]:
    """The best first: the soonest at the target with every seed, and of equally soon ones, or if there is none, the one
    that ends best; or the one with the highest mean over time."""
    if wanted.tuning.measure == "to target":
        return ranked(curves)
    return sorted(curves, key=lambda curve: -area(curve))


def area(curve: Curve) -> float:
    """The mean of the metric over time and seeds; negative where lower is better."""
    means = areas([curve], curve.metric)[0].values()
    return fmean(means) * (-1 if curve.lower_is_better else 1)


def choose(wanted: Reproduction, folders: Sequence[RunFolder], out: Path) -> list[dict[str, str]]:
    """All that was tried as a table, also written, in which the best of each kind is marked; none if all are alike."""
    kinds: dict[str, list[tuple[Settings, Curve]]] = {}
    for folder in folders:
        kinds.setdefault(_kind(folder.settings, wanted), []).append((folder.settings, read_curve(folder.path)))
    table = []
    for tried in kinds.values():
        best = _ranked([curve for _, curve in tried], wanted)[0].label
        alike = len(tried) > 1 and len({(time_to_target(one), final(one, one.metric)) for _, one in tried}) == 1
        for settings, curve in tried:
            algorithm = settings.algorithm
            own = wanted.tuning.grid(settings.label, algorithm.name)
            table.append(
                {
                    "curve": settings.label,
                    "point": json.dumps({name: getattr(algorithm, name) for name in own}),
                    "time_to_target": time_to_target(curve).show("{:.0f}"),
                    "mean": f"{area(curve):.4f}",
                    "final": final(curve, curve.metric).show("{:.4f}"),
                    "seeds": " ".join(map(str, curve.seeds)),
                    "chosen": "yes" if curve.label == best and not alike else "",
                }
            )
    with write_atomically(out / GRID) as stream:
        writer = csv.DictWriter(stream, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    return table
