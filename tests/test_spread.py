"""Clients that live with workers: the same rows as in one process, bit for bit, whatever the number of workers."""

import csv
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, repeat
from math import inf
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from quafl import BFloat16, Codecs, Defence, Difference, Lattice, Plan, Simulation, TopK, World, momentum, sgd
from quafl.codec import Identity
from quafl.codec.qsgd import QSGD
from quafl.codec.seams import Codec, Packet
from quafl.core import SCAFFOLD, Calibrated, FedAvg, FedBuff, QuAFL
from quafl.core.conversation import Look, Sleep
from quafl.core.seams import Algorithm, Optimizer
from quafl.record.summary import RunError
from quafl.run.folders import prepare
from quafl.run.jobs import MOST_LOST, Job, compute
from quafl.run.pool import run as run_all
from quafl.settings.reading import load
from quafl.sim.crew import Crew
from quafl.sim.fleet import TOGETHER
from quafl.sim.spread import NOTHING, Call, Lost, Spread, Worker
from quafl.sim.store import Store
from quafl.sim.world import Absence
from quafl.tasks import Quadratic, Supervised, digits, models, partition

CLIENTS = 9
NARROW = Lattice(bits=2, spread=2.5)  # which needs repairs
QUAFL = QuAFL(sampled=4, local_steps=3, wait=2.0, weighted=True)
ALGORITHMS: dict[str, Algorithm] = {
    "QuAFL": QUAFL,
    "QuAFL, some too late": QuAFL(sampled=4, local_steps=3, patience=6.0),
    "Calibrated": Calibrated(sampled=4, local_steps=3, defence=Defence(clip=2.0)),
    "FedAvg": FedAvg(sampled=4, local_steps=2),
    "FedBuff": FedBuff(sampled=4, local_steps=2),
    "SCAFFOLD": SCAFFOLD(sampled=4, local_steps=2),
}
CODECS: dict[str, Codec | Codecs] = {
    "narrow lattice": NARROW,
    "difference up": Codecs(up=Difference(bits=2), down=Lattice(bits=4)),
    "top-k with feedback": Codecs(up=TopK(share=0.1), down=Lattice(bits=4)),
    "QSGD": QSGD(bits=8),
    "identity": Identity(),
}


class Here:
    """Workers in this process, which find some time for what is of use meanwhile; one may be lost."""

    def __init__(self, workers: list[Worker], lives: float = float("inf")) -> None:
        self._workers, self._lives = workers, lives
        self.spare: Callable[[], int] = partial(Random(0).randint, 0, 9)  # steps that one has time for
        self._under_way: list[tuple[int, Call]] = []  # when all have answered

    def _do(self, worker: int, call: Call) -> bytes:
        method, contents = call
        return self._workers[worker].do(method, *contents)

    def __len__(self) -> int:
        return len(self._workers)

    def share(self, content: bytes) -> bytes:
        return content

    def ask(self, asked: Mapping[int, Call], meanwhile: Mapping[int, Iterator[Call]] = NOTHING) -> dict[int, bytes]:
        self._lives -= 1
        if self._lives < 0:
            raise Lost("a worker was lost")
        for worker, call in self._under_way:
            self._do(worker, call)
        found = {worker: self._do(worker, call) for worker, call in asked.items()}
        self._under_way = []
        for worker, calls in meanwhile.items():
            for call in islice(calls, self.spare()):
                self._do(worker, call)
            self._under_way += [(worker, call) for call in islice(calls, 1)]
        return found

    def tell(self, told: Mapping[int, Call]) -> None:
        self.ask(told)


RESTLESS = World(slow=0.25, unreachable=0.1, present_for=40.0, away_for=10.0)  # some are not reached


def parts(
    algorithm: Algorithm,
    codec: Codec | Codecs,
    optimizer: Optimizer,
    world: World = RESTLESS,
    kind: type[Quadratic] = Quadratic,
) -> tuple[Any, ...]:
    """Of a simulation."""
    task = kind(
        torch.linspace(0.2, 1.0, 1100),
        torch.randn(CLIENTS, 1100, generator=torch.Generator().manual_seed(0)),
        noise=0.3,
    )
    return task, CLIENTS, world, algorithm, codec, optimizer, Plan(until=60.0, every=6.0, potential=True)


