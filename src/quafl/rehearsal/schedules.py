"""Many schedules, one after another or side by side, and what came of them."""

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

import torch

from quafl.rehearsal.checks import Violation
from quafl.rehearsal.world import Parts, World

TOGETHER = 50  # schedules that a process is given at a time


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one schedule."""

    seed: int
    cast: str
    counts: Counter[str]
    violation: str = ""
    lines: list[str] = field(default_factory=list)  # the last events before the violation; all, if they were kept


def rehearse(seed: int, parts: Parts = Parts(), *, keep: bool = False) -> Outcome:  # noqa: B008  # immutable
    """One schedule."""
    world, violation = World(seed, parts, keep=keep), ""
    try:
        world.run()
    except Violation as found:
        violation = str(found)
    counts = Counter(world.faults.happened)
    counts += Counter(schedules=1, events=world.events, violations=bool(violation), **world.checks.counts())
    cast = f"{world.cast.algorithm_name}, {world.cast.codec_name}, {len(world.cast.names)} clients"
    cast += f", {len(world.cast.liars)} of them a liar" if world.cast.liars else ""
    return Outcome(seed, cast, counts, violation, world.history.lines() if violation or keep else [])


def rehearse_all(seeds: range, processes: int = 1) -> Iterator[Outcome]:
    """All of them, in no particular order where there are several processes."""
    parts = [seeds[start : start + TOGETHER] for start in range(0, len(seeds), TOGETHER)]
    if processes == 1:
        for part in parts:
            yield from _some(part)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for outcomes in pool.map(_some, parts):
            yield from outcomes


def added_up(outcomes: Iterable[Outcome]) -> Counter[str]:
    """Over all schedules."""
    total: Counter[str] = Counter()
    for outcome in outcomes:
        total.update(outcome.counts)
    return total


def _some(seeds: Iterable[int]) -> list[Outcome]:
    torch.set_num_threads(1)
    return [rehearse(seed) for seed in seeds]
