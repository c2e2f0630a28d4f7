"""Federations of real processes on loopback, under mutual TLS. A short one here; those marked `federation` take
minutes, and run with `make test-federation`."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from parties import CLIENTS, TASK, Parties

from quafl.record.summary import read_curve

long = pytest.mark.federation


def test_four_clients_train_to_the_target_under_mutual_tls(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "quafl.cli", "federation", "demo", "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, "HOME": str(tmp_path)}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    curve = read_curve(out)
    assert curve.seeds[0][-1]["accuracy"] >= 0.95
    assert curve.seeds[0][-1]["bytes_up"] > 0
    assert "accuracy 0.95" in done.stdout
    status = json.loads((out / "status.json").read_text())
    assert {member["name"] for member in status["clients"]} == set(CLIENTS)
    assert all(member["contacts"] > 0 for member in status["clients"])
    assert "time (s)" in (out / "report.html").read_text()
    assert curve.attendance is not None
    assert {event.client for event in curve.attendance.events if event.event == "joined"} == set(CLIENTS)
    assert curve.attendance.events[-1].event == "server stopped"
    sent = {name: (out / "federation" / "clients" / name / "console.txt").read_text() for name in CLIENTS}
    assert all("the run is over" in text for text in sent.values())
    assert not [text for text in (done.stderr, *sent.values()) if "ERROR" in text or "Traceback" in text]
    replay = [sys.executable, "-m", "quafl.cli", "federation", "replay", str(out), "--task", TASK]
    again = subprocess.run(replay, capture_output=True, text=True, timeout=200, check=False)
    known = len(curve.seeds[0]) - 1
    if not status["lost"]:  # what was behind a contact that got lost, nobody knows
        assert again.returncode == 0, again.stderr
        assert f"{known} of the server's {known} recorded models are the same, bit for bit" in again.stdout


def test_calibrated_goes_on_after_the_server_and_a_client_are_killed(tmp_path: Path) -> None:
    algorithm = {"name": "calibrated", "sampled": 2, "lr": 0.5, "wait": 0.02, "patience": 20.0}
    with Parties(tmp_path, algorithm=algorithm, codec={"bits": 4}) as parties:
        parties.start_server()
        for name in CLIENTS:
            parties.start_client(name)
        parties.wait_for(lambda: parties.contacts("client-1") > 5)
        parties.kill("client-1")
        parties.kill("server")
        reached = parties.status()["round"]
        parties.start_server()
        parties.start_client("client-1")
        parties.wait_for(lambda: parties.status()["round"] > reached + 20 and parties.accuracy() > 0.9)
        contacts = parties.contacts("client-1")
        parties.wait_for(lambda: parties.contacts("client-1") > contacts + 3)
        assert "going on from round" in parties.log("server")
        assert parties.terminate("server") == 0
        assert not [name for name in ("server", *CLIENTS) if "Traceback" in parties.log(name)]


@long
def test_a_client_joins_in_the_middle_and_a_revoked_one_is_shut_out(tmp_path: Path) -> None:
    quafl = [sys.executable, "-m", "quafl.cli", "federation"]
    with Parties(tmp_path) as parties:
        folder = ["--dir", str(parties.kits)]
        parties.start_server()
        for name in CLIENTS[:2]:
            parties.start_client(name)
        parties.wait_for(lambda: parties.status()["round"] > 5)
        subprocess.run([*quafl, "add", "late", *folder], check=True)
        parties.start_client("late", task="quafl.tasks.demo:digits_of")
        parties.wait_for(lambda: parties.contacts("late") > 3)
        shown = subprocess.run([*quafl, "status", *folder], check=True, capture_output=True, text=True).stdout
        assert "late" in shown
        assert "running: round" in shown
        subprocess.run([*quafl, "revoke", "client-2", *folder], check=True)
        parties.wait_for(lambda: "client-2" not in parties.there())
        before = parties.contacts("client-2")
        assert parties.running["client-2"].wait(60.0) == 1
        assert "the certificate of client-2 was revoked" in parties.log("client-2")
        parties.start_client("client-2")  # trying again does not help
        round = parties.status()["round"]
        parties.wait_for(lambda: parties.status()["round"] > round + 60)
        assert parties.contacts("client-2") == before
        assert "client-2" not in parties.there()
        assert parties.terminate("server") == 0


@long
def test_a_killed_client_comes_back_with_its_state(tmp_path: Path) -> None:
    with Parties(tmp_path) as parties:
        parties.start_server()
        for name in CLIENTS[:3]:
            parties.start_client(name)
        parties.wait_for(lambda: parties.contacts("client-1") > 3)
        assert parties.terminate("client-1") == 0
        assert "stopped:" in parties.log("client-1")
        parties.start_client("client-1")
        parties.wait_for(lambda: "going on from a checkpoint" in parties.log("client-1"))
        assert "and is dropped" not in parties.log("client-1")  # it was stopped in good order
        contacts = parties.contacts("client-1")
        parties.wait_for(lambda: parties.contacts("client-1") > contacts + 3)
        parties.kill("client-1")
        round = parties.status()["round"]
        parties.wait_for(lambda: "client-1" not in parties.there())
        parties.wait_for(lambda: parties.status()["round"] > round + 20)  # the others go on
        parties.start_client("client-1")
        contacts = parties.contacts("client-1")
        parties.wait_for(lambda: parties.contacts("client-1") > contacts + 3)
        assert "may have been reported, and is dropped" in parties.log("client-1")
        parties.wait_for(lambda: parties.accuracy() > 0.9)
        assert parties.terminate("server") == 0


@long
def test_a_killed_server_goes_on_and_its_clients_stay(tmp_path: Path) -> None:
    with Parties(tmp_path) as parties:
        parties.start_server()
        for name in CLIENTS:
            parties.start_client(name)
        parties.wait_for(lambda: parties.status()["round"] > 40)
        parties.kill("server")
        reached = parties.status()["round"]
        parties.start_server()
        parties.wait_for(lambda: parties.status()["round"] > reached + 20)
        assert "going on from round" in parties.log("server")
        assert "training diverged" not in parties.log("server")
        parties.wait_for(lambda: parties.accuracy() > 0.9)
        assert all(parties.running[name].poll() is None for name in CLIENTS)
        assert parties.terminate("server") == 0
        assert "start again to go on" in parties.log("server")
        rows = read_curve(parties.out).seeds[0]
        assert [row["round"] for row in rows] == sorted({row["round"] for row in rows})


@long
@pytest.mark.parametrize(
    ("algorithm", "codec"),
    [
        ({"name": "fedavg", "local_steps": 5}, {"bits": 6}),
        ({"name": "fedbuff", "local_steps": 5, "server_lr": 0.7}, {"name": "qsgd", "bits": 8}),
        ({"name": "quafl", "weighted": True}, {"bits": 4}),
    ],
    ids=["FedAvg", "FedBuff", "QuAFL weighted"],
)
def test_other_algorithms_run_on_the_same_fleet(
    tmp_path: Path, algorithm: dict[str, object], codec: dict[str, object]
) -> None:
    algorithm = {"sampled": 2, "lr": 0.5, "patience": 20.0, **algorithm}
    with Parties(tmp_path, algorithm=algorithm, codec=codec, run={"target": 0.9, "stop_at_target": True}) as parties:
        server = parties.start_server()
        for name in CLIENTS:
            parties.start_client(name)
        assert server.wait(120.0) == 0, parties.log("server")
        assert read_curve(parties.out).seeds[0][-1]["accuracy"] >= 0.9


@long
def test_mnist_is_learned_over_a_slow_link(tmp_path: Path) -> None:
    if "QUAFL_DATA" not in os.environ:
        pytest.skip("needs MNIST: set QUAFL_DATA")
    with slow_link() as (at_server, at_clients, address):
        run = {"target": 0.9, "stop_at_target": True, "until": 150.0}
        algorithm = {"sampled": 2, "local_steps": 10, "lr": 0.3, "wait": 0.1, "patience": 20.0}
        task = "pictures:mnist_of"
        with Parties(tmp_path, host=address, task=task, run=run, algorithm=algorithm) as parties:
            (tmp_path / "pictures.py").write_text(PICTURES)
            server = parties.start_server(under=at_server)
            for name in CLIENTS:
                parties.start_client(name, task=task, under=at_clients)
            assert server.wait(200.0) == 0, parties.log("server")
            assert read_curve(parties.out).seeds[0][-1]["accuracy"] >= 0.9


PICTURES = """
from quafl.tasks import mnist, partition
from quafl.tasks.local import Local
from quafl.tasks.models import MNIST, mlp


