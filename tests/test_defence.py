"""Clients that lie are held within bounds, and those that do not are left alone."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import islice, pairwise
from math import inf, nan
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from liars import Attack, Attacked
from torch import Tensor, nn
from worlds import steady, world

from quafl import Defence, Lattice, Plan, Simulation, sgd
from quafl.codec import QSGD
from quafl.codec.seams import Codec
from quafl.core import SCAFFOLD, Calibrated, FedAsync, FedAvg, FedBuff, FedNova, QuAFL, fedavg, fedbuff, scaffold
from quafl.core.buffer import Gathered
from quafl.core.conversation import Clients, Look, Sleep, Tell
from quafl.core.defence import MOVED, VOTERS, Held
from quafl.core.quafl import Down
from quafl.core.seams import Ids, ServerState
from quafl.settings.base import SettingsError
from quafl.settings.defence import FederationDefence
from quafl.settings.reading import load
from quafl.sim import World
from quafl.sim.speeds import Constant
from quafl.tasks import Quadratic, Supervised, digits, partition

DEFAULT = FederationDefence().build()
TABLE: dict[str, tuple[Callable[..., Any], Codec]] = {
    "QuAFL": (QuAFL, Lattice(bits=6)),
    "Calibrated": (Calibrated, Lattice(bits=6)),
    "FedAvg": (FedAvg, Lattice(bits=6)),
    "FedBuff": (FedBuff, QSGD(bits=8)),
    "FedNova": (FedNova, Lattice(bits=6)),
    "SCAFFOLD": (partial(SCAFFOLD, lr=0.2), Lattice(bits=6)),
    "FedAsync": (FedAsync, Lattice(bits=6)),
}
# Some tens of rounds, or a few hundred of FedAsync's.
UNTIL = {"QuAFL": 200.0, "Calibrated": 150.0, "FedAvg": 500.0, "FedBuff": 150.0, "FedNova": 400.0}
UNTIL |= {"SCAFFOLD": 500.0, "FedAsync": 150.0}
EACH = pytest.mark.parametrize(("make", "codec"), TABLE.values(), ids=TABLE.keys())


class Heard(NamedTuple):
    """What clients have said, decoded."""

    senders: Ids
    up: Any  # a Message
    distances: dict[str, Tensor]


def state(
    dim: int = 2,
    statistics: Tensor | None = None,
    model: Tensor | None = None,
    votes: Mapping[str, Tensor] | None = None,
) -> ServerState:
    """A server at 0, with nothing that could be taken for no movement."""
    start = torch.zeros(dim) if model is None else model
    return ServerState(model=start, buffers=torch.empty(0) if statistics is None else statistics, votes=votes or {})


def heard(
    vectors: Any, senders: list[int] | None = None, statistics: Any = None, distances: list[float] | None = None
) -> Heard:
    rows = torch.as_tensor(vectors, dtype=torch.float32)
    own = torch.zeros(len(rows), 0) if statistics is None else torch.as_tensor(statistics).float()
    return Heard(
        senders=torch.tensor(senders if senders is not None else range(len(rows)), dtype=torch.int64),
        up=fedavg.Up(model=rows, statistics=own),
        distances={"model": torch.zeros(len(rows)) if distances is None else torch.tensor(distances)},
    )


def along(*lengths: float) -> Tensor:
    """Vectors of these lengths, in the direction (3, 4)/5."""
    return torch.tensor(lengths).unsqueeze(-1) * torch.tensor([0.6, 0.8])


def held(defence: Defence, before: ServerState, what: Heard, there: int = 20, **more: Any) -> Held:
    return defence.hold(before, what, {"model": before.model}, there, **more)


# Displacements


def test_a_displacement_is_at_most_clip_times_as_long_as_is_usual() -> None:
    """The lower median of 1, 2, 3 and 100 is 2."""
    found = held(Defence(clip=3.0), state(), heard(along(1, 100, 3, 2)))
    torch.testing.assert_close(found.up.model, along(1, 6, 3, 2))


def test_a_displacement_is_measured_from_the_servers_model() -> None:
    model = torch.tensor([10.0, -10.0])
    found = held(Defence(clip=2.0), state(model=model), heard(model + along(1, 1, 1, 50)))
    torch.testing.assert_close(found.up.model, model + along(1, 1, 1, 2))


def test_what_is_within_its_bounds_is_returned_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    rows, statistics = torch.randn(6, 50, generator=generator), torch.randn(6, 4, generator=generator).abs()
    before = state(model=torch.randn(50, generator=generator), statistics=torch.rand(4, generator=generator))
    sent = heard(rows, statistics=statistics, distances=[1.0, 1.1, 1.2, 0.9, 1.3, 0.8])
    for defence in Defence(), Defence(clip=1e6):
        found = held(defence, before, sent)
        assert torch.equal(found.up.model, rows)
        assert torch.equal(found.up.statistics, statistics)
        assert torch.equal(found.distances["model"], sent.distances["model"])
    longer = replace(sent.up, model=torch.cat((rows[:5], 100 * rows[5:])))
    long = held(Defence(clip=3.0), before, sent._replace(up=longer))
    assert torch.equal(long.up.model[:5], rows[:5])  # and those of the others stay what they are
    assert not torch.equal(long.up.model[5], 100 * rows[5])


def test_a_client_has_one_vote_however_often_it_answers() -> None:
    """64 replies of one client, as long as it likes, and three others' of length 1: what is usual stays 1."""
    before = state()
    for _ in range(64):
        before = replace(before, votes=held(Defence(clip=3.0), before, heard(along(1000), [7])).votes)
    assert before.votes["voters"].tolist() == [7]
    found = held(Defence(clip=3.0), before, heard(along(1, 1, 1, 1000), [0, 1, 2, 7]))
    torch.testing.assert_close(found.up.model, along(1, 1, 1, 3))
    many = held(Defence(clip=3.0), state(), heard(along(1, *[1000.0] * 64), [0, *[7] * 64]), there=2)
    torch.testing.assert_close(many.up.model, along(1, *[3.0] * 64))


