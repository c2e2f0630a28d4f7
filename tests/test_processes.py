"""Federations of real processes on loopback, under mutual TLS. A short one here; those marked `federation` take
minutes, and run with `make test-federation`."""

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from parties import CLIENTS, Parties

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
    sent = {name: (out / "federation" / "clients" / name / "console.txt").read_text() for name in CLIENTS}
    assert all("the run is over" in text for text in sent.values())


@long
def test_parties_without_a_certificate_or_from_another_authority_are_refused(tmp_path: Path) -> None:
    with Parties(tmp_path / "ours") as ours, Parties(tmp_path / "theirs") as theirs:
        ours.start_server()
        for name in CLIENTS[:2]:
            ours.start_client(name)
        ours.wait_for(lambda: ours.status()["round"] > 3)
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            _tls_handshake(ours, certificate=None)
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            _tls_handshake(ours, certificate=theirs.kits / "clients" / "client-3")
        assert _tls_handshake(ours, certificate=ours.kits / "clients" / "client-3") == "TLSv1.3"
        forged = tmp_path / "forged"
        shutil.copytree(ours.kits / "clients" / "client-3", forged)
        for part in ("client.key", "client.crt"):
            shutil.copy(theirs.kits / "clients" / "client-3" / "startup" / part, forged / "startup" / part)
        ours.start_client("client-3", kit=forged)
        before = ours.status()["round"]
        ours.wait_for(lambda: ours.status()["round"] > before + 60)
        assert "client-3" not in {member["name"] for member in ours.status()["clients"]}
        assert ours.terminate("server") == 0


def _tls_handshake(parties: Parties, certificate: Path | None) -> str | None:
    """The TLS version that was agreed on; the first octet tells whether the server has taken the certificate."""
    context = ssl.create_default_context(cafile=str(parties.kits / "clients" / "client-1" / "startup" / "rootCA.pem"))
    context.set_alpn_protocols(["h2"])
    if certificate is not None:
        context.load_cert_chain(certificate / "startup" / "client.crt", certificate / "startup" / "client.key")
    with (
        socket.create_connection(("localhost", parties.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        if not secure.recv(1):
            raise ssl.SSLError("the server has hung up")
        return secure.version()


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
        subprocess.run([*quafl, "revoke", "client-2", *folder], check=True)
        parties.wait_for(lambda: "client-2" not in parties.there())
        before = parties.contacts("client-2")
        parties.kill("client-2")
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
        assert "clean" in parties.log("client-1")
        contacts = parties.contacts("client-1")
        parties.wait_for(lambda: parties.contacts("client-1") > contacts + 3)
        parties.kill("client-1")
        round = parties.status()["round"]
        parties.wait_for(lambda: "client-1" not in parties.there())
        parties.wait_for(lambda: parties.status()["round"] > round + 20)  # the others go on
        parties.start_client("client-1")
        contacts = parties.contacts("client-1")
        parties.wait_for(lambda: parties.contacts("client-1") > contacts + 3)
        assert "crashed" in parties.log("client-1")
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
