"""What `quafl reproduce` does: figures' runs, pictures and verdicts."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.padding import Padding

from quafl.cli.results import conclude, work_off
from quafl.cli.terminal import GO_ON, complain, console
from quafl.record.summary import REPORT, RecordError, RunError, read_curve
from quafl.run import figures as judging
from quafl.run.folders import RunFolder, accumulate, share
from quafl.settings.curve import Settings
from quafl.settings.figures import REGIMES, Cell, Reproduction, figures, load_figure, local_steps
from quafl.settings.reading import only_some
from quafl.tasks import DataError


def reproduce_all(
    names: Sequence[str], overrides: Sequence[str], out: Path, jobs: int | None, said: Sequence[str], *, quick: bool
) -> None:
    """The figures of these names; `said` is what else the command was given."""
    if names == ["all"]:
        _reproduce_each(figures(), overrides, out, jobs, said, quick=quick)
        return
    wanted = _wanted(names, overrides, quick=quick)
    if len(wanted) == 1:
        _reproduce(wanted[0], out, jobs, shlex.join(["quafl", "reproduce", wanted[0].name, *said]))
    else:
        _reproduce_together(wanted, out, jobs, said)


def run_curves(
    names: Sequence[str], only: Sequence[str], overrides: Sequence[str], out: Path, jobs: int | None, *, quick: bool
) -> None:
    """Some curves of the figures, as a part of what `reproduce_all` runs."""
    wanted = _wanted(names, overrides, quick=quick)
    begun = []
    for figure in wanted:
        place = _announced(figure, out)
        if figure.cells:
            for cell in figure.cells:
                begun += _begun(only_some(cell.curves, only), _place_of(cell, place), place.parent)
        else:
            runs = place.with_name(figure.figure.of or figure.name) / "curves"
            begun += _begun(only_some(figure.curves, only), runs, place.parent)
    for trouble in work_off(begun, GO_ON, jobs=jobs):
        console.print(trouble, style="yellow", markup=False)
    console.print(
        f"The curves: {out}; without --only the figures are drawn and judged", highlight=False, soft_wrap=True
    )


def _wanted(names: Sequence[str], overrides: Sequence[str], *, quick: bool) -> list[Reproduction]:
    return [
        load_figure(one, overrides, quick=quick)
        for name in names
        for one in (figures(REGIMES) if name == REGIMES else [name])
    ]


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


def list_figures() -> None:
    """Their settings, claims and costs."""
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


def _where(cell: Cell) -> str:
    return ", ".join(f"{key} {value}" for key, value in cell.place.items())


def _place_of(cell: Cell, out: Path) -> Path:
    return out / "curves" / _where(cell).replace(" ", "-").replace(",", "")


def _map(wanted: Reproduction, out: Path, jobs: int | None, command: str) -> None:
    """All cells, one after another."""
    cells = []
    for number, cell in enumerate(wanted.cells):
        console.print(f"{number + 1} of {len(wanted.cells)}: {_where(cell)}", markup=False, highlight=False)
        cells.append(_begun(cell.curves, _place_of(cell, out), out.parent))
        for trouble in work_off(cells[-1], GO_ON, jobs=jobs):
            console.print(trouble, style="yellow", markup=False)
    result = judging.conclude_map(wanted, out, cells, command)
    for first in result["first"]:
        where = ", ".join(f"{key} {first[key]}" for key in wanted.figure.grid)
        said = f"{where}: {first['label']}{' (clearly)' if first['clear'] else ''}"
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    console.print(f"The map: {out / 'figure.png'}", highlight=False, soft_wrap=True)
