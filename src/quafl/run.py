"""The runner: every (curve, seed) of an experiment, over processes, into run folders; left and taken up again."""

import json
import logging
import multiprocessing
import os
import platform
import re
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from multiprocessing.queues import Queue
from pathlib import Path
from threading import Thread, current_thread, main_thread
from time import monotonic
from types import FrameType
from typing import Literal, NamedTuple, Protocol, TypeAlias

import safetensors.torch
import torch
from torch import Tensor

from quafl.codec.kernels import kernel_for
from quafl.record import checkpoints
from quafl.record.files import write_atomically
from quafl.record.rows import Row, by_seed, read_rows, write_rows
from quafl.record.summary import RecordError
from quafl.settings import Settings, load
from quafl.sim import Diverged, Simulation

SETTINGS, ROWS, VERSIONS, TROUBLES = "settings.toml", "rows.csv", "versions.json", "troubles.json"
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # that ask a run to stop
CHECKPOINT_SHARE = 0.05  # of the time, at most, goes into checkpoints

Which: TypeAlias = Literal["best", "last"]
News: TypeAlias = Row | str  # a row, or a word about what went wrong and was dealt with


class RunError(Exception):
    """A run that could not go on."""


class Interrupted(Exception):
    """Asked to stop by a signal; what has been computed is in the checkpoints."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number  # as shells have it


@dataclass(frozen=True, slots=True)
class Job:
    """One seed of one curve, and where and how often it is saved."""

    settings: Settings
    seed: int
    checkpoint: Path
    checkpoint_seconds: float


class Outcome(NamedTuple):
    """What a finished job leaves."""

    rows: list[Row]
    models: dict[Which, dict[str, Tensor]]
    trouble: str | None  # why it ended before its time


@dataclass(slots=True)
class RunFolder:
    """A curve's folder: settings, rows of all its finished seeds, versions, and of each seed the best and last model or
    a checkpoint."""

    path: Path
    settings: Settings
    rows: dict[int, list[Row]] = field(default_factory=dict)
    troubles: dict[str, str] = field(default_factory=dict)  # by seed: why it ended before its time

    def begin(self) -> None:
        """Write what is known beforehand, in place of what an earlier run left."""
        self.path.mkdir(parents=True, exist_ok=True)
        fixed = self.path / ROWS, self.path / TROUBLES
        for old in (*fixed, *self.path.glob("model-seed*"), *self.path.glob("checkpoint-seed*")):
            old.unlink(missing_ok=True)
        with write_atomically(self.path / SETTINGS) as stream:
            stream.write(self.settings.to_toml())
        with write_atomically(self.path / VERSIONS) as stream:
            json.dump(versions(), stream, indent=2)

    @classmethod
    def reopen(cls, path: Path) -> "RunFolder":
        """A folder that an earlier run has begun."""
        (settings,) = load(str(path / SETTINGS))
        rows = by_seed(read_rows(path / ROWS)) if (path / ROWS).exists() else {}
        troubles = json.loads((path / TROUBLES).read_text()) if (path / TROUBLES).exists() else {}
        return cls(path, settings, rows, troubles)

    def jobs(self, checkpoint_seconds: float) -> list[Job]:
        """What is left to do."""
        seeds = [seed for seed in self.settings.run.seeds if seed not in self.rows]
        return [Job(self.settings, seed, self.checkpoint(seed), checkpoint_seconds) for seed in seeds]

    def add(self, job: Job, outcome: Outcome) -> None:
        """Keep a finished seed; it counts as finished once its rows are there."""
        for which, model in outcome.models.items():
            with write_atomically(self.model(job.seed, which), "wb") as stream:
                stream.write(safetensors.torch.save(model))
        if outcome.trouble is not None:
            self.troubles[str(job.seed)] = outcome.trouble
            with write_atomically(self.path / TROUBLES) as stream:
                json.dump(self.troubles, stream, indent=2)
        self.rows[job.seed] = outcome.rows
        write_rows(self.path / ROWS, [row for known in sorted(self.rows) for row in self.rows[known]])
        job.checkpoint.unlink(missing_ok=True)

    def model(self, seed: int, which: Which) -> Path:
        """Where a seed's model is kept."""
        return self.path / f"model-seed{seed}-{which}.safetensors"

    def checkpoint(self, seed: int) -> Path:
        """Where an unfinished seed stands."""
        return self.path / f"checkpoint-seed{seed}.pt"


def prepare(curves: Sequence[Settings], out: Path, *, overwrite: bool) -> list[RunFolder]:
    """A run folder per curve: `out` itself for a single one, folders in it for several."""
    folders = [RunFolder(out / _slug(curve.label) if len(curves) > 1 else out, curve) for curve in curves]
    paths = [folder.path for folder in folders]
    alike = next((path for path in paths if paths.count(path) > 1), None)
    if alike is not None:
        raise RecordError(
            f"two curves would share the folder {alike}; give them labels that differ in letters or digits"
        )
    if out.is_dir() and any(out.rglob(SETTINGS)) and not overwrite:
        raise RecordError(
            f"{out} already holds a run; choose another --out, add --overwrite to replace it, or continue it with "
            f"quafl run --resume {out}"
        )
    _check(folders)
    for folder in folders:
        folder.begin()
    return folders