def test_the_usual_norm_is_that_of_each_clients_last_displacement() -> None:
    """Clients 0 to 2 voted 10; now client 0 goes 1, and client 1 goes 2: of 1, 2 and 10, the median is 2."""
    defence, before = Defence(clip=1.5), state()
    before = replace(before, votes=held(defence, before, heard(along(10, 10, 10))).votes)
    after = held(defence, before, heard(along(1, 2, 99), [0, 1, 3]))
    torch.testing.assert_close(after.up.model, along(1, 2, 3))  # 1, 2, 10, 99: the lower median is 2
    assert after.votes["voters"].tolist() == [2, 0, 1, 3]


def test_only_the_clients_heard_last_have_a_vote() -> None:
    defence, before = Defence(clip=2.0), state()
    for client in range(VOTERS + 8):
        before = replace(before, votes=held(defence, before, heard(along(1.0 + client), [client]), there=99).votes)
    assert before.votes["voters"].tolist() == list(range(8, VOTERS + 8))
    assert len(before.votes["norm of model"]) == VOTERS


def test_those_who_have_not_moved_do_not_vote() -> None:
    """Nor does rounding count: newcomers send the model back as the codec rounds it."""
    model = torch.tensor([60.0, 80.0])
    rounding = 0.5 * MOVED * 100
    sent = model + along(0, rounding, rounding, 0, 1, 2, 2, 2, 30)
    found = held(Defence(clip=3.0), state(model=model), heard(sent)).up.model
    assert torch.equal(found[:8], sent[:8])
    torch.testing.assert_close(found[8], (model + along(6))[0])


