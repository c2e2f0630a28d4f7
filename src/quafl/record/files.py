"""Files that are whole or not there, and folders that one process has to itself."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def write_atomically(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A stream that replaces `path` when it is closed without an error."""
    part = path.with_name(path.name + ".part")
    text = "b" not in mode
    with part.open(mode, encoding="utf-8" if text else None, newline="" if text else None) as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(path)


class InUse(Exception):
    """Another process has the folder."""


@contextmanager
def alone(folder: Path, remedy: str) -> Iterator[None]:
    """Nobody else is in such a block for that folder; it is made, for its owner's eyes only, if it is not there."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(folder / "in-use", os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InUse(f"{folder} is in use by another process; {remedy}") from error
        yield
    finally:
        os.close(lock)
