"""QuAFL does what Algorithm 1 says."""

from dataclasses import replace
from itertools import islice, pairwise
from math import inf, isnan

import pytest
import torch
from torch import Tensor
from worlds import NEVER, World, steady, world

from quafl.codec import Identity, Lattice
from quafl.codec.seams import Codec
from quafl.core import QuAFL
from quafl.core.client import newcomers
from quafl.core.conversation import Clients, Look, Sleep, Tell
from quafl.core.quafl import Client, Down, Server
from quafl.record.diagnostics import mean_model, potential
from quafl.sim.link import Link
from quafl.sim.piecewise import Piecewise
from quafl.sim.speeds import Constant
from quafl.tasks import Quadratic

D = 40


def still(n: int) -> Quadratic:
    """A task nobody has time for."""
    return Quadratic(torch.ones(D), torch.zeros(n, D))


def scattered(n: int, spread: float = 1.0) -> Tensor:
    return spread * torch.randn(n, D, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("unreachable", [0.0, 0.5], ids=["all answer", "some do not answer"])
def test_contact_preserves_the_mean_of_all_models(unreachable: float) -> None:
    w = world(still(8), 8, QuAFL(sampled=4), speeds=NEVER, unreachable=unreachable)
    w.scatter(scattered(8))
    before = w.everybody(w.start)
    after = w.everybody(w.rounds(10)[-1])
    assert not torch.allclose(after, before, atol=1e-2)
    torch.testing.assert_close(after.mean(dim=0), before.mean(dim=0), atol=1e-6, rtol=0)
    assert (w.fleet.totals.lost > 0) == (unreachable > 0)


def test_contact_preserves_the_mean_in_expectation_when_quantized() -> None:
    drifts = []
    for seed in range(300):
        w = world(still(4), 4, QuAFL(sampled=2), codec=Lattice(bits=3), speeds=NEVER, seed=seed)
        w.scatter(scattered(4, 0.1))
        start = replace(w.start, expected={"model": 0.1 * D**0.5})
        before = w.everybody(start).mean(dim=0)
        drifts.append(w.everybody(w.rounds(1, start)[0]).mean(dim=0) - before)
    drift = torch.stack(drifts)
    error = drift.std(dim=0) / len(drifts) ** 0.5
    assert (drift.std(dim=0) > 1e-3).all()  # there is noise to average out
    assert (drift.mean(dim=0).abs() < 4.5 * error).all()


def test_the_lattice_side_does_not_feed_on_its_own_noise() -> None:
    """With two bits the noise of a message is larger than the distance it was made for; measured distances without it
    shrink as the models come together."""
    w = world(still(8), 8, QuAFL(sampled=4), codec=Lattice(bits=2), speeds=NEVER)
    states = w.rounds(40, replace(w.start, expected={"model": 1.0}))
    assert states[-1].expected["model"] < 0.01


def test_contact_without_progress_never_raises_the_potential() -> None:
    w = world(still(8), 8, QuAFL(sampled=3), speeds=NEVER)
    w.scatter(scattered(8))
    levels = [potential(w.start.model, w.bases())]
    levels += [potential(state.model, w.bases()) for state in islice(w.states(), 30)]
    assert all(later <= earlier + 1e-5 for earlier, later in pairwise(levels))
    assert levels[-1] < 0.05 * levels[0]


def test_server_and_client_updates_equal_lines_8_and_6_by_hand() -> None:
    """η·a = 1, so that one local step leads to the client's own minimum: Y^1 = 0 and Y^2 = 4, every time."""
    task = Quadratic(torch.tensor([2.0]), torch.tensor([[0.0], [4.0]]), start=torch.tensor([1.0]))
    w = world(task, 2, QuAFL(sampled=2, local_steps=1, wait=1.0), lr=0.5)
    first = w.rounds(1)[0]
    assert first.model.item() == pytest.approx((1 + 0 + 4) / 3)
    assert w.bases().flatten().tolist() == pytest.approx([1 / 3, 1 / 3 + 8 / 3])
    second = w.rounds(1, first)[0]
    assert second.model.item() == pytest.approx((5 / 3 + 0 + 4) / 3)
    assert w.bases().flatten().tolist() == pytest.approx([5 / 9, 5 / 9 + 8 / 3])


@pytest.mark.parametrize(
    ("server", "client", "model", "bases"),
    [
        (1.0, 1.0, 5 / 3, [1 / 3, 3.0]),
        (1.0, 0.0, 5 / 3, [1.0, 1.0]),
        (0.0, 1.0, 2.0, [1 / 3, 3.0]),
        (0.0, 0.0, 2.0, [1.0, 1.0]),
        (0.5, 0.25, 11 / 6, [5 / 6, 1.5]),  # on the straight line between the variants
    ],
)
def test_averaging_can_be_weakened_at_either_end(
    server: float, client: float, model: float, bases: list[float]
) -> None:
    task = Quadratic(torch.tensor([2.0]), torch.tensor([[0.0], [4.0]]), start=torch.tensor([1.0]))
    algorithm = QuAFL(sampled=2, local_steps=1, wait=1.0, server_averaging=server, client_averaging=client)
    w = world(task, 2, algorithm, lr=0.5)
    assert w.rounds(1)[0].model.item() == pytest.approx(model)
    assert w.bases().flatten().tolist() == pytest.approx(bases)


def client(*, expected_steps: float, contacts: int, statistics: Tensor | None = None) -> Client:
    """Its base is 10, its progress 4, after two steps."""
    buffers = torch.empty(0) if statistics is None else statistics
    fresh: Client = newcomers(QuAFL(), torch.tensor([10.0]), buffers, torch.ones(1))
    return replace(
        fresh,
        progress=torch.tensor([[4.0]]),
        taken=torch.tensor([2]),
        expected_steps=torch.tensor([expected_steps]),
        contacts=torch.tensor([contacts]),
    )


def message(model: float, slowest: float, statistics: Tensor | None = None) -> Down:
    return Down(
        model=torch.tensor([model]),
        statistics=torch.empty(0) if statistics is None else statistics,
        slowest=torch.tensor(slowest),
    )


@pytest.mark.parametrize(
    ("weighted", "contacts", "slowest", "report"),
    [
        (False, 9, 1.0, 6.0),  # 10 − 4
        (True, 9, 1.0, 8.0),  # η_i = 1/2
        (True, 9, 5.0, 6.0),  # never above 1
        (True, 9, inf, 6.0),  # nobody has told a speed
        (True, 4, 1.0, 6.0),  # too few contacts to know its own
    ],
)
def test_fast_clients_are_damped_by_the_slowest_speed_over_their_own(
    weighted: bool, contacts: int, slowest: float, report: float
) -> None:
    algorithm, down = QuAFL(sampled=3, weighted=weighted), message(2.0, slowest)
    stopped = algorithm.hear(client(expected_steps=2.0, contacts=contacts), down)
    assert stopped.budget.item() == stopped.taken.item() == 2  # it answers at once
    said, adopted = algorithm.answer(stopped, down)
    assert said.report.item() == report
    assert adopted.base.item() == pytest.approx(2 / 4 + 3 / 4 * report)
    assert (adopted.progress.item(), adopted.taken.item(), adopted.budget.item()) == (0.0, 0, algorithm.local_steps)


def test_slowest_speed_is_the_least_mean_of_steps_and_never_below_its_floor() -> None:
    """Clients 0 and 1 complete 4 and 2 steps between contacts; client 2 none."""
    for times, slowest in ([1.0, 2.0, 2.0], 2.0), ([1.0, 2.0, NEVER], 0.1):
        algorithm = QuAFL(sampled=3, local_steps=9, weighted=True, wait=4.0)
        w = world(
            Quadratic(torch.ones(1), torch.zeros(3, 1)), 3, algorithm, speeds=Constant(steady(torch.tensor(times)))
        )
        state = w.rounds(6)[-1]
        assert state.speeds.tolist() == pytest.approx([4.0, 2.0, 2.0 if slowest == 2.0 else 0.0])
        assert told(w, state) == pytest.approx(slowest)


def told(w: World, state: Server) -> float:
    """H_min, in the next message."""
    wants = w.algorithm.round(state, w.rng)
    assert next(wants) == Sleep(w.algorithm.wait)
    assert wants.send(None) == Look()
    tell = wants.send(Clients(torch.arange(3), 3, 0.0))
    assert isinstance(tell, Tell)
    assert isinstance(tell.down, Down)
    return tell.down.slowest.item()


def test_a_round_that_nobody_answers_changes_nothing() -> None:
    w = world(still(4), 4, QuAFL(sampled=2, patience=3.0), unreachable=1.0, codec=Lattice(bits=4))
    w.scatter(scattered(4))
    before = w.everybody(w.start)
    state = w.rounds(2)[-1]
    assert torch.equal(w.everybody(state), before)
    assert (state.round, w.clock.now(), w.fleet.totals.lost) == (2, 6.0, 4)


@pytest.mark.parametrize("codec", [Lattice(bits=6), None], ids=["lattice", "identity"])
def test_mean_trajectory_follows_the_exact_linear_recursion(codec: Lattice | None) -> None:
    """On quadratics with clients that always finish their K steps, E[X_t] and E[X^i] obey a linear recursion:

    E[Y^i] = c_i + (1 − η a)^K (E[X^i] − c_i); E[X] += (s/n)/(s+1) Σ (E[Y^i] − E[X]); a client is drawn with
    probability s/n and then moves to E[X]/(s+1) + s/(s+1) E[Y^i].
    """
    n, s, local_steps, lr, rounds, seeds = 4, 2, 3, 0.2, 8, 150
    curvature = torch.tensor([0.5, 1.0, 2.0])
    centers = torch.tensor([[1.0, 0, 0], [0, 2, 0], [0, 0, 3], [-1, 1, -1]])
    server, clients = torch.zeros(3), torch.zeros(n, 3)
    expected = []
    for _ in range(rounds):
        reports = centers + (1 - lr * curvature) ** local_steps * (clients - centers)
        moved = server / (s + 1) + s / (s + 1) * reports
        server = server + s / n * (reports - server).sum(dim=0) / (s + 1)
        clients = clients + s / n * (moved - clients)
        expected.append(server)
    algorithm = QuAFL(sampled=s, local_steps=local_steps, wait=1.0)
    runs = []
    for seed in range(seeds):
        task = Quadratic(curvature, centers, noise=0.3, seed=seed)
        w = world(task, n, algorithm, codec=codec, lr=lr, speeds=1e-3, seed=seed)
        runs.append(torch.stack([state.model for state in w.rounds(rounds)]))
    trajectories = torch.stack(runs)
    error = trajectories.std(dim=0) / seeds**0.5
    assert ((trajectories.mean(dim=0) - torch.stack(expected)).abs() < 4.5 * error + 1e-6).all()
    assert (error < 0.05).all()


def test_a_yielded_state_is_all_the_server_needs_to_go_on() -> None:
    def fresh() -> World:
        task = Quadratic(torch.ones(D), scattered(6), noise=0.1)
        speeds = Constant(steady(torch.tensor([0.4, 0.5, 0.7, 1.0, 1.5, 2.0])))
        return world(task, 6, QuAFL(sampled=3, weighted=True, wait=2.0), codec=Lattice(bits=4), speeds=speeds)

    straight = fresh().rounds(30)
    w = fresh()
    first = w.rounds(20)
    assert not first[-1].speeds.isnan().all()
    resumed = first + w.rounds(10, first[-1])  # from the last state alone
    assert all(torch.equal(a.model, b.model) for a, b in zip(straight, resumed, strict=True))


def test_each_side_decodes_with_its_own_model_as_the_key() -> None:
    """Models far from the origin but near each other: only the right keys decode without a repair."""
    task = Quadratic(torch.ones(D), 1000 + scattered(6), start=1000 + torch.zeros(D))
    w = world(task, 6, QuAFL(sampled=3, wait=2.0), codec=Lattice(bits=8), lr=0.1)
    w.rounds(20)
    assert w.fleet.totals.refined <= 6


@pytest.mark.parametrize(("codec", "measured"), [(Lattice(bits=16, resolution=0.01), (9 + 16) / 2), (Identity(), 0.0)])
def test_the_server_expects_its_own_step_and_distances_where_models_are_coded_by_them(
    codec: Codec, measured: float
) -> None:
    w = world(still(2), 2, QuAFL(sampled=2), codec=codec, speeds=NEVER)
    w.scatter(torch.stack((torch.full((D,), 3.0), torch.full((D,), 4.0))))
    step = (7 / 3) ** 2
    assert w.rounds(1)[0].expected["model"] == pytest.approx(((measured + step) * D) ** 0.5, rel=1e-3)


def test_a_speed_is_told_after_five_contacts() -> None:
    w = world(Quadratic(torch.ones(1), torch.zeros(1, 1)), 1, QuAFL(sampled=1, weighted=True, wait=2.0))
    speeds = [state.speeds.item() for state in w.rounds(6)]
    assert [isnan(speed) for speed in speeds] == [True] * 4 + [False] * 2
    assert speeds[-1] == 2.0


def test_steps_go_on_with_new_batches_after_a_contact() -> None:
    asked: list[int] = []

    class Listening(Quadratic):
        def batch(self, client: int, step: int) -> tuple[int, Tensor]:
            asked.append(step)
            return super().batch(client, step)

    world(Listening(torch.ones(1), torch.zeros(1, 1)), 1, QuAFL(sampled=1, wait=3.0)).rounds(3)
    assert asked == list(range(9))


def test_buffers_are_averaged_like_models_and_never_damped() -> None:
    state = client(expected_steps=2.0, contacts=9, statistics=torch.tensor([8.0]))
    said, adopted = QuAFL(sampled=3, weighted=True).answer(state, message(2.0, 1.0, torch.tensor([4.0])))
    assert said.report.item() == 8.0  # η_i = 1/2
    assert said.statistics.item() == 8.0
    assert adopted.buffers.item() == 4 / 4 + 3 / 4 * 8


def test_a_client_whose_answer_was_not_applied_goes_back_to_it_and_the_mean_of_all_models_stays() -> None:
    """The server at 2 and the client at Y^i = 6: it adopts 2/4 + 3/4·6, and the server does not move."""
    algorithm, down = QuAFL(sampled=3), message(2.0, inf, torch.tensor([4.0]))
    said, adopted = algorithm.answer(client(expected_steps=2.0, contacts=9, statistics=torch.tensor([8.0])), down)
    stepped = replace(adopted, progress=torch.tensor([[0.5]]))
    back = algorithm.lost(stepped, said)
    assert (adopted.base.item(), back.base.item(), back.buffers.item()) == (5.0, 6.0, 8.0)
    assert back.progress.item() == 0.5  # what it has done since is its own


def test_quafl_finds_the_minimum_of_heterogeneous_quadratics() -> None:
    task = Quadratic(torch.linspace(0.1, 1, D), 1 + scattered(10))
    w = world(task, 10, QuAFL(sampled=5, local_steps=3, wait=3.0), codec=Lattice(bits=4), lr=0.05)
    state = w.rounds(400)[-1]
    everybody = mean_model(state.model, w.bases())
    assert (everybody - task.minimum).norm() < 0.1 * task.minimum.norm()


def test_a_client_whose_answer_came_too_late_goes_back_to_it() -> None:
    """The server is at 0, the client at 4. Its octets take 40 at first, the server waits for 10: the client has moved
    to (0 + 4)/2 for nothing. It hears so with the next contact, answers 4 once more, and the mean is 2 again."""
    slow = Piecewise.of([[(0.0, 1.0 / 40), (30.0, 1e9)]])
    octets = Identity().encode(torch.zeros(D)).nbytes
    link = Link(0.0, down=Piecewise.steady(torch.tensor([1e9])), up=Piecewise(slow.times, slow.values * octets))
    w = world(still(1), 1, QuAFL(sampled=1, patience=10.0), speeds=NEVER, link=link)
    w.scatter(torch.full((1, D), 4.0))
    states = w.rounds(6)
    assert w.fleet.totals.lost >= 1
    assert states[0].model[0] == 0
    torch.testing.assert_close(w.everybody(states[-1]).mean(dim=0), torch.full((D,), 2.0))
    assert states[-1].model[0] == 2
