"""A federation's history, computed again by the simulator: the same contacts, with as many steps, in the same order.

Where the server's model comes out the same, bit for bit, both worlds have run one algorithm.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from quafl.codec.coders import Coders, Parcel
from quafl.core.client import newcomers
from quafl.core.conversation import Await, Clients, Look, Replies, Sleep, Tell, Want
from quafl.core.messages import Message
from quafl.core.pieces import zeros
from quafl.core.randomness import Generators, derive
from quafl.core.seams import Algorithm, Batch, ClientState, Ids, Optimizer, Score, ServerState, Task, examples_of
from quafl.protocol.history import Line, Reached, Replied, Run, digest
from quafl.protocol.log import Gave, Joined, Looked, Returned
from quafl.protocol.server import past_after, ticket_of
from quafl.protocol.speech import as_heard, model_of
from quafl.sim.clock import VirtualClock
from quafl.sim.crew import Telling
from quafl.sim.fleet import SimulatedFleet
from quafl.sim.piecewise import Piecewise
from quafl.sim.speeds import Constant
from quafl.sim.traffic import Sent, Told, Trip


class Deviation(Exception):
    """The history cannot be followed further, and why."""


class _AtEnd(Exception):
    """There is no more history."""


class Many(Task):
    """The clients' own tasks, as one."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks

    def initial(self) -> tuple[Tensor, Tensor]:
        """Nobody's: everybody gets the server's."""
        return self._tasks[0].initial()

    def batch(self, client: int, step: int) -> Batch:
        """The client's, for its step."""
        return client, self._tasks[client].batch(0, step)

    def gradient(self, model: Tensor, buffers: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """By the client's task."""
        task: Task = self._tasks[batch[0]]
        return task.gradient(model, buffers, batch[1])

    def examples(self, client: int) -> int:
        """Of the client's task."""
        return examples_of(self._tasks[client], 0)

    def evaluate(self, model: Tensor, buffers: Tensor) -> Score:
        """Nobody does."""
        return {}

    def export(self, model: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        """By the first client's."""
        return self._tasks[0].export(model, buffers)


class ReplayedFleet(SimulatedFleet):
    """Simulated clients that do what real ones did. Who is there, who answers, after how many steps and in what order,
    is read from the history."""

    def __init__(
        self,
        task: Task,
        names: Sequence[str],
        optimizer: Optimizer,
        algorithm: Algorithm,
        coders: Coders,
        rng: Generators,
        run: str,
        lines: deque[Line],
    ) -> None:
        steady = Constant(Piecewise.steady(torch.ones(len(names), dtype=torch.float64)))
        super().__init__(
            task, optimizer, algorithm, coders, VirtualClock(), steady, rng, limited=False, executor="sequential"
        )
        self._names, self._run, self._lines, self._optimizer = names, run, lines, optimizer
        self._serial, self._looked, self._past = 0, 0.0, b""
        self._script: dict[tuple[str, str], Replied] = {
            (line.name, line.ticket): line for line in lines if isinstance(line, Replied)
        }
        self._joined: set[int] = set()
        self._answers: dict[tuple[str, str], Trip] = {}
        self._ticket = ""  # of the contact under way

    def _carry_out(self, want: Want) -> Any:
        match want:
            case Sleep():
                return None
            case Look():
                line = self._next(Looked)
                self._looked, self._past = line.now, past_after(self._past, line)
                return Clients(torch.tensor(line.present, dtype=torch.int64), line.size, line.now)
            case Tell():
                return self.tell(want)
            case Await():
                line = self._next(Gave)
                self._past = past_after(self._past, line)
                return self._given_back(line)

    def _next(self, kind: type[Any]) -> Any:
        while self._lines:
            line = self._lines.popleft()
            if isinstance(line, kind):
                return line
            if not isinstance(line, Joined | Replied | Returned | Reached | Run):
                raise Deviation(f"the algorithm wants to know what {kind.__name__} says, the history has {line}")
        raise _AtEnd

    def tell(self, want: Tell) -> None:
        """Contact those clients whose answers were taken; what the others did, nobody knows."""
        parcel = self._coders.down.pack(want.down, self._rng["dither"], want.server.expected)
        self._serial += 1
        ticket = ticket_of(self._run, self._looked, self._past, self._serial, parcel)
        keys = as_heard(self._coders, want.down, parcel) if self._coders.up.needs_keys else None
        question = Told(want.server.round, keys)
        for client in sorted(want.to.tolist()):
            replied = self._script.get((self._names[client], ticket.hex()))
            if replied is not None:
                self._replay(client, replied, ticket, want.down, parcel, question)

    def _replay(
        self, client: int, replied: Replied, ticket: bytes, told: Message, parcel: Parcel, question: Told
    ) -> None:
        ids = torch.tensor([client])
        joins = client not in self._joined
        if joins and not replied.whole and self._coders.down.needs_keys:
            raise Deviation(f"round {question.round}: {replied.name} answers without ever having got a model")
        coder = self._coders.down.in_full() if replied.whole else self._coders.down
        if replied.whole and question.down is not None:
            question = replace(question, down=told)
        packed = coder.pack(told, torch.Generator(), {}) if replied.whole else parcel
        if joins:
            nothing = {one.name: zeros(model_of(told)) for one in coder.vectors}
            self._join(ids, coder.unpack(packed, nothing))
        outline = self.crew.outline(ids)
        before = torch.tensor([0 if joins else replied.steps]).minimum(outline.budget)
        more = self._asked_for(replace(outline, taken=before))
        if int(before + more) != replied.steps:
            raise Deviation(f"round {question.round}: {replied.name} took {replied.steps} steps, could not have")
        self._ticket = ticket.hex()
        sent = self._sent(ids, torch.zeros(1, dtype=torch.float64), packed.nbytes, question)
        contact = self._next_contact(sent, before, more)
        self._contact([sent], [contact], Telling(question.round, packed, told, coder))
        self._compute()
        if joins and replied.steps == 0:
            self._still_a_newcomer(ids)
        if bool(sent.silent):
            if replied.steps or self._algorithm.records.idle:
                raise Deviation(f"round {question.round}: the progress of {replied.name} is not finite")
            return
        self._answers[replied.name, replied.ticket] = Trip(0.0, self._serial, client, 0, sent)

    def _join(self, ids: Ids, heard: Message) -> None:
        fresh = newcomers(self._algorithm, model_of(heard), heard.statistics, torch.ones(1))
        nothing = self._coders.up.nothing_left_out(fresh.base)
        self.crew.everybody().put(ids, replace(fresh, optimizer=self._optimizer.init(fresh.base), left_out=nothing))
        self._joined.add(int(ids))

    def _still_a_newcomer(self, ids: Ids) -> None:
        after = self.crew.everybody()[ids]
        plain = ClientState(**{f.name: getattr(after, f.name) for f in fields(ClientState)})
        self.crew.everybody().put(ids, self._algorithm.newcomer(plain, torch.ones(1)))

    def _dither(self, sent: Sent) -> torch.Generator:
        """Each client has a generator of its own for each contact."""
        (client,) = sent.sender.tolist()
        return torch.Generator().manual_seed(derive(self._run, self._names[client], self._ticket))

    def _given_back(self, line: Gave) -> Replies:
        missing = [name for name, ticket in line.replies if (name, ticket) not in self._answers]
        if missing:
            raise Deviation(f"the algorithm was given an answer of {missing[0]}, which was not asked that")
        arrived = [self._answers.pop((name, ticket)) for name, ticket in line.replies]
        replies = self._decoded(arrived, self._clock.now()) if arrived else self._nothing
        return replace(replies, failed=torch.tensor(line.failed, dtype=torch.int64))


def follow(
    lines: Iterable[Line],
    task_of: Callable[[str], Task],
    start: tuple[Tensor, Tensor],
    algorithm: Algorithm,
    coders: Coders,
    optimizer: Optimizer,
) -> Iterator[ServerState]:
    """The server's states after each round of a history. Deviation, where a model differs from the server's."""
    script = deque(lines)
    first = script.popleft() if script else None
    if not isinstance(first, Run):
        raise Deviation("the history does not begin with its run")
    names = [line.name for line in script if isinstance(line, Joined)]
    task, rng = Many([task_of(name) for name in names]), Generators(first.seed)
    known = {line.round: line.model for line in script if isinstance(line, Reached)}
    fleet = ReplayedFleet(task, names, optimizer, algorithm, coders, rng, first.run, script)
    server = algorithm.start(*start)
    while script:
        try:
            server = fleet.run(algorithm.round(server, rng))
        except _AtEnd:
            return
        if server.round in known and known[server.round] != digest(server.model, server.buffers):
            raise Deviation(f"after round {server.round} the server had another model")
        yield server
