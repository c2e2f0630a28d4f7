"""The server of a real federation: it drives the server's machine over a carrier and a disk, and evaluates, records,
checkpoints and stops.

The machine lives in the carrier's loop. What takes long is computed by a few threads, the journal is written by one of
its own. Whoever calls `run` evaluates and checkpoints between rounds.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event
from time import monotonic
from typing import Any

from quafl.core.seams import ServerState, Task, Totals
from quafl.deploy.carrier import Carrier, Loop
from quafl.deploy.journal import Journal
from quafl.protocol import history, log
from quafl.protocol.carrier import Octets, Unreachable
from quafl.protocol.history import Line, Reached, digest, of_entry
from quafl.protocol.judging import Judgement
from quafl.protocol.machine import Answer, Ask, Asked, Compute, Do, Done, Effect, Say, Wake, Woken, Write
from quafl.protocol.members import Member
from quafl.protocol.server import ServerSide
from quafl.record.checkpoints import Checkpoints
from quafl.record.evaluations import Evaluations, Pending, Standing
from quafl.record.rows import Row, is_as_good

_log = logging.getLogger(__name__)

SHARE = 0.05  # of the time, at most, goes into checkpoints
GLANCE = 0.5  # seconds between two looks at whether to stop
ALONE_SECONDS = 30.0  # that the end of a run waits for somebody who could judge its model
FORMAT = 5  # of checkpoints
JUDGING = "bytes_judging"  # a column of rows: octets of models that clients were sent to judge, and their answers


@dataclass(frozen=True, slots=True)
class Goals:
    """How long, how often, and what is looked at. All times are seconds."""

    until: float = inf
    rounds: int | None = None
    every: float = 10.0
    metric: str = "accuracy"
    target: float = 0.9
    lower_is_better: bool = False
    stop_at_target: bool = False
    checkpoint_seconds: float = 10.0
    average: float = 0.0  # time constant of the average of models that is evaluated; 0: the model itself is
    per_client: bool = False  # clients judge, too; they do anyway where the server has nothing to judge by
    personal_steps: int = 0  # by which each makes the model its own, which it then judges as well
    seed: int = 0

    def at_target(self, row: Row) -> bool:
        """Whether an evaluation is as good as the target."""
        judged = self.metric in row or "loss" in row  # else nobody has said anything
        return judged and is_as_good(row, self.target, self.metric, lower_is_better=self.lower_is_better)


class Driver:
    """Carries out what the server's machine wants. All of the machine happens in the loop's thread."""

    def __init__(self, machine: ServerSide, carrier: Carrier, loop: Loop, journal: Journal) -> None:
        self.machine = machine
        self.reached: SimpleQueue[None] = SimpleQueue()  # a round is over, or the run has failed
        self._carrier, self._loop, self._journal = carrier, loop, journal
        self._pool = ThreadPoolExecutor(max_workers=1 + (os.cpu_count() or 1), thread_name_prefix="codec")
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = 0
        self._records = journal.number  # of the journal
        self._unwritten: set[int] = set()  # records that the machine does not know to be written
        self._began = monotonic()
        self._told = False  # that a round is over

    @property
    def seconds(self) -> float:
        """Of running since the beginning; a pause between two processes does not count."""
        return monotonic() - self._began

    def set_clock(self, seconds: float) -> None:
        """It is that late."""
        self._began = monotonic() - seconds

    # What the carrier calls

    async def hear(self, name: str, octets: Octets) -> bytes:
        """The answer to what a client says by itself."""
        self._numbers += 1
        call = self._numbers
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[call] = answer
        try:
            self._happen(Asked(call, name, octets))
            return await answer
        finally:
            self._calls.pop(call, None)

    def room(self, name: str) -> int:
        """Octets of the largest message that this client may send unasked now."""
        return self.machine.room(name)

    def gone(self, name: str) -> None:
        """A client's connection has ended."""
        self._loop.call(lambda: self.machine.gone(name))

    # What `run` calls

    def call(self, work: Callable[[ServerSide], Any]) -> Any:
        """Something done to the machine, in its thread; what it then wants is carried out."""

        async def there() -> Any:
            result = work(self.machine)
            self._happen(Woken())
            return result

        return self._loop.run(there())

    def snapshot(self, record: "History") -> tuple[dict[str, Any], int, int]:
        """The machine's state, the number of the last record that is in it, and where the history stands then."""

        def taken(machine: ServerSide) -> tuple[dict[str, Any], int, int]:
            return machine.state(), min(self._unwritten, default=self._records + 1) - 1, record.place()

        state, number, place = self.call(taken)
        return state, number, place

    def checkpointed(self, number: int) -> None:
        """A checkpoint was made, and has all up to that record."""
        self._writer.submit(self._journal.begin_segment).result()
        self._journal.forget(number)
        self.call(lambda machine: machine.checkpointed())

    def close(self) -> None:
        """No more contacts."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=True, cancel_futures=False)
        self._journal.close()

    # Effects

    def _happen(self, event: Any) -> None:
        try:
            effects = self.machine.happen(self.seconds, event)
        except Exception:  # a bug of ours; the other clients must not suffer from it
            _log.exception("something went wrong at %s", type(event).__name__)
            effects = []
        for effect in effects:
            self._carry_out(effect)
        over = self.machine.reached or self.machine.failure is not None
        if over and not self._told:
            self.reached.put(None)
        self._told = over

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Answer(call, octets):
                waiting = self._calls.get(call)
                if waiting is not None and not waiting.done():
                    waiting.set_result(octets)
            case Say(level, sentence):
                _log.log(level, "%s", sentence)
            case Wake(at):
                asyncio.get_running_loop().call_later(max(0.0, at - self.seconds), self._happen, Woken())
            case Do(number, wait):
                if isinstance(wait, Write):
                    self._records += 1
                    self._unwritten.add(self._records)
                self._loop.spawn(self._do(number, wait, self._records))

    async def _do(self, number: int, wait: Ask | Compute | Write, record: int) -> None:
        result: Any = None
        here = asyncio.get_running_loop()
        try:
            match wait:
                case Ask(name, octets, within):
                    result = await self._carrier.ask(name, octets, within)
                case Compute(work):
                    result = await here.run_in_executor(self._pool, work)
                case _:
                    await here.run_in_executor(self._writer, self._journal.append, record, wait.record)
        except Exception as error:
            known = not isinstance(wait, Ask) or isinstance(error, Unreachable)
            result = error if known else Unreachable(f"cannot be asked ({error})")
        if isinstance(wait, Write):
            self._unwritten.discard(record)
        self._happen(Done(number, result))


class History:
    """A file of what happened, a line each: what `quafl federation replay` reads."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("a", encoding="utf-8")
        self.lost = False  # something could not be written

    def add(self, line: Line) -> None:
        """Nothing depends on it but a replay: what cannot be written is lost."""
        if self._stream.closed:  # the run is over
            return
        try:
            self._stream.write(history.to_text(line))
        except OSError:
            self.lost = True

    def place(self) -> int:
        """Where it ends now, on disk."""
        self._stream.flush()
        return self._stream.tell()

    def go_back(self, place: int) -> None:
        """What came after that is forgotten."""
        self._stream.seek(place)
        self._stream.truncate()

    def close(self) -> None:
        """End it."""
        with suppress(OSError):
            self._stream.close()


