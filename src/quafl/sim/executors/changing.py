"""Begin one client after another, and go on with a faster executor as soon as a thread has made one."""

import atexit
import ctypes
import logging
import re
import sys
from collections.abc import Callable
from threading import RLock, Thread
from time import monotonic
from typing import Any, Protocol, TypeAlias
from weakref import finalize

from quafl.core.seams import Counts, Ids
from quafl.sim.executors.lanes import Unsuitable
from quafl.sim.executors.sequential import Sequential
from quafl.sim.executors.tracing import first_line

_log = logging.getLogger(__name__)

SO_FAR = re.compile(r"sequential for (\d+) steps \(auto\)")  # the name until there is a faster one
SINCE = re.compile(r"sequential for \d+ steps then (.+)")  # and from then on
AT_ONCE = " at once"  # after such a name, or "auto": no step is taken before the faster one is ready
HEAD_START = 5.0  # seconds for which the run has Python to itself, so that its first rows come soon
TURN = 1e-5  # seconds for which the thread may then keep Python to itself: an operation of the run waits as long
ENDING = 10.0  # seconds, at most, for which the process then waits for the thread
COMPILING = RLock()  # torch's tracer and compiler are for one thread at a time


def at_once(name: str) -> str:
    """Of the executor that is chosen before the first step."""
    return name + AT_ONCE if name == "auto" or SO_FAR.fullmatch(name) else name


def name_since(taken: int, name: str) -> str:
    """Of the executor that has this name, after so many steps of the sequential one."""
    return f"sequential for {taken} steps then {name}" if taken else name


def _name_so_far(taken: int) -> str:
    return f"sequential for {taken} steps (auto)"


class Executor(Protocol):
    """Takes local steps."""

    name: str

    def __call__(self, clients: Any, ids: Ids, counts: Counts) -> Any:
        """The clients after `counts` more steps each."""


Finish: TypeAlias = Callable[[], Executor]  # what must not go on beside the run; it takes a moment
Prepare: TypeAlias = Callable[[], Finish]  # what takes a minute


class Changing:
    """The sequential executor, until a faster one is ready: after a head start, `prepare` runs in a thread, `finish` at
    the beginning of a later call, which changes over, once. If either raises, the sequential one stays. The name says
    how many steps of the run it has taken; `taken` are those of earlier sittings."""

    def __init__(self, first: Sequential, prepare: Prepare, taken: int = 0, head_start: float = HEAD_START) -> None:
        self._execute: Executor = first
        self._taken, self._began = taken, monotonic()
        self._beside: _Beside | None = _Beside(prepare)
        self._ready_to_begin = self._began + head_start
        self.name = _name_so_far(taken)
        finalize(self, self._beside.give_up)  # the run has ended without it
        self._begin_beside()

    def __call__(self, clients: Any, ids: Ids, counts: Counts) -> Any:
        """The clients after `counts` more steps each."""
        if self._beside is not None:
            self._begin_beside()
            if self._beside.has_ended and COMPILING.acquire(blocking=False):  # another run's may not be ready
                try:
                    self._change(self._beside)
                finally:
                    COMPILING.release()
            else:
                self._taken += int(counts.sum())
                self.name = _name_so_far(self._taken)
        return self._execute(clients, ids, counts)

    def mark(self) -> int:
        """For `back`."""
        return self._taken

    def back(self, taken: int) -> None:
        """Steps since the mark have been taken back; an executor that is made stays."""
        if self._beside is not None:
            self._taken = taken
            self.name = _name_so_far(taken)

    def _begin_beside(self) -> None:
        if self._beside is not None and self._beside.ident is None and monotonic() >= self._ready_to_begin:
            self._beside.start()

    def _change(self, beside: "_Beside") -> None:
        self._beside = None
        try:
            made = beside.finish()
        except Exception as error:  # such as a device that is full
            why = error if isinstance(error, Unsuitable) else first_line(error)
            self.name = self._execute.name
            _log.warning("clients train one after another, because they cannot train together: %s", why)
            _log.debug("no executor could be made", exc_info=True)
            return
        self._execute, self.name = made, name_since(self._taken, made.name)
        _log.info("local steps: %s from here on, after %.1f seconds", self.name, monotonic() - self._began)


class _Beside(Thread):
    """Prepares an executor while the run goes on."""

    def __init__(self, prepare: Prepare) -> None:
        super().__init__(name="quafl executor", daemon=True)
        self._prepare: Prepare | None = prepare
        self._finish: Finish = self._unfinished

    @property
    def has_ended(self) -> bool:
        """Whether it has run, and is over."""
        return self.ident is not None and not self.is_alive()

    def give_up(self) -> None:
        """Nobody waits for it any more: do not begin."""
        self._prepare = None

    def start(self) -> None:
        """It ends with the process at the latest."""
        _running.append(self)
        super().start()

    def run(self) -> None:
        """Nobody else traces or compiles meanwhile, and the run need not wait long for its turn."""
        with COMPILING:
            before = sys.getswitchinterval()
            sys.setswitchinterval(min(before, TURN))
            try:
                if (prepare := self._prepare) is not None:
                    self._finish = prepare()
            except Exception as error:  # of a model that nobody here has seen before, or of its compiler
                failed = error if isinstance(error, Unsuitable) else Unsuitable(first_line(error))
                _log.debug("no executor could be made", exc_info=True)
                self._finish = _raising(failed)
            finally:
                sys.setswitchinterval(before)
                _running.remove(self)

    def finish(self) -> Executor:
        """What comes of it; or an Unsuitable says why nothing does."""
        return self._finish()

    def _unfinished(self) -> Executor:
        raise Unsuitable("the thread that compiles has ended")


def _raising(error: Unsuitable) -> Finish:
    def finish() -> Executor:
        raise error

    return finish


_running: list[_Beside] = []


@atexit.register
def _end() -> None:
    """A thread that came back from torch to an interpreter that is no more would take the process down with it: it is
    asked to end, wherever it is, until it has."""
    until = monotonic() + ENDING
    for thread in list(_running):
        while thread.is_alive() and monotonic() < until:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
            thread.join(0.05)
