"""What quafl.theory predicts, and what the algorithms do."""

from dataclasses import replace
from itertools import combinations, islice
from math import comb, log2, sqrt

import pytest
import torch
from slack import measured_case
from torch import Tensor
from worlds import World, steady, world

from quafl.codec import Codecs, Lattice
from quafl.core import Calibrated, QuAFL
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm
from quafl.record.diagnostics import potential
from quafl.sim.link import Link
from quafl.sim.speeds import Constant, Exponential
from quafl.tasks import Quadratic
from quafl.theory import (
    Polling,
    Problem,
    conditions,
    damping,
    full_theorem,
    full_theorem_as_printed,
    holds_from,
    lattice_side,
    learning_rate,
    main_theorem,
    polling,
    potential_bound,
    rounds_for,
    server_condition,
    server_corollary,
)
from quafl.theory.contraction import clients_apart, contraction, lemma, potential_after, server_apart
from quafl.theory.quadratics import Linear, averaging_weights, calibrated_weights, deviation, weighted_mean

# The parameters and the bounds


def test_learning_rate_and_side_equal_a_hand_computation() -> None:
    """n = 2, H = (1, 2), s = 1, T = 36: η = 3/6; Σ η_i²/n = (1 + 1/4)/2; R = 2 + 36^(3/3) for d = 3."""
    assert learning_rate(speeds=[1, 2], sampled=1, rounds=36) == pytest.approx(0.5)
    side = lattice_side(
        speeds=[1, 2],
        sampled=1,
        rounds=36,
        local_steps=5,
        dim=3,
        variance=8.0,
        dissimilarity=0.5,
        gap=6.0,
        smoothness=2.0,
    )
    assert side == pytest.approx(0.5 * sqrt(0.625 * 8 + 2 * 5 * 0.5 + 3) / (38**2 + 7))


HAND = Problem(  # D = 0.625·8 + 2·5·0.5 = 10, Δ = 6, √(sT) = 6
    speeds=(1.0, 2.0),
    sampled=1,
    local_steps=5,
    rounds=36,
    dim=3,
    smoothness=2.0,
    variance=8.0,
    dissimilarity=0.5,
    gap=6.0,
)


def test_each_term_of_the_main_theorem_equals_a_hand_computation() -> None:
    assert [term.value for term in main_theorem(HAND).terms] == pytest.approx(
        [4 * 6 / 6, 36 * 5 * 2 * 10 / 6, 1608 * 2 * 9 * 25 * 4 * 10 / 36, 800 * 2 * 9 * 5 * 2 * 6 / 36]
    )


def test_each_term_of_the_server_s_corollary_equals_a_hand_computation() -> None:
    assert [term.value for term in server_corollary(HAND).terms] == pytest.approx(
        [
            12 * 6 / 6,
            108 * 5 * 2 * 10 / 6,
            (4824 * 2 * 9 * 25 * 4 + 320 * 4 * 9 * 5 * 4) * 10 / 36,
            (2400 * 2 * 9 * 5 * 2 + 160 * 4 * 9 * 2) * 6 / 36,
        ]
    )


def test_the_full_theorem_is_the_main_one_before_it_is_simplified() -> None:
    """With the main theorem's γ, it lies below, but for the part of the last term that the simplification forgets."""
    for rounds in 36, 10**6, 10**12:
        p = replace(HAND, rounds=rounds)
        forgotten = 2 * p.smoothness * p.spread / sqrt(rounds)  # s = H_min = 1
        assert full_theorem(p).value <= main_theorem(p).value + forgotten * (1 + 1e-9)
    p = replace(HAND, rounds=10**14, gap=0.0)
    assert full_theorem(p).value > main_theorem(p).value, "the forgotten part counts where the other terms are small"


def test_where_the_paper_prints_two_readings_both_are_given() -> None:
    assert learning_rate(speeds=[1.0], sampled=4, rounds=25) == pytest.approx(
        2 * learning_rate(speeds=[1.0], sampled=4, rounds=25, reading="appendix")
    )
    assert damping([1.0, 2.0]) == pytest.approx(0.625)
    assert damping([1.0, 2.0], "main text") == pytest.approx(2.5)
    assert HAND.side_as("main text") == pytest.approx(HAND.side * sqrt((2.5 * 8 + 5 + 3) / (5 + 5 + 3)))
    assert full_theorem_as_printed(HAND).terms[1].value == pytest.approx(full_theorem(HAND).terms[1].value / 6)


