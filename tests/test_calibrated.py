"""Calibrated QuAFL, and the algorithms that it is compared with, each against a hand computation.

Clients of `two` have their minima at 0 and 4, start at 1, and with η a = 1/2 each step halves the way to the minimum.
"""

from itertools import islice, pairwise
from math import exp, inf, sqrt

import pytest
import torch
from torch import Tensor
from worlds import World, steady, world

from quafl import Absence, Defence, Lattice, Plan, Simulation, sgd
from quafl import World as SimulatedWorld
from quafl.codec import Identity
from quafl.core import CA2FL, FAVANO, Adaptive, Calibrated, FedAvg, FedBuff, HeavyBall
from quafl.core.conversation import Clients, Replies
from quafl.core.defence import sketched
from quafl.core.randomness import Generators
from quafl.sim.speeds import Constant
from quafl.tasks import Quadratic


def two(curvature: float = 1.0) -> Quadratic:
    return Quadratic(torch.tensor([curvature]), torch.tensor([[0.0], [4.0]]), start=torch.tensor([1.0]))


def many(n: int, dim: int = 40, noise: float = 0.2, spread: float = 1.0) -> Quadratic:
    centers = 1 + spread * torch.randn(n, dim, generator=torch.Generator().manual_seed(3))
    return Quadratic(torch.linspace(0.2, 1.0, dim), centers, noise=noise)


def remembered(w: World, state: object) -> Tensor:
    """Σ y_i as the clients know it, as of now."""
    clients, forget = w.fleet.clients.everybody(), w.algorithm.forget
    fade = torch.exp(forget * (clients.clock - state.sweeps)).float()
    return (fade.unsqueeze(-1) * clients.memory).sum(dim=0)


def test_calibrated_equals_two_rounds_computed_by_hand() -> None:
    """Both are contacted in every round, after one step and two; nothing is forgotten.

    Round 1, y = 0: x_0 = 1/2, so δ_0 = 1/2 and κ_0 = 1/6. x_1 = 5/2, 13/4: δ_1 = −9/4, κ_1 = 2/7. Nobody was contacted
    before, at 0 sweeps: weights 1. The direction is (1/2 − 9/4)/2 = −7/8, the rate √(2·2/2) = √2: X = 1 + 7√2/8.
    Σ y = 1/12 − 9/14. Both take over what they heard, 1.
    Round 2: δ_0 = 1/2, d_0 = 1/2 − 1/12 = 5/12, δ_1 = −9/4, d_1 = −9/4 + 9/14 = −45/28, one sweep old: weights 1/√2.
    X = 1 + 7√2/8 − √2·((5/12 − 45/28)/(2√2) + (1/12 − 9/14)/2)."""
    algorithm = Calibrated(sampled=2, local_steps=9, forget=0.0, wait=1.0)
    w = world(two(), 2, algorithm, lr=0.5, speeds=Constant(steady(torch.tensor([1.0, 0.5]))))
    first, second = w.rounds(2)
    assert first.model.item() == pytest.approx(1 + 7 * sqrt(2) / 8)
    assert first.memory.item() == pytest.approx(1 / 12 - 9 / 14)
    assert w.bases().flatten().tolist() == pytest.approx([first.model.item()] * 2)  # what was heard last
    residuals = (5 / 12 - 45 / 28) / (2 * sqrt(2))
    assert second.model.item() == pytest.approx(first.model.item() - sqrt(2) * (residuals + (1 / 12 - 9 / 14) / 2))
    assert second.memory.item() == pytest.approx(1 / 12 - 9 / 14 + 5 / 12 / 6 - 45 / 28 * 2 / 7)
    assert w.fleet.clients.everybody().memory.flatten().tolist() == pytest.approx([1 / 12 + 5 / 72, -9 / 14 - 45 / 98])


