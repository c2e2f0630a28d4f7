"""docs/results/regimes.md from what `quafl reproduce regimes` has left.

    python benchmarks/regimes.py [FOLDER]

The rows of each figure in the folder (runs/paper by default) are published beside the page; what has been published
before of a figure and is not in the folder stays, as long as the preset is the same. The page is made of what has been
published. What is to be said of it stands in regimes/summary.md, and of a figure in regimes/ID.md.
"""

import csv
import json
import sys
from collections.abc import Sequence
from functools import cache, reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from paper import earlier

from quafl.record.plots import to_png
from quafl.record.rows import Row, by_seed
from quafl.record.summary import Curve, Spread, megabytes, megabytes_to_target, read_curve, time_to_target
from quafl.record.verdicts import Finding, areas, ends, order
from quafl.run.figures import fingerprint
from quafl.run.versions import joined
from quafl.settings.figures import REGIMES, figures, load_figure

RESULTS = Path(__file__).parents[1] / "docs" / "results"
FOLDER = RESULTS / "regimes"
COLUMNS = "seed", "round", "time", "local_steps", "bytes_up", "bytes_down", "accuracy"
OURS = "Calibrated"
ENOUGH = 3  # seeds, for an interval
TASKS = {"fashion": "Fashion-MNIST, CNN", "cifar": "CIFAR-10, ResNet20"}
WORLDS = {
    "iid": "the same data at each",
    "slow-classes": "slow clients hold three classes",
    "shards": "shards, steps of 2 to 9",
    "dirichlet": "Dirichlet 0.3, steps of 2 to 9",
    "300": "300 clients, 30 at a time",
    "churn": "Dirichlet 0.3, come and go",
}
HOW = "--device cuda --set run.executor=graph --set run.precision=bfloat16"
INTRODUCTION = """\
Twelve algorithms in six worlds, at equal bits: everybody sends 4 bits a coordinate both ways, by the same lattice,
keyed by what the receiver has or, for a displacement, by zero. SGD at the clients, group norm, real data. Each
algorithm has the best of 13 settings (nine in a grid, then the four neighbours of the best, once; a few could not be
tried, see below), chosen by mean accuracy on the validation split with one seed that is not published here, in the
world of Dirichlet's data alone, over half of the time; the grids are beside the
[presets](../../src/quafl/presets/regimes). *FADAS* is FedBuff with AMSGrad at the server, with a constant rate. A
quarter of the clients is slow (steps of 8 time units in the mean, the others' of 2) where nothing else is said, and
an uncompressed exchange takes 10 time units.

This page is made by `python benchmarks/regimes.py` from the rows beside it. Fashion-MNIST's rows were recorded on one
H200 in two sittings, seed 0 and a part of seed 1 in the first: a script gave the presets' curves to the functions
behind `quafl reproduce` and `quafl tune` (`run.folders.accumulate`, `run.pool`), 15 processes at a time under CUDA's
MPS, and joined the rows. Calibrated's were recorded again in a third, by `quafl reproduce … --only Calibrated`. The
command beside each table makes all of its rows again."""
READING = """\
## How to read the numbers

- The **short horizon** is *time to* the target: when a seed is first evaluated at it, as coarse as evaluations are.
  The **long horizon** is the *mean* accuracy over the whole run, and that at the *end*, which is the mean over its
  last tenth. Mean ± standard deviation over seeds.
- *Calibrated is ahead by* is the mean of the differences of paired seeds with its 95 % interval by Student's law, in
  points of accuracy or in time units, **bold** where it excludes zero. Of a seed that never arrives, only that it is
  later than the end is known: the least that can be said counts. No interval is corrected for there being many of
  them.
- The polled algorithms (Calibrated, QuAFL, FAVANO) compute while a message is on its way, as in the paper; clients of
  the others wait for the model. Where evaluations are a round apart a model counts until the next one is there;
  elsewhere the line between two evaluations is straight."""


class World(NamedTuple):
    """A figure, as it has been published."""

    name: str
    curves: dict[str, Curve]
    made: dict[str, str]
    stale: bool  # its preset has changed since


