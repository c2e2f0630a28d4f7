"""Every algorithm over the same small problems, and each against a hand computation."""

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from worlds import NEVER, steady, world

import quafl
from quafl import Absence, FedAvg, FedBuff, FedNova, Lattice, Plan, QuAFL, Simulation, adam, momentum, sgd
from quafl.codec import QSGD, Identity, wire
from quafl.codec.directions import codecs_for
from quafl.core.seams import Algorithm, Codec, Optimizer, Task
from quafl.record import checkpoints
from quafl.record.rows import Row
from quafl.sim import Diverged, World
from quafl.sim.speeds import Constant
from quafl.tasks import Quadratic, Supervised, digits, partition

TABLE: dict[str, tuple[Callable[..., Any], Codec]] = {
    "QuAFL": (QuAFL, Lattice(bits=6)),
    "QuAFL weighted": (lambda **counts: QuAFL(weighted=True, **counts), Lattice(bits=6)),
    "QuAFL without averaging": (
        lambda **counts: QuAFL(server_averaging=0.0, client_averaging=0.0, **counts),
        Lattice(bits=6),
    ),
    "FedAvg": (FedAvg, Lattice(bits=6)),
    "FedBuff": (FedBuff, QSGD(bits=8)),
    "FedBuff stale": (lambda **counts: FedBuff(staleness=True, server_lr=0.8, **counts), QSGD(bits=8)),
    "FedNova": (FedNova, Lattice(bits=6)),
}
EACH = pytest.mark.parametrize(("make", "codec"), TABLE.values(), ids=TABLE.keys())


def quadratic(n: int, dim: int = 30, spread: float = 0.0, noise: float = 0.0) -> Quadratic:
    centers = 1 + spread * torch.randn(n, dim, generator=torch.Generator().manual_seed(3))
    return Quadratic(torch.linspace(0.2, 1.0, dim), centers, noise=noise)


def simulation(
    task: Task, n: int, algorithm: Algorithm, codec: Codec, optimizer: Optimizer | None = None, **changes: Any
) -> Simulation:
    plan = Plan(until=changes.pop("until", 400.0), every=changes.pop("every", 40.0), seed=changes.pop("seed", 0))
    return Simulation(task, n, World(**changes), algorithm, codec, optimizer or sgd(0.1), plan)


def rows(run: Simulation) -> list[Row]:
    for _ in run:
        pass
    return run.rows


@EACH
@pytest.mark.parametrize("optimizer", [sgd(0.1), momentum(0.01), adam(0.03)], ids=["sgd", "momentum", "adam"])
def test_finds_the_minimum_that_all_clients_share(
    make: Callable[..., Algorithm], codec: Codec, optimizer: Optimizer
) -> None:
    run = simulation(quadratic(8), 8, make(sampled=3, local_steps=4), codec, optimizer, until=800.0)
    reached = rows(run)
    assert reached[-1]["distance"] < 0.3 * reached[0]["distance"]


@EACH
def test_learns_real_digits_from_clients_with_few_classes(make: Callable[..., Algorithm], codec: Codec) -> None:
    torch.manual_seed(0)
    result = quafl.simulate(
        model=nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)),
        clients=partition.by_class(digits().train, 10, pieces=4),
        test=digits().test,
        algorithm=make(sampled=5, local_steps=5),
        codec=codec,
        optimizer=sgd(0.3),
        until=400.0,
        evaluations=2,
    )
    assert result.rows[-1]["accuracy"] > 0.6
    assert result.model[1].running_mean.abs().sum() > 0  # the buffers have travelled
    assert int(result.model[1].num_batches_tracked) == 0  # and the counters have not


@EACH
def test_the_same_seed_gives_the_same_rows_and_another_gives_others(
    make: Callable[..., Algorithm], codec: Codec
) -> None:
    first, second, other = (
        rows(simulation(quadratic(6, noise=0.3), 6, make(sampled=3), codec, seed=seed, until=150.0))
        for seed in (4, 4, 5)
    )
    assert first == second
    assert [row["loss"] for row in first] != [row["loss"] for row in other]


STRANGE = {
    "losses": {"unreachable": 0.3, "slow_step": 20.0},
    "churn": {"present_for": 30.0, "away_for": 30.0},
    "bandwidth": {"up_bandwidth": 100.0, "down_bandwidth": 300.0},
}


