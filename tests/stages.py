"""A server's machine and its clients', joined by function calls in virtual time: no threads, sockets or files.

What happens when is exact here, so that tests can say so. `federations` has the same machines with what drives them for
real.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quafl.codec import wire
from quafl.codec.coders import Parcel, coders_for
from quafl.codec.seams import Codec, Codecs, Packet
from quafl.core.messages import Buffers, Model
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm, Optimizer, Task
from quafl.protocol import log, messages
from quafl.protocol.carrier import SERVER, Unreachable
from quafl.protocol.client import ClientSide, Terms
from quafl.protocol.layout import digest_of, layout_of
from quafl.protocol.log import Reported
from quafl.protocol.machine import Answer, Ask, Asked, Compute, Do, Done, Say, Wake, Woken, Write
from quafl.protocol.members import Limits, Member
from quafl.protocol.messages import Contact, Hello, Message, Repair, Reply, parcel_from, parcel_parts, to_bytes
from quafl.protocol.server import ServerSide
from quafl.tasks import Quadratic

DIM = 3000  # three blocks of the lattice
PATIENT = Limits(silence=60.0, contact_seconds=5.0)


def problem(center: float = 1.0, dim: int = DIM) -> Quadratic:
    """A single party's."""
    return Quadratic(torch.linspace(0.2, 1.0, dim), torch.full((1, dim), center))


class Steps(Quadratic):
    """The gradient of step k is the k-th unit vector, whatever the model: a vector shows which steps are in it, and how
    often."""

    __slots__ = ()

    def batch(self, client: int, step: int) -> tuple[int, Tensor]:
        return client, torch.zeros(len(self.curvature)).index_fill(0, torch.tensor([step]), 1.0)

    def gradient(self, model: Model, buffers: Buffers, batch: tuple[int, Tensor]) -> tuple[Model, Buffers]:
        return batch[1], buffers


def steps_task(dim: int = 200) -> Steps:
    return Steps(torch.ones(dim), torch.zeros(1, dim))


class Heard(NamedTuple):
    """What has travelled."""

    sender: str
    receiver: str
    octets: bytes

    @property
    def message(self) -> Message:
        return messages.from_bytes(self.octets)


Back = Callable[[Any], None]  # takes octets, or why there are none


class Party(Protocol):
    def hear(self, sender: str, octets: bytes, back: Back) -> None: ...


@dataclass
class Puppet:
    """A party that answers what a function says; None: nothing at all."""

    says: Callable[[bytes], bytes | None]

    def hear(self, sender: str, octets: bytes, back: Back) -> None:
        answer = self.says(octets)
        if answer is not None:
            back(answer)


@dataclass
class Hand:
    """Carries out what a machine wants, until its process is killed."""

    stage: "Stage"
    name: str
    machine: Any
    work_seconds: float = 0.0  # that something takes to compute
    full: bool = False  # its disk
    alive: bool = True
    said: list[str] = field(default_factory=list)
    written: list[bytes] = field(default_factory=list)
    on_write: Callable[[Any], None] = lambda client: None  # sees the client whose report is on the disk now
    calls: dict[int, Back] = field(default_factory=dict)

    def hear(self, sender: str, octets: bytes, back: Back) -> None:
        number = len(self.calls) + 1
        self.calls[number] = back
        self.happen(Asked(number, sender, octets))

    def happen(self, event: Any) -> None:
        if self.alive:
            for effect in self.machine.happen(self.stage.now, event):
                self._carry_out(effect)

    def do(self, work: Callable[[Any], Any]) -> None:
        """Something to the machine; what it then wants is carried out."""
        work(self.machine)
        self.happen(Woken())

    def _carry_out(self, effect: Any) -> None:
        match effect:
            case Answer(call, octets):
                self.calls[call](octets)
            case Say(_, sentence):
                self.said.append(sentence)
            case Wake(at):
                self.stage.later(at - self.stage.now, lambda: self.happen(Woken()))
            case Do(number, Ask(name, octets, within)):
                self.stage.ask(self.name, name, octets, within, lambda result: self.happen(Done(number, result)))
            case Do(number, Compute(work)):
                self.stage.later(self.work_seconds, lambda: self._compute(number, work))
            case Do(number, Write(record)):
                reporting = getattr(self.machine, "client", None)
                self.stage.later(0.0, lambda: self._write(number, record, reporting))

    def _compute(self, number: int, work: Callable[[], Any]) -> None:
        if not self.alive:
            return
        try:
            result = work()
        except Exception as error:
            result = error
        self.happen(Done(number, result))

    def _write(self, number: int, record: bytes, reporting: Any) -> None:
        if not self.alive:
            return
        if self.full:
            self.happen(Done(number, OSError(28, "No space left on device")))
            return
        self.written.append(record)
        self.on_write(reporting)
        self.happen(Done(number, None))


