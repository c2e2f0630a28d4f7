"""Clients spread over workers. A client's state and data stay where the client lives; what is said travels."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from io import BytesIO
from itertools import chain
from pickle import Pickler, Unpickler, dumps, loads
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from quafl.codec.packets import Share
from quafl.codec.seams import Packet
from quafl.core.messages import Message
from quafl.core.seams import Ids
from quafl.sim.crew import Contact, Crew, Repair, Soon, Telling, Voices, Words
from quafl.sim.executors import Sequential
from quafl.sim.store import Store


class Lost(Exception):
    """A worker is gone, and with it its clients' states."""


Call: TypeAlias = tuple[str, tuple[Any, ...]]  # a method, and its arguments
NOTHING: Mapping[int, Iterator[Call]] = MappingProxyType({})


class Workers(Protocol):
    """The ways to the workers. Octets go there and come back; a worker does what it is asked in that order."""

    def __len__(self) -> int:
        """How many there are."""

    def share(self, content: bytes) -> Any:
        """Something that several of them will be given, in place of its octets."""

    def ask(self, asked: Mapping[int, Call], meanwhile: Mapping[int, Iterator[Call]]) -> dict[int, bytes]:
        """What each of those workers answers. Lost, if one of them is. Until all have, a worker that has nothing to do
        is told what is of use `meanwhile`, one call after another; nobody asks what comes of it."""

    def tell(self, told: Mapping[int, Call]) -> None:
        """Likewise, without waiting: what goes wrong is raised by the next `ask`."""


class Part(NamedTuple):
    """Those of the contacted clients that live with one worker."""

    worker: int
    rows: Tensor  # among all that were contacted together


