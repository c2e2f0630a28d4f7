"""The paper's figure of compression with differences on the way up, beside the published one with lattices."""

import csv
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from quafl.record.plots import to_png
from quafl.record.rows import Row, by_seed
from quafl.record.summary import Curve, final, megabytes, megabytes_to_target, read_curve, time_to_target

RUNS = Path("runs/compression")  # of `quafl run benchmarks/compression.toml --out runs/compression`
COLUMNS = "seed", "time", "bytes_up", "bytes_down", "accuracy"
LATTICES = {"b-32": "32 bits", "b-4": "lattice: 4 up, 4 down", "b-3": "lattice: 3 up, 3 down"}
SETTINGS = {
    "run": {"metric": "accuracy", "lower_is_better": False, "target": 0.85, "until": 2000.0, "seeds": [0, 1, 2]},
    "clients": {"count": 20},
}


def publish(out: Path) -> dict[str, Any]:
    """The rows that the run has left, beside the page; and how they were made."""
    curves = [read_curve(path.parent) for path in sorted(RUNS.glob("*/rows.csv"))]
    with (out / "codec-compression.csv").open("w", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["curve", *COLUMNS])
        for curve in curves:
            for row in (row for rows in curve.seeds.values() for row in rows):
                writer.writerow([f"difference: {curve.label}", *(f"{row[column]:.8g}" for column in COLUMNS)])
    made = curves[0].versions
    how = {name: made[name] for name in ("precision", "executor", "code", "date")}
    return {"machine": f"{made['device']}, torch {made['torch']}", **how}


def rows(out: Path) -> list[dict[str, str]]:
    """A table of both."""
    return [
        {
            "bits": curve.label,
            "final accuracy": final(curve, "accuracy").show("{:.4f}"),
            "time to 0.85": time_to_target(curve).show("{:.0f}"),
            "megabytes": megabytes(curve).show("{:.0f}"),
            "megabytes to 0.85": megabytes_to_target(curve).show("{:.0f}"),
        }
        for curve in published(out)
    ]


def published(out: Path) -> list[Curve]:
    """Of both, those with as many bits."""
    found: dict[str, list[Row]] = {label: [] for label in LATTICES.values()}
    for name in ("paper/compression-fmnist.csv", "codec-compression.csv"):
        with (out / name).open(newline="", encoding="utf-8") as stream:
            for line in csv.DictReader(stream):
                label = LATTICES.get(line["curve"], line["curve"])
                if label in found or label.startswith("difference"):
                    found.setdefault(label, []).append({column: float(line[column]) for column in COLUMNS})
    return [Curve(label, by_seed(one), SETTINGS, {}, {}) for label, one in found.items()]


def draw(out: Path, target: Path) -> None:
    """Accuracy by megabytes, the mean over seeds: evaluations are at the same times."""
    figure = Figure(figsize=(8.0, 4.4), layout="constrained")
    axes = figure.subplots()
    for number, curve in enumerate(published(out)):
        seeds = list(curve.seeds.values())
        turns = list(zip(*seeds, strict=False))  # some end an evaluation later
        spent = [sum(row["bytes_up"] + row["bytes_down"] for row in turn) / len(turn) / 1e6 for turn in turns]
        accuracy = [sum(row["accuracy"] for row in turn) / len(turn) for turn in turns]
        line = "--" if curve.label in LATTICES.values() else "-"
        axes.plot(spent[1:], accuracy[1:], line, color=f"C{number}", label=curve.label, linewidth=1.4)
    axes.set(xscale="log", ylim=(0.7, 0.92), xlabel="megabytes, both ways, all clients", ylabel="accuracy")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small")
    with target.open("wb") as stream:
        to_png(figure, stream)
