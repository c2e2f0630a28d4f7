"""Records in files that only grow, so that what was written is found again, whatever happened to the end of it.

Each record has the next number. A record that is damaged, torn off or was never written ends a file: nothing after it
is believed, and a process that comes later goes on with its number, in a file of its own.
"""

import struct
import zlib
from collections.abc import Iterable

_HEAD = struct.Struct("<QQI")  # number, octets, crc32 of both and of the record
_NUMBERS = struct.Struct("<QQ")


def frame(number: int, record: bytes) -> bytes:
    """A record as it is written."""
    crc = zlib.crc32(record, zlib.crc32(_NUMBERS.pack(number, len(record))))
    return _HEAD.pack(number, len(record), crc) + record


def read(files: Iterable[bytes], after: int) -> list[bytes]:
    """The records that follow number `after`, from files in the order in which they were begun."""
    found: list[bytes] = []
    for octets in files:
        for number, record in _records(octets):
            if number == after + len(found) + 1:
                found.append(record)
            elif number > after + len(found):
                break
    return found


def last(octets: bytes) -> int:
    """The number of the last whole record of a file; 0 if there is none."""
    return max((number for number, _ in _records(octets)), default=0)


def _records(octets: bytes) -> Iterable[tuple[int, bytes]]:
    """Until the first that is not whole."""
    place = 0
    while place + _HEAD.size <= len(octets):
        number, length, crc = _HEAD.unpack_from(octets, place)
        record = octets[place + _HEAD.size : place + _HEAD.size + length]
        if len(record) < length or zlib.crc32(record, zlib.crc32(_NUMBERS.pack(number, length))) != crc:
            return
        yield number, record
        place += _HEAD.size + length
