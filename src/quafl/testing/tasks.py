"""The contract of every task."""

from collections.abc import Callable

import torch
from torch import Tensor

from quafl.core.seams import Task
from quafl.testing.claims import claim

STEPS = 0, 3, 7, 50


def check_task(task: Task, *, clients: int = 2) -> None:
    """That the task keeps its contract.

    Args:
      task: the task.
      clients: how many it has; as many as that are tried.

    Raises:
      AssertionError: that says what is not kept.
    """
    for check in CHECKS:
        check(task, clients)


def begins_where_it_began(task: Task, clients: int) -> None:
    """With a flat vector of float32, the same whenever asked, however long it was trained."""
    model, buffers = (part.clone() for part in task.initial())
    for name, part in ("model", model), ("buffers", buffers):
        what = f"{part.dtype} of shape {tuple(part.shape)}"
        claim(
            part.dtype == torch.float32 and part.dim() == 1, f"the initial {name} must be a float32 vector, is {what}"
        )
        claim(bool(part.isfinite().all()), f"the initial {name} must be finite")
    for client in range(clients):
        task.gradient(model + 1, buffers, task.batch(client, 0))
    task.evaluate(model + 1, buffers)
    again = all(torch.equal(a, b) for a, b in zip((model, buffers), task.initial(), strict=True))
    claim(again, "`initial` gives another model after training; it must be the one everybody starts from")


def gives_batches_by_client_and_step_alone(task: Task, clients: int) -> None:
    """Whatever was asked before, and in whatever order."""
    asked = [(client, step) for client in range(clients) for step in STEPS]
    first = [_gradient(task, *key) for key in asked]
    second = [_gradient(task, *key) for key in reversed(asked)][::-1]
    for (client, step), one, other in zip(asked, first, second, strict=True):
        claim(
            torch.equal(one, other),
            f"client {client}, step {step}: asked again, in another order, the gradient is another one; a batch must "
            f"depend on client and step alone, and what a gradient draws must come from its batch",
        )


def computes_gradients_purely(task: Task, clients: int) -> None:
    """A finite gradient of the model's shape, buffers of theirs; and nothing else changes."""
    model, buffers = (part.clone() for part in task.initial())
    before, generator = (model.clone(), buffers.clone()), torch.get_rng_state()
    for client in range(clients):
        gradient, after = task.gradient(model, buffers, task.batch(client, 0))
        for name, part, like in ("gradient", gradient, model), ("buffers after a step", after, buffers):
            said = f"client {client}: the {name} must have shape {tuple(like.shape)} and dtype {like.dtype}, "
            said += f"has {tuple(part.shape)} and {part.dtype}"
            claim(part.shape == like.shape and part.dtype == like.dtype, said)
            claim(bool(part.isfinite().all()), f"client {client}: the {name} must be finite at the initial model")
        unchanged = torch.equal(model, before[0]) and torch.equal(buffers, before[1])
        claim(unchanged, f"client {client}: `gradient` changes the model or the buffers that it was given")
    claim(torch.equal(torch.get_rng_state(), generator), "it draws from torch's global generator")


def evaluates(task: Task, clients: int) -> None:
    """The same model twice the same, "loss" among the numbers; and changes nothing."""
    model, buffers = (part.clone() for part in task.initial())
    before, generator = (model.clone(), buffers.clone()), torch.get_rng_state()
    first, second = (dict(task.evaluate(model, buffers)) for _ in range(2))
    claim("loss" in first, f"a score must have a loss, has {', '.join(first) or 'nothing'}")
    numbers = all(isinstance(value, float | int) for value in first.values())
    claim(numbers, f"a score must be of numbers, is {first}")
    claim(repr(first) == repr(second), f"the same model is evaluated twice, and scores {first} and {second}")
    unchanged = torch.equal(model, before[0]) and torch.equal(buffers, before[1])
    claim(unchanged, "`evaluate` changes the model or the buffers that it was given")
    claim(torch.equal(torch.get_rng_state(), generator), "`evaluate` draws from torch's global generator")


def exports(task: Task, clients: int) -> None:
    """Named tensors, of the model that was given."""
    model, buffers = task.initial()
    one, other = task.export(model, buffers), task.export(model + 1, buffers)
    named = bool(one) and all(isinstance(value, Tensor) for value in one.values())
    claim(named, "`export` must give at least one named tensor, and nothing but tensors")
    differ = one.keys() == other.keys() and any(not torch.equal(one[name], other[name]) for name in one)
    claim(differ, "`export` gives the same for two different models")


def lays_out_what_it_has(task: Task, clients: int) -> None:
    """Where it has a `layout`, its shapes are those of the model and the buffers."""
    layout = getattr(task, "layout", None)
    if layout is None:
        return
    for name, shapes, vector in zip(("model", "buffers"), layout(), task.initial(), strict=True):
        size = sum(torch.Size(shape).numel() for shape in shapes.values())
        claim(size == len(vector), f"`layout` has {size} numbers in the {name}, `initial` gives {len(vector)}")


CHECKS: tuple[Callable[[Task, int], None], ...] = (
    begins_where_it_began,
    gives_batches_by_client_and_step_alone,
    computes_gradients_purely,
    evaluates,
    exports,
    lays_out_what_it_has,
)


def _gradient(task: Task, client: int, step: int) -> Tensor:
    return task.gradient(*task.initial(), task.batch(client, step))[0].clone()
