"""Who is first where: a map over settings, a colour for each algorithm."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from quafl.record.plots import looks
from quafl.record.summary import Curve, arrival, ranked, time_to_target
from quafl.record.verdicts import order

NOBODY = "nobody"
_BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2}


class First(NamedTuple):
    """Who reached the target first in a cell (of equally soon ones, the one that ends best), and by how much before the
    next algorithm; variants of one, such as QuAFL and QuAFL weighted, are not each other's rivals."""

    label: str
    time: float | None  # mean over seeds
    next: str | None
    factor: float | None  # the next one's mean time over the first's; None if nobody else got there
    clear: bool  # the interval of the paired difference excludes zero


def first(curves: Sequence[Curve]) -> First:
    """Of those that got there with every seed."""
    arrived = [curve for curve in ranked(curves) if len(time_to_target(curve).values) == curve.planned]
    if not arrived:
        return First(NOBODY, None, None, None, clear=False)
    best, mine = arrived[0], time_to_target(arrived[0]).mean
    rivals = [curve for curve in ranked(curves) if _kin(curve) != _kin(best)]
    others = [curve for curve in arrived if curve in rivals]
    verdict = order([best, rivals[0]], measure="to target", axis="time", metric=best.metric) if rivals else None
    return First(
        best.label,
        mine,
        rivals[0].label if rivals else None,
        time_to_target(others[0]).mean / mine if others and mine else None,
        clear=verdict is not None and verdict.verdict == "holds",
    )


def _kin(curve: Curve) -> str:
    return curve.label.split()[0].rstrip(",")


def lines(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """How long each took, with each seed."""
    return [
        {
            "curve": curve.label,
            "time_to_target": time_to_target(curve).show("{:.1f}"),
            "seeds_at_target": f"{len(time_to_target(curve).values)} of {curve.planned}",
            **{f"seed_{seed}": f"{row['time']:.1f}" if (row := arrival(curve, seed)) else "–" for seed in curve.seeds},
        }
        for curve in curves
    ]


def draw(grid: Mapping[str, Sequence[Any]], firsts: Sequence[First]) -> Figure:
    """Of three settings: the third a panel each, the first across, the second up. A cell says who is first, and how
    many times longer the next takes; hatched where seeds do not tell them apart."""
    (across, xs), (up, ys), (panel, zs) = grid.items()
    where = dict(zip(product(xs, ys, zs), firsts, strict=True))
    figure = Figure(figsize=(1.2 + 3.4 * len(zs), 4.0), layout="constrained")
    known = looks([found.label for found in firsts])
    colours = {label: look.colour for label, look in known.items()} | {NOBODY: "#dddddd"}
    for axes, z in zip(figure.subplots(1, len(zs), sharey=True, squeeze=False)[0], zs, strict=True):
        for i, j in product(range(len(xs)), range(len(ys))):
            found = where[xs[i], ys[j], z]
            axes.bar(
                i,
                1,
                1,
                j,
                color=colours[found.label],
                edgecolor="white",
                linewidth=2,
                hatch=None if found.clear or found.label == NOBODY else "///",
            )
            factor = "" if found.factor is None else f"\n×{found.factor:.2g}"
            axes.text(
                i, j + 0.5, found.label.replace(" ", "\n") + factor, ha="center", va="center", fontsize=8, bbox=_BEHIND
            )
        axes.set(
            xticks=range(len(xs)), xlabel=across, title=f"{panel} = {z}", xlim=(-0.5, len(xs) - 0.5), ylim=(0, len(ys))
        )
        axes.set_xticklabels(map(str, xs))
        axes.set_yticks([j + 0.5 for j in range(len(ys))], map(str, ys))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    figure.axes[0].set_ylabel(up)
    return figure
