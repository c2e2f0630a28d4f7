"""What clients keep: in memory up to a budget, and in a file beyond it."""

import errno
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping
from mmap import MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap
from pathlib import Path
from tempfile import gettempdir, mkstemp
from typing import TypeAlias
from weakref import finalize

import torch
from torch import Tensor

Row: TypeAlias = tuple[Tensor, ...]
_Where: TypeAlias = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]
FULL = errno.ENOSPC, errno.EDQUOT
ALIGNED = 64  # octets: where a tensor may begin in the file
SMALL = 1 << 26  # octets of a file that is not worth being written anew
NORESERVE = 0x4000 if sys.platform == "linux" else 0  # a file may be larger than memory: it is only read


class _Kept:
    """A tensor that one or more clients keep, in memory or at a place of the file."""

    __slots__ = "device", "dtype", "holders", "octets", "place", "shape", "tensor"

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.dtype, self.shape, self.device = tensor.dtype, tensor.shape, tensor.device
        self.octets, self.place, self.holders = tensor.nbytes, 0, 0


class Shelf(MutableMapping[int, Row]):
    """Tensors by client, never changed in place. Beyond `budget` octets, those of the clients that were put down
    longest ago are in a file without a name: in $TMPDIR, or /var/tmp, as /tmp may be memory.

    The file only grows. When more than half of it is of no use any more, the rest is written anew, if the disk has
    room; a copy stays what it was.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._rows: dict[int, tuple[_Kept, ...]] = {}
        self._here: dict[_Where, _Kept] = {}  # by where the tensor's memory is
        self._recent: dict[int, None] = {}  # clients with something in memory, the longest there first
        self._octets = 0  # in memory
        self._file: _File | None = None
        self._end, self._live = 0, 0  # octets of the file, and those of use

    @property
    def octets(self) -> tuple[int, int]:
        """In memory, and in the file."""
        return self._octets, self._end

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __getitem__(self, client: int) -> Row:
        return tuple(kept.tensor if kept.tensor is not None else self._read(kept) for kept in self._rows[client])

    def __setitem__(self, client: int, row: Row) -> None:
        kept = tuple(self._here.get(_where(tensor)) or self._begin(tensor) for tensor in row)
        for one in kept:
            one.holders += 1
        if client in self._rows:
            del self[client]
        self._rows[client], self._recent[client] = kept, None
        while self._octets > self._budget and self._recent:
            oldest = next(iter(self._recent))
            del self._recent[oldest]
            for one in self._rows[oldest]:
                self._put_away(one)
        if self._end > max(SMALL, 2 * self._live):
            self._write_anew()

    def __delitem__(self, client: int) -> None:
        for one in self._rows.pop(client):
            one.holders -= 1
            if one.holders == 0 and one.tensor is None:
                self._live -= _whole(one.octets)
            elif one.holders == 0:
                self._forget(one)
        self._recent.pop(client, None)

    def copy(self) -> dict[int, Row]:
        """All of it, as it is now: what is in the file is read when it is looked at."""
        seen = self._file.mapped() if self._file and self._end else None
        found: dict[int, Tensor] = {}  # what clients share, they share here

        def tensor(one: _Kept) -> Tensor:
            if one.tensor is not None:
                return one.tensor
            if id(one) not in found:
                plain = torch.frombuffer(seen, dtype=torch.uint8, count=one.octets, offset=one.place)
                found[id(one)] = plain.view(one.dtype).reshape(one.shape)
            return found[id(one)]

        return {client: tuple(map(tensor, row)) for client, row in self._rows.items()}

    def _begin(self, tensor: Tensor) -> _Kept:
        self._here[_where(tensor)] = one = _Kept(tensor)
        self._octets += one.octets
        return one

    def _forget(self, one: _Kept) -> None:
        assert one.tensor is not None
        del self._here[_where(one.tensor)]
        self._octets -= one.octets

    def _put_away(self, one: _Kept) -> None:
        if one.tensor is None or one.octets == 0:
            return
        self._file = self._file or _File()
        try:
            self._file.write(one.tensor.detach().cpu(), self._end)
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise OSError(
                error.errno,
                f"clients' states beyond the budget of memory do not fit on the disk of {folder()}; make room, set "
                f"TMPDIR to a larger disk, or raise run.memory",
            ) from error
        one.place = self._end
        self._end += _whole(one.octets)
        self._live += _whole(one.octets)
        self._forget(one)
        one.tensor = None

    def _read(self, one: _Kept) -> Tensor:
        assert self._file is not None
        tensor = torch.empty(one.shape, dtype=one.dtype)
        self._file.read(tensor, one.place)
        return tensor.to(one.device)

    def _write_anew(self) -> None:
        assert self._file is not None
        away = {id(one): one for row in self._rows.values() for one in row if one.tensor is None}
        fresh, places, end = _File(), list[int](), 0
        try:
            for one in away.values():
                tensor = torch.empty(one.octets, dtype=torch.uint8)
                self._file.read(tensor, one.place)
                fresh.write(tensor, end)
                places.append(end)
                end += _whole(one.octets)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return  # the old one serves, as long as there is room for what comes
        for one, place in zip(away.values(), places, strict=True):
            one.place = place
        self._file, self._end, self._live = fresh, end, end


class _File:
    """Gone when nobody reads it any more."""

    def __init__(self) -> None:
        self.number, path = mkstemp(dir=folder(), prefix="quafl-")
        Path(path).unlink()
        finalize(self, os.close, self.number)

    def mapped(self) -> mmap:
        """All that has been written, read when it is looked at."""
        return mmap(self.number, 0, MAP_PRIVATE | NORESERVE, PROT_READ | PROT_WRITE)

    def write(self, tensor: Tensor, place: int) -> None:
        """From that place on."""
        _all(os.pwritev, self.number, _octets(tensor), place)

    def read(self, tensor: Tensor, place: int) -> None:
        """What stands there, into the tensor."""
        _all(os.preadv, self.number, _octets(tensor), place)


def folder() -> str:
    """Where the file is."""
    wanted = os.environ.get("TMPDIR"), "/var/tmp"
    return next((one for one in wanted if one and os.access(one, os.W_OK)), gettempdir())


def _where(tensor: Tensor) -> _Where:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _octets(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _whole(octets: int) -> int:
    return -(-octets // ALIGNED) * ALIGNED


def _all(transfer: Callable[[int, list[memoryview], int], int], file: int, octets: memoryview, place: int) -> None:
    """Systems read and write no more than 2 GiB at once."""
    while octets:
        done = transfer(file, [octets], place)
        if done == 0:
            raise OSError(errno.EIO, "the file of clients' states has been cut")
        octets, place = octets[done:], place + done