def test_a_step_is_one_at_first_and_settles_at_the_root_of_2s_over_n() -> None:
    """One of eight a round: ½ + ½ e^(−sweeps), of the direction that the server's state and what it heard make."""
    w = world(many(8), 8, Calibrated(sampled=1, local_steps=9, forget=0.0, wait=1.0), lr=0.1)
    before = w.start
    for round, after in enumerate(islice(w.states(), 40)):
        heard = w.came[-1]
        age = before.sweeps - before.contacted[heard.senders].clamp(min=0) if round else torch.zeros(1)
        direction = heard.up.residual[0] / (1 + age).sqrt() + before.memory / 8
        step = 0.5 + 0.5 * exp(-round / 8)
        torch.testing.assert_close(before.model - after.model, (step * direction).to(after.model), rtol=1e-4, atol=1e-5)
        before = after


def test_a_client_that_has_done_nothing_sends_nothing_and_takes_the_model_over() -> None:
    """Client 1's steps take for ever: it is contacted, and nothing comes of it but its new base."""
    speeds = Constant(steady(torch.tensor([1.0, 1e9])))
    w = world(two(), 2, Calibrated(sampled=2, local_steps=3, wait=1.0), lr=0.5, speeds=speeds, codec=Lattice(bits=8))
    states = w.rounds(3)
    totals = w.fleet.totals
    assert (totals.contacts, totals.idle, totals.lost) == (6, 3, 0)
    assert totals.up == 3 * totals.down / 6  # of as long messages
    assert [replies.senders.tolist() for replies in w.came] == [[0]] * 3
    assert [replies.failed.tolist() for replies in w.came] == [[1]] * 3
    assert torch.allclose(w.bases()[1], states[1].model, atol=0.05)
    assert w.fleet.clients.everybody().memory[1].item() == 0


@pytest.mark.parametrize(
    ("sampled", "unreachable", "patience", "clip"),
    [(6, 0.0, inf, inf), (2, 0.0, inf, inf), (2, 0.4, inf, inf), (4, 0.0, 2.5, inf), (2, 0.0, inf, 1.1)],
    ids=["all", "some", "some do not hear", "some are too late", "some are longer than is usual"],
)
def test_both_ends_remember_the_same_with_two_bits_and_whatever_gets_lost(
    sampled: int, unreachable: float, patience: float, clip: float
) -> None:
    algorithm = Calibrated(sampled=sampled, local_steps=3, patience=patience, wait=0.5, defence=Defence(clip=clip))
    speeds = Constant(steady(torch.tensor([1.0, 1.0, 0.5, 2.0, 1.0, 3.0])))
    w = world(
        many(6, dim=1500), 6, algorithm, codec=Lattice(bits=2), speeds=speeds, latency=2.0, unreachable=unreachable
    )
    for state in islice(w.states(), 25):
        torch.testing.assert_close(remembered(w, state), state.memory, atol=1e-5, rtol=1e-4)
    assert state.memory.norm() > 0.1
    assert w.fleet.totals.lost > 0 or not unreachable


def test_the_share_of_a_client_that_leaves_for_good_fades_and_it_is_no_longer_counted() -> None:
    """Client 0 is there until 40. With a tenth forgotten in a sweep, it counts for ten sweeps more."""
    algorithm = Calibrated(sampled=2, local_steps=4, forget=0.1)
    plan = Plan(until=400.0, every=10.0)
    run = Simulation(
        many(4, noise=0.0),
        4,
        SimulatedWorld(slow=0.0, absences=[Absence(40.0, 1e9, [0])], latency_at_32_bits=4.0),
        algorithm,
        Identity(),
        sgd(0.2),
        plan,
    )
    before, after = [], []
    for _ in run:
        server = run.server
        lost = exp(-algorithm.forget * (server.sweeps - float(server.contacted[0]))) if run.time > 40 else 1.0
        (before if run.time < 40 else after).append((run.time, server.sweeps, lost))
    assert after[-1][2] < 0.01
    pace = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(after)]  # sweeps a time unit: s/n/4
    assert min(pace) == pytest.approx(2 / 4 / 4, rel=0.05)
    assert max(pace[-5:]) == pytest.approx(2 / 3 / 4, rel=0.05)


