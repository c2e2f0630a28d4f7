"""How far the runs in a folder are, seen from outside: by their rows and a federation's status."""

import json
import tomllib
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from quafl.record.attendance import STATUS
from quafl.record.rows import Row, by_seed, read_rows
from quafl.record.summary import ROWS, SETTINGS, RecordError, sent

SO_FAR = "rows-seed{seed}.csv"  # of a seed that is not finished


class Standing(NamedTuple):
    """Where a curve is; means over its seeds that have begun."""

    curve: str
    seeds: int  # that are wanted
    ended: int
    share: float | None  # of the whole, 0 to 1; a federation may have no end
    round: float
    metric: str
    value: float | None  # None: nothing is known yet
    megabytes: float

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.ended == self.seeds

    def __str__(self) -> str:
        share = "" if self.share is None else f", {self.share:.0%}"
        score = "" if self.value is None else f", {self.metric} {self.value:.4g}, {self.megabytes:,.2f} MB"
        return f"{self.curve}: {self.ended} of {self.seeds} seeds{share}{score}"


def look(folder: Path) -> list[Standing]:
    """All curves in the folder, by path."""
    paths = sorted(path.parent for path in folder.rglob(SETTINGS))
    if not paths:
        raise RecordError(f"{folder} holds no run; give a folder that 'quafl run' writes to")
    return [_standing(path) for path in paths]


def _standing(path: Path) -> Standing:
    settings = tomllib.loads((path / SETTINGS).read_text(encoding="utf-8"))
    plan, running = settings["run"], _read(path / STATUS).get("running", False)
    rows = by_seed(read_rows(path / ROWS)) if (path / ROWS).exists() else {}
    seeds = [plan["seed"]] if plan.get("clock") == "wall" else plan["seeds"]
    ended = [seed for seed in seeds if seed in rows and not running]
    known = {seed: rows.get(seed) or _so_far(path / SO_FAR.format(seed=seed)) for seed in seeds}
    lasts = {seed: mine[-1] for seed, mine in known.items() if mine}
    until = float(plan.get("until", inf))
    shares = [1.0 if seed in ended else lasts[seed]["time"] / until if seed in lasts else 0.0 for seed in seeds]
    metric = plan["metric"] if any(plan["metric"] in row for row in lasts.values()) else "loss"
    return Standing(
        curve=str(settings["label"]),
        seeds=len(seeds),
        ended=len(ended),
        share=fmean(shares) if until < inf or len(ended) == len(seeds) else None,
        round=fmean(row["round"] for row in lasts.values()) if lasts else 0.0,
        metric=metric,
        value=fmean(row[metric] for row in lasts.values()) if lasts else None,
        megabytes=fmean(map(sent, lasts.values())) if lasts else 0.0,
    )


def _so_far(path: Path) -> list[Row]:
    """Of a seed that is being computed; what is being written just now may be cut off."""
    try:
        return read_rows(path)
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return []


def _read(path: Path) -> dict[str, Any]:
    """A file that may not be there."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found
