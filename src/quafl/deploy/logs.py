"""The log of a party: to stderr and to a file, with repeated sentences kept few."""

import logging
import logging.handlers
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

OFTEN = 5  # times that one sentence about one party is said within
PERIOD = 60.0  # seconds
REMEMBERED = 1000  # sentences
LONGEST = 600  # characters
LARGEST_FILE = 10_000_000  # octets


@contextmanager
def kept(file: Path) -> Iterator[None]:
    """Within the block, the log goes there, and to stderr."""
    line, calm, root = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"), Calm(), logging.getLogger()
    to_file = logging.handlers.RotatingFileHandler(file, maxBytes=LARGEST_FILE, backupCount=3, encoding="utf-8")
    handlers: tuple[logging.Handler, ...] = _ToStderr(), to_file
    for handler in handlers:
        handler.setFormatter(line)
        handler.addFilter(calm)
        root.addHandler(handler)
    levels = {logger: logger.level for logger in (root, logging.getLogger("quafl"))}
    root.setLevel(logging.ERROR)
    logging.getLogger("quafl").setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


class Calm(logging.Filter):
    """Whatever a peer does, the log grows slowly: the same sentence about the same party comes five times a minute,
    then the number of those that were left out; no line is very long."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[tuple[str, str], tuple[float, int]] = {}  # since when, how often

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to say it; the same for every handler."""
        said = record.__dict__
        if "said" not in said:
            said["said"] = self._is_said(record)
        return bool(said["said"])

    def _is_said(self, record: logging.LogRecord) -> bool:
        about = str(record.args[0])[:100] if isinstance(record.args, tuple) and record.args else ""
        key, now = (str(record.msg), about), monotonic()
        since, often = self._said.get(key, (now, 0))
        left_out = 0
        if now - since >= PERIOD:
            since, often, left_out = now, 0, max(0, often - OFTEN)
        if len(self._said) >= REMEMBERED and key not in self._said:
            self._said.clear()
        self._said[key] = since, often + 1
        if not record.name.startswith("quafl"):
            record.exc_info = record.stack_info = None  # a library's traceback, which a peer may have provoked
        text = record.getMessage()
        shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
        record.msg, record.args = shown + (f" ({left_out} like this were left out)" if left_out else ""), ()
        return often < OFTEN


class _ToStderr(logging.Handler):
    """On whatever stderr is at the moment: a live table takes its place while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except (OSError, ValueError):
            self.handleError(record)
