"""A federation of real processes, attacked: by strangers, by another user of the machine, by clients with a
certificate. `make test-federation`; what can be tried without processes is in test_streams and test_federation."""

import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import pytest
from parties import CLIENTS, Parties, listening, resident_mb

from quafl.deploy import provision
from quafl.deploy.carrier import Loop
from quafl.deploy.streams import GrpcClient
from quafl.protocol import messages
from quafl.protocol.carrier import Octets, Unreachable
from quafl.protocol.layout import digest_of, layout_of
from quafl.protocol.messages import Broken, Contact, Hello
from quafl.tasks import local

pytestmark = pytest.mark.federation
LARGEST = 100_000_000
LAYOUT = digest_of(layout_of(local.make("quafl.tasks.demo:digits_of", "server")))


class Rogue:
    """A client with a certificate that says and answers what it likes."""

    def __init__(self, parties: Parties, name: str) -> None:
        self.loop = Loop("rogue")
        self._client = GrpcClient(self.loop, parties.kits / "clients" / name, None)
        self._client.start(os.urandom(16).hex(), self.answer, largest=LARGEST)

    def answer(self, octets: Octets) -> bytes:
        """What it says when it is contacted."""
        return b""

    def say(self, octets: bytes, within: float = 5.0) -> messages.Message:
        until = monotonic() + 20.0
        while True:
            try:
                return messages.from_bytes(self._client.ask(octets, within))
            except Unreachable:
                if monotonic() > until:
                    raise
                sleep(0.05)

    def hello(self, **changes: object) -> bytes:
        said = {"layout": LAYOUT, "session": "0a", "leaving": False, **changes}
        return messages.to_bytes(Hello(messages.as_text(said)))

    def close(self) -> None:
        self._client.close()
        self.loop.close()


@contextmanager
def running(folder: Path, count: int = 3, **sections: Any) -> Iterator[Parties]:
    """A server and some clients, at work."""
    with Parties(folder, **sections) as parties:
        parties.start_server()
        for name in CLIENTS[:count]:
            parties.start_client(name)
        parties.wait_for(lambda: parties.status()["round"] > 20)
        yield parties
        assert parties.running["server"].poll() is None, parties.log("server")
        assert "Traceback" not in parties.log("server")


def rate(parties: Parties, seconds: float = 6.0) -> float:
    """Rounds a second."""
    before, began = parties.status(), monotonic()
    sleep(seconds)
    now = parties.status()
    assert monotonic() - began >= seconds
    return float((now["round"] - before["round"]) / (now["seconds"] - before["seconds"]))


def test_one_socket_listens_at_the_server_and_none_at_a_client(tmp_path: Path) -> None:
    with running(tmp_path) as parties:
        assert listening(parties.running["server"].pid) == {("127.0.0.1", parties.port)}
        for name in CLIENTS[:3]:
            assert listening(parties.running[name].pid) == set()


def test_another_user_of_the_machine_reads_nothing_and_reaches_nothing(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    script = """
import encodings.idna, os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
found = []
for root, folders, files in os.walk(sys.argv[1], onerror=lambda error: None):
    for name in files:
        try:
            open(os.path.join(root, name), "rb").close()
            found.append(os.path.join(root, name))
        except PermissionError:
            pass
    found += [os.path.join(root, name) for name in folders if os.access(os.path.join(root, name), os.W_OK)]
for pid in sys.argv[3:]:
    for entry in ("environ", "fd", "mem"):
        try:
            open(f"/proc/{pid}/{entry}").close() if entry != "fd" else os.listdir(f"/proc/{pid}/fd")
            found.append((pid, entry))
        except PermissionError:
            pass
with socket.create_connection(("127.0.0.1", int(sys.argv[2])), timeout=5) as plain:
    plain.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n")
    plain.shutdown(socket.SHUT_WR)
    try:
        answer = plain.recv(1000)
    except ConnectionResetError:
        answer = b""
    if answer and answer[0] != 21:
        found.append(answer)
print(found)
"""
    with running(tmp_path) as parties:
        private = [parties.kits, parties.out]
        pids = [str(process.pid) for process in parties.running.values()]
        for folder in private:
            command = [sys.executable, "-S", "-c", script, str(folder), str(parties.port), *pids]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.stdout.strip() == "[]", done.stdout + done.stderr
        for folder in (*private, *(parties.kits / "clients" / name / "state" for name in CLIENTS[:3])):
            for path in (folder, *folder.rglob("*")):
                assert not path.stat().st_mode & 0o077, path


def test_strangers_do_not_slow_a_federation_down(tmp_path: Path) -> None:
    with running(tmp_path) as parties:
        before = rate(parties)
        over = Event()
        half_open = [socket.create_connection(("127.0.0.1", parties.port)) for _ in range(600)]
        noise = Thread(target=make_noise, args=(parties, half_open, over))
        noise.start()
        try:
            during = rate(parties)
        finally:
            over.set()
            noise.join()
            for plain in half_open:
                plain.close()
        assert during > before / 2
        assert {member["name"] for member in parties.status()["clients"]} == set(CLIENTS[:3])


def make_noise(parties: Parties, half_open: list[socket.socket], over: Event) -> None:
    """Slow drips, plaintext, garbage, and TLS without a certificate: 20 of each a second."""
    context = ssl.create_default_context(cafile=str(parties.kits / "clients" / "client-1" / provision.ROOT))
    context.set_alpn_protocols(["h2"])
    for number in range(400):
        if over.wait(0.05):
            return
        with suppress(OSError):
            half_open[number].sendall(b"\x16")
        for octets in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(1000)):
            with suppress(OSError), socket.create_connection(("127.0.0.1", parties.port), timeout=1) as plain:
                plain.sendall(octets)
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", parties.port), timeout=1) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            secure.recv(1)


