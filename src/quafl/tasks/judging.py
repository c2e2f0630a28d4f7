"""How good a model is: loss and metrics over outputs that come a chunk at a time."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quafl.tasks import given, trees
from quafl.tasks.trees import Tree

_log = logging.getLogger(__name__)

# Of outputs and targets, a mean over the examples; or an object with reset, update(outputs, targets) and compute, as
# torchmetrics has them, for what is no mean.
Measure: TypeAlias = Any
HELD = 2**28  # octets of outputs: what is no more than that is measured as one


def accuracy(outputs: Any, targets: Tensor) -> Tensor:
    """The share of examples whose largest output is at the target; in double precision, in which 8500 of 10000 are not
    less than 0.85. Outputs may have them as `logits`."""
    logits: Tensor = getattr(outputs, "logits", outputs)
    return (logits.argmax(dim=-1) == targets).double().mean()


def is_running(measure: Measure) -> bool:
    """Whether it is an object that is told one batch after another."""
    return all(hasattr(measure, name) for name in ("reset", "update", "compute"))


def measured(
    chunks: Iterable[tuple[Tree, Tree]], measures: Mapping[str, Measure], device: torch.device
) -> tuple[dict[str, Tensor], int]:
    """Each measure of all outputs and targets, and how many examples there are. Where all outputs would take too much
    memory, a function's value is the mean of those of the chunks, weighed by their examples."""
    running = {name: measure for name, measure in measures.items() if is_running(measure)}
    plain = {name: measure for name, measure in measures.items() if name not in running}
    for measure in running.values():
        if hasattr(measure, "to"):
            measure.to(device)
        measure.reset()
    held, octets, count, sums = list[tuple[Tree, Tree]](), 0, 0, dict[str, Tensor]()
    for outputs, targets in chunks:
        for measure in running.values():
            measure.update(outputs, targets)
        count += trees.size(targets)
        held.append((outputs, targets))
        octets += trees.octets(outputs)
        if octets > HELD:
            _add(sums, held, plain, device)
            held.clear()
    if sums:
        _add(sums, held, plain, device)
        values = {name: total / count for name, total in sums.items()}
        _log.debug("outputs of %d octets and more: metrics are means over chunks", octets)
    else:
        whole = tuple(trees.join_outputs(parts) for parts in zip(*held, strict=True))
        values = {name: given.number_of(name, measure(*whole), device) for name, measure in plain.items()}
    values |= {name: given.number_of(name, measure.compute(), device) for name, measure in running.items()}
    return {name: values[name] for name in measures}, count


def _add(
    sums: dict[str, Tensor],
    held: Iterable[tuple[Tree, Tree]],
    measures: Mapping[str, Measure],
    device: torch.device,
) -> None:
    for outputs, targets in held:
        for name, measure in measures.items():
            value = trees.size(targets) * given.number_of(name, measure(outputs, targets), device)
            sums[name] = sums[name] + value if name in sums else value