def simulation(
    algorithm: Algorithm,
    codec: Codec | Codecs,
    workers: int,
    optimizer: Optimizer,
    world: World = RESTLESS,
    kind: type[Quadratic] = Quadratic,
) -> Simulation:
    mine = parts(algorithm, codec, optimizer, world, kind)

    def spread(store: Store) -> Spread:
        crews = [Simulation(*mine).crew for _ in range(workers)]
        assert all(isinstance(crew, Crew) for crew in crews)
        return Spread(Here([Worker(crew, torch.device("cpu")) for crew in crews]), store)  # type: ignore[arg-type]  # they are

    return Simulation(*mine, spread=spread if workers else None)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_workers_change_nothing(algorithm: Algorithm, codec: Codec | Codecs) -> None:
    optimizer = momentum(0.05)
    alone = simulation(algorithm, codec, 0, optimizer)
    wanted = [row for row in alone if row is not None]
    assert wanted[-1]["bytes_up"] > 0
    rows = [row for row in simulation(algorithm, codec, 3, optimizer) if row is not None]
    assert rows == wanted


def test_a_run_goes_on_from_its_checkpoint_with_another_number_of_workers() -> None:
    parts = ALGORITHMS["Calibrated"], NARROW
    wanted = [row for row in simulation(*parts, 0, sgd(0.05)) if row is not None]
    run = simulation(*parts, 2, sgd(0.05))
    for workers in 3, 0, 4:
        for _ in islice(run, 8):
            pass
        state = run.state()
        run = simulation(*parts, workers, sgd(0.05))
        run.restore(state)
    assert [row for row in run if row is not None][-1] == wanted[-1]


@dataclass(frozen=True, slots=True)
class Drawing(BFloat16):
    """From the generator itself."""

    def encode(self, x: Tensor, rng: torch.Generator, **more: Any) -> Packet:
        torch.rand(3, generator=rng)
        return BFloat16.encode(self, x, rng, **more)


def test_a_codec_whose_rows_cannot_be_encoded_apart_is_refused() -> None:
    codec = Codecs(up=Drawing(), down=Lattice(bits=4))
    with pytest.raises(ValueError, match=r"draw by quafl.codec.packets.draw_seeds, or leave run.workers at 1"):
        list(simulation(ALGORITHMS["QuAFL"], codec, 2, sgd(0.05)))