def mnist_of(name):
    data, model = mnist(), mlp(784, 32, 10, seed=0, pixels=MNIST())
    if name == "server":
        return Local(model, data.test)
    return Local(model, partition.iid(data.train, 4)[int(name[-1]) - 1], batch_size=128)
"""


@contextmanager
def slow_link() -> Iterator[tuple[list[str], list[str], str]]:
    """Two hosts, as network namespaces, joined by a link of a megabit a second and, where the kernel can, with a delay:
    how to run something on either, and the address of the first."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2 and root")
    here, there = f"qs{os.getpid()}", f"qc{os.getpid()}"
    try:
        for name in (here, there):
            if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
                pytest.skip("this machine does not let us make network namespaces")
        subprocess.run(
            ["ip", "link", "add", here, "netns", here, "type", "veth", "peer", there, "netns", there], check=True
        )
        for name, address in ((here, "10.77.7.1/24"), (there, "10.77.7.2/24")):
            inside = ["ip", "-n", name]
            subprocess.run([*inside, "addr", "add", address, "dev", name], check=True)
            subprocess.run([*inside, "link", "set", name, "up"], check=True)
            subprocess.run([*inside, "link", "set", "lo", "up"], check=True)
            shaping = ["tc", "-n", name, "qdisc", "add", "dev", name, "root"]
            delayed = [*shaping, "netem", "delay", "25ms", "rate", "1mbit"]
            if subprocess.run(delayed, capture_output=True, check=False).returncode:
                subprocess.run([*shaping, "tbf", "rate", "1mbit", "burst", "16kbit", "latency", "1s"], check=True)
        yield ["ip", "netns", "exec", here], ["ip", "netns", "exec", there], "10.77.7.1"
    finally:
        for name in (here, there):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@long
def test_a_client_that_finds_no_server_waits_for_it_and_can_be_stopped(tmp_path: Path) -> None:
    with Parties(tmp_path) as parties:
        for name in CLIENTS[:3]:
            parties.start_client(name)
        parties.wait_for(lambda: "trying again" in parties.log("client-3"))
        assert parties.terminate("client-3") == 0
        parties.start_server()
        parties.wait_for(lambda: parties.status()["round"] > 3)
        assert parties.there() == {"client-1", "client-2"}
        assert parties.terminate("server") == 0