@pytest.mark.parametrize(
    ("there", "lengths", "accepted"),
    [
        (1, [1000.0], [1000.0]),  # nobody to compare it with, and nobody to protect
        (2, [1000.0], [0.0]),
        (2, [1.0, 1000.0], [1.0, 3.0]),  # the smaller of two is usual
        (3, [1.0, 1000.0], [1.0, 3.0]),
        (4, [1.0, 1000.0], [0.0, 0.0]),
        (4, [1.0, 2.0, 1000.0], [1.0, 2.0, 3.0]),
        (20, [1000.0, 1000.0], [0.0, 0.0]),  # two liars who come first do not say what is usual
        (20, [1.0, 1000.0, 1000.0], [1.0, 3.0, 3.0]),
        (20, [1.0, 1.0, 1000.0, 1000.0], [1.0, 1.0, 3.0, 3.0]),
        (20, [1.0, 1.0, 1.0, 1000.0, 1000.0], [1.0, 1.0, 1.0, 3.0, 3.0]),
    ],
)
def test_the_first_to_move_wait_for_some_others_to_compare_with(
    there: int, lengths: list[float], accepted: list[float]
) -> None:
    found = held(Defence(clip=3.0), state(), heard(along(*lengths)), there=there)
    torch.testing.assert_close(found.up.model, along(*accepted))


def test_what_is_not_finite_does_not_count_and_has_no_vote() -> None:
    sent = along(1, 1, 1, 1, 1)
    sent[1, 0], sent[2, 1] = nan, inf
    found = held(Defence(clip=3.0), state(), heard(sent))
    torch.testing.assert_close(found.up.model, along(1, 0, 0, 1, 1))


def test_a_round_without_replies_changes_no_vote() -> None:
    defence, before = Defence(clip=3.0, mean="trimmed"), state(statistics=torch.zeros(3))
    sent = heard(along(1, 2), statistics=torch.ones(2, 3))
    before = replace(before, votes=held(defence, before, sent).votes)
    nobody = heard(torch.zeros(0, 2), statistics=torch.zeros(0, 3))
    after = held(defence, before, nobody)
    assert {name: votes.tolist() for name, votes in after.votes.items()} == {
        name: votes.tolist() for name, votes in before.votes.items()
    }
    assert len(after.up.model) == 0


def test_each_vector_of_a_message_has_bounds_of_its_own() -> None:
    """Client 3's model is too long, client 4's change is; the usual lengths are 1 and 100."""
    up = scaffold.Up(model=along(1, 1, 1, 50, 1), change=along(100, 100, 100, 100, 5000), statistics=torch.zeros(5, 0))
    sent, before = heard(up.model)._replace(up=up), state()
    found = Defence(clip=3.0).hold(before, sent, {"model": torch.zeros(2), "change": torch.zeros(2)}, 20)
    torch.testing.assert_close(found.up.model, along(1, 1, 1, 3, 1))
    torch.testing.assert_close(found.up.change, along(100, 100, 100, 100, 300))
    assert {"norm of model", "norm of change", "distance of model"} < set(found.votes)
    only = Defence(clip=3.0).hold(before, sent, {"model": torch.zeros(2)}, 20)
    assert only.up.change is up.change  # not named, not held


# Statistics, distances, speeds


def test_statistics_are_bounded_coordinate_by_coordinate() -> None:
    """The lower medians of the distances from the server's are 2 and 10."""
    mine = torch.tensor([-100.0, 100.0])
    sent = torch.tensor([[-101.0, 90.0], [-99.0, 110.0], [-98.0, 120.0], [9e11, 100.0], [-9e11, -9e11]])
    found = held(Defence(clip=2.0), state(statistics=mine), heard(torch.ones(5, 2), statistics=sent)).up.statistics
    assert torch.equal(found[:3], sent[:3])
    torch.testing.assert_close(found[3:], torch.tensor([[-96.0, 100.0], [-104.0, 80.0]]))


def test_a_variance_is_never_made_negative() -> None:
    """The bound alone would allow −1 and −5; but the server's first value and nearly everybody's is not negative."""
    mine = torch.tensor([3.0, 3.0])
    honest = torch.tensor([[1.0, -1.0], [5.0, 7.0], [1.0, -1.0], [5.0, -2.0]])
    sent = torch.cat((honest, torch.tensor([[-9e11, -9e11]])))
    found = held(Defence(clip=2.0), state(statistics=mine), heard(torch.ones(5, 2), statistics=sent)).up.statistics
    assert found[4].tolist() == [0.0, -5.0]
    assert torch.equal(found[:4], honest)


