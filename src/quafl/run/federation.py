"""A real federation's processes: the server's, a client's, and all of them at once on this machine."""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from math import isnan
from pathlib import Path
from socket import socket
from threading import Event, Thread
from time import time
from typing import Any, TypeAlias
from uuid import uuid4

import safetensors.torch

from quafl.core.randomness import derive
from quafl.core.seams import ServerState, WireError
from quafl.deploy import provision
from quafl.deploy.clock import WallClock
from quafl.deploy.coordinator import Coordinator, Diverged
from quafl.deploy.flare import SERVER, is_free, run_client, run_server
from quafl.deploy.fleet import AskClient, NetworkFleet
from quafl.deploy.journal import Journal
from quafl.deploy.messages import Octets
from quafl.deploy.provision import Kit, ProvisionError
from quafl.deploy.worker import HELLO_SECONDS, Rejected, Unadmitted, Unreachable, Worker
from quafl.record.checkpoints import Checkpoints
from quafl.record.files import write_atomically
from quafl.record.rows import Row, write_rows
from quafl.run.folders import ROWS, SETTINGS, VERSIONS, RunError
from quafl.run.versions import versions
from quafl.settings import FederationSettings, agree
from quafl.tasks import local
from quafl.tasks.demo import CLIENTS

_log = logging.getLogger(__name__)

RUN, STATUS, WHERE = "run", "status.json", "run-folder.txt"
STATUS_SECONDS = 1.0  # between two of them
STALE_SECONDS = 10.0  # after which nobody is taken to be writing them
DEMO_STEPS = (0.01, 0.01, 0.04, 0.08)  # seconds that a local step takes each of the demo's clients
LINGER_SECONDS = 1.5 * HELLO_SECONDS
EXIT_SECONDS = 20.0  # that the demo waits for its clients to end
REFUSALS = 5  # in a row, after which a client gives up

Status: TypeAlias = dict[str, Any]  # what 'quafl federation status' and the live table show


class ServerProcess:
    """The server. It is made whole before the engine starts, so that what is wrong is said at once."""

    def __init__(
        self,
        kit: Kit,
        settings: FederationSettings,
        out: Path,
        on_status: Callable[[Status], None],
        on_end: Callable[[], None],
    ) -> None:
        self.stop = Event()
        self._kit, self._settings, self._out, self._on_status, self._on_end = kit, settings, out, on_status, on_end
        self._task = local.make(settings.task.make, SERVER, settings.run.seed)
        self._ask: AskClient
        self._shut_out = provision.revoked(kit.path)
        out.mkdir(parents=True, exist_ok=True)
        checkpoints = Checkpoints(out / "checkpoints")
        kept = checkpoints.newest()
        run = uuid4().hex if kept is None else str(kept["made_with"]["run"])
        terms, start = settings.terms(), ServerState(*self._task.initial())
        self._fleet = NetworkFleet(
            self._call,
            terms.algorithm,
            terms.codecs,
            start,
            Journal(out / "journal.bin"),
            settings.welcome(run),
            self.stop,
            settings.clients.build(),
        )
        self._coordinator = Coordinator(
            self._task,
            terms.algorithm,
            terms.codecs,
            settings.run.build(),
            self._fleet,
            WallClock(self.stop),
            checkpoints,
            {"run": run, "algorithm": settings.algorithm.name},
            self._record,
        )
        if kept is not None:
            self._check_same(kept, start)
            self._coordinator.restore(kept)
        with write_atomically(out / SETTINGS) as stream:
            stream.write(settings.to_toml())
        with write_atomically(out / VERSIONS) as stream:
            json.dump(versions(), stream, indent=2)

    def serve(self) -> int:
        """Until the end; gives the exit code."""
        provision.settle(self._kit)
        (self._kit.path / WHERE).write_text(str(self._out), encoding="utf-8")
        limit = int(self._settings.clients.largest_message_mb * 1_000_000)
        return run_server(self._kit.path, self, largest_message=limit)

    def run(self, ask: AskClient) -> int:
        """The engine is up."""
        self._ask = ask
        start_with = self._settings.clients.start_with
        _log.info("listening on port %d; the run begins with %d clients or more", self._kit.port, start_with)
        over = Event()
        watcher = Thread(target=self._watch, args=(over,), name="status", daemon=True)
        watcher.start()
        try:
            ended = self._coordinator.run()
        except Diverged as error:
            _log.error("training diverged: %s", error)
            return 1
        finally:
            over.set()
            watcher.join()
            self._tell(running=False)
        self._keep_models()
        if ended:
            self._on_end()
            self.stop.wait(LINGER_SECONDS)  # whoever was not reached hears it when saying hello
        else:
            _log.info("stopped in round %d; start again to go on", self._coordinator.server.round)
        return 0

    def _call(self, name: str, octets: bytes, within: float) -> Octets:
        return self._ask(name, octets, within)  # which is known once the engine is up

    def hear(self, name: str, octets: Octets) -> bytes:
        """A client has said something."""
        return self._fleet.hear(name, octets)

    def is_welcome(self, name: str) -> bool:
        """Everybody with a certificate who has not been revoked."""
        try:
            self._shut_out = provision.revoked(self._kit.path)
        except ProvisionError as error:
            _log.error("%s; keeping to the one before", error)
        return name not in self._shut_out

    def _check_same(self, kept: dict[str, Any], start: ServerState) -> None:
        before, now = kept["made_with"]["algorithm"], self._settings.algorithm.name
        if before != now:
            raise RunError(
                f"{self._out} holds a run of {before}, not of {now}; choose another --out, or go on with that"
            )
        if len(kept["server"]["model"]) != len(start.model):
            raise RunError(
                f"{self._out} holds a run of a model with {len(kept['server']['model'])} parameters, this one has "
                f"{len(start.model)}; choose another --out, or go on with that"
            )

    def _record(self, row: Row) -> None:
        try:
            write_rows(self._out / ROWS, self._coordinator.rows)
        except OSError as error:
            _log.error("the rows could not be written: %s", error)
        score = ", ".join(f"{name} {row[name]:.3f}" for name in ("accuracy", "loss") if name in row)
        sent = (row["bytes_up"] + row["bytes_down"]) / 1e6
        _log.info("round %d, %.0f s: %s, %.2f MB", row["round"], row["time"], score or "no test data", sent)

    def _keep_models(self) -> None:
        coordinator = self._coordinator
        for which, state in ("last", coordinator.server), ("best", coordinator.best):
            path = self._out / f"model-seed{self._settings.run.seed}-{which}.safetensors"
            with write_atomically(path, "wb") as stream:
                stream.write(safetensors.torch.save(self._task.export(state.model, state.buffers)))

    def _watch(self, over: Event) -> None:
        while not over.wait(STATUS_SECONDS):
            self._tell(running=True)

    def _tell(self, *, running: bool) -> None:
        status = self._status(running)
        self._on_status(status)
        try:
            with write_atomically(self._out / STATUS) as stream:
                json.dump(status, stream, indent=2)
        except OSError as error:
            _log.error("the status could not be written: %s", error)

    def _status(self, running: bool) -> Status:
        coordinator, totals = self._coordinator, self._fleet.totals
        return {
            "running": running,
            "at": time(),
            "round": coordinator.server.round,
            "seconds": coordinator.seconds,
            "score": {} if not coordinator.rows else {k: coordinator.rows[-1].get(k) for k in ("accuracy", "loss")},
            "bytes_up": totals.up,
            "bytes_down": totals.down,
            "refined": totals.refined,
            "lost": totals.lost,
            "clients": [
                {
                    "name": member.name,
                    "there": self._fleet.is_live(member),
                    "left_out": self._fleet.is_left_out(member),
                    "contacts": member.contacts,
                    "steps": member.steps,
                    "speed": None if isnan(member.speed) else member.speed,
                    "dropped": member.dropped,
                }
                for member in self._fleet.members()
            ],
        }


