"""A federation's server in its run folder, and a client in its own, whatever carries their messages."""

import json
import logging
import tomllib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any
from uuid import uuid4

import safetensors.torch

from quafl.core.messages import Buffers, Model
from quafl.core.randomness import Generators, derive
from quafl.core.seams import Task
from quafl.deploy.carrier import Carrier, Loop
from quafl.deploy.client import AskServer, kept_in
from quafl.deploy.client import Driver as ClientDriver
from quafl.deploy.journal import Journal
from quafl.deploy.server import FORMAT, Coordinator, Driver, History
from quafl.protocol.carrier import SERVER
from quafl.protocol.client import ClientSide
from quafl.protocol.history import Run
from quafl.protocol.layout import Layout, digest_of, layout_of
from quafl.protocol.messages import largest_message
from quafl.protocol.server import ServerSide
from quafl.record.checkpoints import Checkpoints
from quafl.record.evaluations import JUDGES, check_first
from quafl.record.files import write_atomically
from quafl.record.judged import JUDGED, write_scores
from quafl.record.rows import Row, write_rows
from quafl.record.summary import HISTORY, ROWS, SETTINGS, VERSIONS, RunError
from quafl.run.tracking import Tracked, Tracking, check
from quafl.run.versions import versions
from quafl.settings.federation import FederationSettings, agree
from quafl.tasks import local

_log = logging.getLogger(__name__)

FINAL = "model.safetensors"  # in a client's folder, when a run is over


class ServerRun:
    """The server's run in its folder, from wherever it stands. It is made whole before anybody is heard, so that what
    is wrong is said at once."""

    def __init__(
        self,
        carrier: Carrier,
        loop: Loop,
        settings: FederationSettings,
        out: Path,
        stop: Event,
        task: Task | None = None,
    ) -> None:
        check(settings.run.track or ())
        self._settings, self._out, self._tracking = settings, out, Tracking()
        self._task = task or settings.task.build(SERVER, settings.run.seed)
        algorithm, coders, _ = settings.terms()
        start, rng = algorithm.start(*self._task.initial()), Generators(settings.run.seed)
        layout = layout_of(self._task)
        checkpoints = Checkpoints(out / "checkpoints")
        kept = checkpoints.newest()
        if kept is not None:
            self._check_same(kept, layout)
        else:
            self._check_judged()
        run = uuid4().hex if kept is None else str(kept["made_with"]["run"])
        journal, record = Journal(out / "journal"), History(out / HISTORY)
        machine = ServerSide(algorithm, coders, start, rng, layout, settings.welcome(run), settings.clients.build())
        self.service = Driver(machine, carrier, loop, journal)
        self.largest = largest_message(len(start.model), len(start.buffers))
        self.coordinator = Coordinator(
            self._task,
            self.service,
            settings.run.build(),
            checkpoints,
            journal,
            record,
            {"run": run, "algorithm": settings.algorithm.name, "layout": digest_of(layout)},
            self._record,
            stop,
        )
        if kept is not None:
            self.coordinator.restore(kept)
        else:
            record.go_back(0)
            record.add(Run(run, settings.run.seed))
        with write_atomically(out / SETTINGS) as stream:
            stream.write(settings.to_toml())
        with write_atomically(out / VERSIONS) as stream:
            json.dump(versions(), stream, indent=2)

    def run(self) -> bool:
        """Until the end, which is True, or until asked to stop; the models are kept either way. Diverged, if they are
        none any more."""
        with closing(self._tracking):
            ended = self.coordinator.run()
        evaluations = self.coordinator.evaluations
        for which, shown in ("last", evaluations.shown), ("best", evaluations.best.shown):
            path = self._out / f"model-seed{self._settings.run.seed}-{which}.safetensors"
            with write_atomically(path, "wb") as stream:
                stream.write(safetensors.torch.save(self._task.export(shown.model, shown.buffers)))
        return ended

    def _check_judged(self) -> None:
        plan = self._settings.run
        if not getattr(self._task, "has_test", True):
            return  # the clients will
        score = dict(self._task.evaluate(*self._task.initial()))
        score.pop("train_loss", None)  # nobody trains here
        try:
            check_first(score, plan.metric, stops=plan.stop_at_target)
        except ValueError as error:
            raise RunError(f"{self._settings.label}: {error}") from error

    def _check_same(self, kept: dict[str, Any], layout: Layout) -> None:
        if kept.get("format") != FORMAT:
            raise RunError(f"{self._out} holds a run of an earlier version of quafl; choose another --out")
        before, now = kept["made_with"]["algorithm"], self._settings.algorithm.name
        if before != now:
            raise RunError(
                f"{self._out} holds a run of {before}, not of {now}; choose another --out, or go on with that"
            )
        if kept["made_with"]["layout"] != digest_of(layout):
            raise RunError(
                f"{self._out} holds a run of a model with other tensors, or with the same in another order; choose "
                f"another --out, or go on with that model"
            )

    def _record(self, row: Row) -> None:
        try:
            write_rows(self._out / ROWS, self.coordinator.evaluations.rows)
            if scores := self.coordinator.evaluations.clients:
                write_scores(self._out / JUDGED.format(seed=self._settings.run.seed), scores)
        except OSError as error:
            _log.error("the rows could not be written: %s", error)
        if self._settings.run.track:
            known = tomllib.loads(self._settings.to_toml())
            run = Tracked(self._out, self._settings.label, self._settings.run.seed, known)
            self._tracking.send(run, self._settings.run.track, row)
        score = ", ".join(f"{name} {row[name]:.3f}" for name in ("accuracy", "loss") if name in row)
        sent = (row["bytes_up"] + row["bytes_down"]) / 1e6
        judges = f" at {row[JUDGES]:.0f} of {len(self.coordinator.members)} clients" if JUDGES in row else ""
        _log.info("round %d, %.0f s: %s%s, %.2f MB", row["round"], row["time"], score or "no test data", judges, sent)


def make_client(
    made: Task | str,
    name: str,
    folder: Path,
    ask: AskServer,
    *,
    options: Mapping[str, Any] | None = None,
    step_seconds: float = 0.0,
    tell_private: bool = True,
    device: str | None = None,
) -> ClientDriver:
    """A client, from wherever it stands, with a task or the function that makes it, which is given the options; on this
    device, if not on its own. What cannot be learned from is said now. The final model is kept in the folder."""
    if isinstance(made, str):
        made = local.make(made, name, derive("client", name), options, device=device)
    task = made
    task.batch(0, 0)
    kept, reports = kept_in(folder, task.initial()[0].device.type)
    machine = ClientSide(
        name,
        task,
        agree,
        uuid4().hex,
        kept=kept,
        reports=reports,
        step_seconds=step_seconds,
        tell_private=tell_private,
    )

    def keep(model: Model, buffers: Buffers) -> None:
        try:
            with write_atomically(folder / FINAL, "wb") as stream:
                stream.write(safetensors.torch.save(task.export(model, buffers)))
        except OSError as error:
            _log.error("the final model could not be written: %s", error)
        else:
            _log.info("the final model is in %s", folder / FINAL)

    return ClientDriver(machine, folder, ask, on_final=keep)
