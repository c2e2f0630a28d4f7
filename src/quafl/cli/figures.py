"""The paper's figures, `quafl reproduce | tune`; tune serves settings of one's own, too."""

import json
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
from quafl.cli.sweeps import GO_ON, tuned
from quafl.cli.terminal import Changes, Device, Jobs, Json, complain, console, one_sentence, only_json
from quafl.record.summary import REPORT, RecordError, RunError, read_curve
from quafl.run import figures as judging
from quafl.run.folders import RunFolder, accumulate, share
from quafl.run.sweeps import line
from quafl.run.tuning import Tried, around, choose, grid, shown
from quafl.settings.base import SettingsError
from quafl.settings.curve import Settings
from quafl.settings.figures import REGIMES, Reproduction, figures, load_figure, local_steps
from quafl.tasks import DataError

app = typer.Typer()
WIDENINGS = 5  # of a grid: around the best, and then beyond the edge while the best is there


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID…|all|regimes", help="Labels of the paper's figures, or names of regimes."),
    ] = None,
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
    """Reproduce figures: their runs, their pictures, and whether their claims hold. Given again, it goes on. The runs
    of several are worked off together."""
    with one_sentence():
        if show or not names:
            _list_figures()
            return
        overrides = [*(set_ or []), *([f"run.device={device}"] if device else [])]
        overrides += [f"run.seeds={list(range(seeds))}"] if seeds else []
        said = ["--seeds", str(seeds)] if seeds else []
        said += [*(["--quick"] if quick else []), *(["--device", device] if device else [])]
        said += [word for one in set_ or [] for word in ("--set", one)]
        if names == ["all"]:
            _reproduce_each(figures(), overrides, out, jobs, said, quick=quick)
            return
        wanted = [
            load_figure(one, overrides, quick=quick)
            for name in names
            for one in (figures(REGIMES) if name == REGIMES else [name])
        ]
        if len(wanted) == 1:
            _reproduce(wanted[0], out, jobs, shlex.join(["quafl", "reproduce", wanted[0].name, *said]))
        else:
            _reproduce_together(wanted, out, jobs, said)


def _reproduce_each(
    names: Sequence[str], overrides: Sequence[str], out: Path, jobs: int | None, said: Sequence[str], *, quick: bool
) -> None:
    """One after another; what cannot be run is left out, and named in the end."""
    left = []
    for one in names:
        try:
            wanted = load_figure(one, overrides, quick=quick)
            _reproduce(wanted, out, jobs, shlex.join(["quafl", "reproduce", one, *said]))
        except (DataError, RecordError, RunError) as error:
            left.append(one)
            console.print(f"{one}: not run: {error}", style="yellow", markup=False, soft_wrap=True)
    if left:
        complain(f"not run: {', '.join(left)}", code=1)


def _list_figures() -> None:
    for name in [*figures(), *figures(REGIMES)]:
        wanted = load_figure(name)
        of = wanted.figure.of
        curves = [curve for cell in wanted.cells for curve in cell.curves] or wanted.curves
        thousands = sum(map(local_steps, curves)) / 1000
        cost = f"the runs of {of}" if of else f"{thousands:,.0f} thousand local steps a seed"
        console.print(f"[bold]{escape(name)}[/]: {escape(wanted.figure.setting)} ({cost})", highlight=False)
        claims = "; ".join(claim.text for claim in wanted.figure.claims)
        said = claims or ("who is first where" if wanted.cells else "all algorithms, docs/results/regimes.md")
        console.print(Padding(escape(said), (0, 0, 0, 4), expand=False), style="dim", highlight=False)


def _reproduce(wanted: Reproduction, out: Path, jobs: int | None, command: str) -> None:
    """One figure; those that share their runs share a folder of them."""
    place = _announced(wanted, out)
    runs = place.with_name(wanted.figure.of or wanted.name) / "curves"
    if wanted.cells:
        _map(wanted, place, jobs, command)
        return
    folders = _begun(wanted.curves, runs, place.parent)
    troubles = work_off(folders, GO_ON, jobs=jobs)
    _judge(wanted, place, folders, command)
    conclude([read_curve(folder.path) for folder in folders], place / REPORT)
    console.print(
        f"The figure: {place / 'figure.png'}; the verdict: {place / 'verdict.json'}", highlight=False, soft_wrap=True
    )
    for trouble in troubles:
        console.print(trouble, style="yellow", markup=False)


