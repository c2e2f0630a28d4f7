"""Measurements of the real federation, on loopback: `benchmarks/federation.py [latency|rounds|memory|crowd|page] …`.

Each part starts a server and clients as processes of their own, under mutual TLS. Beside the latency of a contact is
that of a bare grpcio stream with such certificates and the same number of octets, measured in the same run.
"""

import asyncio
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from socket import socket
from threading import Event
from time import perf_counter, process_time, sleep
from typing import Any

import grpc
import torch

from quafl import Lattice, QuAFL, sgd
from quafl.codec import Identity
from quafl.codec.coders import coders_for
from quafl.codec.seams import Codec
from quafl.core.conversation import Await, Clients, Look, Replies, Round, Tell
from quafl.core.quafl import Down, Up
from quafl.core.quafl import Server as QuAFLServer
from quafl.core.randomness import Generators
from quafl.deploy import provision
from quafl.deploy.carrier import Hears, Loop
from quafl.deploy.client import Driver as ClientDriver
from quafl.deploy.journal import Journal
from quafl.deploy.server import Driver
from quafl.deploy.streams import GrpcClient, GrpcServer
from quafl.protocol import messages
from quafl.protocol.carrier import SERVER, Octets, Unreachable
from quafl.protocol.client import ClientSide, Terms
from quafl.protocol.layout import digest_of, layout_of
from quafl.protocol.members import Limits
from quafl.protocol.messages import Contact, Finished, Hello, Received, Reply, Welcome, largest_message
from quafl.protocol.server import ServerSide
from quafl.run.versions import versions
from quafl.tasks.local import Local
from quafl.tasks.models import mlp

RESULTS = Path(__file__).parents[1] / "docs" / "results"
RECORD = RESULTS / "federation.json"
SIZES = {"1.5 MB": 1_500_000, "25 MB": 25_000_000}
CONTACTS = {"1.5 MB": 60, "25 MB": 20}
WARM = 3  # contacts before the clock runs
PATIENCE = 120.0  # seconds for a contact
ECHO = b"ECHO"  # what begins so is sent back as it is
BEGIN, END = b"BEGI", b"END."  # what is measured in between
CROWD, HOSTS = 2000, 4  # clients that are connected at the same time, processes that they share


# The parties