@EACH
@pytest.mark.parametrize("changes", STRANGE.values(), ids=STRANGE.keys())
def test_a_run_that_was_left_and_taken_up_again_has_the_same_rows(
    make: Callable[..., Algorithm], codec: Codec, changes: dict[str, Any], tmp_path: Path
) -> None:
    def fresh() -> Simulation:
        task = quadratic(6, spread=1.0, noise=0.3)
        return simulation(task, 6, make(sampled=3, patience=60.0), codec, adam(0.02), until=300.0, **changes)

    straight = rows(fresh())
    for stop in 1, 5:
        left = fresh()
        for _ in zip(range(1 + stop), left, strict=False):
            pass
        checkpoints.save(tmp_path / "checkpoint.pt", left.state())
        again = fresh()
        again.restore(checkpoints.load(tmp_path / "checkpoint.pt"))
        assert rows(again) == straight


@EACH
def test_a_network_with_batch_norm_and_dropout_is_taken_up_again_bit_for_bit(
    make: Callable[..., Algorithm], codec: Codec
) -> None:
    def fresh() -> Simulation:
        torch.manual_seed(0)
        layers = nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 10)
        task = Supervised(nn.Sequential(*layers), partition.by_class(digits().train, 6), test=digits().test)
        return simulation(task, 6, make(sampled=3), codec, momentum(0.05), until=100.0, every=25.0)

    left, again = fresh(), fresh()
    for _ in zip(range(3), left, strict=False):
        pass
    again.restore(left.state())
    assert rows(again) == rows(fresh())


@EACH
def test_bytes_counted_are_the_bytes_of_the_messages(make: Callable[..., Algorithm], codec: Codec) -> None:
    if isinstance(codec, Lattice):
        codec = Lattice(bits=6, resolution=10.0)  # so wide that nothing needs a repair
    w = world(quadratic(6, dim=3000), 6, make(sampled=3, patience=inf), codec=codec, latency=1.0)
    w.rounds(5)
    up, down = (
        len(wire.to_bytes(way.encode(torch.zeros(3000), torch.Generator()))) for way in codecs_for(w.algorithm, codec)
    )
    answered = w.fleet.totals.contacts
    asked = answered + w.fleet.totals.lost + len(w.fleet._traffic)
    assert w.fleet.totals.up == answered * up
    assert w.fleet.totals.down == asked * down


@EACH
def test_a_client_that_leaves_keeps_its_state_and_comes_back_with_a_stale_base(
    make: Callable[..., Algorithm], codec: Codec
) -> None:
    """Client 0 is away from 50 to 250; what it knows does not change in between, and then does."""
    away, task = [Absence(50.0, 250.0, [0])], quadratic(3, spread=1.0)
    run = simulation(task, 3, make(sampled=2, patience=30.0), codec, absences=away, step_law="constant")
    left, back, steps = list[Tensor](), list[Tensor](), list[int]()
    for _ in run:
        mine = run._fleet.clients[torch.tensor([0])]
        if run._time > 50:
            (left if run._time < 250 else back).append(mine.base[0].clone())
            steps.append(int(mine.steps))
            assert (0 in run._fleet.available().tolist()) == (run._time >= 250)
    assert len(left) > 2
    assert all(torch.equal(base, left[0]) for base in left)
    assert not torch.equal(back[-1], left[0])
    assert steps[-1] > steps[0]


@EACH
def test_clients_that_arrive_late_are_not_contacted_before(make: Callable[..., Algorithm], codec: Codec) -> None:
    run = simulation(quadratic(4), 4, make(sampled=2), codec, absences=[Absence(0.0, 100.0, [0, 1])])
    seen: set[int] = set()
    for _ in run:
        if run._time <= 100:
            seen = set(run._fleet.clients._known)
    assert seen == {2, 3}
    assert set(run._fleet.clients._known) == {0, 1, 2, 3}


@EACH
def test_the_server_waits_for_somebody_when_nobody_is_there(make: Callable[..., Algorithm], codec: Codec) -> None:
    run = simulation(quadratic(2), 2, make(sampled=2), codec, absences=[Absence(0.0, 90.0)], every=1.0)
    reached = rows(run)
    assert reached[1]["time"] >= 90
    assert reached[-1]["contacts"] > 0


class Poisoned(Quadratic):
    """Client 1's gradient is not a number in its third step, client 2's never is one after that."""

    def gradient(self, model: Tensor, buffers: Tensor, batch: tuple[int, Tensor]) -> tuple[Tensor, Tensor]:
        gradient, buffers = Quadratic.gradient(self, model, buffers, batch)
        return (gradient * torch.nan if bool((batch[1] > 90).all()) else gradient), buffers

    def batch(self, client: int, step: int) -> tuple[int, Tensor]:
        bad = (client == 1 and step == 2) or (client == 2 and step > 2)
        client, noise = Quadratic.batch(self, client, step)
        return client, noise + 100 if bad else noise


