"""Federations within this process: the server's fleet and the clients' workers, joined by function calls instead of a
network. Everything else is what runs for real."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from quafl.codec.directions import codecs_for
from quafl.core.seams import Algorithm, Codec, Optimizer, ServerState, Task
from quafl.deploy.carrier import Loop, Octets, Unreachable
from quafl.deploy.clock import WallClock
from quafl.deploy.coordinator import Coordinator, Plan
from quafl.deploy.fleet import NetworkFleet
from quafl.deploy.journal import Journal
from quafl.deploy.members import Limits
from quafl.deploy.worker import Terms, Worker
from quafl.record.checkpoints import Checkpoints

PROMPT = Limits(silence=60.0, contact_seconds=5.0)


@dataclass
class Federation:
    folder: Path
    terms: Terms
    limits: Limits = PROMPT
    workers: dict[str, Worker] = field(default_factory=dict)
    asked: list[tuple[str, bytes]] = field(default_factory=list)  # what the server has sent to whom
    stop: Event = field(default_factory=Event)
    run: str = "test"
    loop: Loop = field(default_factory=lambda: Loop("carrier"))
    fleet: NetworkFleet = field(default=None)  # type: ignore[assignment]

    def serve(self, start: ServerState) -> NetworkFleet:
        """A new server process, so to speak."""
        self.stop = Event()
        self.crash()
        self.fleet = NetworkFleet(
            self,
            self.loop,
            self.terms.algorithm,
            self.terms.codecs,
            start,
            Journal(self.folder / "journal.bin"),
            {"run": self.run},
            self.stop,
            self.limits,
        )
        return self.fleet

    def crash(self) -> None:
        """The server's process ends, as if the power had failed."""
        if self.fleet is not None:
            self.fleet.close()

    def coordinator(self, task: Task, plan: Plan) -> Coordinator:
        fleet = self.serve(ServerState(*task.initial()))
        checkpoints = Checkpoints(self.folder / "checkpoints")
        coordinator = Coordinator(
            task,
            self.terms.algorithm,
            self.terms.codecs,
            plan,
            fleet,
            WallClock(self.stop),
            checkpoints,
            {"run": self.run},
            lambda row: None,
        )
        kept = checkpoints.newest()
        if kept is not None:
            coordinator.restore(kept)
        return coordinator

    def join(self, name: str, task: Task, **options: Any) -> Worker:
        """A new client process, so to speak."""
        worker = Worker(
            task,
            self.folder / name,
            lambda text: self.terms,
            lambda octets, within: self.to_server(name, octets),
            **{"checkpoint_seconds": 1e6, **options},
        )
        self.workers[name] = worker
        worker.begin()
        worker.say_hello()
        return worker

    async def ask(self, name: str, octets: bytes, within: float) -> Octets:
        """The carrier: a client's answer."""
        self.asked.append((name, octets))
        if name not in self.workers:
            raise Unreachable("cannot be reached")
        try:
            return await asyncio.wait_for(asyncio.to_thread(self.workers[name].hear, octets), within)
        except TimeoutError as error:
            raise Unreachable("did not answer") from error

    def to_server(self, name: str, octets: Octets) -> Octets:
        return self.loop.run(self.fleet.hear(name, octets))


@contextmanager
def federation(
    folder: Path, algorithm: Algorithm, codec: Codec, optimizer: Optimizer, limits: Limits = PROMPT
) -> Iterator[Federation]:
    made = Federation(folder, Terms(algorithm, codecs_for(algorithm, codec), optimizer), limits)
    try:
        yield made
    finally:
        made.stop.set()
        for worker in made.workers.values():
            worker.end()
        made.crash()
        made.loop.close()
