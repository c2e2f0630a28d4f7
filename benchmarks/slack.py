"""How much larger the paper's bounds are than what happens, where all that they speak of is known.

python benchmarks/slack.py                           # docs/results/theory.json

Three clients of unequal speed with quadratics f_i(x) = ½ Σ a_j (x_j − c_ij)² and noisy gradients run weighted QuAFL
with the step size and the lattice of the main theorem, for as many rounds as the proofs ask for.
∇f_i = ∇f + a(c̄ − c_i), so that G² = (1/n) Σ ‖a(c_i − c̄)‖² and B² = 1; L = max a; Δ = f(X_0) − min f.
"""

import json
from dataclasses import asdict, dataclass
from itertools import product
from math import sqrt
from pathlib import Path

import torch

from quafl.codec import Lattice
from quafl.codec.coders import coders_for
from quafl.core import QuAFL, sgd
from quafl.core.randomness import Generators
from quafl.record.diagnostics import mean_model, potential
from quafl.sim.clock import VirtualClock
from quafl.sim.fleet import SimulatedFleet
from quafl.sim.link import Link
from quafl.sim.piecewise import Piecewise
from quafl.sim.speeds import Exponential
from quafl.tasks import Quadratic
from quafl.theory import (
    Problem,
    conditions,
    full_theorem,
    holds_from,
    main_theorem,
    polling,
    potential_bound,
    server_condition,
    server_corollary,
)

OUT = Path(__file__).parents[1] / "docs" / "results" / "theory.json"
TIMES = torch.tensor([1.0, 2.0, 4.0])  # of a step, in the mean
ROUND, SAMPLED, STEPS, DIM, NOISE = 4.0, 2, 2, 64, 0.3


@dataclass(frozen=True)
class Case:
    problem: Problem
    gradients_at_mean: float  # (1/T) Σ ‖∇f(μ_t)‖²
    gradients_at_server: float  # (1/T) Σ ‖∇f(X_t)‖²
    potential: float  # (1/T) Σ Φ_t
    refined: int  # messages that did not decode at first


def measured_case(seed: int, longer: int = 1) -> Case:
    generator = torch.Generator().manual_seed(seed)
    centers = 1 + torch.randn(len(TIMES), DIM, generator=generator)
    curvature = torch.linspace(0.001, 0.01, DIM)
    task = Quadratic(curvature, centers, noise=NOISE, seed=seed)
    problem = problem_of(task, longer)
    speeds = torch.tensor(problem.speeds)
    algorithm = QuAFL(sampled=SAMPLED, local_steps=STEPS, weighted=True)
    coders = coders_for(algorithm, Lattice(bits=12, resolution=problem.error / sqrt(DIM / 12)))
    rng = Generators(seed)
    fleet = SimulatedFleet(
        task,
        sgd(problem.step),
        algorithm,
        coders,
        VirtualClock(),
        Exponential(Piecewise.steady(1 / TIMES.double()), rng["speeds"]),
        rng,
        link=Link(ROUND),
        given={"expected_steps": speeds, "contacts": torch.full((len(TIMES),), 2**40)},
    )
    state = algorithm.start(*task.initial())
    at_mean = at_server = apart = 0.0
    for _ in range(problem.rounds):
        bases = fleet.clients.everybody().base
        mean = mean_model(state.model, bases)
        at_mean += float((curvature * (mean - task.minimum)).square().sum()) / problem.rounds
        at_server += float((curvature * (state.model - task.minimum)).square().sum()) / problem.rounds
        apart += potential(state.model, bases) / problem.rounds
        state = fleet.run(algorithm.round(state, rng))
    return Case(problem, at_mean, at_server, apart, fleet.totals.refined)


def problem_of(task: Quadratic, longer: int) -> Problem:
    """With the fewest rounds for which both theorems are proved, or so many times as many."""
    laws = [
        polling(speed=1 / time, sampled=SAMPLED, clients=len(TIMES), round_time=ROUND, local_steps=STEPS)
        for time in TIMES.tolist()
    ]
    apart = task.curvature * (task.centers - task.minimum)
    problem = Problem(
        speeds=tuple(one.expected_steps for one in laws),
        sampled=SAMPLED,
        local_steps=STEPS,
        rounds=1,
        dim=DIM,
        smoothness=task.smoothness,
        variance=NOISE**2,
        dissimilarity=float(apart.square().sum(dim=-1).mean()),
        gap=task.evaluate(task.initial()[0], torch.empty(0))["loss"],
    )
    least = holds_from((*conditions(problem), server_condition(problem)))
    return Problem(**{**asdict(problem), "rounds": longer * least})


def main() -> None:
    runs = list(product((1, 10), (0, 1, 2)))
    cases = [measured_case(seed, longer) for longer, seed in runs]
    found = []
    for (_, seed), case in zip(runs, cases, strict=True):
        p = case.problem
        bounds = {bound.name: bound for bound in (main_theorem(p), full_theorem(p), server_corollary(p))}
        measured = dict.fromkeys(bounds, case.gradients_at_mean)
        measured["server's corollary"] = case.gradients_at_server
        found.append(
            {
                "seed": seed,
                "problem": asdict(p),
                "step": p.step,
                "measured": measured,
                "bound": {name: bound.value for name, bound in bounds.items()},
                "slack": {name: bound.value / measured[name] for name, bound in bounds.items()},
                "terms": {name: {t.name: bound.share(t) for t in bound.terms} for name, bound in bounds.items()},
                "potential": case.potential,
                "potential_bound": potential_bound(p, case.gradients_at_mean),
                "potential_slack": potential_bound(p, case.gradients_at_mean) / case.potential,
                "refined": case.refined,
            }
        )
        print(f"seed {seed}: T {p.rounds}, slack {found[-1]['slack']}, potential {found[-1]['potential_slack']:.0f}")
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
