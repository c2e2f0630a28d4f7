"""The paper's figures as commands."""

import csv
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from made_up import curve, rising
from typer.testing import CliRunner

from quafl.cli import app
from quafl.record.maps import NOBODY, draw, first
from quafl.record.summary import Curve
from quafl.record.verdicts import overall
from quafl.run.figures import fewest_bits, fingerprint
from quafl.run.folders import accumulate
from quafl.run.tuning import _beside, grid
from quafl.run.versions import joined
from quafl.settings.algorithms import LABELS as ALGORITHMS
from quafl.settings.base import SettingsError
from quafl.settings.figures import REGIMES, Tuning, figures, load_figure

# The labels of the paper's figures.
LABELS = [
    *("s-impact", "time", "averaging", "non-iid", "fedbuff_different_speeds", "fednova_different_speeds"),
    *("k-impact-fmnist", "s-impact-fmnist", "swt-impact-fmnist-rounds", "fedavg"),
    *("accuracy-vs-time-fmnist", "loss-vs-time-fmnist", "full_convergence"),
    *("300_nodes_accuracy-vs-time-fmnist", "300_nodes_loss-vs-time-fmnist"),
    *("k-impact-cifar10", "s-impact-cifar10", "b-impact-cifar10", "swt-impact-cifar10"),
    *("accuracy-vs-time-cifar10", "loss-vs-time-cifar10", "qsgd_loss", "qsgd_accuracy"),
    *("fedbuff", "fedbuff_accuracy", "error_bar"),
]
TINY = ["--quick", "-j", "1", "--set", "run.until=12", "--set", "run.every=4"]


def test_every_figure_of_the_paper_has_a_preset() -> None:
    assert len(LABELS) == 26
    assert set(LABELS) <= set(figures())


@pytest.mark.parametrize("name", figures())
def test_a_figure_says_what_is_run_and_what_is_claimed(name: str) -> None:
    whole, quick = load_figure(name), load_figure(name, quick=True)
    assert whole.figure.claims or whole.figure.grid
    assert len(whole.curves[0].run.seeds) >= 3
    assert quick.smaller is not None
    assert {one.task.name for one in quick.curves} == {"digits"}
    assert [one.label for one in quick.curves] == [one.label for one in whole.curves]
    lasting = {one.run.until for one in whole.curves}
    assert len(lasting) == 1, "one horizon for all"


@pytest.mark.parametrize("name", figures())
def test_figures_that_stand_in_for_others_exist_beside_them(name: str) -> None:
    figure = load_figure(name).figure
    assert figure.of is None or figure.of in figures()
    assert figure.instead_of is None or load_figure(figure.instead_of).curves[0].task.name == "celeba"


def test_an_unknown_figure_is_named_and_the_known_ones_listed() -> None:
    with pytest.raises(
        SettingsError, match=r"there is no figure 'tim'; did you mean 'time'\? `quafl reproduce --list` shows them all"
    ):
        load_figure("tim")


def test_every_algorithm_is_given_as_many_learning_rates() -> None:
    own: dict[str, list[Any]] = {"lr": [0.1], "server_lr": [0.1, 0.2, 0.3], "staleness": [False, True]}
    with pytest.raises(
        ValueError, match="2 learning rates, and 6 combinations of lr, server_lr, staleness for fedbuff"
    ):
        Tuning(lr=[0.1, 0.2], own={"fedbuff": own})
    for name in [*figures(), *figures(REGIMES)]:
        wanted = load_figure(name)
        assert set(wanted.tuning.own) <= {*ALGORITHMS, *(curve.label for curve in wanted.curves)}, name


