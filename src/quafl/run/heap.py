"""What becomes of memory that tensors have given back."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

# glibc's mallopt: from how many octets on memory is asked of the system for each tensor by itself, and how much of
# what is free stays with the process.
MAPPED, FREE = -3, -1
ALL, MOST = 2**30, 2**25  # older versions refuse more than that
USUAL = MOST, 2 * MOST  # where glibc's own guesses end, and stay


def keep(mapped: int = ALL, free: int = ALL) -> None:
    """From now on it stays with the process: asking the system for it again at every local step takes a fifth of the
    time where models have millions of parameters. Where malloc is glibc's; elsewhere nothing changes."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(MAPPED, mapped) or libc.mallopt(MAPPED, MOST)
        libc.mallopt(FREE, free)
        libc.malloc_trim(free)


@contextmanager
def kept() -> Iterator[None]:
    """Inside, it stays with the process."""
    keep()
    try:
        yield
    finally:
        keep(*USUAL)
