"""What `quafl tune` does: with a figure, and with settings of one's own."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from quafl.cli.results import work_off
from quafl.cli.terminal import GO_ON, complain, console
from quafl.record.summary import read_curve
from quafl.run import sweeps
from quafl.run.folders import accumulate
from quafl.run.pool import Interrupted
from quafl.run.search import range_of, search
from quafl.run.tuning import Tried, around, choose, grid, mark, shown, validated
from quafl.settings.figures import load_figure
from quafl.settings.reading import load

WIDENINGS = 5  # of a grid: around the best, and then beyond the edge while the best is there


def tune_settings(
    source: str, changes: Sequence[str], over: Sequence[str], trials: int, place: Path, jobs: int | None
) -> list[Tried]:
    """What was tried for each curve of the settings: all combinations of values, or so many points of ranges."""
    axes = sweeps.axes_of(over)
    in_ranges = any(range_of(key, values) for key, values in axes.items())
    kinds: dict[str, list[Tried]] = {}
    if in_ranges:
        tell = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        try:
            for label in [curve.label for curve in load(source, changes)]:
                kinds[label] = search(source, changes, label, axes, trials, place / "curves", tell)
        except Interrupted as stopped:
            complain(f"interrupted; {GO_ON}", code=stopped.code)
    else:
        swept = validated(source, changes, sweeps.grid(over))
        folders = accumulate([one.settings for one in swept], place / "curves")
        for trouble in work_off(folders, GO_ON, jobs=jobs):
            console.print(trouble, style="yellow", markup=False)
        for one, folder in zip(swept, folders, strict=True):
            kinds.setdefault(one.origin, []).append(Tried(one.point, read_curve(folder.path)))
    return mark(kinds.values(), "area" if in_ranges else "to target", place)


def tune_figure(name: str, changes: Sequence[str], place: Path, jobs: int | None, *, quick: bool) -> list[Tried]:
    """What was tried for each curve of a figure, as many learning rates for each."""
    wanted = load_figure(name, changes, quick=quick, tuning=True)
    folders = accumulate(grid(wanted), place / "curves")
    troubles = work_off(folders, GO_ON, jobs=jobs)
    for widening in range(WIDENINGS if wanted.tuning.around else 0):
        more = accumulate(around(wanted, folders, beyond=widening > 0), place / "curves")
        troubles += work_off(more, GO_ON, jobs=jobs) if more else []
        folders += more
    for trouble in troubles:
        console.print(trouble, style="yellow", markup=False)
    return choose(wanted, folders, place)


def show(tried: Sequence[Tried], place: Path, *, as_json: bool) -> None:
    """A line for each point, and where the whole grid is."""
    table = Table(title="Chosen on the validation split", box=box.SIMPLE_HEAD, pad_edge=False)
    headings = "curve", "time_to_target", "mean", "final", "chosen"
    for heading in headings:
        table.add_column(heading.replace("_", " "), no_wrap=True)
    for one in tried:
        table.add_row(*(escape(shown(one)[heading]) for heading in headings), style="bold" if one.chosen else "")
    console.print(table)
    console.print(f"The whole grid: {place / 'grid.csv'}", highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps([{**sweeps.line(one.point, one.curve), "chosen": one.chosen} for one in tried], indent=2))