def test_a_curve_with_a_grid_of_its_own_is_tuned_by_itself() -> None:
    own = grid(load_figure("non-iid", ["curves.FedBuff.algorithm.staleness=true"]))
    assert all(one.algorithm.staleness for one in own if one.algorithm.name == "fedbuff"), "what is not tried stays"
    tried = grid(load_figure("fashion-dirichlet", tuning=True))
    assert len(tried) == 12 * 9
    mine = [one.algorithm for one in tried if one.label.startswith("FedProx")]
    assert {(one.lr, one.proximity) for one in mine} == set(product((0.05, 0.12, 0.3), (0.01, 0.1, 1.0)))
    assert {one.algorithm.server_optimizer for one in tried if one.label.startswith("FADAS")} == {"amsgrad"}


@pytest.mark.parametrize(
    ("value", "values", "beside"),
    [
        (0.1, [0.03, 0.1, 0.3], [0.055, 0.17]),
        (0.3, [0.03, 0.1, 0.3], [0.17, 0.9]),
        (0.03, [0.03, 0.1, 0.3], [0.009, 0.055]),
        (10, [5, 10, 20], [7, 14]),
        (0.0, [0.0, 0.5, 1.0], [-0.5, 0.25]),
        (True, [False, True], []),
    ],
)
def test_the_neighbours_of_the_best_are_halfway_to_the_next_or_beyond_the_edge(
    value: Any, values: list[Any], beside: list[Any]
) -> None:
    assert sorted(_beside(value, values)) == pytest.approx(beside)
    outside = [one for one in beside if not min(values) <= one <= max(values)]
    assert _beside(value, values, beyond=True) == pytest.approx(outside)


@pytest.mark.parametrize(
    "change",
    [
        *("clients.slow=0.25", "clients = {slow=0.25}"),
        *('curves.QuAFL."clients".slow=0.25', "curves.QuAFL.clients={slow=0.25}"),
    ],
)
def test_what_a_map_varies_is_not_to_be_set_but_for_tuning(change: str) -> None:
    with pytest.raises(SettingsError, match=r"clients.slow cannot be set: map is a map over it \(0.0, 0.25, 0.5\)"):
        load_figure("map", [change])
    wanted = load_figure("map", [change], tuning=True)
    assert not wanted.cells
    assert {curve.label: curve.clients.slow for curve in wanted.curves}["QuAFL"] == 0.25


@pytest.mark.parametrize("quick", [False, True])
def test_what_is_said_of_one_curve_counts_more_than_what_is_said_of_all(quick: bool) -> None:
    changes = ["curves.QuAFL weighted.algorithm.lr=0.7", "algorithm.lr=0.5", 'curves."QuAFL".codec.bits=6']
    curves = {one.label: one for one in load_figure("time", changes, quick=quick).curves}
    assert curves["QuAFL weighted"].algorithm.lr == 0.7
    assert curves["QuAFL"].algorithm.lr == curves["FedAvg"].algorithm.lr == 0.5
    assert [curves[name].codec.bits for name in ("QuAFL", "QuAFL weighted")] == [6, 14]


def test_a_label_with_a_dot_or_an_equals_sign_can_be_quoted() -> None:
    curves = {one.label: one for one in load_figure("s-impact", ['curves."s = 10".algorithm.lr=0.2']).curves}
    assert [curves[name].algorithm.lr for name in ("s = 10", "s = 20")] == [0.2, 0.001]


@pytest.mark.parametrize("name", figures())
def test_the_papers_learning_rate_is_among_those_tried(name: str) -> None:
    wanted = load_figure(name)
    rates = {"fashion-mnist": 0.001, "cifar-10": 0.07 if "qsgd" in name else 0.03, "mnist": 0.5, "celeba": 0.001}
    assert rates[wanted.curves[0].task.name] in wanted.tuning.lr


