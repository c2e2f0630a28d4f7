"""The theory on people's own tasks and worlds: estimates, cases, pages."""

import json
import tomllib
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from quafl.cli import app
from quafl.record import report
from quafl.record.plots import draw_potential
from quafl.record.rows import Row
from quafl.record.summary import Curve
from quafl.settings.base import SettingsError
from quafl.settings.curve import Settings
from quafl.settings.reading import curves_of
from quafl.tasks import Quadratic
from quafl.theory.account import account, page
from quafl.theory.advice import advise
from quafl.theory.cases import case_of, pace_of, polled
from quafl.theory.probing import BATCHES, CLIENTS, probe

FILE = """
[task]
name = "quadratic"
dim = 20
[clients]
count = 6
[algorithm]
name = "quafl"
sampled = 2
[run]
until = 50.0
"""


def settings(**sections: Any) -> Settings:
    raw: dict[str, Any] = {
        "task": {"name": "quadratic", "dim": 20},
        "clients": {"count": 6},
        "algorithm": {"name": "quafl", "sampled": 2},
        "run": {"until": 50.0},
    }
    return curves_of({name: {**raw.get(name, {}), **sections.get(name, {})} for name in {*raw, *sections}})[0]


def test_the_constants_of_a_quadratic_are_found() -> None:
    """L = max a; E‖g̃ − ∇f_i‖² = σ²; (1/n) Σ ‖a(c_i − c̄)‖² = G², with B² = 1."""
    centers = torch.randn(8, 200, generator=torch.Generator().manual_seed(1))
    curvature = torch.linspace(0.1, 3.0, 200)
    found = probe(Quadratic(curvature, centers, noise=2.0), clients=8, rate=0.05)
    apart = float((curvature * (centers - centers.mean(dim=0))).square().sum(dim=-1).mean())
    assert 0.9 * 3.0 < found.smoothness.value < 1.02 * 3.0
    assert found.variance.least < 4.0 < found.variance.value < 4.0 * 1.3
    assert found.dissimilarity.least == pytest.approx(apart, rel=0.05)
    assert found.dissimilarity.value == pytest.approx(apart, rel=0.05)


def test_gradients_are_counted_as_they_are_asked_for() -> None:
    asked: list[int] = []

    class Counted(Quadratic):
        def gradient(self, model: Any, buffers: Any, batch: Any) -> Any:
            asked.append(1)
            return Quadratic.gradient(self, model, buffers, batch)

    found = probe(Counted(torch.ones(3), torch.randn(40, 3), noise=1.0), clients=40, rate=0.1)
    assert found.gradients == len(asked)
    assert found.clients == CLIENTS
    assert found.variance.gradients == CLIENTS * (3 * BATCHES + 50)


def test_a_step_that_is_too_large_for_probing_is_said() -> None:
    with pytest.raises(SettingsError, match=r"smaller algorithm\.lr"):
        case_of(settings(task={"smoothness": 1e6}, algorithm={"lr": 1e3}))


def test_measured_speeds_are_those_of_the_closed_form_where_there_is_one() -> None:
    """A world in which somebody leaves after the end has no closed form, and the same speeds."""
    plain = settings(run={"until": 600.0})
    measured = settings(run={"until": 600.0}, clients={"absences": [{"start": 1e6, "stop": 2e6, "clients": "all"}]})
    known, counted = (pace_of(one, polled(one), 20) for one in (plain, measured))
    assert known.closed
    assert not counted.closed
    assert counted.round_time == pytest.approx(known.round_time)
    torch.testing.assert_close(counted.expected_steps, known.expected_steps, rtol=0.3, atol=0.1)
    assert counted.idle == pytest.approx(known.idle, abs=0.05)


def test_a_case_has_the_rounds_for_which_there_is_time() -> None:
    case = case_of(settings(algorithm={"wait": 0.75}))
    assert case.problem.rounds == 25, "50 time units, 10·4/32 + 0.75 each"
    assert case_of(settings(), rounds=7).problem.rounds == 7


def test_every_algorithm_is_taken_as_the_paper_s_with_its_own_s_and_k() -> None:
    for name in "fedavg", "fedbuff", "calibrated":
        p = case_of(settings(algorithm={"name": name, "sampled": 3, "local_steps": 7})).problem
        assert (p.sampled, p.local_steps) == (3, 7)


def test_the_page_says_whether_the_theorem_promises_anything() -> None:
    case = case_of(settings())
    said, sections = page(case)
    assert any("promises nothing" in sentence for sentence in said)
    shares = [float(row[2].rstrip("%")) for one in sections if one.title.startswith("Bound") for row in one.rows]
    assert sum(shares) == pytest.approx(300, abs=1)
    enough = account(case)["holds_from"]["main theorem"]
    said, _ = page(case_of(settings(), rounds=enough))
    assert any("long enough for its proof" in sentence for sentence in said)


