"""What clients do when they are contacted: they hear, take local steps, and say something. Who is contacted, and when,
is the fleet's."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from quafl.codec.coders import Beside, Coder, Coders, Parcel
from quafl.codec.seams import Packet
from quafl.core.client import Said, counted, listen, speak
from quafl.core.messages import Message
from quafl.core.seams import Algorithm, Counts, Ids, Optimizer, Task
from quafl.core.structs import Struct
from quafl.protocol.speech import Hearing, decode_down, encode_up, only, understood
from quafl.sim.executors import Changing, Executor
from quafl.sim.store import Store

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Telling:
    """What the server tells clients that are contacted together."""

    round: int
    parcel: Parcel  # on its way
    told: Message  # in full precision: whence repairs are answered
    coder: Coder


class Repair(NamedTuple):
    """A client could not decode a part of the message, and has asked for more bits of it."""

    row: int  # the client's, of those contacted together
    asked: int  # octets
    answered: int
    first: bool  # of this vector of the message


@dataclass(frozen=True, slots=True)
class Words(Struct):
    """What clients say, a row each."""

    parcel: Parcel
    steps: Counts
    distances: Mapping[str, Tensor]


class Voices(NamedTuple):
    """Who of the contacted clients answers, a row each."""

    answers: Tensor  # bool
    broken: Tensor  # bool: not, because its progress is not finite


class Contact(NamedTuple):
    """Clients that are contacted together."""

    number: int  # in common, until they have said their words
    ids: Ids
    steps: Counts  # that they take before they hear the message
    more: Counts  # and before they answer


Soon: TypeAlias = Callable[[], tuple[Ids, Counts]]  # who is probably contacted next, and their steps until then


class Contacts(Protocol):
    """The clients of a fleet, wherever they are. What is asked of several groups of them may go on side by side, or be
    put off until it is looked at."""

    @property
    def name(self) -> str:
        """Of how local steps are computed."""

    def outline(self, ids: Ids) -> Any:
        """Those clients' numbers."""

    def contact(
        self, contacts: Sequence[Contact], telling: Telling, soon: Soon | None = None
    ) -> Iterable[Sequence[Repair]]:
        """Clients hear a message; the repairs of each contact. Whoever has to wait meanwhile may take steps that will
        be needed `soon`."""

    def compute(self, groups: Sequence[Sequence[int]]) -> Iterable[Voices]:
        """Contacted clients take the steps before their answers, those of a group of contacts together; the voices of
        each contact."""

    def say(self, number: int, rng: torch.Generator, *, at_once: bool) -> Words:
        """Their answers, a row for each client that answers. The clients are then what they become."""

    def said(self, ids: Ids) -> Message | None:
        """Those clients' last answers in full precision, a row each; None, where they are elsewhere."""

    def refine(self, client: int, place: int, request: Packet) -> Packet:
        """The server asks for more bits of a vector of the client's last answer."""

    def taken(self, ids: Ids, up: Message) -> None:
        """Those clients' last answers have arrived, and been decoded."""

    def everybody(self) -> Store:
        """All clients as they are."""

    def state(self) -> dict[str, Any]:
        """For `restore`, when nobody has more steps to take."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from there."""


class _Said(NamedTuple):
    """A client's last answer, until the client knows what has become of it."""

    up: Message  # as it was said
    row: int
    parcel: Parcel  # as it was sent


class _Contacted(NamedTuple):
    """Clients that are to answer."""

    ids: Ids
    hearing: Hearing
    clients: Any
    more: Counts


