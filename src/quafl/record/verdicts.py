"""Whether recorded curves bear out a claim: differences of paired seeds, and their 95 % intervals."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from scipy import integrate, stats

from quafl.record.plots import AXES, Numbers, column, end_of, points
from quafl.record.summary import Curve, arrival, slow_zero_step_shares, zero_step_shares

Word: TypeAlias = Literal["holds", "does not hold", "undecided"]
CONFIDENCE = 0.95
LEAST_SEEDS = 3
NEVER = ", at least, as not every seed arrives"


class Finding(NamedTuple):
    """A number over seeds, and what it says."""

    what: str
    values: dict[int, float]  # by seed
    mean: float
    low: float
    high: float
    verdict: Word


class Verdict(NamedTuple):
    """A claim holds if all that it says does, and does not if something is the other way round."""

    verdict: Word
    rule: str  # where the intervals have to be
    findings: list[Finding]


def order(curves: Sequence[Curve], *, measure: str, axis: str, metric: str, margin: float = 0.0) -> Verdict:
    """That each curve is better than the next, or no worse than by the margin."""
    end = _common_end(curves, axis)
    findings = []
    for first, second in pairwise(curves):
        seeds = [seed for seed in first.seeds if seed in second.seeds]
        bounded = False
        if measure == "to target":
            difference = {seed: _earlier(first, second, axis, seed) for seed in seeds}
            bounded = any(_reached(curve, axis, seed)[0] is None for curve in (first, second) for seed in seeds)
        else:
            better = -1.0 if measure == "rise" or metric.endswith("loss") else 1.0
            ours, theirs = (_measured(curve, measure, axis, metric, end) for curve in (first, second))
            difference = {seed: better * (ours[seed] - theirs[seed]) for seed in seeds}
        mean, low, high = _interval(list(difference.values()))
        word: Word = "holds" if low > -margin else "does not hold" if high < -margin else "undecided"
        unit = f"{axis} to {first.target:g}" if measure == "to target" else f"{measure}, {metric} by {axis}"
        what = f"{first.label} before {second.label}: {unit}{NEVER if bounded else ''}"
        findings.append(Finding(what, difference, mean, low, high, word))
    return _together(f"above {-margin if margin else 0:g}", findings)


def level(
    curves: Sequence[Curve], *, measure: str, axis: str, metric: str, value: float, within: float, side: str = "about"
) -> Verdict:
    """That something is about `value` for each curve, or at least or at most about so much."""
    end = _common_end(curves, axis)
    least = -np.inf if side == "at most" else value - within
    most = np.inf if side == "at least" else value + within
    findings = []
    for curve in curves:
        found = _measured(curve, "end" if measure == "deviation" else measure, axis, metric, end)
        values = list(found.values())
        mean, low, high = _deviation(values) if measure == "deviation" else _interval(values)
        inside, outside = least <= low <= high <= most, high < least or low > most
        word: Word = "holds" if inside else "does not hold" if outside else "undecided"
        what = f"{curve.label}: {measure if measure != 'end' else f'{metric} at the end'}"
        findings.append(Finding(what, found, mean, low, high, word))
    rules = {"at least": f"at least {least:g}", "at most": f"at most {most:g}", "about": f"in {least:g} … {most:g}"}
    return _together(rules[side], findings)


def ends(curve: Curve, metric: str) -> dict[int, float]:
    """Of each seed, the mean over the last tenth of the time."""
    return _measured(curve, "end", "time", metric, _common_end([curve], "time"))


def areas(curves: Sequence[Curve], metric: str) -> list[dict[int, float]]:
    """Of each curve, by seed: the mean over the time that all of them have lasted."""
    end = _common_end(curves, "time")
    return [_measured(curve, "area", "time", metric, end) for curve in curves]


def _together(rule: str, findings: list[Finding]) -> Verdict:
    return Verdict(overall([finding.verdict for finding in findings]), rule, findings)


def overall(words: Sequence[Word]) -> Word:
    """Of something that says several things."""
    if "does not hold" in words:
        return "does not hold"
    return "holds" if set(words) == {"holds"} else "undecided"


def _interval(values: list[float]) -> tuple[float, float, float]:
    """Mean and its interval by Student's law; without one, of fewer seeds than are asked for."""
    if len(values) < LEAST_SEEDS:
        return (float(np.mean(values)) if values else np.nan), -np.inf, np.inf
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1))
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * spread / len(values) ** 0.5
    return mean, mean - reach, mean + reach


