"""The simulated world: virtual time, fast and slow clients, FedAvg and the Baseline in it, determinism."""

from dataclasses import replace
from itertools import islice
from math import exp
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from worlds import NEVER, steady, world

import quafl
from quafl import Plan, Simulation, World, sgd
from quafl.codec import QSGD, Identity, Lattice, wire
from quafl.codec.coders import coders_for
from quafl.codec.seams import HEADER_BYTES, Codec, Codecs
from quafl.core import SCAFFOLD, FedAsync, FedAvg, FedBuff, QuAFL
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm
from quafl.core.server import MANY, sample
from quafl.record import checkpoints
from quafl.sim import Diverged
from quafl.sim.clock import VirtualClock
from quafl.sim.speeds import Constant, Exponential, fast_and_slow
from quafl.tasks import Quadratic, Supervised, digits, partition

ALL_SLOW = 8.0


def flat_task(n: int, dim: int = 4, noise: float = 0.0) -> Quadratic:
    centers = torch.randn(n, dim, generator=torch.Generator().manual_seed(3))
    return Quadratic(torch.ones(dim), centers, noise=noise)


def test_time_does_not_run_backwards() -> None:
    clock = VirtualClock()
    clock.sleep(2.0)
    clock.sleep_until(1.0)
    assert clock.now() == 2.0
    for backwards in -1.0, float("nan"):
        with pytest.raises(ValueError, match="time does not run backwards"):
            clock.sleep(backwards)


@pytest.mark.parametrize(("sampled", "latency", "wait"), [(10, 4.375, 0.0), (5, 1.25, 0.0), (5, 2.0, 3.0)])
def test_share_of_zero_step_contacts_of_slow_clients_matches_its_closed_form(
    sampled: int, latency: float, wait: float
) -> None:
    """A client is contacted every G rounds, G geometric with p = s/n, and then has made no step in a time Δ = G·(sit +
    swt) with probability exp(−Δ/8): p·q/(1 − (1 − p)·q) with q = exp(−(sit + swt)/8)."""
    n, rounds = 20, 1500
    generators = Generators(1)
    speeds = Exponential(steady(torch.full((n,), ALL_SLOW)), generators["speeds"])
    w = world(flat_task(n), n, QuAFL(sampled=sampled, wait=wait), speeds=speeds, latency=latency)
    w.rounds(rounds)
    p, q = sampled / n, torch.exp(torch.tensor(-(latency + wait) / ALL_SLOW)).item()
    expected = p * q / (1 - (1 - p) * q)
    contacts = w.fleet.totals.contacts
    assert contacts == rounds * sampled
    assert w.fleet.totals.idle / contacts == pytest.approx(expected, abs=4.5 * (expected / contacts) ** 0.5)


def test_slow_clients_contacts_are_counted_apart() -> None:
    n, sampled, rounds = 20, 10, 1500
    means = torch.cat((torch.full((15,), 2.0), torch.full((5,), ALL_SLOW)))
    speeds = Exponential(steady(means), Generators(1)["speeds"])
    w = world(flat_task(n), n, QuAFL(sampled=sampled), speeds=speeds, latency=4.375)
    w.rounds(rounds)
    q = torch.exp(torch.tensor(-4.375 / ALL_SLOW)).item()
    expected, totals = 0.5 * q / (1 - 0.5 * q), w.fleet.totals
    assert totals.slow_contacts == pytest.approx(rounds * sampled / 4, rel=0.1)
    assert totals.slow_idle / totals.slow_contacts == pytest.approx(
        expected, abs=4.5 * (expected / totals.slow_contacts) ** 0.5
    )
    assert totals.idle / totals.contacts < 0.5 * expected


def test_exponential_steps_follow_their_law_and_stop_at_the_budget() -> None:
    speeds = Exponential(steady(torch.tensor([2.0])), torch.Generator().manual_seed(0))
    ids = torch.zeros(20_000, dtype=torch.int64)
    steps = speeds.steps_within(ids, torch.zeros(len(ids)), 6.0, torch.full_like(ids, 10**6)).double()
    assert steps.mean().item() == pytest.approx(3.0, abs=0.06)
    assert steps.var().item() == pytest.approx(3.0, abs=0.15)
    assert speeds.steps_within(ids, torch.zeros(len(ids)), 6.0, torch.full_like(ids, 4)).max() == 4
    lengths = speeds.duration(ids, 0.0, torch.full_like(ids, 5))
    assert lengths.mean().item() == pytest.approx(10.0, abs=0.15)
    assert lengths.var().item() == pytest.approx(5 * 4.0, rel=0.06)