def test_statistics_that_are_not_finite_are_the_servers_own() -> None:
    mine = torch.tensor([3.0, 4.0])
    sent = torch.tensor([[nan, 5.0], [4.0, inf], [2.0, 3.0], [4.0, 5.0]])
    found = held(Defence(clip=2.0), state(statistics=mine), heard(torch.ones(4, 2), statistics=sent)).up.statistics
    assert found.tolist() == [[3.0, 5.0], [4.0, 4.0], [2.0, 3.0], [4.0, 5.0]]


def test_statistics_of_the_first_who_has_some_wait_for_others() -> None:
    mine = torch.tensor([1.0, 1.0])
    sent = torch.tensor([[1.0, 1.0], [1.0, 1.0], [9e11, 9e11]])
    found = held(Defence(clip=2.0), state(statistics=mine), heard(torch.ones(3, 2), statistics=sent)).up.statistics
    assert (found == 1).all()


def test_statistics_are_compared_with_those_that_others_sent_before() -> None:
    defence, before = Defence(clip=1.0), state(statistics=torch.tensor([0.0]))
    sent = heard(torch.ones(3, 2), statistics=torch.tensor([[1.0], [-1.0], [2.0]]))
    before = replace(before, votes=held(defence, before, sent).votes)
    alone = heard(torch.ones(1, 2), [9], statistics=torch.tensor([[1e6]]))
    assert held(defence, before, alone).up.statistics.item() == 1.0


def test_a_reported_distance_is_bounded_like_a_displacement() -> None:
    sent = heard(along(1, 1, 1, 1, 1), distances=[1.0, 2.0, 3.0, 1e9, nan])
    assert held(Defence(clip=3.0), state(), sent).distances["model"].tolist() == [1.0, 2.0, 3.0, 6.0, 0.0]


@pytest.mark.parametrize(
    ("share", "speeds", "slowest"),
    [
        (0.0, [0.0, 3.0, 1.0, 2.0], 0.0),  # the paper's
        (0.1, [0.0, 3.0, 1.0, 2.0], 1.0),  # of four or more, one at least is left out
        (0.1, [0.0, 3.0, 1.0], 0.0),  # of three, nobody
        (0.1, [5.0] * 18 + [0.0, 0.0], 5.0),
        (0.1, [5.0] * 17 + [0.0, 0.0, 0.0], 0.0),
        (0.9, [1.0, 2.0], 2.0),
    ],
)
def test_the_slowest_speed_is_read_at_a_share_of_all(share: float, speeds: list[float], slowest: float) -> None:
    assert Defence(speeds=share).slowest(torch.tensor(speeds)) == slowest


def test_one_client_that_says_it_stands_still_does_not_slow_the_others() -> None:
    times = [1.0, 1.0, 1.0, 1e9]
    for share, slowest in (0.0, 0.1), (0.1, 4.0):
        algorithm = QuAFL(sampled=4, local_steps=9, weighted=True, wait=4.0, defence=Defence(speeds=share))
        task = Quadratic(torch.ones(1), torch.zeros(4, 1))
        w = world(task, 4, algorithm, speeds=Constant(steady(torch.tensor(times))))
        wants = algorithm.round(w.rounds(6)[-1], w.rng)
        assert (next(wants), wants.send(None)) == (Sleep(4.0), Look())
        tell = wants.send(Clients(torch.arange(4), 4, 0.0))
        assert isinstance(tell, Tell)
        assert isinstance(tell.down, Down)
        assert tell.down.slowest.item() == pytest.approx(slowest)


# Robust means


def test_the_trimmed_mean_leaves_out_the_ends_of_each_coordinate() -> None:
    sent = torch.tensor([[1.0, 9.0], [2.0, -500.0], [3.0, 7.0], [4.0, 8.0], [1e6, 6.0]])
    found = held(Defence(mean="trimmed", trim=0.2), state(), heard(sent)).up.model
    torch.testing.assert_close(found.mean(dim=0), torch.tensor([3.0, 7.0]))
    few = held(Defence(mean="trimmed", trim=0.2), state(), heard(sent[:4])).up.model  # ⌊0.2·4⌋ = 0
    torch.testing.assert_close(few.mean(dim=0), sent[:4].mean(dim=0))


