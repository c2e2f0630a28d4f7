"""Batches that other processes read ahead of their use."""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakMethod, finalize

from torch.utils.data import DataLoader, Dataset

from quafl.tasks.files import DataError
from quafl.tasks.given import line

Key: TypeAlias = tuple[int, int]  # a client, and the number of its step


class _Failed(NamedTuple):
    """A batch that cannot be read, and why."""

    sentence: str


class _Batches(Dataset[Any]):
    """By their keys, as torch's loader asks for them."""

    def __init__(self, read: Callable[[int, int], Any]) -> None:
        self._read = WeakMethod(read)  # whose method it is, has the processes, and is gone before them

    def __getitem__(self, key: Key) -> Any:
        read = self._read()
        assert read is not None
        try:
            return read(*key)
        except DataError as error:  # torch would wrap it into a traceback
            return _Failed(str(error))


class _Wanted:
    """Whatever is to be read next."""

    def __init__(self) -> None:
        self.keys: Iterable[Key] = ()

    def __iter__(self) -> Iterator[Key]:
        return iter(self.keys)


class Ahead:
    """`workers` processes that read batches in the order in which they are expected. `pinned`: into memory from which
    a GPU copies at once. A batch is the same whoever reads it, and one that nobody has expected is read at once. `read`
    is a method of the object that has this one."""

    def __init__(self, read: Callable[[int, int], Any], workers: int, *, pinned: bool) -> None:
        self._read, self._wanted = read, _Wanted()
        self._loader: DataLoader[Any] = DataLoader(
            _Batches(read),
            batch_size=None,
            sampler=self._wanted,
            collate_fn=_as_it_is,
            worker_init_fn=_keep,
            num_workers=workers,
            persistent_workers=True,
            pin_memory=pinned,
            multiprocessing_context="fork",  # what reads is not to be pickled
        )
        finalize(self, _let_go, self._loader)
        self._expected: deque[Key] = deque()
        self._onwards: Key | None = None  # after those, this client's later steps, without end
        self._coming: Iterator[Any] = iter(())

    def expect(self, keys: Iterable[Key]) -> None:
        """These will be asked for next, in this order."""
        self._expected, self._onwards = deque(keys), None
        self._wanted.keys = tuple(self._expected)
        self._coming = iter(self._loader)

    def get(self, client: int, step: int) -> Any:
        """A batch. Where it was not expected, later ones of the same client are from now on."""
        key = client, step
        if self._expected and self._expected[0] == key:
            self._expected.popleft()
        elif self._onwards == key:
            self._onwards = client, step + 1
        else:
            self._expected.clear()
            self._onwards = client, step + 1
            self._wanted.keys = _onwards(client, step + 1)
            self._coming = iter(self._loader)
            return self._read(client, step)
        try:
            found = next(self._coming)
        except RuntimeError as error:
            raise DataError(
                f"a process that reads ahead has ended, at step {step} of client {client} ({line(error)}); workers=0 "
                f"reads without"
            ) from error
        if isinstance(found, _Failed):
            raise DataError(found.sentence)
        return found


def _let_go(loader: DataLoader[Any]) -> None:
    """Whoever had it is gone. Until then it is no garbage: collected in a cycle, together with its queues, it could not
    tell its processes to end, and would wait five seconds for each."""


def _keep(worker: int) -> None:
    """What a process has inherited is not its to collect: other loaders' processes, for instance."""
    gc.freeze()


def _onwards(client: int, step: int) -> Iterator[Key]:
    while True:
        yield client, step
        step += 1


def _as_it_is(batch: Any) -> Any:
    return batch
