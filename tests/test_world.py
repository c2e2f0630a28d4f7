"""Speeds that change, clients that come and go, traces, links: what the simulated world does to its clients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import steady, world

import quafl
from quafl.codec import Identity, Lattice
from quafl.codec.coders import coders_for
from quafl.core import FedAvg, QuAFL
from quafl.core.randomness import Generators
from quafl.settings.algorithms import QuAFLSettings
from quafl.sim import Absence, Change, World
from quafl.sim.piecewise import Daily, Piecewise
from quafl.sim.speeds import Constant, Exponential, interrupted
from quafl.tasks import Quadratic

FULL = coders_for(QuAFL(), Identity())
ONE = torch.tensor([0])
THIN = World(up_bandwidth=100.0, down_bandwidth=100.0).link(2, FULL)


def still(n: int, dim: int = 4) -> Quadratic:
    return Quadratic(torch.ones(dim), torch.zeros(n, dim))


def rates(world: World, n: int = 4, until: float = 1000.0, seed: int = 0) -> Piecewise:
    return world.speeds(n, Generators(seed), until).rates


# Quantities that jump


def test_a_quantity_is_integrated_and_inverted_over_its_jumps() -> None:
    speed = Piecewise.of([[(0.0, 1.0), (10.0, 0.0), (20.0, 4.0)], [(0.0, 2.0)]])
    both = torch.tensor([0, 1])
    assert speed.at(both, 15.0).tolist() == [0.0, 2.0]
    assert speed.integral(both, torch.tensor([5.0, 5.0]), 25.0).tolist() == [5.0 + 20.0, 40.0]
    assert speed.reached(both, 5.0, torch.tensor([5.0, 5.0])).tolist() == [10.0, 7.5]
    assert speed.reached(both, 5.0, torch.tensor([7.0, 0.0])).tolist() == [20.5, 5.0]
    assert speed.next_rise(3.0) == 20.0
    assert speed.next_rise(20.0) == torch.inf


def test_what_stops_for_ever_is_never_reached() -> None:
    speed = Piecewise.of([[(0.0, 1.0), (10.0, 0.0)]])
    assert speed.reached(ONE, 0.0, torch.tensor([10.5])).item() == torch.inf


@given(
    st.lists(st.tuples(st.floats(0.1, 50), st.sampled_from([0.0, 0.5, 1.0, 3.0])), min_size=1, max_size=6),
    st.floats(0, 100),
    st.floats(0.01, 100),
)
def test_reaching_undoes_integrating(lengths: list[tuple[float, float]], start: float, amount: float) -> None:
    pieces, time = [], 0.0
    for length, value in lengths:
        pieces.append((time, value))
        time += length
    speed = Piecewise.of([[*pieces, (time, 1.0)]])
    when = speed.reached(ONE, start, torch.tensor([amount]))
    assert when.item() >= start
    again = speed.integral(ONE, torch.tensor([start], dtype=torch.float64), when.item())
    assert again.item() == pytest.approx(amount, rel=1e-4)


def test_absences_interrupt_and_changes_outlast_them() -> None:
    assert interrupted([(0.0, 1.0)], [(5.0, 9.0)]) == [(0.0, 1.0), (5.0, 0.0), (9.0, 1.0)]
    assert interrupted([(0.0, 1.0)], [(0.0, 9.0)]) == [(0.0, 0.0), (9.0, 1.0)]
    assert interrupted([(0.0, 1.0), (7.0, 2.0)], [(5.0, 9.0)]) == [(0.0, 1.0), (5.0, 0.0), (9.0, 2.0)]
    assert interrupted([(0.0, 1.0)], [(5.0, 9.0), (20.0, torch.inf)])[-2:] == [(20.0, 0.0), (torch.inf, 1.0)]


# Speeds


def test_mean_step_times_are_drawn_from_a_range() -> None:
    means = 1 / rates(World(step_range=(2.0, 9.0)), n=4000).values[:, 0]
    assert (means >= 2).all()
    assert (means <= 9).all()
    assert means.mean().item() == pytest.approx(5.5, abs=0.15)
    assert not torch.equal(means, 1 / rates(World(step_range=(2.0, 9.0)), n=4000, seed=1).values[:, 0])


def test_speeds_change_for_those_who_are_named() -> None:
    changing = World(slow=0.5, changes=[Change(100.0, 1.0, "slow"), Change(50.0, 4.0, [0])])
    speed = rates(changing)
    everybody = torch.arange(4)
    assert (1 / speed.at(everybody, 10.0)).tolist() == [2.0, 2.0, 8.0, 8.0]
    assert (1 / speed.at(everybody, 60.0)).tolist() == [4.0, 2.0, 8.0, 8.0]
    assert (1 / speed.at(everybody, 100.0)).tolist() == [4.0, 2.0, 1.0, 1.0]


def test_a_client_that_gets_faster_takes_more_steps_and_its_mean_follows() -> None:
    """Steps of 4, from time 100 on of 1; contacts every 8."""
    speeds = Constant(rates(World(slow=0.0, fast_step=4.0, changes=[Change(100.0, 1.0)]), n=1))
    w = world(still(1), 1, QuAFL(sampled=1, local_steps=50, weighted=True, wait=8.0), speeds=speeds)
    early = w.rounds(10)[-1]
    assert (w.fleet.totals.steps, early.speeds.item()) == (20, 2.0)
    late = w.rounds(10, early)[-1]
    assert w.fleet.totals.steps > 20 + 7 * 8
    assert late.speeds.item() > 4


def test_comings_and_goings_take_the_time_they_should() -> None:
    coming = World(present_for=30.0, away_for=10.0)
    speeds = coming.speeds(500, Generators(0), 400.0)
    share = torch.stack([speeds.present(float(time)) for time in range(100, 400, 7)]).float().mean()
    assert share.item() == pytest.approx(0.75, abs=0.02)
    assert speeds.present(0.0).all()


def test_a_longer_run_has_the_same_comings_and_goings() -> None:
    short, long = (World(present_for=30.0, away_for=10.0).speeds(5, Generators(0), until) for until in (100.0, 900.0))
    assert all(torch.equal(short.present(float(time)), long.present(float(time))) for time in range(100))


def test_fednova_goes_by_the_speed_with_which_a_client_appears() -> None:
    later = World(slow=0.5, changes=[Change(900.0, 1.0, "slow")], absences=[Absence(0.0, 10.0, [1])])
    assert later.speeds(4, Generators(0), 1000.0).relative().tolist() == [1.0, 1.0, 0.25, 0.25]


def test_a_trace_gives_speeds_and_bandwidths_and_who_is_there(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(
        "client,time,steps_per_second,up_bandwidth,down_bandwidth\n"
        "0,0,0.5,100,1000\n1,20,2,50,500\n1,60,0,50,500\n1,80,1,25,250\n"
    )
    traced = World(trace=tmp_path / "trace.csv", step_law="constant")
    speeds = traced.speeds(2, Generators(0), 100.0)
    assert [speeds.present(time).tolist() for time in (0.0, 30.0, 70.0, 90.0)] == [
        [True, False],
        [True, True],
        [True, False],
        [True, True],
    ]
    both = torch.tensor([0, 1])
    assert speeds.steps_within(both, torch.zeros(2), 30.0, torch.tensor([99, 99])).tolist() == [15, 20]
    link = traced.link(2, FULL)
    assert link.transfer(both, 30.0, 1000, 100).tolist() == [1 + 1, 2 + 2]
    assert link.transfer(both, 90.0, 1000, 100).tolist() == [1 + 1, 4 + 4]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,b\n", "the first line must be client,time,steps_per_second,up_bandwidth,down_bandwidth"),
        ("0,0,1,1\n", "line 2: must be five numbers"),
        ("0,0,x,1,1\n", "line 2: must be five numbers"),
        ("0,0,1,1,1\n7,0,1,1,1\n", "line 3: client 7 is not one of the 2"),
        ("0,0,1,1,1\n0,0,1,1,1\n", "line 3: the times of a client must increase"),
        ("0,0,1,1,nan\n", "line 2: time and speed must not be negative, bandwidths positive"),
        ("0,0,-1,1,1\n", "line 2: time and speed must not be negative, bandwidths positive"),
        ("0,0,1,1,1\n", "says nothing of client 1; give every client a line"),
    ],
)
def test_a_bad_trace_is_told_by_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    header = "" if text.startswith("a") else "client,time,steps_per_second,up_bandwidth,down_bandwidth\n"
    (tmp_path / "trace.csv").write_text(header + text)
    with pytest.raises(ValueError, match=sentence):
        World(trace=tmp_path / "trace.csv").speeds(2, Generators(0), 1.0)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (World(absences=[Absence(5.0, 5.0)]), "must start at 0 or later, and stop after that"),
        (World(changes=[Change(5.0, 0.0)]), "step must be positive"),
        (World(changes=[Change(5.0, 1.0, [4])]), "there is no client 4; the 4 clients are numbered from 0"),
        (World(present_for=1e-5, away_for=1e-5), "clients would leave more than 100,000 times"),
    ],
)
def test_a_world_that_cannot_be_is_refused(wrong: World, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        wrong.speeds(4, Generators(0), 1000.0)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"present_for": 10.0}, "present_for is 10.0 and away_for 0.0: give both, positive and finite, or neither"),
        ({"away_for": 10.0}, "present_for is inf and away_for 10.0: give both"),
        ({"fast_step": 0.0}, "fast_step is 0.0, must be positive and finite"),
        ({"slow": 3.0}, "slow is 3.0, must be from 0 to 1"),
        ({"unreachable": -1.0}, "unreachable is -1.0, must be from 0 to 1"),
        ({"step_law": "uniform"}, "step_law is 'uniform', must be 'exponential' or 'constant'"),
        ({"latency_at_32_bits": -1.0}, "latency_at_32_bits is -1.0, must not be negative"),
        ({"trace": Path("x.csv"), "step_range": (2.0, 9.0)}, "give it without step_range, changes"),
    ],
)
def test_a_world_is_checked_when_it_is_made(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        World(**wrong)


# H_i


@pytest.mark.parametrize("law", ["exponential", "constant"])
def test_expected_steps_in_closed_form_are_what_clients_measure(law: str) -> None:
    """Fast and slow clients, contacted at random: the closed form against the running means of a long run."""
    n, s, wait, latency, budget = 8, 3, 1.5, 1.0, 4
    generators = Generators(0)
    speed = steady(torch.tensor([2.0] * 4 + [8.0] * 4))
    speeds = Exponential(speed, generators["speeds"]) if law == "exponential" else Constant(speed)
    algorithm = QuAFL(sampled=s, local_steps=budget, wait=wait)
    known = speeds.expected_steps(s / n, latency + wait, budget)
    w = world(still(n, 1), n, algorithm, speeds=speeds, latency=latency)
    w.rounds(3000)
    measured = w.fleet.clients.everybody().expected_steps
    for group in slice(0, 4), slice(4, 8):
        assert measured[group].mean().item() == pytest.approx(known[group].mean().item(), abs=0.06)


def test_known_speeds_are_used_from_the_first_contact_and_never_change() -> None:
    slowly = World(slow=0.5)
    settings = QuAFLSettings(sampled=2, local_steps=4, weighted=True, speeds="closed form")
    known = slowly.expected_steps(QuAFL(2, 4), 4, FULL, Generators(0))
    assert known[0] > known[-1]
    given = settings.given(slowly, 4, FULL, seed=0)
    speeds = slowly.speeds(4, Generators(0), 100.0)
    w = world(still(4), 4, settings.build(), speeds=speeds, latency=10.0, given=given)
    for state in w.rounds(20):
        told = state.speeds
        assert torch.equal(told[~told.isnan()], known[~told.isnan()])
        assert set(w.came[0].senders.tolist()) <= set((~told.isnan()).nonzero().flatten().tolist())
    assert not told.isnan().any()
    assert QuAFLSettings().given(slowly, 4, FULL, seed=0) == {}


@pytest.mark.parametrize(
    "changing",
    [
        {"changes": [Change(5.0, 1.0)]},
        {"unreachable": 0.1},
        {"up_bandwidth": 1.0, "down_bandwidth": 1.0},
        {"present_for": 20.0, "away_for": 10.0},
    ],
)
def test_there_is_no_closed_form_where_things_change(changing: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no closed form"):
        World(**changing).expected_steps(QuAFL(2, 4), 4, FULL, Generators(0))


# Links


def test_an_exchange_takes_the_time_of_its_octets_and_the_slowest_of_the_contacted_counts() -> None:
    bandwidths = World(up_bandwidth=[100.0, 50.0], down_bandwidth=200.0)
    link = bandwidths.link(2, FULL)
    w = world(still(2, 1000), 2, QuAFL(sampled=2), link=link)
    w.rounds(1)
    message = 60 + 4000
    assert w.clock.now() == pytest.approx(message / 200 + message / 50)


def test_compression_makes_rounds_shorter_when_octets_take_their_time() -> None:
    def after(codec: Lattice | Identity) -> float:
        w = world(still(2, 4096), 2, QuAFL(sampled=2), codec=codec, link=THIN)
        w.rounds(10)
        return w.clock.now()

    assert after(Lattice(bits=4)) < after(Identity()) / 7


def test_repairs_take_the_time_of_their_octets() -> None:
    """So fine a lattice that the clients' answers need a repair: the exchange lasts as long as all octets both ways."""
    task = Quadratic(torch.ones(50), torch.randn(2, 50, generator=torch.Generator().manual_seed(0)))
    w = world(task, 2, QuAFL(sampled=1, wait=3.0), codec=Lattice(bits=4, resolution=1e-4), lr=0.3, link=THIN)
    w.rounds(1)
    totals = w.fleet.totals
    assert totals.refined == 1
    assert w.clock.now() == pytest.approx(3.0 + (totals.up + totals.down) / 100)


