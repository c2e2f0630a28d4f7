"""A party's journal on disk: segments, each of which begins at a checkpoint.

What `append` has returned for is safe from the end of this process. Should the machine itself fail, what had not
reached the disk is missing at the end, unless the journal waits for that; the run then goes on from before it.
"""

import os
from contextlib import suppress
from io import FileIO
from itertools import pairwise
from pathlib import Path

from quafl.protocol import journal

NAME = "journal-{:012d}.bin"
KEPT = 3  # checkpoints whose journals are kept: the newest may turn out to be damaged


class Journal:
    """In a folder. `number` is that of the last record, or of one that could not be written. `waits`: for the disk."""

    def __init__(self, folder: Path, *, waits: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._waits = folder, waits
        self.number = max((journal.last(path.read_bytes()) for path in self._segments()), default=0)
        self.octets = 0  # of the segment that is being written
        self._starts: list[int] = []  # numbers at the last checkpoints
        self._stream = self._open()

    def records(self, after: int) -> list[bytes]:
        """That follow a checkpoint made at that number."""
        return journal.read((path.read_bytes() for path in self._segments()), after)

    def everything(self) -> list[bytes]:
        """All records that are left."""
        return self.records(min(map(_first, self._segments()), default=1) - 1)

    def append(self, number: int, record: bytes) -> None:
        """Write it; OSError if that is impossible: nothing of it is left but a gap in the numbers."""
        self.number, whole = number, self._stream.tell()
        try:
            left = memoryview(journal.frame(number, record))
            while left:
                left = left[self._stream.write(left) :]
            if self._waits:
                os.fsync(self._stream.fileno())
            self.octets = self._stream.tell()
        except OSError:
            with suppress(OSError):  # nothing is read after the gap either way
                self._stream.truncate(whole)
                self._stream.seek(whole)
            raise

    def begin_segment(self) -> None:
        """A checkpoint was made: what comes now goes to a new file."""
        self._stream.close()
        self._stream, self.octets = self._open(), 0

    def forget(self, number: int) -> None:
        """A checkpoint has been made at that number: what no kept one needs goes."""
        self._starts = [*self._starts, number][-KEPT:]
        if len(self._starts) < KEPT:
            return
        segments = self._segments()
        for path, following in pairwise(segments):
            if _first(following) <= self._starts[0] + 1:
                path.unlink()

    def close(self) -> None:
        """End it; what was written stays."""
        self._stream.close()

    def _open(self) -> FileIO:
        """A new file; one of that name has no whole record, but may have a torn one, which would hide what follows."""
        return (self._folder / NAME.format(self.number + 1)).open("wb", buffering=0)

    def _segments(self) -> list[Path]:
        return sorted(self._folder.glob("journal-*.bin"), key=_first)


def _first(path: Path) -> int:
    return int(path.stem.removeprefix("journal-"))