class Coordinator:
    """One run, from wherever it stands to its end. `made_with` is kept in its checkpoints."""

    def __init__(
        self,
        task: Task,
        driver: Driver,
        goals: Goals,
        checkpoints: Checkpoints,
        journal: Journal,
        record: History,
        made_with: dict[str, str],
        on_row: Callable[[Row], None],
        stop: Event,
    ) -> None:
        self.driver, self._goals, self._history = driver, goals, record
        driver.machine.on_entry = lambda entry: record.add(of_entry(entry))
        self.evaluations = Evaluations(
            task,
            driver.machine.server,
            every=goals.every,
            seed=goals.seed,
            metric=goals.metric,
            lower_is_better=goals.lower_is_better,
            trains=False,
            stops=goals.stop_at_target,
            average=goals.average,
        )
        self._asks = goals.per_client or goals.personal_steps > 0 or not getattr(task, "has_test", True)
        self._pending: Pending | None = None  # an evaluation that clients are to be asked about
        self._judgement: Judgement | None = None  # what they say of it; None: they have not been asked yet
        self._alone_until = inf  # until when somebody is waited for who could be asked
        self._checkpoints, self._journal, self._made_with = checkpoints, journal, made_with
        self._on_row, self._stop = on_row, stop
        self._saved_at = monotonic()
        self._origin = 0.0  # when the run began, by the driver's clock

    @property
    def server(self) -> ServerState:
        """What has been reached."""
        return self.driver.machine.server

    @property
    def members(self) -> list[Member]:
        """Everybody who has ever been there, in the order of their coming."""
        return list(self.driver.machine.members)

    def restore(self, kept: dict[str, Any]) -> None:
        """Go on from a checkpoint, and what was written down after it."""
        machine = self.driver.machine
        entries = [log.from_bytes(record) for record in self._journal.records(after=kept["journal"])]
        machine.restore(kept["machine"], entries)
        self._history.go_back(kept["history"])
        self.evaluations.restore(kept["evaluations"])
        if kept["pending"] is not None:
            shown, time, totals = kept["pending"]
            self._pending = Pending(Standing(*shown), time, Totals(**totals))
        times = [entry.now for entry in entries if isinstance(entry, log.Looked)]
        self.driver.set_clock(max([kept["clock"], *times]))
        machine.now, self._origin = kept["clock"], kept["origin"]

    @property
    def seconds(self) -> float:
        """Of the run, so far."""
        return self.driver.seconds - self._origin

    def run(self) -> bool:
        """Until the end, which is True; False when asked to stop before. Diverged, if training does."""
        try:
            return self._run()
        finally:
            self._history.close()

    def _run(self) -> bool:
        if not self.evaluations.rows:
            self._wait_for_clients()
            if self._stop.is_set():
                return False
            self._origin = self.driver.seconds  # the clock starts when there is somebody
            self._evaluate()
            if not self._has_judgement():
                return False
        elif self._is_over():
            _log.info("this run is over already; raise run.until or run.rounds, or choose another --out")
        else:
            _log.info("going on from round %d, after %.0f s", self.server.round, self.seconds)
        if not self._is_over():
            if not self._save():  # what is written down from now on would follow it
                self.driver.call(lambda machine: machine.write_no_more())
            self.driver.call(lambda machine: machine.begin())
            while not self._is_over():
                if self._stop.is_set():
                    return False
                if self._next_round():
                    self._look_at_round()
                self._look_at_judgement()
        if self._has_judgement() and self.evaluations.rows[-1]["round"] != self.evaluations.shown.round:
            self._evaluate()
        if not self._has_judgement():
            self._save()
            return False
        self._save()
        _, model, buffers = self.evaluations.shown
        self.driver.call(lambda machine: machine.finish(model, buffers))
        return True

    def _wait_for_clients(self) -> None:
        start = self.driver.seconds
        while not self._stop.wait(GLANCE / 5):
            if self.driver.call(lambda machine: machine.can_start()):
                return
            if self.driver.seconds - start >= self._goals.until:
                _log.warning("nobody was there when the time was up")
                return

    def _next_round(self) -> bool:
        """Wait for it a moment; whether it has come."""
        try:
            self.driver.reached.get(timeout=GLANCE)
        except Empty:
            return False
        failure = self.driver.machine.failure
        if failure is not None:
            raise failure
        return True

    def _look_at_round(self) -> None:
        time = max(self.driver.machine.now - self._origin, 0.0)
        self.evaluations.reach(time, self.server)
        if time >= self.evaluations.due and self._pending is None:
            self._evaluate()
        if self._is_over():
            return
        if monotonic() > self._saved_at:
            self._save()
        self.driver.call(lambda machine: machine.go_on())

    def _is_over(self) -> bool:
        goals, row = self._goals, self.evaluations.rows[-1]
        rounds_done = goals.rounds is not None and self.server.round >= goals.rounds
        return rounds_done or self.seconds >= goals.until or (goals.stop_at_target and goals.at_target(row))

    def _evaluate(self) -> None:
        machine = self.driver.machine
        self._history.add(Reached(machine.server.round, digest(machine.server.model, machine.server.buffers)))
        pending = self.evaluations.begin(machine.totals)
        if self._asks:
            self._pending, self._judgement = pending, None
            self._look_at_judgement()
        else:
            self._on_row(self.evaluations.conclude(pending, None))

    def _look_at_judgement(self) -> None:
        """Ask the clients how good the model is where the data are, as soon as somebody is there; rounds go on
        meanwhile. A row, if they have answered."""
        pending = self._pending
        if pending is None:
            return
        if self._judgement is None:
            _, model, buffers = pending.shown
            steps, alone = self._goals.personal_steps, monotonic() > self._alone_until
            self._judgement = self.driver.call(lambda machine: machine.judge(model, buffers, steps, anyway=alone))
        judgement = self._judgement
        if judgement is None or not judgement.is_over:
            return
        self._pending = None
        nbytes = judgement.nbytes + (self.evaluations.rows[-1].get(JUDGING, 0.0) if self.evaluations.rows else 0.0)
        self._on_row(self.evaluations.conclude(pending, judgement.scores, **{JUDGING: nbytes}))

    def _has_judgement(self) -> bool:
        """Wait for what clients are asked; False, if asked to stop before."""
        self._alone_until = monotonic() + ALONE_SECONDS
        while self._pending is not None and not self._stop.wait(GLANCE / 5):
            self._look_at_judgement()
        self._alone_until = inf
        return self._pending is None

    def _save(self) -> bool:
        """Between two rounds; whether it was possible. A full disk must not end the run."""
        began, pending = monotonic(), self._pending
        try:
            state, number, place = self.driver.snapshot(self._history)
            self._checkpoints.save(
                {
                    "format": FORMAT,
                    "made_with": self._made_with,
                    "machine": state,
                    "journal": number,
                    "history": place,
                    "evaluations": self.evaluations.state(),
                    "pending": pending and (tuple(pending.shown), pending.time, asdict(pending.totals)),
                    "clock": self.driver.machine.now,
                    "origin": self._origin,
                }
            )
            self.driver.checkpointed(number)
            saved = True
        except OSError as error:
            _log.error("no checkpoint could be written: %s; going on without", error)
            saved = False
        self._saved_at = monotonic() + max(self._goals.checkpoint_seconds, (monotonic() - began) / SHARE)
        return saved
