"""Learning rates by the same rule for everybody: grids of one size, judged on a part of the training set."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quafl.record.files import write_atomically
from quafl.record.summary import Curve, RecordError, final, ranked, read_curve, time_to_target
from quafl.run.folders import RunFolder
from quafl.settings.algorithms import Algorithms
from quafl.settings.curve import Settings
from quafl.settings.figures import Reproduction
from quafl.settings.reading import checked
from quafl.settings.tasks import ClassTask

GRID = "grid.csv"


def grid(wanted: Reproduction) -> list[Settings]:
    """For each algorithm of a figure, its first curve with every learning rate, on seeds of their own."""
    found: dict[str, Settings] = {}
    for curve in wanted.curves:
        found.setdefault(_kind(curve), curve)
    return [variant for curve in found.values() for variant in _variants(curve, wanted)]


def _kind(curve: Settings) -> str:
    """What has a learning rate of its own."""
    weighted = getattr(curve.algorithm, "weighted", False)
    return f"{curve.algorithm.name} {weighted} {curve.clients.count == 1}"


def _variants(curve: Settings, wanted: Reproduction) -> list[Settings]:
    tuning, task = wanted.tuning, curve.task
    if not isinstance(task, ClassTask):
        raise RecordError(f"{wanted.name} cannot be tuned: {task.name} has no part of the training set to judge by")
    run = curve.run.model_copy(update={"seeds": tuning.seeds})
    base = {"task": task.model_copy(update={"judge": "validation"}), "run": run}
    return [
        curve.model_copy(
            update={
                **base,
                "label": f"{curve.label} {' '.join(f'{name} {value:g}' for name, value in rate.items())}",
                "algorithm": _with(curve, rate, wanted),
            }
        )
        for rate in tuning.tried(curve.algorithm.name)
    ]


def _with(curve: Settings, rate: dict[str, Any], wanted: Reproduction) -> Algorithms:
    algorithm = curve.algorithm
    return checked(type(algorithm), {**algorithm.model_dump(), **rate}, f" (in [tuning] of {wanted.name})")


def choose(folders: Sequence[RunFolder], out: Path) -> list[dict[str, str]]:
    """The whole grid as a table, also written, in which each algorithm's best is marked: the soonest at the target with
    every seed, and of equally soon ones, or if there is none, the one that ends best; none if all are alike."""
    kinds: dict[str, list[tuple[Settings, Curve]]] = {}
    for folder in folders:
        kinds.setdefault(_kind(folder.settings), []).append((folder.settings, read_curve(folder.path)))
    table = []
    for tried in kinds.values():
        best = ranked([curve for _, curve in tried])[0].label
        alike = len(tried) > 1 and len({(time_to_target(one), final(one, one.metric)) for _, one in tried}) == 1
        for settings, curve in tried:
            algorithm = settings.algorithm
            table.append(
                {
                    "curve": settings.label,
                    "lr": f"{algorithm.lr:g}",
                    "server_lr": f"{getattr(algorithm, 'server_lr', 1.0):g}",
                    "staleness": f"{getattr(algorithm, 'staleness', False):g}",
                    "time_to_target": time_to_target(curve).show("{:.0f}"),
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
