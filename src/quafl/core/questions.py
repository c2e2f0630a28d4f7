"""What the host must know of numbers that a device has. It is read at once, which waits for the device; or, where it is
put off, all together when a round is over, and what is asked is taken to be as it should until then."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import isfinite
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Right: TypeAlias = Callable[[Any], bool]  # whether numbers, as lists, are as they should be


class _Question(NamedTuple):
    """Numbers on a device."""

    numbers: Tensor
    right: Right


class Questions:
    """Those of a round that were put off."""

    def __init__(self) -> None:
        self._asked: list[_Question] = []
        self._then: list[Callable[[], object]] = []
        self._sent: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def ask(self, numbers: Tensor, right: Right) -> None:
        """They are read later; this is what is then done with them."""
        self._asked.append(_Question(numbers, right))

    def then(self, work: Callable[[], object]) -> None:
        """What is done when all of them have been looked at."""
        self._then.append(work)

    def send(self) -> None:
        """All have been asked: let the device send its numbers, when it comes to that."""
        flat = [one.numbers.reshape(-1).to(torch.float64) for one in self._asked]  # holds counts and float32 exactly
        if not flat:
            return
        everything = torch.cat(flat)
        self._sent = everything.to("cpu", non_blocking=True)
        if everything.device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(everything.device))

    def are_right(self) -> bool:
        """Whether all is as it should be, now that the numbers are here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        parts = () if self._sent is None else self._sent.split([one.numbers.numel() for one in self._asked])
        found = [_like(part, one.numbers) for part, one in zip(parts, self._asked, strict=True)]
        right = [one.right(numbers) for one, numbers in zip(self._asked, found, strict=True)]
        for work in self._then:
            work()
        return all(right)


def _like(part: Tensor, numbers: Tensor) -> Any:
    """As `numbers.tolist()` would be."""
    whole = part.view(numbers.shape)
    return (whole if numbers.is_floating_point() else whole.long()).tolist()


_PUT_OFF: ContextVar[Questions | None] = ContextVar("put off", default=None)


@contextmanager
def put_off() -> Iterator[Questions]:
    """Inside, questions are put off."""
    questions = Questions()
    token = _PUT_OFF.set(questions)
    try:
        yield questions
    finally:
        _PUT_OFF.reset(token)


def is_put_off() -> bool:
    """Whether questions are."""
    return _PUT_OFF.get() is not None


def is_right(numbers: Tensor, right: Right) -> bool:
    """Whether these are; yes, where questions are put off."""
    questions = _PUT_OFF.get()
    if questions is None:
        return right(numbers.tolist())
    questions.ask(numbers, right)
    return True


def when_read(work: Callable[[], object]) -> None:
    """Do that when all that has been asked so far is known."""
    questions = _PUT_OFF.get()
    if questions is None:
        work()
    else:
        questions.then(work)


def number(one: Tensor) -> float | Tensor:
    """A finite number for the host; where questions are put off, as the device has it."""
    return one if is_put_off() and is_right(one, isfinite) else float(one)
