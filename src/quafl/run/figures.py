"""A paper's figure, reproduced: its runs, which may take several sittings, its picture, and its verdict."""

import csv
import json
from collections.abc import Sequence
from functools import reduce
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any

from quafl.record import maps, plots, verdicts
from quafl.record.files import write_atomically
from quafl.record.summary import (
    Curve,
    Spread,
    final,
    megabytes,
    megabytes_to_target,
    read_curve,
    slow_zero_step_shares,
    time_to_target,
    zero_step_share,
)
from quafl.run.folders import RunFolder
from quafl.run.versions import joined
from quafl.settings.curve import Settings
from quafl.settings.figures import Claim, Order, Reproduction

PICTURE, VERDICT, TABLE = "figure.png", "verdict.json", "map.csv"
BESIDE = {axis: f"{axis.replace(' ', '-')}.png" for axis in plots.AXES}  # the same curves by another axis
NOT_THE_FIGURE = "seeds", "device", "executor", "precision", "workers"  # how often it is run, and on what


def conclude(wanted: Reproduction, out: Path, folders: Sequence[RunFolder], command: str) -> dict[str, Any]:
    """Draw the figure, also by what else its claims are about and by what was sent, and judge the claims; all of it is
    written, and what the verdict says is given back."""
    curves = {folder.settings.label: read_curve(folder.path) for folder in folders}
    figure = wanted.figure
    goal = next(iter(curves.values())).target if figure.metric == "accuracy" else None
    axes = [figure.axis, *(claim.axis for claim in figure.claims if isinstance(claim, Order)), "megabytes"]
    for axis in dict.fromkeys(axes):
        shown = [curve for curve in curves.values() if curve.talks or axis != "megabytes"]
        y, log = plots.column(figure.metric), figure.metric.endswith("loss")
        with write_atomically(out / (PICTURE if axis == figure.axis else BESIDE[axis]), "wb") as stream:
            plots.to_png(plots.draw(shown, plots.AXES[axis], y, goal=goal, log=log), stream)
    claims, questions = (
        [{"claim": claim.text, **_judged(claim, curves)} for claim in some]
        for some in (figure.claims, figure.questions)
    )
    result = {
        "figure": wanted.name,
        "quick": wanted.smaller,
        "tuned": figure.tuned,
        "verdict": verdicts.overall([claim["verdict"] for claim in claims]),
        "claims": claims,
        "questions": questions,
        "curves": {
            folder.settings.label: {
                **_numbers(curves[folder.settings.label]),
                "seconds of each seed": folder.seconds(),
                "ended before their time": folder.troubles,
            }
            for folder in folders
        },
        **({"fewest bits": fewest_bits(list(curves.values()))} if wanted.figure.compression else {}),
        "command": command,
        "settings": fingerprint([folder.settings for folder in folders]),
        "made with": _made_with(list(curves.values())),
    }
    with write_atomically(out / VERDICT) as stream:
        json.dump(result, stream, indent=2)
    return result


def fewest_bits(curves: Sequence[Curve]) -> int:
    """With which, and with every larger number tried, the final accuracy is at most one standard deviation, between
    seeds, below what it is without compression."""
    by_bits = {int(curve.settings["codec"]["bits"]): final(curve, "accuracy") for curve in curves}
    most = max(by_bits)
    fewest = most
    for bits in sorted(by_bits, reverse=True):
        if not by_bits[bits].mean >= by_bits[most].mean - by_bits[most].deviation:
            break
        fewest = bits
    return fewest