def test_the_conditions_are_met_from_the_rounds_that_are_said_and_not_before() -> None:
    p = replace(HAND, stretch=3.0)
    for condition in (*conditions(p), server_condition(p)):
        assert replace(p, rounds=condition.rounds).step <= condition.largest_step * (1 + 1e-12)
        assert replace(p, rounds=condition.rounds - 1).step > condition.largest_step
    last = conditions(p)[-1].largest_step
    used = 8 * 3 * 4 * 125 * last**2 + 64 * 3 * 25 * 2 * last / 3 + 800 * 3 * 2 * 125 * 4 * last**2
    assert used == pytest.approx(1 / 4), "H_min/4"


def test_the_conditions_grow_as_the_theorem_and_the_corollary_say() -> None:
    """T ≥ Ω(n³) for the mean of all models, Ω(n⁴) for the server."""
    few, many = (replace(HAND, speeds=(1.0,) * n) for n in (1000, 2000))
    assert holds_from(conditions(many)) / holds_from(conditions(few)) == pytest.approx(8, rel=0.01)
    assert server_condition(many).rounds / server_condition(few).rounds == pytest.approx(16, rel=0.01)


def test_rounds_for_a_goal_are_the_fewest() -> None:
    for goal in 1e-3, 1e9:
        rounds = rounds_for(HAND, goal)
        assert rounds is not None
        assert main_theorem(replace(HAND, rounds=rounds)).value <= goal
        assert rounds == holds_from(conditions(HAND)) or main_theorem(replace(HAND, rounds=rounds - 1)).value > goal
    assert rounds_for(HAND, 1e-30) is None


