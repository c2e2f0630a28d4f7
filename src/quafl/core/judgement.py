"""How good a model is at the clients' own places: each one's score, and what those of many come to."""

from collections.abc import Iterable, Iterator
from math import isfinite, nan

import torch
from torch import Tensor

from quafl.core.client import local_step
from quafl.core.messages import Buffers, Model
from quafl.core.pieces import zeros
from quafl.core.seams import EXAMPLES, ClientState, Optimizer, Score, Task

PERSONAL = "personal_"  # before the names of measures of a model that a client has trained further


def judged(
    task: Task, client: int, model: Model, buffers: Buffers, *, optimizer: Optimizer, personal_steps: int = 0
) -> Score | None:
    """A client's score of a model, and of what its own first `personal_steps` local steps make of it; None, if it has
    nothing to judge by."""
    judge = getattr(task, "judge", None)
    if judge is None:
        raise ValueError(f"{type(task).__name__} has no `judge`, and so cannot be evaluated at its clients")
    score = judge(client, model, buffers)
    if score is None:
        return None
    if not score.get(EXAMPLES, 0) > 0:
        raise ValueError(f"{type(task).__name__}.judge does not say by how many examples; put them under {EXAMPLES!r}")
    if personal_steps:
        own = judge(client, *personalised(task, client, model, buffers, optimizer, personal_steps))
        score = {**score, **{PERSONAL + name: value for name, value in own.items() if name != EXAMPLES}}
    return {name: float(value) for name, value in score.items()}


def personalised(
    task: Task, client: int, model: Model, buffers: Buffers, optimizer: Optimizer, steps: int
) -> tuple[Model, Buffers]:
    """The model after so many local steps on a client's own data, with a fresh optimizer."""
    none = torch.zeros((), dtype=torch.int64)
    state = ClientState(
        base=model,
        progress=zeros(model),
        buffers=buffers,
        optimizer=optimizer.init(model),
        steps=none,
        taken=none,
        budget=none + steps,
        round=none,
    )
    for step in range(steps):
        state = local_step(state, task, task.batch(client, step), optimizer)
    return state.base - state.progress, state.buffers


def across(scores: Iterable[Score], *, lower_is_better: bool = False) -> Score:
    """What clients' scores come to. For each measure but the loss: the mean over their examples (`…_clients_weighted`),
    the mean over clients (`…_clients_mean`), their standard deviation (`…_clients_spread`), what nine tenths of them
    are no worse than (`…_clients_p10`), and the worst. Those of personal models are `…_personal_…`. The loss is no
    metric, unless it is all there is."""
    known = _known(scores)
    chosen = {name: both for name, both in known.items() if not _is_loss(name)} or known
    found: dict[str, float] = {}
    for name, (values, weights) in chosen.items():
        found |= dict(_spread(_column(name), values, weights, lower=lower_is_better or _is_loss(name)))
    return found


def weighted(scores: Iterable[Score]) -> Score:
    """Each measure's mean over all examples of all clients: as if one had them all."""
    return {
        name: float((weights * values).sum() / weights.sum())
        for name, (values, weights) in _known(scores).items()
        if not name.startswith(PERSONAL)
    }


def _known(scores: Iterable[Score]) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each measure that at least half of the clients have: their finite values, and by how many examples."""
    there = [score for score in scores if score.get(EXAMPLES)]
    found = {}
    for name in dict.fromkeys(name for score in there for name in score if name != EXAMPLES):
        mine = [(score[name], score[EXAMPLES]) for score in there if isfinite(score.get(name, nan))]
        if 2 * len(mine) >= len(there):
            values, weights = torch.tensor(mine, dtype=torch.float64).unbind(-1)
            found[name] = values, weights
    return found


def _is_loss(name: str) -> bool:
    return name.removeprefix(PERSONAL) == "loss"


def _column(name: str) -> str:
    """Of rows: accuracy_clients, accuracy_personal."""
    return f"{name.removeprefix(PERSONAL)}_personal" if name.startswith(PERSONAL) else f"{name}_clients"


def _spread(name: str, values: Tensor, weights: Tensor, *, lower: bool) -> Iterator[tuple[str, float]]:
    yield f"{name}_weighted", float((weights * values).sum() / weights.sum())
    yield f"{name}_mean", float(values.mean())
    yield f"{name}_spread", float(values.std(correction=0))
    yield f"{name}_p10", float(values.quantile(0.9 if lower else 0.1))
    yield f"{name}_worst", float(values.max() if lower else values.min())
