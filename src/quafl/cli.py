"""The command line."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, NoReturn

import safetensors.torch
import typer
from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import quafl
from quafl import run as runner
from quafl.record import plots
from quafl.record import report as reporting
from quafl.record.files import write_atomically
from quafl.record.rows import Row
from quafl.record.summary import Curve, RecordError, ranked, read_curve, read_curves, sent, verdict
from quafl.settings import (
    Reproduction,
    Settings,
    SettingsError,
    figures,
    load,
    load_federation,
    load_figure,
    local_steps,
)
from quafl.tasks import DataError

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
console = Console()

REPORT = "report.html"
_Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of every curve, e.g. algorithm.lr=0.2."),
]
_Jobs = Annotated[
    int | None, typer.Option("-j", "--jobs", min=1, help="Processes; by default one per core, or per GPU.")
]
_Device = Annotated[str | None, typer.Option(help="Where to compute: cpu, cuda, cuda:1.")]


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Bad input ends with a sentence and exit code 2, not with a traceback."""
    try:
        yield
    except (SettingsError, RecordError, DataError, runner.RunError) as error:
        _complain(str(error))
    except OSError as error:
        _complain(f"{error.filename}: {error.strerror}")


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
    "  quafl run --resume runs/mine\n\n"
    "  quafl reproduce accuracy-vs-time-fmnist --quick\n\n"
    "  quafl report runs/demo runs/mine --out report.html\n\n"
    "  quafl export runs/demo/quafl --out model.safetensors"
)
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Quantized asynchronous federated learning: compare algorithms in virtual time."""


@app.command()
def run(
    source: Annotated[
        str | None, typer.Argument(metavar="NAME|FILE.toml", help="A built-in experiment, or a settings file.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results.", file_okay=False)] = None,
    set_: _Changes = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CURVE", help="Run this curve alone; may be repeated.")
    ] = None,
    jobs: _Jobs = None,
    ray: Annotated[
        str | None,
        typer.Option(help="Spread the runs over the Ray cluster at this address; 'local' starts one here."),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier run in the folder.")] = False,
    checkpoint: Annotated[
        float, typer.Option("--checkpoint-every", min=0, help="Seconds between checkpoints of an unfinished seed.")
    ] = 60.0,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Continue the run in this folder, bit for bit.")
    ] = None,
) -> None:
    """Run an experiment: every curve, every seed. Writes rows, models and report.html."""
    with _one_sentence():
        if ray is not None and jobs is not None:
            raise SettingsError("--ray and -j exclude each other: a cluster knows how many processes it has")
        if resume is not None:
            if source is not None or out is not None or set_ or only or overwrite:
                raise SettingsError("--resume takes everything from the folder; give it alone, or with -j or --ray")
            out, folders = resume, runner.reopen(resume)
        elif source is None or out is None:
            raise SettingsError("say what to run and where: quafl run NAME|FILE.toml --out DIR, or --resume DIR")
        else:
            folders = runner.prepare(_chosen(load(source, set_ or []), only), out, overwrite=overwrite)
        try:
            with _progress() as progress:
                bars = _Bars(progress, folders)
                troubles = runner.run(folders, processes=jobs, ray=ray, on_news=bars, checkpoint_seconds=checkpoint)
                bars.finish()
        except runner.Interrupted as stopped:
            _complain(f"interrupted; continue with: quafl run --resume {out}", code=stopped.code)
        _conclude([read_curve(folder.path) for folder in folders], out / REPORT)
        if troubles:
            _complain("; ".join(troubles))


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="ID|all", help="A figure's label in the paper.")] = None,
    show: Annotated[
        bool, typer.Option("--list", help="Show the figures, what is claimed of them and what they cost.")
    ] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many, from 0 on; earlier ones are kept.")] = None,
    quick: Annotated[bool, typer.Option(help="A small version, to try it out; its verdict says nothing.")] = False,
    device: _Device = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the results, one in it for each figure.", file_okay=False)
    ] = Path("runs/paper"),
    set_: _Changes = None,
    jobs: _Jobs = None,
) -> None:
    """Reproduce a figure of the paper: its runs, its picture, and whether its claims hold. Given again, it goes on."""
    with _one_sentence():
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
            except (DataError, RecordError, runner.RunError) as error:
                if name != "all":
                    raise
                left.append(one)
                console.print(f"{one}: not run: {error}", style="yellow", markup=False, soft_wrap=True)
        if left:
            _complain(f"not run: {', '.join(left)}", code=1)


def _list_figures() -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("id", "setting", "claims", "local steps a seed"):
        table.add_column(heading, no_wrap=heading == "id")
    for name in figures():
        wanted = load_figure(name)
        of = wanted.figure.of
        curves = [curve for cell in wanted.cells for curve in cell.curves] or wanted.curves
        cost = f"as {of}" if of else f"{sum(map(local_steps, curves)) / 1000:,.0f} thousand"
        claims = "; ".join(claim.text for claim in wanted.figure.claims)
        table.add_row(*map(escape, (name, wanted.figure.setting, claims, cost)))
    console.print(table)


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
    folders = runner.accumulate(wanted.curves, runs)
    troubles = _accumulate(folders, jobs)
    place.mkdir(parents=True, exist_ok=True)
    result = runner.conclude(wanted, place, folders, command)
    for claim in result["claims"]:
        console.print(f"  {claim['verdict']}: {claim['claim']}", markup=False)
        for finding in claim["findings"]:
            interval = (
                "too few seeds" if finding["low"] is None else f"from {finding['low']:.4g} to {finding['high']:.4g}"
            )
            mean = "–" if finding["mean"] is None else f"{finding['mean']:.4g}"
            console.print(f"      {finding['what']}: {mean}, {interval}", markup=False, highlight=False)
    _conclude([read_curve(folder.path) for folder in folders], place / REPORT)
    for trouble in troubles:
        console.print(trouble, style="yellow", markup=False)


def _map(wanted: Reproduction, out: Path, jobs: int | None, command: str) -> None:
    """All cells, one after another."""
    cells = []
    for number, cell in enumerate(wanted.cells):
        where = ", ".join(f"{key} {value}" for key, value in cell.place.items())
        console.print(f"{number + 1} of {len(wanted.cells)}: {where}", markup=False, highlight=False)
        cells.append(runner.accumulate(cell.curves, out / "curves" / where.replace(" ", "-").replace(",", "")))
        for trouble in _accumulate(cells[-1], jobs):
            console.print(trouble, style="yellow", markup=False)
    result = runner.conclude_map(wanted, out, cells, command)
    for first in result["first"]:
        where = ", ".join(f"{key} {first[key]}" for key in wanted.figure.grid)
        console.print(f"{where}: {first['label']}{' (clearly)' if first['clear'] else ''}", markup=False)
    console.print(f"The map: {out / 'figure.png'}", highlight=False, soft_wrap=True)


def _accumulate(folders: list[runner.RunFolder], jobs: int | None) -> list[str]:
    """What is left to do of them."""
    try:
        with _progress() as progress:
            bars = _Bars(progress, folders)
            troubles = runner.run(folders, processes=jobs, on_news=bars)
            bars.finish()
    except runner.Interrupted as stopped:
        _complain("interrupted; the same command goes on where it was", code=stopped.code)
    return troubles


@app.command()
def tune(
    name: Annotated[str, typer.Argument(metavar="ID", help="A figure's label in the paper.")],
    quick: Annotated[bool, typer.Option(help="Of the small version.")] = False,
    device: _Device = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the results, one in it for each figure.", file_okay=False)
    ] = Path("runs/tune"),
    set_: _Changes = None,
    jobs: _Jobs = None,
) -> None:
    """Try learning rates for a figure: as many for each algorithm, judged on a part of the training set."""
    with _one_sentence():
        wanted = load_figure(name, [*(set_ or []), *([f"run.device={device}"] if device else [])], quick=quick)
        place = out / ("quick" if quick else "") / name
        folders = runner.accumulate(runner.grid(wanted), place / "curves")
        for trouble in _accumulate(folders, jobs):
            console.print(trouble, style="yellow", markup=False)
        lines = runner.choose(folders, place)
        table = Table(title="Chosen on the validation split", box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in lines[0]:
            table.add_column(heading.replace("_", " "), no_wrap=True)
        for line in lines:
            table.add_row(*map(escape, line.values()), style="bold" if line["chosen"] else "")
        console.print(table)


def _chosen(curves: list[Settings], only: list[str] | None) -> list[Settings]:
    labels = [curve.label for curve in curves]
    unknown = next((label for label in only or [] if label not in labels), None)
    if unknown is not None:
        raise SettingsError(f"--only {unknown}: there is no such curve, choose from {', '.join(labels)}")
    return [curve for curve in curves if only is None or curve.label in only]


class _Bars:
    """A progress bar a curve: how far its seeds are, and what they have reached."""

    def __init__(self, progress: Progress, folders: list[runner.RunFolder]) -> None:
        self._progress = progress
        self._began = monotonic()
        self._latest: dict[tuple[str, int], Row] = {}
        self._first: dict[tuple[str, int], Row] = {}
        self._bars = {}
        for folder in folders:
            label, plan = folder.settings.label, folder.settings.run
            self._bars[label] = progress.add_task(escape(label), total=plan.until * len(plan.seeds), news="")
            progress.update(self._bars[label], completed=plan.until * len(folder.rows))

    def __call__(self, job: runner.Job, word: runner.News) -> None:
        label = job.settings.label
        if isinstance(word, str):
            self._progress.console.print(f"{label}, seed {job.seed}: {word}", style="yellow", markup=False)
            return
        key = label, job.seed
        before = self._latest.get(key, {"time": 0.0})["time"]
        self._first.setdefault(key, word)
        self._latest[key] = word
        self._progress.update(self._bars[label], advance=word["time"] - before, news=self._news(label, word))

    def finish(self) -> None:
        """The last evaluation may be a little before the end."""
        for bar in self._bars.values():
            self._progress.update(bar, completed=self._progress.tasks[bar].total)

    def _news(self, label: str, row: Row) -> str:
        """Of the seed that was heard last; steps and megabytes of all of the curve's."""
        mine = [(self._first[key], row) for key, row in self._latest.items() if key[0] == label]
        rate = sum(row["local_steps"] - first["local_steps"] for first, row in mine) / (monotonic() - self._began)
        score = f"accuracy {row['accuracy']:.3f}" if "accuracy" in row else f"loss {row['loss']:.3g}"
        return (
            f"round {row['round']:,.0f}, time {row['time']:,.0f}, {score}, {rate:,.0f} steps/s, "
            f"{sum(sent(row) for _, row in mine):,.0f} MB"
        )


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A curve's folder that 'quafl run' wrote.")],
    out: Annotated[Path, typer.Option(help="The file.", dir_okay=False)] = Path("model.safetensors"),
    which: Annotated[str, typer.Option(help="The best model of all evaluations, or the last.")] = "best",
    seed: Annotated[int | None, typer.Option(help="By default the first.")] = None,
) -> None:
    """Write a trained model as a state_dict, in safetensors."""
    with _one_sentence():
        if which not in ("best", "last"):
            raise SettingsError(f"--which {which}: must be best or last")
        model = runner.trained_model(folder, seed=seed, which="best" if which == "best" else "last")
        with write_atomically(out, "wb") as stream:
            stream.write(safetensors.torch.save(model))
        console.print(
            f"{len(model)} tensors, {sum(t.numel() for t in model.values()):,} numbers: {out}", highlight=False
        )


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
        TextColumn("{task.description:<14}"),
        BarColumn(bar_width=12),
        TextColumn("{task.percentage:>3.0f} %  {task.fields[news]}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
    )


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


