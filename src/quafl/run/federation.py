"""A real federation's processes: the server's, a client's, and all of them at once on this machine."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from socket import socket
from threading import Event, Thread, current_thread, main_thread
from time import time
from typing import Any, TypeAlias

from quafl.core.seams import Task
from quafl.deploy import logs, provision
from quafl.deploy.carrier import Loop
from quafl.deploy.provision import Kit
from quafl.deploy.streams import GrpcClient, GrpcServer
from quafl.protocol.carrier import SERVER
from quafl.protocol.messages import HELLO_SECONDS
from quafl.protocol.server import ServerSide
from quafl.record.attendance import EVENTS, STATUS, Book
from quafl.record.evaluations import Diverged
from quafl.record.files import alone, write_atomically
from quafl.record.summary import RunError
from quafl.run.parties import ServerRun, make_client
from quafl.settings.federation import FederationSettings
from quafl.tasks.demo import CLIENTS

_log = logging.getLogger(__name__)

RUN, WHERE, LOG = "run", "run-folder.txt", "log.txt"
STATUS_SECONDS = 1.0  # between two of them
STALE_SECONDS = 10.0  # after which nobody is taken to be writing them
DEMO_STEPS = (0.01, 0.01, 0.04, 0.08)  # seconds that a local step takes each of the demo's clients
LINGER_SECONDS = 1.5 * HELLO_SECONDS
EXIT_SECONDS = 20.0  # that the demo waits for its clients to end

Status: TypeAlias = dict[str, Any]  # what 'quafl federation status' and the live table show


class ServerProcess:
    """The server. It is made whole before it listens, so that what is wrong is said at once."""

    def __init__(
        self,
        kit: Kit,
        passphrase: str | None,
        settings: FederationSettings,
        out: Path,
        on_status: Callable[[Status], None],
        on_end: Callable[[], None],
        task: Task | None = None,
    ) -> None:
        self.stop = Event()
        self._kit, self._settings, self._out, self._on_status, self._on_end = kit, settings, out, on_status, on_end
        self._loop = Loop("carrier")
        self._carrier = GrpcServer(self._loop, kit, passphrase)
        self._run = ServerRun(self._carrier, self._loop, settings, out, self.stop, task)
        self._book = Book(out / EVENTS)

    @property
    def party(self) -> ServerRun:
        """What it runs."""
        return self._run

    def serve(self) -> int:
        """Until the end; gives the exit code."""
        try:
            with stopped_when_asked(self.stop, os._exit):
                self.run()
        except Diverged as error:
            _log.error("training diverged: %s", error)
            return 1
        return 0

    def run(self) -> bool:
        """Until the end, which is True, or until asked to stop; Diverged, if training has."""
        self._carrier.start(self._run.service, largest=self._run.largest)
        try:
            return self._serve()
        finally:
            self._carrier.stop()
            self._run.service.close()
            self._loop.close()

    def _serve(self) -> bool:
        (self._kit.path / WHERE).write_text(str(self._out), encoding="utf-8")
        start_with = self._settings.clients.start_with
        _log.info("listening on port %d; the run begins with %d clients or more", self._kit.port, start_with)
        over = Event()
        watcher = Thread(target=self._watch, args=(over,), name="status", daemon=True)
        watcher.start()
        try:
            ended = self._run.run()
        finally:
            over.set()
            watcher.join()
            self._tell(running=False)
        if ended:
            self._on_end()
            self.stop.wait(LINGER_SECONDS)  # whoever was not reached hears it when saying hello
        else:
            _log.info("stopped in round %d; start again to go on", self._run.coordinator.server.round)
        return ended

    def _watch(self, over: Event) -> None:
        while not over.wait(STATUS_SECONDS):
            self._tell(running=True)

    def _tell(self, *, running: bool) -> None:
        status = self._status(running)
        self._on_status(status)
        try:
            self._book.look(status)
            with write_atomically(self._out / STATUS) as stream:
                json.dump(status, stream, indent=2)
        except OSError as error:
            _log.error("the status could not be written: %s", error)

    def _status(self, running: bool) -> Status:
        status: Status = self._run.service.call(lambda machine: self._described(machine, running))
        return status

    def _described(self, machine: ServerSide, running: bool) -> Status:
        coordinator = self._run.coordinator
        totals, rows, now = machine.totals, coordinator.evaluations.rows, machine.now
        return {
            "running": running,
            "at": time(),
            "round": coordinator.server.round,
            "seconds": coordinator.seconds,
            "score": {} if not rows else {name: rows[-1].get(name) for name in ("accuracy", "loss")},
            "bytes_up": totals.up,
            "bytes_down": totals.down,
            "refined": totals.refined,
            "lost": totals.lost,
            "clients": [
                {
                    "name": member.name,
                    "there": machine.members.is_live(member, now),
                    "left_out": machine.members.is_left_out(member, now),
                    "contacts": member.contacts,
                    "steps": member.steps,
                    "dropped": member.dropped,
                    "refined": member.refined,
                    "bytes_up": member.up,
                    "bytes_down": member.down,
                }
                for member in coordinator.members
            ],
        }


class ClientProcess:
    """A client, likewise."""

    def __init__(
        self,
        kit: Kit,
        passphrase: str | None,
        task: Task | str,
        options: Mapping[str, Any],
        folder: Path,
        *,
        step_seconds: float,
        tell_speed: bool,
        device: str | None = None,
    ) -> None:
        self.stop = Event()
        self._kit, self._loop = kit, Loop("carrier")
        self._carrier = GrpcClient(self._loop, kit.path, passphrase)
        self._driver = make_client(
            task,
            kit.name,
            folder,
            self._carrier.ask,
            options=options,
            step_seconds=step_seconds,
            tell_private=tell_speed,
            device=device,
        )

    def take_part(self) -> int:
        """Until the end; gives the exit code."""
        with stopped_when_asked(self.stop, os._exit):
            return 0 if self.run() else 1

    def run(self) -> bool:
        """Until the end, or until asked to stop; whether all went well."""
        _log.info("%s is dialling the server at %s", self._kit.name, self._kit.target)
        driver = self._driver
        self._carrier.start(driver.machine.session, driver.hear, largest=driver.largest)
        watch = provision.Watch(self._kit)

        def look() -> None:
            sentence = watch.due()
            if sentence is not None:
                _log.warning("%s", sentence)

        try:
            return driver.run(self.stop, look)
        finally:
            self._carrier.close()
            self._loop.close()


@contextmanager
def at_work(kit: Kit, folder: Path, remedy: str) -> Iterator[None]:
    """A party, with its kit and a folder to itself. What it writes is its owner's alone; its log is in its kit."""
    before = os.umask(0o077)
    try:
        with alone(kit.path, "a party runs once"), alone(folder, remedy), logs.kept(kit.path / LOG):
            yield
    finally:
        os.umask(before)


