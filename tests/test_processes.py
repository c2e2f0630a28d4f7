"""Federations of real processes on loopback, under mutual TLS. A short one here; those marked `federation` take
minutes, and run with `make test-federation`."""

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
        assert "running: round" in shown
        subprocess.run([*quafl, "revoke", "client-2", *folder], check=True)
        parties.wait_for(lambda: "client-2" not in parties.there())
        before = parties.contacts("client-2")
        assert parties.running["client-2"].wait(60.0) == 1
        assert "was it revoked?" in parties.log("client-2")
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
    data, model = mnist(), mlp(784, 32, 10, seed=0, pixels=MNIST)
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
def test_a_client_with_bad_intentions_gets_nowhere(tmp_path: Path) -> None:
    with Parties(tmp_path, clients={"start_with": 2, "largest_message_mb": 10.0}) as parties:
        parties.start_server()
        for name in CLIENTS[:2]:
            parties.start_client(name)
        parties.wait_for(lambda: parties.status()["round"] > 3)
        answers = try_as("client-4", parties)
        assert answers.pop("hello with another model") == "Refused"
        assert answers.pop("nonsense") == "Refused"
        assert len(answers) == 5
        assert all(answer.startswith("cannot be reached") for answer in answers.values()), answers
        assert "(ok)" not in answers["more than the limit in one frame"]
        assert "a message from client-4 as client-4 to client-1 was refused: it must not do that" in parties.log(
            "server"
        )
        assert "bound to origin client-4, not message origin client-1" in parties.log("server")  # the engine's words
        assert "dropped" not in parties.log("client-1")
        parts = try_as("client-4.part", parties)  # the certificate is good for it, as far as the engine goes
        assert not {"Welcome", "Refused"} & set(parts.values()), parts
        before = parties.status()["round"]
        parties.wait_for(lambda: parties.status()["round"] > before + 20)
        assert parties.terminate("server") == 0


def try_as(name: str, parties: Parties) -> dict[str, str]:
    command = [
        sys.executable,
        str(Path(__file__).parent / "rogue.py"),
        str(parties.kits / "clients" / "client-4"),
        name,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return {"everything": "never let in"}
    assert "ANSWERS" in done.stdout or "does not let this party in" in done.stderr, done.stdout + done.stderr
    answers: dict[str, str] = json.loads((done.stdout.partition("ANSWERS")[2] or "{}").splitlines()[0])
    return answers


@long
def test_a_client_that_finds_no_server_waits_for_it_and_can_be_stopped(tmp_path: Path) -> None:
    with Parties(tmp_path) as parties:
        for name in CLIENTS[:3]:
            parties.start_client(name)
        parties.wait_for(lambda: "is dialling the server" in parties.log("client-3"))
        assert parties.terminate("client-3") == 143
        parties.start_server()
        parties.wait_for(lambda: parties.status()["round"] > 3)
        assert parties.there() == {"client-1", "client-2"}
        assert parties.terminate("server") == 0


@long
def test_no_role_may_submit_jobs_bring_code_or_use_the_shell(tmp_path: Path) -> None:
    with Parties(tmp_path) as parties:
        admins = make_admins(parties.kits, tmp_path / "admins")
        parties.start_server()
        for name in CLIENTS[:2]:
            parties.start_client(name)
        parties.wait_for(lambda: parties.status()["round"] > 3)
        job = make_job(tmp_path / "job")
        for name, kit in admins.items():
            results = try_everything(name, kit, job)
            assert len(results) == 9
            allowed = {what: said for what, said in results.items() if "not authorized" not in said}
            assert allowed == {}, name
        assert parties.terminate("server") == 0


@long
def test_code_of_ones_own_is_refused_even_where_jobs_are_not(tmp_path: Path) -> None:
    with Parties(tmp_path) as parties:
        rights = parties.kits / "server" / "local" / "authorization.json"
        policy = json.loads(rights.read_text())
        policy["permissions"]["project_admin"]["submit_job"] = "any"
        rights.write_text(json.dumps(policy))
        (name, kit), *_ = make_admins(parties.kits, tmp_path / "admins").items()
        parties.start_server()
        parties.start_client("client-1")
        parties.wait_for(lambda: "client-1" in parties.there())
        try_everything(name, kit, make_job(tmp_path / "job"))
        parties.wait_for(lambda: "BYOC not permitted" in parties.log("server"))


def try_everything(name: str, kit: Path, job: Path) -> dict[str, str]:
    script = Path(__file__).parent / "admin.py"
    command = [sys.executable, str(script), name, str(kit), str(job)]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert "TRIED" in tried.stdout, tried.stdout + tried.stderr
    results: dict[str, str] = json.loads(tried.stdout.partition("TRIED")[2].splitlines()[0])
    return results


def make_admins(federation: Path, scratch: Path) -> dict[str, Path]:
    """Start-up kits of administrators, a role each, which whoever has the authority's key can make."""
    from nvflare.lighter.impl.cert import CertBuilder
    from nvflare.lighter.impl.static_file import StaticFileBuilder
    from nvflare.lighter.impl.workspace import WorkspaceBuilder
    from nvflare.lighter.provision import prepare_project
    from nvflare.lighter.provisioner import Provisioner

    description = json.loads((federation / "authority" / "federation.json").read_text())
    roles = ("project_admin", "org_admin", "lead", "member")
    people = [
        {"name": f"{role.replace('_', '')}@example.org", "type": "admin", "org": "quafl", "role": role}
        for role in roles
    ]
    server = {
        "name": "server",
        "type": "server",
        "org": "quafl",
        "host_names": ["localhost"],
        "default_host": "localhost",
        "fed_learn_port": description["port"],
    }
    shutil.copytree(federation / "authority" / "state", scratch / "quafl" / "state")
    builders = [
        WorkspaceBuilder(),
        StaticFileBuilder(config_folder="config", scheme="grpc"),
        CertBuilder(root_valid_days=description["valid_days"]),
    ]
    project = {"api_version": 3, "name": "quafl", "description": "", "participants": [server, *people]}
    names = [str(person["name"]) for person in people]
    Provisioner(str(scratch), builders).provision(prepare_project(project))
    return {name: scratch / "quafl" / "prod_00" / name for name in names}


def make_job(folder: Path) -> Path:
    """A job for the engine, with code of its own."""
    (folder / "app" / "config").mkdir(parents=True)
    (folder / "app" / "custom").mkdir()
    (folder / "app" / "custom" / "mine.py").write_text("print('pwned')\n")
    (folder / "meta.json").write_text(
        json.dumps({"name": "job", "min_clients": 1, "resource_spec": {}, "deploy_map": {"app": ["@ALL"]}})
    )
    part = {"format_version": 2, "workflows": [], "executors": [], "components": []}
    for side in ("server", "client"):
        (folder / "app" / "config" / f"config_fed_{side}.json").write_text(json.dumps(part))
    return folder
