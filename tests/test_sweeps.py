"""Sweeps: all combinations of some values, one table, one page; given again, they go on."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quafl.cli import app
from quafl.run.search import Range, range_of
from quafl.run.sweeps import grid, sweep, values_of
from quafl.settings.base import SettingsError
from quafl.settings.reading import load

BOWL = """
[task]
name = "quadratic"
dim = 8
[clients]
count = 4
[algorithm]
sampled = 2
[run]
until = 40.0
every = 20.0
seeds = [0]
metric = "loss"
target = 0.6
"""
DIGITS = """
[clients]
count = 4
[algorithm]
sampled = 2
[run]
until = 60.0
every = 10.0
target = 0.3
"""


@pytest.fixture
def bowl(tmp_path: Path) -> Path:
    (tmp_path / "bowl.toml").write_text(BOWL)
    return tmp_path / "bowl.toml"


def swept(bowl: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["sweep", str(bowl), "--out", str(bowl.parent / "out"), "-j", "1", *arguments])


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("2,3,4", [2, 3, 4]),
        ("0.1, 1e-3", [0.1, 0.001]),
        ("fedavg,fedbuff", ["fedavg", "fedbuff"]),
        ("true,false", [True, False]),
        ("iid, 3", ["iid", 3]),
        ("[1,2],[3]", [[1, 2], [3]]),
        ('"slow classes",iid', ["slow classes", "iid"]),
        ("lattice", ["lattice"]),
    ],
)
def test_values_are_written_as_in_a_settings_file_and_words_need_no_quotes(text: str, values: list[Any]) -> None:
    assert values_of(text) == values


def test_a_sweep_is_every_curve_with_every_combination(bowl: Path) -> None:
    points = grid(["codec.bits=2,4", "algorithm.lr=0.1,0.2,0.5"])
    assert len(points) == 6
    assert points[-1] == {"codec.bits": 4, "algorithm.lr": 0.5}
    bowl.write_text(BOWL + "[curves.QuAFL]\n[curves.FedAvg]\nalgorithm = { name = 'fedavg' }\n")
    made = sweep(str(bowl), ["run.until=30"], points)
    assert len({one.settings.label for one in made}) == 12
    last = made[-1]
    assert (last.origin, last.settings.label) == ("FedAvg", "FedAvg, bits 4, lr 0.5")
    assert (last.settings.codec.bits, last.settings.algorithm.lr, last.settings.run.until) == (4, 0.5, 30)


def test_settings_whose_last_words_are_the_same_are_told_apart(bowl: Path) -> None:
    made = sweep(str(bowl), ["codec.name=each way"], grid(["codec.up.bits=3", "codec.down.bits=5,6"]))
    assert [one.settings.label for one in made] == [f"codec.up.bits 3, codec.down.bits {bits}" for bits in (5, 6)]


def test_a_sweep_ends_with_a_table_and_a_page_and_goes_on_when_given_again(bowl: Path) -> None:
    first = swept(bowl, "--over", "algorithm.lr=0.05,0.5")
    assert first.exit_code == 0, first.stderr
    out = bowl.parent / "out"
    known = (out / "lr-0.5" / "rows.csv").stat().st_mtime_ns
    more = swept(bowl, "--over", "algorithm.lr=0.05,0.5,0.2", "--json")
    assert more.exit_code == 0, more.stderr
    lines = json.loads(more.stdout)
    assert [line["algorithm.lr"] for line in lines] == [0.05, 0.5, 0.2]
    assert lines[1]["time_to_target"] == 20
    assert lines[0]["time_to_target"] is None
    assert lines[1]["final"] < lines[0]["final"]
    assert all(line["megabytes"] > 0 for line in lines)
    assert (out / "lr-0.5" / "rows.csv").stat().st_mtime_ns == known, "what is finished is not run again"
    assert "lr 0.2" in (out / "report.html").read_text()
    with (out / "sweep.csv").open() as stream:
        assert [row["algorithm.lr"] for row in csv.DictReader(stream)] == ["0.05", "0.5", "0.2"]
    other = swept(bowl, "--over", "algorithm.lr=0.5", "--set", "clients.count=5")
    assert other.exit_code == 2
    assert "was made with another clients.count" in " ".join(other.stderr.split())


def tuned(folder: Path, *arguments: str) -> Any:
    (folder / "digits.toml").write_text(DIGITS)
    settings, out = str(folder / "digits.toml"), str(folder / "tuned")
    return CliRunner().invoke(app, ["tune", settings, "--out", out, "-j", "1", *arguments])


def test_values_of_one_s_own_settings_are_tried_on_the_validation_split(tmp_path: Path) -> None:
    done = tuned(tmp_path, "--over", "algorithm.lr=0.001,0.5", "--json")
    assert done.exit_code == 0, done.stderr
    lines = json.loads(done.stdout)
    assert [(line["algorithm.lr"], line["chosen"]) for line in lines] == [(0.001, False), (0.5, True)]
    assert "Chosen on the validation split" in done.stderr
    (kept,) = load(str(tmp_path / "tuned" / "digits" / "curves" / "lr-0.5" / "settings.toml"))
    assert (kept.task.judge, kept.run.seeds) == ("validation", [100])


def test_a_task_without_a_validation_split_cannot_be_tuned(bowl: Path) -> None:
    done = CliRunner().invoke(app, ["tune", str(bowl), "--over", "algorithm.lr=0.1,0.2"])
    assert done.exit_code == 2
    assert "cannot be tuned: quadratic has no part of the training set to judge by" in " ".join(done.stderr.split())
    nothing = CliRunner().invoke(app, ["tune", str(bowl)])
    assert f"say what to try: quafl tune {bowl} --over" in nothing.stderr


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("0.01..1", Range(0.01, 1, whole=False)),
        ("1e-4..1e-1", Range(1e-4, 0.1, whole=False)),
        ("2..8", Range(2, 8, whole=True)),
        ("-1.5..2", Range(-1.5, 2, whole=False)),
        ("0.1,0.2", None),
        ("iid", None),
    ],
)
def test_a_range_is_two_numbers_with_two_dots(values: str, expected: Range | None) -> None:
    assert range_of("algorithm.lr", values) == expected


def test_a_range_without_optuna_and_one_that_goes_down_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)  # as if it were not installed
    for values, sentence in ("0.01..1", "a range is searched by Optuna, which is not installed"), ("1..0.1", "must go"):
        done = tuned(tmp_path, "--over", f"algorithm.lr={values}")
        assert done.exit_code == 2
        assert sentence in " ".join(done.stderr.split())


def test_a_range_is_searched_runs_that_fall_behind_are_given_up_and_it_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs Optuna")
    first = tuned(tmp_path, "--over", "algorithm.lr=0.001..1", "--trials", "6")
    assert first.exit_code == 0, first.stderr
    tried = [line for line in first.stdout.splitlines() if "in the mean" in line]
    assert len(tried) == 6
    assert any(line.endswith("given up") for line in tried)
    more = tuned(tmp_path, "--over", "algorithm.lr=0.001..1", "--trials", "7", "--json")
    assert more.exit_code == 0, more.stderr
    assert more.stderr.count("in the mean") == 1, "six are known"
    lines = json.loads(more.stdout)
    assert sum(line["chosen"] for line in lines) == 1
    assert len(lines) == 7 - sum("given up" in line for line in [*tried, more.stderr])


@pytest.mark.parametrize(
    ("over", "sentence"),
    [
        (["lr=1,2"], "--over lr=1,2: must look like section.key=value,value, for example codec.bits=2,3,4"),
        (["codec.bits"], "--over codec.bits: must look like section.key=value,value"),
        (["codec.bits=,"], "--over codec.bits=,: must look like"),
        (["curves.A.codec.bits=3"], "--over curves.A.codec.bits=3: must look like"),
        (["codec.bits=2", "codec.bits=3"], "--over names a setting twice (codec.bits=2, codec.bits=3)"),
    ],
)
def test_what_cannot_be_swept_is_said(over: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError) as error:
        grid(over)
    assert str(error.value).startswith(sentence)
