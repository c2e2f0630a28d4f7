"""Where a run stands, on disk: dictionaries, lists, tensors and numbers, no code."""

import logging
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError
from threading import Lock
from typing import IO, Any
from zipfile import BadZipFile

import torch

from quafl.record.files import write_atomically
from quafl.record.summary import RecordError

_log = logging.getLogger(__name__)


def save(path: Path, state: dict[str, Any]) -> None:
    """Whole, or not at all."""
    with write_atomically(path, "wb") as stream:
        _write(state, stream)


def load(path: Path, device: str | None = None, *, mapped: bool = False) -> dict[str, Any]:
    """What `save` wrote, where it was, or all of it on the device; `mapped`, it is read when it is looked at."""
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location=device, mmap=mapped)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, BadZipFile, UnpicklingError) as error:
        if "unable to mmap" in str(error):
            raise RecordError(
                f"{path} is larger than this machine's memory; continue on one with more, or let the system map it "
                f"(vm.overcommit_memory = 1)"
            ) from error
        raise RecordError(f"{path} cannot be read ({type(error).__name__}); delete it to run that seed anew") from error
    return state


class Checkpoints:
    """The last few states of something that runs for long, in a folder. A file's name has its number and its checksum:
    one that is damaged is noticed, and the one before it used."""

    KEPT = 3

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = Lock()

    def save(self, state: dict[str, Any]) -> None:
        """Whole, or not at all; the oldest goes."""
        with self._lock:
            self._save(state)

    def _save(self, state: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        before = self._files()
        number = 1 + max(before, default=0)
        fresh = self._folder / "checkpoint.new"
        with write_atomically(fresh, "wb") as stream:
            hashing = _write(state, stream)
        fresh.replace(self._folder / f"checkpoint-{number:08d}-{hashing.digest.hexdigest()}.pt")
        for old in sorted(before)[: len(before) + 1 - self.KEPT]:
            before[old].unlink(missing_ok=True)

    def newest(self) -> dict[str, Any] | None:
        """The newest state that is whole; None if none was ever saved."""
        path = None
        for path in self._newest_first():
            with path.open("rb") as stream:
                digest = _digest(stream)
            if digest in path.name:
                return load(path)
            _log.warning("%s is damaged: its checksum does not agree; using the one before it", path)
        if path is not None:
            raise RecordError(f"all checkpoints in {self._folder} are damaged; delete them to begin anew")
        return None

    def _newest_first(self) -> Iterator[Path]:
        files = self._files()
        return (files[number] for number in sorted(files, reverse=True))

    def _files(self) -> dict[int, Path]:
        found = ((re.fullmatch(r"checkpoint-(\d{8})-[0-9a-f]{64}\.pt", p.name), p) for p in self._folder.glob("*.pt"))
        return {int(match[1]): path for match, path in found if match}


class _Hashing:
    """A stream that knows the checksum of what was written to it, and why something could not be."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.digest = sha256()
        self.failure: OSError | None = None

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        try:
            return self._stream.write(data)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        self._stream.flush()


def _write(state: dict[str, Any], stream: IO[bytes]) -> _Hashing:
    """OSError if the disk takes no more; torch says RuntimeError then."""
    hashing = _Hashing(stream)
    try:
        torch.save(state, hashing)  # type: ignore[arg-type]  # it only writes and flushes
    except RuntimeError:
        if hashing.failure is not None:
            raise hashing.failure from None
        raise
    return hashing


def _digest(stream: IO[bytes]) -> str:
    digest = sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