# n, s, K, b, share of slow clients and target of a figure's first curve, as the paper has them, or as its ambiguities
# were resolved; and its first claim.
FASHION, CIFAR = (20, 5, 5, 14, 0.25, 0.85), (20, 5, 9, 14, 0.25, 0.7)
TABLE: dict[str, tuple[tuple[float, ...], list[str]]] = {
    "s-impact": ((100, 40, 5, 14, 0.3, 0.85), ["s = 40", "s = 30", "s = 20", "s = 10"]),
    "time": (CIFAR, ["QuAFL", "FedAvg"]),
    "averaging": ((100, 20, 5, 14, 0.3, 0.85), ["both", "server only"]),
    "non-iid": (CIFAR, ["QuAFL", "FedBuff"]),
    "fedbuff_different_speeds": (CIFAR, ["QuAFL", "FedBuff"]),
    "fednova_different_speeds": (CIFAR, ["QuAFL", "FedNova"]),
    "k-impact-fmnist": ((20, 5, 20, 14, 0.25, 0.85), ["K = 20", "K = 10", "K = 5"]),
    "s-impact-fmnist": ((20, 16, 5, 14, 0.25, 0.85), ["s = 16", "s = 8", "s = 4"]),
    "swt-impact-fmnist-rounds": (FASHION, ["swt = 20", "swt = 10", "swt = 5", "swt = 0"]),
    "fedavg": (FASHION, ["Baseline", "FedAvg", "QuAFL"]),
    "accuracy-vs-time-fmnist": (FASHION, ["QuAFL", "FedAvg"]),
    "loss-vs-time-fmnist": (FASHION, ["QuAFL", "FedAvg"]),
    "300_nodes_accuracy-vs-time-fmnist": ((300, 30, 5, 14, 0.25, 0.8), ["QuAFL", "FedAvg"]),
    "300_nodes_loss-vs-time-fmnist": ((300, 30, 5, 14, 0.25, 0.8), ["QuAFL", "FedAvg"]),
    "full_convergence": ((20, 5, 5, 14, 0.25, 0.9), ["QuAFL", "FedAvg", "Baseline"]),
    "k-impact-cifar10": ((20, 5, 15, 14, 0.25, 0.7), ["K = 15", "K = 9", "K = 3"]),
    "s-impact-cifar10": ((20, 10, 9, 14, 0.25, 0.7), ["s = 10", "s = 6", "s = 3"]),
    "b-impact-cifar10": ((20, 5, 9, 32, 0.25, 0.7), ["b = 32", "b = 16", "b = 12"]),
    "swt-impact-cifar10": (CIFAR, ["swt = 20", "swt = 10", "swt = 5", "swt = 0"]),
    "accuracy-vs-time-cifar10": (CIFAR, ["QuAFL", "FedAvg"]),
    "loss-vs-time-cifar10": (CIFAR, ["QuAFL", "FedAvg"]),
    "qsgd_loss": ((20, 5, 9, 4, 0.25, 0.7), ["lattice", "QSGD"]),
    "qsgd_accuracy": ((20, 5, 9, 4, 0.25, 0.7), ["lattice", "QSGD"]),
    "fedbuff": (CIFAR, ["QuAFL, 32 bits", "FedBuff"]),
    "fedbuff_accuracy": (CIFAR, ["QuAFL, 32 bits", "FedBuff"]),
    "error_bar": (CIFAR, ["QuAFL", "FedAvg"]),
}


@pytest.mark.parametrize("name", LABELS)
def test_a_preset_has_the_papers_setting_and_claim(name: str) -> None:
    wanted = load_figure(name)
    one = wanted.curves[0]
    found = one.clients.count, one.algorithm.sampled, one.algorithm.local_steps, one.codec.bits, one.clients.slow
    assert ((*found, one.run.target), wanted.figure.claims[0].curves) == TABLE[name]
    assert (one.clients.fast_step, one.clients.slow_step) == (2.0, 8.0)


