"""The clients' examples: all held in memory, where models are, or read when they are needed."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset

from quafl.core.checks import check_whole
from quafl.core.randomness import derive
from quafl.tasks import given, reading, trees
from quafl.tasks.files import DataError
from quafl.tasks.given import Pair
from quafl.tasks.own import seeded
from quafl.tasks.reading import Collate, Part

KNOWN = 16  # examples of a dataset by which it is known again
KEPT = 256  # clients whose data, made on demand, are kept until others are asked for

Data: TypeAlias = Any  # inputs and targets, with an example a row; or a map-style dataset
HeldOut: TypeAlias = float | Sequence[Data | None]  # a share of each client's examples, or what each is judged by


class OnDemand(Sequence[Any]):
    """Clients whose data are made when they are first needed, by a function of the client's number. What it returns for
    a number must always be the same.

    >>> import torch
    >>> def make(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    ...     x = torch.randn(10, 3, generator=torch.Generator().manual_seed(client))
    ...     return x, (x.sum(1) > 0).long()
    >>> clients = OnDemand(1_000_000, make)
    >>> len(clients), len(clients[999_999][0])
    (1000000, 10)
    """

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        check_whole("count", count, 1)
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, client: int) -> Any: ...
    @overload
    def __getitem__(self, client: slice) -> "OnDemand": ...
    def __getitem__(self, client: Any) -> Any:
        """A client's data."""
        if isinstance(client, slice):
            mine, make = range(self._count)[client], self._make
            return OnDemand(len(mine), lambda number: make(mine[number]))
        return self._make(range(self._count)[client])

    def changed(self, change: Callable[[int, Any], Any]) -> "OnDemand":
        """The same clients, with something made of each one's number and data."""
        return OnDemand(self._count, lambda client: change(client, self._make(client)))


class Held:
    """In memory, on the device, one client's after another's."""

    in_memory = True

    def __init__(self, hands: Sequence[Pair], device: torch.device) -> None:
        self.sizes = torch.tensor([trees.size(targets) for _, targets in hands])
        self.starts = self.sizes.cumsum(0) - self.sizes  # of each client's examples among all
        inputs, targets = (trees.join(parts) for parts in zip(*hands, strict=True))
        self.all = to((inputs, targets), device)

    def __len__(self) -> int:
        return len(self.sizes)

    def size(self, client: int) -> int:
        """Examples that the client has."""
        return int(self.sizes[client])

    def first(self, client: int) -> int:
        """The place of its first one."""
        return int(self.starts[client])

    def take(self, client: int, places: Tensor) -> Pair:
        """Some of its examples."""
        return take(self.all, places)

    def keep(self, clients: Tensor) -> None:
        """The examples of these clients alone; nobody will ask for those of others."""
        sizes = self.sizes[clients]
        ends = sizes.cumsum(0)
        places = torch.arange(int(sizes.sum())) + (self.starts[clients] - ends + sizes).repeat_interleave(sizes)
        self.all = take(self.all, places)
        self.starts = torch.zeros_like(self.starts).index_copy(0, clients, ends - sizes)

    def chunks(self, client: int, most: int) -> Iterator[Pair]:
        """All of them, at most so many at a time."""
        start, stop = self.first(client), self.first(client) + self.size(client)
        yield from (take(self.all, slice(place, min(place + most, stop))) for place in range(start, stop, most))

    def everything(self, most: int) -> Iterator[Pair]:
        """Of all clients, likewise."""
        whole = trees.size(self.all[1])
        yield from (take(self.all, slice(place, place + most)) for place in range(0, whole, most))

    def change(self, how: Callable[[Tensor], Tensor]) -> None:
        """All inputs."""
        self.all = trees.change(self.all[0], how), self.all[1]


class Read:
    """Read when they are needed, into memory that the device can reach; a client's data may be a dataset, or a pair, or
    None where they are `optional`."""

    in_memory = False

    def __init__(
        self, clients: Sequence[Any], collate: Collate | None, whose: Callable[[int], str], *, optional: bool = False
    ) -> None:
        self._clients, self._collate, self._whose, self._optional = clients, collate, whose, optional
        self._change: Callable[[Tensor], Tensor] | None = None
        self._targets: Callable[[Any, str], None] | None = None
        self._made = lru_cache(maxsize=KEPT)(self._checked)
        self._form: Any = None

    def __len__(self) -> int:
        return len(self._clients)

    def _checked(self, client: int) -> Any:
        whose = self._whose(client)
        try:
            data = self._clients[client]
        except Exception as error:  # of a function of the user's
            raise DataError(
                f"{whose}: its data cannot be made ({type(error).__name__}: {given.line(error)})"
            ) from error
        if data is None and self._optional:
            return None
        if not reading.is_dataset(data):
            return given.examples(data, whose)
        reading.check(data, whose)
        return data

    def size(self, client: int) -> int:
        """Examples that the client has."""
        return count(self._made(client))

    def first(self, client: int) -> int:
        """Each client's places begin anew."""
        return 0

    def take(self, client: int, places: Tensor) -> Pair:
        """Some of its examples, in the form that those read first have."""
        data, whose = self._made(client), self._whose(client)
        batch = (
            reading.read(data, places.tolist(), self._collate, whose)
            if reading.is_dataset(data)
            else take(data, places)
        )
        kinds = given.kinds_of(batch)
        self._form = self._form or (kinds, whose)
        try:
            given.check_alike(batch, whose, kinds, *self._form)
            if self._targets is not None:
                self._targets(batch[1], whose)
        except ValueError as error:  # said as what it is wherever it is read
            raise DataError(str(error)) from error
        return batch if self._change is None else (trees.change(batch[0], self._change), batch[1])

    def chunks(self, client: int, most: int) -> Iterator[Pair]:
        """All of them, at most so many at a time."""
        for places in torch.arange(self.size(client)).split(most):
            with seeded(derive("judging", client, int(places[0]))):  # a dataset may change its examples at random
                chunk = self.take(client, places)
            yield chunk

    def everything(self, most: int) -> Iterator[Pair]:
        """Of all clients, likewise."""
        for client in range(len(self)):
            yield from self.chunks(client, most)

    def change(self, how: Callable[[Tensor], Tensor]) -> None:
        """All inputs, as they are read."""
        self._change = how

    def check_targets(self, check: Callable[[Any, str], None]) -> None:
        """Whether the model has outputs for them, as they are read."""
        self._targets = check


def hands_of(
    clients: Any, device: torch.device, collate: Collate | None, whose: Callable[[int], str] = "client {}".format
) -> Held | Read:
    """Pairs in memory; datasets, or what is made on demand, as it is read."""
    if isinstance(clients, OnDemand):
        return Read(clients, collate, whose)
    listed = given.listed(clients)
    if any(map(reading.is_dataset, listed)):
        hands = Read(listed, collate, whose)
        for client in range(len(listed)):
            hands.size(client)  # says what cannot be read
        return hands
    return Held(given.hands(listed, whose), device)


def count(data: Data) -> int:
    """Examples."""
    if data is None:
        return 0
    return len(data) if reading.is_dataset(data) else trees.size(data[1])


def known_by(data: Data, whose: str, collate: Collate | None) -> list[Pair]:
    """What data are known again by: all of a pair, some examples of a dataset."""
    if not reading.is_dataset(data):
        return [given.examples(data, whose)]
    places = torch.linspace(0, len(data) - 1, min(KNOWN, len(data)), dtype=torch.float64).long().tolist()
    with seeded(derive("known by")):  # a dataset may change its examples at random
        return [reading.read(data, [place], collate, whose) for place in places]


def take(data: Pair, chosen: Tensor | slice) -> Pair:
    """Some of the examples of a pair."""
    inputs, targets = (trees.change(part, lambda tensor: tensor[chosen]) for part in data)
    return inputs, targets


def some(data: Data, places: Tensor) -> Data:
    """Some of the examples, of whatever kind the data are."""
    return Part(data, places.tolist()) if reading.is_dataset(data) else take(data, places)


def apart(data: Data, share: float, *key: int | str) -> tuple[Data, Data | None]:
    """A client's examples without a share of them, and that share: drawn at random, the same whenever asked with this
    key. At least one example is left; None: that is all there is."""
    size = count(data)
    held = min(round(share * size), size - 1)
    if not held:
        return data, None
    order = torch.randperm(size, generator=torch.Generator().manual_seed(derive("validation", *key)))
    return some(data, order[held:].sort().values), some(data, order[:held].sort().values)


def parted(clients: Sequence[Data], held_out: HeldOut | None) -> tuple[Sequence[Data], Sequence[Data | None] | None]:
    """What every client learns from, and what it is judged by; None: nothing of its own."""
    if held_out is None:
        return clients, None
    if not isinstance(held_out, float | int | Sequence):
        raise TypeError(
            f"held_out is a {type(held_out).__name__}, must be a share, or a list with data for each client"
        )
    if not isinstance(held_out, float | int):
        if len(held_out) != len(clients):
            raise ValueError(f"held_out has data of {len(held_out)} clients, of whom there are {len(clients)}")
        return clients, held_out
    if not 0 < held_out < 1:
        raise ValueError(f"held_out is {held_out}, must be a share between 0 and 1, or each client's data")
    if isinstance(clients, OnDemand):
        both = clients.changed(lambda client, data: apart(ready(data, f"client {client}"), held_out, client))
        return both.changed(lambda _, pair: pair[0]), both.changed(lambda _, pair: pair[1])
    pairs = [
        apart(ready(data, f"client {client}"), held_out, client) for client, data in enumerate(given.listed(clients))
    ]
    return [learned for learned, _ in pairs], [judged for _, judged in pairs]


def ready(data: Data, whose: str) -> Data:
    """A dataset that can be read, or a pair of tensors."""
    if not reading.is_dataset(data):
        return given.examples(data, whose)
    reading.check(data, whose)
    return data


def joined(parts: Sequence[Data | None]) -> Data:
    """The examples of several clients as one's."""
    there = [part for part in parts if part is not None]
    if not there:
        raise ValueError("no client has enough examples to keep some apart")
    if any(map(reading.is_dataset, there)):
        return ConcatDataset(there)
    return tuple(trees.join(part) for part in zip(*there, strict=True))


def to(data: Pair, device: torch.device) -> Pair:
    """The same, on the device."""
    inputs, targets = (trees.change(part, lambda tensor: tensor.to(device, non_blocking=True)) for part in data)
    return inputs, targets