federation = typer.Typer(no_args_is_help=True, help="Real federations: who is in, and who is there.")
app.add_typer(federation, name="federation")

_Folder = Annotated[Path, typer.Option("--dir", help="The federation's folder.", file_okay=False)]
_FolderOrKit = Annotated[
    Path, typer.Option("--dir", help="The federation's folder, or the server's kit.", file_okay=False)
]
FOLDER = Path("federation")


@federation.command("init")
def federation_init(
    names: Annotated[list[str], typer.Argument(metavar="CLIENT…", help="The clients' names.")],
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where clients reach the server.")],
    folder: _Folder = FOLDER,
    valid_days: Annotated[
        int, typer.Option(help="For how long the authority is good; each certificate is for 360 days at most.")
    ] = 3650,
) -> None:
    """Found a federation: an authority, and a start-up kit with a certificate for every party."""
    with _one_sentence(), _engine() as (_, provision):
        provision.init(folder, server, names, valid_days=valid_days)
        console.print(
            f"{folder / provision.SERVER}: for the machine that is {server}\n"
            + "\n".join(f"{folder / provision.CLIENTS / name}: for {name}" for name in names)
            + f"\n{folder / provision.AUTHORITY}: stays with you; whoever has it can admit anybody",
            highlight=False,
            soft_wrap=True,
        )