def reproduce(*args: str) -> str:
    result = CliRunner().invoke(app, ["reproduce", *args])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_list_has_every_figures_setting_claims_and_cost() -> None:
    shown = " ".join(reproduce("--list").split())
    for name in figures():
        figure = load_figure(name).figure
        cost = f"the runs of {figure.of}" if figure.of else r"[\d,]+ thousand local steps a seed"
        claims = re.escape("; ".join(claim.text for claim in figure.claims) or "who is first where")
        assert re.search(rf"{re.escape(f'{name}: {figure.setting}')} \({cost}\) {claims}", shown), name


def test_seeds_accumulate_over_several_sittings(tmp_path: Path) -> None:
    place = tmp_path / "quick" / "swt-impact-fmnist-rounds"
    rows = place / "curves" / "swt-5" / "rows.csv"
    reproduce("swt-impact-fmnist-rounds", *TINY, "--out", str(tmp_path), "--seeds", "1")
    before = rows.read_text()
    assert json.loads((place / "verdict.json").read_text())["verdict"] == "undecided"
    shown = reproduce("swt-impact-fmnist-rounds", *TINY, "--out", str(tmp_path), "--seeds", "3")
    assert "quick: scikit-learn's digits" in shown
    assert rows.read_text().startswith(before)
    verdict = json.loads((place / "verdict.json").read_text())
    assert verdict["quick"]
    assert [len(question["findings"]) for question in verdict["questions"]] == [3]
    assert verdict["curves"]["swt = 5"]["seeds"] == [0, 1, 2]
    assert verdict["command"].startswith(
        "quafl reproduce swt-impact-fmnist-rounds --seeds 3 --quick --set run.until=12"
    )
    assert [len(finding["values"]) for claim in verdict["claims"] for finding in claim["findings"]] == [3, 3, 3]
    for picture in "figure.png", "megabytes.png":
        assert (place / picture).stat().st_size > 5000
    assert (place / "report.html").exists()


def test_a_claim_by_another_axis_has_its_picture(tmp_path: Path) -> None:
    reproduce("fedavg", *TINY, "--out", str(tmp_path), "--seeds", "1")
    assert {path.name for path in (tmp_path / "quick" / "fedavg").glob("*.png")} >= {"figure.png", "local-steps.png"}


def test_a_curve_that_two_figures_show_is_computed_once(tmp_path: Path) -> None:
    reproduce("k-impact-fmnist", *TINY, "--out", str(tmp_path), "--seeds", "2")
    shown = reproduce("swt-impact-fmnist-rounds", *TINY, "--out", str(tmp_path), "--seeds", "3")
    names = "k-impact-fmnist", "swt-impact-fmnist-rounds"
    first, second = (tmp_path / "quick" / name / "curves" for name in names)
    assert "swt = 0: seed 0, 1 as in k-impact-fmnist/curves/k-5" in " ".join(shown.split())
    assert "swt = 5: seed" not in shown
    known = (first / "k-5" / "rows.csv").read_text()
    assert (second / "swt-0" / "rows.csv").read_text().startswith(known)
    for which in "best", "last":
        kept = f"model-seed1-{which}.safetensors"
        assert (second / "swt-0" / kept).read_bytes() == (first / "k-5" / kept).read_bytes()
    seconds = json.loads((second / "swt-0" / "seconds.json").read_text())
    assert {key: seconds[key] for key in "01"} == json.loads((first / "k-5" / "seconds.json").read_text())


def test_a_damaged_neighbour_is_named_and_does_no_harm(tmp_path: Path) -> None:
    reproduce("k-impact-fmnist", *TINY, "--out", str(tmp_path), "--seeds", "1")
    known = tmp_path / "quick" / "k-impact-fmnist" / "curves"
    (known / "k-10" / "settings.toml").write_text("[run")
    (known / "k-5" / "model-seed0-best.safetensors").write_text("")
    shown = " ".join(reproduce("swt-impact-fmnist-rounds", *TINY, "--out", str(tmp_path), "--seeds", "1").split())
    for name in "k-10", "k-5":
        assert f"curves/{name} cannot be read, and nothing is taken from it" in shown
    assert (tmp_path / "quick" / "swt-impact-fmnist-rounds" / "verdict.json").exists()


