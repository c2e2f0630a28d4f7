"""What must be true after every event, whatever has broken. It is found out from what was sent, what was written down,
and what the parties have come to, and kept apart from the machines' own books."""

import logging
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quafl.core.judgement import judged
from quafl.protocol import log, messages
from quafl.protocol.log import Entry, Gave, Idled, Looked, Took
from quafl.protocol.machine import Asked
from quafl.protocol.messages import Contact, Received, Reply
from quafl.rehearsal.cast import Cast
from quafl.rehearsal.disks import Boot
from quafl.rehearsal.faults import Faults
from quafl.rehearsal.history import kind

MOST_FLOWS = 200  # that a machine may have
APPLIED = -1
CLOSE = 1e-4  # relative, in float32


class Violation(Exception):
    """Something that must not be."""


class Key(NamedTuple):
    """One reply."""

    name: str
    ticket: str
    digest: bytes


class Applied(NamedTuple):
    """A reply that the algorithm was given."""

    key: Key
    steps: int


@dataclass(frozen=True, slots=True)
class Made:
    """A reply of an honest client: the numbers of the local steps behind it, and its process."""

    first: int
    stop: int
    life: int
    disk: int  # that it has; steps are counted anew on another


@dataclass(slots=True)
class Told:
    """The surviving history of the server: what its algorithm was told, and what came of it."""

    applied: list[Applied] = field(default_factory=list)
    merged: int = 0  # of those, the ones that are in the server's model
    idle: set[tuple[str, str]] = field(default_factory=set)  # clients that had nothing to answer, and to which ticket
    looks: int = 0
    questions: list[tuple[int, str, bytes]] = field(default_factory=list)  # at which look, ticket, digest of octets
    rounds: list[bytes] = field(default_factory=list)  # fingerprints of the states reached

    def copy(self) -> "Told":
        """As it is now."""
        return Told(
            list(self.applied), self.merged, set(self.idle), self.looks, list(self.questions), list(self.rounds)
        )