def network(octets: int, bits: int) -> torch.nn.Module:
    """Two layers whose packed parameters have about so many octets."""
    parameters = octets * 8 // bits
    return mlp(784, max(1, (parameters - 10) // 795), 10, seed=0)


class Contacts(QuAFL):
    """A round is one whole contact: encoded, there, back, checked, journalled and decoded. Clients take turns, and the
    server's model stays."""

    def round(self, server: QuAFLServer, rng: Generators) -> Round[QuAFLServer]:
        clients: Clients = yield Look()
        to = clients.present[server.round % len(clients.present)][None]
        nobody = torch.tensor(inf, dtype=torch.float64)
        down = Down(model=server.model, statistics=server.buffers, slowest=nobody)
        yield Tell(to, down, replace(server, expected={"model": 1.0}))
        replies: Replies = yield Await(1, within=PATIENCE, since=server.round)
        if not len(replies.senders):
            raise RuntimeError(f"client {int(to)} has not answered")
        return replace(server, round=server.round + 1)


def terms_of(options: dict[str, Any]) -> Terms:
    codec: Codec = Identity() if options["bits"] == 32 else Lattice(bits=options["bits"])
    made = QuAFL if options["measure"] == "rounds" else Contacts
    algorithm = made(sampled=options.get("sampled", 1), local_steps=options.get("steps", 10**9), patience=60.0)
    return Terms(algorithm, coders_for(algorithm, codec), sgd(0.01))


def local_of(options: dict[str, Any]) -> Local:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(256, 784, generator=generator), torch.randint(0, 10, (256,), generator=generator)
    return Local(network(options["octets"], options["bits"]), data, batch_size=32)


class Gated:
    """A task whose gradients can be held back."""

    def __init__(self, local: Local) -> None:
        self._task = local.build()
        self.gate = Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def gradient(self, model: Any, buffers: Any, batch: Any) -> Any:
        self.gate.wait()
        return self._task.gradient(model, buffers, batch)


class Client:
    """Idle unless told to be busy."""

    def __init__(self, kit: provision.Kit, options: dict[str, Any]) -> None:
        seconds = 0.0 if options.get("busy") else options.get("step_seconds", 1e6)
        self._memory = Memory()
        self._options = options
        self._task = Gated(local_of(options))
        self._carrier: Any = BareClient(kit) if options.get("bare") else GrpcClient(Loop("carrier"), kit.path, None)
        machine = ClientSide(
            kit.name, self._task, lambda text: terms_of(options), os.urandom(16).hex(), step_seconds=seconds
        )
        self._driver = ClientDriver(machine, kit.path / "state", self._carrier.ask, checkpoint_seconds=1e6)

    def run(self) -> None:
        self._carrier.start(self._driver.machine.session, self.hear, largest=self._driver.largest)
        self._driver.run(Event())
        os._exit(0)

    def hear(self, octets: Octets) -> bytes:
        kind = bytes(octets[:4])
        if kind == ECHO:
            return octets  # type: ignore[return-value]
        if kind == BEGIN:
            if not self._options["busy"]:
                self._task.gate.clear()  # it has taken its steps, and takes the next ones when this has been measured
            self._memory = Memory()
            return BEGIN
        if kind == END:
            self._task.gate.set()
            return json.dumps({"grown": self._memory.grown(), "cpu": process_time()}).encode()
        return self._driver.hear(octets)


class Server:
    """Runs one measurement, and leaves its result in a file."""

    def __init__(self, kit: provision.Kit, options: dict[str, Any]) -> None:
        self._kit, self._options = kit, options
        algorithm, coders, _ = terms_of(options)
        task = local_of(options).build()
        start = algorithm.start(*task.initial())
        limits = Limits(
            clients=10_000, start_with=options["clients"], silence=30.0, contact_seconds=PATIENCE, far=inf, slow=1e6
        )
        machine = ServerSide(algorithm, coders, start, Generators(0), layout_of(task), {"run": "benchmark"}, limits)
        self.largest = largest_message(len(start.model), len(start.buffers))
        self.loop = Loop("carrier")
        self.carrier: Any = BareServer(self.loop, kit) if options.get("bare") else GrpcServer(self.loop, kit, None)
        self._journal = Journal(kit.path / "journal")
        self.driver = Driver(machine, self.carrier, self.loop, self._journal)
        self._begun = False

    def run(self) -> None:
        self.carrier.start(self.driver, largest=self.largest)
        try:
            while not self.driver.call(lambda machine: machine.can_start()):
                sleep(0.05)
            result = getattr(self, self._options["measure"])()
            (self._kit.path / "result.json").write_text(json.dumps(result))
        finally:
            self.driver.call(lambda machine: machine.finish())
            sleep(0.5)
        os._exit(0)

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.driver.machine.members]

    def _ask(self, name: str, octets: bytes, within: float) -> Octets:
        answer: Octets = self.loop.run(self.carrier.ask(name, octets, within))
        return answer

    def round(self) -> None:
        """The next round of the algorithm, from its beginning to its end."""
        begun, self._begun = self._begun, True
        self.driver.call(lambda machine: machine.go_on() if begun else machine.begin())
        self.driver.reached.get(timeout=2 * PATIENCE)
        failure = self.driver.machine.failure
        if failure is not None:
            raise failure

    def forget(self) -> None:
        """What was written down, as when a checkpoint has been made."""
        self.driver.checkpointed(self._journal.number)

    def warm_up(self) -> None:
        for _ in range(WARM * min(len(self.names), 20)):
            self.round()

    def latency(self) -> dict[str, Any]:
        """Contacts, and the same number of octets sent there and back by the engine alone, in turns; and their CPU."""
        self.warm_up()
        names = self.names
        body = ECHO + os.urandom(self._options["octets"])
        acts: dict[str, Callable[[int], object]] = {
            "contact": lambda number: self.round(),
            "echo": lambda number: self._ask(names[number % len(names)], body, 60.0),
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in acts}
        cpu = dict.fromkeys(acts, 0.0)
        for turn in range(2):
            for kind, act in acts.items():
                before = self._cpu(names)
                for number in range(self._options["contacts"]):
                    began = perf_counter()
                    act(turn * self._options["contacts"] + number)
                    seconds[kind].append(perf_counter() - began)
                    self.forget()
                cpu[kind] += self._cpu(names) - before
        return {**seconds, "cpu_share": cpu["echo"] / cpu["contact"]}

    def memory(self) -> dict[str, Any]:
        self.warm_up()
        name = self.names[0]
        here, there = [], []
        for _ in range(4):
            sleep(3.0)  # the client takes its step
            self._ask(name, BEGIN, 30.0)
            memory = Memory()
            self.round()
            here.append(memory.grown())
            there.append(json.loads(bytes(self._ask(name, END, 30.0)))["grown"])
        return {
            "model_mb": 4 * len(self.driver.machine.server.model) / 1e6,
            "server_mb": max(here),
            "client_mb": max(there),
        }

    def rounds(self) -> dict[str, Any]:
        names, began = self.names, perf_counter()
        before = self._cpu(names)
        while perf_counter() - began < self._options["seconds"]:
            self.round()
            self.forget()
        seconds, machine = perf_counter() - began, self.driver.machine
        return {
            "rounds_per_minute": 60 * machine.server.round / seconds,
            "contacts_per_second": machine.totals.contacts / seconds,
            "lost": machine.totals.lost,
            "cpu_ms_per_contact": 1e3 * (self._cpu(names) - before) / machine.totals.contacts,
        }

    def crowd(self) -> dict[str, Any]:
        """Contacts of a few of very many."""
        self.warm_up()
        seconds = []
        for _ in range(self._options["contacts"]):
            began = perf_counter()
            self.round()
            seconds.append(perf_counter() - began)
            self.forget()
        return {
            "connected": len(self.names),
            "contact": seconds,
            "memory_mb": _memory("VmRSS"),
            "threads": len(list(Path("/proc/self/task").iterdir())),
        }

    def _cpu(self, names: list[str]) -> float:
        """Seconds that the server and these clients have computed."""
        there = (json.loads(bytes(self._ask(name, END, 30.0)))["cpu"] for name in names)
        return process_time() + float(sum(there))


class Memory:
    """How many megabytes this process has grown by, at most, since."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _memory("VmRSS")

    def grown(self) -> float:
        return _memory("VmHWM") - self._before


def _memory(what: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024 / 1e6


# Running them


def measure(options: dict[str, Any], *, clients: int) -> dict[str, Any]:
    """A server and its clients, until the measurement is done."""
    options = {**options, "clients": clients}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "federation"
        names = [f"client-{number}" for number in range(clients)]
        provision.init(root, f"localhost:{free_port()}", names)
        kits = [root / SERVER, *(root / provision.CLIENTS / name for name in names)]
        commands = [["party", str(kit), json.dumps(options)] for kit in kits]
        return _run(commands, Path(folder), kits[0] / "result.json", options.get("limit", 300.0))


def _run(commands: list[list[str]], folder: Path, result: Path, limit: float) -> dict[str, Any]:
    """Processes of this file; the first is the server, which leaves the result."""
    processes = []
    try:
        for number, arguments in enumerate(commands):
            with (folder / f"{number}.log").open("wb") as log:
                command = [sys.executable, __file__, *arguments]
                processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        processes[0].wait(limit)
        assert result.exists(), (folder / "0.log").read_text()[-3000:]
        measured: dict[str, Any] = json.loads(result.read_text())
        return measured
    finally:
        for process in processes:
            process.kill()
            process.wait()


def party(kit_path: str, text: str) -> None:
    kit, options = provision.open_kit(Path(kit_path)), json.loads(text)
    (Server if kit.is_server else Client)(kit, options).run()


def free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# The floor: a bare stream with the same certificates, in place of our carrier

_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class BareServer:
    """The server's end: what it asks goes down a stream, and the answer comes up the same one."""

    def __init__(self, loop: Loop, kit: provision.Kit) -> None:
        self._loop, self._kit = loop, kit
        self._down: queue.Queue[bytes] = queue.Queue()
        self._up: queue.Queue[bytes] = queue.Queue()

    def start(self, service: Hears, *, largest: int) -> None:
        def stream(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            def take() -> None:
                for answer in requests:
                    self._up.put(answer)

            threading.Thread(target=take, daemon=True).start()
            yield from iter(self._down.get, None)

        def say(octets: bytes, context: Any) -> bytes:
            return self._loop.run(service.hear("client-0", octets))

        handlers = {
            "ask": grpc.stream_stream_rpc_method_handler(stream),
            "say": grpc.unary_unary_rpc_method_handler(say),
        }
        server = grpc.server(ThreadPoolExecutor(8), options=_OPTIONS)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bare", handlers)])
        key, certificate, authority = self._kit.credentials()
        credentials = grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
        server.add_secure_port(f"localhost:{self._kit.port}", credentials)
        server.start()
        self._server = server

    async def ask(self, name: str, octets: bytes, within: float) -> Octets:
        self._down.put(octets)
        return await asyncio.to_thread(self._up.get, timeout=within)


class BareClient:
    """The client's end."""

    def __init__(self, kit: provision.Kit) -> None:
        key, certificate, authority = kit.credentials()
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        self._channel = grpc.secure_channel(kit.target, credentials, options=_OPTIONS)
        self._say = self._channel.unary_unary("/bare/say")

    def start(self, session: str, hear: Callable[[Octets], bytes], *, largest: int) -> None:
        grpc.channel_ready_future(self._channel).result(60.0)
        answers: queue.Queue[Octets] = queue.Queue()

        def answer() -> None:
            for octets in self._channel.stream_stream("/bare/ask")(iter(answers.get, None)):
                answers.put(hear(octets))

        threading.Thread(target=answer, daemon=True).start()

    def ask(self, octets: bytes, within: float) -> Octets:
        answer: bytes = self._say(octets, timeout=within)
        return answer


# A crowd: many clients that share a process, and answer what an honest one could


class Simulated(GrpcClient):
    """Answers in the loop, without a thread."""

    async def _hear(self, octets: Octets) -> bytes:
        return self._hear_in_thread(octets)


def host(root: str, text: str, *names: str) -> None:
    """So many clients in this process."""
    options = json.loads(text)
    task = local_of(options).build()
    model, buffers = task.initial()
    coder, rng = terms_of(options).coders.up, torch.Generator().manual_seed(0)
    report = Up(report=model, statistics=buffers, speed=torch.tensor(1.0))
    body = b"".join(messages.parcel_parts(coder.pack(report, rng, {"report": 1.0}), [1.0]))
    loop, over = Loop("carrier"), Event()

    def hear(octets: Octets) -> bytes:
        match messages.from_bytes(octets):
            case Contact() as contact:
                return messages.to_bytes(Reply(contact.ticket, 1, body))
            case Finished():
                over.set()
        return messages.to_bytes(Received())

    clients = []
    for name in names:
        client = Simulated(loop, Path(root) / provision.CLIENTS / name, None)
        client.start(os.urandom(16).hex(), hear, largest=largest_message(len(model), len(buffers)))
        clients.append((client, os.urandom(16).hex()))
        sleep(0.005)
    seconds = 2.0
    while not over.is_set():
        began = perf_counter()
        for client, session in clients:
            hello = {"layout": digest_of(layout_of(task)), "session": session, "leaving": False}
            with suppress(Unreachable):
                match messages.from_bytes(client.ask(messages.to_bytes(Hello(messages.as_text(hello))), 30.0)):
                    case Welcome(welcome):
                        seconds = messages.from_text(welcome)["hello_seconds"]
        over.wait(max(0.0, seconds - (perf_counter() - began)))
    os._exit(0)


# What is measured


def latency() -> dict[str, Any]:
    """Both ways of carrying, in turns."""
    found: dict[str, Any] = {}
    for size, octets in SIZES.items():
        found[size] = {}
        for bits in (32, 4):
            for busy in (False, True):
                options = {"measure": "latency", "octets": octets, "bits": bits, "busy": busy}
                turns: dict[str, list[float]] = {}
                shares = []
                for _ in range(2):
                    for carrier in ("bare", "ours"):
                        ours = measure({**options, "contacts": CONTACTS[size], "bare": carrier == "bare"}, clients=1)
                        for kind in ("echo", "contact"):
                            turns.setdefault(f"{carrier} {kind}", []).extend(ours[kind])
                        shares += [ours["cpu_share"]] if carrier == "ours" else []
                middle = {kind: statistics.median(seconds) for kind, seconds in turns.items()}
                found[size][f"{bits} bits, {'busy' if busy else 'idle'}"] = {
                    **{kind: _ms(seconds) for kind, seconds in turns.items()},
                    "octets_ratio": middle["ours echo"] / middle["bare echo"],
                    "contact_ratio": middle["ours contact"] / middle["bare contact"],
                    "cpu_share": statistics.mean(shares),
                }
                print(size, bits, busy, found[size][f"{bits} bits, {'busy' if busy else 'idle'}"], flush=True)
    return found


def _ms(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"p50": 1e3 * statistics.median(ordered), "p95": 1e3 * ordered[int(0.95 * (len(ordered) - 1))]}


def rounds() -> dict[str, Any]:
    found = {}
    for clients in (4, 8, 16):
        options = {
            "measure": "rounds",
            "octets": 13_000,  # MNIST's network at 4 bits
            "bits": 4,
            "sampled": 4,
            "steps": 5,
            "step_seconds": 0.05,
            "seconds": 30.0,
        }
        found[str(clients)] = measure(options, clients=clients)
        print(clients, found[str(clients)], flush=True)
    return found


def memory() -> dict[str, Any]:
    found = {}
    for bits in (4, 32):
        for busy in (False, True):
            options = {"measure": "memory", "octets": 100_000_000 * bits // 32, "bits": bits, "memory": True}
            steps = {"steps": 10**9 if busy else 1, "step_seconds": 0.0, "busy": busy}
            result = measure({**options, **steps}, clients=1)
            for end in ("server", "client"):
                result[f"{end}_ratio"] = result[f"{end}_mb"] / result["model_mb"]
            kind = f"{bits} bits, {'busy' if busy else 'idle'}"
            found[kind] = result
            print(kind, result, flush=True)
    return found


def crowd() -> dict[str, Any]:
    """A contact's latency with one simulated client connected, and with very many."""
    found = {}
    for clients, hosts in ((1, 1), (CROWD, HOSTS)):
        options = {"measure": "crowd", "octets": 13_000, "bits": 4, "contacts": 500, "clients": clients}
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "federation"
            names = [f"client-{number}" for number in range(clients)]
            provision.init(root, f"localhost:{free_port()}", names)
            text = json.dumps(options)
            commands = [["party", str(root / SERVER), text]]
            commands += [["host", str(root), text, *names[number::hosts]] for number in range(hosts)]
            measured = _run(commands, Path(folder), root / SERVER / "result.json", 400.0)
        found[str(clients)] = {**measured, "contact": _ms(measured["contact"])}
        print(clients, found[str(clients)], flush=True)
    return found


HEADING = (
    *("message", "", "octets, bare", "octets, ours", "ratio", "(cells)"),
    *("contact, bare", "contact, ours", "ratio", "(cells)", "carrier's CPU", "(cells)"),
)
PAGE = """# The real federation, measured

Loopback, mutual TLS, a process for each party. Our carrier and a bare grpcio stream with the same kind of
certificates, which does nothing but carry octets, are measured in turns in one run. `make bench-federation` runs
all parts; each one here was made by the command beside it. Beside them are the figures of NVIDIA FLARE's cells,
which carried the messages before, as they were measured on 2026-11-15 in the same way: compare ratios, not
milliseconds. Raw numbers: [federation.json](federation.json).

{made}

## Latency

*Octets*: so many sent to a client and back, by the carrier alone. *Contact*: the whole of it, with one client: the
server encodes, the client freezes its state, decodes, encodes its answer and adopts, the server checks, journals
and decodes. At 32 bits a model has a parameter for every 4 octets, at 4 bits eight times as many, and the codec
computes with all of them. Busy trainers take local steps all the time, on the same two cores. Milliseconds, p50 /
p95; ratios are of p50s, to the bare stream's.

{heading}
{latency}

The aim is a ratio of at most 1.3 for a contact with idle trainers. The carrier's CPU is that of the octets over
that of the contact, of server and client together.

## Rounds

QuAFL, 4 bits, MNIST's network (13 kB a message), s = 4, K = 5, a step every 50 ms, no waiting between rounds: as
fast as it goes on two cores that all processes share.

| clients | rounds a minute | (cells) | contacts a second | CPU of a contact, both ends | (cells) | lost |
|---|---|---|---|---|---|---|
{rounds}

## Many clients

Simulated clients (no training: each sends what an honest one could) in four processes, one connection with a
certificate of its own each; contacts with one of them at a time, 13 kB each way. Before, {few} was the most: a
thread a client.

| connected | contact, p50 / p95 | server's memory | server's threads |
|---|---|---|---|
{crowd}

## Memory

How much a process grows, at most, during a contact with a model of 100 MB (25 million parameters), over the model's
size; the carrier's buffers included; the largest of four contacts. The aim is at most 2. At 32 bits the message
itself is as large as the model, and the server has one of each direction at a time. A busy client's training takes
memory of its own at the same time.

| | server | (cells) | client | (cells) |
|---|---|---|---|---|
{memory}
"""


def page(record: dict[str, Any]) -> str:
    latencies, rates, memories, crowds = (record[part]["measured"] for part in PARTS)
    before = {part: made["measured"] for part, made in record["cells"].items()}
    return PAGE.format(
        few=100,
        heading=_row(*HEADING) + "\n" + _row(*("---" for _ in HEADING)),
        made="\n".join(f"- {part}: {_made(record[part])}" for part in PARTS),
        latency="\n".join(
            _row(
                size,
                kind,
                _pair(found["bare echo"]),
                _pair(found["ours echo"]),
                f"**{found['octets_ratio']:.2f}**",
                f"{before['latency'][size][kind]['octets_ratio']:.2f}",
                _pair(found["bare contact"]),
                _pair(found["ours contact"]),
                f"**{found['contact_ratio']:.2f}**",
                f"{before['latency'][size][kind]['contact_ratio']:.2f}",
                f"{found['cpu_share']:.0%}",
                f"{before['latency'][size][kind]['engine_cpu_share']:.0%}",
            )
            for size, kinds in latencies.items()
            for kind, found in kinds.items()
        ),
        rounds="\n".join(
            _row(
                clients,
                f"{found['rounds_per_minute']:,.0f}",
                f"{before['rounds'][clients]['rounds_per_minute']:,.0f}",
                f"{found['contacts_per_second']:.0f}",
                f"{found['cpu_ms_per_contact']:.1f} ms",
                f"{before['rounds'][clients]['cpu_ms_per_contact']:.1f} ms",
                str(found["lost"]),
            )
            for clients, found in rates.items()
        ),
        crowd="\n".join(
            _row(
                f"{found['connected']:,}",
                f"{_pair(found['contact'])} ms",
                f"{found['memory_mb']:.0f} MB",
                str(found["threads"]),
            )
            for found in crowds.values()
        ),
        memory="\n".join(
            _row(
                kind,
                f"{found['server_ratio']:.2f}",
                f"{before['memory'][kind]['server_ratio']:.2f}",
                f"{found['client_ratio']:.2f}",
                f"{before['memory'][kind]['client_ratio']:.2f}",
            )
            for kind, found in memories.items()
        ),
    )


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _made(part: dict[str, Any]) -> str:
    made = part["versions"]
    return f"`{part['command']}`, {made['platform']}, torch {made['torch']}, {part['date']}"


def _pair(found: dict[str, float]) -> str:
    return f"{found['p50']:.1f} / {found['p95']:.1f}"


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "latency": latency,
    "rounds": rounds,
    "memory": memory,
    "crowd": crowd,
}


def main() -> object:
    if sys.argv[1:2] == ["party"]:
        party(*sys.argv[2:])
    if sys.argv[1:2] == ["host"]:
        host(*sys.argv[2:])
    unknown = [part for part in sys.argv[1:] if part not in (*PARTS, "page")]
    if unknown:
        print(__doc__)
        return 0 if unknown[0] in ("-h", "--help") else f"{unknown[0]} is none of {', '.join(PARTS)}, page"
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for part in sys.argv[1:] or [*PARTS, "page"]:
        if part == "page":
            (RESULTS / "federation.md").write_text(page(record))
        else:
            made = {"versions": versions(), "date": datetime.now(UTC).date().isoformat()}
            record[part] = {**made, "command": f"python benchmarks/federation.py {part}", "measured": PARTS[part]()}
            RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return None


if __name__ == "__main__":
    sys.exit(main())  # type: ignore[arg-type]