@federation.command("add")
def federation_add(
    name: Annotated[str, typer.Argument(metavar="CLIENT", help="The new client's name.")], folder: _Folder = FOLDER
) -> None:
    """Admit one more client; the server need not be restarted."""
    with _one_sentence(), _engine() as (_, provision):
        console.print(f"{provision.add(folder, name)}: for {name}", highlight=False, soft_wrap=True)


@federation.command("renew")
def federation_renew(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A client, or 'server'.")], folder: _Folder = FOLDER
) -> None:
    """Make a new kit, with a new key and certificate, for a party whose certificate ends."""
    with _one_sentence(), _engine() as (_, provision):
        console.print(
            f"{provision.renew(folder, name)}: copy its startup folder over the old one at {name}; the old certificate "
            f"stays good until its end",
            highlight=False,
            soft_wrap=True,
        )


@federation.command("revoke")
def federation_revoke(
    name: Annotated[str, typer.Argument(metavar="CLIENT", help="Who is shut out.")], folder: _Folder = FOLDER
) -> None:
    """Shut a client out for good, even while the server runs."""
    with _one_sentence(), _engine() as (_, provision):
        listed = provision.revoke(folder, name)
        console.print(
            f"{name} is shut out as soon as {listed} is in the same place in the server's kit", soft_wrap=True
        )


