"""Rounds that are begun before it is known that the one before went well, as on a GPU: the same run, bit for bit."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from test_spread import ALGORITHMS, CODECS

from quafl import Lattice, Plan, Simulation, World, momentum, sgd
from quafl.codec import Identity
from quafl.codec.seams import Codec, Codecs
from quafl.core import CA2FL, FAVANO, FedAsync, FedNova, QuAFL
from quafl.core.seams import Algorithm, Optimizer, Task
from quafl.sim import Diverged, fleet
from quafl.tasks import Quadratic, Supervised, digits, models, partition

CLIENTS = 9
PLAN = Plan(until=60.0, every=20.0)


def learning(device: str) -> Supervised:
    train, test, *_ = digits()
    mine, judged = ((inputs[:count], labels[:count]) for (inputs, labels), count in ((train, 180), (test, 50)))
    hands = partition.iid(mine, CLIENTS)
    return Supervised(models.mlp(64, 8, 10), hands, test=judged, batch_size=8, device=torch.device(device))


@pytest.fixture(scope="module")
def task() -> Supervised:
    return learning("cpu")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Rounds that are begun ahead, that are run at once, and that are taken back."""
    found: Counter[str] = Counter()

    def counting(owner: type, name: str, what: str) -> None:
        before = getattr(owner, name)

        def count(self: Any, *arguments: Any) -> Any:
            result = before(self, *arguments)
            found[what] += result is not None or what == "taken back"
            return result

        monkeypatch.setattr(owner, name, count)

    counting(Simulation, "_attempt", "begun")
    counting(Simulation, "_run", "at once")
    counting(fleet.SimulatedFleet, "back", "taken back")
    return found


def simulation(
    task: Task,
    algorithm: Algorithm,
    codec: Codec | Codecs,
    world: World = World(slow=0.3),  # noqa: B008  # immutable
    optimizer: Optimizer | None = None,
    plan: Plan = PLAN,
) -> Simulation:
    return Simulation(task, CLIENTS, world, algorithm, codec, optimizer or sgd(0.3), plan)


def ended(run: Simulation) -> Any:
    """All that there is at the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a lattice that is of little use
        list(run)
    return run.rows, run.state(), run.time


def same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, torch.Tensor):
        return bool(torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0)))
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list | tuple):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return repr(mine) == repr(theirs)  # NaN, too


MORE: dict[str, Algorithm] = {
    "FAVANO": FAVANO(sampled=4, local_steps=3),
    "FedAsync": FedAsync(sampled=2),
    "FedNova": FedNova(sampled=4, local_steps=2),
    "CA2FL": CA2FL(sampled=3, local_steps=2),
    "QuAFL, averaging at the server": QuAFL(4, 3, client_averaging=0.5, server_averaging=0.5),
}


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
@pytest.mark.parametrize("name", [*ALGORITHMS, *MORE])
def test_a_run_with_rounds_begun_ahead_is_the_run_without(
    name: str, codec: Codec | Codecs, task: Supervised, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = (ALGORITHMS | MORE)[name]
    theirs = ended(simulation(task, algorithm, codec))
    assert not counted["begun"]
    monkeypatch.setitem(fleet.AHEAD, "cpu", True)
    assert same(ended(simulation(task, algorithm, codec)), theirs)
    assert counted["begun"]


@pytest.mark.parametrize(
    ("world", "optimizer"),
    [
        (World(slow=0.3, unreachable=0.2), None),
        (World(present_for=10.0, away_for=10.0), None),
        (World(slow=0.3), momentum(0.1)),
        (World(slow=0.3, up_bandwidth=1e3, down_bandwidth=1e3), None),
    ],
    ids=["contacts lost", "clients come and go", "momentum", "slow links"],
)
def test_so_it_is_in_other_worlds(
    world: World,
    optimizer: Optimizer | None,
    task: Supervised,
    counted: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    algorithm, codec = QuAFL(sampled=4, local_steps=3, wait=1.0), Lattice(bits=3, spread=3.0)
    theirs = ended(simulation(task, algorithm, codec, world, optimizer))
    monkeypatch.setitem(fleet.AHEAD, "cpu", True)
    assert same(ended(simulation(task, algorithm, codec, world, optimizer)), theirs)
    assert bool(counted["begun"]) == (world.up_bandwidth is None), "octets of repairs would tell the time"


def test_rounds_that_went_wrong_are_taken_back_and_run_again(
    task: Supervised, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lattice is too fine for float32, or a key is too far away; after that, fewer rounds are begun ahead."""
    algorithm, codec = QuAFL(sampled=4, local_steps=3), Lattice(bits=2, spread=1.0)
    theirs = ended(simulation(task, algorithm, codec))
    monkeypatch.setitem(fleet.AHEAD, "cpu", True)
    counted.clear()
    mine = ended(simulation(task, algorithm, codec))
    assert same(mine, theirs)
    assert counted["taken back"] > 1
    assert counted["at once"] > counted["taken back"]
    assert mine[1]["totals"]["refined"] > 0


