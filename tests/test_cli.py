"""The commands, as a user types them: real processes, real files."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.metadata import metadata, version
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import safetensors.torch
import torch
import typer
from federations import full_disk
from rich.console import Console
from typer.testing import CliRunner
from waiting import wait_for

import quafl
from quafl.cli import COMMANDS, app, loaded
from quafl.cli.results import Bars, progress
from quafl.cli.terminal import one_sentence
from quafl.record import checkpoints
from quafl.record.files import write_atomically
from quafl.record.rows import Growing, Row, by_seed, read_rows, write_rows
from quafl.record.summary import RecordError, final, read_curves
from quafl.run.folders import prepare, reopen
from quafl.run.jobs import FORMAT, Job, compute
from quafl.run.pool import places
from quafl.settings.base import SettingsError
from quafl.settings.reading import builtin, load, load_federation

SMALL = ["run.until=60", "run.seeds=[3,4]", "clients.count=8", "algorithm.sampled=2"]


def call(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quafl.cli", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def two_curves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two curves, by the command line, in two processes."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "two.toml").write_text(
        """
        [run]
        target = 0.5
        potential = true
        [curves."QuAFL"]
        algorithm = { lr = 0.5 }
        [curves."FedAvg"]
        algorithm = { name = "fedavg", lr = 0.5 }
        codec = { bits = 32 }
        """
    )
    changes = [word for setting in SMALL for word in ("--set", setting)]
    done = call("run", "two.toml", "--out", "out", *changes, "-j", "2", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "First at accuracy 0.5 per simulated time" in " ".join(done.stdout.split())
    return folder / "out"


def test_a_run_folder_holds_settings_rows_versions_and_models(two_curves: Path) -> None:
    for name in "quafl", "fedavg":
        folder = two_curves / name
        assert {path.name for path in folder.iterdir()} == {
            "in-use",
            "settings.toml",
            "rows.csv",
            "seconds.json",
            "versions.json",
            "model-seed3-best.safetensors",
            "model-seed3-last.safetensors",
            "model-seed4-best.safetensors",
            "model-seed4-last.safetensors",
        }
        made = json.loads((folder / "versions.json").read_text())
        assert made["quafl"] == quafl.__version__
        assert len(bytes.fromhex(made["code"])) == 6
        assert json.loads((folder / "seconds.json").read_text()).keys() == {"3", "4"}
        assert load(str(folder / "settings.toml"))[0].run.until == 60
        rows = read_rows(folder / "rows.csv")
        assert {"seed", "round", "time", "local_steps", "bytes_up", "bytes_down", "loss", "accuracy"} <= set(rows[0])
        assert {"refined", "zero_step_contacts", "potential"} <= set(rows[0])
        assert {row["seed"] for row in rows} == {3, 4}


def test_the_model_on_disk_is_the_one_of_the_last_row(two_curves: Path) -> None:
    settings = load(str(two_curves / "quafl" / "settings.toml"))[0]
    state = safetensors.torch.load_file(two_curves / "quafl" / "model-seed3-last.safetensors")
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    module.load_state_dict(state)
    last = [row for row in read_rows(two_curves / "quafl" / "rows.csv") if row["seed"] == 3][-1]
    images, labels = quafl.tasks.digits().test
    assert (module(images).argmax(dim=-1) == labels).float().mean().item() == pytest.approx(last["accuracy"])
    assert settings.task.judge == "test"


def test_the_same_settings_give_the_same_bytes_in_one_process_or_two(two_curves: Path, tmp_path: Path) -> None:
    again = call("run", str(two_curves / "quafl" / "settings.toml"), "--out", "again", "-j", "1", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    for name in "rows.csv", "settings.toml", "model-seed3-best.safetensors", "model-seed4-last.safetensors":
        assert (tmp_path / "again" / name).read_bytes() == (two_curves / "quafl" / name).read_bytes()


def test_report_joins_folders_at_any_depth(two_curves: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(two_curves), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<figure>") == 5, "four panels, and the potential, which these curves have recorded"
    assert "FedAvg" in page
    assert not re.search(r"<link|<img|src=|@import|url\(.?http|fetch\(|import\(", page)  # nothing is fetched


def test_a_report_s_numbers_are_for_programs_too(two_curves: Path, tmp_path: Path) -> None:
    before = (two_curves / "report.html").stat().st_mtime_ns
    done = CliRunner().invoke(app, ["report", str(two_curves), "--json", "--target", "2.0"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["metric"], told["target"]) == ("accuracy", 2.0)
    assert told["verdict"] == "No algorithm reached accuracy 2 with every seed."
    known = {curve.label: curve for curve in read_curves([two_curves])}
    assert {curve["label"] for curve in told["curves"]} == set(known)
    for curve in told["curves"]:
        assert curve["final"]["values"] == list(final(known[curve["label"]], "accuracy").values)
        assert curve["time_to_target"] == {"mean": None, "deviation": None, "values": []}
    assert (two_curves / "report.html").stat().st_mtime_ns == before, "no page is written unasked"


def test_an_earlier_run_is_not_overwritten_unasked(two_curves: Path) -> None:
    before = (two_curves / "quafl" / "rows.csv").read_bytes()
    arguments = ["run", str(two_curves.parent / "two.toml"), "--out", str(two_curves)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "already holds a run; choose another --out, add --overwrite" in " ".join(done.output.split())
    assert (two_curves / "quafl" / "rows.csv").read_bytes() == before


def test_overwriting_leaves_nothing_of_the_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "three.toml").write_text('run = { seeds = [0] }\n[curves."A"]\n[curves."B"]\n[curves."C"]\n')
    a, b, c = load(str(tmp_path / "three.toml"))
    out = tmp_path / "out"

    def runs() -> list[str]:
        return sorted(path.parent.relative_to(out).as_posix() for path in out.rglob("settings.toml"))

    prepare([a, b], out, overwrite=False)
    (out / "report.html").write_text("of A and B")
    (out / "report.png").write_bytes(b"of A and B")
    (out / "b" / "checkpoint-seed0.pt").write_bytes(b"of B")
    (out / "a" / "notes.txt").write_text("mine")
    prepare([a, c], out, overwrite=True)
    assert runs() == ["a", "c"]
    assert not list(out.glob("report*"))
    assert not (out / "b").exists()
    prepare([c], out, overwrite=True)
    assert runs() == ["."]
    assert (out / "a" / "notes.txt").exists()  # which is nobody else's to delete


def test_overwriting_does_not_replace_runs_of_their_own_in_folders_below(tmp_path: Path) -> None:
    (one,) = load("demo", ["run.seeds=[0]"])[:1]
    for place in "other", "paper/figure":
        prepare([one], tmp_path / "runs" / place, overwrite=False)
    for earlier in False, True:  # a run in the folder itself changes nothing
        with pytest.raises(RecordError, match=r"runs holds runs of their own, such as .*other, which --overwrite does"):
            prepare([one], tmp_path / "runs", overwrite=True)
        shutil.copy(tmp_path / "runs" / "other" / "settings.toml", tmp_path / "runs")
    assert len(list(tmp_path.rglob("settings.toml"))) == 3


def test_a_run_in_folders_further_below_is_not_taken_for_the_one_to_continue(tmp_path: Path) -> None:
    prepare(load("demo")[:2], tmp_path / "runs" / "demo", overwrite=False)
    with pytest.raises(RecordError, match=r"holds no run to continue; there is one in .*runs/demo$"):
        reopen(tmp_path)
    assert len(reopen(tmp_path / "runs" / "demo")) == 2


def test_a_folder_is_one_process_s_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text("run = { until = 1e7, every = 5.0, seeds = [0] }")
    command = [sys.executable, "-m", "quafl.cli", "run", "long.toml", "--out", "out", "--checkpoint-every", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for_file(tmp_path, "checkpoint-seed0.pt")
            again = ["run", str(tmp_path / "long.toml"), "--out", str(tmp_path / "out"), "--overwrite"]
            for arguments in (again, ["run", "--resume", str(tmp_path / "out")]):
                done = CliRunner().invoke(app, arguments)
                assert done.exit_code == 2
                assert "out is in use by another process; wait until that has ended, or choose another --out" in (
                    " ".join(done.output.split())
                )
            assert (tmp_path / "out" / "checkpoint-seed0.pt").exists()  # it is left as it was
            assert process.stdout is not None
            assert re.fullmatch(  # what a log, which is no terminal, shows while the run goes on
                r"run, seed 0: 0%, round 0, time 0, accuracy 0\.\d{3}\n", process.stdout.readline()
            )
            early, *_ = rows = read_rows(tmp_path / "out" / "rows-seed0.csv")
            assert early["time"] == 0.0
            wait_for(lambda: len(read_rows(tmp_path / "out" / "rows-seed0.csv")) > len(rows) + 2, 180.0)
            assert not (tmp_path / "out" / "rows.csv").exists()  # of the finished seeds
        finally:
            process.kill()


def test_a_run_that_diverges_ends_with_a_sentence_and_the_rows_so_far(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(
        """
        run = { until = 40.0, every = 2.0, seeds = [0] }
        [curves."Good"]
        [curves."Bad [/x]"]
        algorithm = { lr = 1e30 }
        """
    )
    done = call("run", "two.toml", "--out", "out", "-j", "2", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (sentence,) = own(done.stderr)
    assert sentence.startswith("quafl: Bad [/x], seed 0: training diverged: ")
    assert sentence.endswith("; its rows so far are kept, try a smaller lr")
    assert re.search(r"Bad \[/x\], seed 0: client \d+, round \d+: its progress is not finite", done.stdout)
    again = call("run", "--resume", "out", cwd=tmp_path)  # what went wrong is not forgotten
    assert (again.returncode, own(again.stderr)) == (2, [sentence])
    good, bad = (read_rows(tmp_path / "out" / name / "rows.csv") for name in ("good", "bad-x"))
    assert good[-1]["time"] > 30 > bad[-1]["time"]
    assert (tmp_path / "out" / "report.html").exists()
    assert not list((tmp_path / "out").rglob("checkpoint*"))


LONG = """
    run = { until = 50.0, every = 10.0, seeds = [0, 1] }
    [curves."QuAFL"]
    algorithm = { weighted = true, optimizer = "adam", lr = 0.01 }
    clients = { present_for = 60.0, away_for = 20.0 }
    [curves."FedBuff"]
    algorithm = { name = "fedbuff", staleness = true }
    codec = { name = "qsgd" }
    """


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    (folder / "long.toml").write_text(LONG)
    done = call("run", "long.toml", "--out", "out", "-j", "2", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "out"


@pytest.mark.parametrize(("kill", "processes"), [(signal.SIGINT, "1"), (signal.SIGKILL, "2")], ids=str)
def test_a_run_that_was_stopped_continues_bit_for_bit(
    kill: signal.Signals, processes: str, uninterrupted: Path, tmp_path: Path
) -> None:
    (tmp_path / "long.toml").write_text(LONG)
    command = [sys.executable, "-m", "quafl.cli", "run", "long.toml", "--out", "out", "-j", processes]
    with subprocess.Popen(
        [*command, "--checkpoint-every", "0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        wait_for_file(tmp_path / "out", "checkpoint-seed0.pt")
        if kill == signal.SIGKILL:
            process.kill()  # the parent alone: its workers end with it
        else:
            os.killpg(process.pid, kill)  # as a terminal or systemd does: to the workers, too
        _, error = process.communicate(timeout=60)  # nobody holds its pipes any more
    if kill != signal.SIGKILL:
        assert process.returncode == 128 + kill
        assert own(error) == ["quafl: interrupted; continue with: quafl run --resume out"]
    assert not all((tmp_path / "out" / name / "rows.csv").exists() for name in ("quafl", "fedbuff"))
    again = call("run", "--resume", "out", "-j", "2", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    for name in "quafl/rows.csv", "fedbuff/rows.csv", "quafl/model-seed1-best.safetensors":
        assert (tmp_path / "out" / name).read_bytes() == (uninterrupted / name).read_bytes()
    assert not [path for kind in ("checkpoint*", "rows-seed*") for path in (tmp_path / "out").rglob(kind)]
    assert not [path for path in (tmp_path / "out").rglob("*.part") if kill != signal.SIGKILL]


def test_a_finished_run_has_nothing_left_to_resume(uninterrupted: Path) -> None:
    before = (uninterrupted / "quafl" / "rows.csv").read_bytes()
    done = CliRunner().invoke(app, ["run", "--resume", str(uninterrupted)])
    assert done.exit_code == 0, done.output
    assert (uninterrupted / "quafl" / "rows.csv").read_bytes() == before


def test_runs_over_a_cluster_are_stopped_and_continued_bit_for_bit(uninterrupted: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray")
    (tmp_path / "long.toml").write_text(LONG)
    command = [sys.executable, "-m", "quafl.cli", "run", "long.toml", "--out", "out", "--ray", "local"]
    with subprocess.Popen(
        [*command, "--checkpoint-every", "0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for_file(tmp_path / "out", "checkpoint-seed0.pt")
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert own(error) == ["quafl: interrupted; continue with: quafl run --resume out"]
    again = call("run", "--resume", "out", "-j", "2", cwd=tmp_path)  # here: where it runs makes no difference
    assert again.returncode == 0, again.stderr
    for name in "quafl", "fedbuff":
        assert (tmp_path / "out" / name / "rows.csv").read_text() == (uninterrupted / name / "rows.csv").read_text()


def test_a_cluster_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray")
    done = call("run", "demo", "--out", "out", "--ray", "127.0.0.1:1", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no Ray cluster at '127.0.0.1:1'" in own(done.stderr)[-1]
    both = call("run", "demo", "--out", "out2", "--ray", "local", "-j", "2", cwd=tmp_path)
    assert "exclude each other" in own(both.stderr)[-1]


def test_every_process_sees_a_gpu_of_its_own() -> None:
    assert places(3, gpus=0, visible=None) == [None, None, None]
    assert places(3, gpus=2, visible=None) == ["0", "1", "0"]
    assert places(2, gpus=2, visible="3,5") == ["3", "5"]


def test_the_seconds_of_all_sittings_count(uninterrupted: Path, tmp_path: Path) -> None:
    (settings,) = load(str(uninterrupted / "fedbuff" / "settings.toml"))
    job = Job(settings, 0, tmp_path / "checkpoint-seed0.pt", 60.0)
    assert compute(job, lambda _: None, lambda: True) is None
    state = checkpoints.load(job.checkpoint)
    checkpoints.save(job.checkpoint, state | {"seconds": state["seconds"] + 1000})
    outcome = compute(job, lambda _: None, lambda: False)
    assert outcome is not None
    assert outcome.seconds > 1000


def test_a_checkpoint_that_cannot_be_read_is_named(uninterrupted: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(uninterrupted / "quafl", copy)
    (copy / "rows.csv").unlink()
    (copy / "checkpoint-seed0.pt").write_bytes(b"no checkpoint")
    done = call("run", "--resume", "copy", "-j", "1", cwd=tmp_path)
    (sentence,) = own(done.stderr)
    assert done.returncode == 2
    assert "copy/checkpoint-seed0.pt cannot be read" in sentence
    assert sentence.endswith("delete it to run that seed anew")


def test_a_checkpoint_of_other_settings_is_refused(uninterrupted: Path, tmp_path: Path) -> None:
    settings = load(str(uninterrupted / "fedbuff" / "settings.toml"))[0]
    _, simulation = settings.simulation(0)
    next(iter(simulation))
    made_with = {"settings": settings.to_toml(), "quafl": quafl.__version__, "torch": version("torch")}
    (tmp_path / "settings.toml").write_text(settings.to_toml().replace("lr = 0.1", "lr = 0.2"))
    state = {"made_with": made_with, "simulation": simulation.state()}
    for content, word in (state, "was made with other settings"), ({}, "is not a checkpoint of a run"):
        checkpoints.save(tmp_path / "checkpoint-seed0.pt", content)
        done = CliRunner().invoke(app, ["run", "--resume", str(tmp_path), "-j", "1"])
        assert done.exit_code == 2
        assert word in " ".join(done.output.split())


def test_what_code_began_a_seed_is_known_when_other_code_has_ended_it(uninterrupted: Path, tmp_path: Path) -> None:
    shutil.copytree(uninterrupted / "fedbuff", tmp_path / "copy")
    versions = tmp_path / "copy" / "versions.json"
    mine = json.loads(versions.read_text())["code"]
    (tmp_path / "copy" / "rows.csv").unlink()
    settings = load(str(tmp_path / "copy" / "settings.toml"), ["run.seeds=[0]"])[0]
    _, simulation = settings.simulation(0)
    next(iter(simulation))
    made_with = {"settings": settings.to_toml(), "quafl": quafl.__version__, "torch": version("torch")}
    made_with |= {"format": FORMAT, "device": "cpu", "executor": "sequential", "precision": "float32"}
    state = {"made_with": made_with, "computed": {"code": "another"}, "simulation": simulation.state()}
    checkpoints.save(tmp_path / "copy" / "checkpoint-seed0.pt", state)
    (tmp_path / "copy" / "checkpoint-seed0.pt.part").write_text("half of one, by a process that was killed")
    done = CliRunner().invoke(app, ["run", "--resume", str(tmp_path / "copy"), "-j", "1"])
    assert done.exit_code == 0, done.output
    assert not list((tmp_path / "copy").glob("checkpoint*"))
    assert json.loads(versions.read_text())["code"] == ", ".join(sorted(["another", mine]))


def test_what_cannot_be_dealt_out_is_said_before_anything_is_overwritten(two_curves: Path) -> None:
    before = (two_curves / "quafl" / "rows.csv").read_bytes()
    wrong = ["--set", "task.partition=slow classes", "--set", "clients.slow=0"]
    arguments = ["run", str(two_curves.parent / "two.toml"), "--out", str(two_curves), "--overwrite", *wrong]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "0 of 20 clients are slow; some, and not all, must be" in " ".join(done.output.split())
    assert (two_curves / "quafl" / "rows.csv").read_bytes() == before


def test_a_model_that_is_not_finite_from_the_start_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "far.toml").write_text('task = { name = "quadratic", spread = 1e30 }\nrun = { seeds = [0] }')
    done = call("run", "far.toml", "--out", "out", cwd=tmp_path)
    (sentence,) = own(done.stderr)
    assert done.returncode == 2
    assert sentence.startswith("quafl: run, seed 0: the loss of the initial model is inf")


def test_a_metric_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    arguments = ["run", "demo", "--out", str(tmp_path), "--only", "QuAFL", "--set", "run.metric=acuracy", "-j", "1"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "the metric is 'acuracy', the task measures loss, accuracy, train_loss; choose" in done.stderr


def test_export_writes_the_best_or_last_model_as_a_state_dict(two_curves: Path, tmp_path: Path) -> None:
    for which in "best", "last":
        out = tmp_path / f"{which}.safetensors"
        arguments = ["export", str(two_curves / "quafl"), "--which", which, "--seed", "4", "--out", str(out)]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert "4 tensors, 4,810 numbers" in done.output
        kept = two_curves / "quafl" / f"model-seed4-{which}.safetensors"
        assert safetensors.torch.load_file(out).keys() == safetensors.torch.load_file(kept).keys()
    rows = [row for row in read_rows(two_curves / "quafl" / "rows.csv") if row["seed"] == 4]
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    module.load_state_dict(safetensors.torch.load_file(tmp_path / "best.safetensors"))
    images, labels = quafl.tasks.digits().test
    reached = (module(images).argmax(dim=-1) == labels).float().mean().item()
    assert reached == pytest.approx(max(row["accuracy"] for row in rows))


def test_export_of_an_unfinished_run_takes_its_checkpoint(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one made on a GPU, too, where there is none."""
    settings = load(str(uninterrupted / "fedbuff" / "settings.toml"))[0]
    task, simulation = settings.simulation(0)
    for _ in zip(range(9), simulation, strict=False):
        pass
    elsewhere = settings.to_toml().replace('device = "cpu"', 'device = "cuda:99"')
    assert "cuda:99" in elsewhere
    (tmp_path / "settings.toml").write_text(elsewhere)
    with monkeypatch.context() as there:
        there.setattr(torch.serialization, "location_tag", lambda storage: "cuda:99")
        checkpoints.save(tmp_path / "checkpoint-seed0.pt", {"simulation": simulation.state()})
    with pytest.raises(RecordError):
        checkpoints.load(tmp_path / "checkpoint-seed0.pt")
    arguments = ["export", str(tmp_path), "--which", "last", "--out", str(tmp_path / "model.safetensors")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    exported = safetensors.torch.load_file(tmp_path / "model.safetensors")
    state = simulation.server
    for name, tensor in task.export(state.model, state.buffers).items():
        assert torch.equal(exported[name], tensor)


def test_a_run_is_watched_by_its_rows_until_it_ends(uninterrupted: Path, tmp_path: Path) -> None:
    shutil.copytree(uninterrupted, tmp_path / "out")
    curve = tmp_path / "out" / "fedbuff"
    rows = by_seed(read_rows(curve / "rows.csv"))
    ended = CliRunner().invoke(app, ["watch", str(tmp_path / "out")])
    score = f"accuracy {mean(rows[seed][-1]['accuracy'] for seed in (0, 1)):.4g}"
    assert ended.stdout.splitlines()[0].startswith(f"FedBuff: 2 of 2 seeds, 100%, {score}, ")
    write_rows(curve / "rows.csv", rows[0])
    assert watched(tmp_path)["share"] == 0.5
    so_far = [row for row in rows[1] if row["time"] < 30]
    write_rows(curve / "rows-seed1.csv", so_far)
    now = watched(tmp_path)
    assert (now["curve"], now["seeds"], now["ended"]) == ("FedBuff", 2, 1)
    assert now["share"] == pytest.approx((1 + so_far[-1]["time"] / 50) / 2)
    assert now["value"] == pytest.approx((rows[0][-1]["accuracy"] + so_far[-1]["accuracy"]) / 2)


def watched(folder: Path) -> dict[str, Any]:
    """How far the first curve is."""
    done = CliRunner().invoke(app, ["watch", str(folder / "out"), "--once", "--json"])
    first: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
    return first


def test_a_federation_is_watched_until_its_server_has_ended(uninterrupted: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    plan = "[run]\nclock = 'wall'\nseed = 0\nmetric = 'accuracy'\nuntil = inf\n"
    (tmp_path / "out" / "settings.toml").write_text(f"label = 'real'\n{plan}")
    write_rows(tmp_path / "out" / "rows.csv", by_seed(read_rows(uninterrupted / "quafl" / "rows.csv"))[0])
    (tmp_path / "out" / "status.json").write_text('{"running": true}')
    assert (watched(tmp_path)["ended"], watched(tmp_path)["share"]) == (0, None)
    (tmp_path / "out" / "status.json").write_text('{"running": false}')
    assert (watched(tmp_path)["ended"], watched(tmp_path)["share"]) == (1, 1.0)


def test_a_result_that_cannot_be_written_ends_the_run_and_its_workers(tmp_path: Path) -> None:
    """The failure is outside the pool, between two results: nobody may then wait for the run that goes on."""
    (tmp_path / "two.toml").write_text(
        """
        [curves."Quick"]
        run = { until = 5.0, seeds = [0] }
        [curves."Long"]
        run = { until = 1e6, seeds = [0] }
        """
    )
    (tmp_path / "out" / "quick" / "rows.csv.part").mkdir(parents=True)  # where the rows are written first
    done = call("run", "two.toml", "--out", "out", "-j", "2", cwd=tmp_path)
    (sentence,) = own(done.stderr)
    assert done.returncode == 2
    assert sentence.endswith("rows.csv.part: Is a directory")


def test_a_file_for_which_there_is_no_room_is_named(tmp_path: Path) -> None:
    with full_disk(100), pytest.raises(typer.Exit), one_sentence(), write_atomically(tmp_path / "long.txt") as stream:
        stream.write("x" * 10_000)
    with full_disk(100), pytest.raises(OSError, match=r"File too large: '.*/state.pt'"):
        checkpoints.save(tmp_path / "state.pt", {"many": torch.zeros(1000)})
    assert not list(tmp_path.iterdir())
    with (
        pytest.raises(FileNotFoundError, match=r": '.*/nowhere/long.txt'"),
        write_atomically(tmp_path / "nowhere/long.txt"),
    ):
        pass


def test_rows_of_a_seed_that_is_taken_up_again_stand_there_once(tmp_path: Path) -> None:
    rows: list[Row] = [{"seed": 0, "round": 3 * n, "time": 10.0 * n, "accuracy": n / 7} for n in range(6)]
    path = tmp_path / "rows-seed0.csv"
    first = Growing(path)
    for row in rows[:4]:
        first.add(row)
        assert read_rows(path)[-1] == row
    path.write_text(path.read_text() + "0,12,4")  # it was killed while it wrote
    again = Growing(path)
    for row in rows[2:]:  # from its checkpoint on, which is older
        again.add(row)
    later = Growing(path)
    path.write_text(path.read_text() + "0,15,")
    later.add(rows[-1])  # or newer
    write_rows(tmp_path / "whole.csv", rows)
    assert path.read_text() == (tmp_path / "whole.csv").read_text()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_bars_fit_into_a_terminal(width: int, tmp_path: Path) -> None:
    there = Console(width=width, force_terminal=True, color_system="truecolor", legacy_windows=False)
    folders = prepare(load("demo"), tmp_path, overwrite=False)
    row = {"time": 150.0, "round": 12345.0, "accuracy": 0.987, "local_steps": 1e7, "bytes_up": 1e9, "bytes_down": 1e9}
    shown = progress(there)
    bars = Bars(shown, folders)
    for folder in folders:
        bars(folder.jobs(60.0)[0], row)
    with there.capture() as seen:
        there.print(shown)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.get()).splitlines()
    for folder, line in zip(folders, lines, strict=True):
        assert len(line.rstrip()) <= width
        assert line.startswith(folder.settings.label)
        assert re.search("[━╸╺]{12}", line)
        assert "8 %  " in line
        assert "accuracy 0.987" in line
        assert ("round 12,345" in line) == (width == 140)  # what is least important is left out


def own(stderr: str) -> list[str]:
    """What was said, without the line of an installation that has no C kernel."""
    return [line for line in stderr.splitlines() if not line.startswith("the c kernel is not available")]


def wait_for_file(folder: Path, name: str) -> None:
    wait_for(lambda: bool(list(folder.rglob(name))), 180.0, glance=0.02)  # a machine may have other things to do


def test_curves_whose_folders_would_be_the_same_are_refused(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text('[curves."b = 4"]\n[curves."B (4)"]\n')
    done = call("run", "two.toml", "--out", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("quafl: two curves would share the folder out/b-4; give them labels")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "demo", "--out", "x", "--set", "codec.bits=99"], "quafl: codec.bits = 99: must be from 1 to 16"),
        (["run", "nothing.toml", "--out", "x"], "quafl: cannot read settings 'nothing.toml'"),
        (
            ["run", "demo", "--out", "x", "--set", "clients.count=2000"],
            "quafl: clients.count = 2000: must be at most 500",
        ),
        (["report", "nowhere"], "quafl: no finished run in nowhere"),
        (["run", "--resume", "nowhere"], "quafl: nowhere holds no run to continue"),
        (["run", "demo"], "quafl: say what to run and where"),
        (["run", "demo", "--resume", "x"], "quafl: --resume takes everything from the folder"),
        (["run", "demo", "--out", "x", "--only", "Quafl"], "quafl: --only Quafl: there is no such curve, choose from"),
        (["export", "nowhere"], "quafl: nowhere holds no run"),
        (["watch", "nowhere"], "quafl: nowhere holds no run; give a folder that 'quafl run' writes to"),
        (["run", "celeba", "--out", "x"], "quafl: CelebA is not on this machine and cannot be downloaded (its licence"),
    ],
)
def test_bad_input_ends_with_one_sentence_exit_code_2_and_no_traceback(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_shows_examples_and_version_the_version() -> None:
    assert "quafl run demo --out runs/demo" in CliRunner().invoke(app, ["--help"]).output
    assert CliRunner().invoke(app, ["--version"]).output.split() == ["quafl", quafl.__version__]


LIGHT = """
import sys

from quafl.cli import COMMANDS, app, loaded

groups = [[name, inner] for name in COMMANDS for inner in getattr(loaded(name), "commands", {})]
for words in [], *([name] for name in COMMANDS), *groups:
    app([*words, "--help"], standalone_mode=False)
    print("imported:", *words, sorted({"torch", "numpy", "matplotlib", "quafl.settings.base"} & set(sys.modules)))
"""


def test_no_help_imports_anything_that_takes_its_time() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert "quafl run demo --out runs/demo" in done.stdout
    assert "--resume" in done.stdout
    imported = [line for line in done.stdout.splitlines() if line.startswith("imported:")]
    assert len(imported) > 1 + len(COMMANDS)
    assert [line for line in imported if not line.endswith(" []")] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_what_help_says_of_a_command_is_how_its_own_help_begins(name: str) -> None:
    own, said = " ".join((loaded(name).help or "").split()), COMMANDS[name].says
    assert own.startswith(said.removesuffix("."))


def test_the_shell_completes_commands() -> None:
    words = {"_QUAFL_COMPLETE": "complete_bash", "COMP_WORDS": "quafl re", "COMP_CWORD": "1"}
    done = CliRunner().invoke(app, env=words, prog_name="quafl")
    assert done.stdout.split() == ["report", "reproduce"]


def test_the_list_has_everything_that_can_be_named() -> None:
    found = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)
    assert list(found["experiments"]) == builtin()
    assert {"time", "map"} <= found["figures"].keys()
    assert {"quafl", "calibrated", "ca2fl"} <= found["algorithms"].keys()
    assert found["tasks"]["digits"] == "scikit-learn's handwritten digits and a two-layer network"
    assert all(about for entries in found.values() for about in entries.values())
    wide = {"COLUMNS": "200"}
    shown = CliRunner().invoke(app, ["list", *found], env=wide).stdout
    assert all(name in shown for entries in found.values() for name in entries)
    glance = CliRunner().invoke(app, ["list"], env=wide).stdout
    assert all(name in glance for kind in ("experiments", "algorithms", "codecs", "tasks") for name in found[kind])
    assert f"{len(found['figures'])} of them   quafl list figures" in glance
    misspelt = CliRunner().invoke(app, ["list", "codecz"])
    assert misspelt.exit_code == 2
    assert "there are no 'codecz' to list, choose from experiments, figures" in " ".join(misspelt.output.split())


