"""The user's own task, algorithm and codec, where settings name a function: `make = "module:function"`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from parties import Parties
from typer.testing import CliRunner

from quafl.cli import app
from quafl.codec import Identity
from quafl.record.rows import read_rows
from quafl.settings.base import SettingsError
from quafl.settings.reading import load, load_federation
from quafl.tasks import DataError
from quafl.tasks.local import make
from quafl.tasks.own import pack, unpack

MINE = '''
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import quafl
from quafl.codec import Identity
from quafl.tasks import Quadratic


def make_task(party, hidden=4):
    """Which half of the plane? Every party has points of its own, the server those to judge by."""
    number = 0 if party == "server" else int(party[-1])
    points = torch.randn(60, 2, generator=torch.Generator().manual_seed(number))
    network = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 2))
    return quafl.Local(network, (points, (points[:, 0] > 0).long()), batch_size=10)


def bowl(party):
    return Quadratic(torch.ones(3), torch.full((1, 3), {"client-1": 0.0, "client-2": 2.0}.get(party, 1.0)))


def each_batch(party):
    one = make_task("client-1")
    return quafl.Local(one.model, one.data, batch_size=5 if party == "client-1" else 7)


def blind(party):
    return make_task("client-1").model, make_task("client-1").data if party != "server" else None


def drawn(party):
    return nn.Linear(2, 2), (torch.randn(4, 2) + np.random.rand() + random.random(), torch.zeros(4).long())


def my_algorithm(sampled, lr, strength=0.0):
    return quafl.FedAvg(sampled=sampled, local_steps=round(10 * lr), proximity=strength)


def my_codec(bits=32):
    return Identity() if bits == 32 else quafl.Codecs(up=quafl.Lattice(bits), down=Identity())


def growing(party):
    return make_task("client-1", hidden=3 if party == "server" else 4)


def failing(party):
    raise KeyError("no such table")


number = 3


def word(*_, **__):
    return "word"
'''
BASE = """
[task]
make = "mine:make_task"
[clients]
count = 4
[algorithm]
sampled = 2
lr = 0.5
[run]
until = 60.0
every = 30.0
seeds = [0, 1]
"""
CURVES = """
[curves.QuAFL]
[curves.Mine]
algorithm = { make = "mine:my_algorithm", strength = 0.1 }
codec = { make = "mine:my_codec" }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the module; what is imported from it is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "own.toml").write_text(BASE)
    yield tmp_path
    sys.modules.pop("mine", None)


