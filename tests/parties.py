"""Real processes: a server and clients of a federation on loopback, started and ended by their ids."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from socket import socket
from typing import Any

import tomli_w
from waiting import wait_for

from quafl.deploy import provision

MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address in IPv6
TASK = "quafl.tasks.demo:digits_of"
CLIENTS = [f"client-{number}" for number in range(1, 5)]


def free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Parties:
    """A provisioned federation, and whoever has been started of it; all end with the `with` block."""

    def __init__(self, folder: Path, *, host: str = "localhost", task: str = TASK, **sections: dict[str, Any]) -> None:
        self.folder, self.out = folder, folder / "out"
        self.kits = folder / "federation"
        self.port = free_port()
        provision.init(self.kits, f"{host}:{self.port}", CLIENTS)
        self.settings = folder / "fed.toml"
        defaults: dict[str, dict[str, Any]] = {
            "task": {"make": task},
            "clients": {"start_with": 2, "silence": 6.0, "contact_seconds": 10.0},
            "algorithm": {"sampled": 2, "lr": 0.5, "wait": 0.05, "patience": 20.0},
            "run": {"every": 1.0, "until": 300.0, "checkpoint_seconds": 1.0},
        }
        if "algorithm" in sections:
            del defaults["algorithm"]
        merged = {name: {**defaults.get(name, {}), **sections.get(name, {})} for name in {*defaults, *sections}}
        self.settings.write_text(tomli_w.dumps(merged))
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Parties":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait()

    def start_server(self, under: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        kit = str(self.kits / "server")
        return self._start("server", ["server", kit, "--settings", str(self.settings), "--out", str(self.out)], under)

    def start_client(
        self, name: str, *options: str, kit: Path | None = None, task: str = TASK, under: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        where = str(kit or self.kits / "clients" / name)
        return self._start(name, ["client", where, "--task", task, "--step-seconds", "0.01", *options], under)

    def _start(self, name: str, arguments: list[str], under: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*under, sys.executable, "-m", "quafl.cli", *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                cwd=self.folder,
            )
        return self.running[name]

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].wait()

    def terminate(self, name: str) -> int:
        self.running[name].send_signal(signal.SIGTERM)
        return self.running[name].wait(30.0)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def status(self) -> dict[str, Any]:
        try:
            status: dict[str, Any] = json.loads((self.out / "status.json").read_text())
        except FileNotFoundError:
            return {"round": 0, "score": {}, "clients": []}
        return status

    def there(self) -> set[str]:
        return {member["name"] for member in self.status()["clients"] if member["there"]}

    def contacts(self, name: str) -> int:
        return next((int(member["contacts"]) for member in self.status()["clients"] if member["name"] == name), 0)

    def accuracy(self) -> float:
        return float(self.status()["score"].get("accuracy") or 0.0)

    def wait_for(self, holds: Callable[[], bool], seconds: float = 60.0) -> None:
        wait_for(holds, seconds, glance=0.1, otherwise=self._described)

    def _described(self) -> str:
        logs = "\n".join(f"--- {name}\n{self.log(name)[-1500:]}" for name in self.running)
        return f"{self.status()}\n{logs}"


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports at which a process listens."""
    own = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            own.add(entry.readlink().name.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table, width in (("tcp", 8), ("tcp6", 32)):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and fields[9] in own:
                address, port = fields[1].split(":")
                octets = bytes.fromhex(address)
                words = b"".join(octets[i : i + 4][::-1] for i in range(0, width // 2, 4))
                found.add((str(ip_address(words.removeprefix(MAPPED))), int(port, 16)))
    return found


def resident_mb(pid: int) -> float:
    """Memory that a process has."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) * 1024 / 1e6