def test_a_certified_client_s_flood_costs_the_others_less_than_half(tmp_path: Path) -> None:
    with running(tmp_path) as parties:
        before, memory = rate(parties), resident_mb(parties.running["server"].pid)
        command = [str(Path(__file__).parent / "flooder.py"), str(parties.kits / "clients" / "client-4"), "12"]
        flooder = subprocess.Popen(["nice", sys.executable, *command])  # its own work is not the server's
        sleep(3.0)
        during = rate(parties)
        assert flooder.wait(30.0) == 0
        assert during > before / 2
        assert resident_mb(parties.running["server"].pid) < memory + 200
        log = parties.log("server")
        assert "client-4" in log
        assert len(log) < 100_000


def test_a_revoked_client_that_goes_on_trying_is_never_heard(tmp_path: Path) -> None:
    with running(tmp_path) as parties:
        rogue = Rogue(parties, "client-4")
        assert type(rogue.say(rogue.hello())).__name__ == "Welcome"
        provision.revoke(parties.kits, "client-4")
        parties.wait_for(
            lambda: "client-4 is hung up on: the certificate of client-4 was revoked" in parties.log("server")
        )
        for _ in range(20):
            with pytest.raises(Unreachable):
                rogue._client.ask(rogue.hello(), 1.0)
            sleep(0.05)
        rogue.close()
        parties.wait_for(lambda: "client-4" not in parties.there())


def test_a_client_that_answers_late_each_time_is_left_out(tmp_path: Path) -> None:
    class Slow(Rogue):
        def answer(self, octets: Octets) -> bytes:
            sleep(9.0)
            contact = messages.from_bytes(octets)
            assert isinstance(contact, Contact)
            return messages.to_bytes(Broken(contact.ticket))

    everybody = {"sampled": 4, "lr": 0.5, "wait": 0.05, "patience": 20.0}
    with running(tmp_path, clients={"contact_seconds": 30.0}, algorithm=everybody) as parties:
        before = rate(parties)
        slow, over = Slow(parties, "client-4"), Event()

        def greet() -> None:
            while not over.wait(2.0):
                with suppress(Unreachable):
                    slow._client.ask(slow.hello(), 5.0)

        thread = Thread(target=greet)
        slow.say(slow.hello())
        thread.start()
        parties.wait_for(lambda: "client-4 is left out" in parties.log("server"))
        assert "late answers" in parties.log("server")
        assert rate(parties) > before / 2
        over.set()
        thread.join()
        slow.close()


def test_a_second_server_shares_neither_the_port_nor_the_folder(tmp_path: Path) -> None:
    with running(tmp_path) as parties:
        copied = tmp_path / "copied"
        shutil.copytree(parties.kits / "server", copied, ignore=shutil.ignore_patterns("in-use"))
        command = [sys.executable, "-m", "quafl.cli", "server", str(copied), "--settings", str(parties.settings)]
        for out, complaint in (
            (parties.out, "is in use by another process; choose another --out"),
            (tmp_path / "other", f"port {parties.port} cannot be listened on; is the server running already"),
        ):
            done = subprocess.run(
                [*command, "--out", str(out)], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
            )
            assert done.returncode == 2
            assert complaint in done.stderr.replace("\n", " ")
            assert "Traceback" not in done.stderr
        before = parties.status()["round"]
        parties.wait_for(lambda: parties.status()["round"] > before + 20)


def test_two_clients_do_not_share_a_state(tmp_path: Path) -> None:
    with running(tmp_path) as parties:
        state = parties.kits / "clients" / "client-1" / "state"
        kit = parties.kits / "clients" / "client-4"
        command = [sys.executable, "-m", "quafl.cli", "client", str(kit), "--task", "quafl.tasks.demo:digits_of"]
        done = subprocess.run(
            [*command, "--state", str(state)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2
        assert "is in use by another process; choose another --state" in done.stderr.replace("\n", " ")


def test_a_copied_kit_takes_over_and_the_first_process_says_why_it_ends(tmp_path: Path) -> None:
    with running(tmp_path) as parties:
        thief = tmp_path / "thief"
        shutil.copytree(
            parties.kits / "clients" / "client-3", thief, ignore=shutil.ignore_patterns("in-use", "state", "*.txt")
        )
        first = parties.running["client-3"]
        parties.start_client("client-3", kit=thief)
        assert first.wait(30.0) == 1
        assert "another process with the same certificate has connected, from 127.0.0.1:" in parties.log("client-3")
        assert "two processes have the certificate of client-3, at 127.0.0.1:" in parties.log("server")


def test_a_passphrase_opens_a_party_s_key_and_nothing_else_does(tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    provision.init(folder, "localhost:1", ["north"], passphrase="correct horse")
    command = [sys.executable, "-m", "quafl.cli", "client", str(folder / "clients" / "north"), "--task", "no.where:f"]
    for passphrase, complaint in (
        (None, "set QUAFL_PASSPHRASE"),
        ("wrong", "passphrase"),
        ("correct horse", "No module named 'no'"),
    ):
        env = {**os.environ, **({"QUAFL_PASSPHRASE": passphrase} if passphrase else {})}
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2
        assert complaint in done.stderr.replace("\n", " ")
