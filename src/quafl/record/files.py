"""Files that are whole or not there."""

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
