"""Each task trained on its real data, recorded: `make record-tasks` (an hour or more on a CPU).

    python benchmarks/tasks.py run|page ...

`run` trains into runs/tasks, taking up again what was interrupted; `page` writes docs/results/tasks.md from there, and
for each task a CSV of its rows and a picture.
"""

import subprocess
import sys
from pathlib import Path

from quafl.record.plots import to_png
from quafl.record.report import main_figure, table
from quafl.record.summary import Curve, ranked, read_curves

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = ROOT / "runs" / "tasks", ROOT / "docs" / "results"
COMMANDS = {
    "mnist": "quafl run mnist",
    "fashion-mnist": "quafl run fashion-mnist",
    "cifar-10": "quafl run cifar-10 --only QuAFL --set clients.count=5 --set curves.QuAFL.algorithm.wait=20 "
    "--set algorithm.optimizer=momentum --set algorithm.lr=0.05 --set run.until=2550 --set run.every=255",
}
WORDS = {
    "mnist": "MNIST, 784-32-10, SGD 0.5, batches of 128, n = 20, s = 5, K = 5. All algorithms have the paper's "
    "learning rate; FedBuff's server rate was chosen from three, the rest is not tuned.",
    "fashion-mnist": "Fashion-MNIST, convolutional network of 1,475,338 parameters, Adam 0.001, batches of 100, "
    "n = 20, s = 5, K = 5.",
    "cifar-10": "CIFAR-10, ResNet20, pictures moved and mirrored, batches of 64. Not the paper's setting, which takes "
    "days on a CPU: n = s = 5, K = 9, swt = 20, momentum 0.9 with 0.05, so that few steps go far.",
}
PREFACE = """# Each task on its real data

That every task trains, not a comparison of the paper's figures: each run was made by the command beside it (`make
record-tasks` makes all of them). Mean ± standard deviation over seeds, on the test sets. CelebA's licence forbids
passing it on: its loader and experiment are tested on generated pictures in its format, and no run is recorded.
"""


def run() -> None:
    for name, command in COMMANDS.items():
        out = RUNS / name
        begun = out.is_dir() and any(out.rglob("settings.toml"))
        words = ["quafl", "run", "--resume", str(out)] if begun else [*command.split(), "--out", str(out)]
        subprocess.run([sys.executable, "-m", "quafl.cli", *words[1:]], check=True)


def page() -> None:
    text = PREFACE
    for name, command in COMMANDS.items():
        if not (RUNS / name).is_dir():
            continue
        curves = ranked(read_curves([RUNS / name]))
        record(name, curves)
        headings, lines = table(curves)
        versions, seeds = curves[0].versions, sorted(curves[0].seeds)
        text += (
            f"\n## {name}\n\n{WORDS[name]}\n\n`{command} --out DIR`, {versions['date']}, {versions['platform']}, torch "
            f"{versions['torch']}, seeds {', '.join(map(str, seeds))}; [rows](tasks-{name}.csv).\n\n"
            f"![Accuracy against simulated time](../img/tasks-{name}.png)\n\n"
            f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}\n"
            + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
        )
    (RESULTS / "tasks.md").write_text(text, encoding="utf-8")


def record(name: str, curves: list[Curve]) -> None:
    with (RESULTS / f"tasks-{name}.csv").open("w", encoding="utf-8") as stream:
        columns = list(next(iter(curves[0].seeds.values()))[0])
        stream.write(",".join(["curve", *columns]) + "\n")
        for curve in curves:
            for rows in curve.seeds.values():
                stream.writelines(f"{curve.label},{','.join(f'{row[c]:.6g}' for c in columns)}\n" for row in rows)
    with (ROOT / "docs" / "img" / f"tasks-{name}.png").open("wb") as stream:
        to_png(main_figure(curves), stream)


if __name__ == "__main__":
    for part in sys.argv[1:]:
        {"run": run, "page": page}[part]()