def test_what_a_neighbour_was_computed_on_is_kept(tmp_path: Path) -> None:
    reproduce("k-impact-fmnist", *TINY, "--out", str(tmp_path), "--seeds", "1")
    place = tmp_path / "quick" / "k-impact-fmnist" / "curves" / "k-5" / "versions.json"
    made = json.loads(place.read_text())
    place.write_text(json.dumps(made | {"device": "another", "python": "another", "date": "2001-01-01"}))
    reproduce("swt-impact-fmnist-rounds", *TINY, "--out", str(tmp_path), "--seeds", "1")
    taken = tmp_path / "quick" / "swt-impact-fmnist-rounds" / "curves" / "swt-0" / "versions.json"
    found = json.loads(taken.read_text())
    assert found == made | {"device": "another", "date": "2001-01-01"}


def test_which_code_has_computed_what_is_known_of_every_seed(tmp_path: Path) -> None:
    reproduce("k-impact-fmnist", *TINY, "--out", str(tmp_path), "--seeds", "1")
    place = tmp_path / "quick" / "k-impact-fmnist" / "curves" / "k-5" / "versions.json"
    made = json.loads(place.read_text())
    mine = made.pop("code")
    place.write_text(json.dumps(made))  # as of a version that did not write it down
    other = "swt-impact-fmnist-rounds"
    reproduce(other, *TINY, "--out", str(tmp_path), "--seeds", "1")
    taken = tmp_path / "quick" / other / "curves" / "swt-0" / "versions.json"
    assert json.loads(taken.read_text())["code"] == "unknown"
    reproduce(other, *TINY, "--out", str(tmp_path), "--seeds", "2")
    assert json.loads(taken.read_text())["code"] == f"{mine}, unknown"
    assert (
        json.loads((tmp_path / "quick" / other / "verdict.json").read_text())["made with"]["code"] == f"{mine}, unknown"
    )


def test_of_two_sittings_all_is_known_and_the_later_date() -> None:
    old = {"torch": "1", "device": "a GPU", "code": "a, unknown", "date": "2001-01-01"}
    new = {"torch": "2", "device": "cpu", "code": "b", "date": "2026-11-16"}
    both = {"torch": "2", "device": "a GPU, cpu", "code": "a, b, unknown", "date": "2026-11-16"}
    assert joined(old, new) == joined(new, old) == joined(both, old) == both
    assert joined({"date": "2001-01-01"}, new)["code"] == "b, unknown"


def test_whether_a_figure_is_still_what_was_run_can_be_seen() -> None:
    curves, others = load_figure("time").curves, load_figure("time", ["codec.bits=6"]).curves
    elsewhere = load_figure("time", ["run.device=cpu", "run.precision=bfloat16", "run.seeds=[7]"]).curves
    assert fingerprint(curves) == fingerprint(elsewhere) != fingerprint(others)


@pytest.mark.parametrize("seeds", ["1", "2"])
def test_too_few_seeds_are_said_of_every_kind_of_claim(tmp_path: Path, seeds: str) -> None:
    shown = reproduce("error_bar", *TINY, "--out", str(tmp_path), "--seeds", seeds)
    assert shown.count("too few seeds") == 3


def test_what_the_paper_does_not_claim_is_judged_and_no_part_of_the_verdict(tmp_path: Path) -> None:
    shown = reproduce("accuracy-vs-time-fmnist", *TINY, "--out", str(tmp_path), "--seeds", "3", "--set", "run.target=0")
    assert "and needs fewer megabytes than FedAvg (not the paper's claim)" in shown
    verdict = json.loads((tmp_path / "quick" / "accuracy-vs-time-fmnist" / "verdict.json").read_text())
    assert [len(question["findings"]) for question in verdict["questions"]] == [1, 1]
    assert verdict["verdict"] == overall([claim["verdict"] for claim in verdict["claims"]])