class Crew:
    """All clients here, in one store; local steps are taken by an executor."""

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        algorithm: Algorithm,
        coders: Coders,
        store: Store,
        execute: Executor,
    ) -> None:
        self.store, self.execute = store, execute
        self._task, self._optimizer, self._algorithm, self._coders = task, optimizer, algorithm, coders
        self._contacted: dict[int, _Contacted] = {}
        self._speaking: dict[int, tuple[Ids, Said, Hearing]] = {}
        self._said: dict[int, _Said] = {}
        self._early: dict[int, Any] = {}  # clients after steps that they have taken before they were asked, a row each

    @property
    def name(self) -> str:
        """Of the executor."""
        return self.execute.name

    def outline(self, ids: Ids) -> Any:
        """See Contacts."""
        return self.store.outline(ids)

    def contact(
        self, contacts: Sequence[Contact], telling: Telling, soon: Soon | None = None
    ) -> Iterator[list[Repair]]:
        """See Contacts."""
        for one in contacts:
            yield self._contact(*one, telling)
        self._early.clear()  # whoever has not been asked now was not to be foreseen

    def _contact(self, number: int, ids: Ids, steps: Counts, more: Counts, telling: Telling) -> list[Repair]:
        repairs: list[Repair] = []
        coder, parcel = telling.coder, telling.parcel

        def repaired(place: int, row: int, asked: int, answered: int, sent: int) -> None:
            repairs.append(Repair(row, asked, answered, first=sent == parcel.packets[place].bits))

        clients = self._stepped(ids, steps)
        clients = self._informed(ids, clients)
        hearing = decode_down(coder, parcel, clients, Beside(telling.told, repaired))
        clients = listen(self._algorithm, self._optimizer, clients, hearing.down, telling.round)
        self._contacted[number] = _Contacted(ids, hearing, clients, more)
        return repairs

    def _stepped(self, ids: Ids, steps: Counts) -> Any:
        """Those clients, after steps of which some may have been taken early."""
        clients = counted(self.store[ids], self._task, ids)
        early = [self._early.pop(client, None) for client in ids.tolist()]
        known = {row: one for row, one in enumerate(early) if one is not None and int(one.taken) <= int(steps[row])}
        if known:
            clients = clients.with_rows(torch.tensor(list(known)), type(clients).join(list(known.values())))
        left = steps - clients.taken
        return self.execute(clients, ids, left) if left.any() else clients

    def step_early(self, ids: Ids) -> None:
        """A client that will probably be contacted soon takes one more step; nobody sees it. If it cannot, it is said
        when that step is due."""
        before = self._early.pop(int(ids), None)
        if before is None:
            before = counted(self.store[ids], self._task, ids)
        try:
            self._early[int(ids)] = self.execute(before, ids, torch.ones_like(ids))
        except Exception:
            _log.debug("client %d cannot take a step early", int(ids), exc_info=True)

    def _keep(self, ids: Ids, clients: Any) -> None:
        """What they have become; steps that they took before are of no use any more."""
        self.store.put(ids, clients)
        for client in ids.tolist():
            self._early.pop(client, None)

    def _informed(self, ids: Ids, clients: Any) -> Any:
        """Those whose last answer was not applied, and so never will be, know it now."""
        said = {row: self._said.pop(client) for row, client in enumerate(ids.tolist()) if client in self._said}
        if not said:
            return clients
        rows = list(said)
        return clients.with_rows(torch.tensor(rows), self._algorithm.lost(clients[rows], self._ups(said.values())))

    def compute(self, groups: Sequence[Sequence[int]]) -> Iterator[Voices]:
        """See Contacts."""
        return chain.from_iterable(map(self._compute, groups))

    def _compute(self, numbers: Sequence[int]) -> list[Voices]:
        contacted = [self._contacted.pop(number) for number in numbers]
        trained, start = self._trained(contacted), 0
        voices = []
        for number, one in zip(numbers, contacted, strict=True):
            mine = trained if len(numbers) == 1 else trained[start : start + len(one.ids)]
            start += len(one.ids)
            said = speak(self._algorithm, self._optimizer, mine, one.hearing.down)
            hearing = one.hearing if said.answers.all() else only(one.hearing, said.answers)
            self._speaking[number] = one.ids, said, hearing
            voices.append(Voices(said.answers, said.broken))
        return voices

    def _trained(self, contacted: Sequence[_Contacted]) -> Any:
        """All their clients, after the steps before their answers."""
        clients = type(contacted[0].clients).join([one.clients for one in contacted])
        more = torch.cat([one.more for one in contacted])
        return self.execute(clients, torch.cat([one.ids for one in contacted]), more) if more.any() else clients

    def say(self, number: int, rng: Any, *, at_once: bool) -> Words:
        """See Contacts. `rng` may be a codec.packets.Share of a generator."""
        ids, said, hearing = self._speaking.pop(number)
        parcel, after = encode_up(self._coders, said, hearing, at_once=at_once, rng=rng)
        self._keep(ids, after)
        answering = enumerate(ids[said.answers].tolist())
        self._said |= {client: _Said(said.up, row, parcel) for row, client in answering}
        return Words(parcel, said.steps, hearing.measured)

    def said(self, ids: Ids) -> Message:
        """See Contacts."""
        return self._ups([self._said[client] for client in ids.tolist()])

    def refine(self, client: int, place: int, request: Packet) -> Packet:
        """See Contacts."""
        said = self._said[client]
        return self._coders.up.refine(said.up[said.row], place, request)

    def speaking(self, number: int) -> Ids:
        """Those who have not said their words yet."""
        return self._speaking[number][0]

    def taken(self, ids: Ids, up: Message | None = None) -> None:
        """See Contacts. Where nobody says how the server has decoded them, the clients know it by themselves.

        In a federation clients hear of it when they are contacted next; here what they then remember is put down at
        once, as their steps until then see nothing of it, and what they said need not be kept.
        """
        said = [self._said.pop(client) for client in ids.tolist()]
        if (applied := self._algorithm.applied) is None or not said:
            return
        before = self.store[ids]
        after = applied(before, self._as_taken(said) if up is None else up)
        stood_on = ("base", "progress", "buffers", "optimizer", "budget")
        changed = any(getattr(after, name) is not getattr(before, name) for name in stood_on)
        if changed or (self._algorithm.direction is not None and before.budget.any()):
            raise ValueError(
                f"{type(self._algorithm).__name__}.applied changes what local steps before the next message stand on; "
                f"it may change what they do not see, or take no steps until then"
            )
        self._keep(ids, after)

    def _as_taken(self, said: Sequence[_Said]) -> Message:
        """Those answers, as far as their clients know how the server has decoded them."""
        parcel = Parcel.gather([(one.parcel, one.row) for one in said])
        return understood(self._coders.up, self._ups(said), parcel)[0]

    def _ups(self, said: Iterable[_Said]) -> Message:
        """Those answers in full precision, a row each."""
        ups: Message = self._algorithm.records.up.gather([(one.up, one.row) for one in said])
        return ups

    def everybody(self) -> Store:
        """See Contacts."""
        return self.store

    def mark(self) -> tuple[Any, ...]:
        """For `back`, while nobody has been asked anything."""
        return self.store.mark(), dict(self._said), self.execute.mark() if isinstance(self.execute, Changing) else 0

    def back(self, mark: tuple[Any, ...]) -> None:
        """As it was at the mark."""
        self._contacted, self._speaking = {}, {}
        clients, self._said, taken = mark
        self.store.back(clients)
        if isinstance(self.execute, Changing):
            self.execute.back(taken)

    def state(self) -> dict[str, Any]:
        """See Contacts."""
        return {"clients": self.store.state(), "said": {client: _tree(one) for client, one in self._said.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """See Contacts."""
        self._contacted, self._speaking, self._early = {}, {}, {}
        self.store.restore(state["clients"])
        made = self._algorithm.records.up
        self._said = {
            client: _Said(made.stack([made.from_tree(up)]), 0, Parcel.stack([Parcel.from_tree(parcel)]))
            for client, (up, parcel) in state["said"].items()
        }


def _tree(said: _Said) -> tuple[Any, ...]:
    return said.up[said.row].tree(), said.parcel[said.row].each(Tensor.clone).tree()
