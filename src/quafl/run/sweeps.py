"""Sweeps: the curves of some settings, with all combinations of some values of some of their settings."""

import csv
import json
import tomllib
from collections.abc import Mapping, Sequence
from itertools import product
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from quafl.record.files import write_atomically
from quafl.record.summary import Curve, Spread, final, megabytes, megabytes_to_target, time_to_target
from quafl.settings.base import SettingsError
from quafl.settings.curve import Settings
from quafl.settings.reading import load

TABLE = "sweep.csv"
Point: TypeAlias = Mapping[str, Any]  # values by key, such as codec.bits


class Swept(NamedTuple):
    """A curve at a point."""

    origin: str  # the label of the curve as the settings have it
    point: Point
    settings: Settings


def axis(over: str) -> tuple[str, str]:
    """The key and the values of `section.key=values`."""
    key, equals, values = over.partition("=")
    key, values = key.strip(), values.strip()
    if not equals or not values.strip(", ") or "." not in key or key.startswith("curves."):
        raise SettingsError(f"--over {over}: must look like section.key=value,value, for example codec.bits=2,3,4")
    return key, values


def values_of(text: str) -> list[Any]:
    """What stands between commas, as TOML has it; a bare word is a string."""
    try:
        found: list[Any] = tomllib.loads(f"values = [{text}]")["values"]
    except tomllib.TOMLDecodeError:
        words = [part.strip() for part in text.split(",") if part.strip()]
        return words if len(words) < 2 else [value for word in words for value in values_of(word)]
    return found


def axes_of(overs: Sequence[str]) -> dict[str, str]:
    """Values by key, as they were written."""
    axes = dict(axis(over) for over in overs)
    if len(axes) < len(overs):
        raise SettingsError(f"--over names a setting twice ({', '.join(overs)}); give all of its values at once")
    return axes


def grid(overs: Sequence[str]) -> list[Point]:
    """All combinations."""
    axes = axes_of(overs)
    return [dict(zip(axes, point, strict=True)) for point in product(*map(values_of, axes.values()))]


def sweep(source: str, overrides: Sequence[str], points: Sequence[Point]) -> list[Swept]:
    """Each curve of the settings at each point, labelled by it."""
    found: dict[str, Swept] = {}
    for point in points:
        here = [f"{key}={json.dumps(value)}" for key, value in point.items()]
        for curve in load(source, [*overrides, *here]):
            label = _said(point) if curve.label == "run" else f"{curve.label}, {_said(point)}"
            found.setdefault(label, Swept(curve.label, point, curve.model_copy(update={"label": label})))
    return list(found.values())


def _said(point: Point) -> str:
    """Keys by their last word, where that says enough."""
    lasts = [key.rpartition(".")[2] for key in point]
    names = [last if lasts.count(last) == 1 else key for key, last in zip(point, lasts, strict=True)]
    return ", ".join(f"{name} {_shown(value)}" for name, value in zip(names, point.values(), strict=True))


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(swept: Sequence[Swept], curves: Sequence[Curve], out: Path) -> list[dict[str, Any]]:
    """A line a curve; also written."""
    lines = [line(one.point, curve) for one, curve in zip(swept, curves, strict=True)]
    with write_atomically(out / TABLE) as stream:
        writer = csv.DictWriter(stream, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return lines


def line(point: Point, curve: Curve) -> dict[str, Any]:
    """A curve's point, and what it came to, as numbers: means over seeds."""
    times = time_to_target(curve)
    return {
        "curve": curve.label,
        **point,
        "metric": curve.metric,
        "final": _number(final(curve, curve.metric)),
        "target": curve.target,
        "time_to_target": _number(times),
        "seeds_at_target": len(times.values),
        "megabytes": _number(megabytes(curve)),
        "megabytes_to_target": _number(megabytes_to_target(curve)),
        "seeds": len(curve.seeds),
    }


def _number(spread: Spread) -> float | None:
    """The mean over seeds; None where there is none."""
    return None if isnan(spread.mean) else spread.mean
