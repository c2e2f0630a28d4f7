"""What there is: `quafl list | doctor`."""

import json
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from quafl.cli.terminal import EXTRAS, Json, console, one_sentence

AT_A_GLANCE = 16  # entries of a kind, that are listed without being asked for

app = typer.Typer()


@app.command(name="list")
def list_(
    kinds: Annotated[list[str] | None, typer.Argument(metavar="[KIND]...", help="Only these, whole.")] = None,
    json_: Json = False,
) -> None:
    """Show what can be named: experiments, figures, regimes, algorithms, codecs and tasks."""
    with one_sentence():
        from quafl.settings.base import SettingsError
        from quafl.settings.catalogue import catalogue

        found = catalogue()
        unknown = next((kind for kind in kinds or [] if kind not in found), None)
        if unknown is not None:
            raise SettingsError(f"there are no {unknown!r} to list, choose from {', '.join(found)}")
        chosen = {kind: found[kind] for kind in kinds or found}
        if json_:
            typer.echo(json.dumps(chosen, indent=2, ensure_ascii=False))
            return
        for kind, entries in chosen.items():
            if kinds or len(entries) <= AT_A_GLANCE:
                _print(kind, [(name, about) for name, about in entries.items()])
            else:
                _print(kind, [(f"{len(entries)} of them", f"quafl list {kind}")])


@app.command()
def doctor(json_: Json = False) -> None:
    """Look at this machine: versions, devices, kernels, data, extras, and what to do about what is missing."""
    with one_sentence():
        from quafl.run.machine import examine

        found = examine(EXTRAS)
        if json_:
            typer.echo(json.dumps([finding._asdict() for finding in found], indent=2, ensure_ascii=False))
            return
        for part in dict.fromkeys(finding.part for finding in found):
            mine = [finding for finding in found if finding.part == part]
            _print(part, [(f"{'✓' if one.there else '–'} {one.what}", _advice(one.says, one.todo)) for one in mine])


def _advice(says: str, todo: str) -> str:
    return f"{says}; {todo}" if todo else says


def _print(title: str, lines: list[tuple[str, str]]) -> None:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False, pad_edge=False
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, about in lines:
        table.add_row(escape(name), escape(about))
    console.print(table)