def reopen(out: Path) -> list[RunFolder]:
    """The folders that an earlier run has begun."""
    folders = [RunFolder.reopen(path.parent) for path in sorted(out.rglob(SETTINGS))]
    if not folders:
        raise RecordError(f"{out} holds no run to continue; give the folder that 'quafl run --out' was given")
    _check(folders)
    return folders


def _check(folders: Sequence[RunFolder]) -> None:
    """Whether the data are here and fit, before anything is overwritten."""
    for folder in folders:
        try:
            folder.settings.task.check(folder.settings.clients)
        except ValueError as error:
            raise RunError(f"{folder.settings.label}: {error}") from error


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.") or "curve"


def versions() -> dict[str, str]:
    """What the numbers depend on besides the settings."""
    return {
        **{package: version(package) for package in ("quafl", "torch", "numpy")},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.now(UTC).date().isoformat(),
    }


def run(
    folders: Sequence[RunFolder],
    *,
    processes: int,
    on_news: Callable[[Job, News], None],
    checkpoint_seconds: float = 60.0,
) -> list[str]:
    """Run all seeds of all curves that are not finished; a seed's rows and models are on disk as soon as it is. A
    sentence is given back for each that ended before its time."""
    jobs = [(folder, job) for folder in folders for job in folder.jobs(checkpoint_seconds)]
    jobs.sort(key=lambda pair: pair[1].settings.run.seeds.index(pair[1].seed))  # the curves progress side by side
    with closing(_finished(jobs, min(processes, len(jobs)), on_news)) as finished:  # whatever happens, its workers end
        for folder, job, outcome in finished:
            folder.add(job, outcome)
    return [
        f"{folder.settings.label}, seed {seed}: {trouble}"
        for folder in folders
        for seed, trouble in folder.troubles.items()
    ]


def trained_model(folder: Path, *, seed: int | None, which: Which) -> dict[str, Tensor]:
    """A seed's model as a state_dict, by default the first seed's; of an unfinished one, that of its checkpoint."""
    if not (folder / SETTINGS).exists():
        curves = ", ".join(str(path.parent) for path in sorted(folder.rglob(SETTINGS)))
        raise RecordError(
            f"{folder} holds several curves; choose one of {curves}" if curves else f"{folder} holds no run"
        )
    run_folder = RunFolder.reopen(folder)
    settings = run_folder.settings
    seed = settings.run.seeds[0] if seed is None else seed
    if seed not in settings.run.seeds:
        raise RecordError(f"{folder} has no seed {seed}; it has {', '.join(map(str, settings.run.seeds))}")
    if run_folder.model(seed, which).exists():
        return safetensors.torch.load_file(run_folder.model(seed, which))
    if not run_folder.checkpoint(seed).exists():
        raise RecordError(f"{folder} has neither a model nor a checkpoint of seed {seed} yet; run it first")
    task, simulation = settings.simulation(seed)
    _take_up(run_folder.checkpoint(seed), simulation)
    state = simulation.server if which == "last" else simulation.best.server
    return task.export(state.model, state.buffers)


def compute(job: Job, on_news: Callable[[News], None], stopping: Callable[[], bool]) -> Outcome | None:
    """One seed, from its checkpoint if there is one; None if it was stopped, and stands in its checkpoint."""
    trouble, checkpoint = None, job.checkpoint
    task, simulation = job.settings.simulation(job.seed)
    made_with = {"settings": job.settings.to_toml(), "quafl": version("quafl"), "torch": version("torch")}
    if checkpoint.exists():
        _take_up(checkpoint, simulation, made_with)
        on_news(simulation.rows[-1])
    due = monotonic() + job.checkpoint_seconds
    try:
        for row in simulation:
            if row is not None:
                on_news(row)
            stop = stopping()
            if stop or monotonic() > due:
                began = monotonic()
                checkpoints.save(checkpoint, {"made_with": made_with, "simulation": simulation.state()})
                due = monotonic() + max(job.checkpoint_seconds, (monotonic() - began) / CHECKPOINT_SHARE)
            if stop:
                return None
    except Diverged as error:
        trouble = f"training diverged: {error}; its rows so far are kept, try a smaller lr"
    models: dict[Which, dict[str, Tensor]] = {
        "last": task.export(simulation.server.model, simulation.server.buffers),
        "best": task.export(simulation.best.server.model, simulation.best.server.buffers),
    }
    return Outcome(simulation.rows, models, trouble)


