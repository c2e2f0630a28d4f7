"""The paper's figures: `quafl reproduce | tune`."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from quafl.cli.results import conclude, work_off
from quafl.cli.terminal import REPORT, Changes, Device, Jobs, complain, console, one_sentence
from quafl.record.summary import RecordError, RunError, read_curve
from quafl.run import figures as judging
from quafl.run.folders import RunFolder, accumulate, share
from quafl.run.tuning import choose, grid
from quafl.settings.curve import Settings
from quafl.settings.figures import Reproduction, figures, load_figure, local_steps
from quafl.tasks import DataError

app = typer.Typer()
GO_ON = "the same command goes on where it was"


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="ID|all", help="A figure's label in the paper.")] = None,
    show: Annotated[
        bool, typer.Option("--list", help="Show the figures, what is claimed of them and what they cost.")
    ] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many, from 0 on; earlier ones are kept.")] = None,
    quick: Annotated[bool, typer.Option(help="A small version, to try it out; its verdict says nothing.")] = False,
    device: Device = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the results, one in it for each figure.", file_okay=False)
    ] = Path("runs/paper"),
    set_: Changes = None,
    jobs: Jobs = None,
) -> None:
    """Reproduce a figure of the paper: its runs, its picture, and whether its claims hold. Given again, it goes on."""
    with one_sentence():
        if show or name is None:
            _list_figures()
            return
        overrides = [*(set_ or []), *([f"run.device={device}"] if device else [])]
        overrides += [f"run.seeds={list(range(seeds))}"] if seeds else []
        said = ["--seeds", str(seeds)] if seeds else []
        said += [*(["--quick"] if quick else []), *(["--device", device] if device else [])]
        said += [word for one in set_ or [] for word in ("--set", one)]
        left = []
        for one in figures() if name == "all" else [name]:
            wanted = load_figure(one, overrides, quick=quick)
            try:
                _reproduce(wanted, out, jobs, shlex.join(["quafl", "reproduce", one, *said]))
            except (DataError, RecordError, RunError) as error:
                if name != "all":
                    raise
                left.append(one)
                console.print(f"{one}: not run: {error}", style="yellow", markup=False, soft_wrap=True)
        if left:
            complain(f"not run: {', '.join(left)}", code=1)


def _list_figures() -> None:
    for name in figures():
        wanted = load_figure(name)
        of = wanted.figure.of
        curves = [curve for cell in wanted.cells for curve in cell.curves] or wanted.curves
        thousands = sum(map(local_steps, curves)) / 1000
        cost = f"the runs of {of}" if of else f"{thousands:,.0f} thousand local steps a seed"
        console.print(f"[bold]{escape(name)}[/]: {escape(wanted.figure.setting)} ({cost})", highlight=False)
        claims = "; ".join(claim.text for claim in wanted.figure.claims)
        console.print(
            Padding(escape(claims or "who is first where"), (0, 0, 0, 4), expand=False), style="dim", highlight=False
        )


def _reproduce(wanted: Reproduction, out: Path, jobs: int | None, command: str) -> None:
    """One figure; those that share their runs share a folder of them."""
    place = out / ("quick" if wanted.smaller else "") / wanted.name
    runs = place.with_name(wanted.figure.of or wanted.name) / "curves"
    console.print(f"{wanted.name}: {wanted.figure.setting}", style="bold", markup=False)
    if wanted.smaller:
        console.print(f"quick: {wanted.smaller}. Its verdict says nothing about the paper.", markup=False)
    if wanted.cells:
        _map(wanted, place, jobs, command)
        return
    folders = _begun(wanted.curves, runs, place.parent)
    troubles = work_off(folders, GO_ON, jobs=jobs)
    place.mkdir(parents=True, exist_ok=True)
    result = judging.conclude(wanted, place, folders, command)
    for claim in result["claims"]:
        _tell(claim)
    for question in result["questions"]:
        _tell(question, " (not the paper's claim)")
    conclude([read_curve(folder.path) for folder in folders], place / REPORT)
    console.print(
        f"The figure: {place / 'figure.png'}; the verdict: {place / 'verdict.json'}", highlight=False, soft_wrap=True
    )
    for trouble in troubles:
        console.print(trouble, style="yellow", markup=False)


def _begun(curves: Sequence[Settings], place: Path, among: Path) -> list[RunFolder]:
    """Folders of the curves, with what they and other figures have computed already."""
    folders = accumulate(curves, place)
    for word in share(folders, among):
        console.print(word, markup=False, highlight=False, soft_wrap=True)
    return folders


def _tell(claim: dict[str, Any], remark: str = "") -> None:
    rule = claim["holds if the interval is"]
    said = f"  {claim['verdict']}: {claim['claim']}{remark}; the interval has to be {rule}"
    console.print(said, markup=False, soft_wrap=True)
    for finding in claim["findings"]:
        interval = "too few seeds" if finding["low"] is None else f"from {finding['low']:.4g} to {finding['high']:.4g}"
        mean = "–" if finding["mean"] is None else f"{finding['mean']:.4g}"
        console.print(f"      {finding['what']}: {mean}, {interval}", markup=False, highlight=False, soft_wrap=True)


def _map(wanted: Reproduction, out: Path, jobs: int | None, command: str) -> None:
    """All cells, one after another."""
    cells = []
    for number, cell in enumerate(wanted.cells):
        where = ", ".join(f"{key} {value}" for key, value in cell.place.items())
        console.print(f"{number + 1} of {len(wanted.cells)}: {where}", markup=False, highlight=False)
        place = out / "curves" / where.replace(" ", "-").replace(",", "")
        cells.append(_begun(cell.curves, place, out.parent))
        for trouble in work_off(cells[-1], GO_ON, jobs=jobs):
            console.print(trouble, style="yellow", markup=False)
    result = judging.conclude_map(wanted, out, cells, command)
    for first in result["first"]:
        where = ", ".join(f"{key} {first[key]}" for key in wanted.figure.grid)
        said = f"{where}: {first['label']}{' (clearly)' if first['clear'] else ''}"
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    console.print(f"The map: {out / 'figure.png'}", highlight=False, soft_wrap=True)


@app.command()
def tune(
    name: Annotated[str, typer.Argument(metavar="ID", help="A figure's label in the paper.")],
    quick: Annotated[bool, typer.Option(help="Of the small version.")] = False,
    device: Device = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the results, one in it for each figure.", file_okay=False)
    ] = Path("runs/tune"),
    set_: Changes = None,
    jobs: Jobs = None,
) -> None:
    """Try learning rates for a figure: as many for each algorithm, judged on a part of the training set."""
    with one_sentence():
        changes = [*(set_ or []), *([f"run.device={device}"] if device else [])]
        wanted = load_figure(name, changes, quick=quick, tuning=True)
        place = out / ("quick" if quick else "") / name
        folders = accumulate(grid(wanted), place / "curves")
        for trouble in work_off(folders, GO_ON, jobs=jobs):
            console.print(trouble, style="yellow", markup=False)
        lines = choose(folders, place)
        table = Table(title="Chosen on the validation split", box=box.SIMPLE_HEAD, pad_edge=False)
        shown = "curve", "time_to_target", "final", "chosen"
        for heading in shown:
            table.add_column(heading.replace("_", " "), no_wrap=True)
        for line in lines:
            table.add_row(*(escape(line[heading]) for heading in shown), style="bold" if line["chosen"] else "")
        console.print(table)
        console.print(f"The whole grid: {place / 'grid.csv'}", highlight=False, soft_wrap=True)
