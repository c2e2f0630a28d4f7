"""Choose the demo's learning rates: every algorithm over the same grid, judged on the validation split.

    python benchmarks/tune_demo.py [FOLDER]

The best rate reaches the demo's target first with all seeds. Writes docs/results/demo-grid.csv and demo-grid.md.
"""

import csv
import sys
from pathlib import Path

from quafl.record.files import write_atomically
from quafl.record.summary import final, ranked, read_curve, time_to_target
from quafl.run.folders import prepare
from quafl.run.pool import run
from quafl.settings.reading import load

GRID = [0.05, 0.1, 0.2, 0.5, 1.0, 2.0]
SEEDS = [100, 101, 102]  # others than the demo's
RESULTS = Path(__file__).parents[1] / "docs" / "results"


def main(out: Path) -> None:
    curves = [
        settings.model_copy(update={"label": f"{settings.label} lr {lr}"})
        for lr in GRID
        for settings in load("demo", ["task.judge=validation", f"run.seeds={SEEDS}", f"algorithm.lr={lr}"])
    ]
    folders = prepare(curves, out, overwrite=True)
    run(folders, processes=2, on_news=lambda job, news: None)
    grid = {folder.settings.label: read_curve(folder.path) for folder in folders}
    names = [settings.label for settings in load("demo")]
    best = {name: ranked([grid[f"{name} lr {lr}"] for lr in GRID])[0].settings["algorithm"]["lr"] for name in names}
    table = [
        {
            "algorithm": name,
            "lr": lr,
            "time_to_target": time_to_target(curve).show("{:.1f}"),
            "seeds_at_target": f"{len(time_to_target(curve).values)} of {len(SEEDS)}",
            "final_accuracy": final(curve, "accuracy").show("{:.4f}"),
            "chosen": "yes" if lr == best[name] else "",
        }
        for name in names
        for lr in GRID
        for curve in [grid[f"{name} lr {lr}"]]
    ]
    with write_atomically(RESULTS / "demo-grid.csv") as stream:
        writer = csv.DictWriter(stream, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    versions = next(iter(grid.values())).versions
    target = load("demo")[0].run.target
    lines = [
        "# Learning rates of the demo",
        "",
        f"Every algorithm, the same grid, seeds {', '.join(map(str, SEEDS))}, judged on the validation split (the demo "
        f"itself uses other seeds and the test split). Chosen is the rate that reaches accuracy {target:g} first with "
        f"all seeds. Mean ± standard deviation over seeds.",
        "",
        f"Made by `make tune-demo` on {versions['date']} ({versions['platform']}, torch {versions['torch']}).",
        "",
        "| algorithm | lr | time to target | seeds at target | final accuracy | chosen |",
        "|---|---|---|---|---|---|",
        *("| " + " | ".join(str(cell) for cell in row.values()) + " |" for row in table),
    ]
    (RESULTS / "demo-grid.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[6:]))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tune-demo"))
