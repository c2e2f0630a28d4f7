"""Questions and answers over one stream, both ways at once (docs/wire.md): in pieces, so that a greeting is never stuck
behind a model, and within bounds, so that no peer decides how much memory this end uses."""

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from time import monotonic
from typing import Any, TypeAlias

from quafl.core.seams import WireError
from quafl.deploy.carrier import Octets, Unreachable

PIECE = 512 * 1024  # octets of a message in one frame
LARGEST_FRAME = PIECE + 64
AT_ONCE = 4  # questions of one peer that are answered at the same time; the next one is read when one is done
UNREAD = 8  # questions that may wait until the peer reads
PER_SECOND, BURST = 100.0, 200.0  # questions of one peer; more are read later

ASK, ANSWER, GIVE_UP = range(3)
_FRAME = struct.Struct("<BxxxIQ")  # kind, number of the question, octets of the whole message
_ZEROS = slice(1, 4)

Hear: TypeAlias = Callable[[Octets], Awaitable[bytes]]


class Bucket:
    """Lets `rate` things a second through, and `burst` at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, monotonic()

    def take(self) -> float:
        """Take one; the seconds until it may pass."""
        now = monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) - 1
        self._at = now
        return max(0.0, -self._left / self._rate)

    def has(self) -> bool:
        """Take one, if it may pass at once."""
        if self.take() == 0:
            return True
        self._left += 1
        return False


class Line:
    """One end of a stream. `write` sends a frame; `hear` answers a question of the peer's; `room` is how many octets
    its next question may have, `largest` how many an answer may have."""

    def __init__(
        self, write: Callable[[bytes], Awaitable[None]], hear: Hear, room: Callable[[], int], largest: int
    ) -> None:
        self._write_frame, self._hear, self._room, self._largest = write, hear, room, largest
        self._writing = asyncio.Lock()
        self._asked = 0
        self._awaited: dict[int, asyncio.Future[Octets]] = {}
        self._coming: dict[tuple[int, int], bytearray] = {}  # messages of which some pieces have arrived
        self._reserved: dict[int, int] = {}  # octets that the questions among them will have
        self._questions = Bucket(PER_SECOND, BURST)
        self._answering = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, octets: bytes, within: float) -> Octets:
        """The peer's answer, or Unreachable."""
        if len(self._awaited) >= UNREAD:
            raise Unreachable("does not answer what it was asked before")
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[Octets] = asyncio.get_running_loop().create_future()
        self._awaited[number] = answer
        try:
            async with asyncio.timeout(within):
                await self._send(ASK, number, octets)
                return await answer
        except TimeoutError as error:
            raise Unreachable(f"did not answer within {within:.3g} s") from error
        finally:
            del self._awaited[number]
            self._coming.pop((ANSWER, number), None)
            _settle(answer)

    async def read(self, frames: AsyncIterator[bytes]) -> None:
        """Take frames until there are no more; a WireError if the peer breaks the rules."""
        try:
            async for frame in frames:
                await self._take(frame)
        finally:
            for task in self._tasks:
                task.cancel()
            for awaited in self._awaited.values():
                if not awaited.done():
                    awaited.set_exception(Unreachable("has hung up"))

    async def _take(self, frame: bytes) -> None:
        if len(frame) < _FRAME.size:
            raise WireError(f"frame has {len(frame)} octets, a header alone has {_FRAME.size}")
        kind, number, whole = _FRAME.unpack_from(frame)
        piece = memoryview(frame)[_FRAME.size :]
        if kind > GIVE_UP or any(frame[_ZEROS]):
            raise WireError(f"frame begins with {frame[:4].hex()}, which is nothing that this end knows")
        if kind == GIVE_UP:
            self._coming.pop((ASK, number), None)
            self._reserved.pop(number, None)
            return
        if kind == ANSWER and number not in self._awaited:
            if number > self._asked:
                raise WireError(f"answers question {number}, of {self._asked} that it was asked")
            return  # too late
        message = self._coming.get((kind, number))
        if message is None:
            message = self._begin(kind, number, whole)
        message += piece
        if len(message) > whole or (not piece and whole):
            raise WireError(f"message {number} has {len(message)} octets and more to come, was to have {whole}")
        if len(message) == whole:
            del self._coming[kind, number]
            if kind == ASK:
                del self._reserved[number]
            await self._deliver(kind, number, message)

    def _begin(self, kind: int, number: int, whole: int) -> bytearray:
        if kind == ASK and len(self._reserved) >= AT_ONCE:
            raise WireError(f"has begun {AT_ONCE} messages and finished none")
        room = self._largest if kind == ANSWER else self._room() - sum(self._reserved.values())
        if whole > room:
            raise WireError(f"message has {whole} octets, may have {max(0, room)} at the moment")
        if kind == ASK:
            self._reserved[number] = whole
        self._coming[kind, number] = message = bytearray()
        return message

    async def _deliver(self, kind: int, number: int, message: bytearray) -> None:
        if kind == ANSWER:
            if not self._awaited[number].done():
                self._awaited[number].set_result(message)
            return
        await asyncio.sleep(self._questions.take())
        await self._answering.acquire()
        task = asyncio.create_task(self._answer(number, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, message: bytearray) -> None:
        try:
            await self._send(ANSWER, number, await self._hear(message))
        except Unreachable:
            pass  # whoever reads the stream learns of it, too
        finally:
            self._answering.release()

    async def _send(self, kind: int, number: int, octets: bytes) -> None:
        header, view, start = _FRAME.pack(kind, number, len(octets)), memoryview(octets), 0
        try:
            while start == 0 or start < len(octets):
                await self._write(b"".join((header, view[start : start + PIECE])))
                start += PIECE
        except asyncio.CancelledError:
            if kind == ASK and start:
                self._hold(self._write(_FRAME.pack(GIVE_UP, number, 0)))
            raise

    async def _write(self, frame: bytes) -> None:
        """One after another, to the end: a frame that has been begun cannot be taken back."""

        async def write() -> None:
            try:
                async with self._writing:
                    await self._write_frame(frame)
            except Exception as error:  # a stream that has ended raises this and that
                raise Unreachable("has hung up") from error

        await asyncio.shield(self._hold(write()))

    def _hold(self, work: "Awaitable[None]") -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_settle)
        return task


def _settle(future: "asyncio.Future[Any]") -> None:
    """Whatever came of it, nobody else has to look at it."""
    if future.done() and not future.cancelled():
        future.exception()