def test_the_geometric_median_has_the_least_sum_of_distances() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 3, generator=generator) + 1
    rows[4] += 100
    found = held(Defence(mean="geometric"), state(3), heard(rows)).up.model.mean(dim=0)
    point = rows.median(dim=0).values.clone().requires_grad_()
    search = torch.optim.LBFGS([point], max_iter=500, line_search_fn="strong_wolfe")

    def cost() -> Tensor:
        search.zero_grad()
        total: Tensor = (rows - point).norm(dim=1).sum()
        total.backward()
        return total

    search.step(cost)
    torch.testing.assert_close(found, point.detach(), atol=0.02, rtol=0)
    assert (rows.mean(dim=0) - point.detach()).norm() > 10


def test_robust_means_of_long_vectors_are_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, model = torch.randn(5, 100, generator=generator), torch.randn(100, generator=generator)
    for kind in "trimmed", "geometric":
        whole = held(Defence(mean=kind), state(model=model), heard(rows)).up.model
        with monkeypatch.context() as patch:
            patch.setattr("quafl.core.pieces.PIECE", 16)
            patch.setattr("quafl.core.defence.CHUNK", 16)
            pieces = held(Defence(mean=kind), state(model=model), heard(rows)).up.model
        torch.testing.assert_close(pieces, whole)


def still(n: int) -> Quadratic:
    """Every step leads to the client's own minimum: 0, 1, 2, … and 1000 for the last; all start at 0."""
    centers = torch.arange(n).float().unsqueeze(-1)
    centers[-1] = 1000.0
    return Quadratic(torch.tensor([2.0]), centers, start=torch.tensor([0.0]))


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (QuAFL(5, 1, wait=1.0, defence=Defence(mean="trimmed")), 5 / 6 * 2.0),  # X + m/(s+1) · the mean of 1, 2 and 3
        (FedAvg(5, 1, defence=Defence(mean="trimmed")), 2.0),
        (FedNova(5, 1, defence=Defence(mean="trimmed")), 2.0),
        (FedBuff(5, 1, defence=Defence(mean="trimmed")), 2.0),
        (QuAFL(5, 1, wait=1.0, defence=Defence(mean="geometric")), 5 / 6 * 2.0),  # on a line, it is the median
        (FedAvg(5, 1, defence=Defence(mean="geometric")), 2.0),
        (FedBuff(5, 1, defence=Defence(mean="geometric")), 2.0),
        (QuAFL(5, 1, wait=1.0, defence=Defence(clip=2.0)), (1 + 2 + 3 + 4) / 6),  # of 1, 2, 3 and 1000 the usual is 2
        (FedAvg(5, 1, defence=Defence(clip=2.0)), (1 + 2 + 3 + 4) / 5),
        (FedNova(5, 1, defence=Defence(clip=2.0)), (1 + 2 + 3 + 4) / 5),
        (FedBuff(5, 1, defence=Defence(clip=2.0)), (1 + 2 + 3 + 4) / 5),
        (SCAFFOLD(5, 1, lr=0.5, defence=Defence(mean="trimmed")), 2.0),
        (SCAFFOLD(5, 1, lr=0.5, defence=Defence(mean="geometric")), 2.0),
        (SCAFFOLD(5, 1, lr=0.5, defence=Defence(clip=2.0)), (1 + 2 + 3 + 4) / 5),
    ],
)
def test_each_algorithms_mean_is_the_robust_one(algorithm: Any, expected: float) -> None:
    w = world(still(5), 5, algorithm, lr=0.5)
    state = w.rounds(1)[0]
    assert state.model.item() == pytest.approx(expected, rel=1e-3)
    if isinstance(algorithm, SCAFFOLD):  # c = Σ (0 − y_i)/(K η_l)/N; with a bound, nobody knew yet what is usual
        assert state.control.item() == pytest.approx(0 if algorithm.defence.bounded else -expected / 0.5, rel=1e-3)


