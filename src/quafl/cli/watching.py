"""Runs that go on: `quafl watch`."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from quafl.cli.terminal import Json, console, one_sentence

if TYPE_CHECKING:
    from quafl.run.watching import Standing

app = typer.Typer()


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that a run writes to.", file_okay=False)],
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option(help="Look once.")] = False,
    json_: Json = False,
) -> None:
    """Follow a run from another terminal, until it ends. Off a terminal, there is a line for each change."""
    with one_sentence(), _live(json_) as show:
        from quafl.run.watching import look

        while not show(look(folder)) and not once:
            sleep(every)


@contextmanager
def _live(json_: bool) -> "Iterator[Callable[[list[Standing]], bool]]":
    """Shows how far runs are, and says whether all of them are over."""
    known: list[Standing] = []

    def tell(now: "list[Standing]") -> bool:
        for standing in now:
            if standing not in known:
                typer.echo(json.dumps(standing._asdict()) if json_ else str(standing))
        known[:] = now
        return all(standing.is_over for standing in now)

    if json_ or not console.is_terminal:
        yield tell
        return
    with Live(console=console, auto_refresh=False) as live:

        def draw(now: "list[Standing]") -> bool:
            live.update(_table(now), refresh=True)
            return all(standing.is_over for standing in now)

        yield draw


def _table(now: "Sequence[Standing]") -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(("", "seeds", "done", "round", now[0].metric, "MB")):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for one in now:
        done = "–" if one.share is None else f"{one.share:.0%}"
        score = "–" if one.value is None else f"{one.value:.4g}"
        numbers = f"{one.ended}/{one.seeds}", done, f"{one.round:,.0f}", score, f"{one.megabytes:,.2f}"
        table.add_row(escape(one.curve), *numbers)
    return table