def test_a_client_whose_progress_is_not_finite_is_left_out_likewise(
    counted: Counter[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train, test, *_ = digits()
    hands = [(inputs.clone(), labels) for inputs, labels in partition.iid((train[0][:180], train[1][:180]), CLIENTS)]
    hands[1][0].fill_(torch.nan)
    broken = Supervised(models.mlp(64, 8, 10), hands, test=test, batch_size=8)

    def run() -> Any:
        return ended(simulation(broken, QuAFL(sampled=4), Lattice(bits=6)))

    theirs = run()
    (said,) = [record.getMessage() for record in caplog.records]
    caplog.clear()
    monkeypatch.setitem(fleet.AHEAD, "cpu", True)
    assert same(run(), theirs)
    assert [record.getMessage() for record in caplog.records] == [said]
    assert counted["taken back"] > 0


def test_a_run_that_diverges_does_so_in_the_same_round(counted: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    task = Quadratic(torch.ones(40), torch.randn(CLIENTS, 40, generator=torch.Generator().manual_seed(0)))
    found = []
    for ahead in False, True:
        monkeypatch.setitem(fleet.AHEAD, "cpu", ahead)
        run = simulation(task, QuAFL(sampled=4), Identity(), optimizer=sgd(1e5), plan=Plan(until=500.0, every=1.0))
        with pytest.raises(Diverged) as raised:
            list(run)
        found.append((str(raised.value), len(run.rows), run.server.round))
    assert found[0] == found[1]
    assert counted["begun"]


def test_a_checkpoint_knows_nothing_of_a_round_that_was_begun_ahead(
    task: Supervised, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, codec = QuAFL(sampled=4, local_steps=3, weighted=True), Lattice(bits=3, spread=3.0)
    plain = simulation(task, algorithm, codec)
    theirs = [plain.state() for _ in plain]
    monkeypatch.setitem(fleet.AHEAD, "cpu", True)
    run = simulation(task, algorithm, codec)
    mine = [run.state() for _ in run]
    assert same(mine, theirs)
    assert counted["taken back"] > 5
    again = simulation(task, algorithm, codec)
    again.restore(mine[len(mine) // 2])
    assert same(ended(again), (plain.rows, plain.state(), plain.time))


def test_rounds_are_not_begun_ahead_where_all_models_are_looked_at_in_each(
    task: Supervised, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fleet.AHEAD, "cpu", True)
    ended(simulation(task, QuAFL(sampled=4), Lattice(bits=6), plan=Plan(until=30.0, every=10.0, potential=True)))
    assert not counted["begun"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
@pytest.mark.parametrize("name", ["QuAFL", "Calibrated", "FedAvg"])
def test_so_it_is_on_a_gpu(
    name: str, codec: Codec | Codecs, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which begins rounds ahead by itself."""
    task = learning("cuda")
    mine = ended(simulation(task, ALGORITHMS[name], codec))
    assert counted["begun"]
    counted.clear()
    monkeypatch.setitem(fleet.AHEAD, "cuda", False)
    assert same(mine, ended(simulation(task, ALGORITHMS[name], codec)))
    assert not counted["begun"]