def test_a_step_under_way_at_a_contact_is_dropped() -> None:
    """Steps of 1, contacts every 1.5: the half step left over at each contact is lost."""
    w = world(flat_task(2), 2, QuAFL(sampled=2, local_steps=9, wait=1.5))
    w.rounds(10)
    assert w.fleet.totals.steps == 2 * 10


def test_clients_stop_at_their_budget_of_local_steps() -> None:
    w = world(flat_task(2), 2, QuAFL(sampled=2, local_steps=3, wait=50.0))
    w.rounds(10)
    assert w.fleet.totals.steps == 2 * 10 * 3


def test_a_quafl_round_takes_the_waiting_and_the_interaction_time_whatever_the_clients_do() -> None:
    w = world(flat_task(4), 4, QuAFL(sampled=2, wait=0.5), speeds=NEVER, latency=1.25)
    w.rounds(8)
    assert w.clock.now() == 8 * 1.75


def test_a_fedavg_round_waits_for_its_slowest_client() -> None:
    speeds = Constant(steady(torch.tensor([1.0, 2.0, 8.0])))
    w = world(flat_task(3), 3, FedAvg(sampled=3, local_steps=5), speeds=speeds, latency=10.0)
    w.rounds(4)
    assert w.clock.now() == 4 * (5 * 8.0 + 10.0)
    assert w.fleet.totals.steps == 4 * 3 * 5


def test_fedavg_equals_a_hand_computation() -> None:
    """x_{t+1} = mean of c_i + (1 − η a)^K (x_t − c_i)."""
    task = flat_task(3)
    w = world(task, 3, FedAvg(sampled=3, local_steps=4), lr=0.3)
    x = torch.zeros(4)
    for state in w.rounds(5):
        x = (task.centers + 0.7**4 * (x - task.centers)).mean(dim=0)
        torch.testing.assert_close(state.model, x)


def test_fedavg_drops_who_does_not_answer_in_time_for_good() -> None:
    """Client 2 takes longer than two rounds: what it sends in the third is too late for the first."""
    speeds = Constant(steady(torch.tensor([1.0, 1.0, 12.0])))
    task = flat_task(3)
    w = world(task, 3, FedAvg(sampled=3, local_steps=1, patience=5.0), speeds=speeds, lr=1.0)
    for state in w.rounds(6):
        torch.testing.assert_close(state.model, task.centers[:2].mean(dim=0))  # a step of η·a = 1 leads to c_i
    assert w.clock.now() == 5.0 * 6


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_fedavg_goes_through_the_lattice_with_few_repairs(bits: int) -> None:
    """A FedAvg client stands on what it has heard: the downlink's noise adds to its distance from the server."""
    n = 8
    w = world(flat_task(n, dim=2048), n, FedAvg(sampled=n, local_steps=3), codec=Lattice(bits=bits), lr=0.1)
    w.rounds(40)
    assert w.fleet.totals.refined <= 0.05 * 2 * w.fleet.totals.contacts + n


def test_contacts_that_are_all_lost_take_as_long_as_an_exchange() -> None:
    w = world(flat_task(4), 4, QuAFL(sampled=2), latency=1.25, unreachable=1.0)
    w.rounds(8)
    assert (w.clock.now(), w.fleet.totals.contacts) == (8 * 1.25, 0)


def test_time_that_stands_still_is_noticed() -> None:
    with pytest.raises(ValueError, match="1000 rounds took no simulated time"):
        small_run(0, world=quafl.World(latency_at_32_bits=0.0))