def test_bits_fit_the_lattice_that_is_used() -> None:
    """A key so far away still decodes, and the error is as large as the theorem allows."""
    distance, bits = 100 * HAND.error, HAND.bits_a_coordinate(100 * HAND.error)
    side = HAND.error / sqrt(HAND.dim / 12)
    assert side * (2**bits - 1) / 2 == pytest.approx(4 * distance / sqrt(HAND.dim))
    assert HAND.bits_in_all() == pytest.approx(72 * HAND.bits_of_a_message())
    assert HAND.bits_of_a_message() > HAND.dim * log2(HAND.clients)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speeds": (0.0, 1.0)}, "makes no steps"),
        ({"speeds": (6.0, 1.0)}, "at most K = 5"),
        ({"sampled": 3}, "only 2 clients"),
        ({"stretch": 0.5}, "B² at least 1"),
        ({"gap": -1.0}, "gap is -1.0"),
        ({"rounds": 0}, "rounds is 0"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(HAND, **changes)  # type: ignore[arg-type]


# Polled clients


@pytest.mark.parametrize("law", ["exponential", "constant"])
def test_expected_steps_are_those_of_the_simulator(law: str) -> None:
    times = torch.tensor([0.7, 2.0, 8.0, 30.0])
    speeds = Constant(steady(times)) if law == "constant" else Exponential(steady(times), torch.Generator())
    for sampled, round_time, local_steps in (1, 1.25, 5), (3, 4.0, 10), (4, 2.0, 3):
        expected = speeds.expected_steps(sampled / 4, round_time, local_steps).tolist()
        mine = laws_of(times, sampled, round_time, local_steps, law)
        assert [one.expected_steps for one in mine] == pytest.approx(expected, rel=1e-6)


def test_idle_contacts_are_as_many_as_a_run_has() -> None:
    """P(h = 0) = p e^(−λ)/(1 − (1−p) e^(−λ)), λ = vτ; and in a run of 2000 contacts."""
    times = torch.tensor([1.0, 2.0, 8.0, 8.0])
    laws = laws_of(times, 2, 2.0, 5, "exponential")
    lam = 2.0 / 8.0
    decayed = float(torch.tensor(-lam).exp())
    assert laws[3].idle == pytest.approx(0.5 * decayed / (1 - 0.5 * decayed))
    w = polled(QuAFL(sampled=2, local_steps=5), times, centers=torch.zeros(4, 1), latency=2.0)
    w.rounds(1000)
    predicted = sum(one.idle for one in laws) / 4
    assert abs(w.fleet.totals.idle / w.fleet.totals.contacts - predicted) < 5 * sqrt(predicted / 2000)


def laws_of(times: Tensor, sampled: int, round_time: float, local_steps: int, law: str) -> list[Polling]:
    return [
        polling(
            speed=1 / time,
            sampled=sampled,
            clients=len(times),
            round_time=round_time,
            local_steps=local_steps,
            law="constant" if law == "constant" else "exponential",
        )
        for time in times.tolist()
    ]


# Trajectories on quadratics

TIMES = torch.tensor([1.0, 2.0, 3.0, 8.0])
CENTERS = torch.tensor([[3.0], [0.0], [-2.0], [5.0]])


def polled(
    algorithm: Algorithm,
    times: Tensor,
    *,
    centers: Tensor,
    latency: float,
    lr: float = 0.1,
    constant: bool = False,
    seed: int = 0,
    noise: float = 0.0,
    codec: Codecs | Lattice | None = None,
    given: dict[str, Tensor] | None = None,
    curvature: float = 1.0,
    start: Tensor | None = None,
) -> World:
    rates = steady(times)
    speeds = Constant(rates) if constant else Exponential(rates, Generators(seed)["speeds"])
    task = Quadratic(torch.full(centers.shape[-1:], curvature), centers, noise=noise, start=start, seed=seed)
    return world(
        task, len(times), algorithm, codec=codec, lr=lr, speeds=speeds, link=Link(latency), seed=seed, given=given
    )


def heard(w: World) -> list[tuple[list[int], list[int]]]:
    """Who answered in each round, after how many steps."""
    return [(came.senders.tolist(), came.steps.tolist()) for came in w.came]


@pytest.mark.parametrize("sampled", [1, 3, 4])
def test_with_exact_gradients_the_trajectory_is_the_linear_recursion(sampled: int) -> None:
    w = polled(QuAFL(sampled=sampled, local_steps=3), TIMES, centers=CENTERS, latency=2.0)
    now = (theory := Linear(CENTERS, sampled, rate=0.1, curvature=1.0)).start(w.start.model)
    for state in islice(w.states(), 60):
        now = theory.contact(now, *heard(w)[-1])
        everybody = torch.cat((state.model.unsqueeze(0), w.bases())).double()
        torch.testing.assert_close(everybody, now.mean, rtol=1e-5, atol=1e-5)
    assert now.mean.std() > 0.1, "models that are all the same show nothing"


def test_with_weights_the_trajectory_is_the_recursion_with_damped_progress() -> None:
    """η_i = min(1, H_min/H_i), where H_min is the smallest speed that has been told so far."""
    laws = laws_of(TIMES, 2, 2.0, 3, "exponential")
    speeds = torch.tensor([one.expected_steps for one in laws])
    given = {"expected_steps": speeds, "contacts": torch.full((4,), 2**40)}
    w = polled(QuAFL(sampled=2, local_steps=3, weighted=True), TIMES, centers=CENTERS, latency=2.0, given=given)
    theory = Linear(CENTERS, 2, rate=0.1, curvature=1.0)
    now, told = theory.start(w.start.model), float("inf")
    for state in islice(w.states(), 60):
        damping = tuple(min(1.0, told / speed) for speed in speeds.tolist())
        now = replace(theory, damping=damping).contact(now, *heard(w)[-1])
        told = min([told, *speeds[heard(w)[-1][0]].tolist()])
        everybody = torch.cat((state.model.unsqueeze(0), w.bases())).double()
        torch.testing.assert_close(everybody, now.mean, rtol=1e-5, atol=1e-5)
    assert min(damping) < 0.4, "some progress was damped"


def test_with_noise_mean_and_variance_over_seeds_are_those_computed() -> None:
    """The coordinates of a quadratic with one curvature are runs with noise of their own: 6 seeds of 500."""
    dim, rounds, noise = 500, 15, 40.0
    centers = CENTERS.expand(4, dim).contiguous()
    gone: list[Tensor] = []
    off: list[Tensor] = []
    for seed in range(6):
        w = polled(
            QuAFL(sampled=2, local_steps=3), TIMES, centers=centers, latency=2.0, seed=seed, noise=noise, curvature=0.5
        )
        theory = Linear(CENTERS, 2, rate=0.1, curvature=0.5, deviation=deviation(noise, dim))
        now = theory.start(torch.zeros(1))
        state = w.rounds(rounds)[-1]
        for senders, steps in heard(w):
            now = theory.contact(now, senders, steps)
        everybody = torch.cat((state.model.unsqueeze(0), w.bases())).double()
        scale = now.covariance.diagonal().sqrt().unsqueeze(-1)
        assert float(scale.min()) > 0.01
        gone.append(((everybody - now.mean) / scale).square().mean(dim=-1))
        off.append(((everybody - now.mean) / scale).mean(dim=-1))
    n = 6 * dim
    assert (torch.stack(off).mean(dim=0).abs() < 5 / sqrt(n)).all()
    assert ((torch.stack(gone).mean(dim=0) - 1).abs() < 5 * sqrt(2 / n)).all()


# Where they go to


@pytest.mark.parametrize("name", ["plain", "weighted", "calibrated"])
def test_where_all_are_contacted_the_fixed_point_is_the_one_predicted(name: str) -> None:
    """Constant step times and s = n: nothing is random, and it is met to rounding."""
    laws = laws_of(TIMES, 4, 8.0, 6, "constant")
    known = {"expected_steps": torch.tensor([one.expected_steps for one in laws])}
    known["contacts"] = torch.full((4,), 2**40)
    algorithm: Algorithm = QuAFL(sampled=4, local_steps=6, weighted=name == "weighted")
    weights = averaging_weights(laws, 4, 0.1, 1.0, weighted=name == "weighted")
    if name == "calibrated":
        algorithm, weights = Calibrated(sampled=4, local_steps=6), calibrated_weights(laws, 4, 0.1, 1.0)
    given = known if name == "weighted" else None
    w = polled(algorithm, TIMES, centers=CENTERS, latency=8.0, constant=True, given=given)
    predicted = weighted_mean(weights, CENTERS)
    assert abs(float(predicted) - 1.5) > 0.005, "the true minimum would be no test"
    torch.testing.assert_close(w.rounds(400)[-1].model.double(), predicted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["plain", "weighted", "calibrated"])
def test_where_some_are_contacted_at_random_the_mean_is_the_one_predicted(name: str) -> None:
    """Exponential step times, s = 1 of 3, one client fast. Client i's minimum is at e_i, so that the fixed point is the
    weights themselves. Over 2000 rounds: within 4.5 standard errors, and far from what the others go to."""
    times, rate, minima = torch.tensor([1.0, 8.0, 8.0]), 0.05, torch.eye(3)
    laws = laws_of(times, 1, 2.0, 10, "exponential")
    plain, fair = (averaging_weights(laws, 1, rate, 1.0, weighted=one) for one in (False, True))
    of = {"plain": plain, "weighted": fair, "calibrated": calibrated_weights(laws, 1, rate, 1.0)}
    predicted = {one: weighted_mean(weights, minima) for one, weights in of.items()}
    known = {"expected_steps": torch.tensor([one.expected_steps for one in laws])}
    known["contacts"] = torch.full((3,), 2**40)
    algorithm: Algorithm = QuAFL(sampled=1, local_steps=10, weighted=name == "weighted")
    if name == "calibrated":
        algorithm = Calibrated(sampled=1, local_steps=10)
    given = known if name == "weighted" else None
    w = polled(algorithm, times, centers=minima, latency=2.0, lr=rate, given=given, start=torch.full((3,), 1 / 3))
    models = torch.stack([state.model.double() for state in islice(w.states(), 2500)])[500:]
    batches = models.view(20, -1, 3).mean(dim=1)
    found, error = batches.mean(dim=0), batches.std(dim=0) / sqrt(20)
    assert ((found - predicted[name]).abs() < 4.5 * error).all()
    for other, value in predicted.items():
        assert other == name or ((found - value).abs() > 6 * error).any(), other


def test_with_small_steps_weights_give_the_true_minimum_and_no_weights_that_of_the_fast() -> None:
    laws = laws_of(TIMES, 2, 2.0, 6, "exponential")
    speeds = [one.expected_steps for one in laws]
    by_speed, middle = float(weighted_mean(speeds, CENTERS)), float(CENTERS.mean())
    errors = []
    for rate in 1e-2, 1e-3, 1e-4:
        fair = float(weighted_mean(averaging_weights(laws, 2, rate, 1.0, weighted=True), CENTERS))
        errors.append(abs(fair - middle))
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.1), "it falls as the step does"
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.1)
    unfair = float(weighted_mean(averaging_weights(laws, 2, 1e-4, 1.0), CENTERS))
    assert unfair == pytest.approx(by_speed, abs=1e-3)


