"""A run begins one client after another, and goes on with a faster executor as soon as a thread has made one."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import pytest
import torch
from test_executors import MODELS, VISITS, Looks, choice, network, trajectory
from torch import nn
from torch.nn import functional

from quafl import Lattice, Plan, Simulation, World
from quafl.core import QuAFL
from quafl.core.optim import sgd
from quafl.run import jobs
from quafl.run.jobs import Job, compute
from quafl.settings.reading import load
from quafl.sim import fleet
from quafl.sim.executors import Changing, Choice
from quafl.sim.executors import changing as changing_module
from quafl.sim.executors.changing import COMPILING, at_once
from quafl.sim.executors.choice import _apart
from quafl.tasks import Supervised

FIRST = VISITS[0]  # of six clients, 12 steps


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def changing(ways: Choice, may: Event | None = None, taken: int = 0) -> Changing:
    """As on a GPU, but uncompiled; the thread waits until it may."""
    apart = _apart(ways.task)  # type: ignore[arg-type]  # it can be computed together
    assert apart is not None
    prepare, first = ways.beside(apart), ways.make("sequential")
    return Changing(first, lambda: (may is None or may.wait(60)) and prepare(), taken, head_start=0)  # type: ignore[arg-type, return-value]


def ready(executor: Changing) -> None:
    assert executor._beside is not None
    executor._beside.join(60)


@pytest.mark.parametrize("model", ["dropout", "batch norm"])
def test_it_changes_once_to_one_that_takes_the_same_steps(model: str, caplog: pytest.LogCaptureFixture) -> None:
    task, may = network(MODELS[model]), Event()
    ways = choice(task, sgd(0.1), clients=6, sampled=3)
    mixed = changing(ways, may)
    names = []

    def listening(clients: Any, ids: Any, counts: Any) -> Any:
        after = mixed(clients, ids, counts)
        names.append(mixed.name)
        if len(names) == 1:
            may.set()
            ready(mixed)
        return after

    with caplog.at_level(logging.INFO, logger="quafl"):
        mine = trajectory(listening, task, sgd(0.1), VISITS)  # type: ignore[arg-type]  # it has no name
    theirs = trajectory(ways.make("sequential"), task, sgd(0.1), VISITS)
    torch.testing.assert_close(mine.tree(), theirs.tree(), rtol=2e-3, atol=2e-5)
    assert names[0] == "sequential for 12 steps (auto)"
    assert set(names[1:]) == {mixed.name}
    assert mixed.name in ("sequential for 12 steps then graph", "sequential for 12 steps then vectorised by 3")
    measured, changed = (record.getMessage() for record in caplog.records)
    assert measured.startswith("local steps a second: ")
    assert changed.startswith(f"local steps: {mixed.name} from here on, after ")


def test_steps_beside_the_thread_are_those_without_it() -> None:
    """The thread puts other tensors into a module, while the run computes with it: into one of its own."""
    task = network(MODELS["all of it"])
    ways = choice(task, sgd(0.1), clients=6, sampled=3)
    rounds = 0
    theirs = trajectory(ways.make("sequential"), task, sgd(0.1), [FIRST])
    generator = torch.get_rng_state()
    for _ in range(3):
        mixed = changing(ways)
        assert mixed._beside is not None
        while mixed._beside.is_alive():
            mine = trajectory(ways.make("sequential"), task, sgd(0.1), [FIRST])
            torch.testing.assert_close(mine.tree(), theirs.tree(), rtol=0, atol=0)
            rounds += 1
    assert rounds > 3
    assert torch.equal(torch.get_rng_state(), generator)


def test_what_was_found_fastest_is_remembered_and_alone_made(caplog: pytest.LogCaptureFixture) -> None:
    ways, found = choice(network(MODELS["dense"]), sgd(0.1), clients=6, sampled=3), []
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="quafl"):
            executor = changing(ways)
            ready(executor)
            trajectory(executor, ways.task, sgd(0.1), [FIRST])
        found.append(executor.name)
        measured = [record for record in caplog.records if "a second" in record.getMessage()]
    assert found[0] == found[1]
    assert found[0] in ("graph", "vectorised by 3"), "no step was taken before"
    assert not measured


def test_a_name_makes_the_executor_that_has_it() -> None:
    ways = choice(network(MODELS["dense"]), sgd(0.1), clients=6, sampled=3)
    made = ways.make("sequential for 12 steps then graph")
    assert (made.name, type(made).__name__) == ("sequential for 12 steps then graph", "Lanes")
    begun = ways.make("sequential for 9 steps (auto)")
    on_gpu = "sequential for 9 steps (auto)", "Changing"
    assert (begun.name, type(begun).__name__) == (on_gpu if torch.cuda.is_available() else ("sequential", "Sequential"))
    assert changing(ways, taken=9).name == "sequential for 9 steps (auto)"
    assert [at_once(name) for name in ("auto", "graph")] == ["auto at once", "graph"]
    assert ways.make(at_once("auto")).name == ways.make(at_once("sequential for 9 steps (auto)")).name == "sequential"
    with pytest.raises(ValueError, match="executor is 'faster', must be one of auto"):
        ways.make("sequential for 3 steps then faster")


def broken() -> Any:
    raise MemoryError("the device is full")


def broken_in_the_end() -> Any:
    return broken


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (None, "data-dependent control flow"),
        (broken, "the device is full"),
        (broken_in_the_end, "the device is full"),
    ],
)
def test_what_cannot_be_made_leaves_it_sequential_and_one_line_says_why(
    prepare: Callable[[], Any] | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = network(Looks)
    ways = choice(task, sgd(0.1), clients=6, sampled=3)
    with caplog.at_level(logging.WARNING, logger="quafl"):
        executor = changing(ways) if prepare is None else Changing(ways.make("sequential"), prepare, head_start=0)  # type: ignore[arg-type]
        ready(executor)
        trajectory(executor, task, sgd(0.1), VISITS)
    assert executor.name == "sequential"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "clients train one after another" in line
    assert why in line


def simulation(task: Supervised) -> Simulation:
    plan = Plan(until=60.0, every=20.0)
    return Simulation(task, 6, World(), QuAFL(sampled=3, local_steps=4), Lattice(bits=8), sgd(0.1), plan)


def test_a_run_that_changes_has_the_rows_of_one_that_does_not() -> None:
    task, may = network(MODELS["all of it"]), Event()
    ways = choice(task, sgd(0.1), clients=6, sampled=3)
    run = simulation(task)
    run._fleet.crew.execute = executor = changing(ways, may)  # type: ignore[attr-defined]
    for number, _ in enumerate(run):
        if number == 2:
            before = run.executor
            may.set()
            ready(executor)
    assert before.endswith("steps (auto)")
    assert run.executor.startswith(before.replace(" (auto)", " then "))
    for mine, theirs in zip(run.rows, filter(None, simulation(task)), strict=True):
        assert mine == pytest.approx(theirs, rel=0.05, abs=0.02)
        assert mine["local_steps"] == theirs["local_steps"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_auto_begins_at_once_and_changes() -> None:
    task = network(MODELS["all of it"])
    plan = Plan(until=1e6, every=1e6)
    run = Simulation(
        task, 6, World(), QuAFL(sampled=3, local_steps=4), Lattice(bits=8), sgd(0.1), plan, executor="auto"
    )
    rounds, began = iter(run), monotonic()
    next(rounds)
    assert run.executor.startswith("sequential for ")
    while "then" not in run.executor and monotonic() - began < 200:
        next(rounds)
    before, kind = run.executor.split(" then ")
    assert int(before.split()[2]) > 0
    assert kind == "graph" or kind.startswith("vectorised by ")


class Begins:
    """A curve of a settings file, whose "auto" begins one client after another here, too."""

    def __init__(self, settings: Any, may: Event) -> None:
        self._settings, self._may = settings, may
        self.made: list[Simulation] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._settings, name)

    def simulation(self, seed: int, executor: str | None = None, spread: Any = None) -> Any:
        task, run = self._settings.simulation(seed, executor, spread)
        ways = choice(task, sgd(0.2), clients=6, sampled=3)
        if executor is None or executor.endswith("(auto)"):
            taken = int(executor.split()[2]) if executor else 0
            run._fleet.crew.execute = changing(ways, self._may, taken)
        self.made.append(run)
        return task, run


def test_a_checkpoint_says_who_took_the_steps_and_is_continued_by_the_same(tmp_path: Path) -> None:
    settings = tmp_path / "run.toml"
    settings.write_text(
        """
        label = "some"
        task = { name = "digits" }
        clients = { count = 6 }
        algorithm = { name = "quafl", sampled = 3, lr = 0.2 }
        run = { until = 200.0, every = 20.0, seeds = [0] }
        """
    )
    may = Event()
    curve = Begins(load(str(settings))[0], may)
    job = Job(curve, 0, tmp_path / "checkpoint.pt", 0.0)  # type: ignore[arg-type]

    def sitting(stop: Callable[[int], bool]) -> Any:
        asked = iter(range(10**6))
        return compute(job, lambda word: None, lambda: stop(next(asked)))

    names = []
    assert sitting(lambda number: number == 3) is None
    names.append(jobs._before(job.checkpoint)[0])
    assert sitting(lambda number: number == 3) is None
    names.append(jobs._before(job.checkpoint)[0])

    def change(number: int) -> bool:
        if number == 3:
            may.set()
            ready(curve.made[-1]._fleet.crew.execute)  # type: ignore[attr-defined]
        return number == 6

    assert sitting(change) is None
    names.append(jobs._before(job.checkpoint)[0])
    outcome = sitting(lambda number: False)
    first, second, third = map(str, names)
    assert [name.split()[-1] for name in (first, second)] == ["(auto)", "(auto)"]
    assert 0 < int(first.split()[2]) < int(second.split()[2]) < int(third.split()[2])
    assert third.endswith(("then graph", "then vectorised by 3"))
    assert outcome.computed["executor"] == third


ENDS = """
import sys
from threading import Event
from quafl.core.optim import sgd
from test_changing import MODELS, changing, choice, network
from quafl.sim.executors import Changing
ways = choice(network(MODELS["dense"]), sgd(0.1), clients=6, sampled=3)
prepare, begun = ways.beside(ways.task), Event()

