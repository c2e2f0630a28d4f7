"""Rows for experiment trackers, as they come: TensorBoard, MLflow, Weights & Biases. Each is imported when it is used,
and is set up as its own users are used to: by its environment variables, or where it looks by default.

Each seed is a run of its own there, and so is a seed that is resumed; a round is a step.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from time import time
from typing import Any, NamedTuple, TypeAlias

from quafl.record.rows import Row
from quafl.record.summary import RunError
from quafl.settings.base import Tracker

_log = logging.getLogger(__name__)

TENSORBOARD = "tensorboard"  # the folder in a curve's
PROJECT = "quafl"  # where a tracker has projects or experiments, and nobody has named one

Send: TypeAlias = Callable[[int, dict[str, float]], None]  # the values of a step


class Tracked(NamedTuple):
    """One seed of one curve."""

    folder: Path
    label: str
    seed: int
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.label}, seed {self.seed}"


@contextmanager
def tensorboard(run: Tracked) -> Iterator[Send]:
    """Into a folder of the curve's: tensorboard --logdir RUNS."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(run.folder / TENSORBOARD / f"seed{run.seed}") as writer:

        def send(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        yield send


@contextmanager
def mlflow(run: Tracked) -> Iterator[Send]:
    """To MLFLOW_TRACKING_URI, into the experiment MLFLOW_EXPERIMENT_NAME."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client, experiment = MlflowClient(), os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    known = client.get_experiment_by_name(experiment)
    place = client.create_experiment(experiment) if known is None else known.experiment_id
    made = client.create_run(place, run_name=run.name).info.run_id
    for name, value in _flat(run.settings).items():
        client.log_param(made, name, value)

    def send(step: int, values: dict[str, float]) -> None:
        now = int(time() * 1000)
        client.log_batch(made, [Metric(name, value, now, step) for name, value in values.items()])

    try:
        yield send
    finally:
        client.set_terminated(made)


@contextmanager
def wandb(run: Tracked) -> Iterator[Send]:
    """As WANDB_MODE, WANDB_PROJECT and the like say."""
    import wandb as package

    made = package.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=run.name,
        group=run.label,
        config=dict(run.settings),
        dir=run.folder,
        reinit="create_new",  # the seeds of all curves are run side by side
        settings=package.Settings(silent=True),
    )
    try:
        yield lambda step, values: made.log(values, step=step)
    finally:
        made.finish()


TRACKERS: dict[Tracker, Callable[[Tracked], AbstractContextManager[Send]]] = {
    "tensorboard": tensorboard,
    "mlflow": mlflow,
    "wandb": wandb,
}


def check(trackers: Iterable[Tracker]) -> None:
    """Whether they are installed; a RunError if not."""
    for name in trackers:
        if find_spec(name) is None:
            raise RunError(f"run.track has {name!r}, which is not installed: pip install 'quafl[{name}]'")


class Tracking:
    """Sends rows, until it is closed. A tracker that does not take one is sent no more of that seed, which is logged:
    it must not end a run."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._sends: dict[tuple[Path, int, Tracker], Send] = {}

    def send(self, run: Tracked, trackers: Iterable[Tracker], row: Row) -> None:
        """An evaluation's row."""
        values = {name: value for name, value in row.items() if name not in ("seed", "round") and isfinite(value)}
        for tracker in trackers:
            key = run.folder, run.seed, tracker
            with _surviving(f"{run.name}: {tracker} gets no more rows"):
                if key not in self._sends:
                    self._sends[key] = _ignore  # unless it can be opened
                    self._sends[key] = self._open.enter_context(TRACKERS[tracker](run))
                send, self._sends[key] = self._sends[key], _ignore  # unless it takes this one
                send(int(row["round"]), values)
                self._sends[key] = send

    def close(self) -> None:
        """All that were sent are kept there."""
        with _surviving("run.track: not all was told that the run is over"):
            self._open.close()


@contextmanager
def _surviving(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a package, or the network behind it, is up to
        _log.warning("%s (%s: %s)", what, type(error).__name__, error)


def _ignore(step: int, values: dict[str, float]) -> None:
    """A tracker that has failed."""


def _flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """By their names in a file: algorithm.lr."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= _flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {above + name: value}
    return found