def _deviation(values: list[float]) -> tuple[float, float, float]:
    """The standard deviation and its interval by the χ² law."""
    if len(values) < LEAST_SEEDS:
        return np.nan, -np.inf, np.inf
    freedom, spread = len(values) - 1, float(np.std(values, ddof=1))
    low, high = (
        spread * (freedom / stats.chi2.ppf(p, freedom)) ** 0.5 for p in ((1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2)
    )
    return spread, float(low), float(high)


def _measured(curve: Curve, measure: str, axis: str, metric: str, end: float) -> dict[int, float]:
    """Of each seed."""
    if measure == "zero-step share":
        return zero_step_shares(curve)
    if measure == "zero-step share of slow clients":
        return slow_zero_step_shares(curve)
    found: Callable[[Numbers, Numbers, float], float] = {"area": _area, "end": _at_end, "rise": _rise}[measure]
    result = {}
    for seed, rows in curve.seeds.items():
        places, values = points(rows, AXES[axis], column(metric))
        if seed in curve.troubles:  # what has diverged is worth no more than what was never trained
            places, values = np.append(places, np.nextafter(places[-1], np.inf)), np.append(values, values[0])
        result[seed] = found(places, values, end)
    return result


def _common_end(curves: Sequence[Curve], axis: str) -> float:
    """How far every seed of every curve goes, but for those that diverged."""
    ends = [
        end_of(curve, AXES[axis], rows)
        for curve in curves
        for seed, rows in curve.seeds.items()
        if seed not in curve.troubles
    ]
    return min(ends or [end_of(curve, AXES[axis], rows) for curve in curves for rows in curve.seeds.values()])


def _earlier(first: Curve, second: Curve, axis: str, seed: int) -> float:
    """By how much one arrives at the target before the other. Of one that does not, all that is known is that it is
    later than its end: the least that can be said counts, which is nothing if neither arrives."""
    (mine, my_end), (yours, your_end) = (_reached(curve, axis, seed) for curve in (first, second))
    if mine is not None and yours is not None:
        return yours - mine
    if mine is not None:
        return max(your_end - mine, 0.0)
    return -max(my_end - yours, 0.0) if yours is not None else 0.0


def _reached(curve: Curve, axis: str, seed: int) -> tuple[float | None, float]:
    """Where a seed first evaluated at the target, if it did and lasted, and where it ended."""
    first = arrival(curve, seed)
    return None if first is None else AXES[axis].value(first), end_of(curve, AXES[axis], curve.seeds[seed])


def _area(places: Numbers, values: Numbers, end: float) -> float:
    """The mean up to the end."""
    return _mean(places, values, places[0], end)


def _at_end(places: Numbers, values: Numbers, end: float) -> float:
    """The mean over the last tenth."""
    return _mean(places, values, places[0] + 0.9 * (end - places[0]), end)


def _mean(places: Numbers, values: Numbers, start: float, end: float) -> float:
    """Of the line between two places."""
    inside = places[(places > start) & (places < end)]
    where = np.concatenate([[start], inside, [end]])
    line = np.interp(where, places, values)
    return float(integrate.trapezoid(line, where) / (end - start)) if end > start else float(line[0])


def _rise(places: Numbers, values: Numbers, end: float) -> float:
    """The largest from one evaluation to the next, after the first tenth."""
    late = values[(places >= places[0] + 0.1 * (end - places[0])) & (places <= end)]
    return float(np.diff(late).max(initial=0.0))
