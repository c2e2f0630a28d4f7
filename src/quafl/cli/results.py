"""What a run comes to: bars or lines while it goes on, then the table and the page."""

from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from quafl.cli.terminal import complain, console, print_json
from quafl.record.files import write_atomically
from quafl.record.rows import Row
from quafl.record.summary import Curve, RecordError, check_showable, ranked, sent, verdict
from quafl.run.folders import RunFolder, changed_code
from quafl.run.jobs import Job, News
from quafl.run.pool import Interrupted, run

MOST_BARS = 24
LONGEST_LABEL, BAR, REMAINING = 24, 12, 7  # characters
PAUSE = 5.0  # seconds between two lines about the same seed


def work_off(
    folders: list[RunFolder],
    go_on: str,
    *,
    jobs: int | None,
    ray: str | None = None,
    checkpoint_seconds: float = 60.0,
) -> list[str]:
    """What is left to do of them, shown as it comes: by bars in a terminal, elsewhere by lines. `go_on` says how to, if
    it is interrupted. A sentence is given back for each run that ended before its time."""
    options: dict[str, Any] = {"processes": jobs, "ray": ray, "checkpoint_seconds": checkpoint_seconds}
    for word in changed_code(folders):
        console.print(word, style="yellow", markup=False, soft_wrap=True)
    try:
        if not console.is_terminal:
            return run(folders, on_news=_Lines(console), **options)
        with progress(console) as shown:
            bars = Bars(shown, folders)
            troubles = run(folders, on_news=bars, **options)
            bars.finish()
    except Interrupted as stopped:
        complain(f"interrupted; {go_on}", code=stopped.code)
    return troubles


class _Lines:
    """A line for what is told, and for each seed one every few seconds."""

    def __init__(self, there: Console) -> None:
        self._console = there
        self._said: dict[tuple[Path, int], float] = {}  # when a line was

    def __call__(self, job: Job, word: News) -> None:
        place = job.checkpoint.parent, job.seed
        if not isinstance(word, str):
            if monotonic() < self._said.get(place, -inf) + PAUSE:
                return
            self._said[place] = monotonic()
            share = word["time"] / job.settings.run.until
            word = f"{share:.0%}, round {word['round']:,.0f}, time {word['time']:,.0f}, {_score(word)}"
        said = f"{job.settings.label}, seed {job.seed}: {word}"
        self._console.print(said, markup=False, highlight=False, soft_wrap=True)


def progress(there: Console) -> Progress:
    """Bars with room for what is told beside them."""
    one_line: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis"}
    return Progress(
        TextColumn("{task.description:<14}", table_column=Column(max_width=LONGEST_LABEL, **one_line)),
        BarColumn(bar_width=BAR, table_column=Column(min_width=BAR)),
        TextColumn("{task.percentage:>3.0f} %  {task.fields[news]}", table_column=Column(**one_line)),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True, table_column=Column(min_width=REMAINING)),
        console=there,
    )


