"""Numbers that a caller gives: a sentence for those that cannot be."""

from math import inf
from numbers import Integral, Real
from typing import Any


def check_whole(name: str, value: Any, least: int, most: int | None = None, remedy: str = "") -> None:
    """A whole number, from `least` to `most`; 4.0 and True are none."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} is {value!r}, must be a whole number, {bounds}{remedy and '; '}{remedy}")


def check_positive(name: str, value: Any) -> None:
    """A positive number, and finite."""
    if not isinstance(value, Real):
        raise ValueError(f"{name} is {value!r}, must be a number")
    if not 0 < float(value) < inf:
        raise ValueError(f"{name} is {value}, must be positive and finite")


def check_share(name: str, value: Any) -> None:
    """A number from 0 to below 1."""
    if not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise ValueError(f"{name} has {value!r}, must be at least 0 and below 1")
