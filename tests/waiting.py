"""Waiting for something that happens by itself."""

from collections.abc import Callable
from time import monotonic, sleep


def wait_for(
    holds: Callable[[], bool], seconds: float = 20.0, *, glance: float = 0.005, otherwise: Callable[[], str] = str
) -> None:
    """Until it holds, for so many seconds at most; then the test fails, and says what `otherwise` tells."""
    until = monotonic() + seconds
    while not holds():
        assert monotonic() < until, f"it never came to be; {otherwise()}"
        sleep(glance)
