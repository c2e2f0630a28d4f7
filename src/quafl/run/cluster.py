"""Runs spread over a Ray cluster: each is a Ray task. Machines share no disk: checkpoints and the user's modules travel
with the tasks."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from quafl.record.files import write_atomically
from quafl.record.summary import RunError
from quafl.run.folders import RunFolder
from quafl.run.jobs import Job, News, Outcome, compute
from quafl.run.pool import SIGNALS, Interrupted, by_itself, named
from quafl.tasks import own

PAUSE = 1.0  # seconds between a task's looks at the board, at most


def over_ray(
    jobs: Sequence[tuple[RunFolder, Job]], address: str, on_news: Callable[[Job, News], None], asked: Sequence[int]
) -> Iterator[tuple[RunFolder, Job, Outcome]]:
    """The jobs as they end; one on a GPU has it for itself."""
    chosen = next((job for _, job in jobs if ":" in job.settings.run.device), None)
    if chosen is not None:
        raise RunError(
            f"run.device = {chosen.settings.run.device!r}: a cluster gives each run a GPU of its own, say 'cuda'"
        )
    ray = connected(address)
    board = ray.remote(num_cpus=0)(Board).remote()
    try:
        running = {}
        for number, (folder, job) in enumerate(jobs):
            gpus = int(job.settings.run.device == "cuda")
            task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_run)  # it would begin where it was sent off
            kept = job.checkpoint.read_bytes() if job.checkpoint.exists() else None
            code = own.pack(map(Path, folder.settings.modules or []))
            running[task.remote(number, job, kept, code, board)] = number
        while running:
            if len(asked) > 1:
                raise Interrupted(asked[0])  # asked again: at once
            if asked:
                ray.get(board.stop.remote())
            done, _ = ray.wait(list(running), timeout=PAUSE)
            for number, word in ray.get(board.take.remote()):
                _, job = jobs[number]
                if isinstance(word, bytes):
                    _keep(job.checkpoint, word)
                else:
                    on_news(job, word)
            for task in done:
                folder, job = jobs[running.pop(task)]
                with named(job):
                    outcome, kept = _result(ray, task)
                if kept is not None:
                    _keep(job.checkpoint, kept)
                if outcome is not None:
                    yield folder, job, outcome
    finally:
        ray.shutdown()


class Board:
    """An actor: what the tasks have to tell, and whether they are to stop."""

    def __init__(self) -> None:
        self._news: list[tuple[int, News | bytes]] = []
        self._stopping = False

    def tell(self, number: int, word: News | bytes) -> bool:
        """A row, a word, or a checkpoint; whether to stop comes back."""
        self._news.append((number, word))
        return self._stopping

    def take(self) -> list[tuple[int, News | bytes]]:
        """What was told since the last time."""
        news, self._news = self._news, []
        return news

    def stop(self) -> None:
        """From now on, all are to stop."""
        self._stopping = True

    def stopping(self) -> bool:
        """Whether they are."""
        return self._stopping


def _run(
    number: int, job: Job, kept: bytes | None, code: dict[str, bytes], board: Any
) -> tuple[Outcome | None, bytes | None]:
    """One job where Ray has put it, from its checkpoint on; stopped, with its last one."""
    ray = _ray()
    if ray.get(board.stopping.remote()):
        return None, kept
    looked, sent = monotonic(), 0
    with TemporaryDirectory() as folder:
        here = Path(folder) / "checkpoint.pt"
        own.unpack(code, Path(folder) / "code")
        if kept is not None:
            here.write_bytes(kept)
            sent = here.stat().st_mtime_ns

        def tell(word: News) -> None:
            board.tell.remote(number, word)

        def stopping() -> bool:
            nonlocal looked, sent
            if monotonic() < looked + min(PAUSE, job.checkpoint_seconds):
                return False
            looked = monotonic()
            if here.exists() and here.stat().st_mtime_ns != sent:
                sent = here.stat().st_mtime_ns
                board.tell.remote(number, here.read_bytes())
            return bool(ray.get(board.stopping.remote()))

        with by_itself(tell):
            outcome = compute(replace(job, checkpoint=here), tell, stopping)
        return outcome, here.read_bytes() if outcome is None else None


def _result(ray: Any, task: Any) -> tuple[Outcome | None, bytes | None]:
    try:
        outcome, kept = ray.get(task)
    except (ray.exceptions.RaySystemError, ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        raise RunError(
            "a task of the cluster was killed (out of memory?); what was finished or saved is kept, continue with "
            "--resume"
        ) from error
    return outcome, kept


def _keep(checkpoint: Path, content: bytes) -> None:
    with write_atomically(checkpoint, "wb") as stream:
        stream.write(content)


def connected(address: str, processes: int = 0) -> Any:
    """Ray, with the cluster of that address; 'local' is one here, with room for so many processes if it has fewer
    cores."""
    ray = _ray()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if address == "local":  # for this machine alone
            cores = max(os.cpu_count() or 1, processes)
            ray.init("local", num_cpus=cores, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
        else:
            if port.isdigit():
                socket.create_connection((host, int(port)), timeout=10).close()  # Ray itself tries for minutes
            ray.init(address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        if "connect" in why:
            why += "; one that asks for tokens needs RAY_AUTH_MODE=token here, too"
        raise RunError(f"there is no Ray cluster at {address!r} ({why})") from error
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():  # Ray has put its own in their place
            signal.signal(number, handler)
    return ray


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise RunError("--ray and run.workers need Ray: pip install 'quafl[ray]'") from error
    return ray
