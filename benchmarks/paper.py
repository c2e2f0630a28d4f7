"""docs/results/paper.md, and a page for each figure in docs/results/paper, from what `quafl reproduce` has left.

    python benchmarks/paper.py [FOLDER]

The folder is runs/paper by default. Of each figure that has been run, its picture, its rows and its verdict are copied
beside its page; what has been published before and is not in the folder stays. What is to be said about a result stands
in remarks/ID.md there, what is to be said about all of them in remarks/summary.md; links in both count from the page.
"""

import json
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from quafl.record.maps import NOBODY
from quafl.record.rows import read_rows
from quafl.run.figures import BESIDE, NOT_THE_FIGURE, PICTURE, TABLE, VERDICT, fingerprint
from quafl.settings.curve import Settings
from quafl.settings.figures import Reproduction, figures, load_figure

RESULTS = Path(__file__).parents[1] / "docs" / "results"
INTRODUCTION = """\
Every figure of the paper is a command: `quafl reproduce --list`. A claim is fixed in the figure's preset before the
runs. It *holds* if the 95 % interval over seeds lies on the right side, *does not hold* if it lies on the wrong side,
and is *undecided* otherwise ([how to read the numbers](paper/reading.md)). This page and the figures' pages are made by
`python benchmarks/paper.py`."""
HOW = "run.executor=", "run.precision="  # that a figure may be run with: its numbers are the same but for rounding
VERDICTS = "holds", "undecided", "does not hold"
OLD_DEFAULTS = ("name", "lattice"), ("spread", 6.0)
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


def page(wanted: Reproduction) -> list[str]:
    name, figure = wanted.name, wanted.figure
    path = RESULTS / "paper" / f"{name}.json"
    instead = f" In place of `{figure.instead_of}`, whose data not everybody can have." if figure.instead_of else ""
    lines = [f"# {name}", "", f"{PARTS[figure.part]}: {figure.setting}.{instead} [All figures](../paper.md).", ""]
    if not path.exists():
        claims = "; ".join(claim.text for claim in figure.claims) or "who is first where"
        beside = [
            f" In its place: [{one}]({one}.md)." for one in figures() if load_figure(one).figure.instead_of == name
        ]
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
    remark = path.parent / "remarks" / f"{name}.md"
    if remark.exists():
        lines += ["", *remark.read_text(encoding="utf-8").splitlines()]
    settings = [curve for cell in wanted.cells for curve in cell.curves] or wanted.curves
    if found["settings"] not in (fingerprint(settings), earlier(settings)):
        lines += ["", "**The preset has been changed since**: this is what came out before."]
    rows = figure.of or name
    made = found["made with"]
    where = made["device"] if made.get("device") != "cpu" else f"a CPU ({made['platform']})"
    places = [f"{name}.png", *(f"{name}-{picture}" for picture in BESIDE.values())]
    pictures = [f"![{place}]({place})" for place in places if path.with_name(place).exists()]
    lines += ["", *pictures, ""]
    lines += [
        f"`{found['command']}`, {made['date']}, {where}, {made.get('precision', 'float32')}, torch {made['torch']};"
    ]
    lines += [f"[rows]({rows}.csv), [verdict]({name}.json).", ""]
    return lines


def earlier(curves: Sequence[Settings]) -> str:
    """The fingerprint of the same settings when a lattice with a spread of 6 was the default, which presets now spell
    out: what was run before that is recorded with it."""
    parts = []
    for curve in curves:
        plain = curve.model_dump(mode="json", exclude_defaults=True)
        plain["run"] = {key: value for key, value in plain.get("run", {}).items() if key not in NOT_THE_FIGURE}
        codec = _without_old_defaults(plain.pop("codec", {}))
        parts.append(json.dumps(plain | ({"codec": codec} if codec else {}), sort_keys=True))
    return blake2b("\n".join(parts).encode(), digest_size=6).hexdigest()


def _without_old_defaults(codec: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in codec.items() if (key, value) not in OLD_DEFAULTS}
    for way in {"up", "down"} & kept.keys():
        kept[way] = {key: value for key, value in kept[way].items() if (key, value) != ("spread", 6.0)}
    return kept


def verdicts(path: Path) -> list[str]:
    """How many claims of a figure hold, are undecided, and do not hold."""
    if not path.exists():
        return ["not yet run", "", ""]
    claims = json.loads(path.read_text(encoding="utf-8")).get("claims")
    if claims is None:
        return ["a map", "", ""]
    counted = Counter(claim["verdict"] for claim in claims)
    return [str(counted[word] or "") for word in VERDICTS]


def main(runs: Path) -> None:
    names = figures()
    for name in names:
        publish(name, runs)
    folder = RESULTS / "paper"
    lines = [
        "# The paper, reproduced",
        "",
        *INTRODUCTION.splitlines(),
        "",
        *(folder / "remarks" / "summary.md").read_text(encoding="utf-8").splitlines(),
        "",
        f"| figure | | {' | '.join(VERDICTS)} |",
        "|---|---|---|---|---|",
    ]
    for one in map(load_figure, names):
        link = f'<a id="{one.name.lower()}"></a>[{one.name}](paper/{one.name}.md)'
        lines.append(f"| {link} | {one.figure.setting} | {' | '.join(verdicts(folder / f'{one.name}.json'))} |")
        (folder / f"{one.name}.md").write_text("\n".join(page(one)).rstrip() + "\n", encoding="utf-8")
    (RESULTS / "paper.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/paper"))