def test_scaffolds_control_variates_are_the_same_at_both_ends_within_a_bound() -> None:
    centers = torch.arange(1, 7).unsqueeze(-1) * torch.randn(6, 500, generator=torch.Generator().manual_seed(0))
    task, defence = Quadratic(torch.linspace(0.2, 1.0, 500), centers), Defence(clip=1.1)
    w = world(task, 6, SCAFFOLD(3, 2, lr=0.1, defence=defence), lr=0.1, codec=Lattice(bits=2))
    for state in islice(w.states(), 20):
        mine = w.fleet.clients.everybody().control.mean(dim=0)
        torch.testing.assert_close(mine, state.control, rtol=1e-3, atol=1e-4)
    assert state.control.norm() > 0.1


def test_fednova_bounds_what_a_client_has_gone_in_a_step() -> None:
    """Client 3 goes as far as others do in four steps, and says that it took one."""
    sent, steps = along(4, 4, 4, 4), torch.tensor([[4], [4], [4], [1]])
    found = held(Defence(clip=2.0), state(), heard(sent), unit=steps).up.model
    torch.testing.assert_close(found, along(4, 4, 4, 2))
    trimmed = held(Defence(mean="trimmed", trim=0.25), state(), heard(sent), unit=steps).up.model / steps
    torch.testing.assert_close(trimmed.mean(dim=0), along(1)[0])


# Whole runs


class Learned(NamedTuple):
    states: list[ServerState]
    accuracy: float

    def largest_move(self) -> float:
        return max(float((b.model - a.model).norm() / a.model.norm()) for a, b in pairwise(self.states))


