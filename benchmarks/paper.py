"""docs/results/paper.md from what `quafl reproduce` has left.

    python benchmarks/paper.py [FOLDER]

The folder is runs/paper by default. Of each figure that has been run, its picture, its rows and its verdict are copied
beside the page; what has been published before and is not in the folder stays. What is to be said about a result stands
in a file of its own there, ID.md, and what is to be said about all of them in summary.md.
"""

import json
import shlex
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from quafl.record.maps import NOBODY
from quafl.record.rows import read_rows
from quafl.run.figures import BESIDE, PICTURE, TABLE, VERDICT, fingerprint
from quafl.settings.figures import Reproduction, figures, load_figure

RESULTS = Path(__file__).parents[1] / "docs" / "results"
INTRODUCTION = """\
Every figure of the paper is a command: `quafl reproduce --list`. A claim is fixed in the figure's preset before the
runs. It *holds* when the 95 % interval (Student's) of the paired difference between seeds excludes zero on the right
side, *does not hold* on the wrong side, and is *undecided* otherwise. That something is "no worse", or "about" so much,
has a margin, fixed as well: the tables say where the interval has to be. A claim of several parts holds if all of them
do. No interval is corrected for there being many of them, and figures that show the same runs are not independent.
Five seeds are the presets' wish, and three what the GPU time allowed at first. Where a command says `--seeds 5`, two
were added when the first three had been seen: such an interval excludes zero by chance more often than its 5 %.
*Beside the claims* are questions of our own, most of them asked after the runs; they are no part of the verdict.

This page is made by `python benchmarks/paper.py`."""
READING = """\
## How to read the numbers

- *Time to* a target is that of the first evaluation that reaches it, and as coarse as evaluations and rounds are. Of a
  seed that never gets there, only that it is later than its end is known: the least that can be said counts, and is
  marked `at least`. `A before B` is by how much A is better.
- `area` is the mean up to the common end, `end` the mean over the last tenth, `rise` the largest rise between two
  evaluations after the first tenth; `deviation` is the standard deviation of the ends, with its interval by the χ² law.
- Numbers of curves are mean ± standard deviation over seeds, and so are the bands of pictures; those *to* a target are
  of the seeds that arrived. All curves of a figure end at the same time, so by megabytes some end before others; where
  they end more than four times apart, that axis is logarithmic. *Megabytes* are all that was sent, both ways; the
  Baseline sends nothing. A *zero-step contact* is one at which a client had not finished a single step since the last;
  *messages refined* needed more bits to be decoded. *Seconds a seed* are those on the wall, beside other runs on the
  same device and with what was compiled first.
- QuAFL's clients compute during an exchange; those of FedBuff, FedAsync and FedAvg wait for the model. That is the
  paper's model of time. With `wait = 0` QuAFL's first round meets clients that have not taken a step yet.
- Where evaluations are a round apart, a model counts until the next one is there; where there were other models between
  two evaluations, the line between them is straight. `area` is taken of that.
- Learning rates were tuned once for each kind of task, or taken from the paper; presets say which.
- On a GPU, a seed gave the same bits twice in one sitting, and, compiled anew on another machine, first other last
  bits and in the end another run. Such runs differ by a fifth to a third of what seeds differ by: with standard
  deviations of 0.45 and 1.27 points on CIFAR-10 up to time 6000 (QuAFL in `time` and in `compression-cifar10`), of
  0.07 and 0.3 on Fashion-MNIST up to 2000 (QuAFL in `accuracy-vs-time-fmnist` and in `full_convergence`). That is a
  noise in all comparisons here."""
HOW = "run.executor=", "run.precision="  # that a figure may be run with: its numbers are the same but for rounding
PARTS = {"main": "The paper's main body", "appendix": "The paper's appendix", "beyond": "Beyond the paper"}


