"""What recorded curves say about a claim, on curves made up for it."""

import numpy as np
import pytest
from made_up import curve, rising

from quafl.record import verdicts
from quafl.record.summary import ranked

FAST, SLOW = curve("fast", rising(0.2, 0.1)), curve("slow", rising(0.05, 0.1))
NOISY = curve("noisy", rising(0.2, 0.6))


@pytest.mark.parametrize("measure", ["to target", "area"])
@pytest.mark.parametrize("axis", ["time", "rounds", "local steps", "megabytes"])
def test_the_right_order_holds_and_the_wrong_one_does_not(measure: str, axis: str) -> None:
    claim = {"measure": measure, "axis": axis, "metric": "accuracy"}
    assert verdicts.order([FAST, SLOW], **claim).verdict == "holds"
    assert verdicts.order([SLOW, FAST], **claim).verdict == "does not hold"
    assert verdicts.order([FAST, NOISY], **claim).verdict == "undecided"


def test_less_loss_is_better() -> None:
    claim = {"measure": "area", "axis": "time", "metric": "loss"}
    assert verdicts.order([FAST, SLOW], **claim).verdict == "holds"
    assert verdicts.order([SLOW, FAST], **claim).verdict == "does not hold"


def test_a_chain_holds_only_if_each_link_does() -> None:
    claim = {"measure": "area", "axis": "time", "metric": "accuracy"}
    middle = curve("middle", rising(0.1, 0.1))
    assert verdicts.order([FAST, middle, SLOW], **claim).verdict == "holds"
    assert verdicts.order([FAST, SLOW, middle], **claim).verdict == "does not hold"
    found = verdicts.order([FAST, NOISY, SLOW], **claim)
    assert [finding.verdict for finding in found.findings] == ["undecided", "holds"]
    assert found.verdict == "undecided"


def test_the_interval_is_students_of_the_paired_differences() -> None:
    first = curve("first", lambda time, seed: 0.5 + 0.1 * seed + 0.01 * (seed % 2), seeds=[0, 1, 2])
    second = curve("second", lambda time, seed: 0.4 + 0.1 * seed, seeds=[2, 1, 0])
    (found,) = verdicts.order([first, second], measure="end", axis="time", metric="accuracy").findings
    assert found.values == pytest.approx({0: 0.1, 1: 0.11, 2: 0.1})
    half = 4.302653 * np.std([0.1, 0.11, 0.1], ddof=1) / np.sqrt(3)  # the 97.5 % point with two degrees of freedom
    assert (found.mean, found.low, found.high) == pytest.approx((0.31 / 3, 0.31 / 3 - half, 0.31 / 3 + half), rel=1e-5)
    assert found.verdict == "holds", "although each curve by itself varies more than the two differ"


def test_fewer_than_three_seeds_decide_nothing() -> None:
    two = [curve(label, rising(speed), seeds=[0, 1]) for label, speed in (("fast", 0.2), ("slow", 0.05))]
    assert verdicts.order(two, measure="area", axis="time", metric="accuracy").verdict == "undecided"


def test_only_seeds_that_both_have_are_compared() -> None:
    some = curve("slow", rising(0.05, 0.1), seeds=[1, 3, 4, 9])
    (found,) = verdicts.order([FAST, some], measure="area", axis="time", metric="accuracy").findings
    assert sorted(found.values) == [1, 3, 4]


def test_who_never_arrives_counts_as_arriving_at_the_end() -> None:
    never = curve("never", lambda time, seed: 0.5)
    found = verdicts.order([FAST, never], measure="to target", axis="time", metric="accuracy")
    assert found.verdict == "holds"
    assert found.findings[0].what == "fast before never: time to 0.8, at least, as not every seed arrives"
    assert verdicts.order([never, never], measure="to target", axis="time", metric="accuracy").verdict == "undecided"
    assert verdicts.order([never, FAST], measure="to target", axis="time", metric="accuracy").verdict == "does not hold"


def test_who_never_arrives_is_not_first_by_having_few_rounds() -> None:
    claim = {"measure": "to target", "axis": "rounds", "metric": "accuracy"}
    arrives = curve("arrives", rising(0.03, 0.1), pace=1)  # after some 54 rounds of 100
    lazy = curve("lazy", lambda time, seed: 0.5, pace=20)  # five rounds in all
    assert verdicts.order([lazy, arrives], **claim).verdict == "undecided"
    assert verdicts.order([arrives, lazy], **claim).verdict == "undecided"
    assert verdicts.order([arrives, curve("busy", lambda time, seed: 0.5, pace=0.5)], **claim).verdict == "holds"


def test_what_has_diverged_is_worth_nothing() -> None:
    broken = dict.fromkeys(range(5), "training diverged")
    early = curve("early", rising(0.2, 0.1), until=14, troubles=broken)
    early.settings["run"]["until"] = 100.0
    for measure in "area", "end", "to target":
        claim = {"measure": measure, "axis": "time", "metric": "accuracy"}
        assert verdicts.order([SLOW, early], **claim).verdict == "holds", measure
        assert verdicts.order([early, SLOW], **claim).verdict == "does not hold", measure
    calm = curve("calm", rising(0.05, 0.1))
    assert verdicts.order([calm, early], measure="rise", axis="time", metric="loss").verdict == "holds"
    one = curve("one", rising(0.2, 0.1), troubles={3: "training diverged"})
    one.seeds[3] = one.seeds[3][:4]
    (found,) = verdicts.order([one, SLOW], measure="end", axis="rounds", metric="accuracy").findings
    assert sum(value < 0 for value in found.values.values()) == 1, "the others are compared to their end"
    assert [label.label for label in ranked([early, SLOW])] == ["slow", "early"]


