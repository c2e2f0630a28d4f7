"""Progress bars of what a program runs, in a terminal or a notebook."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from quafl.record.rows import Row
from quafl.run.jobs import Experiment

Tell: TypeAlias = Callable[[int, int, Row], None]  # a curve's number, a seed, and where it stands


@contextmanager
def bars(curves: Sequence[Experiment], *, shown: bool) -> Iterator[Tell]:
    """A bar for each curve, of the time that all its seeds have reached; nothing where nobody can see it."""
    console = Console(stderr=True)
    if not shown or not (console.is_terminal or console.is_jupyter):
        yield lambda curve, seed, row: None
        return
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.percentage:>3.0f} %")
    with Progress(*columns, TextColumn("{task.fields[news]}"), TimeRemainingColumn(), console=console) as progress:
        tasks = [
            progress.add_task(escape(curve.label), total=curve.run.until * len(curve.run.seeds), news="")
            for curve in curves
        ]
        reached: dict[tuple[int, int], float] = {}

        def tell(curve: int, seed: int, row: Row) -> None:
            metric = curves[curve].run.metric if curves[curve].run.metric in row else "loss"
            news = f"seed {seed}, round {row['round']:,}, {metric} {row[metric]:.3f}"
            progress.update(tasks[curve], advance=row["time"] - reached.get((curve, seed), 0.0), news=news)
            reached[curve, seed] = row["time"]

        yield tell
        progress.refresh()  # in a notebook, rich does not show the end by itself
