"""All seeds of all curves that are left to do, one after another or over processes; they can be asked to stop."""

import logging
import multiprocessing
import os
import signal
import tomllib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing.queues import Queue
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import Protocol, TypeAlias

import torch

from quafl.codec.kernels import kernel_for
from quafl.record.rows import Growing
from quafl.record.summary import RunError
from quafl.run.folders import RunFolder, held
from quafl.run.heap import kept
from quafl.run.jobs import Hire, Job, News, Outcome, compute
from quafl.run.tracking import Tracked, Tracking
from quafl.tasks.precision import one_thread

VISIBLE = "CUDA_VISIBLE_DEVICES"
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # that ask a run to stop


class Interrupted(Exception):
    """Asked to stop by a signal; what has been computed is in the checkpoints."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number  # as shells have it


def run(
    folders: Sequence[RunFolder],
    *,
    on_news: Callable[[Job, News], None],
    processes: int | None = None,
    ray: str | None = None,
    checkpoint_seconds: float = 60.0,
    given_up: Callable[[], bool] | None = None,
) -> list[str]:
    """Run all seeds of all curves that are not finished, over processes here, by default one a core or GPU, or over the
    Ray cluster of that address. No other process may have the folders. A seed's rows and models are on disk as soon as
    it is finished, and its rows as they come in a file of their own until then. A sentence is given back for each that
    ended before its time. In a single process, a run can be given up: it stays in its checkpoint."""
    jobs = [(folder, job) for folder in folders for job in folder.jobs(checkpoint_seconds)]
    jobs.sort(key=lambda pair: pair[1].settings.run.seeds.index(pair[1].seed))  # the curves progress side by side
    growing = {job.checkpoint: Growing(folder.rows_so_far(job.seed)) for folder, job in jobs}

    def tell(job: Job, word: News) -> None:
        if not isinstance(word, str):
            growing[job.checkpoint].add(word)
        on_news(job, word)

    with (
        held(folder.path for folder in folders),
        tracked(tell) as tell_all,
        closing(_finished(jobs, processes, ray, tell_all, given_up)) as finished,  # whatever happens, its workers end
    ):
        for folder, job, outcome in finished:
            folder.add(job.seed, outcome)
    return [
        f"{folder.settings.label}, seed {seed}: {trouble}"
        for folder in folders
        for seed, trouble in folder.troubles.items()
    ]


@contextmanager
def tracked(on_news: Callable[[Job, News], None]) -> Iterator[Callable[[Job, News], None]]:
    """Rows are news, and go to the trackers that the settings name, too."""

    def tell(job: Job, word: News) -> None:
        on_news(job, word)
        trackers = job.settings.run.track
        if trackers and not isinstance(word, str):
            settings = tomllib.loads(job.settings.to_toml())
            run = Tracked(job.checkpoint.parent, job.settings.label, job.seed, settings)
            tracking.send(run, trackers, word)

    with closing(Tracking()) as tracking:
        yield tell


_Finished: TypeAlias = Generator[tuple[RunFolder, Job, Outcome], None, None]


def _finished(
    jobs: Sequence[tuple[RunFolder, Job]],
    processes: int | None,
    ray: str | None,
    on_news: Callable[[Job, News], None],
    given_up: Callable[[], bool] | None = None,
) -> _Finished:
    """The jobs as they end. Each computes in one thread: with the same seed, the same bits."""
    devices = {job.settings.run.device for _, job in jobs}
    gpus = torch.cuda.device_count() if "cuda" in devices <= {"cuda", "cpu"} else 0  # whose numbers nobody has chosen
    processes = min(processes or gpus or os.cpu_count() or 1, len(jobs))
    workers = max((job.settings.run.workers for _, job in jobs), default=1)
    alone = workers > 1 or (processes <= 1 and ray is None)
    with _noticing_signals(at_once_if_again=alone) as asked:
        if workers > 1:
            from quafl.run.workers import hiring

            with hiring(ray or "local", workers) as hire:
                yield from _one_by_one(jobs, on_news, lambda: bool(asked), hire)
        elif ray is not None:
            from quafl.run.cluster import over_ray

            yield from over_ray(jobs, ray, on_news, asked)
        elif alone:
            yield from _one_by_one(jobs, on_news, lambda: bool(asked) or bool(given_up and given_up()))
        else:
            yield from _side_by_side(jobs, places(processes, gpus, os.environ.get(VISIBLE)), on_news, asked)
        if asked:
            raise Interrupted(asked[0])


def places(processes: int, gpus: int, visible: str | None) -> list[str | None]:
    """What each process is to see of the GPUs, as CUDA_VISIBLE_DEVICES: one of those visible here, in turn."""
    names = visible.split(",") if visible else [str(number) for number in range(gpus)]
    return [names[process % len(names)] if gpus else visible for process in range(processes)]


def _one_by_one(
    jobs: Sequence[tuple[RunFolder, Job]],
    on_news: Callable[[Job, News], None],
    stopping: Callable[[], bool],
    hire: Hire | None = None,
) -> _Finished:
    for folder, job in jobs:
        tell = partial(on_news, job)
        with named(job), by_itself(tell):
            outcome = compute(job, tell, stopping, hire)
        if outcome is None:
            return
        yield folder, job, outcome


def _side_by_side(
    jobs: Sequence[tuple[RunFolder, Job]],
    processes: Sequence[str | None],
    on_news: Callable[[Job, News], None],
    asked: Sequence[int],
) -> _Finished:
    """A process for each of the places."""
    kernel_for(torch.device("cpu"))  # a missing one is said here, once
    context = multiprocessing.get_context("spawn")  # a process with threads cannot be forked safely
    news: Queue[tuple[int, News]] = context.Queue()
    stop, free = context.Event(), context.Queue()
    for place in processes:
        free.put(place)
    with ProcessPoolExecutor(
        len(processes), mp_context=context, initializer=_begin, initargs=(news, stop, free)
    ) as pool:
        with handling_signals(signal.SIG_IGN):  # which workers inherit, so that nothing stops them while they start
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
                    with named(job):
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

    with handling_signals(notice):
        yield asked


@contextmanager
def handling_signals(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers, numbers: Sequence[signal.Signals] = SIGNALS
) -> Iterator[None]:
    """Inside, these signals are the handler's; only in the main thread, where Python delivers them."""
    if current_thread() is not main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
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


def _begin(news: "Queue[tuple[int, News]]", stop: _Flag, free: "Queue[str | None]") -> None:
    global _news, _stop  # a pool hands a queue to its workers only when they start
    _news, _stop = news, stop
    place = free.get()
    if place is not None:
        os.environ[VISIBLE] = place  # "cuda" is then a GPU of its own
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

    with by_itself(tell):
        return compute(job, tell, _stop.is_set)


@contextmanager
def by_itself(tell: Callable[[News], None]) -> Iterator[None]:
    """In one thread; what a simulation warns of is news, too."""

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tell(record.getMessage())

    logger, handler = logging.getLogger("quafl.sim"), Telling()
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with one_thread(), kept():
            yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


@contextmanager
def named(job: Job) -> Iterator[None]:
    """Say whose run it was that could not go on."""
    try:
        yield
    except ValueError as error:
        raise RunError(f"{job.settings.label}, seed {job.seed}: {error}; finished seeds are kept") from error
    except BrokenProcessPool as error:
        raise RunError(
            "a worker process was killed (out of memory?); what was finished or saved is kept, continue with --resume"
        ) from error
