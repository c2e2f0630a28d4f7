"""Each lane's step is a branch of one CUDA graph: the GPU takes from all of them what it has room for.

Kernels are those of a single model, which libraries have tuned; launching hundreds of them costs as much as one.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch

from quafl.core.seams import Optimizer
from quafl.sim.executors.lanes import Advance, Gradient, Lane, Unsuitable, step_of
from quafl.sim.executors.tracing import compiled, lane, preserved, trace

Launch: TypeAlias = Callable[[], object]
WARM = 2  # runs outside of a graph first: libraries allocate and choose on their first


def branches(gradient: Gradient, optimizer: Optimizer, lanes: Lane) -> Advance:
    """A graph for each number of lanes that is a power of two, and one for all of them."""
    if lanes.factor.device.type != "cuda":
        raise Unsuitable("CUDA graphs need a GPU")
    width = len(lanes.factor)
    run = compiled(trace(step_of(gradient, optimizer), lane(lanes, 0)), lane(lanes, 0))
    steps = [partial(run, lane(lanes, number)) for number in range(width)]
    widths = sorted({width, *(1 << power for power in range(width.bit_length()) if 1 << power < width)})
    captured = capture([steps[:some] for some in widths], lanes)
    return lambda active: captured[bisect_left(widths, active)]()


def capture(sets: Sequence[Sequence[Launch]], lanes: Lane) -> list[Launch]:
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
            with torch.cuda.graph(graph, pool=pool):
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
