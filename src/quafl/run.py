"""The runner: every (curve, seed) of an experiment, spread over processes, into run folders."""

import json
import multiprocessing
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from quafl.record.files import write_atomically
from quafl.record.rows import Row, write_rows
from quafl.record.summary import RecordError
from quafl.settings import Settings
from quafl.sim import trajectory

SETTINGS, ROWS, VERSIONS = "settings.toml", "rows.csv", "versions.json"


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
    taken = [folder.path for folder in folders if (folder.path / SETTINGS).exists()]
    if taken and not overwrite:
        raise RecordError(f"{taken[0]} already holds a run; choose another --out, or add --overwrite to replace it")
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
    for folder, job, rows, model in _finished(jobs, min(processes, len(jobs)), on_row):
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
) -> Iterator[tuple[RunFolder, Job, list[Row], dict[str, Tensor]]]:
    """The jobs as they end, with what they computed. Each computes in one thread: with the same seed, the same bits."""
    if processes == 1:
        with _one_thread():
            for folder, job in jobs:
                yield folder, job, *compute(job, partial(on_row, job))
        return
    context = multiprocessing.get_context("spawn")  # a process with threads cannot be forked safely
    news: SimpleQueue[tuple[int, Row]] = context.SimpleQueue()
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(news,)) as pool:
        running = {pool.submit(_compute_and_tell, number, job): jobs[number] for number, (_, job) in enumerate(jobs)}
        try:
            while running:
                done, _ = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
                while not news.empty():
                    number, row = news.get()
                    on_row(jobs[number][1], row)
                for future in done:
                    folder, job = running.pop(future)
                    yield folder, job, *future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


_news: SimpleQueue[tuple[int, Row]]  # of a worker process: the way back for its rows


def _begin(news: SimpleQueue[tuple[int, Row]]) -> None:
    global _news  # noqa: PLW0603  # a pool hands a queue to its workers only when they start
    _news = news
    torch.set_num_threads(1)


def _compute_and_tell(number: int, job: Job) -> tuple[list[Row], dict[str, Tensor]]:
    return compute(job, lambda row: _news.put((number, row)))