def for_ever():
    while True:
        prepare()
        begun.set()

executor = Changing(ways.make("sequential"), for_ever, head_start=0)
waiting = changing(ways)  # for its turn
begun.wait(60)
print(executor.name)
"""


def test_a_process_ends_while_the_thread_is_at_work() -> None:
    ends = [sys.executable, "-c", ENDS]
    ended = subprocess.run(ends, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "sequential for 0 steps (auto)\n", "")


def test_the_run_has_python_to_itself_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = choice(network(MODELS["dense"]), sgd(0.1), clients=6, sampled=3)
    now = 100.0
    monkeypatch.setattr(changing_module, "monotonic", lambda: now)
    executor = Changing(ways.make("sequential"), ways.beside(_apart(ways.task)), head_start=2.0)  # type: ignore[arg-type]
    trajectory(executor, ways.task, sgd(0.1), [FIRST])
    assert executor._beside is not None
    assert executor._beside.ident is None
    now = 102.0
    trajectory(executor, ways.task, sgd(0.1), [FIRST])
    ready(executor)
    trajectory(executor, ways.task, sgd(0.1), [FIRST])
    assert executor.name.startswith("sequential for 24 steps then ")


def test_the_name_counts_no_step_that_was_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for ahead in False, True:
        monkeypatch.setitem(fleet.AHEAD, "cpu", ahead)
        task, may = network(MODELS["dense"]), Event()
        parts = 6, World(), QuAFL(sampled=3, local_steps=4), Lattice(bits=2, spread=1.0), sgd(0.1)
        run = Simulation(task, *parts, Plan(until=60.0, every=20.0))
        run._fleet.crew.execute = changing(choice(task, sgd(0.1), clients=6, sampled=3), may)  # type: ignore[attr-defined]
        list(run)
        may.set()
        names.append(run.executor)
    assert names[0] == names[1]
    assert not names[0].startswith("sequential for 0 ")


def test_what_is_drawn_is_not_drawn_by_the_thread() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(64, 10)

        def forward(self, x: Any) -> Any:
            return self.last(functional.dropout(x.flatten(1), 0.5))

    ways = choice(network(Draws), sgd(0.1), clients=6, sampled=3)
    before = torch.get_rng_state()
    executor = changing(ways)
    ready(executor)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_thread_whose_run_is_gone_before_its_turn_does_nothing() -> None:
    begun: list[int] = []

    def prepare() -> Any:
        begun.append(1)
        return broken

    first = choice(network(MODELS["dense"]), sgd(0.1), clients=6, sampled=3).make("sequential")
    with COMPILING:
        executor = Changing(first, prepare, head_start=0)  # type: ignore[arg-type]  # it is one
        thread = executor._beside
        assert thread is not None
        del executor
    thread.join(60)
    assert not begun


def test_python_is_shared_out_as_before_when_the_thread_has_ended() -> None:
    before, began = sys.getswitchinterval(), monotonic()
    ready(changing(choice(network(MODELS["dense"]), sgd(0.1), clients=6, sampled=3)))
    assert sys.getswitchinterval() == before
    assert monotonic() - began < 30
