"""Federations within this process: the server's driver and the clients', joined by function calls instead of a
network. Everything else is what runs for real: threads, clocks and files."""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import uuid4

from waiting import wait_for

from quafl.codec.coders import coders_for
from quafl.codec.seams import Codec, Codecs
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm, Optimizer, Task
from quafl.deploy.carrier import Loop
from quafl.deploy.client import Driver as ClientDriver
from quafl.deploy.client import kept_in
from quafl.deploy.journal import Journal
from quafl.deploy.server import Coordinator, Driver, Goals, History
from quafl.protocol.carrier import Octets, Unreachable
from quafl.protocol.client import ClientSide, Terms
from quafl.protocol.layout import layout_of
from quafl.protocol.members import Limits
from quafl.protocol.server import ServerSide
from quafl.record.checkpoints import Checkpoints
from quafl.record.summary import HISTORY

PROMPT = Limits(silence=60.0, contact_seconds=5.0, prompt=5.0)  # on a machine that has other things to do


class Killed(BaseException):
    """A client's process ends, as by kill -9."""


class Client(Thread):
    """A client's process, so to speak."""

    def __init__(self, driver: ClientDriver) -> None:
        super().__init__(daemon=True)
        self.driver = driver
        self.well: bool | None = None  # how it has ended
        self.asked_to_stop = Event()
        self._killed = Event()
        self.start()

    def run(self) -> None:
        with suppress(Killed):
            self.well = self.driver.run(self.asked_to_stop, self._look)

    def _look(self) -> None:
        if self._killed.is_set():
            raise Killed

    @property
    def machine(self) -> ClientSide:
        return self.driver.machine

    @property
    def steps(self) -> int:
        """Completed ever."""
        return int(self.machine.status.get("steps", 0))

    def stop(self) -> None:
        """In good order."""
        self.asked_to_stop.set()
        self.join()

    def kill(self) -> None:
        self._killed.set()
        self.join()
        self.driver._pool.shutdown(wait=True, cancel_futures=True)  # the dead do not write


class Server(Thread):
    """A server's process, so to speak."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(daemon=True)
        self.coordinator = coordinator
        self.ends: list[bool] = []  # whether it has come to its end
        self.start()

    def run(self) -> None:
        self.ends.append(self.coordinator.run())

    @property
    def round(self) -> int:
        return self.coordinator.server.round

    def reach(self, round: int) -> None:
        wait_for(lambda: self.round >= round, otherwise=lambda: f"it is in round {self.round}")


@dataclass
class Federation:
    folder: Path
    terms: Terms
    limits: Limits = PROMPT
    clients: dict[str, Client] = field(default_factory=dict)
    asked: list[tuple[str, bytes]] = field(default_factory=list)  # what the server has sent to whom, unasked or not
    heard: list[tuple[str, bytes]] = field(default_factory=list)  # what clients have sent it
    stop: Event = field(default_factory=Event)
    text: dict[str, Any] = field(default_factory=lambda: {"run": "test"})  # what the server tells its clients
    loop: Loop = field(default_factory=lambda: Loop("carrier"))
    service: Driver | None = None
    server: "Server | None" = None

    # The server

    def serve(self, task: Task, goals: Goals) -> "Server":
        """The same, in a thread of its own."""
        self.server = Server(self.coordinator(task, goals))
        return self.server

    def coordinator(self, task: Task, goals: Goals) -> Coordinator:
        """A new server process, so to speak."""
        self.crash()
        self.stop = Event()
        algorithm, coders, _ = self.terms
        checkpoints, journal = Checkpoints(self.folder / "checkpoints"), Journal(self.folder / "journal")
        start = algorithm.start(*task.initial())
        layout = layout_of(task)
        machine = ServerSide(algorithm, coders, start, Generators(goals.seed), layout, self.text, self.limits)
        driver = Driver(machine, self, self.loop, journal)
        made_with, record = {"run": self.text["run"]}, History(self.folder / HISTORY)
        made = Coordinator(task, driver, goals, checkpoints, journal, record, made_with, lambda row: None, self.stop)
        kept = checkpoints.newest()
        if kept is not None:
            made.restore(kept)
        self.service = driver
        return made

    def crash(self) -> None:
        """The server's process ends, and saves nothing more."""
        self.stop.set()
        if self.server is not None:
            self.server.join(20.0)
            self.server = None
        if self.service is not None:
            service, self.service = self.service, None
            service.close()

    @property
    def machine(self) -> ServerSide:
        assert self.service is not None
        return self.service.machine

    # Clients

    def join(self, name: str, task: Task, *, checkpoint_seconds: float = 1e6, **options: Any) -> Client:
        """A new client process, so to speak."""
        folder = self.folder / name
        kept, reports = kept_in(folder)
        machine = ClientSide(name, task, lambda text: self.terms, uuid4().hex, kept=kept, reports=reports, **options)
        driver = ClientDriver(
            machine,
            folder,
            lambda octets, within: self.to_server(name, octets, within),
            checkpoint_seconds=checkpoint_seconds,
        )
        self.clients[name] = Client(driver)
        return self.clients[name]

    # The carrier

    async def ask(self, name: str, octets: bytes, within: float) -> Octets:
        """A client's answer."""
        self.asked.append((name, octets))
        client = self.clients.get(name)
        if client is None or not client.is_alive():
            raise Unreachable("cannot be reached")
        try:
            answer = await asyncio.wait_for(asyncio.to_thread(client.driver.hear, octets), within)
        except TimeoutError as error:
            raise Unreachable("did not answer") from error
        self.heard.append((name, answer))
        return answer

    def to_server(self, name: str, octets: Octets, within: float = 30.0) -> Octets:
        """The server's answer."""
        service = self.service
        if service is None:
            raise Unreachable("cannot be reached")
        self.heard.append((name, bytes(octets)))
        try:
            answer = self.loop.spawn(service.hear(name, octets)).result(within)
        except TimeoutError as error:
            raise Unreachable("did not answer") from error
        self.asked.append((name, answer))
        return answer


@contextmanager
def federation(
    folder: Path, algorithm: Algorithm, codec: Codec | Codecs, optimizer: Optimizer, limits: Limits = PROMPT
) -> Iterator[Federation]:
    made = Federation(folder, Terms(algorithm, coders_for(algorithm, codec), optimizer), limits)
    try:
        yield made
    finally:
        made.crash()
        for client in made.clients.values():
            client.kill()
        made.loop.close()


@contextmanager
def full_disk(octets: int = 0) -> Iterator[None]:
    """Within the block, no file of this process grows beyond so many octets: a real OSError comes of it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (octets, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