def _take_up(checkpoint: Path, simulation: Simulation, made_with: dict[str, str] | None = None) -> None:
    """Go on from a checkpoint, if it was made with the same settings and versions."""
    state = checkpoints.load(checkpoint)
    before = state.get("made_with", {})
    if "simulation" not in state:
        raise RecordError(f"{checkpoint} is not a checkpoint of a run; delete it to run that seed anew")
    changed = [name for name, value in (made_with or {}).items() if before.get(name) != value]
    if changed:
        raise RecordError(
            f"{checkpoint} was made with other {' and '.join(changed)}, and cannot be continued bit for bit; put them "
            f"back, or delete it to run that seed anew"
        )
    simulation.restore(state["simulation"])


_Finished: TypeAlias = Generator[tuple[RunFolder, Job, Outcome], None, None]


def _finished(jobs: Sequence[tuple[RunFolder, Job]], processes: int, on_news: Callable[[Job, News], None]) -> _Finished:
    """The jobs as they end. Each computes in one thread: with the same seed, the same bits."""
    alone = processes <= 1
    with _noticing_signals(at_once_if_again=alone) as asked:
        yield from (_one_by_one(jobs, on_news, asked) if alone else _side_by_side(jobs, processes, on_news, asked))
        if asked:
            raise Interrupted(asked[0])


def _one_by_one(
    jobs: Sequence[tuple[RunFolder, Job]], on_news: Callable[[Job, News], None], asked: Sequence[int]
) -> _Finished:
    for folder, job in jobs:
        tell = partial(on_news, job)
        with _one_thread(), _named(job), _words_to(tell):
            outcome = compute(job, tell, lambda: bool(asked))
        if outcome is None:
            return
        yield folder, job, outcome


def _side_by_side(
    jobs: Sequence[tuple[RunFolder, Job]], processes: int, on_news: Callable[[Job, News], None], asked: Sequence[int]
) -> _Finished:
    kernel_for(torch.device("cpu"))  # a missing one is said here, once
    context = multiprocessing.get_context("spawn")  # a process with threads cannot be forked safely
    news: Queue[tuple[int, News]] = context.Queue()
    stop = context.Event()
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(news, stop)) as pool:
        with _handling_signals(signal.SIG_IGN):  # which workers inherit, so that nothing stops them while they start
            running: dict[Future[Outcome | None], int] = {
                pool.submit(_compute_and_tell, number, job): number for number, (_, job) in enumerate(jobs)
            }
        try:
            while running:
                if asked and not stop.is_set():
                    stop.set()
                    running = {future: number for future, number in running.items() if not future.cancel()}
                if len(asked) > 1:
                    raise Interrupted(asked[0])  # asked again: at once
                done, _ = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
                while not news.empty():
                    number, word = news.get()
                    on_news(jobs[number][1], word)
                for future in done:
                    folder, job = jobs[running.pop(future)]
                    with _named(job):
                        outcome = future.result()
                    if outcome is not None:
                        yield folder, job, outcome
        except BaseException:
            for worker in multiprocessing.active_children():  # nobody will read what they compute
                worker.kill()
            raise


@contextmanager
def _noticing_signals(*, at_once_if_again: bool) -> Iterator[list[int]]:
    """Ctrl-C and its like are written down, and looked at where nothing is half done: raised anywhere, they could leave
    a lock of the pool taken, or be lost in a destructor. Without a pool, a second one may be raised anywhere."""
    asked: list[int] = []

    def notice(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if at_once_if_again and len(asked) > 1:
            raise Interrupted(number)

    with _handling_signals(notice):
        yield asked


@contextmanager
def _handling_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    if current_thread() is not main_thread():  # where Python does not deliver signals
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, known in before.items():
        if known != signal.SIG_IGN:  # nohup's wish is respected
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, known in before.items():
            signal.signal(number, known)


class _Flag(Protocol):
    def is_set(self) -> bool: ...


_news: "Queue[tuple[int, News]]"  # of a worker process: the way back for its rows
_stop: _Flag


def _begin(news: "Queue[tuple[int, News]]", stop: _Flag) -> None:
    global _news, _stop  # a pool hands a queue to its workers only when they start
    _news, _stop = news, stop
    _news.cancel_join_thread()  # a worker may end although nobody has read its last rows
    Thread(target=_end_with_parent, daemon=True).start()
    logging.getLogger("quafl.codec").setLevel(logging.ERROR)  # the parent says once what all of them would


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _compute_and_tell(number: int, job: Job) -> Outcome | None:
    def tell(word: News) -> None:
        _news.put((number, word))

    with _one_thread(), _words_to(tell):
        return compute(job, tell, _stop.is_set)


@contextmanager
def _words_to(tell: Callable[[News], None]) -> Iterator[None]:
    """What a simulation warns of is news, too."""

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tell(record.getMessage())

    logger, handler = logging.getLogger("quafl.sim"), Telling()
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _named(job: Job) -> Iterator[None]:
    """Say whose run it was that could not go on."""
    try:
        yield
    except ValueError as error:
        raise RunError(f"{job.settings.label}, seed {job.seed}: {error}; finished seeds are kept") from error
    except BrokenProcessPool as error:
        raise RunError(
            "a worker process was killed (out of memory?); what was finished or saved is kept, continue with --resume"
        ) from error