class Bars:
    """A progress bar a curve, or one for all of very many: how far its seeds are, and what they have reached."""

    def __init__(self, shown: Progress, folders: list[RunFolder]) -> None:
        self._progress = shown
        self._began = monotonic()
        self._latest: dict[tuple[Path, int], Row] = {}
        self._first: dict[tuple[Path, int], Row] = {}
        self._alone = {folder.path for folder in folders if folder.settings.clients.count == 1}
        self._bars: dict[Path, TaskID] = {}
        if len(folders) > MOST_BARS:
            total = sum(folder.settings.run.until * len(folder.settings.run.seeds) for folder in folders)
            bar = shown.add_task(f"{len(folders)} curves", total=total, news="")
            self._bars = dict.fromkeys((folder.path for folder in folders), bar)
        for folder in folders:
            plan = folder.settings.run
            if folder.path not in self._bars:
                bar = shown.add_task(escape(folder.settings.label), total=plan.until * len(plan.seeds), news="")
                self._bars[folder.path] = bar
            shown.update(self._bars[folder.path], advance=plan.until * len(folder.rows))
        label = min(LONGEST_LABEL, max([14, *(len(task.description) for task in shown.tasks)]))
        self._room = shown.console.width - (label + BAR + len("100 %  ") + REMAINING + 3)  # spaces between columns

    def __call__(self, job: Job, word: News) -> None:
        """A row moves its bar; a word stands above all bars."""
        place = job.checkpoint.parent
        if isinstance(word, str):
            said = f"{job.settings.label}, seed {job.seed}: {word}"
            self._progress.console.print(said, style="yellow", markup=False)
            return
        key = place, job.seed
        before = self._latest.get(key, {"time": 0.0})["time"]
        self._first.setdefault(key, word)
        self._latest[key] = word
        self._progress.update(self._bars[place], advance=word["time"] - before, news=self._news(place, word))

    def finish(self) -> None:
        """The last evaluation may be a little before the end."""
        for bar in self._bars.values():
            self._progress.update(bar, completed=self._progress.tasks[bar].total)

    def _news(self, place: Path, row: Row) -> str:
        """Of the seed that was heard last; steps and megabytes of all that the bar stands for. What does not fit is
        left out, the least important first."""
        mine = [
            (self._first[key], last) for key, last in self._latest.items() if self._bars[key[0]] == self._bars[place]
        ]
        rate = sum(last["local_steps"] - first["local_steps"] for first, last in mine) / (monotonic() - self._began)
        megabytes = "" if place in self._alone else f"{sum(sent(last) for _, last in mine):,.0f} MB"
        told = [
            f"round {row['round']:,.0f}",
            f"time {row['time']:,.0f}",
            _score(row),
            f"{rate:,.0f} steps/s",
            megabytes,
        ]
        for least in (0, 4, 3, 1):
            if len(", ".join(filter(None, told))) > self._room:
                told[least] = ""
        return ", ".join(filter(None, told))


def _score(row: Row) -> str:
    return f"accuracy {row['accuracy']:.3f}" if "accuracy" in row else f"loss {row['loss']:.3g}"


def conclude(curves: list[Curve], page: Path) -> None:
    """The closing table, who came first, and the page."""
    curves = _in_order(curves, page)
    console.print(_table(curves))
    console.print(verdict(curves), markup=False, highlight=False)
    picture = _write(curves, page)
    console.print(f"Curves and settings: {page} (the first figure alone: {picture})", highlight=False, soft_wrap=True)


def _table(curves: list[Curve]) -> Table:
    """As many columns as fit the terminal."""
    from quafl.record import report as reporting  # draws: half a second that a run need not wait for

    headings, lines = reporting.table(curves)
    for count in range(1 + reporting.BRIEF, 1, -1):
        table = Table(
            title=reporting.heading(curves),
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        for number, heading in enumerate(headings[:count]):
            table.add_column(heading, justify="right" if number else "left", no_wrap=True)
        for cells in lines:
            table.add_row(*map(escape, cells[:count]))
        if console.measure(table, options=console.options.update(width=1000)).maximum <= console.width:
            break
    return table


def conclude_as_json(curves: list[Curve], page: Path | None) -> None:
    """The same for programs: the numbers of the table, and the page, if one is wanted."""
    from quafl.record import report as reporting

    curves = _in_order(curves, page)
    print_json(reporting.numbers(curves))
    if page is not None:
        _write(curves, page)


def _in_order(curves: list[Curve], page: Path | None) -> list[Curve]:
    """As they are shown, if they can be."""
    if page is not None and page.suffix == ".png":
        raise RecordError(f"--out is {page}, which is where the picture beside the page goes; name it .html")
    check_showable(curves)
    return ranked(curves)


def _write(curves: list[Curve], page: Path) -> Path:
    """The page, and the picture beside it, whose place is given back."""
    from quafl.record import plots
    from quafl.record import report as reporting

    with write_atomically(page) as stream:
        stream.write(reporting.page(curves))
    picture = page.with_suffix(".png")
    with write_atomically(picture, "wb") as stream:
        plots.to_png(reporting.main_figure(curves), stream)
    return picture
