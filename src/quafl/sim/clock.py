"""Virtual time."""


class VirtualClock:
    """Starts at zero and moves only when told to, never backwards."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """The simulated time."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let that much time pass."""
        if not seconds >= 0:
            raise ValueError(f"cannot sleep for {seconds}: time does not run backwards")
        self._now += seconds

    def sleep_until(self, time: float) -> None:
        """Let time pass until then, if it has not yet."""
        self._now = max(self._now, time)

    def state(self) -> float:
        """For `restore`."""
        return self._now

    def restore(self, state: float) -> None:
        """Continue from there."""
        self._now = state
