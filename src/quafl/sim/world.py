"""The world around the clients: how fast they are, when they are there, how far away the server is."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from quafl.codec.coders import Coders
from quafl.core.randomness import Generators, derive
from quafl.core.seams import Algorithm
from quafl.sim import fedscale
from quafl.sim.fedscale import Line
from quafl.sim.link import Link
from quafl.sim.piecewise import Daily, Piecewise
from quafl.sim.speeds import Constant, Exponential, fast_and_slow, interrupted

Who: TypeAlias = Sequence[int] | Literal["slow", "fast", "all"]
Pieces: TypeAlias = list[tuple[float, float]]  # (time, value from then on)

MOST_ABSENCES = 100_000  # of a client, in a run
TRACE = ("client", "time", "steps_per_second", "up_bandwidth", "down_bandwidth")


@dataclass(frozen=True, slots=True)
class Change:
    """From a time on, some clients' steps take another time."""

    at: float
    step: float
    clients: Who = "all"


@dataclass(frozen=True, slots=True)
class Absence:
    """Some clients are away for a while: they cannot be contacted, do not train, and keep what they have. One that
    begins at 0 is a late arrival."""

    start: float
    stop: float
    clients: Who = "all"


@dataclass(frozen=True, slots=True)
class World:
    """How fast the clients are, when they are there, and how far away.

    The last round(slow·n) clients are slow. Step times are `fast_step` and `slow_step` in the mean; with `step_range`,
    each client's mean is drawn from it; with a `trace` (a CSV file with the columns client, time, steps_per_second,
    up_bandwidth, down_bandwidth), speeds and bandwidths are the file's, and a client is away until its first line and
    wherever its speed is 0; or with a folder of FedScale's two files (`sim.fedscale`), steps being of `trace_batch`
    examples. Speeds have heavy tails with `step_spread` σ (a client's step times are e^(σz) times those,
    z normal) and `step_tail` a (rank^a times, the ranks drawn: Zipf's law), bandwidths with `bandwidth_spread`
    (e^(−σz) times). With a `day`, a client is there for `day_share` of every day, from an hour of its own on, which is
    in the last `day_zones` of a day. An exchange (sit) takes `latency_at_32_bits`·b/32, or with bandwidths (octets per
    time unit, one for all clients or one each) the time that its octets take.
    """

    slow: float = 0.25
    fast_step: float = 2.0
    slow_step: float = 8.0
    step_range: tuple[float, float] | None = None
    step_spread: float = 0.0
    step_tail: float = 0.0
    step_law: Literal["exponential", "constant"] = "exponential"
    changes: Sequence[Change] = ()
    absences: Sequence[Absence] = ()
    present_for: float = inf  # mean time until a client leaves, and
    away_for: float = 0.0  # until it comes back; both exponential
    day: float = 0.0
    day_share: float = 0.5
    day_zones: float = 1.0
    trace: Path | None = None
    trace_batch: int = 32
    latency_at_32_bits: float = 10.0
    up_bandwidth: float | Sequence[float] | None = None
    down_bandwidth: float | Sequence[float] | None = None
    bandwidth_spread: float = 0.0
    link_limited: bool = True  # the server talks to `sampled` clients at a time
    unreachable: float = 0.0  # probability that a contact is lost

    def __post_init__(self) -> None:
        for name in "slow", "unreachable":
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be from 0 to 1")
        for name in "fast_step", "slow_step":
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}, must be positive and finite")
        for name in "step_spread", "step_tail", "bandwidth_spread", "day", "latency_at_32_bits":
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}, must not be negative, and finite")
        if self.trace_batch < 1:
            raise ValueError(f"trace_batch is {self.trace_batch}, must be a positive number of examples")
        if not 0 < self.day_share < 1 or not 0 <= self.day_zones <= 1:
            raise ValueError(
                f"day_share is {self.day_share} and day_zones {self.day_zones}: must be shares of a day, the first "
                f"between 0 and 1"
            )
        if self.step_law not in ("exponential", "constant"):
            raise ValueError(f"step_law is {self.step_law!r}, must be 'exponential' or 'constant'")
        self._check_presence()
        spread = self.step_spread or self.step_tail or self.bandwidth_spread
        if self.trace is not None and (self.step_range is not None or self.changes or spread):
            raise ValueError(
                "a trace says how fast the clients are; give it without step_range, changes, spreads and tails"
            )
        if self.bandwidth_spread and self.up_bandwidth is None:
            raise ValueError("bandwidth_spread needs up_bandwidth and down_bandwidth, which it spreads")

    def _check_presence(self) -> None:
        leaves, returns = self.present_for < inf, self.away_for > 0
        if leaves != returns or not self.present_for > 0 or not 0 <= self.away_for < inf:
            raise ValueError(
                f"present_for is {self.present_for} and away_for {self.away_for}: give both, positive and finite, or "
                f"neither"
            )
        if self.day and (self.trace is not None or self.changes or self.absences or returns):
            raise ValueError("a day says when clients are there; give it without trace, changes, absences, present_for")

    def speeds(self, clients: int, rng: Generators, until: float) -> Exponential | Constant:
        """The law of the step times; comings and goings are drawn up to `until`."""
        rates: Piecewise | Daily
        if self.day:
            phases = self.day_zones * torch.rand(clients, generator=rng["days of clients"], dtype=torch.float64)
            rates = Daily(1 / self._means(clients, rng).double(), phases, self.day, self.day_share)
        elif self.trace is None and not self.changes and not self.absences and self.present_for == inf:
            rates = Piecewise.steady(1 / self._means(clients, rng).double())
        else:
            rates = Piecewise.of(self._rates(clients, rng, until))
        return Exponential(rates, rng["speeds"]) if self.step_law == "exponential" else Constant(rates)

    def link(self, clients: int, coders: Coders, rng: Generators | None = None) -> Link:
        """sit: the paper's 10·b/32, for the mean b of the two directions, or what bandwidths make of the octets; they
        differ by their spread where there is an `rng`."""
        if self.trace is not None:
            lines = self._traced(clients, until=0.0)  # bandwidths of phones do not change
            up = Piecewise.of([_from_zero([(time, up) for time, _, up, _ in mine]) for mine in lines])
            down = Piecewise.of([_from_zero([(time, down) for time, _, _, down in mine]) for mine in lines])
            return Link(0.0, down=down, up=up)
        if self.up_bandwidth is not None and self.down_bandwidth is not None:
            octets_down = _each(self.down_bandwidth, clients, "down_bandwidth")
            octets_up = _each(self.up_bandwidth, clients, "up_bandwidth")
            factor = torch.ones(())
            if self.bandwidth_spread and rng is not None:
                factor = torch.exp(-self.bandwidth_spread * _normal(clients, rng["bandwidths of clients"]))
            down, up = (Piecewise.steady(factor * octets) for octets in (octets_down, octets_up))
            return Link(0.0, down=down, up=up)
        if self.up_bandwidth is not None or self.down_bandwidth is not None:
            raise ValueError("only one of up_bandwidth and down_bandwidth is given; give both, or neither")
        return Link(self.latency_at_32_bits * (coders.up.total_bits + coders.down.total_bits) / 64)

    def expected_steps(self, algorithm: Algorithm, clients: int, coders: Coders, rng: Generators) -> Tensor:
        """H_i in closed form, where it exists: contacts at random, in rounds of equal length, of clients that never
        change."""
        speeds, link = self.speeds(clients, rng, until=0.0), self.link(clients, coders)
        changing = not speeds.rates.is_steady or self.present_for < inf
        if changing or link.up is not None or self.unreachable:
            raise ValueError(
                "the expected numbers of steps have no closed form when speeds change, clients come and go, contacts "
                "get lost, or octets take their time; let the clients measure them"
            )
        rate, budget = algorithm.sampled / clients, algorithm.local_steps
        return speeds.expected_steps(rate, link.latency + algorithm.wait, budget).float()

    def _rates(self, clients: int, rng: Generators, until: float) -> list[Pieces]:
        if self.trace is not None:
            lines = self._traced(clients, until)
            rates = [[(0.0, 0.0), *((time, speed) for time, speed, _, _ in mine)] for mine in lines]
            rates = [mine[1:] if mine[1][0] == 0 else mine for mine in rates]
        else:
            rates = [[(0.0, 1 / mean)] for mean in self._means(clients, rng).tolist()]
        for change in sorted(self.changes, key=lambda change: change.at):
            if not change.step > 0 or not change.at >= 0:
                raise ValueError(f"{change}: at must not be negative, and step must be positive")
            for client in self._who(change.clients, clients):
                rates[client] = [piece for piece in rates[client] if piece[0] < change.at]
                rates[client].append((change.at, 1 / change.step))
        for client, mine in enumerate(self._absences(clients, rng, until)):
            rates[client] = interrupted(rates[client], mine)
        return rates

    def _traced(self, clients: int, until: float) -> list[list[Line]]:
        assert self.trace is not None
        if self.trace.is_dir():
            return fedscale.lines(self.trace, clients, until, self.trace_batch)
        return _read_trace(self.trace, clients)

    def _means(self, clients: int, rng: Generators) -> Tensor:
        """Of each client's step times, at first."""
        if self.step_range is None:
            means = fast_and_slow(clients, slow=self.slow, means=(self.fast_step, self.slow_step))
        else:
            low, high = self.step_range
            if not 0 < low <= high:
                raise ValueError(f"step_range is {self.step_range}, must be two positive numbers, the smaller first")
            means = low + (high - low) * torch.rand(clients, generator=rng["speeds of clients"], dtype=torch.float64)
        if self.step_spread:
            means = means * torch.exp(self.step_spread * _normal(clients, rng["spread of clients"]))
        if self.step_tail:
            ranks = 1 + torch.randperm(clients, generator=rng["ranks of clients"])
            means = means * ranks.double() ** self.step_tail
        return means

    def _absences(self, clients: int, rng: Generators, until: float) -> list[Pieces]:
        away: list[Pieces] = [[] for _ in range(clients)]
        for absence in self.absences:
            if not 0 <= absence.start < absence.stop:
                raise ValueError(f"{absence}: must start at 0 or later, and stop after that")
            for client in self._who(absence.clients, clients):
                away[client].append((absence.start, absence.stop))
        if self.present_for == inf:
            return away
        if until > MOST_ABSENCES * (self.present_for + self.away_for):
            raise ValueError(
                f"present_for is {self.present_for} and away_for {self.away_for}: clients would leave more than "
                f"{MOST_ABSENCES:,} times; choose longer times"
            )
        for client, mine in enumerate(away):
            generator, time = torch.Generator().manual_seed(derive(rng.seed, "presence", client)), 0.0
            while time < until:
                stay, leave = torch.empty(2, dtype=torch.float64).exponential_(generator=generator).tolist()
                start = time + self.present_for * stay
                time = start + self.away_for * leave
                mine.append((start, time))
        return [_disjoint(mine) for mine in away]

    def _who(self, chosen: Who, clients: int) -> Sequence[int]:
        fast = clients - round(self.slow * clients)
        if isinstance(chosen, str):
            groups = {"all": range(clients), "fast": range(fast), "slow": range(fast, clients)}
            if chosen not in groups:
                raise ValueError(f"clients is {chosen!r}, must be 'slow', 'fast', 'all' or a list of client numbers")
            return groups[chosen]
        strange = next((client for client in chosen if not 0 <= client < clients), None)
        if strange is not None:
            raise ValueError(f"there is no client {strange}; the {clients} clients are numbered from 0")
        return chosen


