"""Replies that the server has accepted since its last checkpoint: written to a file before they are applied.

After a crash, the server goes on from the checkpoint and asks the same questions again; those whose answer is here are
not sent. A reply is so applied once in what survives. Should the machine itself fail before the file has reached the
disk, the reply was applied nowhere: the checkpoint does not have it either, and the client, asked again, repeats it.
"""

import os
import struct
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Lock

from quafl.deploy.carrier import Octets

_RECORD = struct.Struct("<16sQI")  # key, octets of the reply, crc32 of both and the reply
_KEY = struct.Struct("<16sQ")


class Journal:
    """Replies by what they answer."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = Lock()
        self._stream = path.open("a+b")
        self._places: dict[bytes, tuple[int, int]] = {}
        self._read()

    def get(self, name: str, question: Octets) -> bytes | None:
        """What that client answered to this question."""
        key = _key(name, question)
        with self._lock:
            return self._reply(key) if key in self._places else None

    def add(self, name: str, question: Octets, reply: Octets) -> None:
        """Safe from the end of this process when this returns."""
        key = _key(name, question)
        with self._lock:
            if key not in self._places:
                self._append(key, reply)

    def keep(self, wanted: Sequence[tuple[str, Octets]]) -> None:
        """Those, by name and question, and no others."""
        with self._lock:
            keys = [key for key in (_key(*pair) for pair in wanted) if key in self._places]
            replies = [self._reply(key) for key in keys]
            self._stream.truncate(0)
            self._places.clear()
            for key, reply in zip(keys, replies, strict=True):
                self._append(key, reply)

    def close(self) -> None:
        """No more."""
        self._stream.close()

    def _reply(self, key: bytes) -> bytes:
        place, length = self._places[key]
        return os.pread(self._stream.fileno(), length, place)

    def _append(self, key: bytes, reply: Octets) -> None:
        crc = zlib.crc32(reply, zlib.crc32(_KEY.pack(key, len(reply))))
        self._stream.seek(0, os.SEEK_END)
        place = self._stream.tell() + _RECORD.size
        self._stream.write(_RECORD.pack(key, len(reply), crc))
        self._stream.write(reply)
        self._stream.flush()
        self._places[key] = place, len(reply)

    def _read(self) -> None:
        """What an earlier process left; a record that was not finished is cut off."""
        self._stream.seek(0)
        good = 0
        while len(head := self._stream.read(_RECORD.size)) == _RECORD.size:
            key, length, crc = _RECORD.unpack(head)
            reply = self._stream.read(length)
            if len(reply) < length or zlib.crc32(reply, zlib.crc32(_KEY.pack(key, length))) != crc:
                break
            self._places[key] = good + _RECORD.size, length
            good = self._stream.tell()
        self._stream.truncate(good)


def _key(name: str, question: Octets) -> bytes:
    digest = blake2b(name.encode() + b"\0", digest_size=16)
    digest.update(question)
    return digest.digest()