@federation.command("status")
def federation_status(folder: _FolderOrKit = FOLDER) -> None:
    """Show who is in, until when, and, on the server's machine, who is there and how far the run is."""
    with _one_sentence(), _engine() as (federated, provision):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("party", "certificate until", ""):
            table.add_column(heading)
        for kit in provision.kits(folder):
            remark = "has ended" if kit.ended else "ends soon" if kit.warning() else ""
            table.add_row(kit.name, f"{kit.expires:%Y-%m-%d}", remark)
        kit = folder if (folder / "startup").exists() else folder / provision.SERVER
        for name in provision.revoked(kit):
            table.add_row(name, "–", "revoked")
        console.print(table)
        status = federated.read_status(kit)
        console.print("The server has not run here." if status is None else _picture(status))


@federation.command("demo")
def federation_demo(
    out: Annotated[Path, typer.Option(help="Folder for everything.", file_okay=False)] = Path("runs/federation"),
    overwrite: Annotated[bool, typer.Option(help="Replace what is in the folder.")] = False,
) -> None:
    """Run a whole federation on this machine: certificates, a server, four clients."""
    with _one_sentence(), _engine() as (federated, _):
        raise typer.Exit(federated.demo(out, overwrite=overwrite))


@app.command()
def server(
    kit: Annotated[Path, typer.Argument(metavar="KIT", help="The server's start-up kit.")],
    settings: Annotated[Path, typer.Option(metavar="FILE.toml", help="What is learned, and how.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the run; by default in the kit.", file_okay=False)
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. algorithm.lr=0.2.")
    ] = None,
) -> None:
    """Be the server of a federation; started again, it goes on where it was."""
    with _one_sentence(), _engine() as (federated, provision):
        opened = provision.open_kit(kit)
        if not opened.is_server:
            raise SettingsError(f"{kit} is the kit of {opened.name}; a server needs the server's")
        _check_certificate(opened)
        federated.check_port(opened)
        folder = (out or kit / federated.RUN).resolve()
        with provision.in_use(opened), _live() as show:
            process = federated.ServerProcess(
                opened, load_federation(str(settings), set_ or []), folder, show, lambda: _conclude_run(folder)
            )
            raise typer.Exit(process.serve())


