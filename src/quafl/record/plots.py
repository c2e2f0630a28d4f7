"""Pictures of recorded rows: a line per curve, a band over its seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import IO

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from quafl.record.rows import Row
from quafl.record.summary import Curve, sent

# One colour per algorithm everywhere (Okabe and Ito's palette, told apart by colour-blind readers too).
COLOURS = {
    "QuAFL": "#0072B2",
    "QuAFL weighted": "#009E73",
    "FedAvg": "#D55E00",
    "FedBuff": "#CC79A7",
    "FedNova": "#E69F00",
    "Baseline": "#666666",
}
OTHERS = ["#56B4E9", "#332288", "#882255", "#117733", "#DDCC77", "#999933", "#AA4499", "#44AA99"]


@dataclass(frozen=True, slots=True)
class Axis:
    """What a row's place on an axis is."""

    label: str
    value: Callable[[Row], float]


SIMULATED_TIME = Axis("simulated time (units)", lambda row: row["time"])
SECONDS = Axis("time (s)", lambda row: row["time"])
MEGABYTES = Axis("sent in both directions (MB)", sent)
STEPS = Axis("local steps of all clients", lambda row: row["local_steps"])
ROUNDS = Axis("server rounds", lambda row: row["round"])
AXES = {"time": SIMULATED_TIME, "rounds": ROUNDS, "local steps": STEPS, "megabytes": MEGABYTES}


def time_of(curves: Sequence[Curve]) -> Axis:
    """Whichever they have."""
    return SECONDS if curves[0].real else SIMULATED_TIME


def column(name: str) -> Axis:
    """A column as an axis."""
    return Axis(name, lambda row: row[name])


def colour_of(curves: Sequence[Curve]) -> dict[str, str]:
    """A curve's colour by its label."""
    spare = iter(OTHERS * len(curves))
    return {curve.label: COLOURS.get(curve.label) or next(spare) for curve in curves}


def draw(curves: Sequence[Curve], x: Axis, y: Axis, *, goal: float | None = None, log: bool = False) -> Figure:
    """One panel."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    _panel(axes, curves, x, y, goal, log)
    return figure


def _panel(axes: Axes, curves: Sequence[Curve], x: Axis, y: Axis, goal: float | None, log: bool) -> None:
    colours = colour_of(curves)
    for curve in curves:
        grid, values = _on_common_grid(curve, x, y)
        middle = values.mean(axis=0)
        axes.plot(grid, middle, color=colours[curve.label], label=curve.label, linewidth=1.8)
        if len(values) > 1:
            spread = values.std(axis=0, ddof=1)
            axes.fill_between(
                grid, middle - spread, middle + spread, color=colours[curve.label], alpha=0.18, linewidth=0
            )
    if goal is not None:
        axes.axhline(goal, color="#999999", linewidth=0.8, linestyle="--")
    if log:
        axes.set_yscale("log")
    axes.set(xlabel=x.label, ylabel=y.label)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _on_common_grid(curve: Curve, x: Axis, y: Axis) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Each seed's values at the same places, as far as every seed goes."""
    places = [np.array([x.value(row) for row in rows]) for rows in curve.seeds.values()]
    ends = [curve.end(rows) if x is SIMULATED_TIME else x.value(rows[-1]) for rows in curve.seeds.values()]
    grid = np.linspace(0, min(ends), 200)
    values = [
        np.interp(grid, place, [y.value(row) for row in rows])
        for place, rows in zip(places, curve.seeds.values(), strict=True)
    ]
    return grid, np.array(values)


def to_svg(figure: Figure) -> str:
    """The figure as an SVG element to put into a page, its text as text."""
    stream = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "quafl", "font.family": "sans-serif"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def to_png(figure: Figure, stream: IO[bytes]) -> None:
    """The figure as a picture."""
    figure.savefig(stream, format="png", dpi=150)
