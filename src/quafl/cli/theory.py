"""What theory says: `quafl theory`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from quafl.cli.terminal import Changes, Json, console, one_sentence, only_json, print_json

if TYPE_CHECKING:
    from quafl.settings.curve import Settings

app = typer.Typer()
Source = Annotated[str, typer.Argument(metavar="NAME|FILE.toml", help="A built-in experiment, or a settings file.")]
Which = Annotated[str | None, typer.Option("--only", metavar="CURVE", help="This curve; by default the first.")]


@app.command()
def theory(
    source: Source,
    only: Which = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="T, in place of the rounds for which there is time.")
    ] = None,
    set_: Changes = None,
    json_: Json = False,
) -> None:
    """What the paper's theorems say of an experiment: step size, lattice, bits, bounds, and what matters most.

    The curve is taken as the paper's algorithm with its s, K and wait. L, σ², G² and B² are estimated from gradients.
    """
    with one_sentence(), only_json(json_):
        from quafl.theory.account import account, page
        from quafl.theory.cases import case_of

        curve = chosen(source, only, set_)
        with console.status(f"probing {curve.label}"):
            case = case_of(curve, rounds=rounds)
        if json_:
            print_json(account(case))
            return
        said, sections = page(case)
        console.print(f"[bold]{escape(case.label)}[/]: what the theorems say of it", highlight=False)
        show(said, sections)
        console.print("Each quantity is explained in docs/theory.md.", highlight=False)


def chosen(source: str, only: str | None, changes: list[str] | None) -> "Settings":
    """A curve of a file."""
    from quafl.settings.base import SettingsError
    from quafl.settings.reading import load

    curves = load(source, changes or [])
    labels = [curve.label for curve in curves]
    if only is None:
        return curves[0]
    if only not in labels:
        raise SettingsError(f"--only {only}: there is no such curve, choose from {', '.join(labels)}")
    return curves[labels.index(only)]


def show(said: list[str], sections: list[Any]) -> None:
    """Sentences, and tables with a title and a sentence each."""
    for sentence in said:
        console.print(f"• {sentence}", markup=False, highlight=False)
    for section in sections:
        console.print(f"\n[bold]{escape(section.title)}[/]", highlight=False)
        if section.says:
            console.print(section.says, markup=False, highlight=False)
        table = Table(box=box.SIMPLE, pad_edge=False)
        for heading in section.headings:
            table.add_column(heading, overflow="fold")
        for row in section.rows:
            table.add_row(*map(escape, row))
        console.print(table)


@app.command()
def advise(
    source: Source,
    only: Which = None,
    at_most: Annotated[
        int | None,
        typer.Option(min=1, help="Clients that may be contacted at a time; by default half of them, five at least."),
    ] = None,
    set_: Changes = None,
    json_: Json = False,
) -> None:
    """Which algorithm, s, wait, K and bits to try first, and what each of them rests on."""
    with one_sentence(), only_json(json_):
        from quafl.theory import advice

        curve = chosen(source, only, set_)
        with console.status(f"probing {curve.label}"):
            found = advice.advise(curve, at_most)
        if json_:
            print_json(advice.account(found))
            return
        console.print(f"[bold]{escape(curve.label)}[/]: what to try first", highlight=False)
        show(*advice.page(found))
        console.print(found.toml(), markup=False, highlight=False)