def _normal(clients: int, generator: torch.Generator) -> Tensor:
    return torch.randn(clients, generator=generator, dtype=torch.float64)


def _disjoint(absences: Pieces) -> Pieces:
    """The same absences, those that touch made one."""
    merged: Pieces = []
    for start, stop in sorted(absences):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _from_zero(pieces: Pieces) -> Pieces:
    return [(0.0, pieces[0][1]), *pieces[1:]]


def _each(value: float | Sequence[float], clients: int, name: str) -> Tensor:
    values = [float(value)] * clients if isinstance(value, int | float) else list(value)
    if len(values) != clients or not min(values) > 0:
        raise ValueError(f"{name} is {value}, must be a positive number, or one for each of the {clients} clients")
    return torch.tensor(values, dtype=torch.float64)


def _read_trace(path: Path, clients: int) -> list[list[Line]]:
    """Each client's lines."""
    lines: list[list[Line]] = [[] for _ in range(clients)]
    try:
        with Path(path).open(newline="", encoding="utf-8") as stream:
            table = csv.DictReader(stream)
            if tuple(table.fieldnames or ()) != TRACE:
                raise ValueError(f"{path}: the first line must be {','.join(TRACE)}")
            for line in table:
                try:
                    client = int(line["client"])
                    time, speed, up, down = (float(line[name]) for name in TRACE[1:])
                except (TypeError, ValueError):
                    raise ValueError(f"{path}, line {table.line_num}: must be five numbers") from None
                if not 0 <= client < clients:
                    raise ValueError(f"{path}, line {table.line_num}: client {client} is not one of the {clients}")
                if not (0 <= time < inf and 0 <= speed < inf and up > 0 and down > 0):
                    raise ValueError(
                        f"{path}, line {table.line_num}: time and speed must not be negative, bandwidths positive"
                    )
                if lines[client] and time <= lines[client][-1][0]:
                    raise ValueError(f"{path}, line {table.line_num}: the times of a client must increase")
                lines[client].append((time, speed, up, down))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the trace {path} ({error})") from error
    missing = next((client for client, mine in enumerate(lines) if not mine), None)
    if missing is not None:
        raise ValueError(f"{path} says nothing of client {missing}; give every client a line")
    return lines
