"""All lanes in one step: each operation of the model becomes one on a stack of models (torch.func.vmap)."""

from torch.func import vmap

from quafl.core.seams import Optimizer
from quafl.sim.executors.graphs import capture
from quafl.sim.executors.lanes import Advance, Gradient, Lane, step_of
from quafl.sim.executors.stackable import Stackable
from quafl.sim.executors.tracing import compiled, trace


def vectorised(gradient: Gradient, optimizer: Optimizer, lanes: Lane) -> Advance:
    """On a GPU compiled, and launched as one CUDA graph."""
    with Stackable():
        graph = trace(step_of(vmap(gradient, randomness="different"), optimizer), lanes)
    run = compiled(graph, lanes)
    if lanes.factor.device.type == "cuda":
        (launch,) = capture([[lambda: run(lanes)]], lanes)
        return lambda active: launch()
    return lambda active: run(lanes)
