"""What all contracts are written with."""

from collections.abc import Iterator
from contextlib import contextmanager


def claim(holds: bool, otherwise: str) -> None:
    """An AssertionError with that sentence, if it does not hold; unlike `assert`, whatever Python is told to leave
    out."""
    if not holds:
        raise AssertionError(otherwise)


@contextmanager
def refused(kinds: type[Exception] | tuple[type[Exception], ...], otherwise: str) -> Iterator[None]:
    """What is done inside has to end with an error of one of these kinds."""
    try:
        yield
    except kinds:
        return
    except Exception as error:
        raise AssertionError(f"{otherwise} (it raises {type(error).__name__}: {error})") from error
    raise AssertionError(f"{otherwise} (it raises nothing)")