def test_quantization_adds_the_floor_that_is_predicted() -> None:
    """Exact gradients, all contacted, side 0.2 both ways: X_t stays away from its fixed point by d·P_00 in the mean."""
    dim, side, steps = 512, 0.2, [6, 4, 2, 1]
    centers = 0.3 * CENTERS.expand(4, dim).contiguous()
    algorithm = QuAFL(sampled=4, local_steps=6)
    codec = Lattice(bits=12, resolution=side)
    w = polled(algorithm, TIMES, centers=centers, latency=8.0, constant=True, codec=codec)
    theory = Linear(centers[:, :1], 4, rate=0.1, curvature=1.0, side=side)
    laws = laws_of(TIMES, 4, 8.0, 6, "constant")
    predicted = theory.floor(steps)
    middle = float(weighted_mean(averaging_weights(laws, 4, 0.1, 1.0), centers[:, :1]))
    states = w.rounds(260)[60:]
    assert sorted(heard(w)[-1][1], reverse=True) == steps
    found = torch.stack([(state.model.double() - middle).square().mean() for state in states])
    error = float(found.view(10, -1).mean(dim=1).std()) / sqrt(10)
    assert abs(float(found.mean()) - predicted) < 5 * error
    assert error < 0.05 * predicted
    without = polled(algorithm, TIMES, centers=centers, latency=8.0, constant=True)
    exact = float((without.rounds(260)[-1].model.double() - middle).square().mean())
    assert exact < 1e-6 * predicted


