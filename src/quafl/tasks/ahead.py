"""Batches that other processes read ahead of their use."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from torch.utils.data import DataLoader, Dataset

from quafl.tasks.files import DataError

Key: TypeAlias = tuple[int, int]  # a client, and the number of its step


class _Failed(NamedTuple):
    """A batch that cannot be read, and why."""

    sentence: str


class _Batches(Dataset[Any]):
    """By their keys, as torch's loader asks for them."""

    def __init__(self, read: Callable[[int, int], Any]) -> None:
        self._read = read

    def __getitem__(self, key: Key) -> Any:
        try:
            return self._read(*key)
        except DataError as error:  # torch would wrap it into a traceback
            return _Failed(str(error))


class _Wanted:
    """Whatever is to be read next."""

    def __init__(self) -> None:
        self.keys: Iterable[Key] = ()

    def __iter__(self) -> Iterator[Key]:
        return iter(self.keys)


class Ahead:
    """`workers` processes that read batches in the order in which they are expected. `pinned`: into memory from which a
    GPU copies at once. A batch is the same whoever reads it, and one that nobody has expected is read at once."""

    def __init__(self, read: Callable[[int, int], Any], workers: int, *, pinned: bool) -> None:
        self._read, self._wanted = read, _Wanted()
        self._loader: DataLoader[Any] = DataLoader(
            _Batches(read),
            batch_size=None,
            sampler=self._wanted,
            collate_fn=_as_it_is,
            num_workers=workers,
            persistent_workers=True,
            pin_memory=pinned,
            multiprocessing_context="fork",  # what reads is not to be pickled
        )
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
        found = next(self._coming)
        if isinstance(found, _Failed):
            raise DataError(found.sentence)
        return found


def _onwards(client: int, step: int) -> Iterator[Key]:
    while True:
        yield client, step
        step += 1


def _as_it_is(batch: Any) -> Any:
    return batch