@contextmanager
def stopped_when_asked(stop: Event, again: Callable[[int], object], *numbers: signal.Signals) -> Iterator[None]:
    """SIGINT and SIGTERM end a party in good order; asked again, at once, with the exit code. Only in the main thread,
    where Python delivers them."""

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            again(128 + number)
        stop.set()

    if current_thread() is not main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in numbers or (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, known in before.items():
            signal.signal(number, known)


def read_status(kit: Path) -> Status | None:
    """What the server whose kit this is last said of its run, if it has run here."""
    if not (kit / WHERE).exists():
        return None
    out = Path((kit / WHERE).read_text(encoding="utf-8"))
    if not (out / STATUS).exists():
        return None
    status: Status = json.loads((out / STATUS).read_text(encoding="utf-8"))
    fresh = time() - status["at"] < STALE_SECONDS
    return {**status, "running": status["running"] and fresh}


def demo(out: Path, *, overwrite: bool) -> int:
    """A whole federation on this machine: provisioned, a server and four clients, a process each."""
    folder = out / "federation"
    if out.exists() and any(out.iterdir()):
        if not overwrite:
            raise RunError(f"{out} is not empty; choose another --out, or add --overwrite to replace it")
        shutil.rmtree(out)
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    provision.init(folder, f"localhost:{port}", CLIENTS)
    clients = []
    with resources.as_file(resources.files("quafl") / "presets" / "federation" / "demo.toml") as settings:
        try:
            for name, seconds in zip(CLIENTS, DEMO_STEPS, strict=True):
                kit = folder / provision.CLIENTS / name
                arguments = ["--task", "quafl.tasks.demo:digits_of", "--step-seconds", str(seconds)]
                with (kit / "console.txt").open("wb") as console:
                    clients.append(
                        subprocess.Popen(
                            [*_QUAFL, "client", str(kit), *arguments],
                            stdout=console,
                            stderr=console,
                            start_new_session=True,  # Ctrl-C is the server's
                        )
                    )
            server = [*_QUAFL, "server", str(folder / SERVER), "--settings", str(settings), "--out", str(out)]
            code = _until_it_ends(subprocess.Popen(server))
            for client in clients:
                client.wait(EXIT_SECONDS)
            return code
        finally:
            for client in clients:
                client.kill()


_QUAFL = (sys.executable, "-m", "quafl.cli")


def _until_it_ends(process: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            pass  # it has been interrupted, too, and ends in good order
