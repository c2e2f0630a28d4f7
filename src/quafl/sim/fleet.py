"""The simulated clients. Lazy: a client's local steps are drawn and computed when it is contacted, for all contacted
clients together, because nobody can tell before."""

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from quafl.core.client import contact, newcomers
from quafl.core.randomness import Generators
from quafl.core.rows import Rows
from quafl.core.seams import (
    Algorithm,
    Answer,
    Codecs,
    Ids,
    Model,
    Note,
    Optimizer,
    Packet,
    Refine,
    Replies,
    Speeds,
    Task,
    Totals,
)
from quafl.sim.clock import VirtualClock
from quafl.sim.executors import Sequential


@dataclass(frozen=True, slots=True)
class _Pending(Rows):
    """Answers under way to the server."""

    arrival: Tensor
    sender: Ids
    answer: Answer
    report: Model  # kept by the sender until the answer has arrived, for repairs


class SimulatedFleet:
    """n clients in virtual time; all start training from the task's initial model at time zero.

    `latency` (sit) is the time of one exchange; `unreachable` the probability that a contact is lost on its way to
    the client, which then knows nothing of it.
    """

    def __init__(
        self,
        size: int,
        task: Task,
        optimizer: Optimizer,
        algorithm: Algorithm,
        codecs: Codecs,
        clock: VirtualClock,
        speeds: Speeds,
        rng: Generators,
        *,
        latency: float = 0.0,
        unreachable: float = 0.0,
    ) -> None:
        self.totals = Totals()
        self.size = size
        self.clients = newcomers(size, *task.initial(), budget=algorithm.local_steps, optimizer=optimizer)
        self._since = torch.zeros(size, dtype=torch.float64)  # when each client's local steps began
        self._pending: _Pending | None = None
        self._asked = 0.0  # when the last message was sent
        self._execute = Sequential(task, optimizer)
        self._algorithm, self._codecs, self._clock, self._speeds, self._rng = algorithm, codecs, clock, speeds, rng
        self._latency, self._unreachable = latency, unreachable

    def available(self) -> Ids:
        """All clients."""
        return torch.arange(self.size)

    def send(self, to: Ids, packet: Packet, note: Note, refine: Refine) -> None:
        """Contact the clients; what they answer is then under way."""
        self.totals.down += packet.nbytes * len(to)
        reached = to[torch.rand(len(to), generator=self._rng["losses"]) >= self._unreachable]
        self.totals.lost += len(to) - len(reached)

        def repair(row: int, request: Packet) -> Packet:
            refinement = refine(row, request)
            self.totals.refined += request.sent == packet.bits
            self.totals.up += request.nbytes
            self.totals.down += refinement.nbytes
            return refinement

        self._asked = now = self._clock.now()
        clients, arrival = self.clients[reached], torch.full((len(reached),), now + self._latency, dtype=torch.float64)
        if self._algorithm.answers == "at once":
            counts = self._speeds.steps_within(reached, self._since[reached], now, clients.budget)
            clients = self._execute(clients, reached, counts)
        else:
            arrival += self._speeds.duration(reached, now, clients.budget)
        answer, report, clients = contact(
            clients,
            packet,
            note,
            repair,
            algorithm=self._algorithm,
            codecs=self._codecs,
            rng=self._rng["dither of clients"],
            train=lambda adopted: self._execute(adopted, reached, adopted.budget),
        )
        self.clients.put(reached, clients)
        self._since[reached] = now
        self.totals.up += answer.packet.nbytes
        self.totals.contacts += len(reached)
        self.totals.steps += int(answer.steps.sum())
        self.totals.idle += int((answer.steps == 0).sum())
        sent = _Pending(arrival, reached, answer, report)
        self._pending = sent if self._pending is None else _Pending.cat([self._pending, sent])

    def receive(self, count: int, within: float, since: int) -> Replies:
        """The earliest answers under way; a server without patience does not wait longer than an exchange takes for
        answers that will never come."""
        if self._pending is None:
            raise ValueError("receive was called before send: nobody has been asked")
        deadline = self._clock.now() + within
        pending = self._pending[self._pending.answer.round >= since]
        pending = pending[pending.arrival.argsort(stable=True)]
        arrived = min(count, int((pending.arrival <= deadline).sum()))
        here, self._pending = pending[:arrived], pending[arrived:]
        if arrived:
            self._clock.sleep_until(float(here.arrival[-1]))
        if arrived < count:
            self._clock.sleep_until(deadline if isfinite(deadline) else self._asked + self._latency)

        def refine(row: int, request: Packet) -> Packet:
            refinement = self._codecs.up.refine(here.report[row], request)
            self.totals.refined += request.sent == here.answer.packet.bits
            self.totals.down += request.nbytes
            self.totals.up += refinement.nbytes
            return refinement

        return Replies(senders=here.sender, answer=here.answer, refine=refine)
