"""Lanes in groups: a group takes its steps in one, and on a GPU the groups are branches of one CUDA graph.

In a group, each operation of the model becomes one on a stack of models (torch.func.vmap). A group of one has the
operations of a single model, which libraries have tuned best. The branches share the GPU as they find room in it, and
launching all of their kernels costs as much as launching one.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch.func import vmap
from torch.utils import _pytree as pytree

from quafl.core.seams import Direction, Optimizer
from quafl.sim.executors.lanes import Advance, Gradient, Lane, step_of
from quafl.sim.executors.layers import SINGLE, STACKED, Layers
from quafl.sim.executors.tracing import compiled, preserved, trace

Launch: TypeAlias = Callable[[], object]
WARM = 2  # runs outside of a graph first: libraries allocate and choose on their first
GRAPHS = 4  # at most, for different numbers of groups


def steps_in_groups(
    size: int, gradient: Gradient, optimizer: Optimizer, direction: Direction | None, lanes: Lane, *, tf32: bool
) -> list[Launch]:
    """The step of each group of `size` lanes, whose number is a multiple of that, traced and compiled, which may take a
    minute."""
    groups = [_part(lanes, first, size) for first in range(0, len(lanes.factor), size)]
    if size > 1:
        gradient = vmap(gradient, randomness="different")
    with Layers(SINGLE if size == 1 else STACKED, tf32=tf32):
        graph = trace(step_of(gradient, optimizer, direction), groups[0])
    run = compiled(graph, groups[0])
    return [partial(run, group) for group in groups]


def launched(size: int, steps: Sequence[Launch], lanes: Lane) -> Advance:
    """The groups side by side. Nobody else may use the device while they are captured."""
    if lanes.factor.device.type != "cuda":
        return lambda active: [step() for step in steps[: -(-active // size)]]
    counts = sorted({-(-len(steps) * quarter // GRAPHS) for quarter in range(1, GRAPHS + 1)})
    launches = _capture([steps[:count] for count in counts], lanes)

    def advance(active: int, alive: object = steps) -> object:  # the graphs read constants of the steps
        return launches[bisect_left(counts, -(-active // size))]()

    return advance


def _part(lanes: Lane, first: int, size: int) -> Lane:
    """Some lanes, as views; a single one without its axis."""
    part: Lane = pytree.tree_map(lambda rows: rows[first] if size == 1 else rows[first : first + size], lanes)
    return part


def _capture(sets: Sequence[Sequence[Launch]], lanes: Lane) -> list[Launch]:
    """For each set of functions a graph that runs them side by side. The graphs share their memory: they never run at
    the same time."""
    streams = [torch.cuda.Stream(lanes.factor.device) for _ in max(sets, key=len)]
    graphs, pool = [], torch.cuda.graph_pool_handle()
    with preserved(lanes):
        for _ in range(WARM):
            _fork(max(sets, key=len), streams)
        torch.cuda.synchronize()
        for functions in sets:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                _fork(functions, streams)
            graphs.append(graph)
    return [graph.replay for graph in graphs]


def _fork(functions: Sequence[Launch], streams: Sequence[torch.cuda.Stream]) -> None:
    main = torch.cuda.current_stream()
    for function, stream in zip(functions, streams, strict=False):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            function()
    for stream in streams[: len(functions)]:
        main.wait_stream(stream)