@pytest.mark.parametrize("until", [0.0, -1.0, float("nan"), float("inf")])
def test_a_horizon_that_is_none_is_refused(until: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        small_run(0, until=until)


@pytest.mark.parametrize("wrong", [{"sampled": 0}, {"local_steps": 0}])
@pytest.mark.parametrize("algorithm", [QuAFL, FedAvg])
def test_counts_below_one_are_refused(algorithm: type[QuAFL] | type[FedAvg], wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is 0, must be a whole number, at least 1"):
        algorithm(**wrong)


def test_the_interaction_time_shrinks_with_the_bits() -> None:
    def latency(bits: int) -> float:
        codec: Codec = Identity() if bits == 32 else Lattice(bits=bits)
        return quafl.World().link(20, coders_for(QuAFL(), codec)).latency

    assert (latency(32), latency(14), latency(4)) == (10.0, 10 * 14 / 32, 1.25)
    uneven = coders_for(QuAFL(), Codecs(up=Lattice(bits=2), down=Lattice(bits=6)))
    assert quafl.World().link(20, uneven).latency == 1.25  # of the mean of the two directions
    assert quafl.World().link(20, coders_for(SCAFFOLD(), Identity())).latency == 20.0  # two vectors each way


def test_the_baseline_is_gradient_descent_at_the_speed_of_one_slow_node() -> None:
    task = flat_task(1)
    w = world(task, 1, FedAvg(sampled=1, local_steps=1), speeds=ALL_SLOW, lr=0.1)
    x = torch.zeros(4)
    for state in w.rounds(6):
        x = x - 0.1 * (x - task.centers[0])
        torch.testing.assert_close(state.model, x)
    assert w.clock.now() == 6 * ALL_SLOW


def test_the_last_clients_are_the_slow_ones() -> None:
    assert fast_and_slow(8, slow=0.25).tolist() == [2.0] * 6 + [8.0] * 2


@pytest.mark.parametrize("algorithm", [QuAFL(sampled=3, wait=2.0), FedAvg(sampled=3)], ids=["quafl", "fedavg"])
def test_bytes_counted_are_the_bytes_of_the_messages(algorithm: QuAFL | FedAvg) -> None:
    for codec in Identity(), Lattice(bits=4, resolution=10.0), QSGD(bits=8):
        w = world(flat_task(6, dim=3000), 6, algorithm, codec=codec)
        w.rounds(5)
        message = wire.to_bytes(codec.encode(torch.zeros(3000), torch.Generator()))
        assert w.fleet.totals.up == w.fleet.totals.down == 5 * 3 * len(message)


def test_messages_that_do_not_decode_are_refined_and_counted_in_their_direction() -> None:
    """The clients' first answers are far from the server's model for so small a side, its own first message is not."""
    fine = Lattice(bits=4, resolution=1e-4)
    w = world(flat_task(4, dim=50), 4, QuAFL(sampled=4, wait=3.0), codec=fine, lr=0.3)
    exact = world(flat_task(4, dim=50), 4, QuAFL(sampled=4, wait=3.0), lr=0.3)
    first, expected = w.rounds(1)[0], exact.rounds(1)[0]
    torch.testing.assert_close(first.model, expected.model, atol=1e-3, rtol=0)
    assert w.fleet.totals.refined == 4
    message, request = HEADER_BYTES + 4 * (2 * 4 + 1), HEADER_BYTES + 4  # a block of 64
    refinements = [HEADER_BYTES + 4 * (2 * bits + 1) for bits in (1, 2, 4, 8)]  # to 5, 7, 11 and 19 bits
    assert w.fleet.totals.up == 4 * (message + sum(refinements))
    assert w.fleet.totals.down == 4 * (message + 4 * request)


def test_the_lattice_follows_the_models_as_they_come_together() -> None:
    """Far from the minimum and near it, quantized QuAFL stays close to unquantized QuAFL, with few repairs."""
    task = flat_task(8, dim=2048)
    pair = [
        world(task, 8, QuAFL(sampled=4, wait=3.0), codec=codec, lr=0.1).rounds(60)[-1].model
        for codec in (Lattice(bits=8), Identity())
    ]
    assert (pair[0] - pair[1]).norm() < 0.02 * pair[1].norm()
    w = world(task, 8, QuAFL(sampled=4, wait=3.0), codec=Lattice(bits=4, spread=6.0), lr=0.1)
    w.rounds(60)
    assert w.fleet.totals.refined <= 0.02 * 2 * w.fleet.totals.contacts + 4  # four for the start


def small_run(
    seed: int,
    until: float = 60.0,
    evaluations: int = 6,
    dropout: float = 0.0,
    world: quafl.World = quafl.World(),  # noqa: B008
) -> quafl.Result:
    torch.manual_seed(0)
    return quafl.simulate(
        model=nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 10)),
        world=world,
        clients=partition.iid(digits().train, 10),
        test=digits().test,
        algorithm=QuAFL(sampled=3, local_steps=4),
        optimizer=quafl.sgd(0.5),
        until=until,
        evaluations=evaluations,
        seed=seed,
    )


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_same_seed_gives_the_same_run_bit_for_bit(dropout: float) -> None:
    first, second, other = (small_run(seed, dropout=dropout) for seed in (5, 5, 6))
    assert first.rows == second.rows != other.rows
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name])