def publish(name: str, runs: Path) -> None:
    """What there is of a figure."""
    source, target = runs / name, RESULTS / "paper"
    if not (source / VERDICT).exists():
        return
    verdict = json.loads((source / VERDICT).read_text(encoding="utf-8"))
    if verdict["quick"]:
        raise SystemExit(f"{source} is of a quick run, which says nothing; give the folder of whole ones")
    changed = [word for word in shlex.split(verdict["command"]) if "=" in word and not word.startswith(HOW)]
    if changed:
        raise SystemExit(f"{source} was run with {', '.join(changed)}: it is not the figure")
    target.mkdir(exist_ok=True)
    (target / f"{name}.json").write_text(json.dumps(verdict, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(source / PICTURE, target / f"{name}.png")
    if (source / TABLE).exists():
        shutil.copyfile(source / TABLE, target / f"{name}.csv")
        return
    for picture in BESIDE.values():
        if (source / picture).exists():
            shutil.copyfile(source / picture, target / f"{name}-{picture}")
    owner = load_figure(name).figure.of or name
    lines: list[str] = []
    for path in sorted((runs / owner / "curves").glob("*/rows.csv")):
        rows = read_rows(path)
        lines = lines or ["curve," + ",".join(rows[0])]
        lines += [",".join([path.parent.name, *(f"{value:.6g}" for value in row.values())]) for row in rows]
    (target / f"{owner}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def findings(heading: str, claims: list[dict[str, Any]]) -> list[str]:
    """A table of what is said, and what was measured."""
    lines = [f"| {heading} | verdict | measured, with its 95 % interval | which must be |", "|---|---|---|---|"]
    for claim in claims:
        measured = "; ".join(
            f"{one['what']}: {one['mean']:.4g} [{one['low']:.4g}, {one['high']:.4g}]"
            if one["low"] is not None
            else f"{one['what']}: too few seeds"
            for one in claim["findings"]
        )
        lines.append(
            f"| {claim['claim']} | **{claim['verdict']}** | {measured} | {claim['holds if the interval is']} |"
        )
    return lines


def section(wanted: Reproduction) -> list[str]:
    name, figure = wanted.name, wanted.figure
    path = RESULTS / "paper" / f"{name}.json"
    instead = f" In place of `{figure.instead_of}`, whose data not everybody can have." if figure.instead_of else ""
    lines = [f"### {name}", "", f"{figure.setting}.{instead}", ""]
    if not path.exists():
        claims = "; ".join(claim.text for claim in figure.claims) or "who is first where"
        beside = [f" In its place: [{one}](#{one})." for one in figures() if load_figure(one).figure.instead_of == name]
        return [*lines, f"Claim: {claims}. **Not yet run**: `quafl reproduce {name}`.{''.join(beside)}", ""]
    found = json.loads(path.read_text(encoding="utf-8"))
    if "first" in found:
        firsts = Counter(cell["label"] for cell in found["first"])
        clear = Counter(cell["label"] for cell in found["first"] if cell["clear"])
        counted = ", ".join(
            f"{label} in {count}" + (f" (clearly in {clear[label]})" if label != NOBODY else "")
            for label, count in firsts.most_common()
        )
        lines += [
            f"First at the target, of {len(found['first'])} cells: {counted}. A cell says who is first, and how many",
            "times longer the next algorithm takes; it is hatched where the 95 % interval of the paired difference",
            "includes zero.",
        ]
    else:
        lines += findings("claim", found["claims"])
        if found.get("questions"):
            lines += ["", *findings("beside the claims", found["questions"])]
        keys = [
            key
            for key in next(iter(found["curves"].values()))
            if key not in ("seeds", "seconds of each seed", "ended before their time")
        ]
        lines += ["", f"| curve | {' | '.join(keys)} | seconds a seed |", "|---|" + "---|" * (len(keys) + 1)]
        for label, numbers in found["curves"].items():
            spent = numbers["seconds of each seed"].values()
            mean = f"{sum(spent) / len(spent):.0f}" if spent else "–"
            lines.append(f"| {label} | {' | '.join(str(numbers[key]) for key in keys)} | {mean} |")
        most = max((numbers["seeds"] for numbers in found["curves"].values()), key=len)
        for label, numbers in found["curves"].items():
            if numbers["seeds"] != most:
                lines += ["", f"{label} has the seeds {', '.join(map(str, numbers['seeds']))} alone."]
            for seed, trouble in numbers["ended before their time"].items():
                lines += ["", f"{label}, seed {seed}: {trouble}."]
        if not found["tuned"]:
            lines += ["", "Learning rates are the paper's, and not tuned."]
    if "fewest bits" in found:
        lines += ["", f"The fewest bits within one standard deviation of 32: **{found['fewest bits']}**."]
    remark = path.with_suffix(".md")
    if remark.exists():
        lines += ["", *remark.read_text(encoding="utf-8").splitlines()]
    settings = [curve for cell in wanted.cells for curve in cell.curves] or wanted.curves
    if found["settings"] != fingerprint(settings):
        lines += ["", "**The preset has been changed since**: this is what came out before."]
    rows = figure.of or name
    made = found["made with"]
    where = made["device"] if made.get("device") != "cpu" else f"a CPU ({made['platform']})"
    places = [f"{name}.png", *(f"{name}-{picture}" for picture in BESIDE.values())]
    pictures = [f"![{place}](paper/{place})" for place in places if path.with_name(place).exists()]
    lines += ["", *pictures, ""]
    lines += [
        f"`{found['command']}`, {made['date']}, {where}, {made.get('precision', 'float32')}, torch {made['torch']};"
    ]
    lines += [f"[rows](paper/{rows}.csv), [verdict](paper/{name}.json).", ""]
    return lines


def words(path: Path) -> str:
    """What is said of a figure in a line: each of its claims has its verdict."""
    if not path.exists():
        return "not yet run"
    found = json.loads(path.read_text(encoding="utf-8"))
    return "; ".join(f"**{claim['verdict']}**: {claim['claim']}" for claim in found.get("claims", [])) or "a map"


def main(runs: Path) -> None:
    names = figures()
    for name in names:
        publish(name, runs)
    lines = [
        "# The paper, reproduced",
        "",
        *INTRODUCTION.splitlines(),
        "",
        *(RESULTS / "paper" / "summary.md").read_text(encoding="utf-8").splitlines(),
        "",
        "| figure | | verdict |",
        "|---|---|---|",
    ]
    wanted = [load_figure(name) for name in names]
    for one in wanted:
        verdict = words(RESULTS / "paper" / f"{one.name}.json")
        lines.append(f"| [{one.name}](#{one.name.lower()}) | {one.figure.setting} | {verdict} |")
    lines += ["", *READING.splitlines()]
    for part, title in PARTS.items():
        lines += ["", f"## {title}", ""]
        for one in wanted:
            if one.figure.part == part:
                lines += section(one)
    (RESULTS / "paper.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/paper"))
