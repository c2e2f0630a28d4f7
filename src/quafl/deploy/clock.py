"""Real time."""

from threading import Event
from time import monotonic


class Stopped(Exception):
    """The process was asked to stop."""


class TimeUp(Exception):
    """The run has lasted as long as it should."""


class WallClock:
    """Seconds of running since the beginning; a pause between two processes does not count."""

    def __init__(self, stop: Event) -> None:
        self._stop = stop
        self._began = monotonic()

    def now(self) -> float:
        """Seconds since the beginning."""
        return monotonic() - self._began

    def sleep(self, seconds: float) -> None:
        """Let time pass; Stopped, if asked to stop meanwhile."""
        if self._stop.wait(seconds):
            raise Stopped

    def state(self) -> float:
        """For `restore`."""
        return self.now()

    def restore(self, state: float) -> None:
        """Continue from there."""
        self._began = monotonic() - state
