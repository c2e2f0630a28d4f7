"""Questions and answers over one stream, both ways at once (docs/wire.md): in pieces, so that a greeting is never stuck
behind a model, and within bounds, so that no peer decides how much memory or time this end uses."""

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeAlias

from quafl.codec.seams import WireError
from quafl.protocol.carrier import Octets, Unreachable

PIECE = 512 * 1024  # octets of a message in one frame
LARGEST_FRAME = PIECE + 64
AT_ONCE = 4  # questions of one peer that are worked on at the same time
PENDING = 8  # questions of one peer that are not answered yet, before more are read; of this end's, likewise
PER_SECOND, BURST = 100.0, 200.0  # questions of one peer; more are read later
FRAMES_PER_SECOND, FRAMES_BURST = 2000.0, 4000.0  # likewise
MODELS_PER_SECOND = 4.0  # octets of questions, in units of the largest message

ASK, ANSWER, GIVE_UP = range(3)
_FRAME = struct.Struct("<BxxxIQ")  # kind, number of the question, octets of the whole message
_ZEROS = slice(1, 4)

Hear: TypeAlias = Callable[[Octets], Awaitable[bytes]]


class Bucket:
    """Lets `rate` things a second through, and `burst` at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, monotonic()

    def take(self, amount: float = 1.0) -> float:
        """Take so many; the seconds until they may pass."""
        now = monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) - amount
        self._at = now
        return max(0.0, -self._left / self._rate)

    def has(self) -> bool:
        """Take one, if it may pass at once."""
        if self.take() == 0:
            return True
        self._left += 1
        return False


@dataclass(slots=True)
class _Coming:
    """A message of which some pieces have arrived."""

    whole: int  # octets that it was announced with
    octets: bytearray = field(default_factory=bytearray)


class Line:
    """One end of a stream. `write` sends a frame; `hear` answers a question of the peer's; `room` is how many octets
    its questions that are not answered yet may have together, `largest` how many an answer may have. Of a peer that is
    `trusted`, as the server is, everything is read at once."""

    def __init__(
        self,
        write: Callable[[bytes], Awaitable[None]],
        hear: Hear,
        room: Callable[[], int],
        largest: int,
        *,
        trusted: bool = False,
    ) -> None:
        self._write_frame, self._hear, self._room, self._largest = write, hear, room, largest
        self._trusted = trusted
        self._writing = asyncio.Lock()
        self._unsent = 0  # frames
        self._asked = 0
        self._awaited: dict[int, asyncio.Future[Octets]] = {}
        self._coming: dict[tuple[int, int], _Coming] = {}
        self._reserved: dict[int, int] = {}  # octets of the peer's questions, until they are answered
        self._questions = Bucket(PER_SECOND, BURST)
        self._frames = Bucket(FRAMES_PER_SECOND, FRAMES_BURST)
        self._octets = Bucket(MODELS_PER_SECOND * largest, MODELS_PER_SECOND * largest)
        self._pending, self._working = asyncio.Semaphore(PENDING), asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, octets: bytes, within: float) -> Octets:
        """The peer's answer, or Unreachable."""
        if len(self._awaited) >= PENDING or self._unsent >= PENDING:
            raise Unreachable("does not read, or does not answer, what it was sent before")
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
            _forget(answer)

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
        if kind > GIVE_UP or any(frame[_ZEROS]) or (kind == GIVE_UP and len(frame) > _FRAME.size):
            raise WireError(f"frame begins with {frame[:4].hex()}, which is nothing that this end knows")
        awaited = kind == ANSWER and number in self._awaited
        if not self._trusted:
            await _pause(max(self._frames.take(), 0.0 if awaited else self._octets.take(len(frame))))
        if kind == GIVE_UP:
            if self._coming.pop((ASK, number), None) is not None:
                self._release(number)
        elif kind == ASK or awaited:
            await self._put(kind, number, whole, memoryview(frame)[_FRAME.size :])
        elif number > self._asked:
            raise WireError(f"answers question {number}, of {self._asked} that it was asked")

    async def _put(self, kind: int, number: int, whole: int, piece: memoryview) -> None:
        message = self._coming.get((kind, number)) or await self._begin(kind, number, whole)
        message.octets += piece
        if whole != message.whole or len(message.octets) > whole or (not piece and whole):
            raise WireError(f"message {number} has {len(message.octets)} octets or more, was to have {message.whole}")
        if len(message.octets) == whole:
            del self._coming[kind, number]
            await self._deliver(kind, number, message.octets)

    async def _begin(self, kind: int, number: int, whole: int) -> _Coming:
        if kind == ASK:
            if number in self._reserved or self._unfinished() >= AT_ONCE:
                raise WireError(f"begins message {number} before it has finished others")
            await self._pending.acquire()
        room = self._largest if kind == ANSWER else self._room() - sum(self._reserved.values())
        if whole > room:
            raise WireError(f"message has {whole} octets, may have {max(0, room)} at the moment")
        if kind == ASK:
            self._reserved[number] = whole
        message = self._coming[kind, number] = _Coming(whole)
        return message

    def _unfinished(self) -> int:
        return sum(kind == ASK for kind, _ in self._coming)

    def _release(self, number: int) -> None:
        del self._reserved[number]
        self._pending.release()

    async def _deliver(self, kind: int, number: int, octets: bytearray) -> None:
        if kind == ANSWER:
            if not self._awaited[number].done():
                self._awaited[number].set_result(octets)
            return
        if not self._trusted:
            await _pause(self._questions.take())
        self._hold(self._answer(number, octets))

    async def _answer(self, number: int, octets: bytearray) -> None:
        try:
            async with self._working:
                answer = await self._hear(octets)
            await self._send(ANSWER, number, answer)
        finally:
            self._release(number)

    async def _send(self, kind: int, number: int, octets: bytes) -> None:
        header, view, start = _FRAME.pack(kind, number, len(octets)), memoryview(octets), 0
        try:
            while start == 0 or start < len(octets):
                await self._write(b"".join((header, view[start : start + PIECE])))
                start += PIECE
        except asyncio.CancelledError:
            if kind == ASK:  # a frame that has been begun goes out all the same
                self._hold(self._written(_FRAME.pack(GIVE_UP, number, 0)))
            raise

    async def _write(self, frame: bytes) -> None:
        """To the end, whoever waits for it: a frame that has been begun cannot be taken back."""
        task = self._hold(self._written(frame))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # the stream has ended
                raise Unreachable("has hung up") from None
            raise

    async def _written(self, frame: bytes) -> None:
        self._unsent += 1
        try:
            async with self._writing:
                await self._write_frame(frame)
        except Exception as error:  # a stream that has ended raises this and that
            raise Unreachable("has hung up") from error
        finally:
            self._unsent -= 1

    def _hold(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """Work that ends with the stream at the latest; whoever reads that learns of what goes wrong here."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_forget)
        return task


async def _pause(seconds: float) -> None:
    if seconds:
        await asyncio.sleep(seconds)


def _forget(future: "asyncio.Future[Any]") -> None:
    """Whatever came of it, nobody else has to look at it."""
    if future.done() and not future.cancelled():
        future.exception()