def test_no_worse_is_not_much_worse() -> None:
    claim = {"measure": "end", "axis": "time", "metric": "accuracy"}
    best, nearly, worse = (curve(str(end), lambda time, seed, end=end: end + 0.001 * seed) for end in (0.9, 0.895, 0.8))
    assert verdicts.order([nearly, best], **claim)[:2] == ("does not hold", "above 0")
    assert verdicts.order([nearly, best], margin=0.01, **claim)[:2] == ("holds", "above -0.01")
    assert verdicts.order([worse, best], margin=0.01, **claim).verdict == "does not hold"


def test_curves_are_compared_as_far_as_both_go() -> None:
    """A curve that is good early and goes nowhere later is not better for having ended early."""
    short = curve("short", rising(0.1, 0.1), until=20)
    claim = {"measure": "end", "axis": "time", "metric": "accuracy"}
    (found,) = verdicts.order([short, curve("long", rising(0.1, 0.1))], **claim).findings
    assert found.mean == pytest.approx(0, abs=1e-9)


def test_a_model_stands_until_the_end_of_the_run() -> None:
    """Whoever has no round that ends in time is judged by the last one, not by an earlier end."""
    early = curve("early", rising(0.1, 0.1), until=60)
    early.settings["run"]["until"] = 100.0
    claim = {"measure": "end", "axis": "time", "metric": "accuracy"}
    assert verdicts.order([curve("late", rising(0.1, 0.1)), early], **claim).verdict == "holds"
    never = curve("never", lambda time, seed: 0.5, until=60)
    never.settings["run"]["until"] = 100.0
    (found,) = verdicts.order([FAST, never], measure="to target", axis="time", metric="accuracy").findings
    assert found.mean > 80


def test_a_model_stands_until_the_next_round_ends() -> None:
    steps = curve("FedAvg", lambda time, seed: 0.0 if time < 100 else 1.0, pace=2.0)  # evaluated after every round
    line = curve("QuAFL", lambda time, seed: 0.0 if time < 100 else 1.0, pace=0.1)  # after every twentieth
    (finding,) = verdicts.order([line, steps], measure="area", axis="time", metric="accuracy").findings
    assert finding.mean == pytest.approx(0.01), "a triangle of two time units in a hundred"


def test_spikes_are_rises_after_the_beginning() -> None:
    calm = curve("calm", lambda time, seed: 0.8 - 0.001 * seed)
    spiky = curve("spiky", lambda time, seed: 0.8 - 0.3 * (abs(time - 50) < 1) * (1 + 0.1 * seed))
    early = curve("early", lambda time, seed: 0.8 - 0.3 * (abs(time - 4) < 1) * (1 + 0.1 * seed))
    claim = {"measure": "rise", "axis": "time", "metric": "loss"}
    assert verdicts.order([calm, spiky], **claim).verdict == "holds"
    assert verdicts.order([spiky, calm], **claim).verdict == "does not hold"
    assert verdicts.order([calm, early], **claim).verdict == "undecided"


@pytest.mark.parametrize(("end", "word"), [(0.91, "holds"), (0.85, "does not hold"), (0.925, "undecided")])
def test_a_level_holds_if_the_interval_lies_within(end: float, word: str) -> None:
    about = curve("about", lambda time, seed: end + 0.004 * np.sin(seed))
    assert verdicts.level([about], measure="end", axis="time", metric="accuracy", value=0.91, within=0.015)[0] == word


def test_the_share_of_contacts_without_a_step_is_a_level() -> None:
    claim = {"measure": "zero-step share", "axis": "time", "metric": "accuracy"}
    assert verdicts.level([FAST], value=0.25, within=0.01, **claim).verdict == "holds"
    assert verdicts.level([FAST], value=0.35, within=0.01, **claim).verdict == "does not hold"
    claim["measure"] = "zero-step share of slow clients"
    assert verdicts.level([FAST], value=0.5, within=0.01, **claim).verdict == "holds"


def test_more_than_enough_is_enough() -> None:
    good = curve("good", lambda time, seed: 0.99 + 0.001 * np.sin(seed))
    claim = {"measure": "end", "axis": "time", "metric": "accuracy", "value": 0.91, "within": 0.015}
    assert verdicts.level([good], **claim)[:2] == ("does not hold", "in 0.895 … 0.925")
    assert verdicts.level([good], side="at least", **claim)[:2] == ("holds", "at least 0.895")


@pytest.mark.parametrize(("spread", "word"), [(0.001, "holds"), (0.2, "does not hold"), (0.01, "undecided")])
def test_a_deviation_has_an_interval_of_its_own(spread: float, word: str) -> None:
    seeds = curve("seeds", lambda time, seed: 0.8 + spread * (seed - 2))
    claim = {"measure": "deviation", "axis": "time", "metric": "accuracy"}
    assert verdicts.level([seeds], value=0.0, within=0.02, **claim).verdict == word
    assert verdicts.level([seeds], value=0.02, within=0.0, side="at most", **claim)[:2] == (word, "at most 0.02")