def test_a_client_that_joins_late_counts_from_then_on() -> None:
    algorithm = Calibrated(sampled=2, local_steps=4)
    world_ = SimulatedWorld(slow=0.0, absences=[Absence(0.0, 100.0, [2, 3])], latency_at_32_bits=4.0)
    run = Simulation(many(4), 4, world_, algorithm, Identity(), sgd(0.2), Plan(until=200.0, every=4.0))
    sweeps = dict((run.time, run.server.sweeps) for _ in run)  # noqa: C402
    assert sweeps[100.0] == pytest.approx(25 * 2 / 2)
    assert sweeps[200.0] - sweeps[100.0] == pytest.approx(25 * 2 / 4)


def test_calibration_ends_nearer_to_the_minimum_where_clients_differ() -> None:
    """Of all clients, two a round: without a memory, whoever was heard last pulls."""
    task, ends = many(10, noise=0.0, spread=3.0), {}
    for remembers in True, False:
        algorithm = Calibrated(sampled=2, local_steps=2, forget=0.02 if remembers else 1e9, wait=2.0)
        w = world(task, 10, algorithm, lr=0.05, latency=1.0)
        last = w.rounds(600)[-100:]
        ends[remembers] = sum(float((state.model - task.minimum).norm()) for state in last) / 100
    assert ends[True] < 0.2 * ends[False]


def test_a_liar_cannot_have_the_server_remember_more_than_is_usual() -> None:
    """Five clients say what they would: a unit vector less what they remember. One says the same again and again, not
    longer than the step's bound; without another bound its share would come to 50 times as much."""

    def length_of_liars_share(defence: Defence) -> float:
        algorithm = Calibrated(sampled=6, defence=defence)
        state = algorithm.start(torch.zeros(2000), torch.empty(0))
        generator = torch.Generator().manual_seed(1)
        memories, everybody = torch.zeros(5, 2000), torch.arange(6)
        lie = torch.nn.functional.normalize(torch.randn(2000, generator=generator), dim=0)
        for _ in range(150):
            honest = torch.nn.functional.normalize(torch.randn(5, 2000, generator=generator), dim=1) - memories
            up = algorithm.records.up(
                residual=torch.cat((lie[None], honest)),
                share=torch.full((6,), 0.5),
                sweeps=torch.full((6,), state.sweeps),
                statistics=torch.empty(6, 0),
            )
            replies = Replies(everybody, up, torch.full((6,), state.round), everybody, {}, everybody[:0])
            round = algorithm.round(state, Generators(0))
            for back in None, None, Clients(everybody, 6, 0.0), None:
                round.send(back)
            with pytest.raises(StopIteration) as ended:
                round.send(replies)
            state, memories = ended.value.value, exp(-0.02) * (memories + honest / 2)
        return float((state.memory - memories.sum(dim=0)).norm())

    assert length_of_liars_share(Defence()) > 20
    assert length_of_liars_share(Defence(clip=3.0)) < 3


