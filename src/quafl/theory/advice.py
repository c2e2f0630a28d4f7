"""Which algorithm, s, wait, K and bits for a task, a fleet and a link, and what each of them rests on.

Three kinds of reasons: the bounds; closed forms of what contacts find (`polling`); and what was measured, with a link.
How far this is from the best of a grid: docs/results/advice.md.
"""

from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from statistics import mean
from typing import Any

from quafl.core.randomness import Generators
from quafl.settings.algorithms import LABELS
from quafl.settings.curve import Settings
from quafl.theory.account import Section
from quafl.theory.bounds import main_theorem
from quafl.theory.cases import Case, Pace, case_of, pace_of, polled
from quafl.theory.parameters import Problem

WITHOUT_WAIT = ("fedasync",)
DIFFERENT = 3.0  # (1/n) Σ‖∇f_i‖²/‖∇f‖² at the first models: clients' data differ from there on
MANY, FEW_CONTACTS = 100, 10  # clients, and contacts of each: what short runs with many clients are
USED = 0.9  # of the steps that arrive if all clients are contacted: with so many, more contacts bring little
CONTACTS = 20  # of each client that a run should have
LONGEST = 10  # local steps beyond which a client follows its own data alone
STOPPED = 0.1  # of the contacts: with more that find a client at K, K is too small
IDLE = 2 / 3  # of the contacts: with more, the server waits
BITS, FREE = 4, 0.05  # bits; and an exchange that takes less than this share of a step costs nothing

REGIMES, CODEC, COST = (
    "docs/results/regimes.md",
    "docs/results/codec.md",
    "docs/results/regimes.md#what-accuracy-costs",
)
MEASURED, CLOSED, BOUND = "measured", "closed form", "bound"


@dataclass(frozen=True, slots=True)
class Reason:
    """A setting, and why."""

    key: str  # in a settings file
    value: Any
    kind: str  # MEASURED, CLOSED or BOUND
    says: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What to try first."""

    reasons: tuple[Reason, ...]
    settings: Settings  # the curve with all of that
    pace: Pace  # then
    by_the_bound: tuple[int, int]  # s and K with the smallest main theorem, in the same time
    case: Case  # as it was

    def toml(self) -> str:
        """The lines of a settings file."""
        sections: dict[str, list[str]] = {}
        for reason in self.reasons:
            section, _, key = reason.key.partition(".")
            value = f'"{reason.value}"' if isinstance(reason.value, str) else f"{reason.value}"
            sections.setdefault(section, []).append(f"{key} = {value}")
        return "\n".join(line for name, lines in sections.items() for line in (f"[{name}]", *lines))


def advise(settings: Settings, at_most: int | None = None) -> Advice:
    """For a curve; `at_most` clients may be contacted at a time, by default half of them, or five if that is more."""
    case, n = case_of(settings), settings.clients.count
    most = max(1, min(n, at_most or max(5, n // 2)))
    if hasattr(settings.algorithm, "wait"):
        settings = _with(settings, Reason("algorithm.wait", 0.0, "", ""))  # until there is a reason for one
    bits = _bits(case, settings)
    settings = _with(settings, bits)
    name = _algorithm(case, settings)
    steps = _local_steps(case, settings, name.value, most)
    settings = _with(settings, name, steps)
    sampled = _sampled(case, settings, most)
    settings = _with(settings, sampled)
    reasons = [name, sampled, steps]
    if name.value not in WITHOUT_WAIT:
        reasons.append(wait := _wait(case, settings))
        settings = _with(settings, wait)
    pace = _pace(case, settings)
    return Advice((*reasons, bits), settings, pace, choice_of_the_bound(case, settings, most), case)


def _algorithm(case: Case, settings: Settings) -> Reason:
    apart, contacts = case.probe.stretch.value, case.problem.rounds * case.problem.sampled / case.problem.clients
    differ = apart > DIFFERENT
    found = f"(1/n) Σ‖∇f_i‖²/‖∇f‖² is {apart:.1f}: clients' data {'differ' if differ else 'are alike'}; "
    if getattr(settings.algorithm, "optimizer", "sgd") == "adam":
        return Reason("algorithm.name", "quafl", MEASURED, f"Adam at the clients; one seed ({REGIMES})")
    if not differ and case.problem.clients >= MANY and contacts < FEW_CONTACTS:
        says = f"with {case.problem.clients} clients and {contacts:.0f} contacts of each it was ahead in the mean"
        return Reason("algorithm.name", "fedasync", MEASURED, f"{found}{says} ({REGIMES})")
    says = "ahead of eleven rivals" if differ else "ahead in the mean; at the end level with others, which send less"
    return Reason("algorithm.name", "calibrated", MEASURED, f"{found}{LABELS['calibrated']} was {says} ({REGIMES})")


def _bits(case: Case, settings: Settings) -> Reason:
    """Four, unless more cost no time."""
    pace = _pace(case, _with(settings, Reason("codec.bits", 2 * BITS, "", "")))
    exchange = pace.round_time - settings.algorithm.build().wait
    speeds = settings.clients.build().speeds(settings.clients.count, Generators(settings.run.seeds[0]), 0.0)
    fastest = 1 / float(speeds.rates.values.max())
    if exchange < FREE * fastest:
        says = f"an exchange takes {exchange / fastest:.0%} of a step: {2 * BITS} bits cost bytes and no time"
        return Reason("codec.bits", 2 * BITS, CLOSED, says)
    says = f"as good as 32 in accuracy, and an eighth of the link's time ({CODEC})"
    return Reason("codec.bits", BITS, MEASURED, says)


def _local_steps(case: Case, settings: Settings, name: str, most: int) -> Reason:
    """The fewest of 5 and 10 with which clients seldom stop to wait; a contact then finds fewer than K."""
    longest = LONGEST if name == "calibrated" else LONGEST // 2
    for steps in LONGEST // 2, LONGEST:
        tried = _with(settings, Reason("algorithm.name", name, "", ""), Reason("algorithm.local_steps", steps, "", ""))
        pace = _pace(case, _with(tried, Reason("algorithm.sampled", most, "", "")))
        full = mean(law.full for law in pace.laws) if pace.laws else 1.0
        if full < STOPPED or steps == longest:
            break
    says = f"{full:.0%} of contacts find a client that has stopped" if pace.laws else "no closed form in this world"
    return Reason("algorithm.local_steps", steps, CLOSED, f"{says}; longer walks are of one client's data alone")


def _sampled(case: Case, settings: Settings, most: int) -> Reason:
    """Enough that clients' steps arrive, and that each client is heard often enough."""
    paces = {s: _pace(case, _with(settings, Reason("algorithm.sampled", s, "", ""))) for s in range(1, most + 1)}
    rates = {s: s * float(pace.expected_steps.mean()) / pace.round_time for s, pace in paces.items() if pace.closed}
    rounds = settings.run.until / paces[most].round_time
    often = min(most, ceil(CONTACTS * settings.clients.count / rounds))
    arrive = next((s for s, rate in rates.items() if rate >= USED * max(rates.values())), 1)
    chosen = max(often, arrive)
    says = [f"with {rounds:.0f} rounds, each client is heard {rounds * chosen / settings.clients.count:.0f} times"]
    if rates:
        says.append(f"{rates[chosen] / max(rates.values()):.0%} of the steps arrive that do with s = {most}")
    return Reason("algorithm.sampled", chosen, CLOSED, "; ".join(says))


