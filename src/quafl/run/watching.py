"""How far the runs in a folder are, seen from outside: by their rows, their checkpoints and a federation's status."""

import json
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from quafl.record import checkpoints
from quafl.record.rows import Row, by_seed, read_rows
from quafl.record.summary import ROWS, SETTINGS, RecordError, sent

STATUS = "status.json"  # of a federation


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


class Watch:
    """Looks at a folder; a checkpoint is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, tuple[int, Row]] = {}

    def look(self) -> list[Standing]:
        """All curves in the folder, by path."""
        paths = sorted(path.parent for path in self._folder.rglob(SETTINGS))
        if not paths:
            raise RecordError(f"{self._folder} holds no run; give a folder that 'quafl run' writes to")
        return [self._standing(path) for path in paths]

    def _standing(self, path: Path) -> Standing:
        settings = tomllib.loads((path / SETTINGS).read_text(encoding="utf-8"))
        plan, status = settings["run"], _status(path)
        rows = by_seed(read_rows(path / ROWS)) if (path / ROWS).exists() else {}
        real = plan.get("clock") == "wall"
        seeds = [plan["seed"]] if real else plan["seeds"]
        ended = [seed for seed in seeds if seed in rows and not status.get("running", False)]
        lasts = {seed: mine[-1] for seed, mine in rows.items() if seed in seeds}
        for seed in (seed for seed in seeds if seed not in rows):
            found = self._saved(path / f"checkpoint-seed{seed}.pt")
            lasts |= {} if found is None else {seed: found}
        until = float(plan.get("until", "inf"))
        behind = [1.0 if seed in ended else lasts[seed]["time"] / until if seed in lasts else 0.0 for seed in seeds]
        metric = plan["metric"] if any(plan["metric"] in row for row in lasts.values()) else "loss"
        return Standing(
            curve=str(settings["label"]),
            seeds=len(seeds),
            ended=len(ended),
            share=fmean(behind) if until < float("inf") or len(ended) == len(seeds) else None,
            round=fmean(row["round"] for row in lasts.values()) if lasts else 0.0,
            metric=metric,
            value=fmean(row[metric] for row in lasts.values()) if lasts else None,
            megabytes=fmean(map(sent, lasts.values())) if lasts else 0.0,
        )

    def _saved(self, checkpoint: Path) -> Row | None:
        """The last row of an unfinished seed, if there is a checkpoint."""
        try:
            changed = checkpoint.stat().st_mtime_ns
            if self._known.get(checkpoint, (0, {}))[0] != changed:
                state = checkpoints.load(checkpoint, "cpu")
                self._known[checkpoint] = changed, state["simulation"]["evaluations"]["rows"][-1]
        except (OSError, RecordError, KeyError):  # it has just ended, or is somebody else's
            return None
        return self._known[checkpoint][1]


def _status(path: Path) -> dict[str, Any]:
    try:
        status: dict[str, Any] = json.loads((path / STATUS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return status