class ClientProcess:
    """A client, likewise."""

    def __init__(
        self,
        kit: Kit,
        make_task: str,
        folder: Path,
        *,
        step_seconds: float,
        tell_speed: bool,
        largest_message_mb: float,
    ) -> None:
        self.stop = Event()
        self._kit, self._limit = kit, int(largest_message_mb * 1_000_000)
        self._ask: AskClient
        task = local.make(make_task, kit.name, derive("client", kit.name))
        task.batch(0, 0)  # what cannot be learned from is said now
        self._worker = Worker(
            task,
            folder,
            agree,
            lambda octets, within: self._ask(SERVER, octets, within),
            step_seconds=step_seconds,
            tell_speed=tell_speed,
        )

    def take_part(self) -> int:
        """Until the end; gives the exit code."""
        where = f"{self._kit.host}:{self._kit.port}"
        print(f"{self._kit.name} is dialling the server at {where}, until it is there", file=sys.stderr, flush=True)
        return run_client(self._kit.path, self._kit.name, self, largest_message=self._limit)

    def run(self, ask: AskClient) -> int:
        """The engine is up."""
        self._ask = ask
        worker = self._worker
        worker.begin()
        try:
            self._keep_in_touch()
        except (Rejected, WireError, OSError) as error:
            _log.error("this client cannot take part: %s", error)
            return 1
        finally:
            worker.end()
        if worker.failure is not None:
            return 1
        if not worker.finished:
            with suppress(Unreachable, WireError):
                worker.say_hello(leaving=True)
        _log.info("%s: %s", "the run is over" if worker.finished else "stopped", worker.status())
        return 0

    def _keep_in_touch(self) -> None:
        """Until the end."""
        reached, refusals = None, 0
        while not (self.stop.is_set() or self._worker.finished or self._worker.failure):
            try:
                self._worker.say_hello()
                if not reached:
                    _log.info("the server is there")
                reached, refusals = True, 0
            except Unreachable as error:
                refusals = refusals + 1 if isinstance(error, Unadmitted) else 0
                if refusals == REFUSALS:
                    raise Rejected("the server does not listen to it; was it revoked?") from error
                if reached is not False:
                    _log.warning("the server %s; training goes on, trying again", error)
                reached = False
            self.stop.wait(HELLO_SECONDS)

    def hear(self, name: str, octets: Octets) -> bytes:
        """The server has said something."""
        return self._worker.hear(octets)

    def is_welcome(self, name: str) -> bool:
        """The server, and nobody else."""
        return name == SERVER


def check_port(kit: Kit) -> None:
    """A second server on the same port would not be noticed by either."""
    if not is_free(kit.port):
        raise RunError(f"port {kit.port} is in use; is the server running already?")


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