class Checks:
    """Of one schedule."""

    def __init__(self, cast: Cast, server: Any, clients: dict[str, Any], faults: Faults) -> None:
        self._cast, self._server, self._clients, self._faults = cast, server, clients, faults
        self._told = Told()
        self._before = Told()  # of the process that has died, while a new one reads its journal
        self._made: dict[tuple[str, bytes], Made] = {}
        self._disks: Counter[str] = Counter()  # that each client has lost
        self._sent: dict[str, set[bytes]] = defaultdict(set)  # digests of replies, by sender
        self._asked: dict[str, set[str]] = defaultdict(set)  # tickets, by receiver
        self._contents: dict[tuple[str, bool], bytes] = {}  # of the contacts of a ticket
        self._took: dict[tuple[str, str], tuple[Key, int]] = {}
        self._safe: set[Key] = set()  # replies whose record was confirmed
        self._lost: set[tuple[str, bytes]] = set()  # replies whose client was told that they are
        self._unsure: set[tuple[str, bytes]] = set()  # of a history that did not survive, because of a full disk
        self._to_replay = 0
        self._replayed = False  # whether the algorithm's last entry was read, not made
        self._excused = False  # the process that has died had a gap in its journal
        self._gaps = 0  # that have made the server forget something
        self._must_survive: list[tuple[Key, int]] | None = None  # and the rounds of those that wait
        self._totals: dict[str, int] = {}
        self._balance = (0, 0)  # serial, and what has become of all questions
        self._reached = False
        self._rounds_wanted = -1
        self._heard_wanted: set[str] = set()
        self._to_judge: dict[bytes, tuple[Tensor, Tensor, int]] = {}  # models that are to be judged, and local steps
        self._believed: set[tuple[bytes, str]] = set()  # scores that were looked at
        self._ledger = Ledger(cast)
        self._merged: set[tuple[str, bytes]] = set()  # replies that are in the server's model

    # What a driver knows

    def seen(self) -> Any:
        """What is kept with a checkpoint."""
        return self._told.copy()

    @property
    def has_replayed(self) -> bool:
        """The server's process has read its journal."""
        return self._must_survive is None and not self._to_replay

    def counts(self) -> dict[str, int]:
        """For the table."""
        totals = {"lost": 0, "refined": 0}
        if self._server.machine is not None:
            totals = {name: getattr(self._server.machine.totals, name) for name in totals}
        return {
            "rounds": len(self._told.rounds),
            "replies applied": len(self._told.applied),
            "replies lost": totals["lost"],
            "messages repaired": totals["refined"],
        }

    def demand(self, rounds: int) -> None:
        """From now on nothing breaks: so many more rounds must come, and a reply of every honest client."""
        machine = self._server.machine
        now = machine.server.round if machine is not None else 0
        self._rounds_wanted = now + rounds
        self._heard_wanted = set(self._cast.honest)

    def missing(self) -> str:
        """Of what is demanded."""
        machine = self._server.machine
        if machine is None or machine.server.round < self._rounds_wanted:
            return f"round {self._rounds_wanted}"
        if self._heard_wanted:
            return f"a reply of {min(self._heard_wanted)}"
        judgement = machine.judgement
        return f"what {min(judgement.waiting)} says of a model" if judgement and not judgement.is_over else ""

    # Evaluations

    def asked_to_judge(self, ticket: bytes, model: Tensor, buffers: Tensor, steps: int) -> None:
        """Clients are."""
        self._to_judge[ticket] = model.clone(), buffers.clone(), steps

    def _look_at_scores(self, judgement: Any) -> None:
        """What an honest client says of a model is what its task says of that model."""
        for name, score in judgement.scores.items():
            if (judgement.ticket, name) in self._believed or name not in self._cast.honest:
                continue
            self._believed.add((judgement.ticket, name))
            model, buffers, steps = self._to_judge[judgement.ticket]
            task = self._cast.tasks[name]
            expected = judged(task, 0, model, buffers, optimizer=self._cast.optimizer, personal_steps=steps)
            if score != expected:
                raise Violation(f"{name} is taken to have said {score} of a model of which it says {expected}")

    def given_at_last(self, name: str, given: Any, final: Tensor) -> None:
        """The final model, to a client that was told that the run is over."""
        if given is None or not torch.equal(given[0], final):
            raise Violation(f"{name} was not given the final model")

    # The server's process

    def server_begins(self, boot: Boot, machine: Any) -> None:
        """Before it is restored."""
        self._told = boot.checkpoint.seen.copy()
        self._to_replay = len(boot.state["script"]) + len(boot.entries)
        self._excused |= boot.gap
        if boot.gap:
            self._unsure |= set(self._made)
            self._lost.clear()
            self._gaps += 1
            self._faults.happened["history lost to a full disk"] += 1
            for party in self._clients.values():
                if party.machine is not None and party.machine.client is None:  # it has not taken up its state yet
                    self.client_begins(party)
        self._totals, self._balance, self._reached = {}, (-1, 0), False
        machine.on_entry = self._entry

    def server_dies(self) -> None:
        """What it has taken must survive; if it was still reading a journal, what the process before had taken."""
        if self._must_survive is None:
            self._must_survive = [(_key(one), one.question.round) for one in self._server.machine._arrived]
            self._must_survive += [(one.key, APPLIED) for one in self._told.applied]
            self._before = self._told

    def server_wrote(self, record: bytes) -> None:
        """A record is safe."""
        entry = log.from_bytes(record)
        if isinstance(entry, Took):
            self._safe.add(_took(entry)[0])

    def server_saved(self) -> None:
        """All that it has taken is in a checkpoint."""
        self._safe |= self._taken()

    def _taken(self) -> set[Key]:
        """Replies that the server has, and has not dropped."""
        return {one.key for one in self._told.applied} | {_key(one) for one in self._server.machine._arrived}

    def said(self, party: Any, level: int, sentence: str) -> None:
        """What people are told."""
        if level >= logging.ERROR and "does not fit" in sentence:
            raise Violation(f"{party.name} says: {sentence}")

    def _entry(self, entry: Entry) -> None:
        """Something is written down, or read again."""
        replayed = self._to_replay > 0
        self._to_replay -= replayed
        match entry:
            case Looked():
                self._told.looks += 1
                self._replayed = replayed
            case Took():
                self._check_took(*_took(entry))
                if replayed:
                    self._safe.add(_took(entry)[0])
            case Idled():
                if (entry.name, entry.ticket) in self._told.idle:
                    raise Violation(f"{entry.name} is written down twice as idle, to {entry.ticket}")
                self._told.idle.add((entry.name, entry.ticket))
                if not replayed and not self._faults.on:
                    self._heard_wanted.discard(entry.name)
            case Gave(replies, _):
                self._replayed = replayed
                for name, ticket in replies:
                    self._check_given(name, ticket)

    def _check_took(self, key: Key, steps: int) -> None:
        """It was sent by that client, for that ticket, which it was asked for."""
        name, ticket, digest = key
        if digest not in self._sent[name]:
            raise Violation(f"{_text(key)} was taken, and never sent by {name}")
        if ticket not in self._asked[name]:
            raise Violation(f"{_text(key)} was taken, and {name} was never asked for it")
        self._took[name, ticket] = key, steps

    def _check_given(self, name: str, ticket: str) -> None:
        """Once, and not after its client was told that it is lost; no step twice."""
        if (name, ticket) not in self._took:
            raise Violation(f"a reply of {name} to {ticket[10:22]} was given to the algorithm, and was never taken")
        key, steps = self._took[name, ticket]
        reply = name, key.digest
        if any(one.key.name == name and key.ticket == one.key.ticket for one in self._told.applied):
            raise Violation(f"{_text(key)} was given to the algorithm twice")
        if reply in self._lost and reply not in self._unsure:
            raise Violation(f"{_text(key)} was given to the algorithm after {name} was told that it is lost")
        made = self._made.get(reply)
        if name in self._cast.honest:
            if made is None:
                raise Violation(f"{_text(key)} was given to the algorithm, and {name} never made it")
            for one in self._told.applied:
                other = self._made.get((name, one.key.digest)) if one.key.name == name else None
                if other is None or made.disk != other.disk:
                    continue
                if max(made.first, other.first) < min(made.stop, other.stop):
                    raise Violation(f"{_text(key)} has steps {made}, which were applied before with {_text(one.key)}")
        self._told.applied.append(Applied(key, steps))
        if not self._replayed and not self._faults.on:
            self._heard_wanted.discard(name)

    def server_did(self) -> None:
        """After each event of the server."""
        machine = self._server.machine
        if isinstance(machine.failure, Violation):  # found while something was written down
            raise machine.failure
        if machine.failure is not None:
            raise Violation(f"the server's run has failed: {machine.failure!r}") from machine.failure
        if machine.judgement is not None:
            self._look_at_scores(machine.judgement)
        if len(machine._flows) + len(machine._waiting) > MOST_FLOWS:
            raise Violation(f"the server has {len(machine._flows) + len(machine._waiting)} flows")
        self._check_totals(machine)
        if machine.reached and not self._reached:
            self._round_reached(machine)
        self._reached = machine.reached
        if not self._to_replay and not machine._script and self._must_survive is not None:
            self._check_survival(machine)

    def _check_totals(self, machine: Any) -> None:
        """None decreases, and every question is answered, lost, owed, or waits to be given to the algorithm."""
        totals = machine.totals
        now = {name: getattr(totals, name) for name in ("steps", "up", "down", "contacts", "idle", "lost", "broken")}
        for name, value in self._totals.items():
            if now[name] < value:
                raise Violation(f"the total of {name} has gone from {value} to {now[name]}")
        self._totals = now
        owing = [member.owes for member in machine.members if member.owes]
        balance = totals.contacts + totals.lost + len(owing) + len(machine._arrived)
        serial, before = self._balance
        asked = 0
        if serial >= 0 and machine._serial != serial:
            question = next((one for one in machine._questions.values() if one.serial == machine._serial), None)
            asked = 0 if question is None else owing.count(question.ticket)
            if question is not None:
                self._check_question(question)
            elif owing:
                known = {one.ticket for one in machine._questions.values()}
                unknown = [ticket.hex()[10:22] for ticket in owing if ticket not in known]
                if unknown:
                    raise Violation(f"somebody owes {unknown}, which the server has forgotten")
        if serial >= 0 and balance != before + asked:
            raise Violation(f"{asked} more were asked, but what has become of all has gone from {before} to {balance}")
        self._balance = machine._serial, balance

    def _check_question(self, question: Any) -> None:
        """After a restart, the same ones are asked again."""
        mine = (self._told.looks, question.ticket.hex(), messages.digest(question.octets))
        if self._replayed:
            before = next((one for one in self._before.questions if one[0] == mine[0]), None)
            if before is not None and before != mine:
                raise Violation(f"after a restart another question is asked: {before} before, {mine} now")
        self._told.questions.append(mine)

    def _round_reached(self, machine: Any) -> None:
        """The state is what it was before a restart; what was added up fits to what was applied."""
        mine, place = _fingerprint(machine), len(self._told.rounds)
        if self._replayed and place < len(self._before.rounds) and self._before.rounds[place] != mine:
            raise Violation(f"round {machine.server.round} was replayed, and has come to another state")
        self._told.rounds.append(mine)
        contacts, steps = len(self._told.applied), sum(one.steps for one in self._told.applied)
        idle = machine.totals.contacts - contacts  # what was written down too late was not taken
        if not 0 <= idle <= len(self._told.idle) or machine.totals.steps != steps:
            raise Violation(
                f"the totals have {machine.totals.contacts} contacts with {machine.totals.steps} steps, applied were "
                f"{contacts} with {steps}"
            )
        for name, value in machine.server.tree().items():
            if name in ("model", "control") and not value.isfinite().all():
                raise Violation(f"the server's {name} is not finite")
        fresh = [one.key for one in self._told.applied[self._told.merged :]]
        self._told.merged = len(self._told.applied)
        if self._ledger.kept and not self._to_replay and self._must_survive is None:
            orphans = any(self._is_orphan(key.name, key.digest) for key in fresh)
            self._merged = self._status()
            self._ledger.server_moved(machine.server, self._merged, forgiven=orphans)

    def _is_orphan(self, name: str, digest: bytes) -> bool:
        """Whether its client's process has ended since, or nobody knows any more what it was told of it."""
        made = self._made.get((name, digest))
        return made is None or made.life != self._clients[name].life or (name, digest) in self._unsure

    def _check_survival(self, machine: Any) -> None:
        """What the process before had taken is there."""
        wanted, self._must_survive = self._must_survive or [], None
        there = self._taken()
        if not self._excused:
            for key, round in wanted:
                if key not in there and not self._is_late(machine, key, round):
                    raise Violation(f"{_text(key)} was taken, and has not survived the restart")
        if self._ledger.kept:
            before, self._merged = self._merged, self._status()
            orphans = any(self._is_orphan(*reply) for reply in before - self._merged)  # that are not merged any more
            self._ledger.server_moved(machine.server, self._merged, forgiven=self._excused or orphans)
        self._excused = False

    def _is_late(self, machine: Any, key: Key, round: int) -> bool:
        """Whether the process that had it was about to drop it: its client is asked something newer by now, or answers
        to earlier rounds are not wanted."""
        if round == APPLIED:
            return False
        owes: str = machine.members[key.name].owes.hex()
        return owes > key.ticket or (self._cast.role.by_rounds and round < int(machine.server.round))

    def _status(self) -> set[tuple[str, bytes]]:
        """Replies that are in the server's model."""
        return {(one.key.name, one.key.digest) for one in self._told.applied[: self._told.merged]}

    # The clients' processes

    def client_begins(self, party: Any) -> None:
        """As a new process. It may know nothing any more of what the one before had heard in a history that a full disk
        has made the server forget."""
        self._ledger.client_begins(party.name, forgiven=any(name == party.name for name, _ in self._unsure))

    def disk_lost(self, party: Any) -> None:
        """A client has nothing any more."""
        self._disks[party.name] += 1
        self._ledger.write_off(party.name)

    def client_did(self, party: Any, event: Any, client: Any, given: Any) -> None:
        """After each event of a client; what it had come to before."""
        machine = party.machine
        if party.liar is None and machine.failure is not None:
            raise Violation(f"{party.name} has failed: {machine.failure!r}") from machine.failure
        if len(machine._flows) + len(machine._waiting) > MOST_FLOWS:
            raise Violation(f"{party.name} has {len(machine._flows) + len(machine._waiting)} flows")
        if party.liar is not None:
            return
        now, fresh = machine._given, False
        if now is not given:
            if now is not None and now.pending and (given is None or given.ticket != now.ticket):
                fresh = self._note_reply(party, now, client)
            if given is not None and given.pending and (now is None or not now.pending):
                self._check_verdict(party, event, given)
        if self._ledger.kept and (fresh or now is not given or machine.client is not client):
            self._ledger.client_did(party.name, self._to_be(machine), now, client, self._merged, reported=fresh)

    def _to_be(self, machine: Any) -> Any:
        """The client; of one that waits for its model, what it will be, as far as it has something to remember."""
        if machine.client is not None or not machine._remembers:
            return machine.client
        terms = machine._terms
        client = machine._newcomer(machine._model, machine._buffers, terms, 0)
        for up in machine._to_apply:
            client = terms.algorithm.applied(client, up)
        return client

    def _note_reply(self, party: Any, given: Any, client: Any) -> bool:
        """A new reply; the steps that are in it. Not new: one that was restored."""
        reply = party.name, messages.digest(given.octets)
        if reply in self._made:
            return False
        steps, taken = (0, 0) if client is None else (int(client.steps), int(client.taken))
        self._made[reply] = Made(steps - taken, steps, party.life, self._disks[party.name])
        return True

    def _check_verdict(self, party: Any, event: Any, given: Any) -> None:
        """The client has heard what became of its last reply: it must be so."""
        if not isinstance(event, Asked):
            return
        reply = party.name, messages.digest(given.octets)
        contact = messages.from_bytes(event.octets)
        assert isinstance(contact, Contact)
        if self._gaps and all(ticket != contact.ticket.hex() for _, ticket, _ in self._told.questions):
            self._unsure.add(reply)  # it was asked in a history that a full disk has made the server forget
            self._ledger.write_off(party.name)
            return
        told = messages.receipt_for(party.name, contact.body[: contact.receipts]) == reply[1]
        applied = any((one.key.name, one.key.digest) == reply for one in self._told.applied)
        known = self._server.machine is not None and self.has_replayed
        if reply not in self._unsure and known and told != applied:
            words = ("applied", "lost") if told else ("lost", "applied")
            raise Violation(f"{party.name} hears that its reply {reply[1].hex()[:6]} was {words[0]}, it was {words[1]}")
        if not told:
            self._lost.add(reply)

    # The network

    def leaves(self, sender: Any, target: Any, octets: bytes) -> None:
        """A message leaves a party."""
        made = kind(octets)
        if made is Reply and sender is not self._server:
            self._sent[sender.name].add(messages.digest(octets))
        elif made is Contact:
            contact = messages.from_bytes(octets)
            assert isinstance(contact, Contact)
            self._check_contact(target.name, contact)

    def _check_contact(self, name: str, contact: Contact) -> None:
        """A ticket stands for one question; the receipt is that of the client's last reply that was applied."""
        ticket = contact.ticket.hex()
        self._asked[name].add(ticket)
        content = messages.digest(contact.body[contact.receipts :])
        if self._contents.setdefault((ticket, contact.whole), content) != content:
            raise Violation(f"{ticket[10:22]} stands for two questions")
        last = next((one.key.digest for one in reversed(self._told.applied) if one.key.name == name), b"")
        receipt = messages.receipt_for(name, contact.body[: contact.receipts])
        if receipt != last:
            raise Violation(f"{name} gets the receipt {receipt.hex()[:6]}, the last applied was {last.hex()[:6]}")

    def server_answers(self, client: Any, asked: bytes, octets: bytes) -> None:
        """A reply that the server acknowledges is safe."""
        if kind(asked) is not Reply or kind(octets) is not Received or self._server.disk.has_gap:
            return
        reply = messages.from_bytes(asked)
        assert isinstance(reply, Reply)
        key = Key(client.name, reply.ticket.hex(), messages.digest(asked))
        if key in self._taken() and key not in self._safe:
            raise Violation(f"{_text(key)} was acknowledged before it was safe")