def test_seeds_of_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    reproduce("swt-impact-fmnist-rounds", *TINY, "--out", str(tmp_path), "--seeds", "1")
    args = ["reproduce", "swt-impact-fmnist-rounds", *TINY, "--out", str(tmp_path), "--set", "algorithm.lr=0.1"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert "was made with another algorithm.lr; put it back, or choose another --out" in " ".join(result.output.split())


def test_a_figure_that_shows_the_same_runs_does_not_run_them_again(tmp_path: Path) -> None:
    tiny = [*TINY, "--out", str(tmp_path), "--seeds", "1"]
    reproduce("qsgd_loss", *tiny)
    rows = tmp_path / "quick" / "qsgd_loss" / "curves" / "lattice" / "rows.csv"
    made = rows.stat().st_mtime_ns
    reproduce("qsgd_accuracy", *tiny)
    assert rows.stat().st_mtime_ns == made
    assert (tmp_path / "quick" / "qsgd_accuracy" / "verdict.json").exists()


def test_tuning_keeps_the_whole_grid_and_marks_the_best(tmp_path: Path) -> None:
    args = [
        "tune",
        "non-iid",
        "--quick",
        "-j",
        "1",
        "--set",
        "run.until=8",
        "--set",
        "run.every=4",
        "--out",
        str(tmp_path),
    ]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    with (tmp_path / "quick" / "non-iid" / "grid.csv").open() as stream:
        lines = list(csv.DictReader(stream))
    names = {line["curve"].split(" lr ")[0] for line in lines}
    assert names == {"QuAFL", "FedBuff", "FedAvg"}
    for name in names:
        mine = [line for line in lines if line["curve"].startswith(f"{name} lr")]
        assert len(mine) == 4
        assert len({line["point"] for line in mine}) == 4
        alike = len({(line["time_to_target"], line["final"]) for line in mine}) == 1
        assert sum(line["chosen"] == "yes" for line in mine) == (0 if alike else 1)
    settings = (tmp_path / "quick" / "non-iid" / "curves" / "fedavg-lr-0.03" / "settings.toml").read_text()
    assert 'judge = "validation"' in settings


def test_a_map_shows_who_is_first_where(tmp_path: Path) -> None:
    wanted = load_figure("map")
    assert len(wanted.cells) == 27
    for cell in wanted.cells:
        for one in cell.curves:
            assert one.clients.slow == cell.place["clients.slow"]
            assert one.clients.latency_at_32_bits == cell.place["clients.latency_at_32_bits"]
            assert one.task.partition == cell.place["task.partition"]  # type: ignore[union-attr]  # MNIST has one
    shown = reproduce("map", *TINY, "--out", str(tmp_path), "--seeds", "1", "--set", "run.target=0.11")
    place = tmp_path / "quick" / "map"
    assert shown.count("clients.slow 0.5, task.partition iid, clients.latency_at_32_bits 10.0") == 2
    found = json.loads((place / "verdict.json").read_text())["first"]
    assert [(cell["clients.slow"], cell["task.partition"]) for cell in found] == [
        (0.0, "iid"), (0.0, "by class"), (0.5, "iid"), (0.5, "by class")
    ]  # fmt: skip
    assert {cell["label"] for cell in found} != {NOBODY}
    with (place / "map.csv").open() as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == 4 * 5
    assert {line["seeds_at_target"] for line in lines} == {"0 of 1", "1 of 1"}
    assert all(line["seed_0"] == line["time_to_target"].partition(" ±")[0] for line in lines)
    assert (place / "figure.png").stat().st_size > 5000


def test_a_level_that_is_not_reached_does_not_hold(tmp_path: Path) -> None:
    shown = reproduce("mnist", *TINY, "--out", str(tmp_path), "--seeds", "3")
    assert "does not hold: it converges, to about 95 % or more" in shown
    verdict = json.loads((tmp_path / "quick" / "mnist" / "verdict.json").read_text())
    assert verdict["verdict"] == "does not hold"
    assert verdict["tuned"] is False
    (finding,) = verdict["claims"][0]["findings"]
    assert finding["high"] < 0.93


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            "curves.fedavg.algorithm.lr=0.2",
            "curves.fedavg: there is no such curve; did you mean 'FedAvg'? there are QuAFL, QuAFL, 4 bits",
        ),
        ("curves=3", "curves = 3: must be tables"),
        ("curves.QuAFL=3", "must be tables"),
    ],
)
def test_curves_that_are_not_there_are_refused(change: str, sentence: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reproduce", "mnist", *TINY, "--out", str(tmp_path), "--set", change])
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())