def test_a_run_is_the_same_whatever_the_number_of_threads_and_leaves_it_as_it_was() -> None:
    before, found = torch.get_num_threads(), []
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))  # large enough to be divided among threads
    try:
        for threads in 1, 2:
            torch.set_num_threads(threads)
            clients = partition.iid(digits().train, 2)
            run = quafl.simulate(model=model, clients=clients, algorithm=QuAFL(sampled=2), until=15.0, batch_size=128)
            assert torch.get_num_threads() == threads
            found.append(run)
    finally:
        torch.set_num_threads(before)
    assert found[0].rows == found[1].rows
    assert all(map(torch.equal, *(run.model.parameters() for run in found)))


def test_simulation_ignores_and_leaves_alone_the_global_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    task = Supervised(nn.Linear(64, 10), partition.iid(digits().train, 4))
    w = world(task, 4, QuAFL(sampled=2, wait=3.0), codec=Lattice(bits=4))
    torch.manual_seed(1)
    w.rounds(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_are_taken_at_equal_times_up_to_the_horizon() -> None:
    rows = small_run(0).rows
    assert rows[0]["round"] == 0
    assert [row["time"] // 10 for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert rows[-1]["time"] <= 60
    short = small_run(0, until=1.3, evaluations=1).rows  # one round of 1.25, before an evaluation is due
    assert [row["round"] for row in short] == [0, 1]
    assert rows[-1]["accuracy"] > rows[0]["accuracy"] + 0.2


def test_more_clients_sampled_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="sampled is 3, there are only 2 clients"):
        quafl.simulate(
            model=nn.Linear(2, 2),
            clients=[(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))] * 2,
            algorithm=QuAFL(sampled=3),
            until=1.0,
        )


def test_generators_of_roles_are_independent_and_can_be_restored() -> None:
    first, second = Generators(3), Generators(3)
    torch.rand(100, generator=second["speeds"])
    assert torch.equal(torch.rand(5, generator=first["sampling"]), torch.rand(5, generator=second["sampling"]))
    kept = first.state()
    expected = torch.rand(5, generator=first["sampling"])
    first.restore(kept)
    assert torch.equal(torch.rand(5, generator=first["sampling"]), expected)


def test_an_average_of_models_is_evaluated_and_the_run_is_the_same() -> None:
    """a_k = a_{k−1} + (1 − e^{−(t_k − t_{k−1})/τ})·(X_k − a_{k−1}), also by a run that was taken up again."""
    task = Quadratic(torch.tensor([1.0]), torch.tensor([[0.0], [4.0]]), start=torch.tensor([9.0]))

    def made() -> Simulation:
        plan = Plan(until=150.0, every=1.0, metric="loss", average=60.0)
        return Simulation(task, 2, World(slow=0.0), FedAvg(sampled=2), Identity(), sgd(0.1), plan)

    run, again = made(), made()
    average, time, ways = torch.tensor([9.0]), 0.0, []
    for _ in run:
        average = average + (1 - exp(-(run.time - time) / 60.0)) * (run.server.model - average)
        time = run.time
        assert run.last.model.item() == pytest.approx(average.item())
        assert run.rows[-1]["distance"] == pytest.approx(abs(average.item() - 2.0), abs=1e-5)
        ways.append(run.state() if len(ways) == 1 else None)
    assert run.rows[-1]["distance"] > 1.2 * abs(run.server.model.item() - 2.0)
    again.restore(next(state for state in ways if state is not None))
    list(again)
    assert again.rows == run.rows


@pytest.mark.parametrize("algorithm", [FedBuff(sampled=2), FedAsync(sampled=2)], ids=["FedBuff", "FedAsync"])
def test_uncompressed_answers_under_way_are_saved_and_arrive(algorithm: Algorithm, tmp_path: Path) -> None:
    def made() -> Simulation:
        task = Quadratic(torch.ones(3), torch.arange(12.0).view(4, 3))
        return Simulation(task, 4, World(), algorithm, Identity(), sgd(0.1), Plan(until=60.0, every=10.0))

    run, again = made(), made()
    for number, _ in enumerate(run):
        if number == 2:
            checkpoints.save(tmp_path / "checkpoint.pt", run.state())
    again.restore(checkpoints.load(tmp_path / "checkpoint.pt"))
    list(again)
    assert again.rows == run.rows


