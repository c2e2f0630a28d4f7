"""What the protocol knows of the network: somebody who carries octets between named parties.

A carrier proves who a party is, and hands over whole messages. `deploy.streams` carries them over gRPC, `deploy.flare`
inside a job of NVIDIA FLARE.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from threading import Thread
from typing import Any, Protocol, TypeVar

from quafl.protocol.carrier import Octets

T = TypeVar("T")


class Carrier(Protocol):
    """The server's way to its clients."""

    async def ask(self, name: str, octets: bytes, within: float) -> Octets:
        """That client's answer to a question, within so many seconds; or Unreachable."""


class Hears(Protocol):
    """The server's protocol, as its carrier sees it. The name is the one that the carrier has proved."""

    async def hear(self, name: str, octets: Octets) -> bytes:
        """The answer to what a client says by itself."""

    def room(self, name: str) -> int:
        """Octets of the largest message that this client may send unasked at the moment."""

    def gone(self, name: str) -> None:
        """Its connection has ended."""


class Loop:
    """An asyncio loop in a thread of its own, for code that is not asynchronous."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin it; its result comes with the future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for its result."""
        return self.spawn(work).result()

    def call(self, work: Callable[[], object]) -> None:
        """Do it there, soon."""
        self._loop.call_soon_threadsafe(work)

    def close(self) -> None:
        """End what is under way."""
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