@app.command()
def client(
    kit: Annotated[Path, typer.Argument(metavar="KIT", help="The client's start-up kit.")],
    task: Annotated[str, typer.Option(metavar="PACKAGE.MODULE:FUNCTION", help="Makes the model and the local data.")],
    state: Annotated[
        Path | None, typer.Option(help="Folder for its checkpoints; by default in the kit.", file_okay=False)
    ] = None,
    step_seconds: Annotated[
        float, typer.Option(min=0, help="Take at least that long for a local step, to leave the machine to others.")
    ] = 0.0,
    keep_speed: Annotated[bool, typer.Option(help="Do not tell the server how many steps are taken.")] = False,
    largest_message_mb: Annotated[float, typer.Option(min=1, help="Refuse larger messages.")] = 2000.0,
) -> None:
    """Take part in a federation; started again, it goes on where it was."""
    with _one_sentence(), _engine() as (federated, provision):
        opened = provision.open_kit(kit)
        if opened.is_server:
            raise SettingsError(f"{kit} is the server's kit; a client needs one of its own")
        _check_certificate(opened)
        with provision.in_use(opened):
            process = federated.ClientProcess(
                opened,
                task,
                (state or kit / "state").resolve(),
                step_seconds=step_seconds,
                tell_speed=not keep_speed,
                largest_message_mb=largest_message_mb,
            )
            raise typer.Exit(process.take_part())


@contextmanager
def _engine() -> Iterator[tuple[Any, Any]]:
    """The parts that need NVIDIA FLARE, which is an extra."""
    try:
        from quafl.deploy import provision
        from quafl.run import federation as federated
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("nvflare"):
            raise
        _complain("real federations need NVIDIA FLARE: pip install 'quafl[federation]'")
    sys.path.insert(0, str(Path.cwd()))  # where a user's task may be
    try:
        yield federated, provision
    except provision.ProvisionError as error:
        _complain(str(error))


def _check_certificate(kit: Any) -> None:
    sentence = kit.warning()
    if kit.ended:
        _complain(sentence)
    if sentence is not None:
        Console(stderr=True, soft_wrap=True).print(f"quafl: {sentence}", style="yellow", markup=False, highlight=False)


@contextmanager
def _live() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Shows a run's status as it changes, where there is a terminal."""
    if not console.is_terminal:
        yield lambda status: None
        return
    live = Live(console=console, transient=True, auto_refresh=False)

    def show(status: dict[str, Any]) -> None:
        if not live.is_started:
            live.start()
        live.update(_picture(status), refresh=True)
        if not status["running"]:
            live.stop()

    yield show


def _picture(status: dict[str, Any]) -> Table:
    """Of a federation's run."""
    scores = ", ".join(f"{name} {value:.3f}" for name, value in status["score"].items() if value is not None)
    megabytes = (status["bytes_up"] + status["bytes_down"]) / 1e6
    state = "running" if status["running"] else "not running"
    table = Table(
        title=f"{state}: round {status['round']:,}, {status['seconds']:.0f} s, {scores or 'no test data'}, "
        f"{megabytes:,.2f} MB, {status['refined']} repairs, {status['lost']} lost",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title_justify="left",
    )
    for heading in ("client", "", "contacts", "local steps", "a contact", "dropped"):
        table.add_column(heading, justify="left" if heading in ("client", "") else "right")
    for member in status["clients"]:
        speed = "–" if member["speed"] is None else f"{member['speed']:.1f}"
        there = "left out" if member["left_out"] else "there" if member["there"] else "away"
        there = there if status["running"] else "away"
        counts = f"{member['contacts']:,}", f"{member['steps']:,}", speed, f"{member['dropped']:,}"
        table.add_row(escape(member["name"]), there, *counts)
    return table


def _conclude_run(folder: Path) -> None:
    """Of a federation: its table and page, if there was something to judge by."""
    try:
        curve = read_curve(folder)
    except RecordError:
        console.print(f"The server has no test data; the model is in {folder}", highlight=False, soft_wrap=True)
        return
    _conclude([curve], folder / REPORT)


if __name__ == "__main__":
    app()
