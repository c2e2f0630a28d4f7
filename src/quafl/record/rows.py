"""What a run leaves behind: one row per evaluation."""

import csv
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from quafl.core.seams import Score, Totals
from quafl.record.files import write_atomically

Row: TypeAlias = dict[str, float]
METRIC = "accuracy"  # by default; the loss where a task does not have it


def make_row(seed: int, time: float, round: int, totals: Totals, score: Score) -> Row:
    """The evaluation after a round, at a time; the score's measures keep their names."""
    row: Row = {
        "seed": seed,
        "round": round,
        "time": time,
        "local_steps": totals.steps,
        "bytes_up": totals.up,
        "bytes_down": totals.down,
    }
    counts: Row = {
        "refined": totals.refined,
        "contacts": totals.contacts,
        "zero_step_contacts": totals.idle,
        "lost_contacts": totals.lost,
        "broken_replies": totals.broken,
        "slow_contacts": totals.slow_contacts,
        "slow_zero_step_contacts": totals.slow_idle,
    }
    taken = score.keys() & (row.keys() | counts.keys())
    if taken:
        raise ValueError(f"a metric is called {taken.pop()!r}, which rows have already; choose another name")
    return {**row, **score, **counts}


COUNTED = frozenset(make_row(0, 0.0, 0, Totals(), {}))  # columns that no metric may have


def worth(row: Row, metric: str, *, lower_is_better: bool) -> float:
    """How good an evaluation is, the higher the better: by the metric, or by the loss where a task does not have it."""
    measured = metric if metric in row else "loss"
    return -row[measured] if lower_is_better or measured == "loss" else row[measured]


def is_as_good(row: Row, goal: float, metric: str, *, lower_is_better: bool) -> bool:
    """Whether an evaluation is as good as a goal, which is of the metric alone."""
    lower = lower_is_better or metric == "loss"
    return worth(row, metric, lower_is_better=lower_is_better) >= (-goal if lower else goal)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """As CSV; numbers in full precision, so that equal runs give equal files. Rows may lack columns of others."""
    columns = dict.fromkeys(name for row in rows for name in row)
    with write_atomically(path) as stream:
        writer = csv.DictWriter(stream, fieldnames=list(columns), restval="nan", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


class Growing:
    """A file of rows that are written as they come. A run that is taken up again says its last row once more: what
    stands there from that round on is replaced."""

    def __init__(self, path: Path) -> None:
        self._path, self._clean = path, False  # until it is written anew, its end may be cut off
        self._rows: list[Row] = []
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        with suppress(ValueError, TypeError, AttributeError):  # damaged: it begins anew
            self._rows = _parsed(line for line in text.splitlines(keepends=True) if line.endswith("\n"))  # not cut off

    def add(self, row: Row) -> None:
        """Write it."""
        follows = bool(self._rows) and self._rows[-1]["round"] < row["round"]
        if self._clean and follows and list(self._rows[-1]) == list(row):
            self._rows.append(row)
            with self._path.open("a", encoding="utf-8", newline="") as stream:
                csv.DictWriter(stream, fieldnames=list(row), lineterminator="\n").writerow(row)
        else:
            self._rows = [*(one for one in self._rows if one["round"] < row["round"]), row]
            write_rows(self._path, self._rows)
            self._clean = True


def read_rows(path: Path) -> list[Row]:
    """What `write_rows` wrote."""
    with path.open(newline="") as stream:
        return _parsed(stream)


def _parsed(lines: Iterable[str]) -> list[Row]:
    return [{name: _number(value) for name, value in row.items()} for row in csv.DictReader(lines)]


def by_seed(rows: Iterable[Row]) -> dict[int, list[Row]]:
    """Each seed's rows in their order."""
    result: dict[int, list[Row]] = {}
    for row in rows:
        result.setdefault(int(row["seed"]), []).append(row)
    return result


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdigit() else float(text)
