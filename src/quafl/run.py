"""The runner: every (curve, seed) of an experiment, spread over processes, into run folders."""

import json
import logging
import multiprocessing
import os
import platform
import re
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from multiprocessing.queues import Queue
from pathlib import Path
from threading import Event, current_thread, main_thread

import safetensors.torch
import torch
from torch import Tensor

from quafl.codec.kernels import kernel_for
from quafl.record.files import write_atomically
from quafl.record.rows import Row, write_rows
from quafl.record.summary import RecordError
from quafl.settings import Settings
from quafl.sim import trajectory

SETTINGS, ROWS, VERSIONS = "settings.toml", "rows.csv", "versions.json"


class RunError(Exception):
    """A run that could not go on."""


@dataclass(frozen=True, slots=True)
class Job:
    """One seed of one curve."""

    settings: Settings
    seed: int


@dataclass(slots=True)
class RunFolder:
    """A curve's folder: settings, rows of all its finished seeds, versions, and a model per seed."""

    path: Path
    settings: Settings
    rows: dict[int, list[Row]] = field(default_factory=dict)

    def begin(self) -> None:
        """Write what is known beforehand, in place of what an earlier run left."""
        self.path.mkdir(parents=True, exist_ok=True)
        for old in (self.path / ROWS, *self.path.glob("model-seed*.safetensors")):
            old.unlink(missing_ok=True)
        with write_atomically(self.path / SETTINGS) as stream:
            stream.write(self.settings.to_toml())
        with write_atomically(self.path / VERSIONS) as stream:
            json.dump(versions(), stream, indent=2)

    def add(self, seed: int, rows: list[Row], model: dict[str, Tensor]) -> None:
        """Keep a finished seed."""
        self.rows[seed] = rows
        write_rows(self.path / ROWS, [row for known in sorted(self.rows) for row in self.rows[known]])
        with write_atomically(self.path / f"model-seed{seed}.safetensors", "wb") as stream:
            stream.write(safetensors.torch.save(model))


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
        raise RecordError(f"{out} already holds a run; choose another --out, or add --overwrite to replace it")
    for folder in folders:
        folder.begin()
    return folders


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


def run(folders: Sequence[RunFolder], *, processes: int, on_row: Callable[[Job, Row], None]) -> None:
    """Run all seeds of all curves; a seed's rows and model are on disk as soon as it is finished."""
    jobs = [(folder, Job(folder.settings, seed)) for folder in folders for seed in folder.settings.run.seeds]
    jobs.sort(key=lambda pair: pair[1].settings.run.seeds.index(pair[1].seed))  # the curves progress side by side
    with closing(_finished(jobs, min(processes, len(jobs)), on_row)) as finished:  # whatever happens, its workers end
        for folder, job, rows, model in finished:
            folder.add(job.seed, rows, model)


def compute(job: Job, on_row: Callable[[Row], None]) -> tuple[list[Row], dict[str, Tensor]]:
    """One seed's rows, and its model at the last of them."""
    settings, rows = job.settings, []
    task = settings.task.build(settings.clients.count, job.seed)
    for row, state in trajectory(
        task,
        settings.clients.count,
        settings.clients.build(),
        settings.algorithm.build(),
        settings.codec.build(),
        settings.algorithm.optimizer(),
        until=settings.run.until,
        every=settings.run.every,
        seed=job.seed,
        with_potential=settings.run.potential,
    ):
        rows.append(row)
        on_row(row)
    return rows, task.export(state.model, state.buffers)


def _finished(
    jobs: Sequence[tuple[RunFolder, Job]], processes: int, on_row: Callable[[Job, Row], None]
) -> Generator[tuple[RunFolder, Job, list[Row], dict[str, Tensor]], None, None]:
    """The jobs as they end, with what they computed. Each computes in one thread: with the same seed, the same bits."""
    if processes == 1:
        for folder, job in jobs:
            with _one_thread(), _named(job):
                finished = compute(job, partial(on_row, job))
            yield folder, job, *finished
        return
    kernel_for(torch.device("cpu"))
    context = multiprocessing.get_context("spawn")  # a process with threads cannot be forked safely
    news: Queue[tuple[int, Row]] = context.Queue()
    with (
        _noticing_interrupts() as interrupted,
        ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(news,)) as pool,
    ):
        running = {pool.submit(_compute_and_tell, number, job): number for number, (_, job) in enumerate(jobs)}
        try:
            while running:
                if interrupted.is_set():
                    raise KeyboardInterrupt
                done, _ = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
                while not news.empty():
                    number, row = news.get()
                    on_row(jobs[number][1], row)
                for future in done:
                    folder, job = jobs[running.pop(future)]
                    with _named(job):
                        finished = future.result()
                    yield folder, job, *finished
        except BaseException:
            for worker in multiprocessing.active_children():  # nobody will read what they compute
                worker.terminate()
            raise


@contextmanager
def _noticing_interrupts() -> Iterator[Event]:
    """Ctrl-C sets the event, which is looked at where nothing is half done: raised anywhere, it could leave a lock of
    the pool taken, or be lost in a destructor."""
    interrupted = Event()
    if current_thread() is not main_thread():  # where Python does not deliver signals
        yield interrupted
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


_news: "Queue[tuple[int, Row]]"  # of a worker process: the way back for its rows


def _begin(news: "Queue[tuple[int, Row]]") -> None:
    global _news  # noqa: PLW0603  # a pool hands a queue to its workers only when they start
    _news = news
    _news.cancel_join_thread()  # a worker may end although nobody has read its last rows
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    logging.getLogger("quafl").setLevel(logging.ERROR)  # and says once what all of them would


def _compute_and_tell(number: int, job: Job) -> tuple[list[Row], dict[str, Tensor]]:
    with _one_thread():
        return compute(job, lambda row: _news.put((number, row)))


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
