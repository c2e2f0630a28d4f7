"""Rows reach the trackers that `run.track` names: the real packages, where they are installed."""

import logging
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import quafl
from quafl.cli import app
from quafl.record.rows import Row, read_rows
from quafl.record.summary import RunError
from quafl.run import tracking
from quafl.run.tracking import Send, Tracked, Tracking

SETTINGS = {"label": "QuAFL", "algorithm": {"name": "quafl", "lr": 0.5}}
SMALL = ["run.until=30.0", "run.every=10.0", "run.seeds=[3]", "clients.count=4", "algorithm.sampled=2"]


def row(round: int, accuracy: float) -> Row:
    return {"seed": 3, "round": round, "time": 10.0 * round, "accuracy": accuracy, "loss": float("nan")}


def send_two(folder: Path, tracker: tracking.Tracker) -> None:
    run = Tracked(folder, "QuAFL", 3, SETTINGS)
    with closing(Tracking()) as sending:
        sending.send(run, [tracker], row(0, 0.1))
        sending.send(run, [tracker], row(7, 0.6))


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    changes = [part for change in [*SMALL, "run.track=['mlflow']"] for part in ("--set", change)]
    done = CliRunner().invoke(app, ["run", "demo", "--only", "QuAFL", "--out", str(tmp_path / "out"), *changes])
    assert done.exit_code == 2
    assert "run.track has 'mlflow', which is not installed: pip install 'quafl[mlflow]'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_tracker_that_fails_is_left_alone_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken = []

    @contextmanager
    def fragile(run: Tracked) -> Iterator[Send]:
        def send(step: int, values: dict[str, float]) -> None:
            taken.append((step, values))
            raise OSError("no route to host")

        yield send
        raise OSError("still none")

    monkeypatch.setitem(tracking.TRACKERS, "wandb", fragile)
    with caplog.at_level(logging.WARNING):
        send_two(tmp_path, "wandb")
    assert taken == [(0, {"time": 0.0, "accuracy": 0.1})]
    assert [record.getMessage() for record in caplog.records] == [
        "QuAFL, seed 3: wandb gets no more rows (OSError: no route to host)",
        "run.track: not all was told that the run is over (OSError: still none)",
    ]


@pytest.mark.filterwarnings("ignore")  # of the package and what it needs
def test_tensorboard_gets_every_row_of_a_run(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", exc_type=ImportError)
    changes = [part for change in [*SMALL, "run.track=['tensorboard']"] for part in ("--set", change)]
    done = CliRunner().invoke(app, ["run", "demo", "--only", "QuAFL", "--out", str(tmp_path / "out"), *changes])
    assert done.exit_code == 0, done.output
    events = reader.EventAccumulator(str(tmp_path / "out" / "tensorboard" / "seed3"))
    events.Reload()
    rows = read_rows(tmp_path / "out" / "rows.csv")
    found = [(event.step, event.value) for event in events.Scalars("accuracy")]
    assert found == [(row["round"], pytest.approx(row["accuracy"])) for row in rows]


def test_a_program_s_rows_are_tracked_once_and_need_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []

    @contextmanager
    def noting(run: Tracked) -> Iterator[Send]:
        yield lambda step, values: rounds.append(step)

    monkeypatch.setitem(tracking.TRACKERS, "wandb", noting)
    monkeypatch.setattr(tracking, "find_spec", lambda name: name == "wandb" or None)
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {
        "model": torch.nn.Linear(3, 2),
        "clients": [(x[i::4], (x[i::4, 0] > 0).long()) for i in range(4)],
    }
    given |= {"algorithm": quafl.QuAFL(sampled=2), "until": 50, "evaluations": 5, "progress": False, "track": ["wandb"]}
    with pytest.raises(ValueError, match=r"track is \['wandb'\], which needs a folder; give out"):
        quafl.simulate(**given)
    first = quafl.simulate(**given, out=tmp_path, callback=lambda row: row["time"] > 20)
    assert first.interrupted
    rows = quafl.simulate(**given, out=tmp_path).rows
    assert rounds == [row["round"] for row in rows]
    with pytest.raises(RunError, match="mlflow"):
        quafl.simulate(**{**given, "track": ["mlflow"]}, out=tmp_path)


@pytest.mark.filterwarnings("ignore")  # of the package and what it needs
def test_mlflow_gets_rows_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    send_two(tmp_path, "mlflow")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("quafl").experiment_id])
    assert (run.info.run_name, run.info.status) == ("QuAFL, seed 3", "FINISHED")
    assert run.data.params["algorithm.lr"] == "0.5"
    found = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "accuracy")]
    assert found == [(0, 0.1), (7, 0.6)]
    assert "loss" not in run.data.metrics, "which was not finite"


@pytest.mark.filterwarnings("ignore")  # of the package and what it needs
def test_wandb_keeps_rows_for_later_where_it_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    send_two(tmp_path, "wandb")
    (kept,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"accuracy" in kept.read_bytes()
