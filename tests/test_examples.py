"""The examples run, and learn something."""

import re
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest
from federations import federation

from quafl.deploy.server import Goals
from quafl.settings.reading import load, load_federation
from quafl.tasks.local import make

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "pattern", "least"),
    [
        ("regression", r"R² (\S+)", 0.4),
        ("text", r"accuracy (\S+)", 0.95),
        ("datasets", r"accuracy (\S+),", 0.9),
        ("evaluation", r"accuracy (\S+) over", 0.9),
    ],
)
def test_the_example_learns(name: str, pattern: str, least: float) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    (value,) = re.findall(pattern, done.stdout)
    assert float(value) >= least


def test_the_language_model_learns_by_its_adapter_which_peft_loads(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "lora.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ((before, after),) = re.findall(r"accuracy (\S+), then (\S+)", done.stdout)
    assert float(after) > float(before) + 0.2
    ((adapter, whole),) = re.findall(r"a contact: (\S+) octets; with the whole model at 32 bits (\S+)", done.stdout)
    assert 100 * int(adapter.replace(",", "")) < int(whole.replace(",", ""))
    assert peft.PeftConfig.from_pretrained(str(tmp_path)).r == 4
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_the_federated_example_makes_every_partys_task_from_its_own_csv_and_is_rehearsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES / "federation"))
    subprocess.run([sys.executable, str(EXAMPLES / "federation" / "patients.py")], check=True, timeout=100)
    settings = load_federation(str(EXAMPLES / "federation" / "fed.toml"))
    tasks = {name: make(settings.task.make, name) for name in ("server", "north", "south")}
    assert {len(task.initial()[0]) for task in tasks.values()} == {30 * 16 + 16 + 16 * 2 + 2 + 2 * 30}
    assert tasks["north"].batch(0, 0).inputs.shape == (16, 30)
    assert not tasks["north"].batch(0, 0).inputs.equal(tasks["south"].batch(0, 0).inputs)
    assert 0 < tasks["server"].evaluate(*tasks["server"].initial())["accuracy"] < 1
    (rehearsal,) = load(str(EXAMPLES / "federation" / "rehearsal.toml"), ["run.until=4", "run.per_client=true"])
    assert rehearsal.task.make == settings.task.make
    assert rehearsal.algorithm == settings.algorithm.model_copy(update={"patience": inf})
    task, run = rehearsal.simulation(0)
    assert task.evaluate(*task.initial())["accuracy"] < 0.9 < [row for row in run if row][-1]["accuracy"]
    assert list(run.clients) == ["north", "south"]


def test_the_federated_example_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES / "federation"))
    subprocess.run([sys.executable, str(EXAMPLES / "federation" / "patients.py")], check=True, timeout=100)
    settings = load_federation(str(EXAMPLES / "federation" / "fed.toml"), ["algorithm.wait=0.01"])
    terms = settings.terms()
    codec, limits = settings.codec.build(), settings.clients.build()
    with federation(tmp_path, terms.algorithm, codec, terms.optimizer, limits) as made:
        run = made.coordinator(make(settings.task.make, "server"), Goals(rounds=80, every=1.0))
        for name in ("north", "south"):
            made.join(name, make(settings.task.make, name))
        assert run.run()
        assert run.evaluations.rows[-1]["accuracy"] > 0.9
        assert made.machine.totals.lost == 0
