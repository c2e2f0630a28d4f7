"""A client's side of the protocol: it trains all the time, answers contacts, and never reports a step twice.

A local step is computed on the state as it is, and counts only if the state is still the same when it is done: a
contact takes the state as it is, without waiting, and the step under way is dropped, as in the simulator.

The promise. Before a reply leaves, the number of the steps that are in it is written down; after a crash the client
goes on with later ones. The receipt in the next contact tells whether the reply was applied. What an algorithm has its
clients remember of applied replies survives a crash, too: the replies are written down, and what became of them.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from quafl.codec import wire
from quafl.codec.coders import Coders, Parcel
from quafl.codec.seams import DecodeError, Packet, WireError
from quafl.core.client import begin, counted, listen, local_step, newcomers, speak
from quafl.core.judgement import judged
from quafl.core.messages import Message
from quafl.core.pieces import zeros
from quafl.core.randomness import derive
from quafl.core.seams import Algorithm, ClientState, Optimizer, Score, Task
from quafl.core.server import keyed
from quafl.protocol import log, messages
from quafl.protocol.carrier import SERVER, Octets, Unadmitted, Unreachable
from quafl.protocol.judging import score_to_bytes
from quafl.protocol.layout import beginning, digest_of, layout_of
from quafl.protocol.log import Reported
from quafl.protocol.machine import ERROR, INFO, WARNING, Ask, Asked, Compute, Flow, Machine, Until, Write
from quafl.protocol.messages import (
    HELLO_SECONDS,
    NOT_TOLD,
    Accepted,
    Broken,
    Contact,
    Evaluate,
    Evaluated,
    Finished,
    Hello,
    Idle,
    Received,
    Refinement,
    Refused,
    Rejected,
    Repair,
    Reply,
    WantsAll,
    Welcome,
)
from quafl.protocol.repairs import MOST_REPAIRS, Wanted, replay
from quafl.protocol.speech import Hearing, decode_down, encode_up, measured, model_of, name_of, understood

HELLO_PATIENCE = 5.0  # seconds for the server's answer to a greeting
ANSWER_PATIENCE = 30.0  # for its answers to anything else,
SLOWEST_LINK = 10_000  # and a second more for so many octets that it is sent
RETRY_SECONDS = 0.5  # between two tries to reach a server that is not there
FAR_BLOCKS = 0.5  # of a vector's blocks; if more do not decode, the model in full costs less than their repair


class Terms(NamedTuple):
    """What the server has its clients do."""

    algorithm: Algorithm
    coders: Coders
    optimizer: Optimizer


@dataclass(frozen=True, slots=True)
class Given:
    """The last answer: repeated when asked again."""

    ticket: bytes
    octets: bytes
    up: Message | None = None  # what is behind it, a single row, for repairs and if it is lost; None: nobody knows
    understood: Message | None = None  # the same as the server decodes it, if it is to be remembered once it is applied
    pending: bool = False  # nobody here knows what has become of it


@dataclass(frozen=True, slots=True)
class Work:
    """A contact that is answered when the local steps are done."""

    contact: Contact
    hearing: Hearing


@dataclass(slots=True)
class Looking:
    """A model that is to be judged, between two local steps: a task does one thing at a time."""

    model: torch.Tensor
    buffers: torch.Tensor
    steps: int  # by which it is made the client's own, and judged again
    said: Score | Exception | None = None


class ClientSide(Machine):
    """One client's machine. `agree` makes the terms of the text that the server sends.

    `kept` is what an earlier process left in a checkpoint, `reports` what it wrote down, before that and since.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        agree: Callable[[dict[str, Any]], Terms],
        session: str,
        *,
        kept: dict[str, Any] | None = None,
        reports: Sequence[Reported] = (),
        step_seconds: float = 0.0,
        tell_private: bool = True,
    ) -> None:
        super().__init__()
        self.session = session  # of its process
        self.client: Any = None  # a ClientState of a single row; None until the server's model has arrived
        self.finished = False  # the server has said so,
        self.final: tuple[torch.Tensor, torch.Tensor] | None = None  # with this model and buffers
        self.failure: Exception | None = None  # why it cannot take part
        self.sent = self.received = 0  # octets
        self._name, self._task, self._agree = name, task, agree
        self._step_seconds, self._tell_private = step_seconds, tell_private
        self._kept, self._reports = kept, tuple(reports)
        self._report: Reported | None = None  # the last one
        self._applied = False  # what has become of the reply that it was about
        self._remembers = False  # something from before, in this state or in what is to be applied to it
        self._to_apply: list[Message] = []  # to a client that has no model yet
        self._model, self._buffers = task.initial()
        self._layout = layout_of(task)
        self._layout_digest = digest_of(self._layout)
        self._terms: Terms | None = None
        self._text: dict[str, Any] = {}
        self._run = ""
        self._given: Given | None = None
        self._work: Work | None = None
        self._looking: Looking | None = None
        self._contacted: Contact | None = None  # that is being answered at the moment
        self._newest = b""  # ticket that has come; those that come later are greater
        self._delivering = b""  # the ticket of the reply that the server is being told
        self._stopping = False
        self.is_saying_goodbye = False
        self._hello_seconds = HELLO_SECONDS

    # What its driver does

    def begin(self) -> None:
        """Greet the server, and train as soon as there is something to train."""
        self._spawn(self._greet())
        self._spawn(self._train())

    def stop(self) -> None:
        """Answer nothing more, and say goodbye."""
        self._stopping = True
        if not self.finished and self.failure is None:
            self.is_saying_goodbye = True
            self._spawn(self._say_goodbye())

    def _say_goodbye(self) -> Flow:
        with suppress(Unreachable, WireError):  # the server finds out
            yield from self._say_hello(leaving=True)
        self.is_saying_goodbye = False

    @property
    def is_answering(self) -> bool:
        """A contact is being answered: `state` is None until it has been."""
        return self._contacted is not None

    @property
    def sizes(self) -> tuple[int, int]:
        """Of the model, and of its buffers."""
        return len(self._model), len(self._buffers)

    @property
    def status(self) -> dict[str, int]:
        """For the log."""
        done = {} if self.client is None else {"steps": int(self.client.steps)}
        return {**done, "sent": self.sent, "received": self.received}

    def state(self) -> dict[str, Any] | None:
        """For a checkpoint; None while a contact is being answered. What it is working on is not in it: it is asked for
        that again."""
        client, given = self.client, self._given
        if client is None or self._contacted is not None:
            return None
        if self._work is not None:
            client = begin(client, client.base, client.buffers, 0)
        return {
            "run": self._run,
            "device": self._model.device.type,
            "text": messages.as_text(self._text).decode(),
            "client": client.tree(),
            "reported": _name_of(self._report),
            "applied": self._applied,
            "remembers": self._remembers,
            "given": given
            and {
                "ticket": given.ticket.hex(),
                "octets": _tensor(given.octets),
                "up": _tree(given.up),
                "understood": _tree(given.understood),
                "pending": given.pending,
            },
        }

    # Greeting

    def _greet(self) -> Flow:
        reached = None
        while not (self._stopping or self.finished or self.failure):
            try:
                yield from self._say_hello()
                if not reached:
                    self._say(INFO, "the server is there")
                reached = True
            except Unadmitted as error:
                self.failure = error
            except Unreachable as error:
                if reached is not False:
                    training = "trying again" if self._terms is None else "training goes on, trying again"
                    self._say(WARNING, "the server %s; %s", error, training)
                reached = False
            except WireError as error:
                self.failure = error
            again = self.now + (self._hello_seconds if reached else RETRY_SECONDS)
            yield Until(lambda: self._stopping or self.finished or self.failure is not None, again)

    def _say_hello(self, *, leaving: bool = False) -> Flow:
        hello = {
            "layout": self._layout_digest,
            "tensors": beginning(self._layout) if self._terms is None else (),  # the server says which is another
            "session": self.session,
            "leaving": leaving,
            "busy": self._busy.hex(),
        }
        octets = messages.to_bytes(Hello(messages.as_text(hello)))
        match (yield from self._ask(octets, HELLO_SECONDS if leaving else HELLO_PATIENCE)):
            case Welcome(text):
                try:
                    welcome = messages.from_text(text)
                except WireError as error:
                    raise Unreachable(f"answered a Hello with what cannot be read ({error})") from error
                self._hello_seconds = float(welcome.pop("hello_seconds", HELLO_SECONDS))
                self._agree_to(welcome)
            case Rejected() as rejection:
                raise WireError(messages.sentence(rejection))
            case Refused() as refusal:
                raise Unreachable(f"does not take the greeting: {messages.sentence(refusal)}")
            case Finished(body):
                self._end(body)
            case other:
                raise WireError(f"the server answered a Hello with a {type(other).__name__}")

    @property
    def _busy(self) -> bytes:
        """The ticket of the contact to which its answer follows."""
        return self._delivering if self._work is None else self._work.contact.ticket

    def _agree_to(self, text: dict[str, Any]) -> None:
        if text == self._text:
            return
        terms, run = self._agree(text), str(text["run"])
        if run != self._run:
            self.client, self._given, self._work, self._contacted, self._newest = None, None, None, None, b""
            self._restore(run, text, terms)
        elif self.client is not None:  # new settings of the same run: the model stays, the rest begins anew
            self._remembers = False
            self.client = self._newcomer(self.client.base[0], self.client.buffers[0], terms, int(self.client.steps))
            self._work, self._contacted = None, None  # what it is asked next, it does on the new terms
        self._run, self._text, self._terms = run, text, terms
        self._say(INFO, "taking part in run %s: %s", run, type(terms.algorithm).__name__)

    def _newcomer(self, model: torch.Tensor, buffers: torch.Tensor, terms: Terms, steps: int) -> Any:
        fresh = newcomers(terms.algorithm, model, buffers, torch.ones(1))
        return replace(
            fresh,
            steps=torch.full_like(fresh.steps, steps),
            optimizer=terms.optimizer.init(fresh.base),
            left_out=terms.coders.up.nothing_left_out(fresh.base),
        )

    def _restore(self, run: str, text: dict[str, Any], terms: Terms) -> None:
        """Go on from the last checkpoint, if it is of this run. Steps that may have been reported since are not taken
        again, and progress that may have been is dropped. What was applied since is remembered."""
        kept, reports = self._kept, [report for report in self._reports if report.run == run]
        self._kept, self._reports = None, ()
        self._report, self._to_apply = reports[-1] if reports else None, []
        self._remembers = self._applied = False
        if self._report is not None:
            self._newest = bytes.fromhex(self._report.ticket)
        if kept is None or kept["run"] != run:
            first = max((place for place, report in enumerate(reports) if report.fresh), default=len(reports))
            self._catch_up(None, reports[first:], terms)
            return
        client = terms.algorithm.records.client.from_tree(kept["client"])
        reported = max(int(client.steps), 0 if self._report is None else self._report.steps)
        since = [place for place, report in enumerate(reports) if _name_of(report) == kept["reported"]]
        later = reports[since[-1] + 1 if since else 0 :]
        if kept["text"] != messages.as_text(text).decode():
            self.client = self._newcomer(client.base[0], client.buffers[0], terms, reported)
        else:
            self._applied, self._remembers = kept["applied"], kept["remembers"]
            self._given = self._kept_given(kept["given"], terms)
            if later:
                none = torch.zeros_like
                client = replace(client, progress=none(client.progress), taken=none(client.taken))
                client = replace(client, left_out=tuple(map(none, client.left_out)))
                client = replace(client, steps=torch.full_like(client.steps, reported))
                self._say(INFO, "progress since the last checkpoint may have been reported, and is dropped")
            self.client = self._catch_up(client, later, terms)
        self._say(INFO, "going on from a checkpoint, at step %d", int(self.client.steps))

    def _kept_given(self, kept: dict[str, Any] | None, terms: Terms) -> Given | None:
        if kept is None:
            return None
        made = terms.algorithm.records.up
        up, understood = (None if kept[name] is None else made.from_tree(kept[name]) for name in ("up", "understood"))
        return Given(bytes.fromhex(kept["ticket"]), kept["octets"].numpy().tobytes(), up, understood, kept["pending"])

    def _catch_up(self, client: Any, reports: Sequence[Reported], terms: Terms) -> Any:
        """Go through what was written down since: each report says what has become of the one before. Without a client,
        what was applied is kept for the one that the server will bring."""
        for report in reports:
            client = self._resolved(client, terms, applied=report.before == "applied")
            octets, repairs = report.parts
            self._given = None
            if len(octets):
                up = self._as_understood(octets, repairs, terms)
                self._given = Given(bytes.fromhex(report.ticket), bytes(octets), None, up, pending=True)
                self._remembers = True
            self._applied = False
        return client

    def _as_understood(self, octets: Octets, repairs: Sequence[Octets], terms: Terms) -> Message:
        """A reply that was written down, with its displacements as the server has decoded them."""
        reply, coder = messages.from_bytes(octets), terms.coders.up
        assert isinstance(reply, Reply)
        numbers, more = coder.message.numbers(), len(keyed(terms.algorithm.records.down))
        here = self._model.device
        parcel, _ = messages.parcel_from(reply.body, len(coder.vectors), len(numbers), more, here)
        decoded = coder.displacements(parcel, replay([wire.from_bytes(bits, here) for bits in repairs]))
        vectors = {one.name: decoded.get(one.name, zeros(self._model)) for one in coder.vectors}
        values = {one.name: value for one, value in zip(numbers, parcel.numbers, strict=True)}
        up = coder.message(statistics=parcel.packets[0].exact, **vectors, **values)
        return up.each(lambda tensor: tensor.unsqueeze(0))

    # What the server says

    def _asked(self, event: Asked) -> None:
        self._spawn(self._hear(event))

    def _hear(self, event: Asked) -> Flow:
        self.received += len(event.octets)
        try:
            match messages.from_bytes(event.octets):
                case Contact() as message:
                    answer = yield from self._contact(message)
                case Repair() as message:
                    answer = yield from self._refine(message)
                case Evaluate() as message:
                    answer = yield from self._judge(message)
                case Finished(body):
                    self._end(body)
                    answer = messages.to_bytes(Received())
                case other:
                    raise WireError(f"a {type(other).__name__} is nothing that a server says")
        except (WireError, DecodeError, Unreachable) as error:
            self._say(WARNING, "a message from the server was dropped: %s", error)
            answer = messages.to_bytes(Refused(str(error).encode()))
        self.sent += len(answer)
        self._answer(event.call, answer)

    def _end(self, body: Octets) -> None:
        """The run is over; the final model is kept, if it can be read."""
        self.finished = True
        try:
            self.final = messages.model_from(body, *self.sizes) if len(body) else None
        except WireError as error:
            self._say(WARNING, "the final model cannot be used: %s", error)

    def _judge(self, question: Evaluate) -> Flow:
        """How good a model is on this client's own data."""
        model, buffers = messages.model_from(question.body, *self.sizes)
        mine = Looking(model.to(self._model.device), buffers.to(self._model.device), question.steps)
        self._looking = mine
        yield Until(lambda: mine.said is not None or self._looking is not mine or self._stopping)
        if isinstance(mine.said, Exception):
            raise WireError(f"this client cannot judge a model ({mine.said})")
        if mine.said is None:
            raise WireError("this client is stopping, or has been sent another model")
        return messages.to_bytes(Evaluated(question.ticket, score_to_bytes(mine.said)))

    def _contact(self, contact: Contact) -> Flow:
        """The answer to a contact: a reply, or that one follows, or a wish for the whole model."""
        ticket = contact.ticket
        if self._terms is None:  # a contact may overtake the welcome
            yield Until(lambda: self._terms is not None or self._stopping, self.now + HELLO_SECONDS)
        if self._contacted is not None and self._contacted.ticket == ticket:
            yield Until(lambda: self._contacted is None or self._contacted.ticket != ticket)
        if self._given is not None and self._given.ticket == ticket:
            return self._given.octets  # asked again: the same answer
        if self._work is not None and self._work.contact.ticket == ticket:
            return messages.to_bytes(Accepted())
        if ticket < self._newest:
            raise WireError("this contact is older than one that has come")
        if self._terms is None:
            raise WireError("this client has not agreed on the terms yet")
        if self._stopping:
            raise WireError("this client is stopping")
        if self.client is None and not contact.whole and self._terms.coders.down.needs_keys:
            return messages.to_bytes(WantsAll(ticket))
        parcel, receipt = self._parcel(contact, self._terms)  # what cannot be read changes nothing
        self._contacted, self._work = contact, None  # what the client has come to is frozen here
        self._newest = ticket
        try:
            return (yield from self._begin(contact, self._terms, parcel, receipt))
        finally:
            if self._contacted is contact:
                self._contacted = None

    def _begin(self, contact: Contact, terms: Terms, parcel: Parcel, receipt: bytes) -> Flow:
        """Hear what the server says, and answer at once, or begin to work on it."""
        before, joined = self._settled(receipt, terms), self.client is None
        if before is None:
            before = self._newcomer(
                self._model, self._buffers, terms, 0 if self._report is None else self._report.steps
            )
        hearing: Hearing | None = yield from self._decoded(contact, terms, before, parcel)
        if self._contacted is not contact:
            raise WireError("the server has sent something newer")
        if hearing is None:
            self.client = before if not joined else None
            return messages.to_bytes(WantsAll(contact.ticket))
        if joined:
            steps = int(before.steps)
            before = self._newcomer(model_of(hearing.down)[0], hearing.down.statistics, terms, steps)
            for up in self._to_apply:
                before = _remembering(terms, before, up)
            if terms.coders.down.measures:
                hearing = measured(hearing.down, hearing.noise, before)
        before = counted(before, self._task, torch.zeros(1, dtype=torch.int64))
        heard = listen(terms.algorithm, terms.optimizer, before, hearing.down, contact.round)
        if int(heard.taken) >= int(heard.budget):
            return (yield from self._reply(contact, terms, heard, hearing, joined=joined, at_once=True))
        self.client, self._work, self._given, self._to_apply = heard, Work(contact, hearing), None, []
        return messages.to_bytes(Accepted())

    def _settled(self, receipt: bytes, terms: Terms) -> Any:
        """The client that knows what became of its last reply."""
        given = self._given
        if given is not None and given.pending:
            self.client = self._resolved(self.client, terms, applied=receipt == messages.digest(given.octets))
        return self.client

    def _resolved(self, client: Any, terms: Terms, *, applied: bool) -> Any:
        """The client, now that this is known of its last reply; where there is none yet, what it will remember."""
        given = self._given
        if given is None or not given.pending:
            return client
        self._given = replace(given, up=None, understood=None, pending=False)
        self._applied = applied
        if applied and given.understood is not None:
            if client is None:
                self._to_apply.append(given.understood)
                return None
            return _remembering(terms, client, given.understood)
        if client is None or applied or given.up is None:
            return client
        return terms.algorithm.lost(client, given.up)

    def _parcel(self, contact: Contact, terms: Terms) -> tuple[Parcel, bytes]:
        """What the algorithm says, and the receipt for this client's last applied reply."""
        down = terms.algorithm.records.down
        receipts, body = contact.body[: contact.receipts], contact.body[contact.receipts :]
        parcel, _ = messages.parcel_from(body, len(down.vectors()), len(down.numbers()), device=self._model.device)
        for place, packet in enumerate(parcel.packets):
            exact = len(self._buffers) if place == 0 else 0
            if packet.dtype != torch.float32 or packet.kind != "base":
                raise WireError(f"message is a {packet.kind} of {packet.dtype}, expected a base of float32")
            if packet.dim != len(self._model) or len(packet.exact) != exact:
                raise WireError(
                    f"message has d={packet.dim} and {len(packet.exact)} exact values, this client's model has "
                    f"{len(self._model)} and {exact}; do both ends use the same model?"
                )
        return parcel, messages.receipt_for(self._name, receipts)

    def _decoded(self, contact: Contact, terms: Terms, client: Any, parcel: Parcel) -> Flow:
        """What was said; None, if the whole model is cheaper than the repairs."""
        coder, known = terms.coders.down.in_full() if contact.whole else terms.coders.down, list[Packet]()
        while True:
            try:
                return (yield Compute(lambda: decode_down(coder, parcel, client, replay(known))))
            except Wanted as wanted:
                packet = parcel.packets[wanted.place]
                first = wanted.request.sent == packet.bits
                if first and len(wanted.request.symbols) > FAR_BLOCKS * packet.checks.shape[-1]:
                    return None
                if len(known) >= MOST_REPAIRS * len(coder.vectors):
                    raise DecodeError(f"does not decode after {len(known)} repairs") from None
                request = Repair(contact.ticket, wanted.place, wire.to_bytes(wanted.request))
                match (yield from self._ask(messages.to_bytes(request), ANSWER_PATIENCE)):
                    case Refinement(bits):
                        known.append(wire.from_bytes(bits, self._model.device))
                    case Refused() as refusal:
                        raise DecodeError(f"was refused a repair: {messages.sentence(refusal)}") from None
                    case other:
                        raise DecodeError(f"asked for a repair, got a {type(other).__name__}") from None

    def _reply(
        self, contact: Contact, terms: Terms, client: Any, hearing: Hearing, *, joined: bool, at_once: bool
    ) -> Flow:
        """What the client says, written down before it leaves; its octets."""
        rng = torch.Generator().manual_seed(derive(self._run, self._name, contact.ticket.hex()))
        name = name_of(contact.ticket, whole=contact.whole)

        def answered() -> tuple[Any, Parcel | None, Any]:
            said = speak(terms.algorithm, terms.optimizer, client, hearing.down)
            if not said.answers.all():
                return said, None, said.clients
            return said, *encode_up(terms.coders, said, hearing, at_once=at_once, rng=rng, name=name)

        said, parcel, after = yield Compute(answered)
        if parcel is None and bool(said.broken):
            self._say(WARNING, "round %d: the progress is not finite; it is dropped", contact.round)
            given = Given(contact.ticket, messages.to_bytes(Broken(contact.ticket)))
        elif parcel is None:
            given = Given(contact.ticket, messages.to_bytes(Idle(contact.ticket)))
        else:
            steps = int(client.taken) if self._tell_private else NOT_TOLD
            distances = [float(hearing.measured[name]) for name in keyed(terms.algorithm.records.down)]
            body = messages.parcel_parts(self._shown(parcel[0], terms), distances)
            octets = messages.to_bytes(Reply(contact.ticket, steps, b""), *body)
            up, repairs = None, list[Packet]()
            if terms.algorithm.applied is not None:
                up, repairs = yield Compute(lambda: understood(terms.coders.up, said.up, parcel))
            yield from self._write_down(contact, int(client.steps), octets, up is not None, repairs)
            given = Given(contact.ticket, octets, said.up, up, pending=True)
        if self._contacted is not contact and (self._work is None or self._work.contact is not contact):
            raise WireError("the server has sent something newer")
        if joined and not int(client.taken) and not self._to_apply:  # without time for a step: that says nothing of it
            plain = {f.name: getattr(after, f.name) for f in fields(ClientState)}
            after = terms.algorithm.newcomer(ClientState(**plain), torch.ones(1))
        self.client, self._given, self._work, self._to_apply = after, given, None, []
        return given.octets

    def _write_down(
        self, contact: Contact, steps: int, octets: bytes, remembered: bool, repairs: Sequence[Packet]
    ) -> Flow:
        """What is about to be reported; with the reply itself, if it is to be remembered."""
        pieces = [octets, *map(wire.to_bytes, repairs)] if remembered else [b""]
        report = Reported(
            run=self._run,
            steps=steps,
            ticket=contact.ticket.hex(),
            fresh=not self._remembers,
            before="applied" if self._applied else "lost",
            repairs=[len(piece) for piece in pieces[1:]],
            octets=b"".join(pieces),
        )
        try:
            yield Write(log.to_bytes(report))
        except OSError as error:
            raise WireError(f"this client cannot write down what it reports ({error.strerror or error})") from None
        self._report, self._remembers, self._applied = report, self._remembers or remembered, False

    def _shown(self, parcel: Parcel, terms: Terms) -> Parcel:
        """Without what this client keeps to itself."""
        if self._tell_private:
            return parcel
        declared = zip(terms.algorithm.records.up.numbers(), parcel.numbers, strict=True)
        return replace(
            parcel, numbers=tuple(torch.full_like(v, torch.nan) if one.private else v for one, v in declared)
        )

    def _refine(self, message: Repair) -> Flow:
        given, terms = self._given, self._terms
        if given is None or given.up is None or terms is None or given.ticket != message.ticket:
            raise WireError("a repair was asked for an answer that this client no longer has")
        request = wire.from_bytes(message.body)
        if request.kind != "request" or message.place >= len(terms.coders.up.vectors):
            raise WireError(f"a repair of vector {message.place} was asked for with a {request.kind}")
        up, coder, place = given.up[0], terms.coders.up, message.place
        refinement: Packet = yield Compute(lambda: coder.refine(up, place, request))
        return messages.to_bytes(Refinement(wire.to_bytes(refinement)))

    # Training

    def _train(self) -> Flow:
        """Local steps, one after another, as long as the client has a budget; and the answers that follow them."""
        while True:
            yield Until(self._has_something_to_do)
            if self._stopping:
                return
            before, terms, work = self.client, self._terms, self._work
            assert terms is not None
            if self._looking is not None:
                yield from self._look(self._looking, terms)
            elif int(before.taken) < int(before.budget):
                began = self.now
                try:
                    after = yield Compute(partial(self._step, before, terms))
                except Exception as error:  # whatever the user's task raises: the process ends with it
                    self.failure = error
                    return
                if self.now < began + self._step_seconds:
                    yield Until(partial(self._is_no_longer, before), began + self._step_seconds)
                if self.client is before and self._contacted is None:
                    self.client = after
            else:
                assert work is not None
                yield from self._deliver(work, terms)

    def _is_no_longer(self, client: Any) -> bool:
        return self._stopping or self.client is not client or self._contacted is not None

    def _has_something_to_do(self) -> bool:
        if self._stopping:
            return True
        if self._terms is None or self.failure is not None:
            return False
        if self._looking is not None:
            return True
        if self._contacted is not None or self.client is None:
            return False
        return int(self.client.taken) < int(self.client.budget) or self._work is not None

    def _look(self, mine: Looking, terms: Terms) -> Flow:
        """Judge a model; a task that cannot has nothing to say."""
        optimizer, steps = terms.optimizer, mine.steps

        def score() -> Score:
            if not hasattr(self._task, "judge"):
                return {}
            found = judged(self._task, 0, mine.model, mine.buffers, optimizer=optimizer, personal_steps=steps)
            return found or {}

        try:
            mine.said = yield Compute(score)
        except Exception as error:  # whatever the user's task raises: training goes on
            self._say(ERROR, "the server's model cannot be judged here: %s", error)
            mine.said = error
        if self._looking is mine:
            self._looking = None

    def _step(self, client: Any, terms: Terms) -> Any:
        """On the terms that the state was made for, even if the server has just said others."""
        batch = self._task.batch(0, int(client.steps))
        after = local_step(client[0], self._task, batch, terms.optimizer, terms.algorithm.direction)
        return after.each(lambda tensor: tensor.unsqueeze(0))

    def _deliver(self, work: Work, terms: Terms) -> Flow:
        """The reply to a contact whose steps are done; it is handed over while training goes on."""
        contact = work.contact
        while self._work is work:
            try:
                octets = yield from self._reply(contact, terms, self.client, work.hearing, joined=False, at_once=False)
                self._spawn(self._hand_over(contact, octets))
            except WireError as error:
                self._say(ERROR, "round %d cannot be answered: %s; trying again", contact.round, error)
                yield Until(lambda: self._stopping or self._work is not work, self.now + HELLO_SECONDS)
            if self._stopping:
                return

    def _hand_over(self, contact: Contact, octets: bytes) -> Flow:
        """A reply, until the server has it, or has sent something newer."""
        self._delivering = contact.ticket
        while not self._has_moved_on(contact):
            try:
                answer = yield from self._ask(octets, ANSWER_PATIENCE)
                if isinstance(answer, Refused):
                    said = messages.sentence(answer)
                    self._say(WARNING, "the answer to round %d was refused: %s", contact.round, said)
                break
            except Unreachable:
                yield Until(partial(self._has_moved_on, contact), self.now + HELLO_SECONDS)
        if self._delivering == contact.ticket:
            self._delivering = b""

    def _has_moved_on(self, contact: Contact) -> bool:
        return self._stopping or self._given is None or self._given.ticket != contact.ticket

    def _ask(self, octets: bytes, within: float) -> Flow:
        """The server's answer, or Unreachable."""
        self.sent += len(octets)
        answer = yield Ask(SERVER, octets, within + len(octets) / SLOWEST_LINK)
        self.received += len(answer)
        try:
            return messages.from_bytes(answer)
        except WireError as error:
            raise Unreachable(f"answered what is no message ({error})") from error


def _remembering(terms: Terms, client: Any, up: Message) -> Any:
    assert terms.algorithm.applied is not None  # or nothing would have been kept for it
    return terms.algorithm.applied(client, up)


def _name_of(report: Reported | None) -> str:
    return "" if report is None else messages.digest(log.to_bytes(report)).hex()


def _tree(up: Message | None) -> dict[str, Any] | None:
    return None if up is None else up.tree()


def _tensor(octets: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(octets), dtype=torch.uint8)