@cache
def learned(
    make: Callable[..., Any],
    codec: Codec,
    defence: Defence,
    *,
    boost: float | None = None,
    statistics: float | None = None,
    told: float | None = None,
) -> Learned:
    """What the server goes through: digits, 20 clients, one of which may lie."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    task = Supervised(network, partition.iid(digits().train, 20), test=digits().test, batch_size=16)
    algorithm = make(sampled=5, defence=defence)
    until = UNTIL[type(algorithm).__name__]
    run = Simulation(task, 20, World(), algorithm, codec, sgd(0.2), Plan(until=until, every=until))
    if boost is not None:
        lie = Attack(lambda boost, model, own, chance: boost * own, statistics=statistics, distance=told)
        Attacked.into(run, [19], lie, boost, seed=5)
    states = [run.server for _ in run]
    return Learned(states, run.rows[-1]["accuracy"])


@EACH
def test_one_liar_of_twenty_moves_the_model_no_more_than_the_others_do(make: Callable[..., Any], codec: Codec) -> None:
    honest = learned(make, codec, Defence())
    open_, defended = (learned(make, codec, defence, boost=-30.0) for defence in (Defence(), DEFAULT))
    assert open_.largest_move() > 2 * honest.largest_move()
    assert defended.largest_move() < 1.5 * honest.largest_move()
    assert defended.accuracy > honest.accuracy - 0.05


@pytest.mark.parametrize(("name", "value"), [*((name, 9e11) for name in TABLE), ("QuAFL", -9e11)])
def test_one_liar_of_twenty_does_not_spoil_the_statistics(name: str, value: float) -> None:
    make, codec = TABLE[name]
    honest = learned(make, codec, Defence())
    defended = learned(make, codec, DEFAULT, boost=1.0, statistics=value)
    mine, theirs = (run.states[-1].buffers for run in (defended, honest))
    assert (mine - theirs).norm() < 0.5 * theirs.norm()
    assert all((state.buffers[16:] > 0).all() for state in defended.states)  # the variances
    assert defended.accuracy > honest.accuracy - 0.05


@pytest.mark.parametrize("name", ["QuAFL", "SCAFFOLD"])
def test_one_liar_of_twenty_does_not_coarsen_everybodys_messages(name: str) -> None:
    honest, defended = (learned(*TABLE[name], DEFAULT, boost=1.0, told=told) for told in (None, 1e4))
    for vector in honest.states[-1].expected:
        usual, reached = (max(state.expected.get(vector, 0) for state in run.states) for run in (honest, defended))
        assert reached < 2 * usual < 1e3


@EACH
def test_without_liars_the_default_changes_next_to_nothing(make: Callable[..., Any], codec: Codec) -> None:
    plain, defended = (learned(make, codec, defence) for defence in (Defence(), DEFAULT))
    assert abs(defended.accuracy - plain.accuracy) < 0.03
    apart = (defended.states[-1].model - plain.states[-1].model).norm()
    assert apart < 0.3 * (plain.states[-1].model - plain.states[0].model).norm()


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "mean") for name in TABLE), ("QuAFL", "trimmed"), ("FedBuff", "geometric")]
)
def test_a_run_that_is_taken_up_again_remembers_the_votes(name: str, kind: Any) -> None:
    make, codec = TABLE[name]

    def fresh() -> Simulation:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))
        task = Supervised(network, partition.by_class(digits().train, 8), test=digits().test)
        algorithm = make(sampled=3, patience=30.0, defence=Defence(clip=1.2, mean=kind))
        plan = Plan(until=300.0, every=20.0)
        return Simulation(task, 8, World(unreachable=0.2), algorithm, codec, sgd(0.1), plan)

    straight, left, again = fresh(), fresh(), fresh()
    for _ in straight:
        pass
    for _ in zip(range(4), left, strict=False):
        pass
    again.restore(left.state())
    for _ in again:
        pass
    assert again.rows == straight.rows
    assert len(again.rows) > len(left.rows)
    assert {"voters", "statistics"} < set(straight.server.votes) == set(again.server.votes)
    for kept, votes in straight.server.votes.items():
        assert torch.equal(again.server.votes[kept], votes)


def test_a_fast_client_has_one_place_in_fedbuffs_buffer() -> None:
    """Client 0 answers ten times before the others do once: without bounds it fills every buffer by itself."""

    class Counting(FedBuff):
        __slots__ = ()
        seen: ClassVar[list[Ids]] = []

        def _moved(self, server: fedbuff.Server, gathered: Gathered, there: int) -> fedbuff.Server:
            self.seen.append(gathered.senders)
            return FedBuff._moved(self, server, gathered, there)

    speeds = Constant(steady(torch.tensor([0.1, 1.0, 1.0, 1.0])))
    for defence, different in (Defence(), 1), (Defence(clip=3.0), 3):
        Counting.seen = []
        world(still(4), 4, Counting(3, 1, defence=defence), lr=0.1, speeds=speeds).rounds(2)
        assert [len(senders.unique()) for senders in Counting.seen] == [different] * 2


def test_fedbuffs_buffer_is_full_when_everybody_there_has_a_place() -> None:
    """Two clients, three places."""
    w = world(still(2), 2, FedBuff(3, 1, defence=Defence(clip=3.0)), lr=0.1)
    assert w.rounds(3)[-1].round == 3


# What is said


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"clip": 0.5}, "clip is 0.5, must be at least 1"),
        ({"clip": nan}, "clip is nan, must be at least 1"),
        ({"mean": "median"}, "mean is 'median', must be 'mean', 'trimmed' or 'geometric'"),
        ({"trim": 0.5}, "trim is 0.5, must be at least 0 and below 0.5"),
        ({"speeds": 1.0}, r"speeds is 1.0, must be from 0 \(the minimum\) to less than 1"),
    ],
)
def test_wrong_values_are_refused_with_a_sentence(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Defence(**wrong)


def test_a_settings_file_asks_for_a_defence_and_the_algorithm_has_it(tmp_path: Any) -> None:
    (tmp_path / "mine.toml").write_text("[defence]\nclip = 2.0\nmean = 'trimmed'\n")
    (settings,) = load(str(tmp_path / "mine.toml"))
    _, run = settings.simulation(0)
    assert run._algorithm.defence == Defence(clip=2.0, mean="trimmed")  # type: ignore[attr-defined]
    with pytest.raises(SettingsError, match=r"defence\.clip = 0\.5: must be greater than or equal to 1"):
        load(str(tmp_path / "mine.toml"), ["defence.clip=0.5"])
    (plain,) = load(str(tmp_path / "mine.toml"), ["defence={}"])
    assert plain.defence.build() == Defence(clip=2.0, mean="trimmed")  # laid over


def test_simulations_are_the_papers_and_federations_are_defended_unless_told_otherwise() -> None:
    assert {curve.defence.build() for curve in load("demo")} == {Defence()}
    assert FederationDefence(mean="geometric").build() == Defence(clip=3.0, speeds=0.1, mean="geometric")