def poisoned(n: int) -> Poisoned:
    healthy = quadratic(n, spread=0.5)
    return Poisoned(healthy.curvature, healthy.centers)


@EACH
def test_a_client_whose_progress_is_not_finite_is_named_and_its_reply_dropped_and_counted(
    make: Callable[..., Algorithm], codec: Codec, caplog: pytest.LogCaptureFixture
) -> None:
    run = simulation(poisoned(4), 4, make(sampled=2, local_steps=3), codec)
    reached = rows(run)
    assert reached[-1]["broken_replies"] > 2
    assert reached[-1]["lost_contacts"] >= reached[-1]["broken_replies"]
    assert reached[-1]["distance"] < reached[0]["distance"]
    said = [record.getMessage() for record in caplog.records]
    assert sum("client 1, round" in text for text in said) == sum("client 2, round" in text for text in said) == 1
    clients = run._fleet.clients.everybody()
    assert clients.base.isfinite().all()
    assert all(part.isfinite().all() for part in clients.optimizer)


@EACH
def test_divergence_ends_the_run_and_keeps_the_rows_so_far(make: Callable[..., Algorithm], codec: Codec) -> None:
    run = simulation(quadratic(4), 4, make(sampled=2), codec, sgd(1e25), every=10.0)
    with pytest.raises(Diverged, match=r"round \d+"):
        rows(run)
    assert len(run.rows) >= 1
    assert all(abs(row["loss"]) < inf for row in run.rows)


@EACH
def test_counts_below_one_are_refused(make: Callable[..., Algorithm], codec: Codec) -> None:
    for wrong in {"sampled": 0}, {"local_steps": 0}:
        with pytest.raises(ValueError, match="is 0, must be a whole number, at least 1"):
            make(**wrong)


# By hand


def two(curvature: float = 2.0) -> Quadratic:
    """Minima at 0 and 4, start at 1."""
    return Quadratic(torch.tensor([curvature]), torch.tensor([[0.0], [4.0]]), start=torch.tensor([1.0]))


def test_fednova_divides_by_the_steps_and_multiplies_by_their_mean() -> None:
    """Client 1 is four times slower: τ = (4, 1). With η a = 1/2: x_0 = 1/16, x_1 = 4 − 3/2 = 5/2, so the directions
    are (15/16)/4 and −3/2, and x' = 1 − 5/2·(15/64 − 3/2)/2."""
    speeds = Constant(steady(torch.tensor([2.0, 8.0])))
    w = world(two(1.0), 2, FedNova(sampled=2, local_steps=4), lr=0.5, speeds=speeds, latency=1.0)
    state = w.rounds(1)[0]
    assert w.fleet.clients.budget.tolist() == [4, 1]
    assert state.model.item() == pytest.approx(1 - 2.5 * (15 / 64 - 1.5) / 2)
    assert w.clock.now() == 8.0 + 1.0
    assert w.fleet.totals.steps == 5


def test_fednova_equals_fedavg_when_all_clients_are_as_fast() -> None:
    states = [world(two(1.0), 2, make(sampled=2), lr=0.1).rounds(4)[-1] for make in (FedNova, FedAvg)]
    torch.testing.assert_close(states[0].model, states[1].model)


def test_a_fednova_client_takes_at_least_one_step() -> None:
    budget = FedNova(local_steps=5).budget(torch.tensor([1.0, 0.5, 0.3, 0.01]))
    assert budget.tolist() == [5, 2, 2, 1]


def test_fedbuff_moves_by_displacements_against_what_each_client_started_from() -> None:
    """η a = 1: a step leads to the client's own minimum. Steps take 1 and 3; s = 1, no latency.

    t=1: client 0 started from 1, Δ = 1, x = 0. t=2: it started from 0, Δ = 0, x = 0. t=3: both are done, client 1 was
    asked first: it started from 1, Δ = −3, x = 3; then client 0, which started from 0: Δ = 0."""
    speeds = Constant(steady(torch.tensor([1.0, 3.0])))
    w = world(two(), 2, FedBuff(sampled=1, local_steps=1), lr=0.5, speeds=speeds)
    assert [state.model.item() for state in w.rounds(4)] == pytest.approx([0.0, 0.0, 3.0, 3.0])
    assert w.clock.now() == 3.0


def test_fedbuff_weighs_by_staleness_and_the_servers_rate() -> None:
    """As above; client 1's displacement is two rounds old: its weight is 1/√3."""
    speeds = Constant(steady(torch.tensor([1.0, 3.0])))
    w = world(two(), 2, FedBuff(sampled=1, local_steps=1, staleness=True, server_lr=0.5), lr=0.5, speeds=speeds)
    models = [state.model.item() for state in w.rounds(3)]
    assert models[0] == pytest.approx(1 - 0.5 * 1)
    assert models[1] == pytest.approx(0.5 - 0.5 * 0.5)
    assert models[2] == pytest.approx(0.25 + 0.5 * 3 / 3**0.5)


