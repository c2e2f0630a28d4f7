"""What the theorems say of a case: a page for people, and the same for programs."""

from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

from quafl.theory.bounds import (
    Bound,
    conditions,
    full_theorem,
    full_theorem_as_printed,
    holds_from,
    main_theorem,
    potential_bound,
    rounds_for,
    server_condition,
    server_corollary,
)
from quafl.theory.cases import Case, with_rounds
from quafl.theory.contraction import contraction, lemma
from quafl.theory.parameters import Problem, damping, learning_rate

USEFUL = 0.1  # of the squared gradient at the beginning: a bound that says something


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the page, with a sentence above it."""

    title: str
    says: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def account(case: Case) -> dict[str, Any]:
    """All numbers, for programs."""
    p = case.problem
    bounds = [main_theorem(p), full_theorem(p), full_theorem_as_printed(p), server_corollary(p)]
    return {
        "label": case.label,
        "problem": {**asdict(p), "expected_steps_known": "closed form" if case.pace.closed else "measured"},
        "probe": {**asdict(case.probe), "gradients": case.probe.gradients},
        "round_time": case.pace.round_time,
        "idle": case.pace.idle,
        "step": p.step,
        "step_as_the_appendix_prints_it": _step_as_printed(p),
        "reach": p.reach,
        "side": p.side,
        "side_as_the_main_text_prints_it": p.side_as("main text"),
        "bits_of_a_message": p.bits_of_a_message(),
        "bits_in_all": p.bits_in_all(),
        "bits_a_coordinate": _bits(p),
        "bounds": [
            {
                "name": bound.name,
                "of": bound.of,
                "place": bound.place,
                "value": bound.value,
                "remark": bound.remark,
                "terms": [{**asdict(term), "share": bound.share(term)} for term in bound.terms],
            }
            for bound in bounds
        ],
        "conditions": [asdict(one) for one in (*conditions(p), server_condition(p))],
        "holds_from": {"main theorem": holds_from(conditions(p)), "server's corollary": _server_from(p)},
        "rounds_for_a_useful_bound": rounds_for(p, USEFUL * case.probe.gradient.value),
        "contraction": {"exact": contraction(p.clients, p.sampled), "lemma": lemma(p.clients)},
        "potential_bound": potential_bound(p, main_theorem(p).value),
    }


def page(case: Case) -> tuple[list[str], list[Section]]:
    """What it comes to, in sentences, and the tables behind that."""
    p = case.problem
    bounds = [main_theorem(p), full_theorem(p), server_corollary(p)]
    tables = [_taken(case), _asked(p), *map(_terms, bounds), _when(p), _readings(p)]
    return _in_short(case), tables


def _in_short(case: Case) -> list[str]:
    p, bound = case.problem, main_theorem(case.problem)
    least, start = holds_from(conditions(p)), case.probe.gradient.value
    useful = rounds_for(p, USEFUL * start)
    said = [
        f"{p.clients} clients, {p.sampled} contacted in a round of {case.pace.round_time:g} time units: {p.rounds:,} "
        f"rounds. Between two contacts a client takes {min(p.speeds):.2g} to {max(p.speeds):.2g} steps of at most "
        f"{p.local_steps}; {case.pace.idle:.0%} of the contacts find none.",
        f"The theorem asks for the step size {p.step:.3g} in a run of this length.",
    ]
    if p.rounds < least:
        said.append(
            f"Its proof needs {_count(least)} rounds, {_count(round(least / p.rounds))} times as many: of this run it "
            f"promises nothing. Read the shares below, which say what matters most, and not the bounds."
        )
    else:
        said.append("The run is long enough for its proof: the bounds below hold.")
    if useful is not None:
        then = main_theorem(with_rounds(case, useful).problem).largest.name
        said.append(
            f"It promises a squared gradient of a tenth of the largest one seen ({start:.2g}) after {_count(useful)} "
            f"rounds; there, the largest term is '{then}'."
        )
    said.append(f"Here the largest term is '{bound.largest.name}': {bound.largest.remedy}.")
    said.append(
        f"One round brings all models nearer to each other: their potential falls by at least "
        f"{contraction(p.clients, p.sampled):.2%} where nobody takes a step; the lemma says {lemma(p.clients):.2%}."
    )
    return said


def _taken(case: Case) -> Section:
    p, found = case.problem, case.probe
    how = "closed form" if case.pace.closed else "measured in a run without gradients"
    where = f"largest of {found.points} points and {found.clients} clients; least"
    rows = (
        ("H_i", f"{min(p.speeds):.3g} to {max(p.speeds):.3g}", "steps between two contacts", how),
        ("Δ", f"{p.gap:.3g}", "loss to lose: f(μ_0) − f_*", "loss of the initial model, f_* = 0"),
        (
            "L",
            f"{p.smoothness:.3g}",
            "how fast gradients change",
            f"{where} {found.smoothness.least:.3g}; {found.smoothness.gradients:,} gradients",
        ),
        (
            "σ²",
            f"{p.variance:.3g}",
            "how far a batch's gradient is off",
            f"{where} {found.variance.least:.3g}; {found.variance.gradients:,} gradients",
        ),
        (
            "G²",
            f"{p.dissimilarity:.3g}",
            "how far clients' gradients differ",
            f"largest of {found.points} points, with B² = 1; least {found.dissimilarity.least:.3g}; no more gradients",
        ),
        (
            "B²",
            f"{p.stretch:.3g}",
            "the part of that which grows with ‖∇f‖²",
            f"or {found.stretch.value:.3g}, with G² = 0",
        ),
    )
    says = (
        f"L, σ² and G² were probed at the initial model and on the way of a short descent, with {found.gradients:,} "
        f"gradients of batches. Elsewhere they may be larger."
    )
    return Section("What the theorems take for given", says, ("", "value", "is", "from"), rows)


def _asked(p: Problem) -> Section:
    rows = (
        ("η", f"{p.step:.3g}", "step size", "(n+1)/(H_min·√(sT))"),
        ("R", f"{p.reach:.4g}", "reach of the lattice", "2 + T^(3/d)"),
        ("γ", f"{p.side:.3g}", "side of the lattice", "η·√(D + Δ/L)/(R²+7)"),
        ("(R²+7)γ", f"{p.error:.3g}", "error of a message that it allows", "Lemma 'Lattice Quantization'"),
        (
            "b",
            f"{_bits(p):.1f}",
            "bits a coordinate with this library's lattice",
            "if models are as far apart as the lemma on Σ Φ_t allows",
        ),
        ("bits", f"{p.bits_in_all():.3g}", "in all, as the proof counts", "2sT messages; O(·) taken for 1"),
    )
    says = f"D = (Σ η_i²/n)·σ² + 2KG² = {p.spread:.3g}, of which all bounds are made."
    return Section("What they ask for", says, ("", "value", "is", "formula"), rows)


def _terms(bound: Bound) -> Section:
    rows = tuple(
        (term.name, f"{term.value:.3g}", f"{bound.share(term):.1%}", term.formula, term.remedy) for term in bound.terms
    )
    says = f"{bound.of} ≤ {bound.value:.3g}. {bound.place}. {bound.remark}"
    title = f"Bound: {bound.name}"
    return Section(title, says, ("term", "value", "share", "formula", "what makes it smaller"), rows)


def _when(p: Problem) -> Section:
    needed = (*conditions(p), server_condition(p))
    rows = tuple((one.formula, f"{one.largest_step:.3g}", _count(one.rounds), one.place) for one in needed)
    says = (
        f"The main and the full theorem are proved from T = {_count(holds_from(conditions(p)))} on, the server's "
        f"corollary from {_count(_server_from(p))}. Ω(n³) and Ω(n⁴) stand for these."
    )
    return Section("From when they hold", says, ("needed", "η at most", "T at least", "where"), rows)


def _readings(p: Problem) -> Section:
    printed = full_theorem_as_printed(p)
    rows = (
        (
            "step size",
            f"(n+1)/(H_min√(sT)) = {p.step:.3g}",
            f"(n+1)/(sH_min√T) = {_step_as_printed(p):.3g}",
            "the first: the main theorem and the proofs' ends have it",
        ),
        (
            "factor of σ²",
            f"Σ H_min²/(nH_i²) = {damping(p.speeds):.3g}",
            f"Σ H_i²/(nH²) = {damping(p.speeds, 'main text'):.3g}",
            "the first: the appendix; the second is in the main theorem's γ alone",
        ),
        ("γ", f"{p.side:.3g}", f"{p.side_as('main text'):.3g}", "as the factor of σ²"),
        ("full theorem", f"{full_theorem(p).value:.3g}", f"{printed.value:.3g}", printed.remark),
    )
    says = "Where the paper disagrees with itself, this page uses the first."
    return Section("Two readings", says, ("of", "used", "also printed", "why"), rows)


def _count(number: int) -> str:
    """In full, or rounded where nobody reads the digits."""
    return f"{number:,}" if number < 10**7 else f"{number:.2g}"


def _server_from(p: Problem) -> int:
    return holds_from((*conditions(p), server_condition(p)))


def _step_as_printed(p: Problem) -> float:
    return learning_rate(speeds=p.speeds, sampled=p.sampled, rounds=p.rounds, reading="appendix")


def _bits(p: Problem) -> float:
    """A coordinate, if X_t and X^i are √(2Φ) apart, Φ being the mean that Lemma "lem:PhiBoundGlobal" allows."""
    return p.bits_a_coordinate(sqrt(2 * potential_bound(p, main_theorem(p).value)))
