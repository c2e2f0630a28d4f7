"""The paper's figures as commands."""

import csv
import json
from pathlib import Path

import pytest
from made_up import curve, rising
from typer.testing import CliRunner

from quafl.cli import app
from quafl.record.maps import NOBODY, draw, first
from quafl.record.summary import Curve
from quafl.run.figures import fewest_bits
from quafl.settings import SettingsError, figures, load_figure
from quafl.settings.figures import Tuning

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
    with pytest.raises(ValueError, match="tries 2 learning rates, and 1·3 pairs for FedBuff"):
        Tuning(lr=[0.1, 0.2], fedbuff_lr=[0.1], server_lr=[0.1, 0.2, 0.3])
    for name in figures():
        assert (
            load_figure(name).curves[0].algorithm.lr in load_figure(name).tuning.lr
            or name == "qsgd_loss"
            or (load_figure(name).figure.of == "qsgd_loss")
        ), "the paper's rate is among them"


def reproduce(*args: str) -> str:
    result = CliRunner().invoke(app, ["reproduce", *args])
    assert result.exit_code == 0, result.output
    return result.output


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
    assert verdict["curves"]["swt = 5"]["seeds"] == [0, 1, 2]
    assert verdict["command"].startswith(
        "quafl reproduce swt-impact-fmnist-rounds --seeds 3 --quick --set run.until=12"
    )
    assert [len(finding["values"]) for claim in verdict["claims"] for finding in claim["findings"]] == [3, 3, 3]
    assert (place / "figure.png").stat().st_size > 5000
    assert (place / "report.html").exists()


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
        assert len(mine) == 9
        assert len({(line["lr"], line["server_lr"]) for line in mine}) == 9
        assert sum(line["chosen"] == "yes" for line in mine) == 1
    settings = (tmp_path / "quick" / "non-iid" / "curves" / "fedavg-lr-0.03" / "settings.toml").read_text()
    assert 'judge = "validation"' in settings


def test_a_map_shows_who_is_first_where(tmp_path: Path) -> None:
    cells = ["--set", "figure=1"]
    assert CliRunner().invoke(app, ["reproduce", "map", *TINY, *cells]).exit_code == 2
    wanted = load_figure("map")
    assert len(wanted.cells) == 18
    for cell in wanted.cells:
        for one in cell.curves:
            assert one.clients.slow == cell.place["clients.slow"]
            assert one.clients.latency_at_32_bits == cell.place["clients.latency_at_32_bits"]
            assert one.task.partition == cell.place["task.partition"]  # type: ignore[union-attr]  # MNIST has one


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