def test_fewer_seeds_are_enough_after_an_interruption(tmp_path: Path) -> None:
    many, one = (load_figure("qsgd_loss", [f"run.seeds={seeds}"], quick=True).curves for seeds in ([0, 1, 2, 3], [0]))
    accumulate(many, tmp_path)
    assert {tuple(folder.settings.run.seeds) for folder in accumulate(one, tmp_path)} == {(0,)}


def test_rows_of_other_versions_are_not_mixed_in(tmp_path: Path) -> None:
    args = ["mnist", *TINY, "--out", str(tmp_path), "--seeds", "1"]
    reproduce(*args)
    path = tmp_path / "quick" / "mnist" / "curves" / "quafl" / "versions.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"torch": "1.0.0"}))
    result = CliRunner().invoke(app, ["reproduce", *args])
    assert result.exit_code == 2
    assert "was made with torch 1.0.0; use that again" in " ".join(result.output.split())
    rows = path.with_name("rows.csv")
    rows.write_text(rows.read_text().replace(",", ",x", 30))
    result = CliRunner().invoke(app, ["reproduce", *args])
    assert result.exit_code == 2
    assert "rows.csv is damaged" in " ".join(result.output.split())


def test_first_is_who_reaches_the_target_soonest_with_every_seed() -> None:
    fast, slow, never = (
        curve("fast", rising(0.2, 0.1)),
        curve("slow", rising(0.05, 0.1)),
        curve("never", lambda time, seed: 0.5),
    )
    found = first([slow, never, fast])
    assert (found.label, found.next, found.clear) == ("fast", "slow", True)
    assert found.factor == pytest.approx(4, rel=0.2)  # evaluations are two time units apart
    assert not first([curve("fast", rising(0.2, 0.1)), curve("noisy", rising(0.2, 0.6))]).clear
    variant = curve("fast and weighted", rising(0.19, 0.1))
    assert first([fast, variant, slow]).next == "slow", "a variant is no rival"
    alone = first([never, slow])
    assert (alone.label, alone.factor, alone.clear) == ("slow", None, True)
    assert first([never]).label == NOBODY
    picture = draw({"a": [1, 2], "b": [1], "c": [1]}, [found, first([never])])
    assert [text.get_text() for text in picture.axes[0].texts] == [f"fast\n×{found.factor:.2g}", NOBODY]


def test_the_fewest_bits_are_those_down_to_which_nothing_is_lost() -> None:
    def ending(bits: int, end: float) -> Curve:
        made = curve(f"b = {bits}", lambda time, seed: end + 0.01 * (seed - 2))
        made.settings["codec"] = {"bits": bits}
        return made

    full = ending(32, 0.9)  # its standard deviation is 0.016
    assert fewest_bits([full, ending(8, 0.905), ending(4, 0.89), ending(3, 0.85)]) == 4
    assert fewest_bits([full, ending(8, 0.85), ending(4, 0.9)]) == 32, "a lucky one below does not count"
    assert fewest_bits([full, ending(8, 0.95), ending(4, 0.9)]) == 4, "nor is being better held against one"