def conclude_map(wanted: Reproduction, out: Path, cells: Sequence[list[RunFolder]], command: str) -> dict[str, Any]:
    """Draw who is first where, and write how long each algorithm takes in every cell."""
    firsts, table, shown = [], [], []
    for cell, folders in zip(wanted.cells, cells, strict=True):
        curves = [read_curve(folder.path) for folder in folders]
        firsts.append(maps.first(curves))
        shown += curves
        table += [{**cell.place, **line} for line in maps.lines(curves)]
    with write_atomically(out / TABLE) as stream:
        columns = dict.fromkeys(name for line in table for name in line)
        writer = csv.DictWriter(stream, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    with write_atomically(out / PICTURE, "wb") as stream:
        plots.to_png(maps.draw(wanted.figure.grid, firsts), stream)
    result = {
        "figure": wanted.name,
        "quick": wanted.smaller,
        "first": [{**cell.place, **first._asdict()} for cell, first in zip(wanted.cells, firsts, strict=True)],
        "command": command,
        "settings": fingerprint([folder.settings for folders in cells for folder in folders]),
        "made with": _made_with(shown),
    }
    with write_atomically(out / VERDICT) as stream:
        json.dump(result, stream, indent=2)
    return result


def fingerprint(curves: Sequence[Settings]) -> str:
    """By which one sees whether a figure's preset is still what was run: of its curves' settings that are not the
    defaults, so that a new setting changes nothing, and not of what is claimed. Another default is not noticed: which
    code has computed what is in the versions."""
    parts = []
    for curve in curves:
        plain = curve.model_dump(mode="json", exclude_defaults=True)
        plain["run"] = {key: value for key, value in plain.get("run", {}).items() if key not in NOT_THE_FIGURE}
        parts.append(json.dumps(plain, sort_keys=True))
    return blake2b("\n".join(parts).encode(), digest_size=6).hexdigest()


def _made_with(curves: Sequence[Curve]) -> dict[str, str]:
    """What there was in all sittings."""
    return reduce(joined, (curve.versions for curve in curves))


def _judged(claim: Claim, curves: dict[str, Curve]) -> dict[str, Any]:
    chosen = [curves[label] for label in claim.curves]
    common = {"measure": claim.measure, "axis": claim.axis, "metric": claim.metric}
    if isinstance(claim, Order):
        verdict = verdicts.order(chosen, margin=claim.margin, **common)
    else:
        verdict = verdicts.level(chosen, value=claim.value, within=claim.within, side=claim.side, **common)
    findings = [_plain(finding) for finding in verdict.findings]
    return {"verdict": verdict.verdict, "holds if the interval is": verdict.rule, "findings": findings}


def _plain(finding: verdicts.Finding) -> dict[str, Any]:
    """JSON has no infinite numbers, and nobody wants rounding errors, such as -0."""
    numbers = {name: getattr(finding, name) for name in ("mean", "low", "high")}
    return finding._asdict() | {
        name: round(value, 12) + 0.0 if isfinite(value) else None for name, value in numbers.items()
    }


def _numbers(curve: Curve) -> dict[str, Any]:
    """What one asks of a curve, mean ± standard deviation over seeds."""
    task = curve.settings["task"]
    theirs = [f"{curve.metric}_class_{number}" for number in task.get("slow_classes", [])]
    apart = {}
    if task.get("partition") == "slow classes" and curve.settings["run"]["per_class"]:
        ends = [verdicts.ends(curve, name) for name in theirs]
        means = tuple(mean(one[seed] for one in ends) for seed in curve.seeds)
        apart = {f"{curve.metric} on the slow clients' classes, last tenth": Spread(means).show("{:.4f}")}
    return {
        "seeds": sorted(curve.seeds),
        f"final {curve.metric}": final(curve, curve.metric).show("{:.4f}"),
        **apart,
        f"time to {curve.target:g}": time_to_target(curve).show("{:.0f}"),
        "seeds at the target": len(time_to_target(curve).values),
        "megabytes": megabytes(curve).show("{:.0f}"),
        f"megabytes to {curve.target:g}": megabytes_to_target(curve).show("{:.0f}"),
        "zero-step contacts": zero_step_share(curve).show("{:.1%}"),
        "of slow clients": Spread(tuple(slow_zero_step_shares(curve).values())).show("{:.1%}"),
        "messages refined": final(curve, "refined").show("{:.0f}"),
        "local steps": final(curve, "local_steps").show("{:.0f}"),
    }
