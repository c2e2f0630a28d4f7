"""A client of a real federation: it drives the client's machine over a carrier and a disk.

The machine lives in a thread of its own. Local steps, encoding and decoding are computed by a few others, so that a
contact never waits for a step that is under way.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Lock
from time import monotonic
from typing import Any, TypeAlias

from quafl.codec.seams import WireError
from quafl.core.messages import Buffers, Model
from quafl.deploy.journal import Journal
from quafl.protocol import log
from quafl.protocol.carrier import SERVER, Octets, Unreachable
from quafl.protocol.client import ClientSide
from quafl.protocol.log import Reported
from quafl.protocol.machine import Answer, Ask, Asked, Compute, Do, Done, Effect, Say, Wake, Woken, Write
from quafl.protocol.messages import Refused, largest_message, to_bytes
from quafl.record.checkpoints import Checkpoints
from quafl.record.summary import RecordError

_log = logging.getLogger(__name__)

AskServer: TypeAlias = Callable[[bytes, float], Octets]  # octets, seconds to wait -> the answer, or Unreachable

JOURNAL = "journal"  # folder
LARGE_JOURNAL = 64_000_000  # octets since the last checkpoint, after which there is another one
GLANCE = 0.2  # seconds between two looks at whether to stop
GOODBYE_SECONDS = 3.0
AT_ONCE = 4  # threads that compute, and as many that wait for the server


def kept_in(folder: Path, device: str = "cpu") -> tuple[dict[str, Any] | None, list[Reported]]:
    """What an earlier process of this client left: its checkpoint, if it was made on that kind of device, and what it
    has reported."""
    kept = None
    try:
        kept = Checkpoints(folder).newest()
    except RecordError as error:
        _log.error("%s; the server brings this client back", error)
    if kept is not None and "device" not in kept:
        _log.warning("%s holds a checkpoint of an earlier version; the server brings this client back", folder)
        kept = None
    elif kept is not None and kept["device"] != device:
        _log.warning(
            "the checkpoint in %s was made on %s, not %s; the server brings this client back",
            folder,
            kept["device"],
            device,
        )
        kept = None
    journal = Journal(folder / JOURNAL)
    try:
        reports = [log.from_bytes(record) for record in journal.everything()]
    except WireError as error:
        _log.error("%s cannot be read (%s); the server brings this client back", folder / JOURNAL, error)
        kept, reports = None, []
    finally:
        journal.close()
    return kept, reports


class Driver:
    """Carries out what a client's machine wants, in the folder that it has to itself."""

    def __init__(
        self,
        machine: ClientSide,
        folder: Path,
        ask: AskServer,
        *,
        checkpoint_seconds: float = 30.0,
        on_final: Callable[[Model, Buffers], None] = lambda model, buffers: None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.machine = machine
        self._folder, self._ask, self._checkpoint_seconds, self._on_final = folder, ask, checkpoint_seconds, on_final
        self._checkpoints, self._journal = Checkpoints(folder), Journal(folder / JOURNAL, waits=True)
        self._written = self._journal.number  # records
        self._events: Queue[Any] = Queue()
        self._calls: dict[int, Future[bytes]] = {}
        self._numbers = 0
        self._wake_at: list[float] = []
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="work")
        self._waiting = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ask")
        self._writing = Lock()
        self._saved: Any = None
        self._saving: Future[None] | None = None
        self._over = Event()
        self._began = monotonic()

    @property
    def largest(self) -> int:
        """Octets of the largest message that the server may send."""
        return largest_message(*self.machine.sizes)

    def hear(self, octets: Octets) -> bytes:
        """The answer to a message from the server; waits for it, in the carrier's thread."""
        answer: Future[bytes] = Future()
        self._events.put((octets, answer))
        while True:
            try:
                return answer.result(GLANCE)
            except TimeoutError:
                if self._over.is_set():  # or a carrier's thread would wait for ever
                    return to_bytes(Refused(b"this client is stopping"))

    def run(self, stop: Event, look: Callable[[], None] = lambda: None) -> bool:
        """Be a client until the end, or until asked to stop; whether all went well. `look` is called now and then."""
        try:
            return self._run(stop, look)
        finally:
            self._over.set()
            for pool in self._pool, self._waiting:
                pool.shutdown(wait=False, cancel_futures=True)
            with self._writing:
                self._journal.close()

    def _run(self, stop: Event, look: Callable[[], None]) -> bool:
        machine = self.machine
        machine.begin()
        self._happen(Woken())
        save_at = monotonic() + self._checkpoint_seconds
        while not (stop.is_set() or machine.finished or machine.failure):
            look()
            self._step(GLANCE)
            if monotonic() >= save_at or self._journal.octets > LARGE_JOURNAL:
                self._save()
                save_at = monotonic() + self._checkpoint_seconds
        self._leave()
        if machine.failure is not None:
            _log.error("this client cannot take part: %s", machine.failure, exc_info=_unexpected(machine.failure))
            return False
        if machine.final is not None:
            self._on_final(*machine.final)
        did = ", ".join(f"{name} {count:,}" for name, count in machine.status.items())
        _log.info("%s: %s octets", "the run is over" if machine.finished else "stopped", did)
        return True

    def _leave(self) -> None:
        """Save, and say goodbye."""
        if self._saving is not None:
            self._saving.result()
        self.machine.stop()
        until = monotonic() + GOODBYE_SECONDS
        while self.machine.is_answering and monotonic() < until:  # what is kept is what has been answered
            self._step(GLANCE)
        self._save()
        if self._saving is not None:
            self._saving.result()
        self._happen(Woken())
        until = monotonic() + GOODBYE_SECONDS
        while self.machine.is_saying_goodbye and monotonic() < until:
            self._step(GLANCE)
        while not self._events.empty():
            self._step(0.0)

    def _step(self, within: float) -> None:
        """The next event, if one comes in time."""
        wait = min([within, *(at - self._now() for at in self._wake_at)])
        try:
            event = self._events.get(timeout=max(wait, 0.0)) if wait > 0 else self._events.get_nowait()
        except Empty:
            event = None
        due = [at for at in self._wake_at if at <= self._now()]
        if due:
            self._wake_at = [at for at in self._wake_at if at not in due]
            self._happen(Woken())
        if isinstance(event, tuple) and not isinstance(event, Done):
            octets, answer = event
            self._numbers += 1
            self._calls[self._numbers] = answer
            event = Asked(self._numbers, SERVER, octets)
        if event is not None:
            self._happen(event)

    def _now(self) -> float:
        return monotonic() - self._began

    def _happen(self, event: Any) -> None:
        for effect in self.machine.happen(self._now(), event):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Answer(call, octets):
                self._calls.pop(call).set_result(octets)
            case Say(level, sentence):
                _log.log(level, "%s", sentence)
            case Wake(at):
                self._wake_at.append(at)
            case Do(number, wait):
                (self._waiting if isinstance(wait, Ask) else self._pool).submit(self._do, number, wait)

    def _do(self, number: int, wait: Ask | Compute | Write) -> None:
        result: Any = None
        try:
            match wait:
                case Ask(_, octets, within):
                    result = self._ask(octets, within)
                case Compute(work):
                    result = work()
                case Write(record):
                    with self._writing:
                        self._journal.append(self._written + 1, record)
                        self._written += 1
        except Exception as error:
            result = error
        self._events.put(Done(number, result))

    def _save(self) -> None:
        """The state is never changed in place, so that it can be written while training and contacts go on."""
        client, state = self.machine.client, self.machine.state()
        if state is None or client is self._saved or (self._saving is not None and not self._saving.done()):
            return
        self._saved, written = client, self._written  # what is being written now may be in neither: then it is not lost

        def save() -> None:
            try:
                self._checkpoints.save(state)
                with self._writing:
                    if not self._over.is_set():
                        self._journal.begin_segment()
                        self._journal.forget(written)
            except OSError as error:
                _log.error("no checkpoint could be written: %s; going on without", error)

        self._saving = self._pool.submit(save)


def _unexpected(failure: Exception) -> Exception | None:
    """For the log: where something went wrong that is not the network's or the server's word."""
    return None if isinstance(failure, Unreachable) or type(failure).__module__.startswith("quafl") else failure
