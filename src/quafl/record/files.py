"""Files that are whole or not there, and folders that one process has to itself."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def write_atomically(path: Path, mode: str = "w", *, private: bool = False) -> Iterator[IO[Any]]:
    """A stream that replaces `path` when it is closed without an error. A private file is its owner's alone from its
    first byte, whatever the umask."""
    part = path.with_name(path.name + ".part")
    if private:
        part.unlink(missing_ok=True)
    fresh, permissions = (os.O_EXCL, 0o600) if private else (os.O_TRUNC, 0o666)
    text = "b" not in mode
    try:
        descriptor = os.open(part, os.O_CREAT | os.O_WRONLY | fresh, permissions)
        with os.fdopen(descriptor, mode, encoding="utf-8" if text else None, newline="" if text else None) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):  # of a full disk, a stream does not say where; nobody knows the part
            error.filename = str(path)
        raise


def make_private(folder: Path) -> None:
    """And those above it that are missing, for their owner only; `mkdir(parents=True)` would open those to others."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


LOCK = "in-use"  # in a folder that a process has, or has had, to itself


class InUse(Exception):
    """Another process has the folder."""


@contextmanager
def alone(folder: Path, remedy: str) -> Iterator[None]:
    """Nobody else is in such a block for that folder; it is made, for its owner's eyes only, if it is not there."""
    make_private(folder)
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InUse(f"{folder} is in use by another process; {remedy}") from error
        yield
    finally:
        os.close(lock)
