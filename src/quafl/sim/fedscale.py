"""FedScale's traces of phones (Lai et al., ICML 2022): how fast each computes and talks, and when it is there.

A folder has two pickled dictionaries, as benchmark/dataset/data/device_info of FedScale does:

    client_device_capacity   {number: {"computation": ms, "communication": kbit/s}}, ms for an example, forwards
    client_behave_trace      {number: {"active": [s, ...], "inactive": [s, ...], "finish_time": s}}: there from each
                             time in the one list to that beside it in the other; then all begins again. Without this
                             file, everybody is always there.

As in FedScale, a local step computes three times as long as its examples do forwards, and both ways share a bandwidth.
"""

import pickle
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

Line: TypeAlias = tuple[float, float, float, float]  # from a time on: steps a second, octets a second up and down
Stay: TypeAlias = tuple[float, float]

CAPACITY, BEHAVIOUR = "client_device_capacity", "client_behave_trace"
BOTH_WAYS = 3.0  # forwards and backwards, over forwards
OCTETS = 1024 / 8  # in a kbit
MOST_STAYS = 100_000  # of a client, in a run
KINDS = dict(
    zip(["f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"], "fdbhiqBHIQ", strict=True)
)  # numpy's, as struct has them


def lines(folder: Path, clients: int, until: float, batch: int) -> list[list[Line]]:
    """Of each client, until a time: the i-th has the i-th device and the i-th behaviour of the files, or begins them
    again where there are fewer. A step is of `batch` examples."""
    devices = _read(folder / CAPACITY)
    behaviours = _read(folder / BEHAVIOUR) if (folder / BEHAVIOUR).exists() else []
    found = []
    for client in range(clients):
        number, device = devices[client % len(devices)]
        where = f"{folder / CAPACITY}, {number}"
        milliseconds, kilobits = (_positive(device, name, where) for name in ("computation", "communication"))
        speed, octets = 1000 / (BOTH_WAYS * batch * milliseconds), OCTETS * kilobits
        if not behaviours:
            found.append([(0.0, speed, octets, octets)])
            continue
        number, behaviour = behaviours[client % len(behaviours)]
        mine: list[Line] = [(0.0, 0.0, octets, octets)]
        for start, stop in _stays(behaviour, until, f"{folder / BEHAVIOUR}, {number}"):
            if mine[-1][0] >= start:  # it has never been away, or is back at once
                mine.pop()
            if not mine or mine[-1][1] == 0:
                mine.append((start, speed, octets, octets))
            mine.append((stop, 0.0, octets, octets))
        found.append(mine)
    return found


def _stays(behaviour: Any, until: float, where: str) -> list[Stay]:
    """When it is there, in order."""
    period = _positive(behaviour, "finish_time", where)
    try:
        starts, stops = ([float(time) for time in behaviour[name]] for name in ("active", "inactive"))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{where}: must have lists of times, 'active' and 'inactive'") from None
    once: list[Stay] = []
    for start, stop in sorted(zip(starts, stops, strict=False)):  # the last one may have no end
        if not 0 <= start <= stop or start > period:
            continue  # FedScale's own reader never finds the client there then
        if once and start <= once[-1][1]:
            once[-1] = (once[-1][0], max(stop, once[-1][1]))
        else:
            once.append((start, stop))
    once = [(start, min(stop, period)) for start, stop in once if start < min(stop, period)]
    turns = int(until // period) + 2  # and one in which it comes back after the end
    if turns * len(once) > MOST_STAYS:
        raise ValueError(f"{where}: would come more than {MOST_STAYS:,} times until {until:g}; choose a shorter run")
    begins = pairwise(turn * period for turn in range(turns + 1))
    return [(begin + start, min(begin + stop, end)) for begin, end in begins for start, stop in once]


def _positive(table: Any, name: str, where: str) -> float:
    value: Any = table.get(name) if isinstance(table, Mapping) else None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = -inf
    if not 0 < number < inf:
        raise ValueError(f"{where}: {name!r} is {value!r}, must be a positive number")
    return number


def _read(path: Path) -> Sequence[tuple[Any, Any]]:
    try:
        return _loaded(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise ValueError(f"cannot read the trace {path} ({error.strerror})") from error


@lru_cache(maxsize=2)
def _loaded(path: Path, changed: int) -> Sequence[tuple[Any, Any]]:
    with path.open("rb") as stream:
        try:
            table = _Plain(stream).load()
        except OSError:
            raise
        except Exception as error:  # whatever octets make the reader stumble over
            raise ValueError(f"{path} is no trace of FedScale's: {error}") from error
    if not isinstance(table, dict) or not table:
        raise ValueError(f"{path} must hold a dictionary with an entry for each device, holds {type(table).__name__}")
    return list(table.items())


class _Kind:
    """Instead of a numpy.dtype: what a number's octets mean."""

    def __init__(self, name: str, *_: Any) -> None:
        if name not in KINDS:
            raise pickle.UnpicklingError(f"it has numbers of numpy's kind {name!r}, and must have plain ones")
        self.code, self.order = KINDS[name], "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = ">" if state[1] == ">" else "<"


def _number(kind: _Kind, octets: bytes) -> float:
    """Instead of numpy's scalar."""
    number: float = struct.unpack(kind.order + kind.code, octets)[0]
    return number


def _latin(text: str, coding: str) -> bytes:
    """Instead of codecs.encode, by which older pickles have octets."""
    return text.encode("latin1")


PLAIN = {
    ("numpy", "dtype"): _Kind,
    ("numpy.core.multiarray", "scalar"): _number,
    ("numpy._core.multiarray", "scalar"): _number,
    ("_codecs", "encode"): _latin,
}


class _Plain(pickle.Unpickler):
    """Dictionaries, lists and numbers: other people's pickles do not run their code here, nor numpy's."""

    def find_class(self, module: str, name: str) -> Any:
        """What stands in for the pieces of numpy's numbers, and nothing else."""
        if (module, name) in PLAIN:
            return PLAIN[module, name]
        raise pickle.UnpicklingError(f"it wants {module}.{name}, and must hold nothing but numbers, texts and lists")
