"""What accuracy costs, in megabytes and in time: Calibrated, QuAFL and FedAvg over wait, local steps and bits.

    python benchmarks/frontier.py [FOLDER]

The world is the middle of the map (`quafl reproduce map`), and so are the learning rates. Given again, it goes on.
Writes docs/results/regimes/frontier.csv, frontier.png and frontier.md, which regimes.md shows.
"""

import csv
import sys
from itertools import product
from math import isnan, nan
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from quafl.record.files import write_atomically
from quafl.record.plots import COLOURS, to_png
from quafl.record.summary import Curve, megabytes_to_target, read_curve, time_to_target
from quafl.run.folders import accumulate
from quafl.run.pool import run
from quafl.settings.curve import Settings
from quafl.settings.figures import load_figure

BITS = {3: "v", 4: "o", 8: "s", 32: "D"}  # and how they are drawn
STEPS = {"Calibrated": [5, 10, 20], "QuAFL": [5, 10, 20], "FedAvg": [2, 5, 10, 20]}
WAITS = {"Calibrated": [0.0, 3.0, 10.0, 30.0], "QuAFL": [0.0, 3.0, 10.0, 30.0], "FedAvg": [nan]}  # FedAvg has none
SEEDS = [0, 1, 2]
REFERENCE = "FedAvg", 32
OUT = Path(__file__).parents[1] / "docs" / "results" / "regimes"


class Point(NamedTuple):
    """A setting, and what it cost, in the mean over seeds, to get to the target."""

    algorithm: str
    local_steps: int
    wait: float
    bits: int
    seeds: int  # that got there
    time: float
    megabytes: float

    @property
    def name(self) -> str:
        """In a table."""
        wait = "" if isnan(self.wait) else f", wait {self.wait:g}"
        return f"{self.algorithm}, K = {self.local_steps}{wait}, {self.bits} bits"


def settings() -> list[Settings]:
    """All curves, in the order of `points`."""
    found = []
    for algorithm, steps, wait, bits in places():
        waits = [] if isnan(wait) else [f"curves.{algorithm}.algorithm.wait={wait}"]
        changes = [f"curves.{algorithm}.algorithm.local_steps={steps}", *waits, f"codec.bits={bits}"]
        curves = load_figure("map", [*changes, f"run.seeds={SEEDS}"], tuning=True).curves
        chosen = next(curve for curve in curves if curve.label == algorithm)
        words = f"K {steps}" + ("" if isnan(wait) else f", wait {wait:g}")
        found.append(chosen.model_copy(update={"label": f"{algorithm}, {words}, {bits} bits"}))
    return found


def places() -> list[tuple[str, int, float, int]]:
    """Algorithm, K, wait and bits."""
    return [
        (algorithm, steps, wait, bits)
        for algorithm in STEPS
        for steps, wait, bits in product(STEPS[algorithm], WAITS[algorithm], BITS)
    ]


def measured(place: tuple[str, int, float, int], curve: Curve) -> Point:
    times, sent = time_to_target(curve), megabytes_to_target(curve)
    return Point(*place, len(times.values), times.mean, sent.mean)


def best(points: list[Point]) -> list[Point]:
    """Those that no other beats in both, from the cheapest to the soonest."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.megabytes, point.time)):
        if not found or point.time < found[-1].time:
            found.append(point)
    return found


def draw(points: list[Point]) -> Figure:
    """Megabytes across, time up; the settings that are worth choosing are joined by a line."""
    figure = Figure(figsize=(7.4, 4.8), layout="constrained")
    axes = figure.subplots()
    for algorithm in STEPS:
        for bits, marker in BITS.items():
            some = [point for point in points if (point.algorithm, point.bits) == (algorithm, bits)]
            axes.scatter(
                [point.megabytes for point in some],
                [point.time for point in some],
                color=COLOURS[algorithm],
                marker=marker,
                s=26,
                alpha=0.75,
            )
        front = best([point for point in points if point.algorithm == algorithm])
        x, y = [point.megabytes for point in front], [point.time for point in front]
        axes.plot(x, y, color=COLOURS[algorithm], linewidth=1.5, label=algorithm)
    for bits, marker in BITS.items():
        axes.scatter([], [], color="#666666", marker=marker, s=26, label=f"{bits} bits")
    axes.set(xscale="log", yscale="log", xlabel="sent until 85 %, both ways (MB)", ylabel="simulated time to 85 %")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(LogLocator(subs=(2, 5)))
        axis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    return figure


def page(points: list[Point], versions: dict[str, str]) -> str:
    """What one asks of them."""
    arrived = [point for point in points if point.seeds == len(SEEDS)]
    uncompressed = [point for point in arrived if (point.algorithm, point.bits) == REFERENCE]
    lines = [
        "Calibrated, QuAFL and FedAvg on MNIST in the middle of the [map](paper.md#map): 20 clients, a quarter of them",
        "slow, Dirichlet's data, 10 time units for an uncompressed exchange. Over `wait`, `local_steps` (K) and bits",
        f"these are {len(points)} settings, with seeds {', '.join(map(str, SEEDS))} and the map's rates. A point is",
        "the mean time, and the mean of what was sent, until 85 %. Lines join the settings that no other of the same",
        "algorithm beats in both.",
        "",
        "![Time and megabytes to 85 %, over wait, local steps and bits](regimes/frontier.png)",
        "",
        "Which settings cost at most an eighth of uncompressed FedAvg's bytes at no more of its time?",
    ]
    for reference in uncompressed:
        cheap = [p for p in arrived if p.megabytes <= reference.megabytes / 8 and p.time <= reference.time]
        lines += [
            "",
            f"**Against {reference.name}** ({reference.time:.0f} time units, {reference.megabytes:.1f} MB):",
            "",
        ]
        lines += ["| | time to 85 % | MB | of its time | of its bytes |", "|---|---|---|---|---|"]
        lines += [
            f"| {p.name} | {p.time:.0f} | {p.megabytes:.2f} | {p.time / reference.time:.2f} "
            f"| 1/{reference.megabytes / p.megabytes:.1f} |"
            for algorithm in STEPS
            for p in best([p for p in cheap if p.algorithm == algorithm])
        ]
    lines += ["", "The frontier of all three, from the fewest bytes to the least time:", ""]
    lines += ["| | time to 85 % | MB |", "|---|---|---|"]
    lines += [f"| {p.name} | {p.time:.0f} | {p.megabytes:.2f} |" for p in best(arrived)]
    late = len(points) - len(arrived)
    lines += [
        "",
        f"{late} settings did not get there with every seed by time 800 and are left out.",
        f"`python benchmarks/frontier.py`, {versions['date']}, {versions['platform']}, torch {versions['torch']};",
        "[points](regimes/frontier.csv).",
    ]
    return "\n".join(lines) + "\n"


def main(folder: Path) -> None:
    folders = accumulate(settings(), folder)
    run(folders, on_news=lambda job, news: None)
    curves = [read_curve(one.path) for one in folders]
    points = [measured(place, curve) for place, curve in zip(places(), curves, strict=True)]
    OUT.mkdir(exist_ok=True)
    with write_atomically(OUT / "frontier.csv") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(Point._fields)
        writer.writerows([f"{value:.6g}" if isinstance(value, float) else value for value in point] for point in points)
    with write_atomically(OUT / "frontier.png", "wb") as picture:
        to_png(draw([point for point in points if point.seeds == len(SEEDS)]), picture)
    (OUT / "frontier.md").write_text(page(points, curves[0].versions), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/frontier"))
