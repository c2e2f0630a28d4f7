"""A client of a real federation: it trains in the background, and answers the server's contacts at once.

A local step is computed on a snapshot of the client's state, and counts only if the state is still the same when it is
done: a contact takes the state as it is, without waiting, and the step under way is dropped, as in the simulator.
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Condition, Lock, Thread
from time import monotonic
from typing import Any, NamedTuple, TypeAlias
from uuid import uuid4

import torch
from torch import Tensor

from quafl.codec import Identity, wire
from quafl.codec.identity import IDENTITY
from quafl.core.client import contact, local_step, newcomer
from quafl.core.randomness import Generators
from quafl.core.seams import (
    Algorithm,
    ClientState,
    Codecs,
    DecodeError,
    Note,
    Optimizer,
    Packet,
    Refine,
    Task,
    WireError,
)
from quafl.deploy import messages
from quafl.deploy.carrier import Octets, Unreachable
from quafl.deploy.messages import (
    HELLO_SECONDS,
    NOT_TOLD,
    Accepted,
    Broken,
    Contact,
    Finished,
    Hello,
    Message,
    Received,
    Refinement,
    Refused,
    Repair,
    Reply,
    WantsAll,
    Welcome,
)
from quafl.record.checkpoints import Checkpoints
from quafl.record.summary import RecordError

_log = logging.getLogger(__name__)

HELLO_PATIENCE = 5.0  # seconds for the server's answer to them
PATIENCE = 30.0  # for its answers to anything else,
SLOWEST_LINK = 10_000  # and a second more for so many octets that it is sent
FAR = 0.5  # of a message's blocks; if more do not decode, the model in full costs less than their repair


class Rejected(Exception):
    """The server does not want this client: its reason, in a sentence."""


Ask: TypeAlias = Callable[[bytes, float], Octets]  # octets to the server, seconds to wait -> its answer, or Unreachable


class Terms(NamedTuple):
    """What the server has its clients do."""

    algorithm: Algorithm
    codecs: Codecs
    optimizer: Optimizer


class _TooFar(Exception):
    """A repair would cost more than the whole model."""


class _Superseded(Exception):
    """The server has sent something newer."""


@dataclass(frozen=True, slots=True)
class _Task:
    """A contact that is answered when the client is done."""

    message: Contact
    packet: Packet
    ticket: bytes


@dataclass(frozen=True, slots=True)
class _Given:
    """The last answer: repeated when asked again, and the vector behind it, for repairs."""

    ticket: bytes
    octets: bytes
    report: Tensor | None


class Worker:
    """One client. `agree` makes the terms of the text that the server sends."""

    def __init__(
        self,
        task: Task,
        folder: Path,
        agree: Callable[[dict[str, Any]], Terms],
        ask: Ask,
        *,
        step_seconds: float = 0.0,
        tell_speed: bool = True,
        checkpoint_seconds: float = 30.0,
    ) -> None:
        self._task, self._agree, self._ask = task, agree, ask
        self._step_seconds, self._tell_speed, self._checkpoint_seconds = step_seconds, tell_speed, checkpoint_seconds
        self._checkpoints = Checkpoints(folder)
        self._changed = Condition()  # guards what follows
        self._state: ClientState | None = None  # a single row; None until the server's model has arrived
        self._pending: _Task | None = None
        self._given: _Given | None = None
        self._answering = False
        self._stopping = False
        self._one_at_a_time = Lock()
        self._terms: Terms | None = None
        self._text: dict[str, Any] = {}
        self._run = ""
        self._rng = Generators(0)
        self._model, self._buffers = task.initial()
        self.session = uuid4().hex
        self.hello_seconds = HELLO_SECONDS  # until the next sign of life, as the server wishes
        self._counting = Lock()
        self.sent = self.received = 0  # octets
        self._restored: dict[str, Any] | None = None
        self._saved: ClientState | None = None
        self._threads = [
            Thread(target=self._train, name="trainer", daemon=True),
            Thread(target=self._keep_saving, name="saver", daemon=True),
        ]
        self.finished = False  # the server has said so
        self.failure: Exception | None = None  # of the user's task

    # Life

    def begin(self) -> None:
        """Start training, as soon as there is something to train."""
        try:
            self._restored = self._checkpoints.newest()
        except RecordError as error:
            _log.error("%s; the server brings this client back", error)
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop, and save."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(PATIENCE)
        self._save(clean=True)

    def say_hello(self, *, leaving: bool = False) -> None:
        """Tell the server that this client is there, and hear what it wants; Unreachable or Rejected otherwise."""
        hello = {
            "dim": len(self._model),
            "buffers": len(self._buffers),
            "session": self.session,
            "leaving": leaving,
        }
        octets = messages.to_bytes(Hello(messages.as_text(hello)))
        match self._say(octets, HELLO_SECONDS if leaving else HELLO_PATIENCE):
            case Welcome(text):
                welcome = messages.from_text(text)
                self.hello_seconds = float(welcome.pop("hello_seconds", HELLO_SECONDS))
                self._agree_to(welcome)
            case Refused() as refusal:
                raise Rejected(messages.sentence(refusal))
            case Finished():
                self.finished = True
            case other:
                raise WireError(f"the server answered a Hello with a {type(other).__name__}")

    def status(self) -> dict[str, Any]:
        """For the log."""
        with self._changed:
            state = self._state
        done = {} if state is None else {"steps": int(state.steps), "contacts": int(state.contacts)}
        return {**done, "sent": self.sent, "received": self.received}

    # What the server says

    def hear(self, octets: Octets) -> bytes:
        """The answer to a message from the server."""
        try:
            answer = self._hear(octets)
        except (WireError, DecodeError, Unreachable) as error:
            _log.warning("a message from the server was dropped: %s", error)
            answer = messages.to_bytes(Refused(str(error).encode()))
        self._count(sent=answer, received=octets)
        return answer

    def _hear(self, octets: Octets) -> bytes:
        match messages.from_bytes(octets):
            case Contact() as message:
                with self._one_at_a_time:
                    return self._contacted(message, messages.ticket_of(octets))
            case Repair() as message:
                return messages.to_bytes(self._refine(message))
            case Finished():
                self.finished = True
                return messages.to_bytes(Received())
            case other:
                raise WireError(f"a {type(other).__name__} is nothing that a server says")

    def _contacted(self, message: Contact, ticket: bytes) -> bytes:
        if self._given is not None and self._given.ticket == ticket:
            return self._given.octets  # asked again: the same answer
        terms = self._terms
        if terms is None:
            raise WireError("this client has not agreed on the terms yet")
        packet = self._packet(message.packet)
        with self._changed:
            if self._stopping:
                raise WireError("this client is stopping")
            if self._state is None and packet.codec != IDENTITY:
                return messages.to_bytes(WantsAll(ticket))
            if terms.algorithm.answers == "when done":
                self._pending = _Task(message, packet, ticket)
                self._changed.notify_all()
                return messages.to_bytes(Accepted())
            self._answering = True  # Y^i is frozen here
        try:
            return self._answer(message, packet, ticket, terms, train=_not_now)
        except _TooFar:
            return messages.to_bytes(WantsAll(ticket))
        finally:
            with self._changed:
                self._answering = False
                self._changed.notify_all()

    def _answer(
        self,
        message: Contact,
        packet: Packet,
        ticket: bytes,
        terms: Terms,
        train: Callable[[ClientState], ClientState],
    ) -> bytes:
        """InteractWithServer, for one client."""
        self._given = None  # the server has moved on
        joined = self._state is None
        if self._state is None:
            self._state = self._newcomer(Identity().decode(packet, key=self._model), packet.exact, terms)
        codecs = Codecs(up=terms.codecs.up, down=Identity()) if packet.codec == IDENTITY else terms.codecs
        heard = codecs.down.decode(packet, key=self._state.base, refine=self._ask_for_repair(ticket, packet))
        sound, answer, report, after = contact(
            self._hand_over(terms),
            heard,
            packet,
            Note(round=message.round, sampled=message.sampled, slowest=message.slowest),
            algorithm=terms.algorithm,
            codecs=codecs,
            optimizer=terms.optimizer,
            rng=self._rng["dither"],
            train=train,
        )
        if joined:  # a contact that found nothing, because there was nothing, says nothing about the speed
            after = replace(
                after, contacts=torch.zeros_like(after.contacts), expected_steps=torch.zeros_like(after.expected_steps)
            )
        if sound.all():
            reply = Reply(
                ticket=ticket,
                round=message.round,
                steps=int(answer.steps) if self._tell_speed else NOT_TOLD,
                distance=float(answer.distance),
                speed=float(answer.speed) if self._tell_speed else torch.nan,
                packet=b"",
            )
            given = _Given(ticket, messages.to_bytes(reply, *wire.to_parts(answer.packet[0])), report[0])
            if not self._tell_speed:
                _log.info("round %d: %d steps, mean %.2f", message.round, answer.steps, float(after.expected_steps))
        else:
            given = _Given(ticket, messages.to_bytes(Broken(ticket)), None)
            _log.warning("round %d: the progress is not finite; it is dropped", message.round)
        with self._changed:
            self._state, self._given = after, given
            self._changed.notify_all()
        return given.octets

    def _hand_over(self, terms: Terms) -> ClientState:
        """The state, to be let go as soon as it is not needed: large models must not lie around. Should the contact
        fail, the server brings the client back. One that is answered when done may be superseded, and keeps it."""
        with self._changed:
            state = self._state
            assert state is not None
            if terms.algorithm.answers == "at once":
                self._state = None
                self._changed.notify_all()
            return state

    def _ask_for_repair(self, ticket: bytes, packet: Packet) -> Refine:
        def refine(row: int, request: Packet) -> Packet:
            if request.sent == packet.bits and len(request.symbols) > FAR * packet.checks.shape[-1]:
                raise _TooFar
            match self._exchange(Repair(ticket, wire.to_bytes(request))):
                case Refinement(bits):
                    return wire.from_bytes(bits)
                case other:
                    raise DecodeError(f"asked for a repair, got a {type(other).__name__}")

        return refine

    def _refine(self, message: Repair) -> Refinement:
        given, terms = self._given, self._terms
        if given is None or given.report is None or terms is None or given.ticket != message.ticket:
            raise WireError("a repair was asked for an answer that this client no longer has")
        request = self._packet(message.packet)
        if request.kind != "request":
            raise WireError(f"a repair was asked for with a {request.kind}")
        return Refinement(wire.to_bytes(terms.codecs.up.refine(given.report, request)))

    def _packet(self, octets: Octets) -> Packet:
        packet = wire.from_bytes(octets)
        if packet.dtype != torch.float32:
            raise WireError(f"message is of {packet.dtype}, expected float32")
        if packet.dim != len(self._model) or (packet.kind == "base" and len(packet.exact) != len(self._buffers)):
            raise WireError(
                f"message has d={packet.dim} and {len(packet.exact)} exact values, this client's model has "
                f"{len(self._model)} and {len(self._buffers)}; do both ends use the same model?"
            )
        return packet

    # Training

    def _train(self) -> None:
        try:
            while self._train_once():
                pass
        except Exception as error:  # whatever the user's task raises: the process ends with it
            _log.exception("training failed")
            self.failure = error

    def _train_once(self) -> bool:
        """One local step, or one contact that is answered when done; whether to go on."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._something_to_do())
            if self._stopping:
                return False
            task, before, terms = self._pending, self._state, self._terms
        assert terms is not None
        if task is not None:
            self._do(task, terms)
        else:
            assert before is not None
            self._advance(before, terms)
        return True

    def _something_to_do(self) -> bool:
        if self._answering or self._terms is None:
            return False
        if self._pending is not None:
            return True
        wants_more = self._state is not None and bool(self._state.taken < self._state.budget)
        return wants_more and self._terms.algorithm.answers == "at once"

    def _advance(self, before: ClientState, terms: Terms) -> None:
        """One local step; dropped if the state has changed meanwhile."""
        began = monotonic()
        after = self._step(before, terms)
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or self._state is not before,
                timeout=max(0.0, self._step_seconds - (monotonic() - began)),
            )
            if self._state is before and not self._answering:
                self._state = after

    def _step(self, state: ClientState, terms: Terms) -> ClientState:
        """On the terms that the state was made for, even if the server has just said others."""
        batch = self._task.batch(0, int(state.steps))
        return local_step(state[0], self._task, batch, terms.optimizer).each(lambda tensor: tensor.unsqueeze(0))

    def _do(self, task: _Task, terms: Terms) -> None:
        """A contact that is answered when done."""
        try:
            train = partial(self._take_budget, task, terms)
            octets = self._answer(task.message, task.packet, task.ticket, terms, train=train)
        except _TooFar:
            octets = messages.to_bytes(WantsAll(task.ticket))
        except _Superseded:
            return
        except (WireError, DecodeError, Unreachable) as error:
            _log.warning("round %d cannot be answered: %s", task.message.round, error)
            octets = b""
        if octets:
            self._deliver(task, octets)
        with self._changed:
            if self._pending is task:
                self._pending = None

    def _take_budget(self, task: _Task, terms: Terms, state: ClientState) -> ClientState:
        while int(state.taken) < int(state.budget):
            began = monotonic()
            state = self._step(state, terms)
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopping or self._pending is not task,
                    timeout=max(0.0, self._step_seconds - (monotonic() - began)),
                )
                if self._stopping or self._pending is not task:
                    raise _Superseded
        return state

    def _deliver(self, task: _Task, octets: bytes) -> None:
        """Until the server has it, or has sent something newer."""
        while True:
            try:
                match self._say(octets):
                    case Refused() as refusal:
                        said = messages.sentence(refusal)
                        _log.warning("the answer to round %d was refused: %s", task.message.round, said)
                return
            except (Unreachable, WireError):
                with self._changed:
                    if self._changed.wait_for(
                        lambda: self._stopping or self._pending is not task, timeout=HELLO_SECONDS
                    ):
                        return

    # Terms and state

    def _agree_to(self, text: dict[str, Any]) -> None:
        if text == self._text:
            return
        terms, run = self._agree(text), str(text["run"])
        with self._one_at_a_time:
            with self._changed:
                if run != self._run:
                    self._state, self._given, self._pending = None, None, None
                    self._rng = Generators(secrets.randbits(63))
                    self._restore(run, text, terms)
                elif self._state is not None:  # new settings of the same run: the model stays, the rest begins anew
                    self._state = self._newcomer(self._state.base[0], self._state.buffers[0], terms)
                    self._pending = None  # what it is asked next, it does on the new terms
                self._run, self._text = run, text
            if self._state is not None:
                self._checkpoints.save(self._snapshot(clean=False))  # from now on, its progress may be sent
            with self._changed:
                self._terms = terms
                self._changed.notify_all()
        _log.info("taking part in run %s: %s", run, type(terms.algorithm).__name__)

    def _newcomer(self, model: Tensor, buffers: Tensor, terms: Terms) -> ClientState:
        fresh = newcomer(model, buffers, terms.optimizer).each(lambda tensor: tensor.unsqueeze(0))
        return replace(fresh, budget=terms.algorithm.budget(torch.ones(1)))

    def _restore(self, run: str, text: dict[str, Any], terms: Terms) -> None:
        """Continue from the last checkpoint, if it is of this run. After a crash, nobody knows whether the progress in
        it has been sent: it is dropped. Nothing is applied twice."""
        kept, self._restored = self._restored, None
        if kept is None or kept["run"] != run:
            return
        state = ClientState.from_tree(kept["state"])
        if kept["text"] != messages.as_text(text).decode():
            state = self._newcomer(state.base[0], state.buffers[0], terms)
        elif not kept["clean"]:
            state = replace(state, progress=torch.zeros_like(state.progress), taken=torch.zeros_like(state.taken))
        if kept["given"] is not None:
            ticket, octets, report = kept["given"]
            self._given = _Given(_to_octets(ticket), _to_octets(octets), report)
        self._state = state
        self._rng.restore(kept["rng"])
        _log.info("going on from a checkpoint: %d steps, %s", int(state.steps), "clean" if kept["clean"] else "crashed")

    def _keep_saving(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._stopping, timeout=self._checkpoint_seconds):
                    return
            self._save(clean=False)

    def _save(self, *, clean: bool) -> None:
        """The state is never changed in place, so that it can be written while training and contacts go on."""
        with self._one_at_a_time, self._changed:  # between two contacts
            state = self._state
            if state is None or (state is self._saved and not clean):
                return
            snapshot = self._snapshot(clean=clean)
        try:
            self._checkpoints.save(snapshot)
            self._saved = state
        except OSError as error:
            _log.error("no checkpoint could be written: %s; going on without", error)

    def _snapshot(self, *, clean: bool) -> dict[str, Any]:
        """`clean`: nothing of it will be sent before it is restored."""
        assert self._state is not None
        given = self._given
        return {
            "run": self._run,
            "text": messages.as_text(self._text).decode(),
            "clean": clean,
            "state": self._state.tree(),
            "rng": self._rng.state(),
            "given": given and (_to_tensor(given.ticket), _to_tensor(given.octets), given.report),
        }

    def _exchange(self, message: Message) -> Message:
        return self._say(messages.to_bytes(message))

    def _say(self, octets: bytes, within: float = PATIENCE) -> Message:
        answer = self._ask(octets, within + len(octets) / SLOWEST_LINK)
        self._count(sent=octets, received=answer)
        return messages.from_bytes(answer)

    def _count(self, *, sent: Octets, received: Octets) -> None:
        with self._counting:
            self.sent += len(sent)
            self.received += len(received)


def _not_now(state: ClientState) -> ClientState:
    raise AssertionError("a client that answers at once does not train first")


def _to_tensor(octets: bytes) -> Tensor:
    return torch.frombuffer(bytearray(octets), dtype=torch.uint8)


def _to_octets(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