def test_a_sketch_is_linear_and_about_as_long() -> None:
    x, y = torch.randn(2, 5000, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(sketched(2 * x - y), 2 * sketched(x) - sketched(y), atol=1e-3, rtol=1e-4)
    vectors = torch.randn(200, 5000, generator=torch.Generator().manual_seed(2))
    ratio = sketched(vectors).norm(dim=1) / vectors.norm(dim=1)
    assert 0.8 < ratio.min() <= ratio.max() < 1.2
    assert abs(ratio.mean() - 1) < 0.02


# Rivals


def test_ca2fl_equals_three_rounds_computed_by_hand() -> None:
    """η a = 1/2, steps take 1 and 3, s = 1, no latency; K = 1.

    t=1: client 0 from 1: Δ = 1/2, nothing is remembered: v = 1/2, x = 1/2, h = (1/2, 0).
    t=2: client 0 from 1/2: Δ = 1/4. v = (1/2 + 0)/2 + 1/4 − 1/2 = 0, x = 1/2, h = (1/4, 0). Without what was remembered
    it would be 1/4.
    t=3: client 1, asked first, from 1: Δ = −3/2. v = 1/8 − 3/2 = −11/8, x = 15/8, h = (1/4, −3/2)."""
    w = world(two(), 2, CA2FL(sampled=1, local_steps=1), lr=0.5, speeds=Constant(steady(torch.tensor([1.0, 3.0]))))
    states = w.rounds(3)
    assert [state.model.item() for state in states] == pytest.approx([1 / 2, 1 / 2, 15 / 8])
    assert [state.cache.flatten().tolist() for state in states] == [[0.5, 0.0], [0.25, 0.0], [0.25, -1.5]]


def test_ca2fl_gathers_several_and_keeps_the_last_of_one_client() -> None:
    """M = 3: client 0 comes at 1, 2 and 3, client 1 at 3, first. Client 0 starts from 1 each time: Δ = 1/2; client 1
    has Δ = −3/2. v = 0 + (1/2 + 1/2 − 3/2)/3 = −1/6."""
    w = world(two(), 2, CA2FL(sampled=3, local_steps=1), lr=0.5, speeds=Constant(steady(torch.tensor([1.0, 3.0]))))
    state = w.rounds(1)[0]
    assert state.model.item() == pytest.approx(1 + 1 / 6)
    assert state.cache.flatten().tolist() == [0.5, -1.5]


@pytest.mark.parametrize("reweight", ["steps", "mean"])
def test_favano_equals_two_rounds_computed_by_hand(reweight: str) -> None:
    """Both are contacted every 2: client 0 has then done 2 steps, client 1 one, and none before every second contact.

    Round 1: x_0 = 1/4, divided by 2 steps: 1 − 3/8 = 5/8. x_1 = 1 with no step: itself. w = (1 + 5/8 + 1)/3 = 7/8.
    Both take over 1, which they heard.
    Round 2: client 0 the same, 5/8. Client 1, whose step took 3 and began anew at 2: nothing again, 1.
    w = 7/8 + ((5/8 − 7/8) + (1 − 7/8))/3."""
    speeds = Constant(steady(torch.tensor([1.0, 3.0])))
    w = world(two(), 2, FAVANO(sampled=2, local_steps=5, reweight=reweight, wait=2.0), lr=0.5, speeds=speeds)  # type: ignore[arg-type]
    first, second = w.rounds(2)
    assert first.model.item() == pytest.approx(7 / 8)
    assert second.model.item() == pytest.approx(7 / 8 + (5 / 8 - 7 / 8 + 1 / 8) / 3)


def test_favano_divides_by_the_chance_of_having_done_a_step() -> None:
    """α = P(E > 0)·(E ∧ K): a client that has moved in one of two contacts, and then by one step, counts twice."""
    algorithm = FAVANO(sampled=1, local_steps=4)
    w = world(two(), 2, algorithm, lr=0.5)
    client = w.fleet.clients.everybody()[:1]
    down = algorithm.records.down(model=torch.ones(1), statistics=torch.empty(0))
    _, after = algorithm.answer(client, down)
    moved = type(after)(**{**after.tree(), "taken": torch.tensor([1]), "progress": torch.tensor([[0.25]])})
    up, after = algorithm.answer(moved, down)
    assert (up.report.item(), after.busy.item(), after.expected_steps.item()) == pytest.approx(
        (1 - 0.25 / 0.5, 0.5, 0.5)
    )


def test_fedavg_with_momentum_equals_two_rounds_computed_by_hand() -> None:
    """K = 1: from 1, the mean is (1/2 + 5/2)/2 = 3/2, Δ = −1/2 = v, x = 1 + 0.6·1/2 = 1.3. From there the mean is
    (0.65 + 2.65)/2 = 1.65, v = 0.5·(−1/2) − 0.35 = −0.6, x = 1.3 + 0.36."""
    w = world(two(), 2, FedAvg(sampled=2, local_steps=1, server=HeavyBall(0.5), server_lr=0.6), lr=0.5)
    assert [state.model.item() for state in w.rounds(2)] == pytest.approx([1.3, 1.66])


def test_fedadam_equals_two_rounds_computed_by_hand() -> None:
    """β₁ = 1/2, β₂ = 3/4, τ = 1/2, η = 1. Δ = −1/2: m = −1/4, v = 3/4·1/4 + 1/4·1/4 = 1/4, x = 1 + (1/4)/(1/2 + 1/2).
    Then from 5/4 the mean is 5/4 + 3/8·… = (5/8 + 21/8)/2 = 13/8: Δ = −3/8, m = −5/16, v = 3/16 + 9/256."""
    w = world(two(), 2, FedAvg(sampled=2, local_steps=1, server=Adaptive((0.5, 0.75), 0.5)), lr=0.5)
    first, second = w.rounds(2)
    assert first.model.item() == pytest.approx(5 / 4)
    assert second.model.item() == pytest.approx(5 / 4 + (5 / 16) / (sqrt(3 / 16 + 9 / 256) + 1 / 2))


def test_fedprox_pulls_back_to_where_the_client_started() -> None:
    """f + μ/2 (x − 1)², μ = 1, η a = 1/2: x_0 = 1, 1/2, 1/2 − 1/4 + 1/4 = 1/2; x_1 = 1, 5/2, 5/2 + 3/4 − 3/4."""
    w = world(two(), 2, FedAvg(sampled=2, local_steps=2, proximity=1.0), lr=0.5)
    assert w.rounds(1)[0].model.item() == pytest.approx((1 / 2 + 5 / 2) / 2)


def test_fadas_takes_the_largest_square_and_a_smaller_rate_for_what_is_old() -> None:
    """η a = 1/2, steps take 1 and 3, s = 1; β₁ = 0, β₂ = 1/2, τ = 1/2, η = 1; delays above 1 round count.

    t=1: Δ = 1/2, v = 1/8 + 1/8 = 1/4: x = 1 − (1/2)/(1/2 + 1/2) = 1/2.
    t=2: from 1/2: Δ = 1/4, v = 1/8 + 1/32 < 1/4, so 1/4 stays: x = 1/2 − 1/4.
    t=3: client 1 from 1, two rounds old: Δ = −3/2, v = 5/64 + 9/8 = 77/64, η = 1/2:
    x = 1/4 + (3/2)/(√(77/64) + 1/2)/2."""
    algorithm = FedBuff(sampled=1, local_steps=1, server=Adaptive((0.0, 0.5), 0.5, largest=True), delay=1)
    w = world(two(), 2, algorithm, lr=0.5, speeds=Constant(steady(torch.tensor([1.0, 3.0]))))
    expected = [1 / 2, 1 / 4, 1 / 4 + 1.5 / (sqrt(77 / 64) + 0.5) / 2]
    assert [state.model.item() for state in w.rounds(3)] == pytest.approx(expected)


def test_settings_that_make_no_sense_are_refused() -> None:
    for made, text in (
        (lambda: Calibrated(forget=-1.0), "forget is -1.0, must not be negative, and finite"),
        (lambda: Calibrated(server_lr=0.0), "server_lr is 0.0, must be positive and finite"),
        (lambda: FedBuff(delay=0.5), "delay is 0.5, must be at least 1 round"),
        (lambda: FedAvg(server_lr=0.5), "server_lr is 0.5, must be 1 where the server adopts the mean"),
        (lambda: FAVANO(reweight="all"), "reweight is 'all', must be 'steps' or 'mean'"),  # type: ignore[arg-type]
        (lambda: Adaptive(betas=(1.0, 0.9)), "betas has 1.0, must be at least 0 and below 1"),
    ):
        with pytest.raises(ValueError, match=text):
            made()