def test_the_command_prints_the_page_and_json(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(FILE, encoding="utf-8")
    shown = CliRunner().invoke(app, ["theory", str(tmp_path / "my.toml")])
    assert shown.exit_code == 0
    assert "What the theorems take for given" in shown.stdout
    answer = CliRunner().invoke(app, ["theory", str(tmp_path / "my.toml"), "--rounds", "123", "--json"])
    found = json.loads(answer.stdout)
    assert found["problem"]["rounds"] == 123
    assert {bound["name"] for bound in found["bounds"]} == {
        "main theorem",
        "full theorem",
        "full theorem, as printed",
        "server's corollary",
    }


def test_a_curve_that_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(FILE, encoding="utf-8")
    refused = CliRunner().invoke(app, ["theory", str(tmp_path / "my.toml"), "--only", "x"])
    assert refused.exit_code == 2


# The potential in a run


def recorded() -> Settings:
    return settings(run={"until": 50.0, "every": 5.0, "potential": True})


def rows_of(one: Settings) -> list[Row]:
    _, simulation = one.simulation(0)
    for _ in simulation:
        pass
    return simulation.rows


def test_rows_have_the_potential_and_what_the_mean_of_all_models_is_worth() -> None:
    rows = rows_of(recorded())
    assert (rows[0]["potential"], rows[0]["server_apart"]) == (0, 0)
    assert rows[0]["mean_model_loss"] == rows[0]["loss"]
    for row in rows[1:]:
        assert 0 < row["server_apart"] < row["potential"]
        assert row["mean_model_loss"] != row["loss"]
    assert not {"server_apart", "mean_model_loss"} & rows_of(settings())[0].keys()


def test_recording_the_potential_changes_nothing_else_and_survives_a_checkpoint() -> None:
    plain = settings(run={"until": 50.0, "every": 5.0})
    more = {"potential", "server_apart", "mean_model_loss"}
    whole = rows_of(recorded())
    assert [{name: value for name, value in row.items() if name not in more} for row in whole] == rows_of(plain)
    _, first = recorded().simulation(0)
    for _ in islice(first, 15):
        pass
    _, second = recorded().simulation(0)
    second.restore(first.state())
    for _ in second:
        pass
    assert second.rows == whole


def test_the_report_has_the_potential_beside_the_lemma_where_it_was_recorded() -> None:
    rows = [{**row, "seed": 0} for row in rows_of(recorded())]
    run = {"target": 0.9, "metric": "accuracy", "lower_is_better": False, "seeds": [0]}
    curve = Curve("QuAFL", {0: rows}, {"run": run, "clients": {"count": 6}}, {"quafl": "0"})
    line = draw_potential([curve], 6).axes[0].lines[-1]
    top, rounds = max(row["potential"] for row in rows), rows[-1]["round"]
    assert line.get_ydata()[0] == pytest.approx(top)  # type: ignore[index]
    assert line.get_ydata()[-1] == pytest.approx(top * (1 - 1 / 24) ** rounds)  # type: ignore[index]
    title = "How far apart the models are"
    assert title in report.page([curve])
    without = [{name: value for name, value in row.items() if name != "potential"} for row in rows]
    assert title not in report.page([replace(curve, seeds={0: without})])


# Advice


def test_the_advice_for_clients_with_different_data_is_calibrated_and_can_be_run() -> None:
    found = advise(settings(task={"spread": 50.0, "noise": 0.1}))
    assert found.reasons[0].value == "calibrated"
    assert {reason.kind for reason in found.reasons} <= {"measured", "closed form", "bound"}
    assert curves_of(tomllib.loads(found.toml()))[0].algorithm.name == "calibrated"
    assert found.settings.run == settings().run


def test_a_short_run_of_many_alike_clients_gets_what_was_ahead_there() -> None:
    few = settings(task={"spread": 0.0}, clients={"count": 120}, run={"until": 20.0}, algorithm={"sampled": 10})
    assert advise(few).reasons[0].value == "fedasync"
    assert advise(settings(task={"spread": 0.0})).reasons[0].value == "calibrated"


def test_each_client_is_to_be_heard_often_and_no_more_contacts_than_are_allowed() -> None:
    short, long = (advise(settings(clients={"count": 20}, run={"until": until})) for until in (25.0, 2000.0))
    sampled = [{reason.key: reason.value for reason in one.reasons}["algorithm.sampled"] for one in (short, long)]
    assert sampled[0] == 10, "half of the clients, as 20 rounds are few"
    assert sampled[1] < 10
    values = {reason.key: reason.value for reason in advise(settings(run={"until": 25.0}), at_most=2).reasons}
    assert values["algorithm.sampled"] <= 2


def test_bits_are_saved_where_they_cost_time() -> None:
    def bits(latency: float) -> object:
        found = advise(settings(clients={"latency_at_32_bits": latency}, algorithm={"wait": 1.0}))
        return {reason.key: reason.value for reason in found.reasons}["codec.bits"]

    assert (bits(0.1), bits(10.0)) == (8, 4)


def test_a_wait_is_advised_where_most_contacts_find_nothing() -> None:
    def wait(**clients: float) -> float:
        found = advise(settings(clients=clients))
        return float({reason.key: reason.value for reason in found.reasons}["algorithm.wait"])

    assert wait(slow_step=8.0) == 0
    assert wait(fast_step=200.0, slow_step=400.0) > 0


def test_a_wait_that_was_set_does_not_change_the_advice() -> None:
    assert advise(settings(algorithm={"wait": 30.0})).toml() == advise(settings()).toml()


def test_the_advice_is_printed_with_what_it_rests_on_and_as_json(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(FILE, encoding="utf-8")
    shown = CliRunner().invoke(app, ["advise", str(tmp_path / "my.toml")])
    assert shown.exit_code == 0
    assert "rests on" in shown.stdout
    answer = CliRunner().invoke(app, ["advise", str(tmp_path / "my.toml"), "--json"])
    assert {"algorithm.name", "algorithm.sampled", "codec.bits"} <= json.loads(answer.stdout)["advice"].keys()