# The potential


@pytest.mark.parametrize(("n", "s"), [(3, 1), (4, 2), (5, 5), (6, 3)])
def test_a_round_without_steps_contracts_the_potential_as_computed_and_more_than_the_lemma_says(n: int, s: int) -> None:
    """Exactly, over all sets that can be contacted, and in the algorithm itself over 300 rounds from one position."""
    alike = torch.zeros(n, 1)
    alone = torch.zeros(n, 1)
    alone[0], alone[1] = 1.0, -1.0
    for server, bases, factor in (1.0, alike, server_apart(n, s)), (0.0, alone, clients_apart(n, s)):
        before = potential(torch.tensor([server]), bases)
        exact = 0.0
        for chosen in combinations(range(n), s):
            after = bases.clone()
            after[list(chosen)] = (server + s * bases[list(chosen)]) / (s + 1)
            at = torch.tensor([(server + float(bases[list(chosen)].sum())) / (s + 1)])
            exact += potential(at, after) / comb(n, s) / before
        assert exact == pytest.approx(factor, abs=1e-6)
    assert contraction(n, s) >= lemma(n)
    w = polled(QuAFL(sampled=s, local_steps=1), torch.full((n,), 1e9), centers=torch.zeros(n, 1), latency=1.0)
    ratios = []
    for _ in range(300):
        w.scatter(alone.clone())
        state = w.rounds(1, replace(w.start, model=torch.zeros(1)))[-1]
        ratios.append(potential(state.model, w.bases()) / potential(torch.zeros(1), alone))
    found = torch.tensor(ratios, dtype=torch.float64)
    assert abs(float(found.mean()) - clients_apart(n, s)) <= 5 * float(found.std()) / sqrt(300) + 1e-6
    assert 1 - float(found.mean()) >= lemma(n)


def test_the_lemma_s_contraction_is_never_more_than_the_exact_one() -> None:
    for n in range(1, 60):
        for s in range(1, n + 1):
            assert contraction(n, s) >= lemma(n)


def test_with_steps_the_potential_stays_below_the_lemma_s_bound() -> None:
    """The mean over 20 runs of Φ_{t+1}, against the bound from Φ_t and from the progress of all clients."""
    n, s, lr, runs, rounds = 5, 2, 0.1, 20, 25
    above = torch.zeros(rounds)
    for seed in range(runs):
        centers = 2 * torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
        w = polled(
            QuAFL(sampled=s, local_steps=4), torch.full((n,), 1.0), centers=centers, latency=4.0, lr=lr, seed=seed
        )
        state = w.start
        for t in range(rounds):
            before, bases = potential(state.model, w.bases()), w.bases()
            state = w.rounds(1, state)[-1]
            progress = sum(float(((1 - (1 - lr) ** 4) * (bases[i] - centers[i]) / lr).square().sum()) for i in range(n))
            bound = potential_after(before, clients=n, sampled=s, step=lr, progress=progress)
            above[t] += (bound - potential(state.model, w.bases())) / runs
    assert (above > 0).all()


# The bound


def test_the_main_theorem_and_the_server_s_corollary_hold_on_a_quadratic() -> None:
    """Three clients of unequal speed with different minima, noise, the theorem's own step size and lattice, and as many
    rounds as it asks for. L, σ², G² and B² are known: ∇f_i = ∇f + a(c̄ − c_i), so that G² = (1/n) Σ ‖a(c_i − c̄)‖²."""
    case = measured_case(seed=0)
    problem, mean, server = case.problem, case.gradients_at_mean, case.gradients_at_server
    assert problem.rounds >= holds_from((*conditions(problem), server_condition(problem)))
    assert mean <= full_theorem(problem).value
    assert mean <= main_theorem(problem).value
    assert server <= server_corollary(problem).value
    assert mean > main_theorem(problem).value / 1000, "a bound that is never near is no use as a test"
    assert case.potential <= potential_bound(problem, mean)