class Kept(NamedTuple):
    """A server's checkpoint."""

    state: dict[str, Any]
    number: int  # of the last record that is in it


class Stage:
    """One server and its clients. `run` and `until` let time pass."""

    def __init__(
        self,
        algorithm: Algorithm,
        codec: Codec | Codecs,
        optimizer: Optimizer,
        limits: Limits = PATIENT,
        task: Task | None = None,
    ) -> None:
        self.now = 0.0
        self.terms = Terms(algorithm, coders_for(algorithm, codec), optimizer)
        self.limits, self.task = limits, task or problem()
        self.text: dict[str, Any] = {"run": "test"}  # what clients are told
        self.heard: list[Heard] = []
        self.entries: list[log.Entry] = []
        self.parties: dict[str, Party] = {}
        self.carry: Callable[[Heard], bool] = lambda heard: True  # False: it is lost
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = self._sessions = 0
        self._begun = False
        self.server = self._make_server()

    # Time

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + max(seconds, 0.0), self._count, work))

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self._next()
        self.now = end

    def until(self, holds: Callable[[], bool], most: float = 1000.0) -> None:
        """Let time pass until it holds."""
        end = self.now + most
        while not holds():
            failure = self.machine.failure
            assert failure is None, f"{type(failure).__name__}: {failure}"
            assert self._events, "nothing more will happen"
            assert self._events[0][0] <= end, "it never came to be; " + "; ".join(self.server.said[-5:])
            self._next()

    def _next(self) -> None:
        at, _, work = heapq.heappop(self._events)
        self.now = max(self.now, at)
        work()

    # The network

    def ask(self, sender: str, receiver: str, octets: bytes, within: float, back: Back) -> None:
        waits = [True]

        def once(result: Any) -> None:
            if waits:
                waits.clear()
                if isinstance(result, bytes):
                    answer = Heard(receiver, sender, result)
                    self.heard.append(answer)
                    if not self.carry(answer):
                        self.later(within, lambda: back(Unreachable("did not answer in time")))
                        return
                back(result)

        def deliver() -> None:
            if not self.carry(question):
                return
            if receiver not in self.parties:
                once(Unreachable("cannot be reached"))
            else:
                self.parties[receiver].hear(sender, octets, once)

        question = Heard(sender, receiver, octets)
        self.heard.append(question)
        self.later(within, lambda: once(Unreachable("did not answer in time")))
        self.later(0.0, deliver)

    def tell_server(self, name: str, octets: bytes) -> Message:
        """What somebody says to the server by itself, and its answer."""
        answers: list[Any] = []
        self.ask(name, SERVER, octets, 30.0, answers.append)
        self.until(lambda: bool(answers))
        return messages.from_bytes(answers[0])

    def said_to(self, name: str, kind: type[Any]) -> list[Any]:
        """Messages of that kind that the server has sent it, by itself."""
        return [one.message for one in self.heard if one.receiver == name and isinstance(one.message, kind)]

    def said_by(self, name: str, kind: type[Any]) -> list[Any]:
        """Messages of that kind that it has sent, in order."""
        return [one.message for one in self.heard if one.sender == name and isinstance(one.message, kind)]

    # The server

    @property
    def machine(self) -> ServerSide:
        machine: ServerSide = self.server.machine
        return machine

    def _make_server(self, seed: int = 0) -> Hand:
        algorithm, coders, _ = self.terms
        start = algorithm.start(*self.task.initial())
        machine = ServerSide(algorithm, coders, start, Generators(seed), layout_of(self.task), self.text, self.limits)
        machine.on_entry = self.entries.append
        hand = Hand(self, SERVER, machine)
        self.parties[SERVER] = hand
        self._begun = False
        return hand

    def begin_round(self) -> None:
        if self._begun:
            self.server.do(ServerSide.go_on)
        else:
            self._begun = True
            self.server.do(ServerSide.begin)

    def round(self, most: float = 1000.0) -> log.Gave:
        """One round, from its beginning to its end; what the algorithm was given last in it."""
        self.begin_round()
        self.until(lambda: self.machine.reached or self.machine.failure is not None, most)
        assert self.machine.failure is None, self.machine.failure
        return self.given[-1]

    @property
    def given(self) -> list[log.Gave]:
        return [entry for entry in self.entries if isinstance(entry, log.Gave)]

    @property
    def looked(self) -> list[log.Looked]:
        return [entry for entry in self.entries if isinstance(entry, log.Looked)]

    def member(self, name: str) -> Member:
        return self.machine.members[name]

    def live(self) -> list[str]:
        return [member.name for member in self.machine.members.live(self.now)]

    def checkpoint(self) -> Kept:
        """Between two rounds."""
        return Kept(through_disk(self.machine.state()), len(self.server.written))

    def restart_server(self, kept: Kept) -> None:
        """Its process is killed; another goes on from the checkpoint, and what was written after it."""
        written, self.server.alive = self.server.written, False
        self.entries = []
        self.server = self._make_server(seed=99)  # what it draws is in its checkpoint
        self.server.written = written
        self.machine.restore(kept.state, [log.from_bytes(record) for record in written[kept.number :]])

    # Clients

    def join(self, name: str, task: Task | None = None, *, greet: bool = True, **options: Any) -> Hand:
        """A new client process."""
        self._sessions += 1
        machine = ClientSide(name, task or self.task, lambda text: self.terms, f"{self._sessions:x}", **options)
        hand = Hand(self, name, machine)
        hand.written = [log.to_bytes(report) for report in options.get("reports", ())]
        self.parties[name] = hand
        machine.begin()
        hand.happen(Woken())
        if greet:
            self.until(lambda: machine._terms is not None)
        return hand

    def kill(self, name: str) -> Hand:
        """As kill -9 does."""
        hand = self.parties.pop(name)
        assert isinstance(hand, Hand)
        hand.alive = False
        return hand

    def puppet(self, name: str, says: Callable[[bytes], bytes | None]) -> None:
        """Somebody who has said hello, and answers like that."""
        self.parties[name] = Puppet(says)
        self.tell_server(name, hello(self.task))

    def hello_again(self, name: str) -> None:
        """Of one who answers as it did before, but has been away."""
        self.tell_server(name, hello(self.task))


