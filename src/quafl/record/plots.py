"""Pictures of recorded rows: a line per curve, a band over its seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO, StringIO
from itertools import cycle
from typing import IO, NamedTuple, TypeAlias

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from numpy.typing import NDArray

from quafl.record.diagnostics import least_contraction
from quafl.record.rows import Row
from quafl.record.summary import Curve, sent

# One colour per algorithm everywhere (of Okabe and Ito's palette and Tol's, told apart by colour-blind readers too).
COLOURS = {
    "Calibrated": "#332288",
    "QuAFL": "#0072B2",
    "QuAFL weighted": "#009E73",
    "QuAFL adopting": "#56B4E9",
    "FAVANO": "#44AA99",
    "FedAvg": "#D55E00",
    "FedProx": "#DDCC77",
    "FedAdam": "#882255",
    "FedBuff": "#CC79A7",
    "FADAS": "#AA4499",
    "CA2FL": "#117733",
    "FedNova": "#E69F00",
    "SCAFFOLD": "#8C564B",
    "FedAsync": "#7A5195",
    "Baseline": "#666666",
}
OTHERS = ["#88CCEE", "#999933", "#661100", "#6699CC", "#AA8866", "#000000"]
Numbers: TypeAlias = NDArray[np.float64]
Line: TypeAlias = str | tuple[float, tuple[float, ...]]  # by name, or its dashes
LINES: dict[Line, str] = {  # and the dashes of an SVG that come nearest to them
    "-": "none",
    "--": "7 3",
    ":": "2 3",
    "-.": "9 3 2 3",
    (0, (8, 2)): "14 3",
    (0, (3, 1, 1, 1, 1, 1)): "6 2 2 2 2 2",
}
PLACES = 200  # on a curve
FAR_APART = 4  # as far as another curve: on a linear axis, the shorter one could hardly be seen
BEGINNING = 0.05  # of a curve: what it does there, far from all others, need not be seen


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
    return Axis(name.replace("_", " "), lambda row: row[name])


class Look(NamedTuple):
    """Of a curve."""

    colour: str
    line: Line


def looks(labels: Sequence[str]) -> dict[str, Look]:
    """By label; variants of an algorithm, such as "QuAFL, 4 bits", have its colour, and the line that the same variant
    of another has."""
    parts = {label: [part.strip() for part in label.partition(",")[::2]] for label in dict.fromkeys(labels)}
    variants = sorted({variant for algorithm, variant in parts.values() if algorithm in COLOURS and variant})
    lines = {"": "-"} | dict(zip(variants, cycle(list(LINES)[1:]), strict=False))
    spare = cycle(OTHERS)
    return {
        label: Look(COLOURS[algorithm], lines[variant]) if algorithm in COLOURS else Look(next(spare), "-")
        for label, (algorithm, variant) in parts.items()
    }


class Picture(Figure):
    """A figure that a notebook shows, whatever it has imported."""

    def _repr_png_(self) -> bytes:
        stream = BytesIO()
        to_png(self, stream)
        return stream.getvalue()


def draw(curves: Sequence[Curve], x: Axis, y: Axis, *, goal: float | None = None, log: bool = False) -> Picture:
    """One panel; `log` is of the values."""
    figure = Picture(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    _panel(axes, curves, x, y, goal, log)
    return figure


def _panel(axes: Axes, curves: Sequence[Curve], x: Axis, y: Axis, goal: float | None, log: bool) -> None:
    known = looks([curve.label for curve in curves])
    ends = [min(end_of(curve, x, rows) for rows in curve.seeds.values()) for curve in curves]  # all seeds go as far
    least, most = min(ends, default=0.0), max(ends, default=0.0)
    wide = x not in (SIMULATED_TIME, SECONDS) and 0 < FAR_APART * least < most
    seen = []
    for number, (curve, end) in enumerate(zip(curves, ends, strict=True)):
        colour, line = known[curve.label]
        grid = np.geomspace(BEGINNING * least, end, PLACES) if wide else np.linspace(0, end, PLACES)
        values = np.array([np.interp(grid, *points(rows, x, y)) for rows in curve.seeds.values()])
        middle = values.mean(axis=0)
        spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros_like(middle)
        above = 3 - number / len(curves)  # the others: the first is what it is about
        axes.plot(grid, middle, color=colour, linestyle=line, label=curve.label, linewidth=1.8, zorder=above)
        axes.fill_between(grid, middle - spread, middle + spread, color=colour, alpha=0.18, linewidth=0)
        late = grid >= BEGINNING * end
        seen += [(middle - spread)[late], (middle + spread)[late]]
    shown = np.concatenate([*seen, []])
    shown = shown[np.isfinite(shown)]
    if goal is not None and len(shown) and abs(goal - np.clip(goal, shown.min(), shown.max())) <= 0.1 * np.ptp(shown):
        shown = np.append(shown, goal)  # elsewhere it would cost the curves their place
        axes.axhline(goal, color="#999999", linewidth=0.8, linestyle="--", label=f"target {goal:g}")
    margin = 0.05 * np.ptp(shown) if len(shown) else 0.0
    if log and (shown > 0).any():
        axes.set_yscale("log")
        _label(axes.yaxis, 2, 3, 5, 7)
    elif margin > 0:
        axes.set_ylim(shown.min() - margin, shown.max() + margin)
    axes.set(xlabel=x.label, ylabel=y.label)
    if wide:
        axes.set_xscale("log")
        _label(axes.xaxis, 2, 5)
    axes.set_xlim(left=BEGINNING * least if wide else 0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if curves:
        axes.legend(frameon=False)


def _label(axis: XAxis | YAxis, *multiples: int) -> None:
    """A logarithmic one with plain numbers, also at these multiples of powers of ten."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(LogLocator(subs=multiples))
    axis.set_minor_formatter("{x:g}")
    axis.set_tick_params(which="minor", length=3.5, pad=3.5)  # like the others


def end_of(curve: Curve, x: Axis, rows: list[Row]) -> float:
    """How far a seed goes."""
    return curve.end(rows) if x is SIMULATED_TIME else x.value(rows[-1])


def points(rows: Sequence[Row], x: Axis, y: Axis) -> tuple[Numbers, Numbers]:
    """Where a seed's line goes. A model stands until the next round ends; between evaluations that are more than a
    round apart there were others, and the line is straight."""
    places, values = (np.array([axis.value(row) for row in rows], dtype=np.float64) for axis in (x, y))
    stands = np.flatnonzero(np.diff([row["round"] for row in rows]) == 1) + 1
    before = np.nextafter(places[stands], -np.inf)
    return np.insert(places, stands, before), np.insert(values, stands, values[stands - 1])


def draw_potential(curves: Sequence[Curve], clients: int) -> Picture:
    """Φ_t of each curve; and how the largest one would fall if each round took away no more than the lemma says, and
    nobody moved."""
    picture = draw(curves, ROUNDS, Axis("potential Φ", lambda row: row["potential"]))
    every = [row for curve in curves for rows in curve.seeds.values() for row in rows]
    top, last = (max((row[name] for row in every), default=0.0) for name in ("potential", "round"))
    axes, rounds = picture.axes[0], np.linspace(0, last, PLACES)
    left = top * (1 - least_contraction(clients)) ** rounds
    axes.plot(rounds, left, color="#999999", linestyle="--", linewidth=1.0, label="lemma: 1 − 1/(4n) a round")
    axes.set_ylim(0, 1.05 * top or 1.0)
    axes.legend(frameon=False)
    return picture


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
