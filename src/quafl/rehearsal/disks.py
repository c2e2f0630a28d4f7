"""Virtual disks. What was confirmed survives the end of a process; what was not may be there, torn or missing."""

import errno
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, NamedTuple

from torch import Tensor

from quafl.protocol import journal, log

KEPT = 3  # checkpoints
Read = Callable[[Iterable[bytes], int], list[bytes]]


def no_space() -> OSError:
    """What a full disk answers."""
    return OSError(errno.ENOSPC, "No space left on device")


def copied(value: Any) -> Any:
    """Plain values, as a checkpoint takes them; nothing of the copy is shared with a process."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {copied(key): copied(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint has a {type(value).__name__}")


class Checkpoint(NamedTuple):
    """The server's state at a time."""

    number: int  # of the last record of the journal that is in it
    state: dict[str, Any] | None  # None: it is damaged
    segment: int  # from which on there are later records
    seen: Any  # what the checks knew at that time


class Boot(NamedTuple):
    """What a new process of the server finds."""

    state: dict[str, Any]
    entries: list[log.Entry]
    checkpoint: Checkpoint
    gap: bool  # records that had been confirmed are not believed, because one before them could not be written


class ServerDisk:
    """A journal in segments, and checkpoints."""

    def __init__(self, read: Read = journal.read) -> None:
        self.full = False
        self.number = 0  # of the last record
        self.confirmed = 0  # of the last record of which the machine knows what became of it
        self.failed: set[int] = set()  # records that could not be written
        self._read = read
        self._segments: list[bytearray] = [bytearray()]
        self._first = 0  # number of the first segment that is left
        self._checkpoints: list[Checkpoint] = []
        self._unconfirmed = 0  # octets at the end

    @property
    def has_gap(self) -> bool:
        """What is written now would not be believed."""
        return any(number > self._checkpoints[-1].number for number in self.failed)

    @property
    def is_writing(self) -> bool:
        """A record is not confirmed yet."""
        return self.number > self.confirmed

    def put(self, record: bytes) -> OSError | None:
        """The next record; what went wrong with it."""
        self.number += 1
        self._unconfirmed = 0
        if self.full:
            self.failed.add(self.number)
            return no_space()
        frame = journal.frame(self.number, record)
        self._segments[-1] += frame
        self._unconfirmed = len(frame)
        return None

    def confirm(self) -> None:
        """The record that was put is safe."""
        self._unconfirmed, self.confirmed = 0, self.number

    def save(self, state: dict[str, Any], seen: Any) -> None:
        """A checkpoint, and a new segment; OSError if there is no room."""
        if self.full:
            raise no_space()
        last = self._first + len(self._segments) - 1
        self._checkpoints.append(Checkpoint(self.confirmed, copied(state), last, seen))
        del self._checkpoints[:-KEPT]
        self._segments.append(bytearray())
        oldest = self._checkpoints[0].segment
        del self._segments[: oldest - self._first]
        self._first = oldest

    def damage(self) -> bool:
        """The newest checkpoint, if there is another."""
        if len(self._checkpoints) < 2:
            return False
        self._checkpoints[-1] = self._checkpoints[-1]._replace(state=None)
        return True

    def crash(self, rng: Random) -> str:
        """The process ends: what is at the end of the journal then, if it was not confirmed."""
        if not self._unconfirmed:
            return "whole"
        what = rng.choice(("whole", "torn", "missing"))
        if what != "whole":
            del self._segments[-1][-(rng.randint(1, self._unconfirmed) if what == "torn" else self._unconfirmed) :]
        return what

    def boot(self) -> Boot:
        """What is there. What could not be believed is overwritten from now on."""
        while self._checkpoints[-1].state is None:
            self._checkpoints.pop()
        checkpoint = self._checkpoints[-1]
        records = self._read(
            [bytes(segment) for segment in self._segments[checkpoint.segment - self._first :]], checkpoint.number
        )
        believed = checkpoint.number + len(records)
        gap = any(checkpoint.number < number <= self.confirmed for number in self.failed)
        self.failed = {number for number in self.failed if number <= checkpoint.number}  # a checkpoint may be damaged
        self.number = self.confirmed = believed
        self._unconfirmed = 0
        self._segments.append(bytearray())
        return Boot(copied(checkpoint.state), [log.from_bytes(record) for record in records], checkpoint, gap)


class ClientDisk:
    """A journal that only grows, and a checkpoint."""

    def __init__(self) -> None:
        self.full = False
        self._records: list[bytes] = []
        self._checkpoint: dict[str, Any] | None = None
        self.is_writing = False  # the last record is not confirmed yet

    @property
    def reports(self) -> list[log.Reported]:
        """What the client has reported."""
        return [log.from_bytes(record) for record in self._records]

    def put(self, record: bytes) -> OSError | None:
        """What the client reports."""
        if self.full:
            return no_space()
        self._records.append(record)
        self.is_writing = True
        return None

    def confirm(self) -> None:
        """It is safe."""
        self.is_writing = False

    def save(self, state: dict[str, Any]) -> None:
        """A checkpoint, if there is room."""
        if not self.full:
            self._checkpoint = copied(state)

    @property
    def checkpoint(self) -> dict[str, Any] | None:
        """The last one."""
        return None if self._checkpoint is None else dict(copied(self._checkpoint))

    def crash(self, rng: Random) -> str:
        """The process ends."""
        what = rng.choice(("whole", "missing")) if self.is_writing else "whole"
        if what == "missing":
            self._records.pop()
        self.is_writing = False
        return what

    def lose(self) -> None:
        """Everything is gone."""
        self._records, self._checkpoint, self.is_writing = [], None, False