def test_answers_at_once_and_later_ones_are_drawn_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many clients have room to be computed together."""
    monkeypatch.setitem(TOGETHER, "cpu", 2 * 1100)
    alone = simulation(Mixed(sampled=4, local_steps=3, wait=2.0), NARROW, 0, sgd(0.05))
    wanted = [row for row in alone if row is not None]
    for workers in 1, 2:
        spread = simulation(Mixed(sampled=4, local_steps=3, wait=2.0), NARROW, workers, sgd(0.05))
        assert [row for row in spread if row is not None] == wanted


class Mixed(QuAFL):
    """Who has not taken a step takes two before answering; the others answer at once."""

    def hear(self, client: Any, down: Any) -> Any:
        return replace(client, budget=torch.where(client.taken == 0, 2, client.taken))


def test_what_idle_workers_do_early_is_what_they_are_asked_for_next() -> None:
    """Clients that are always there and answer at once: who is contacted next, and after how many steps, is known."""
    run = simulation(replace(QUAFL, local_steps=50, wait=4.0), NARROW, 2, sgd(0.05), World(slow=0.25))
    run.crew._workers.spare = lambda: 1000  # type: ignore[attr-defined]  # a Spread, over Here
    crews = [worker._crew for worker in run.crew._workers._workers]  # type: ignore[attr-defined]  # likewise
    asked, missed, rounds = 0, 0, iter(run)
    for _ in range(9):
        before = {client: int(one.taken) for crew in crews for client, one in crew._early.items()}
        steps = run.crew._store._numbers["steps"].clone()  # type: ignore[attr-defined]  # likewise
        next(rounds)
        taken = run.crew._store._numbers["steps"] - steps  # type: ignore[attr-defined]  # likewise
        asked += sum(int(taken[client]) == count for client, count in before.items())
        missed += sum(int(taken[client]) != count for client, count in before.items())
    assert asked > 5
    assert not missed


class Skips(QuAFL):
    """A round in which too few are there tells nobody anything."""

    def round(self, server: Any, rng: Any) -> Any:
        clients = yield Look()
        if len(clients.present) < 6:
            yield Sleep(1.0)
            return replace(server, round=server.round + 1)
        return (yield from super().round(server, rng))


class Waits(QuAFL):
    def round(self, server: Any, rng: Any) -> Any:
        while len((yield Look()).present) < 4:
            yield Sleep(1.0)
        return (yield from super().round(server, rng))


class Refuses(QuAFL):
    def round(self, server: Any, rng: Any) -> Any:
        if len((yield Look()).present) < 4:
            raise ValueError("too few are there")
        return (yield from super().round(server, rng))


GONE_AT_THE_END = World(slow=0.25, absences=[Absence(60.0, inf)])  # of a run
RARE = World(slow=0.25, present_for=20.0, away_for=10.0)


@pytest.mark.parametrize(("kind", "world"), [(Skips, RARE), (Waits, GONE_AT_THE_END), (Refuses, GONE_AT_THE_END)])
def test_a_round_that_is_never_begun_does_no_harm(kind: type[QuAFL], world: World) -> None:
    algorithm = kind(sampled=4, local_steps=5, wait=4.0)
    wanted = [row for row in simulation(algorithm, NARROW, 0, sgd(0.05), world) if row is not None]
    assert [row for row in simulation(algorithm, NARROW, 2, sgd(0.05), world) if row is not None] == wanted


class Noting(Quadratic):
    """What its clients have read."""

    read: ClassVar[set[tuple[int, int]]] = set()

    def batch(self, client: int, step: int) -> Any:
        self.read.add((client, step))
        return super().batch(client, step)


class Scarce(Noting):
    """There is nothing else to be read."""

    missed: ClassVar[set[tuple[int, int]]] = set()

    def batch(self, client: int, step: int) -> Any:
        if (client, step) not in self.read:
            self.missed.add((client, step))
            raise OSError("no such file")
        return super().batch(client, step)


def test_a_step_that_fails_is_of_no_matter_before_it_is_due() -> None:
    made = replace(QUAFL, local_steps=50), NARROW
    wanted = [row for row in simulation(*made, 0, sgd(0.05), World(), Noting) if row is not None]
    assert [row for row in simulation(*made, 2, sgd(0.05), World(), Scarce) if row is not None] == wanted
    assert Scarce.missed  # of the round after the last


def test_a_client_that_has_stepped_early_still_learns_what_has_become_of_its_answer() -> None:
    made = ALGORITHMS["Calibrated"], NARROW, 0, sgd(0.05)
    wanted = [row for row in simulation(*made) if row is not None]
    run = simulation(*made)
    crew, taken = run.crew, run.crew.taken

    def early(ids: Tensor, up: Any) -> None:
        for client in ids.split(1):
            crew.step_early(client)  # type: ignore[attr-defined]  # it is a Crew
        taken(ids, up)

    crew.taken = early  # type: ignore[method-assign]  # of this crew alone
    assert [row for row in run if row is not None] == wanted


def test_clients_live_with_one_worker_each() -> None:
    run = simulation(ALGORITHMS["QuAFL"], NARROW, 2, sgd(0.05))
    for _ in run:
        pass
    workers = run.crew._workers._workers  # type: ignore[attr-defined]  # it is a Spread, over Here
    known = [set(worker._crew.store._known) for worker in workers]
    assert [{client % 2 for client in own} for own in known] == [{0}, {1}]
    assert run.crew.octets > 0  # type: ignore[attr-defined]  # likewise


def test_a_task_keeps_some_clients_data() -> None:
    hands = partition.dirichlet(digits().train, 6, alpha=0.3, seed=0)
    whole, part = (Supervised(models.mlp(64, 8, 10), hands, test=digits().test, batch_size=8) for _ in range(2))
    mine = torch.tensor([1, 4])
    part.keep(mine)
    for client in mine.tolist():
        for step in 0, 7:
            for one, other in zip(whole.batch(client, step), part.batch(client, step), strict=True):
                assert torch.equal(one, other)
    assert len(part._hands.all[1]) == sum(part.examples(client) for client in mine.tolist())  # type: ignore[union-attr]  # Held


def curve(tmp_path: Path, workers: int, until: float = 40.0, clients: int = 12) -> Any:
    settings = tmp_path / "curve.toml"
    settings.write_text(
        f"""
        label = "some"
        task = {{ name = "digits", partition = "dirichlet" }}
        clients = {{ count = {clients} }}
        algorithm = {{ name = "calibrated", sampled = {min(5, clients)}, lr = 0.2 }}
        run = {{ until = {until}, every = 10.0, seeds = [0], workers = {workers} }}
        """
    )
    return load(str(settings))


def test_when_workers_are_lost_others_take_over_but_not_for_ever(tmp_path: Path) -> None:
    """The first workers live long enough for some checkpoints, the next ones to the end; others never get that far."""
    (settings,) = curve(tmp_path, 2)
    told: list[Any] = []

    def job(name: str) -> Job:
        return Job(settings, 0, tmp_path / f"{name}.pt", 0.0)

    @contextmanager
    def hire(experiment: Any, seed: int, executor: str | None) -> Iterator[Any]:
        crews = [experiment.simulation(seed, executor)[1].crew for _ in range(2)]
        workers = [Worker(crew, torch.device("cpu")) for crew in crews]
        yield lambda store: Spread(Here(workers, next(lives)), store)

    wanted = compute(job("alone"), lambda word: None, lambda: False)
    lives = iter([60, 10**9])
    found = compute(job("lost"), told.append, lambda: False, hire)
    assert wanted is not None
    assert found is not None
    assert found.rows == wanted.rows
    assert [word for word in told if isinstance(word, str)] == [
        "a worker was lost: the run goes on from its last checkpoint"
    ]
    lives = repeat(2)
    with pytest.raises(RunError, match=f"lost, {MOST_LOST + 1} times in a row"):
        compute(job("again"), lambda word: None, lambda: False, hire)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "rows.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def is_ours(pid: int) -> bool:
    """Started by this process, or by one that it has started; another cluster here has nothing to do with us."""
    while pid not in (0, os.getpid()):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid != 0


def test_real_workers_and_one_of_them_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray")
    (few,) = prepare(curve(tmp_path, 2, clients=1, until=10.0), tmp_path / "few", overwrite=False)
    run_all([few], on_news=lambda job, word: None)
    assert rows(few.path)[-1]["contacts"] != "0"  # one of the workers has no client
    (alone,) = prepare(curve(tmp_path, 1), tmp_path / "alone", overwrite=False)
    run_all([alone], on_news=lambda job, word: None, processes=1)
    wanted, told, killed = rows(alone.path), [], []

    def news(job: Job, word: Any) -> None:
        told.append(word)
        if not isinstance(word, str) and word["time"] >= 20 and not killed:
            found = subprocess.run(["pgrep", "-f", "^ray::Actor"], capture_output=True, text=True, check=True)
            killed.append(next(pid for pid in map(int, found.stdout.split()) if is_ours(pid)))
            os.kill(killed[0], signal.SIGKILL)

    (four,) = prepare(curve(tmp_path, 4), tmp_path / "four", overwrite=False)
    run_all([four], on_news=news, checkpoint_seconds=0.0)
    assert killed
    assert any("a worker was lost" in word for word in told if isinstance(word, str))
    assert rows(four.path) == wanted