def _reproduce_together(wanted: Sequence[Reproduction], out: Path, jobs: int | None, said: Sequence[str]) -> None:
    """Several figures, whose runs are worked off together."""
    places = [_announced(figure, out) for figure in wanted]
    unfit = [figure.name for figure in wanted if figure.cells or figure.figure.of]
    if unfit:
        raise RunError(f"{', '.join(unfit)}: a map, or shows the runs of another figure; run it by itself")
    begun = [
        _begun(figure.curves, place / "curves", place.parent) for figure, place in zip(wanted, places, strict=True)
    ]
    for trouble in work_off([folder for folders in begun for folder in folders], GO_ON, jobs=jobs):
        console.print(trouble, style="yellow", markup=False)
    for figure, place, folders in zip(wanted, places, begun, strict=True):
        _judge(figure, place, folders, shlex.join(["quafl", "reproduce", figure.name, *said]))
    console.print(f"The figures: {out}", highlight=False, soft_wrap=True)


def _announced(wanted: Reproduction, out: Path) -> Path:
    """What comes, and where its results go."""
    console.print(f"{wanted.name}: {wanted.figure.setting}", style="bold", markup=False)
    if wanted.smaller:
        console.print(f"quick: {wanted.smaller}. Its verdict says nothing about the paper.", markup=False)
    return out / ("quick" if wanted.smaller else "") / wanted.name


def _judge(wanted: Reproduction, place: Path, folders: Sequence[RunFolder], command: str) -> None:
    place.mkdir(parents=True, exist_ok=True)
    result = judging.conclude(wanted, place, folders, command)
    for claim in result["claims"]:
        _tell(claim)
    for question in result["questions"]:
        _tell(question, " (not the paper's claim)")


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
    name: Annotated[
        str,
        typer.Argument(metavar="ID|NAME|FILE.toml", help="A figure; with --over, an experiment or a settings file."),
    ],
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="What to try of a setting: algorithm.lr=0.1,0.2, or a range, algorithm.lr=0.01..1; may be repeated.",
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="How many points of a range are tried.")] = 20,
    quick: Annotated[bool, typer.Option(help="Of the small version of a figure.")] = False,
    device: Device = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the results, one in it for each figure or file.", file_okay=False)
    ] = Path("runs/tune"),
    set_: Changes = None,
    jobs: Jobs = None,
    json_: Json = False,
) -> None:
    """Try learning rates, judged on a part of the training set. Of a figure: as many for each algorithm. Of settings of
    your own: the values that --over gives. Given again, it goes on."""
    with one_sentence(), only_json(json_):
        changes = [*(set_ or []), *([f"run.device={device}"] if device else [])]
        place = out / ("quick" if quick else "") / (Path(name).stem if over else name)
        if not over and Path(name).is_file():
            raise SettingsError(f"say what to try: quafl tune {name} --over algorithm.lr=0.05,0.1,0.2")
        if over:
            tried = tuned(name, changes, over, trials, place, jobs)
        else:
            tried = _tune_figure(load_figure(name, changes, quick=quick, tuning=True), place, jobs)
        table = Table(title="Chosen on the validation split", box=box.SIMPLE_HEAD, pad_edge=False)
        headings = "curve", "time_to_target", "mean", "final", "chosen"
        for heading in headings:
            table.add_column(heading.replace("_", " "), no_wrap=True)
        for one in tried:
            table.add_row(*(escape(shown(one)[heading]) for heading in headings), style="bold" if one.chosen else "")
        console.print(table)
        console.print(f"The whole grid: {place / 'grid.csv'}", highlight=False, soft_wrap=True)
        if json_:
            typer.echo(json.dumps([{**line(one.point, one.curve), "chosen": one.chosen} for one in tried], indent=2))


def _tune_figure(wanted: Reproduction, place: Path, jobs: int | None) -> list[Tried]:
    folders = accumulate(grid(wanted), place / "curves")
    troubles = work_off(folders, GO_ON, jobs=jobs)
    for widening in range(WIDENINGS if wanted.tuning.around else 0):
        more = accumulate(around(wanted, folders, beyond=widening > 0), place / "curves")
        troubles += work_off(more, GO_ON, jobs=jobs) if more else []
        folders += more
    for trouble in troubles:
        console.print(trouble, style="yellow", markup=False)
    return choose(wanted, folders, place)