@pytest.mark.parametrize(("metric", "goal"), [("loss", 0.5), ("distance", 1.0)])
def test_a_run_stops_at_its_goal(metric: str, goal: float) -> None:
    task = Quadratic(torch.tensor([1.0]), torch.tensor([[0.0], [4.0]]), start=torch.tensor([9.0]))
    plan = Plan(until=500.0, every=1.0, metric=metric, lower_is_better=True, stop_at=goal)
    run = Simulation(task, 2, World(slow=0.0), FedAvg(sampled=2), Identity(), sgd(0.1), plan)
    list(run)
    assert run.rows[-1][metric] <= goal < run.rows[-2][metric]


def one_client(plan: Plan, *, seed: object = 0, executor: str = "auto", lr: float = 0.1) -> Simulation:
    """Of a quadratic, which has a loss and a distance."""
    task = Quadratic(torch.tensor([1.0]), torch.zeros(1, 1), start=torch.tensor([9.0]))
    seeded = replace(plan, seed=cast(int, seed))
    return Simulation(task, 1, World(slow=0.0), FedAvg(sampled=1), Identity(), sgd(lr), seeded, executor=executor)


@pytest.mark.parametrize("wrong", [{"metric": "acuracy"}, {"metric": "accuracy", "stop_at": 0.9}], ids=str)
def test_a_metric_that_the_task_does_not_have_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"the metric is 'ac+uracy', the task measures loss, distance; choose"):
        next(iter(one_client(Plan(until=10.0, every=1.0, **wrong))))
    rows = list(one_client(Plan(until=10.0, every=1.0)))  # the usual one is nobody's wish
    assert rows


def test_an_executor_or_a_seed_that_there_is_not_is_refused() -> None:
    plan = Plan(until=10.0, every=1.0)
    with pytest.raises(ValueError, match="executor is 'gpu', must be one of auto, sequential, vectorised, graph"):
        one_client(plan, executor="gpu")
    for seed in 1.5, "one", None:
        with pytest.raises(TypeError, match=f"seed is {seed!r}, must be an integer"):
            one_client(plan, seed=seed)
    assert next(iter(one_client(plan, seed=np.int64(3)))) is not None


def test_a_loss_beyond_all_sense_is_no_result() -> None:
    """Each step multiplies the distance by −9: after 30 steps the loss is 10⁵⁸ times as large, and finite."""
    run = one_client(Plan(until=60.0, every=1.0, metric="loss"), lr=10.0)
    with pytest.raises(Diverged, match=r"in round \d+ the loss is \d\.\d+e\+\d+; try a smaller lr"):
        list(run)
    assert run.rows
    assert max(row["loss"] for row in run.rows) < 1e12


def test_a_sample_of_very_many_is_of_different_clients_each_as_often_as_another() -> None:
    present, rng = torch.arange(MANY + 1) * 2, torch.Generator().manual_seed(0)
    chosen = sample(present, 20_000, rng)
    assert len(chosen.unique()) == 20_000
    assert not (chosen % 2).any()
    assert abs(float(chosen.double().mean()) / MANY - 1) < 0.02  # 5 standard errors
    assert sample(present, MANY, rng).unique().numel() == MANY  # nearly all of them


def test_clients_of_a_crowd_that_adopt_the_same_model_share_it_and_those_never_met_cost_nothing() -> None:
    class Sevens(Quadratic):
        """One of seven centers, whoever it is."""

        __slots__ = ()

        def gradient(self, model: Any, buffers: Any, batch: Any) -> Any:
            return self.curvature * (model - batch[0] % 7), buffers

    crowd = 1_000_000
    task = Sevens(torch.ones(1200), torch.zeros(1, 1200))
    algorithm = quafl.QuAFL(sampled=50, local_steps=2, client_averaging=0.0)
    plan = Plan(until=1e9, every=1e9)
    run = Simulation(task, crowd, World(), algorithm, quafl.compressed(bits=4), quafl.sgd(0.1), plan)
    for _ in islice(run, 4):
        pass
    store = run._fleet.clients
    assert store.known == 150
    bases = {heavy[0].data_ptr() for heavy in store._known.values()}
    assert len(bases) == 3  # a round's clients have one model
    assert all(heavy[0].untyped_storage().nbytes() == 4 * 1200 for heavy in store._known.values())
    state = run.state()
    before = int(store._numbers["steps"].sum())
    next(iter(run))
    assert int(state["fleet"]["clients"]["numbers"]["steps"].sum()) == before  # what was saved does not move
