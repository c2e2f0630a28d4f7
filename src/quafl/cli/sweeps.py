"""Sweeps: `quafl sweep`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from quafl.cli.terminal import GO_ON, Changes, Jobs, Json, complain, one_sentence, only_json

app = typer.Typer()


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
        from quafl.cli.results import conclude, work_off
        from quafl.record.summary import REPORT, read_curve
        from quafl.run import sweeps
        from quafl.run.folders import accumulate

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
