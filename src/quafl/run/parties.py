"""What a federation's server and its clients do, whatever carries their messages."""

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any
from uuid import uuid4

import safetensors.torch

from quafl.core.seams import ServerState, WireError
from quafl.deploy.carrier import SERVER, Carrier, Loop, Unadmitted, Unreachable
from quafl.deploy.clock import WallClock
from quafl.deploy.coordinator import Coordinator
from quafl.deploy.fleet import NetworkFleet
from quafl.deploy.journal import Journal
from quafl.deploy.worker import Rejected, Worker
from quafl.record.checkpoints import Checkpoints
from quafl.record.files import write_atomically
from quafl.record.rows import Row, write_rows
from quafl.record.summary import ROWS, SETTINGS, VERSIONS, RunError
from quafl.run.versions import versions
from quafl.settings.federation import FederationSettings
from quafl.tasks import local

_log = logging.getLogger(__name__)

REDIAL_SECONDS = 0.5  # between two tries to reach a server that is not there


class ServerRun:
    """The server's run in its folder, from wherever it stands. It is made whole before anybody is heard, so that what
    is wrong is said at once."""

    def __init__(self, carrier: Carrier, loop: Loop, settings: FederationSettings, out: Path, stop: Event) -> None:
        self._settings, self._out = settings, out
        self._task = local.make(settings.task.make, SERVER, settings.run.seed)
        checkpoints = Checkpoints(out / "checkpoints")
        kept = checkpoints.newest()
        run = uuid4().hex if kept is None else str(kept["made_with"]["run"])
        terms, self.start = settings.terms(), ServerState(*self._task.initial())
        self.fleet = NetworkFleet(
            carrier,
            loop,
            terms.algorithm,
            terms.codecs,
            self.start,
            Journal(out / "journal.bin"),
            settings.welcome(run),
            stop,
            settings.clients.build(),
        )
        self.coordinator = Coordinator(
            self._task,
            terms.algorithm,
            terms.codecs,
            settings.run.build(),
            self.fleet,
            WallClock(stop),
            checkpoints,
            {"run": run, "algorithm": settings.algorithm.name},
            self._record,
        )
        if kept is not None:
            self._check_same(kept)
            self.coordinator.restore(kept)
        with write_atomically(out / SETTINGS) as stream:
            stream.write(settings.to_toml())
        with write_atomically(out / VERSIONS) as stream:
            json.dump(versions(), stream, indent=2)

    def run(self) -> bool:
        """Until the end, which is True, or until asked to stop; the models are kept either way. Diverged, if they are
        none any more."""
        ended = self.coordinator.run()
        for which, state in ("last", self.coordinator.server), ("best", self.coordinator.best):
            path = self._out / f"model-seed{self._settings.run.seed}-{which}.safetensors"
            with write_atomically(path, "wb") as stream:
                stream.write(safetensors.torch.save(self._task.export(state.model, state.buffers)))
        return ended

    def _check_same(self, kept: dict[str, Any]) -> None:
        before, now = kept["made_with"]["algorithm"], self._settings.algorithm.name
        if before != now:
            raise RunError(
                f"{self._out} holds a run of {before}, not of {now}; choose another --out, or go on with that"
            )
        parameters = len(kept["server"]["model"])
        if parameters != len(self.start.model):
            raise RunError(
                f"{self._out} holds a run of a model with {parameters} parameters, this one has "
                f"{len(self.start.model)}; choose another --out, or go on with that"
            )

    def _record(self, row: Row) -> None:
        try:
            write_rows(self._out / ROWS, self.coordinator.rows)
        except OSError as error:
            _log.error("the rows could not be written: %s", error)
        score = ", ".join(f"{name} {row[name]:.3f}" for name in ("accuracy", "loss") if name in row)
        sent = (row["bytes_up"] + row["bytes_down"]) / 1e6
        _log.info("round %d, %.0f s: %s, %.2f MB", row["round"], row["time"], score or "no test data", sent)


def take_part(worker: Worker, stop: Event, look: Callable[[], None] = lambda: None) -> bool:
    """Be a client until the end, or until asked to stop; whether all went well. `look` is called now and then."""
    worker.begin()
    try:
        _keep_in_touch(worker, stop, look)
    except (Rejected, Unadmitted, WireError, OSError) as error:
        _log.error("this client cannot take part: %s", error)
        return False
    finally:
        worker.end()
    if worker.failure is not None:
        return False
    if not worker.finished:
        with suppress(Unreachable, WireError):
            worker.say_hello(leaving=True)
    _log.info("%s: %s", "the run is over" if worker.finished else "stopped", worker.status())
    return True


def _keep_in_touch(worker: Worker, stop: Event, look: Callable[[], None]) -> None:
    reached = None
    while not (stop.is_set() or worker.finished or worker.failure):
        look()
        try:
            worker.say_hello()
            if not reached:
                _log.info("the server is there")
            reached = True
        except Unadmitted:
            raise
        except Unreachable as error:
            if reached is not False:
                _log.warning("the server %s; training goes on, trying again", error)
            reached = False
        stop.wait(worker.hello_seconds if reached else REDIAL_SECONDS)