def _wait(case: Case, settings: Settings) -> Reason:
    """None, unless most contacts find nothing."""
    pace = _pace(case, settings)
    if pace.idle <= IDLE or not pace.closed:
        says = f"{pace.idle:.0%} of the contacts find no step; waiting saves bytes and costs time ({COST})"
        return Reason("algorithm.wait", 0.0, CLOSED, says)
    wait = pace.round_time
    while (after := _pace(case, _with(settings, Reason("algorithm.wait", wait, "", "")))).idle > IDLE:
        wait *= 1.5
    says = f"{pace.idle:.0%} of the contacts would find no step, with this wait {after.idle:.0%}"
    return Reason("algorithm.wait", round(wait, 2), CLOSED, says)


def choice_of_the_bound(case: Case, settings: Settings, most: int) -> tuple[int, int]:
    """s and K for which the main theorem is smallest in the time there is; the theorem knows no other algorithm."""
    best: tuple[float, int, int] | None = None
    for sampled, steps in product(range(1, most + 1), (1, 2, 5, 10, 20)):
        tried = _with(settings, Reason("algorithm.sampled", sampled, "", ""))
        pace = _pace(case, _with(tried, Reason("algorithm.local_steps", steps, "", "")))
        if not pace.closed:
            return case.problem.sampled, case.problem.local_steps
        problem: Problem = replace(
            case.problem,
            speeds=tuple(pace.expected_steps.tolist()),
            sampled=sampled,
            local_steps=steps,
            rounds=max(1, int(settings.run.until / pace.round_time)),
        )
        found = main_theorem(problem).value, sampled, steps
        best = found if best is None else min(best, found)
    assert best is not None
    return best[1], best[2]


def _pace(case: Case, settings: Settings) -> Pace:
    return pace_of(settings, polled(settings), case.problem.dim)


def _with(settings: Settings, *changes: Reason) -> Settings:
    """The curve with other settings; those of another algorithm that it does not have are left out."""
    raw = settings.model_dump(exclude_none=True)
    for change in changes:
        section, _, key = change.key.partition(".")
        if change.key == "algorithm.name" and raw["algorithm"]["name"] != change.value:
            kept = ("sampled", "local_steps", "lr", "optimizer", "momentum", "fresh_optimizer")
            raw["algorithm"] = {name: raw["algorithm"][name] for name in kept if name in raw["algorithm"]}
        raw[section][key] = change.value
    return type(settings).model_validate(raw)


def page(advice: Advice) -> tuple[list[str], list[Section]]:
    """For people."""
    was, pace = advice.case.problem, advice.pace
    sampled, steps = advice.by_the_bound
    said = [
        f"{was.clients} clients, rounds of {pace.round_time:g} time units: with what is advised, contacts find "
        f"{float(pace.expected_steps.min()):.2g} to {float(pace.expected_steps.max()):.2g} steps in the mean; "
        f"{pace.idle:.0%} find none.",
        f"The main theorem alone would choose s = {sampled} and K = {steps} (now: s = {was.sampled}, "
        f"K = {was.local_steps}). It is not followed: in short runs it was worse (docs/results/advice.md).",
        "The learning rate is not advised; tune it: quafl tune FILE.toml --over algorithm.lr=0.05,0.1,0.2,0.5",
    ]
    rows = tuple((one.key, f"{one.value}", one.kind, one.says) for one in advice.reasons)
    return said, [Section("Try this first", "", ("setting", "value", "rests on", "because"), rows)]


def account(advice: Advice) -> dict[str, Any]:
    """For programs."""
    return {
        "advice": {reason.key: reason.value for reason in advice.reasons},
        "reasons": {reason.key: {"rests_on": reason.kind, "because": reason.says} for reason in advice.reasons},
        "by_the_bound": {"sampled": advice.by_the_bound[0], "local_steps": advice.by_the_bound[1]},
        "idle": advice.pace.idle,
        "round_time": advice.pace.round_time,
        "expected_steps": advice.pace.expected_steps.tolist(),
    }
