"""The command line."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import quafl
from quafl import run as runner
from quafl.record import plots
from quafl.record import report as reporting
from quafl.record.files import write_atomically
from quafl.record.rows import Row
from quafl.record.summary import Curve, RecordError, ranked, read_curve, read_curves, verdict
from quafl.settings import SettingsError, load

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
console = Console()

REPORT = "report.html"


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Bad input ends with a sentence and exit code 2, not with a traceback."""
    try:
        yield
    except (SettingsError, RecordError, runner.RunError) as error:
        _complain(str(error))
    except OSError as error:
        _complain(f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        _complain("interrupted; the seeds that were finished are kept", code=130)


def _complain(sentence: str, code: int = 2) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(f"quafl: {sentence}", style="red", markup=False, highlight=False)
    raise typer.Exit(code) from None


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"quafl {quafl.__version__}", highlight=False)
        raise typer.Exit


@app.callback(
    epilog="Examples:\n\n"
    "  quafl run demo --out runs/demo\n\n"
    "  quafl run demo --out runs/one --set run.seeds=[7] --set curves.FedAvg.algorithm.lr=0.2\n\n"
    "  quafl run my.toml --out runs/mine\n\n"
    "  quafl report runs/demo runs/mine --out report.html"
)
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Quantized asynchronous federated learning: compare algorithms in virtual time."""


@app.command()
def run(
    source: Annotated[str, typer.Argument(metavar="NAME|FILE.toml", help="A built-in experiment, or a settings file.")],
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of every curve, e.g. algorithm.lr=0.2."),
    ] = None,
    jobs: Annotated[int | None, typer.Option("-j", "--jobs", min=1, help="Processes; by default one per core.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier run in the folder.")] = False,
) -> None:
    """Run an experiment: every curve, every seed. Writes rows, models and report.html."""
    with _one_sentence():
        curves = load(source, set_ or [])
        folders = runner.prepare(curves, out, overwrite=overwrite)
        with _progress() as progress:
            bars = {
                c.label: progress.add_task(escape(c.label), total=c.run.until * len(c.run.seeds), best="")
                for c in curves
            }
            seen: dict[tuple[str, int], float] = {}

            def on_row(job: runner.Job, row: Row) -> None:
                label = job.settings.label
                before = seen.get((label, job.seed), 0.0)
                seen[label, job.seed] = row["time"]
                progress.update(bars[label], advance=row["time"] - before, best=_latest(row))

            runner.run(folders, processes=jobs or os.cpu_count() or 1, on_row=on_row)
            for bar in bars.values():
                progress.update(bar, completed=progress.tasks[bar].total)
        _conclude([read_curve(folder.path) for folder in folders], out / REPORT)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders that 'quafl run' wrote.")],
    out: Annotated[Path | None, typer.Option(help="The page; by default report.html in the first folder.")] = None,
) -> None:
    """Show recorded runs: a table here, and a page with the curves."""
    with _one_sentence():
        _conclude(read_curves(folders), out or folders[0] / REPORT)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %  {task.fields[best]}"),
        TimeElapsedColumn(),
        console=console,
    )


def _latest(row: Row) -> str:
    return f"accuracy {row['accuracy']:.3f}" if "accuracy" in row else f"loss {row['loss']:.3g}"


def _conclude(curves: list[Curve], page: Path) -> None:
    """The closing table, who came first, and the page."""
    if page.suffix == ".png":
        raise RecordError(f"--out is {page}, which is where the picture beside the page goes; name it .html")
    curves = ranked(curves)
    headings, lines = reporting.table(curves)
    table = Table(
        title="Mean ± standard deviation over seeds", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for number, heading in enumerate(headings[: 1 + reporting.BRIEF]):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for cells in lines:
        table.add_row(*map(escape, cells[: 1 + reporting.BRIEF]))
    console.print(table)
    console.print(verdict(curves), markup=False, highlight=False)
    with write_atomically(page) as stream:
        stream.write(reporting.page(curves))
    picture = page.with_suffix(".png")
    with write_atomically(picture, "wb") as stream:
        plots.to_png(reporting.main_figure(curves), stream)
    console.print(f"Curves and settings: {page} (the first figure alone: {picture})", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()