def test_own_code_is_run_over_processes_and_resumed_from_anywhere(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (folder / "own.toml").write_text(BASE + CURVES)
    monkeypatch.chdir(elsewhere)
    command = [sys.executable, "-m", "quafl.cli", "run", str(folder / "own.toml"), "--out", "out", "-j", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    curve = elsewhere / "out" / "mine"
    rows = read_rows(curve / "rows.csv")
    assert {row["seed"] for row in rows} == {0, 1}
    assert rows[-1]["accuracy"] > rows[0]["accuracy"]
    assert rows[-1]["local_steps"] % 5 == 0, "K = 10 · lr"
    assert json.loads((curve / "versions.json").read_text())["own"].startswith("mine.py ")
    whole = (curve / "rows.csv").read_bytes()
    (curve / "rows.csv").unlink()
    monkeypatch.chdir("/")
    again = CliRunner().invoke(app, ["run", "--resume", str(elsewhere / "out"), "-j", "1"])
    assert again.exit_code == 0, again.stderr
    assert (curve / "rows.csv").read_bytes() == whole
    assert "has changed" not in again.stdout
    (curve / "rows.csv").unlink()
    (folder / "mine.py").write_text(MINE + "\n# better\n")
    warned = CliRunner().invoke(app, ["run", "--resume", str(elsewhere / "out"), "-j", "1"])
    assert warned.exit_code == 0, warned.stderr
    assert warned.stdout.count("your code has changed since it was begun (mine.py ") == 1


def test_complete_settings_load_again_and_remember_where_the_code_is(folder: Path, tmp_path: Path) -> None:
    (folder / "own.toml").write_text(BASE + CURVES)
    _, mine = load(str(folder / "own.toml"))
    assert mine.modules == [str(folder)]
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "settings.toml").write_text(mine.to_toml())
    assert load(str(tmp_path / "kept" / "settings.toml")) == [mine]
    assert isinstance(mine.codec.build(), Identity)
    assert (mine.algorithm.build().sampled, mine.algorithm.build_optimizer().rate) == (2, 0.5)


def test_a_name_takes_the_place_of_a_function_and_the_other_way_round(folder: Path) -> None:
    (one,) = load(str(folder / "own.toml"), ["task.name=digits", "task.hidden=8"])
    assert (one.task.name, one.modules) == ("digits", None)
    (other,) = load(str(folder / "own.toml"), ["codec.make=mine:my_codec", "codec.bits=6"])
    up, down = other.codec.build()  # type: ignore[misc]
    assert (up.bits, down.bits) == (6, 32)


def test_own_code_travels_to_machines_that_do_not_have_it(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    here = list(sys.path)
    (settings,) = load(str(folder / "own.toml"), ["run.until=10"])
    code = pack(map(Path, settings.modules or []))
    del sys.modules["mine"]
    sys.path[:] = here
    (folder / "mine.py").unlink()
    unpack(code, tmp_path_factory.mktemp("there") / "code")
    _, run = settings.simulation(0)
    assert [row for row in run if row]


def test_every_party_s_data_and_the_server_s_judgement_are_those_of_a_federation(folder: Path) -> None:
    (settings,) = load(str(folder / "own.toml"), ["task.hidden=5"])
    task, _ = settings.simulation(7)
    options = {"hidden": 5}
    server = make("mine:make_task", "server", 7, options)
    torch.testing.assert_close(task.initial()[0], server.initial()[0])
    score, theirs = (one.evaluate(*server.initial()) for one in (task, server))
    assert (score["accuracy"], score["loss"]) == (theirs["accuracy"], theirs["loss"])
    for number in range(4):
        mine = make("mine:make_task", f"client-{number + 1}", 0, options)
        seen, known = (
            {tuple(point) for step in range(6) for point in one.batch(client, step).inputs.tolist()}
            for one, client in ((task, number), (mine, 0))
        )
        assert seen == known


@pytest.mark.parametrize("function", ["bowl", "each_batch", "blind"])
def test_tasks_pairs_and_batches_of_different_sizes_are_simulated_too(folder: Path, function: str) -> None:
    (settings,) = load(str(folder / "own.toml"), [f"task={{make='mine:{function}'}}", "clients.count=2"])
    settings.task.check(settings.clients)
    _, run = settings.simulation(0)
    rows = [row for row in run if row]
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_what_a_function_draws_at_random_follows_from_the_seed(folder: Path) -> None:
    (settings,) = load(str(folder / "own.toml"), ["task={make='mine:drawn'}"])
    first, again, other = (settings.task.build(settings.clients, settings.run, seed) for seed in (1, 1, 2))
    assert first.initial()[0].equal(again.initial()[0])
    assert not first.initial()[0].equal(other.initial()[0])
    assert first.batch(0, 0).inputs.equal(again.batch(0, 0).inputs)
    assert not first.batch(0, 0).inputs.equal(first.batch(1, 0).inputs)


def test_validation_judges_by_a_tenth_of_the_clients_data_which_nobody_learns_from(folder: Path) -> None:
    (settings,) = load(str(folder / "own.toml"), ["task.judge=validation"])
    task = settings.task.build(settings.clients, settings.run, 0)
    learned = {tuple(point) for step in range(5) for point in task.batch(0, step).inputs.tolist()}
    assert len(learned) == 50  # of 54, in whole batches of 10
    judged = {tuple(point) for point in task._test.all[0].tolist()}  # type: ignore[attr-defined]
    assert len(judged) == 4 * 6
    assert not learned & judged


def checked_and_built(path: Path, changes: list[str]) -> None:
    (settings,) = load(str(path), changes)
    settings.task.check(settings.clients)
    settings.task.build(settings.clients, settings.run, 0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("task.make=nowhere:f", "task.make = nowhere:f: No module named 'nowhere'; is it installed, beside the"),
        ("task.make=mine", "task.make = mine: must look like package.module:function"),
        ("task.make=mine:make_tsk", "task.make = mine:make_tsk: there is no make_tsk in {}/mine.py; did you mean"),
        ("task.make=mine:number", "task.make = mine:number: number is not a function"),
        (
            "task.make=worse:f",
            "task.make = worse:f cannot be imported: ZeroDivisionError: division by zero ({}/worse.py",
        ),
        ("task.make=mine:failing", "task.make = mine:failing failed: KeyError: 'no such table' ({}/mine.py, line "),
        ("task.make=mine:word", "task.make = mine:word returned a str; return quafl.Local(model, data), or a Task"),
        ("task.make=mine:growing", "task.make = mine:growing returns a model with 17 parameters for the server, and"),
        ("task.hiden=3", "task.make = mine:make_task failed: TypeError: make_task() got an unexpected keyword"),
        ("task={make='mine:bowl', judge='validation'}", "task.make = mine:bowl returned a Task, and nobody knows"),
        ("algorithm.make=mine:word", "algorithm.make = mine:word returned a str, which has no records; return what"),
        ("algorithm.make=mine:failing", "algorithm.make = mine:failing failed: TypeError: failing() got an unexpected"),
        ("algorithm={make='mine:my_algorithm', sampled=9}", "algorithm.sampled = 9: must be at most clients.count = 4"),
        ("codec.make=mine:word", "codec.make = mine:word returned a str, which has no bits; return what has all of"),
        ("codec={make='mine:my_codec', name='qsgd'}", "codec has name = 'qsgd' and make = 'mine:my_codec'; give one"),
        ("clients.names=['a','a']", "clients.names = ['a', 'a']: must be as many different ones as clients.count = 4"),
        ("task.name=digits\nclients.names=['a','b','c','d']", "clients.names = ['a', 'b', 'c', 'd']: must be left out"),
    ],
)
def test_what_is_wrong_with_own_code_is_one_sentence_with_its_file(folder: Path, change: str, sentence: str) -> None:
    (folder / "worse.py").write_text("1 / 0\n")
    with pytest.raises((SettingsError, DataError)) as error:
        checked_and_built(folder / "own.toml", change.split("\n"))
    assert str(error.value).startswith(sentence.format(folder.resolve()))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("section", ["algorithm", "codec"])
def test_a_server_names_no_code_that_its_clients_would_run(folder: Path, section: str) -> None:
    (folder / "fed.toml").write_text("[task]\nmake = 'mine:make_task'\n")
    with pytest.raises(SettingsError, match=f"{section}.make = 'mine:word': is for simulations; a client runs no code"):
        load_federation(str(folder / "fed.toml"), [f"{section}.make=mine:word"])


def test_the_function_that_was_simulated_is_federated_unchanged(folder: Path) -> None:
    with Parties(folder, task="mine:make_task", run={"rounds": 10}) as parties:
        parties.settings.write_text(parties.settings.read_text().replace("[task]", "[task]\nhidden = 5"))
        parties.start_server()
        for name in ("client-1", "client-2"):
            parties.start_client(name, "--set", "hidden=5", task="mine:make_task")
        assert {name: process.wait(60) for name, process in parties.running.items()} == dict.fromkeys(
            parties.running, 0
        )
    assert read_rows(parties.out / "rows.csv")[-1]["round"] == 10