def test_fedbuff_waits_for_a_full_buffer_and_averages_it() -> None:
    speeds = Constant(steady(torch.tensor([1.0, 3.0])))
    w = world(two(), 2, FedBuff(sampled=3, local_steps=1), lr=0.5, speeds=speeds)
    first = w.rounds(1)[0]  # client 0 at 1 and 2, both times from 1; client 1 at 3
    assert first.model.item() == pytest.approx(1 - (1 + 1 - 3) / 3)
    assert w.clock.now() == 3.0


def test_fedbuff_sends_what_needs_no_key() -> None:
    with pytest.raises(ValueError, match=r"FedBuff sends displacements.*Lattice cannot decode them; use QSGD"):
        codecs_for(FedBuff(), Lattice(bits=4))
    assert codecs_for(FedBuff(), QSGD(bits=8)) == (QSGD(bits=8), Identity())


def test_the_servers_link_carries_s_exchanges_at_a_time_in_order_of_arrival() -> None:
    """Six clients are ready at 1; with s = 2 and exchanges of 10, two arrive at 11, two at 21, two at 31."""
    busy = world(quadratic(6), 6, FedBuff(sampled=2, local_steps=1), latency=10.0)
    free = world(quadratic(6), 6, FedBuff(sampled=2, local_steps=1), latency=10.0, limited=False)
    for w, times in (busy, [11.0, 21.0, 31.0]), (free, [11.0, 11.0, 11.0]):
        states = w.algorithm.rounds(w.start, w.fleet, w.codecs, w.clock, w.rng)
        seen = []
        for _ in range(3):
            next(states)
            seen.append(w.clock.now())
        assert seen == times


def time_of_round(round: int, algorithm: FedBuff, **changes: Any) -> float:
    w = world(quadratic(8), 8, algorithm, latency=1.0, **changes)
    for state in w.algorithm.rounds(w.start, w.fleet, w.codecs, w.clock, w.rng):
        if state.round == round:
            break
    return w.clock.now()


def test_fedbuff_asks_silent_clients_again() -> None:
    """Three contacts in ten are lost: a server of endless patience works with fewer and fewer until nobody is left."""
    patient, impatient = FedBuff(sampled=2, local_steps=1), FedBuff(sampled=2, local_steps=1, patience=6.0)
    assert time_of_round(60, impatient, unreachable=0.3) < 0.8 * time_of_round(60, patient, unreachable=0.3)
    assert time_of_round(60, impatient) == time_of_round(60, patient)


def test_a_fedbuff_client_that_is_asked_again_starts_anew() -> None:
    """It needs 10 for a step: asked again every 4, it never gets there, and every 30, it answers at 10, 20, 30."""
    for patience, rounds in (4.0, 0), (30.0, 3), (inf, 3):
        w = world(quadratic(1), 1, FedBuff(sampled=1, local_steps=1, patience=patience), speeds=10.0)
        states = w.algorithm.rounds(w.start, w.fleet, w.codecs, w.clock, w.rng)
        for state in states:
            if w.clock.now() >= 30:
                break
        assert state.round == rounds


@pytest.mark.parametrize("never", [{"unreachable": 1.0}, {"absences": [Absence(50.0, inf)]}], ids=["lost", "gone"])
@EACH
def test_a_run_ends_although_nobody_answers_any_more(
    make: Callable[..., Algorithm], codec: Codec, never: dict[str, Any]
) -> None:
    run = simulation(quadratic(2), 2, make(sampled=2), codec, until=120.0, every=30.0, **never)
    try:
        reached = rows(run)
    except ValueError as error:  # when everybody has gone for good, nothing can make the time pass
        assert "let somebody be there" in str(error)  # noqa: PT017
    else:
        assert reached[-1]["contacts"] < 60


def test_buffers_that_fill_at_the_same_time_are_rounds_of_their_own() -> None:
    changes = {"step_law": "constant", "slow": 0.0, "link_limited": False}
    run = simulation(quadratic(6), 6, FedBuff(sampled=2, local_steps=1), QSGD(bits=8), until=30.0, **changes)
    assert rows(run)[-1]["round"] >= 3


