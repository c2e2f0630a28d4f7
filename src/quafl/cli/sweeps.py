"""Sweeps: `quafl sweep`, and what `quafl tune` does with settings of one's own."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from quafl.cli.results import conclude, work_off
from quafl.cli.terminal import Changes, Jobs, Json, complain, console, one_sentence, only_json
from quafl.record.summary import REPORT, read_curve
from quafl.run import sweeps
from quafl.run.folders import accumulate
from quafl.run.pool import Interrupted
from quafl.run.search import range_of, search
from quafl.run.tuning import Tried, mark, validated
from quafl.settings.reading import load

app = typer.Typer()
GO_ON = "the same command goes on where it was"


@app.command()
def sweep(
    source: Annotated[str, typer.Argument(metavar="NAME|FILE.toml", help="An experiment, or a settings file.")],
    over: Annotated[
        list[str],
        typer.Option(metavar="KEY=VALUE,…", help="Values of a setting, e.g. codec.bits=2,3,4; may be repeated."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)],
    set_: Changes = None,
    jobs: Jobs = None,
    json_: Json = False,
) -> None:
    """Run an experiment with all combinations of some settings: a curve each. Given again, it goes on."""
    with one_sentence(), only_json(json_):
        swept = sweeps.sweep(source, set_ or [], sweeps.grid(over))
        folders = accumulate([one.settings for one in swept], out)
        troubles = work_off(folders, GO_ON, jobs=jobs)
        curves = [read_curve(folder.path) for folder in folders]
        conclude(curves, out / REPORT)
        lines = sweeps.table(swept, curves, out)
        if json_:
            typer.echo(json.dumps(lines, indent=2))
        if troubles:
            complain("; ".join(troubles))


def tuned(
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