def publish(name: str, runs: Path) -> None:
    """What there is of a figure: the rows' columns that are needed here, and where they are from."""
    folders = sorted(path.parent for path in (runs / name / "curves").glob("*/rows.csv"))
    if not folders:
        return
    wanted = load_figure(name).curves
    before = published(name)
    rows: dict[str, dict[int, list[Row]]] = {curve.label: {} for curve in wanted}
    troubles: dict[str, dict[int, str]] = {curve.label: {} for curve in wanted}
    made: list[dict[str, str]] = []
    if before is not None and not before.stale:
        made = [before.made]
        for label, curve in before.curves.items():
            rows[label] |= curve.seeds
            troubles[label] |= curve.troubles
    for curve in map(read_curve, folders):
        made.append(curve.versions)
        rows[curve.label] |= curve.seeds
        troubles[curve.label] |= curve.troubles
    seeds = set.intersection(*(set(found) for found in rows.values()))  # a sitting may have ended before others
    if not seeds:
        return
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{name}.csv").open("w", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["curve", *COLUMNS])
        for label, found in rows.items():
            for row in (row for seed in sorted(seeds) for row in found[seed]):
                writer.writerow([label, *(f"{row[column]:.10g}" for column in COLUMNS)])
    about = {
        "settings": fingerprint(wanted),
        "made with": reduce(joined, made),
        "troubles": {label: found for label, found in troubles.items() if found},
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    published.cache_clear()


@cache
def published(name: str) -> World | None:
    """A figure's curves, with the settings of its preset."""
    if not (FOLDER / f"{name}.csv").exists():
        return None
    about = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    rows: dict[str, list[Row]] = {}
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as stream:
        for line in csv.DictReader(stream):
            rows.setdefault(line.pop("curve"), []).append({key: float(value) for key, value in line.items()})
    wanted = load_figure(name).curves
    curves = {}
    for one in wanted:
        seeds = by_seed(rows[one.label])
        settings = one.model_dump(mode="json")
        settings["run"]["seeds"] = list(seeds)
        troubles = {int(seed): str(why) for seed, why in about["troubles"].get(one.label, {}).items()}
        curves[one.label] = Curve(one.label, seeds, settings, about["made with"], troubles)
    return World(
        name, curves, about["made with"], stale=about["settings"] not in (fingerprint(wanted), earlier(wanted))
    )


def lead(world: World, rival: str, measure: str) -> Finding:
    """Of our algorithm, over a rival."""
    pair = [world.curves[OURS], world.curves[rival]]
    return order(pair, measure=measure, axis="time", metric="accuracy").findings[0]


def means(world: World) -> dict[str, Spread]:
    """Of the whole run, by algorithm."""
    found = areas(list(world.curves.values()), "accuracy")
    return {label: Spread(tuple(one.values())) for label, one in zip(world.curves, found, strict=True)}


def at_end(world: World) -> dict[str, Spread]:
    return {label: Spread(tuple(ends(curve, "accuracy").values())) for label, curve in world.curves.items()}


def best_first(world: World) -> list[str]:
    """By mean accuracy."""
    found = means(world)
    return sorted(found, key=lambda label: -found[label].mean)


def shown(finding: Finding, scale: float, pattern: str) -> str:
    """Mean and interval, bold if it excludes zero."""
    if not np.isfinite(finding.low):
        return pattern.format(scale * finding.mean)
    low, high = (pattern.format(scale * value) for value in (finding.low, finding.high))
    text = f"{pattern.format(scale * finding.mean)} [{low}, {high}]"
    return f"**{text}**" if finding.low > 0 or finding.high < 0 else text


def table(world: World) -> list[str]:
    """Of all that is asked of a world."""
    target = next(iter(world.curves.values())).target
    lines = [
        f"| | time to {target:.0%} | seeds there | mean accuracy | at the end | MB in all | MB to {target:.0%} "
        "| Calibrated is sooner by | ahead in the mean by | at the end by |",
        "|---|" + "---|" * 9,
    ]
    mean, end = means(world), at_end(world)
    for label in best_first(world):
        curve = world.curves[label]
        cells = [
            label,
            time_to_target(curve).show("{:.0f}"),
            f"{len(time_to_target(curve).values)} of {len(curve.seeds)}",
            mean[label].show("{:.3f}"),
            end[label].show("{:.3f}"),
            megabytes(curve).show("{:.0f}"),
            megabytes_to_target(curve).show("{:.0f}"),
        ]
        if label == OURS:
            cells += ["", "", ""]
        else:
            cells += [shown(lead(world, label, "to target"), 1, "{:.0f}")]
            cells += [shown(lead(world, label, measure), 100, "{:.1f}") for measure in ("area", "end")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def standing(world: World, measure: str) -> str:
    """Ahead of whom, in words."""
    rivals = [label for label in world.curves if label != OURS]
    seeds = len(world.curves[OURS].seeds)
    if seeds < ENOUGH:
        gaps = {label: lead(world, label, measure).mean for label in rivals}
        if not any(gaps.values()):
            return "nobody is there"
        ahead = [label for label in rivals if gaps[label] < 0]
        place = f"behind {', '.join(ahead)}" if ahead else "first"
        return f"{place} ({seeds} seed{'s' * (seeds > 1)}: no interval)"
    words = {label: lead(world, label, measure).verdict for label in rivals}
    if set(words.values()) == {"holds"}:
        return "ahead of all"
    parts = []
    for word, text in (("does not hold", "behind"), ("undecided", "not told apart from")):
        some = [label for label in rivals if words[label] == word]
        if some:
            parts.append(f"{text} {'anybody' if len(some) == len(rivals) else ', '.join(some)}")
    return "; ".join(parts)


def picture(worlds: Sequence[World], names: Sequence[str]) -> Figure:
    """Worlds by algorithms: how far each is behind the best, in the long run and to the target."""
    labels = sorted(worlds[0].curves, key=lambda label: -float(np.mean([means(world)[label].mean for world in worlds])))
    figure = Figure(figsize=(11.5, 1.5 + 1.0 * len(worlds)), layout="constrained")
    long, short = figure.subplots(2, 1, sharex=True)
    points = np.array([[means(world)[label].mean * 100 for label in labels] for world in worlds])
    behind = points.max(axis=1, keepdims=True) - points
    _matrix(long, behind, [[f"{value:.1f}" for value in row] for row in points], names, labels, 30.0)
    long.set_title("Accuracy, mean over the run (%): the darker, the farther behind the best", fontsize=11, loc="left")
    times = np.array([[_time(world.curves[label]) for label in labels] for world in worlds])
    first = np.where(np.isinf(least := times.min(axis=1, keepdims=True)), 1.0, least)  # where nobody arrives
    factor = np.log2(times / first)
    words = [["–" if np.isinf(value) else f"{value:.0f}" for value in row] for row in times]
    _matrix(short, factor, words, names, labels, 2.0)
    short.set_title("Time to the target: the darker, the later (–: not with every seed)", fontsize=11, loc="left")
    return figure


def _time(curve: Curve) -> float:
    times = time_to_target(curve)
    return times.mean if len(times.values) == curve.planned else np.inf


def _matrix(
    axes: Axes,
    gaps: np.ndarray,
    words: Sequence[Sequence[str]],
    rows: Sequence[str],
    columns: Sequence[str],
    darkest: float,
) -> None:
    axes.imshow(np.minimum(gaps, darkest), cmap="Blues", vmin=0, vmax=1.35 * darkest, aspect="auto")
    for i, row in enumerate(words):
        for j, word in enumerate(row):
            best = gaps[i, j] == 0
            colour = "white" if gaps[i, j] > 0.8 * darkest else "black"
            axes.text(
                j, i, word, ha="center", va="center", fontsize=10, color=colour, fontweight="bold" if best else "normal"
            )
            if best:
                frame = Rectangle((j - 0.48, i - 0.46), 0.96, 0.92, fill=False, edgecolor="#D55E00", linewidth=2)
                axes.add_patch(frame)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0, labelbottom=True)
    axes.spines[:].set_visible(False)


def origin(world: World) -> str:
    """Command, device and date."""
    made = world.made
    old = " **The preset has been changed since.**" if world.stale else ""
    return (
        f"Recorded {made['date']}, {made['device']}, {made['precision']}, torch {made['torch']}; "
        f"[rows](regimes/{world.name}.csv). To make them again: `quafl reproduce {world.name} {HOW}`.{old}"
    )


def remark(name: str) -> list[str]:
    path = FOLDER / f"{name}.md"
    return [*path.read_text(encoding="utf-8").splitlines(), ""] if path.exists() else []


def against(name: str, other: str) -> list[str]:
    """Two versions of a world side by side, of the seeds that both have."""
    one, two = published(name), published(other)
    if one is None or two is None:
        return [f"**Not yet run**: `quafl reproduce {other}`.", ""]
    seeds = [seed for seed in one.curves[OURS].seeds if seed in two.curves[OURS].seeds]
    both = [
        World(world.name, {label: _only(curve, seeds) for label, curve in world.curves.items()}, world.made, False)
        for world in (one, two)
    ]
    lines = ["| | mean accuracy | at the end | MB | mean accuracy | at the end | MB |", "|---|" + "---|" * 6]
    for label in best_first(both[0]):
        cells = [
            text
            for world in both
            for text in (
                means(world)[label].show("{:.3f}"),
                at_end(world)[label].show("{:.3f}"),
                megabytes(world.curves[label]).show("{:.0f}"),
            )
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    word = "seed" if len(seeds) == 1 else "seeds"
    return [*lines, "", f"Of {word} {', '.join(map(str, seeds))}. {origin(two)}", ""]


def _only(curve: Curve, seeds: Sequence[int]) -> Curve:
    settings = {**curve.settings, "run": {**curve.settings["run"], "seeds": list(seeds)}}
    return Curve(curve.label, {seed: curve.seeds[seed] for seed in seeds}, settings, curve.versions, curve.troubles)


def task_section(task: str) -> list[str]:
    """All worlds of a task."""
    names = {f"{task}-{world}": words for world, words in WORLDS.items()}
    worlds = [world for name in names if (world := published(name)) is not None]
    lines = [f"## {TASKS[task]}", ""]
    if worlds:
        with (FOLDER / f"{task}.png").open("wb") as stream:
            to_png(picture(worlds, [names[world.name] for world in worlds]), stream)
        lines += [f"![{TASKS[task]}: worlds by algorithms](regimes/{task}.png)", ""]
        lines += [*remark(task)]
        lines += ["| world | Calibrated to the target | in the mean | at the end |", "|---|---|---|---|"]
        for world in worlds:
            told = [standing(world, measure) for measure in ("to target", "area", "end")]
            lines.append(f"| [{names[world.name]}](#{world.name}) | {' | '.join(told)} |")
        lines.append("")
    missing = [name for name in names if published(name) is None]
    if missing:
        lines += [f"**Not yet run**: `quafl reproduce {' '.join(missing)}`.", "", *([] if worlds else remark(task))]
    for world in worlds:
        figure = load_figure(world.name).figure
        lines += [f"### {world.name}", "", f"{figure.setting}.", "", *table(world), "", *remark(world.name)]
        lines += [origin(world), ""]
    return lines


def main(runs: Path) -> None:
    for name in figures(REGIMES):
        publish(name, runs)
    lines = ["# Which algorithm in which world", "", *INTRODUCTION.splitlines(), ""]
    lines += [*remark("summary"), *READING.splitlines(), ""]
    for task in TASKS:
        lines += task_section(task)
    lines += ["## Without compression", "", *remark("bits")]
    for world, other in (("fashion-iid", "fashion-iid-32"), ("fashion-dirichlet", "fashion-dirichlet-32")):
        lines += [f"### {other}", "", "4 bits on the left, 32 on the right.", "", *against(world, other)]
    lines += ["## Batch norm instead of group norm", "", *remark("norm")]
    for world in ("fashion-iid", "fashion-slow-classes"):
        lines += [f"### {world}-batch-norm", "", "Group norm on the left, batch norm on the right.", ""]
        lines += against(world, f"{world}-batch-norm")
    lines += ["## Adam and momentum", "", *remark("optimizers")]
    found = published("fashion-optimizers")
    if found is not None:
        mean, end = means(found), at_end(found)
        lines += ["| | mean accuracy | at the end |", "|---|---|---|"]
        lines += [
            f"| {label} | {mean[label].show('{:.3f}')} | {end[label].show('{:.3f}')} |" for label in best_first(found)
        ]
        lines += ["", f"Of seed {', '.join(map(str, next(iter(found.curves.values())).seeds))}. {origin(found)}", ""]
    lines += ["## What accuracy costs", "", *remark("frontier")]
    (RESULTS / "regimes.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/paper"))