class Spread:
    """Clients that live with workers: client i with worker i mod W. Their numbers are known here, too."""

    def __init__(self, workers: Workers, store: Store) -> None:
        self._workers, self._store = workers, store
        self._device = store.device
        self._parts: dict[int, list[Part]] = {}  # of those that have not said their words yet
        self._ids: dict[int, Ids] = {}
        self._answers: dict[int, Tensor] = {}
        self._changed: set[int] = set()  # clients whose numbers are not known here, as they know more now
        self.octets = 0  # ever, both ways

    @property
    def name(self) -> str:
        """Of the first worker's executor: all have the same."""
        name: str = self._ask({0: ("name", ())})[0]
        return name

    def outline(self, ids: Ids) -> Any:
        """See Contacts."""
        changed = [client for client in ids.tolist() if client in self._changed]
        if changed:
            self._learn(torch.tensor(changed))
        return self._store.outline(ids)

    def _learn(self, ids: Ids) -> None:
        """What those clients have counted."""
        mine = {worker: ids[rows] for worker, rows in self._apart(ids)}
        found = self._ask({worker: ("numbers", (its,)) for worker, its in mine.items()})
        for worker, numbers in found.items():
            self._store.put_numbers(mine[worker], numbers)
        self._changed.difference_update(ids.tolist())

    def contact(self, contacts: Sequence[Contact], telling: Telling, soon: Soon | None = None) -> list[list[Repair]]:
        """See Contacts."""
        mine: dict[int, list[Contact]] = {}
        for one in contacts:
            self._ids[one.number], self._parts[one.number] = one.ids, self._apart(one.ids)
            for worker, rows in self._parts[one.number]:
                mine.setdefault(worker, []).append(Contact(one.number, *(values[rows] for values in one[1:])))
        told = self._shared(telling, len(mine))
        asked = {worker: ("contact", (its,)) for worker, its in mine.items()}
        found = self._ask(asked, told, meanwhile=self._early(soon) if contacts and soon else NOTHING)
        repairs = {
            (worker, one.number): theirs
            for worker, its in mine.items()
            for one, theirs in zip(its, found[worker], strict=True)
        }
        return [
            [
                repair._replace(row=int(rows[repair.row]))
                for worker, rows in self._parts[one.number]
                for repair in repairs[worker, one.number]
            ]
            for one in contacts
        ]

    @cached_property
    def _may_step_early(self) -> bool:
        """Whether a worker may wait for others, and it matters for no number beside whom a client is computed."""
        return len(self._workers) > 1 and self.name == Sequential.name

    def _early(self, soon: Soon) -> Mapping[int, Iterator[Call]]:
        """For each worker, steps of its clients that are contacted soon, and not now, one at a time."""
        if not self._may_step_early:
            return NOTHING
        ids, steps = soon()
        free = (steps > 0) & ~torch.isin(ids, torch.cat(list(self._ids.values())))
        ids, steps = ids[free], steps[free]

        def one_by_one(worker: int, rows: Tensor) -> Iterator[Call]:
            for client in ids[rows].repeat_interleave(steps[rows]).split(1):
                yield self._sent({worker: ("step_early", (client,))})[worker]

        return {part.worker: one_by_one(*part) for part in self._apart(ids)}

    def compute(self, groups: Sequence[Sequence[int]]) -> list[Voices]:
        """See Contacts."""
        mine: dict[int, list[list[int]]] = {}
        for group in groups:
            for worker in {part.worker for number in group for part in self._parts[number]}:
                its = [number for number in group if any(part.worker == worker for part in self._parts[number])]
                mine.setdefault(worker, []).append(its)
        found = self._ask({worker: ("compute", (its,)) for worker, its in mine.items()})
        heard = {
            (worker, number): voices
            for worker, its in mine.items()
            for number, voices in zip(chain.from_iterable(its), found[worker], strict=True)
        }
        together = []
        for number in chain.from_iterable(groups):
            parts = self._parts[number]
            answers, broken = (
                _together([(part.rows, heard[part.worker, number][place]) for part in parts]) for place in (0, 1)
            )
            self._answers[number] = answers
            together.append(Voices(answers, broken))
        return together

    def say(self, number: int, rng: torch.Generator, *, at_once: bool) -> Words:
        """See Contacts."""
        ids, parts, answers = self._ids.pop(number), self._parts.pop(number), self._answers.pop(number)
        places = answers.cumsum(0) - 1
        mine = [places[part.rows][answers[part.rows]] for part in parts]
        drawing = rng.get_state(), int(answers.sum())
        asked = {part.worker: ("say", (number, *drawing, its, at_once)) for part, its in zip(parts, mine, strict=True)}
        found = self._ask(asked)
        for part in parts:
            _, numbers, drawn = found[part.worker]
            self._store.put_numbers(ids[part.rows], numbers)
            rng.set_state(drawn)  # all have drawn as much
        together = Words.join([found[part.worker][0] for part in parts])
        order = torch.cat(mine).argsort()
        return together if len(parts) == 1 else together[order]

    def said(self, ids: Ids) -> None:
        """See Contacts. It would be more than what is asked for."""

    def refine(self, client: int, place: int, request: Packet) -> Packet:
        """See Contacts."""
        worker = client % len(self._workers)
        refinement: Packet = self._ask({worker: ("refine", (client, place, request))})[worker]
        return refinement

    def taken(self, ids: Ids, up: Message) -> None:
        """See Contacts. Its clients know what was decoded."""
        self._changed.update(ids.tolist())
        self._workers.tell(self._sent({part.worker: ("taken", (ids[part.rows],)) for part in self._apart(ids)}))

    def everybody(self) -> Store:
        """See Contacts. A copy."""
        everybody = copy(self._store)
        everybody.restore(self.state()["clients"])
        return everybody

    def state(self) -> dict[str, Any]:
        """See Contacts: as if all lived in one place."""
        self._learn(torch.tensor(list(self._changed), dtype=torch.int64))
        found = self._ask(dict.fromkeys(range(len(self._workers)), ("state", ()))).values()
        clients = self._store.state()
        clients["known"] = {client: tensors for one in found for client, tensors in one["clients"]["known"].items()}
        return {"clients": clients, "said": {client: one for state in found for client, one in state["said"].items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """See Contacts."""
        self._parts, self._ids, self._answers, self._changed = {}, {}, {}, set()
        self._store.restore({**state["clients"], "known": {}})
        count = len(self._workers)

        def of(worker: int, table: Mapping[int, Any]) -> dict[int, Any]:
            return {client: one for client, one in table.items() if client % count == worker}

        self._ask(
            {
                worker: (
                    "restore",
                    (
                        {
                            "clients": {**state["clients"], "known": of(worker, state["clients"]["known"])},
                            "said": of(worker, state["said"]),
                        },
                    ),
                )
                for worker in range(count)
            }
        )

    def _apart(self, ids: Ids) -> list[Part]:
        """By where they live."""
        owners = ids % len(self._workers)
        return [Part(worker, (owners == worker).nonzero().squeeze(-1)) for worker in owners.unique().tolist()]

    def _shared(self, thing: Any, times: int) -> Any:
        content = packed(thing)
        self.octets += times * len(content)
        return self._workers.share(content)

    def _ask(
        self, asked: Mapping[int, Call], *shared: Any, meanwhile: Mapping[int, Iterator[Call]] = NOTHING
    ) -> dict[int, Any]:
        """What each of the workers gives back for a method with these arguments, and what all are given."""
        found = self._workers.ask(self._sent(asked, *shared), meanwhile)
        self.octets += sum(map(len, found.values()))
        return {worker: unpacked(content, self._device) for worker, content in found.items()}

    def _sent(self, asked: Mapping[int, Call], *shared: Any) -> dict[int, Call]:
        own = {worker: packed(arguments) for worker, (_, arguments) in asked.items()}
        self.octets += sum(map(len, own.values()))
        return {worker: (method, (own[worker], *shared)) for worker, (method, _) in asked.items()}


class Worker:
    """Where some of the clients live: in a process of its own, asked by a Spread."""

    def __init__(self, crew: Crew, device: torch.device) -> None:
        self._crew, self._device = crew, device

    def do(self, method: str, own: bytes, *shared: bytes) -> bytes:
        """One of the methods below."""
        arguments = [*unpacked(own, self._device), *(unpacked(content, self._device) for content in shared)]
        return packed(getattr(self, "_" + method)(*arguments))

    def _name(self) -> str:
        return self._crew.name

    def _contact(self, contacts: Sequence[Contact], telling: Telling) -> list[list[Repair]]:
        return list(self._crew.contact(contacts, telling))

    def _step_early(self, ids: Ids) -> None:
        self._crew.step_early(ids)

    def _compute(self, groups: Sequence[Sequence[int]]) -> list[Voices]:
        return list(self._crew.compute(groups))

    def _say(
        self, number: int, state: Tensor, total: int, mine: Tensor, at_once: bool
    ) -> tuple[Words, dict[str, Tensor], Tensor]:
        """The words, what the clients count, and where the generator then stands."""
        ids, generator = self._crew.speaking(number), torch.Generator()
        generator.set_state(state)
        try:
            words = self._crew.say(number, Share(generator, total, mine), at_once=at_once)
        except TypeError as error:
            if "Share" not in str(error):
                raise
            raise ValueError(
                "the codec draws from its generator itself, and with run.workers some clients draw elsewhere: draw by "
                "quafl.codec.packets.draw_seeds, or leave run.workers at 1"
            ) from error
        return words, self._crew.store.numbers_of(ids), generator.get_state()

    def _refine(self, client: int, place: int, request: Packet) -> Packet:
        return self._crew.refine(client, place, request)

    def _taken(self, ids: Ids) -> None:
        self._crew.taken(ids)

    def _numbers(self, ids: Ids) -> dict[str, Tensor]:
        return self._crew.store.numbers_of(ids)

    def _state(self) -> dict[str, Any]:
        return self._crew.state()

    def _restore(self, state: dict[str, Any]) -> None:
        self._crew.restore(state)


class _Packer(Pickler):
    """Puts tensors beside what refers to them, each once, and of a view no more than what is seen of it."""

    def __init__(self, stream: BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, thing: Any) -> int | None:
        """Its place, if it is a tensor."""
        if not isinstance(thing, Tensor):
            return None
        if id(thing) not in self._places:
            self._places[id(thing)] = len(self.tensors)
            self.tensors.append(thing)
        return self._places[id(thing)]


class _Unpacker(Unpickler):
    def __init__(self, stream: BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        """The tensor of that place."""
        return self._tensors[place]


def packed(thing: Any) -> bytes:
    """As octets, wherever its tensors are."""
    packer = _Packer(stream := BytesIO())
    packer.dump(thing)
    return dumps((stream.getvalue(), [_octets(tensor) for tensor in packer.tensors]), protocol=5)


def unpacked(content: bytes, device: torch.device) -> Any:
    """What `packed` made octets of, with what was on a GPU on this device."""
    body, tensors = loads(content)
    return _Unpacker(BytesIO(body), [_tensor(device, *one) for one in tensors]).load()


def _octets(tensor: Tensor) -> tuple[bytes, torch.dtype, torch.Size, bool]:
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return plain.view(torch.uint8).numpy().tobytes(), tensor.dtype, tensor.shape, tensor.device.type != "cpu"


def _tensor(device: torch.device, octets: bytes, dtype: torch.dtype, shape: torch.Size, elsewhere: bool) -> Tensor:
    plain = torch.frombuffer(bytearray(octets), dtype=dtype) if octets else torch.empty(0, dtype=dtype)
    tensor = plain.reshape(shape)
    return tensor.to(device) if elsewhere else tensor


def _together(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Values at their rows."""
    rows, values = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return values[rows.argsort()]