class Ledger:
    """What an algorithm conserves, where nobody lies, and, if it is not remembered, where nothing is lost to a codec.

    QuAFL: the sum of all models, the server's and the clients', changes by the steps that enter a report alone. A
    report that was not merged yet counts as lost. Calibrated: Σ y_i, as the clients remember it, is what the server
    remembers, whatever crashes. SCAFFOLD: Σ c_i − N·c does not change.
    """

    def __init__(self, cast: Cast) -> None:
        self._algorithm: Any = cast.algorithm
        self._conserved = cast.role.conserves
        if cast.liars or (self._conserved and not self._conserved.remembered and cast.codec_name != "Identity"):
            self._conserved = None
        self._clients = len(cast.names)
        self._last: dict[str, tuple[Any, Any]] = {}  # what clients are, and their last replies
        self._values: dict[str, Tensor] = {}
        self._total: Tensor | None = None  # of the clients and the server
        self._fresh: set[str] = set()  # clients whose part is written off

    @property
    def kept(self) -> bool:
        """Whether there is anything to keep."""
        return self._conserved is not None

    def client_begins(self, name: str, *, forgiven: bool) -> None:
        """A new process may have another model: what was there before is written off, but for what is remembered."""
        if self._conserved is not None and (forgiven or not self._conserved.remembered):
            self.write_off(name)

    def write_off(self, name: str) -> None:
        """What a client had is gone, or nobody knows what has become of it."""
        self._fresh.add(name)

    def _value(self, client: Any, given: Any, name: str, merged: set[tuple[str, bytes]]) -> Tensor:
        assert self._conserved is not None
        if given is not None and given.pending:
            if (name, messages.digest(given.octets)) not in merged:
                client = self._algorithm.lost(client, given.up) if given.up is not None else client
            elif given.understood is not None:
                client = self._algorithm.applied(client, given.understood)
        return self._conserved.client(self._algorithm, client)[0]

    def client_did(
        self, name: str, client: Any, given: Any, before: Any, merged: set[tuple[str, bytes]], *, reported: bool
    ) -> None:
        """It may have changed by what it has reported, if it is not new."""
        if client is None or self._conserved is None:
            return
        old, now = self._values.get(name), self._value(client, given, name, merged)
        change = now if old is None else now - old
        new = old is None or name in self._fresh
        self._fresh.discard(name)
        if not new and not (reported and self._conserved.reported == "part of it"):
            moved = reported and self._conserved.reported == "progress"
            rest = change + before.progress[0].double() if moved else change
            self._check(rest, now, f"{name} has changed by more than it has reported")
        self._last[name], self._values[name] = (client, given), now
        if self._total is not None:
            self._total = self._total + change

    def server_moved(self, server: Any, merged: set[tuple[str, bytes]], *, forgiven: bool) -> None:
        """Client by client, what was merged into the server is taken from the client's side."""
        assert self._conserved is not None
        for name, (client, given) in self._last.items():
            self._values[name] = self._value(client, given, name, merged)
        total = self._conserved.server(self._algorithm, server, self._clients)
        for value in self._values.values():
            total = total + value
        if self._total is not None and not forgiven:
            self._check(total - self._total, total, "what the algorithm conserves has changed at the server")
        self._total = total

    @staticmethod
    def _check(difference: Tensor, size: Tensor, what: str) -> None:
        off, size_of = float(difference.abs().max()), float(size.abs().max())
        if not off <= CLOSE * (1 + size_of):
            raise Violation(f"{what}: by {off:.3g} of {size_of:.3g}")


def _took(entry: Took) -> tuple[Key, int]:
    octets, _ = entry.parts
    reply = messages.from_bytes(octets)
    if not isinstance(reply, Reply) or reply.ticket.hex() != entry.ticket:
        raise Violation(f"{entry.name} has answered another ticket than {entry.ticket[10:22]}")
    return Key(entry.name, entry.ticket, messages.digest(octets)), max(reply.steps, 0)


def _key(arrival: Any) -> Key:
    return Key(arrival.member.name, arrival.question.ticket.hex(), arrival.receipt)


def _text(key: Key) -> str:
    return f"reply {key.digest.hex()[:6]} of {key.name} to {key.ticket[10:22]}"


def _fingerprint(machine: Any) -> bytes:
    """Of all that the next rounds follow from."""
    made = blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            made.update(value.contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for name, part in value.items():
                made.update(name.encode())
                add(part)
        elif isinstance(value, tuple | list):
            for part in value:
                add(part)
        else:
            made.update(repr(value).encode())

    add((machine.server.tree(), machine._rng.state(), machine._serial))
    return made.digest()