def through_disk(state: Any) -> Any:
    """As a checkpoint is read."""
    stream = BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def hello(task: Task | None = None, **more: Any) -> bytes:
    layout = digest_of(layout_of(task or problem()))
    return to_bytes(Hello(messages.as_text({"layout": layout, "session": "0a", **more})))


def reports_of(hand: Hand) -> list[Reported]:
    """What a client has written down, in all of its processes."""
    return [log.from_bytes(record) for record in hand.written]


def contact_codecs(stage: Stage, name: str) -> list[int]:
    """The codecs of what the server has sent: 0 is full precision."""
    found = []
    for contact in stage.said_to(name, Contact):
        down = stage.terms.algorithm.records.down
        body = contact.body[contact.receipts :]
        found.append(parcel_from(body, len(down.vectors()), len(down.numbers()))[0].packets[0].codec)
    return found


def packet(vector: Tensor, codec: Codec, distance: float = 1.0) -> Packet:
    return codec.encode(vector, torch.Generator(), distance=distance)


def reply_to(
    contact: bytes,
    made: Packet,
    *,
    distance: float = 0.5,
    speed: float = torch.nan,
    body: bytes | None = None,
    **changes: Any,
) -> bytes:
    """What an honest client of QuAFL could say, changed."""
    message = messages.from_bytes(contact)
    assert isinstance(message, Contact)
    parts = parcel_parts(Parcel((made,), (torch.tensor(speed),)), [distance])
    honest = Reply(message.ticket, 1, b"".join(parts) if body is None else body)
    return to_bytes(replace(honest, **changes))


def repair_of(contact: bytes, numbers: int = 1, place: int = 0) -> bytes:
    """A request for one more bit of the first block of what was sent."""
    message = messages.from_bytes(contact)
    assert isinstance(message, Contact)
    parcel, _ = parcel_from(message.body[message.receipts :], 1, numbers)
    (sent,) = parcel.packets
    request = replace(
        sent,
        kind="request",
        sent=sent.bits,
        bits=1,
        symbols=torch.tensor([0], dtype=torch.int32),
        checks=sent.checks[:0],
        exact=sent.exact[:0],
    )
    return to_bytes(Repair(message.ticket, place, wire.to_bytes(request)))