def test_bandwidths_that_do_not_fit_the_clients_are_refused() -> None:
    for wrong in World(up_bandwidth=[1.0, 2.0], down_bandwidth=1.0), World(up_bandwidth=0.0, down_bandwidth=1.0):
        with pytest.raises(
            ValueError, match=r"up_bandwidth is .*, must be a positive number, or one for each of the 3"
        ):
            wrong.link(3, FULL)


# Many clients


def test_a_client_that_was_never_contacted_costs_no_model() -> None:
    w = world(still(100_000, 4), 100_000, QuAFL(sampled=5), latency=1.0)
    w.rounds(10)
    assert 5 <= w.fleet.clients.known <= 50


def test_a_fedavg_client_that_leaves_answers_when_it_is_back() -> None:
    """It needs four steps of 1, and is away from 2 to 12."""
    gone = World(slow=0.0, fast_step=1.0, step_law="constant", absences=[Absence(2.0, 12.0)])
    w = world(still(1), 1, FedAvg(sampled=1, local_steps=4), speeds=gone.speeds(1, Generators(0), 100.0))
    w.rounds(1)
    assert w.clock.now() == 14.0


# Crowds


def daily(**more: Any) -> Daily:
    phases = torch.rand(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Daily(torch.linspace(0.5, 2.0, 50), phases, **{"day": 24.0, "share": 0.3, **more})


@pytest.mark.parametrize("start", [0.0, 3.7, 100.0])
def test_work_of_day_and_night_is_the_integral_of_the_speed(start: float) -> None:
    rates, everybody = daily(), torch.arange(50)
    stop, parts = start + 61.3, 20_000
    width = (stop - start) / parts
    summed = sum(rates.at(everybody, start + (k + 0.5) * width) * width for k in range(parts))
    found = rates.integral(everybody, torch.full((50,), start, dtype=torch.float64), stop)
    assert torch.allclose(found, summed, atol=4 * width * 2)  # a coming or going is met a part too late


def test_who_needs_so_much_work_has_done_it_when_it_is_reached_and_not_before() -> None:
    rates, everybody = daily(), torch.arange(50)
    for amount in 0.0, 0.1, 5.0, 17.0:
        goal = torch.full((50,), amount, dtype=torch.float64)
        when = rates.reached(everybody, 12.0, goal)
        begun = torch.full((50,), 12.0, dtype=torch.float64)
        for one in range(50):
            mine = everybody[one : one + 1]
            done = rates.integral(mine, begun[:1], float(when[one]))
            assert float(done) == pytest.approx(amount, abs=1e-9)
            if amount:
                assert float(rates.at(mine, float(when[one]) - 1e-6)) > 0  # it is there when it finishes


def test_the_next_one_to_come_comes_at_the_beginning_of_its_day() -> None:
    rates, everybody = daily(), torch.arange(50)
    after = rates.next_rise(30.0)

    def here(time: float) -> torch.Tensor:
        return rates.at(everybody, time) > 0

    assert after > 30.0
    assert (here(after + 1e-9) & ~here(after - 1e-9)).sum() == 1
    assert not (here(after - 1e-6) & ~here(30.0)).any()


def test_phones_are_contacted_at_their_hours_alone_and_train_then() -> None:
    world = World(day=24.0, day_share=0.25, step_spread=1.0)
    run = quafl.Simulation(
        Quadratic(torch.ones(3), torch.zeros(40, 3), start=torch.ones(3)),
        40,
        world,
        quafl.QuAFL(sampled=3, local_steps=5, wait=1.0),
        quafl.Identity(),
        quafl.sgd(0.1),
        quafl.Plan(until=100.0, every=10.0),
    )
    speeds = world.speeds(40, Generators(0), 100.0)
    shares, steps = [], 0
    for _ in run:
        there = run._fleet.available().tolist()
        assert there == speeds.present(run._clock.now()).nonzero().squeeze(-1).tolist()
        shares.append(len(there) / 40)
        steps = run.rows[-1]["local_steps"]
    assert sum(shares) / len(shares) == pytest.approx(0.25, abs=0.05)
    assert steps > 50
    assert run.rows[-1]["loss"] < run.rows[0]["loss"]


def test_speeds_and_bandwidths_have_the_tails_that_were_asked_for() -> None:
    clients = 20_000
    normal = World(slow=0.0, step_spread=0.8).speeds(clients, Generators(0), 1.0).rates.values[:, 0]
    logs = (2.0 * normal).log()
    assert float(logs.std()) == pytest.approx(0.8, rel=0.03)
    assert float(logs.mean()) == pytest.approx(0.0, abs=0.03)
    zipf = (
        World(slow=0.0, step_tail=0.5).speeds(clients, Generators(0), 1.0).rates.values[:, 0].sort(descending=True)[0]
    )
    ranks = torch.arange(1, clients + 1, dtype=torch.float64)
    assert torch.allclose(zipf, 0.5 * ranks**-0.5)
    thin = World(up_bandwidth=10.0, down_bandwidth=30.0, bandwidth_spread=0.5)
    link = thin.link(clients, FULL, Generators(0))
    assert link.up is not None
    assert link.down is not None
    assert float(link.up.values.log().std()) == pytest.approx(0.5, rel=0.03)
    assert torch.allclose(link.down.values, 3 * link.up.values)  # of one client, both


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"day": 24.0, "present_for": 3.0, "away_for": 2.0}, "a day says when clients are there"),
        ({"day": -1.0}, "day is -1.0, must not be negative"),
        ({"day_share": 1.0}, "day_share is 1.0 and day_zones 1.0: must be shares of a day"),
        ({"bandwidth_spread": 1.0}, "bandwidth_spread needs up_bandwidth and down_bandwidth"),
        ({"step_tail": 1.0, "trace": Path("x.csv")}, "give it without step_range, changes, spreads and tails"),
    ],
)
def test_what_goes_not_together_is_said(how: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        World(**how)
