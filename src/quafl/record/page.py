"""What makes a report's pictures move: recorded rows for the page's script, the script, and its style."""

import json
from collections.abc import Sequence
from importlib import resources
from math import isfinite
from typing import Any, NamedTuple

from quafl.record import plots
from quafl.record.rows import Row
from quafl.record.summary import Curve

DIGITS = 7  # of a number in the page: more than a picture shows; rows.csv has all
FIXED = "seed", "time", "round", "local_steps", "bytes_up", "bytes_down"  # columns that are axes, or make up one


class Panel(NamedTuple):
    """A picture to begin with: a column against an axis; `log` is of the values."""

    x: str
    y: str
    log: bool = False


def axes_of(curves: Sequence[Curve]) -> dict[str, plots.Axis]:
    """What may be on the horizontal axis."""
    return {
        "time": plots.time_of(curves),
        "round": plots.ROUNDS,
        "megabytes": plots.MEGABYTES,
        "local_steps": plots.STEPS,
    }


def data(curves: Sequence[Curve], panels: Sequence[Panel], goal: float | None) -> str:
    """The rows of all curves as an element that the script reads."""
    looks = plots.looks([curve.label for curve in curves])
    content = {
        "axes": {name: axis.label for name, axis in axes_of(curves).items()},
        "metric": curves[0].metric,
        "metrics": _metrics(curves),
        "target": goal,
        "panels": [panel._asdict() for panel in panels],
        "curves": [
            {
                "label": curve.label,
                "colour": looks[curve.label].colour,
                "dash": plots.LINES[looks[curve.label].line],
                "talks": curve.talks,
                "seeds": [
                    {"seed": seed, "end": _number(curve.end(rows)), "columns": _columns(rows)}
                    for seed, rows in curve.seeds.items()
                ],
            }
            for curve in curves
        ],
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")  # nothing ends it early
    return f'<script type="application/json" id="data">{text}</script>'


def script() -> str:
    """As an element."""
    return f"<script>{_file('page.js')}</script>"


def style() -> str:
    """As an element."""
    return f"<style>{_file('page.css')}</style>"


def _file(name: str) -> str:
    return (resources.files("quafl") / "record" / name).read_text(encoding="utf-8")


def _metrics(curves: Sequence[Curve]) -> list[str]:
    """The columns that may be on the vertical axis: the metric first, then those in which anything happens."""
    found = {curves[0].metric: True}
    for rows in (rows for curve in curves for rows in curve.seeds.values()):
        for name in rows[0]:
            if name not in FIXED and not found.get(name):
                found[name] = len({row[name] for row in rows}) > 1
    return [name for name, changes in found.items() if changes]


def _columns(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    return {name: [_number(row[name]) for row in rows] for name in rows[0] if name != "seed"}


def _number(value: float) -> Any:
    """As JSON can have it."""
    if isinstance(value, int):
        return value
    return float(f"{value:.{DIGITS}g}") if isfinite(value) else None