def test_the_best_model_is_the_one_with_the_least_loss_or_error() -> None:
    run = simulation(quadratic(4, noise=0.5), 4, QuAFL(sampled=2), Lattice(bits=8), until=300.0, every=10.0)
    reached = rows(run)
    best = min(reached, key=lambda row: row["loss"])
    assert run.best.server.round == best["round"] > 0
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    result = quafl.simulate(
        model=nn.Linear(2, 1),
        clients=[(x, x.sum(dim=1, keepdim=True))] * 2,
        algorithm=FedAvg(sampled=2),
        loss=functional.mse_loss,
        metrics={"mae": functional.l1_loss},
        lower_is_better=True,
        until=300.0,
    )
    error = functional.l1_loss(result.best(x), x.sum(dim=1, keepdim=True)).item()
    assert error == pytest.approx(min(row["mae"] for row in result.rows), abs=1e-6)


def test_a_state_is_a_snapshot() -> None:
    def fresh() -> Simulation:
        return simulation(quadratic(6, noise=0.3), 6, FedBuff(sampled=3), QSGD(bits=8), until=200.0)

    first, second = fresh(), fresh()
    for _ in zip(range(4), first, strict=False):
        pass
    kept = first.state()
    straight = rows(first)
    second.restore(kept)
    assert rows(second) == straight


def test_steps_and_octets_count_when_they_arrive() -> None:
    """Twenty clients train all the time; after a round of five answers, five count."""
    w = world(quadratic(20), 20, FedBuff(sampled=5, local_steps=3), latency=1.0)
    w.rounds(1)
    message = len(wire.to_bytes(Identity().encode(torch.zeros(30))))
    assert (w.fleet.totals.contacts, w.fleet.totals.steps, w.fleet.totals.up) == (5, 15, 5 * message)


def test_adam_sends_displacements_not_gradients() -> None:
    """The first step of Adam moves every coordinate by lr, whatever the gradient's size."""
    for make in FedAvg, FedNova, FedBuff:
        task = Quadratic(torch.tensor([1.0, 1000.0]), torch.ones(2, 2))
        w = world(task, 2, make(sampled=2, local_steps=1), optimizer=adam(0.01))
        torch.testing.assert_close(w.rounds(1)[0].model, torch.full((2,), 0.01))
    w = world(Quadratic(torch.tensor([1.0, 1000.0]), torch.ones(2, 2)), 2, QuAFL(2, 1, wait=1.0), optimizer=adam(0.01))
    torch.testing.assert_close(w.rounds(1)[0].model, torch.full((2,), 0.01 * 2 / 3))


def test_buffers_are_averaged_by_every_server() -> None:
    data = digits().train
    task = Supervised(nn.Sequential(nn.Linear(64, 10), nn.BatchNorm1d(10)), partition.iid(data, 3))
    for algorithm, answering in (FedAvg(3, 2), [0, 1, 2]), (FedNova(3, 2), [0, 1, 2]), (FedBuff(1, 2), [0]):
        w = world(task, 3, algorithm)
        state = w.rounds(1)[0]
        theirs = w.fleet.clients[torch.tensor(answering)].buffers
        torch.testing.assert_close(state.buffers, theirs.mean(dim=0))


def test_nobody_moves_while_nobody_has_time() -> None:
    w = world(quadratic(3), 3, QuAFL(sampled=3), speeds=NEVER, latency=1.0)
    assert torch.equal(w.rounds(5)[-1].model, w.start.model)


def test_looking_at_a_run_does_not_change_it_even_if_clients_are_broken() -> None:
    """The local steps behind answers under way are computed when somebody asks; nothing else may depend on it."""
    train = digits().train
    hands = partition.iid(train, 8)
    hands[2], hands[5] = ((inputs * torch.nan, targets) for inputs, targets in (hands[2], hands[5]))

    def run(*, looking: bool) -> list[dict[str, float]]:
        torch.manual_seed(0)
        task = Supervised(nn.Linear(64, 10), hands, test=digits().test, batch_size=16)
        made = simulation(task, 8, FedBuff(sampled=3), QSGD(bits=8), sgd(0.1), until=150.0, every=10.0)
        for _ in made:
            if looking:
                made.state()
        return [{name: value for name, value in row.items() if name != "train_loss"} for row in made.rows]  # it is NaN

    rows = run(looking=False)
    assert rows == run(looking=True)
    assert rows[-1]["broken_replies"] > 0


def test_a_client_keeps_nothing_alive_but_its_own_state() -> None:
    made = simulation(quadratic(30, noise=0.3), 30, FedBuff(sampled=3), QSGD(bits=8), momentum(0.02), until=200.0)
    list(made)
    for row in made._fleet.clients._known.values():
        for tensor in row:
            assert tensor.untyped_storage().nbytes() <= tensor.nbytes
