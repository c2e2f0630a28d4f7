"""One seed of one curve: computed from its checkpoint on, if there is one."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Literal, NamedTuple, Protocol, Self, TypeAlias

import torch
from torch import Tensor

from quafl.core.seams import Task
from quafl.record import checkpoints
from quafl.record.judged import Scores
from quafl.record.rows import Row
from quafl.record.summary import RecordError, RunError
from quafl.run.versions import OWN, joined, versions
from quafl.settings.world import Run
from quafl.sim import Diverged, Simulation
from quafl.sim.executors.changing import SO_FAR, at_once
from quafl.sim.fleet import Placing
from quafl.sim.spread import Lost

FORMAT = "3"  # of checkpoints
MOST_LOST = 3  # workers from one checkpoint to the next
CHECKPOINT_SHARE = 0.05  # of the time, at most, goes into checkpoints

Which: TypeAlias = Literal["best", "last"]
News: TypeAlias = Row | str  # a row, or a word about what went wrong and was dealt with


class Experiment(Protocol):
    """One curve: the settings of a file, or what a program has given."""

    @property
    def label(self) -> str:
        """What people call it."""

    @property
    def run(self) -> Run:
        """How long, and which seeds."""

    def simulation(
        self, seed: int, executor: str | None = None, spread: Placing | None = None
    ) -> tuple[Task, Simulation]:
        """One seed, ready to run; with a particular executor, if it is not to be chosen, and with clients that are
        elsewhere."""

    def only(self, *seeds: int) -> Self:
        """It with these seeds, none of which depends on what others there are to be."""

    def to_toml(self) -> str:
        """All that its numbers depend on."""

    def sources(self) -> str:
        """The files of the user's own code that a settings file names, and digests of them."""


Hire: TypeAlias = Callable[[Experiment, int, str | None], AbstractContextManager[Placing]]  # for a seed, by executor


@dataclass(frozen=True, slots=True)
class Job:
    """One seed of one curve, and where and how often it is saved."""

    settings: Experiment
    seed: int
    checkpoint: Path
    checkpoint_seconds: float


class Outcome(NamedTuple):
    """What a finished job leaves."""

    rows: list[Row]
    models: dict[Which, dict[str, Tensor]]
    trouble: str | None  # why it ended before its time
    computed: dict[str, str]  # on what device, how, by which code, and when
    seconds: float  # on the wall, of all sittings
    clients: Scores  # what each client said of the last model, if it was asked


def compute(
    job: Job, on_news: Callable[[News], None], stopping: Callable[[], bool], hire: Hire | None = None
) -> Outcome | None:
    """One seed, from its checkpoint if there is one; None if it was stopped, and stands in its checkpoint. Its clients
    may live with workers that are hired. When one of those is lost, others take over, from the last checkpoint on."""
    if hire is None:
        return _compute(job, on_news, stopping, None)
    lost, since = 0, None
    while True:
        try:
            executor = at_once(_before(job.checkpoint)[0] or job.settings.run.executor)  # all have the same
            with hire(job.settings, job.seed, executor) as spread:
                return _compute(job, on_news, stopping, spread)
        except Lost as error:
            saved = job.checkpoint.stat().st_mtime_ns if job.checkpoint.exists() else None
            lost, since = (lost + 1 if saved == since else 1), saved
            if lost > MOST_LOST:
                kept = "; the last checkpoint is kept" if saved else ""
                raise RunError(f"{error}, {lost} times in a row{kept}") from error
            on_news(f"{error}: the run goes on from {'its last checkpoint' if saved else 'its beginning'}")


def _compute(
    job: Job, on_news: Callable[[News], None], stopping: Callable[[], bool], spread: Placing | None
) -> Outcome | None:
    trouble, checkpoint = None, job.checkpoint
    executor, spent, sittings = _before(checkpoint)
    began = monotonic() - spent
    task, simulation = job.settings.simulation(job.seed, executor, spread)
    device, run = simulation.server.model.device, job.settings.run
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    here, how = versions(), {"device": name, "precision": run.precision}
    settings = job.settings.only(job.seed).to_toml()
    made_with = {"settings": settings, "quafl": here["quafl"], "torch": here["torch"], "format": FORMAT, **how}
    computed = {**how, "code": here["code"], "date": here["date"], **own_code(job.settings)}

    def by_now(facts: dict[str, str]) -> dict[str, str]:
        """The executor may have changed; its name tells of all sittings."""
        return {**facts, "executor": simulation.executor}

    if checkpoint.exists():
        computed = joined(sittings, computed)
        free = SO_FAR.fullmatch(executor or "")  # to change
        take_up(checkpoint, simulation, made_with if free else by_now(made_with))
        on_news(simulation.rows[-1])
    due = monotonic() + job.checkpoint_seconds
    try:
        for row in simulation:
            if row is not None:
                on_news(row)
            stop = stopping()
            if stop or monotonic() > due:
                saving = monotonic()
                state = simulation.state()  # first: what it still has to compute is computed by the executor
                state = {"made_with": by_now(made_with), "computed": by_now(computed), "simulation": state}
                checkpoints.save(checkpoint, {**state, "seconds": saving - began})
                due = monotonic() + max(job.checkpoint_seconds, (monotonic() - saving) / CHECKPOINT_SHARE)
            if stop:
                return None
    except Diverged as error:
        trouble = f"training diverged: {error}; its rows so far are kept, try a smaller lr"
    last, best = (task.export(shown.model, shown.buffers) for shown in (simulation.last, simulation.best))
    models: dict[Which, dict[str, Tensor]] = {"last": last, "best": best}
    return Outcome(simulation.rows, models, trouble, by_now(computed), monotonic() - began, simulation.clients)


def _before(checkpoint: Path) -> tuple[str | None, float, dict[str, str]]:
    """Of earlier sittings: the executor, the seconds, and how it was computed."""
    state = checkpoints.load(checkpoint, "cpu", mapped=True) if checkpoint.exists() else {}
    return state.get("made_with", {}).get("executor"), state.get("seconds", 0.0), state.get("computed", {})


def own_code(settings: Experiment) -> dict[str, str]:
    """Which code of the user's own the numbers depend on, if on any."""
    sources = settings.sources()
    return {OWN: sources} if sources else {}


def take_up(checkpoint: Path, simulation: Simulation, made_with: dict[str, str] | None = None) -> None:
    """Go on from a checkpoint, if it was made with the same settings and versions."""
    here = simulation.server.model.device.type
    device = here if here == "cpu" else None  # a GPU's run can be looked at without one
    state = checkpoints.load(checkpoint, device, mapped=True)
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