def test_a_built_in_experiment_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="'demo' are a built-in experiment, which is simulated: a federation needs"):
        load_federation("demo")
    with pytest.raises(SettingsError, match=r"No such file or directory\): give a TOML file$"):
        load_federation(str(tmp_path / "nope.toml"))


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "quafl.cli", "list", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_the_doctor_says_what_is_missing_and_what_to_do_about_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("QUAFL_DATA", str(tmp_path / "data"))
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    (tmp_path / "data" / "celeba" / "img_align_celeba").mkdir(parents=True)
    for name in ("identity_CelebA.txt", "list_attr_celeba.txt"):
        (tmp_path / "data" / "celeba" / name).touch()
    found = {
        (one["part"], one["what"]): one for one in json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    }
    assert found["versions", "quafl"]["says"] == quafl.__version__
    assert found["data", "CelebA"]["says"] == f"in {tmp_path / 'data' / 'celeba'}"
    if not found["data", "MNIST"]["there"]:  # a Debian package may have brought it
        assert (
            f"not in {tmp_path / 'data' / 'mnist'} or {tmp_path / 'quafl' / 'mnist'}" in found["data", "MNIST"]["says"]
        )
        assert "a folder mnist/ of the folder that QUAFL_DATA names" in found["data", "MNIST"]["todo"]
    assert found["extras", "ray"] == {
        **{"part": "extras", "what": "ray", "there": False},
        **{"says": "for clusters; ray not installed", "todo": "pip install 'quafl[ray]'"},
    }
    assert found["kernels", "torch"]["there"]
    known = set(metadata("quafl").get_all("Provides-Extra"))
    assert known - {"dev", "docs", "bench"} == {what for part, what in found if part == "extras"}
    assert ("devices", "cuda" if not torch.cuda.is_available() else "cuda:0") in found
    said = " ".join(CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"}).stdout.split())
    assert "– ray for clusters; ray not installed; pip install 'quafl[ray]'" in said


WITHOUT = """
import sys

sys.modules["matplotlib"] = None  # as if it were not installed
from quafl.cli import COMMANDS, app, loaded

app(sys.argv[1:])
"""


@pytest.mark.parametrize("arguments", [["--help"], ["run", "demo", "--out", "x", "--set", "a=b"]])
def test_what_an_extra_brings_is_named_where_it_is_missing(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
    )
    said = " ".join((done.stdout + done.stderr).replace("│", " ").split())
    assert "figures need matplotlib, which is not installed: pip install 'quafl[figures]'" in said
    assert done.returncode == (0 if arguments == ["--help"] else 2)
    assert "Traceback" not in said
