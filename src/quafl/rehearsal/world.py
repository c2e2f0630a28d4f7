"""The stage: a clock that jumps from event to event, a network, disks, and the processes of a server and its clients.

Every effect of a machine is carried out after a drawn delay. All that is drawn comes from the schedule's one seed, in
the order of events, so that the same seed shows the same again.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from typing import Any, NamedTuple

from quafl.core.randomness import Generators
from quafl.protocol import journal, messages
from quafl.protocol.carrier import SERVER, Unreachable
from quafl.protocol.client import ClientSide
from quafl.protocol.layout import layout_of
from quafl.protocol.machine import Answer, Ask, Asked, Compute, Do, Done, Effect, Say, Wake, Woken, Write
from quafl.protocol.server import ServerSide
from quafl.rehearsal.cast import Cast, draw
from quafl.rehearsal.checks import Checks, Violation
from quafl.rehearsal.disks import ClientDisk, Read, ServerDisk
from quafl.rehearsal.faults import Faults, Incident
from quafl.rehearsal.history import History, kind
from quafl.rehearsal.liars import Liar

NETWORK, WORK, DISK = 0.1, 0.1, 0.03  # seconds, in the mean, that a message, a computation and half a write take
LATE = 3.0, 20.0  # seconds that a message is late, from and to
DOWN = 0.2, 4.0  # seconds until a party that was killed is back, from and to
MIDDLE = 0.7  # of the kills while something waits to be written hit in the middle of that
AGAIN = 0.2, 2.0  # seconds from there until it is killed again, if it is
JUMPS = -15.0, 90.0  # seconds that a clock jumps, from and to
CHECKPOINTS = 0.35  # of the rounds
JUDGED = 0.3  # likewise: after which clients are asked how good the model is
CLIENT_CHECKPOINTS = 0.15  # of a client's events
ALLOWED = 400.0  # seconds after the last fault, until every honest client must have been heard
MORE_ROUNDS = 3  # that must follow the last fault
ROUNDING = 1e-6  # seconds: whoever is woken is woken late enough, in floating point
MOST_EVENTS = 30_000
PROCESSES = "server killed", "client killed", "client left", "client's disk lost", "checkpoint damaged"


class Parts(NamedTuple):
    """What is rehearsed; a test puts bugs in."""

    server: type[ServerSide] = ServerSide
    client: type[ClientSide] = ClientSide
    read: Read = journal.read


class Party:
    """A process, or the place where one was and will be again."""

    def __init__(self, name: str, disk: Any) -> None:
        self.name, self.disk = name, disk
        self.machine: Any = None  # None: it is down
        self.life = 0  # processes that there have been before
        self.offset = 0.0  # of its clock
        self.asking: set[int] = set()  # numbers of what it has asked, and has not heard of yet
        self.writing: deque[tuple[int, bytes]] = deque()
        self.liar: Liar | None = None
        self.leaving = False


class Call(NamedTuple):
    """Something that a party has asked."""

    asker: Party
    life: int
    number: int
    target: Party
    octets: bytes


class World:
    """One schedule. `run` ends with what must be true at the end, or with a Violation."""

    def __init__(self, seed: int, parts: Parts = Parts(), *, keep: bool = False) -> None:  # noqa: B008  # immutable
        self.rng = Random(seed)
        self.now = 0.0
        self.cast: Cast = draw(self.rng)
        self.faults = Faults(self.rng, self.cast.names)
        self.history = History(keep=keep)
        self.server = Party(SERVER, ServerDisk(parts.read))
        self.clients = {name: Party(name, ClientDisk()) for name in self.cast.names}
        for name in self.cast.liars:
            self.clients[name].liar = Liar(self.rng, self.cast.algorithm.records.up)
        self.checks = Checks(self.cast, self.server, self.clients, self.faults)
        self.events = 0
        self._parts = parts
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._calls_made = count(), count(1)
        self._calls: dict[int, Call] = {}
        self._cut_off: set[str] = set()  # clients behind a partition
        self._overheard: list[bytes] = []  # replies of honest clients
        self._looking = False  # somebody will look at the round that was reached
        self._ending = False

    # Time

    def _at(self, delay: float, action: Callable[[], None]) -> None:
        heappush(self._heap, (self.now + delay, next(self._order), action))

    def _later(self, party: Party, delay: float, action: Callable[[], None]) -> None:
        """Unless its process has ended by then."""
        life = party.life
        self._at(delay, lambda: action() if party.life == life and party.machine is not None else None)

    def _delay(self, mean: float) -> float:
        return 0.1 * mean + self.rng.expovariate(1 / mean)

    def _until(self, missing: Callable[[], str], deadline: float) -> None:
        """Let things happen until nothing is missing."""
        while what := missing():
            self.events += 1
            if not self._heap or self._heap[0][0] > deadline or self.events > MOST_EVENTS:
                raise Violation(
                    f"{self.now - self.faults.until:.0f} s after the last fault there is still missing: {what}"
                )
            self.now, _, action = heappop(self._heap)
            action()

    # The play

    def run(self) -> None:
        """From the first hello to the last."""
        cast = self.cast
        machine = self._new_server()
        self.server.disk.save(machine.state(), self.checks.seen())
        self._boot_server()
        for name in cast.names:
            self._at(self.rng.uniform(0, 2), partial(self._boot_client, self.clients[name]))
        for incident in self.faults.incidents:
            self._at(incident.at, partial(self._strike, incident))
        self._at(self.faults.until, self._stop_faults)
        self._until(lambda: "their end" if self.faults.on else "", inf)
        self._until(self.checks.missing, self.faults.until + ALLOWED)
        self._end()

    def _stop_faults(self) -> None:
        self.faults.on = False
        self._cut_off.clear()
        self.server.disk.full = False
        for client in self.clients.values():
            client.disk.full = False
        self.checks.demand(MORE_ROUNDS)
        self.history.note(self.now, "", "faults stop")

    def _end(self) -> None:
        """The server is killed once more, comes back, and ends the run."""
        self._ending = True
        self._kill(self.server, 0.1)
        self._until(self._reading, self.now + 60.0)
        final = self.server.machine.server.model
        self.server.machine.finish()
        self._tell(self.server, Woken())
        self._until(self._not_finished, self.now + 60.0)
        for name in self.cast.honest:
            self.checks.given_at_last(name, self.clients[name].machine.final, final)

    def _reading(self) -> str:
        done = self.server.machine is not None and self.checks.has_replayed
        return "" if done else "the server, which reads its journal"

    def _not_finished(self) -> str:
        for name in self.cast.honest:
            machine = self.clients[name].machine
            if machine is None or not machine.finished:
                return f"{name}, to whom nobody has said that the run is over"
        return ""

    # Processes

    def _new_server(self) -> ServerSide:
        cast = self.cast
        task = cast.tasks[cast.names[0]]
        state = cast.algorithm.start(*task.initial())
        return self._parts.server(
            cast.algorithm,
            cast.coders,
            state,
            Generators(cast.seed),
            layout_of(task),
            cast.welcome,
            limits=cast.limits,
        )

    def _boot_server(self) -> None:
        party, machine = self.server, self._new_server()
        boot = party.disk.boot()
        party.machine, self._looking = machine, False
        self.history.note(self.now, SERVER, f"begins, with {len(boot.entries)} records")
        self.checks.server_begins(boot, machine)
        machine.restore(boot.state, boot.entries)
        if party.life:
            self.faults.happened["server restarted"] += 1
            self._save()  # what is written down from now on follows this
        machine.begin()
        self._tell(party, Woken())

    def _boot_client(self, party: Party) -> None:
        if party.machine is not None:
            return
        disk, cast = party.disk, self.cast
        kept, session = disk.checkpoint, f"{self.rng.getrandbits(60):x}"
        party.machine = self._parts.client(
            party.name, cast.tasks[party.name], cast.terms, session, kept=kept, reports=disk.reports
        )
        party.leaving = False
        self.history.note(self.now, party.name, "begins")
        if party.life:
            self.faults.happened["client restarted"] += 1
        self.checks.client_begins(party)
        party.machine.begin()
        self._tell(party, Woken())

    def _kill(self, party: Party, down: float) -> None:
        if party.machine is None:
            return
        if party.writing and not party.disk.is_writing and self.rng.random() < MIDDLE:
            party.disk.put(party.writing[0][1])
        what = party.disk.crash(self.rng)
        if what != "whole":
            self.faults.happened[f"record {what}"] += 1
        self.history.note(self.now, party.name, f"is killed; the end of what it wrote is {what}")
        if party is self.server:
            self.checks.server_dies()
        party.machine, party.life = None, party.life + 1
        party.asking.clear()
        party.writing.clear()
        self._at(down, self._boot_server if party is self.server else partial(self._boot_client, party))
        if self.faults.strikes("killed again"):
            delay = down + self.rng.uniform(*AGAIN)
            self._at(delay, lambda: self._kill(party, self.rng.uniform(*DOWN)) if self.faults.on else None)

    def _tell(self, party: Party, event: Any) -> None:
        """Let it happen, look whether all is well, and carry out what comes of it; perhaps not all of that."""
        machine = party.machine
        before = (None, None) if party is self.server else (machine.client, machine._given)
        effects: list[Effect] = []
        try:
            effects = machine.happen(self.now + party.offset, event)
        except Violation:  # found while something was written down
            raise
        except Exception as error:
            self.history.note(self.now, party.name, event)
            raise Violation(f"{party.name} raised {type(error).__name__}: {error}") from error
        self.history.note(self.now, party.name, event, effects)
        if party is self.server:
            self.checks.server_did()
        else:
            self.checks.client_did(party, event, *before)
        killed = bool(effects) and self.faults.strikes("killed at an effect")
        for effect in effects[: self.rng.randint(0, len(effects)) if killed else None]:
            self._carry_out(party, effect)
        if killed:
            self._kill(party, self.rng.uniform(*DOWN))
        elif party is self.server:
            if machine.reached and not self._looking and not (self._ending and self.checks.has_replayed):
                self._looking = True
                self._later(party, self._delay(WORK), self._look_at_round)
        else:
            self._look_after(party)

    def _look_at_round(self) -> None:
        self._looking = False
        machine = self.server.machine
        if self.rng.random() < CHECKPOINTS:
            self._save()
        if self.rng.random() < JUDGED and (machine.judgement is None or machine.judgement.is_over):
            server, steps = machine.server, self.rng.randint(0, 2)
            made = machine.judge(server.model, server.buffers, steps)
            if made is not None:
                self.checks.asked_to_judge(made.ticket, server.model, server.buffers, steps)
        machine.go_on()
        self._tell(self.server, Woken())

    def _save(self) -> None:
        disk, machine = self.server.disk, self.server.machine
        try:
            disk.save(machine.state(), self.checks.seen())
        except OSError:
            self.faults.happened["checkpoint not written"] += 1
            return
        self.history.note(self.now, SERVER, f"has a checkpoint, up to record {disk.confirmed}")
        self.checks.server_saved()
        machine.checkpointed()

    def _look_after(self, party: Party) -> None:
        """What a client's driver does between two events."""
        machine = party.machine
        if party.leaving and not machine.is_saying_goodbye:
            self.history.note(self.now, party.name, "has left")
            party.machine, party.life = None, party.life + 1
            party.asking.clear()
            party.writing.clear()
            self._at(self.rng.uniform(*DOWN), partial(self._boot_client, party))
        elif self.rng.random() < CLIENT_CHECKPOINTS:
            state = machine.state()
            if state is not None:
                party.disk.save(state)

    # Effects

    def _carry_out(self, party: Party, effect: Effect) -> None:
        match effect:
            case Do(number, Ask(name, octets, within)):
                self._ask(party, number, name, octets, within)
            case Do(number, Compute(work)):
                self._later(party, self._delay(WORK), partial(self._compute, party, number, work))
            case Do(number, Write(record)):
                party.writing.append((number, record))
                if len(party.writing) == 1:
                    self._later(party, self._delay(DISK), partial(self._put, party))
            case Answer(call, octets):
                self._answer(party, call, octets)
            case Wake(at):
                delay = max(0.0, at - self.now - party.offset) + ROUNDING
                self._later(party, delay, partial(self._tell, party, Woken()))
            case Say(level, sentence):
                self.checks.said(party, level, sentence)

    def _compute(self, party: Party, number: int, work: Callable[[], Any]) -> None:
        try:
            result = work()
        except Exception as error:
            result = error
        self._tell(party, Done(number, result))

    def _put(self, party: Party) -> None:
        """The first record that waits reaches the disk, or does not."""
        problem = party.disk.put(party.writing[0][1])
        if problem is not None:
            self.faults.happened["record not written"] += 1
        self._later(party, self._delay(DISK), partial(self._confirm, party, problem))

    def _confirm(self, party: Party, problem: OSError | None) -> None:
        number, record = party.writing.popleft()
        party.disk.confirm()
        if party is self.server and problem is None:
            self.checks.server_wrote(record)
        if party.writing:
            self._later(party, self._delay(DISK), partial(self._put, party))
        self._tell(party, Done(number, problem))

    # The network

    def _ask(self, asker: Party, number: int, name: str, octets: bytes, within: float) -> None:
        target = self.server if name == SERVER else self.clients[name]
        asker.asking.add(number)
        self._later(asker, within, partial(self._fail, asker, number, "did not answer in time"))
        said = [octets] if asker.liar is None else asker.liar.twist(octets, b"", self._overheard)
        for one in said:
            call = next(self._calls_made)
            self._calls[call] = Call(asker, asker.life, number, target, one)
            self._leaves(asker, target, one)
            self._travel(asker, target, one, partial(self._deliver, call))

    def _answer(self, party: Party, call: int, octets: bytes) -> None:
        made = self._calls[call]
        said = [octets] if party.liar is None else party.liar.twist(octets, made.octets, self._overheard)
        for one in said:
            self._leaves(party, made.asker, one)
            if party is self.server:
                self.checks.server_answers(made.asker, made.octets, one)
            self._travel(party, made.asker, one, partial(self._return, call))

    def _leaves(self, sender: Party, target: Party, octets: bytes) -> None:
        self.checks.leaves(sender, target, octets)
        if sender is not self.server and sender.liar is None and kind(octets) is messages.Reply:
            self._overheard.append(octets)

    def _travel(self, sender: Party, target: Party, octets: bytes, arrive: Callable[[bytes], None]) -> None:
        """With all that can happen on the way."""
        client = target if sender is self.server else sender
        if client.name in self._cut_off:
            self.faults.happened["lost in a partition"] += 1
            return
        if self.faults.strikes("lost"):
            return
        for _ in range(2 if self.faults.strikes("doubled") else 1):
            delay = self._delay(NETWORK)
            if self.faults.strikes("late"):
                delay += self.rng.uniform(*LATE)
            whole = octets
            if self.faults.strikes("cut off"):
                whole = octets[: self.rng.randrange(len(octets))]
            self._at(delay, partial(arrive, whole))

    def _deliver(self, call: int, octets: bytes) -> None:
        made = self._calls[call]
        if made.target.machine is not None:
            self._tell(made.target, Asked(call, made.asker.name, octets))
        elif made.life == made.asker.life:
            self._later(made.asker, self._delay(NETWORK), partial(self._fail, made.asker, made.number, "is not there"))

    def _return(self, call: int, octets: bytes) -> None:
        asker, life, number, *_ = self._calls[call]
        if asker.life == life and number in asker.asking:
            asker.asking.remove(number)
            self._tell(asker, Done(number, octets))

    def _fail(self, asker: Party, number: int, reason: str) -> None:
        if number in asker.asking:
            asker.asking.remove(number)
            self._tell(asker, Done(number, Unreachable(reason)))

    # Faults at their time

    def _strike(self, incident: Incident) -> None:
        what, client, seconds = incident.kind, self.clients[incident.victim], incident.seconds
        self.history.note(self.now, "", f"{what} ({incident.victim}, {seconds:.1f} s)")
        if what in PROCESSES:
            self.faults.happened[what] += self._strike_process(what, client)
            return
        match what:
            case "partition":
                self._cut_off |= {incident.victim, self.rng.choice(self.cast.names)}
                self._at(seconds, self._cut_off.clear)
            case "server's disk full":
                self._fill(self.server, seconds)
            case "client's disk full":
                self._fill(client, seconds)
            case "clock jumped":
                party = self.rng.choice((self.server, client))
                party.offset += self.rng.uniform(*JUMPS)
                if party.machine is not None:
                    self._tell(party, Woken())
            case "connection closed":
                if self.server.machine is not None:
                    self.server.machine.gone(client.name)
        self.faults.happened[what] += 1

    def _strike_process(self, what: str, client: Party) -> bool:
        """One of `PROCESSES`; whether there was one to end."""
        happened = (self.server if what == "server killed" else client).machine is not None
        match what:
            case "server killed":
                self._kill(self.server, self.rng.uniform(*DOWN))
            case "client killed":
                self._kill(client, self.rng.uniform(*DOWN))
            case "client left":
                happened = happened and not client.leaving
                if happened:
                    client.leaving = True
                    client.machine.stop()
                    self._tell(client, Woken())
            case "client's disk lost":
                self._kill(client, self.rng.uniform(*DOWN))
                client.disk.lose()
                self.checks.disk_lost(client)
            case "checkpoint damaged":
                happened = self._damage()
        return happened

    def _damage(self) -> bool:
        """The server's newest checkpoint, and the server is killed: nobody would notice before."""
        damaged: bool = self.server.machine is not None and self.server.disk.damage()
        if damaged:
            self._kill(self.server, self.rng.uniform(*DOWN))
        return damaged

    def _fill(self, party: Party, seconds: float) -> None:
        party.disk.full = True

        def empty() -> None:
            party.disk.full = False

        self._at(seconds, empty)
