"""One party's own model and data: for a real federation, or for one that is simulated with all of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quafl.core.messages import Buffers, Model
from quafl.core.randomness import derive
from quafl.core.seams import Batch, Score, Shapes, Task
from quafl.tasks import own, trees
from quafl.tasks.files import DataError
from quafl.tasks.flat import Flat
from quafl.tasks.precision import Precision
from quafl.tasks.supervised import Augment, Data, Measure, Supervised, take

PARTS = "initial", "batch", "gradient", "evaluate", "export"  # of a Task
NOTHING = "the task has a model but no data; a client cannot learn from nothing"


@dataclass(frozen=True, slots=True)
class Local:
    """What a party brings along: the model that everybody trains, and data of its own, inputs and targets with an
    example a row. A client learns from its data; the server judges by them, and may have none.

    The weights of the server's model are where everybody starts; those of the clients do not matter.
    """

    model: nn.Module
    data: Data | None = None
    loss: Measure = functional.cross_entropy
    metrics: Mapping[str, Measure] | None = None
    batch_size: int = 32
    augment: Augment | None = None

    def build(self, seed: int = 0, device: str = "cpu", precision: Precision = "float32") -> Task:
        """The task."""
        if self.data is None:
            return _Unjudged(self.model, device)
        return Supervised(
            self.model,
            [self.data],
            loss=self.loss,
            metrics=self.metrics,
            batch_size=self.batch_size,
            augment=self.augment,
            seed=seed,
            device=device,
            precision=precision,
        )


class _Unjudged:
    """A model without data."""

    def __init__(self, module: nn.Module, device: str = "cpu") -> None:
        self._flat = Flat(module, torch.device(device))

    def initial(self) -> tuple[Model, Buffers]:
        """The module as it was given."""
        return self._flat.initial()

    def layout(self) -> tuple[Shapes, Shapes]:
        """The module's tensors."""
        return self._flat.layout()

    def batch(self, client: int, step: int) -> Batch:
        """None."""
        raise DataError(NOTHING)

    def gradient(self, model: Model, buffers: Buffers, batch: Batch) -> tuple[Model, Buffers]:
        """None."""
        raise DataError(NOTHING)

    def evaluate(self, model: Model, buffers: Buffers) -> Score:
        """Nobody knows."""
        return {}

    def export(self, model: Model, buffers: Buffers) -> dict[str, Tensor]:
        """The module's state_dict."""
        return {name: tensor.clone() for name, tensor in self._flat.module(model, buffers).state_dict().items()}


def make(
    path: str, name: str, seed: int = 0, options: Mapping[str, Any] | None = None, *, what: str = "--task"
) -> Task:
    """The task that a user's function, 'package.module:function', makes for the party of that name."""
    with _usable(path, what):
        brought = bring(path, name, seed, options, what=what)
        return brought.build(seed) if isinstance(brought, Local) else brought


def bring(path: str, name: str, seed: int, options: Mapping[str, Any] | None = None, *, what: str) -> Local | Task:
    """What the function returns for the party of that name. It takes the name, or nothing, and the options by their
    names, and returns a `Local`, a pair (model, data), or a `Task`. What it draws at random follows from the seed."""
    made = own.call(path, what, name, options, seed)
    if isinstance(made, tuple):
        with _usable(path, what):
            made = Local(*made)
    if isinstance(made, Local) or all(hasattr(made, part) for part in PARTS):
        found: Local | Task = made
        return found
    raise DataError(f"{what} {path} returned a {type(made).__name__}; return quafl.Local(model, data), or a Task")


@contextmanager
def _usable(path: str, what: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"what {what} {path} returned cannot be used ({error}); return quafl.Local(model, data)"
        ) from error


def together(
    server: Local | Task,
    clients: Sequence[Local | Task],
    *,
    seed: int,
    device: str = "cpu",
    precision: Precision = "float32",
    per_client: bool = False,
    per_class: bool = False,
    lower_is_better: bool = False,
) -> Task:
    """All parties' tasks as one, for a simulation. The model and what it is judged by are the server's, or all the
    clients' data where that has none; loss and augmentation are those of the first client."""
    alike = [one for one in clients if isinstance(one, Local)]
    if isinstance(server, Local) and len(alike) == len(clients) and len({one.batch_size for one in alike}) == 1:
        return Supervised(
            server.model,
            [_data(one) for one in alike],
            loss=alike[0].loss,
            metrics=server.metrics,
            test=server.data,
            batch_size=alike[0].batch_size,
            augment=alike[0].augment,
            per_client=per_client,
            per_class=per_class,
            lower_is_better=lower_is_better,
            seed=seed,
            device=device,
            precision=precision,
        )
    if per_client or per_class:
        raise ValueError("per_client and per_class need a quafl.Local of every party, with one batch size")
    if isinstance(server, Local) and server.data is None:
        raise ValueError("the server has no data to judge by, and the clients' are not of one kind; give it some")
    parties = [
        one.build(derive(seed, number), device, precision) if isinstance(one, Local) else one
        for number, one in enumerate([server, *clients])
    ]
    return _Everybody(parties[0], parties[1:])


def _data(brought: Local) -> Data:
    if brought.data is None:
        raise DataError(NOTHING)
    return brought.data


class _Everybody:
    """The tasks of all parties as one: each client learns from its own, the server's has the model and judges."""

    def __init__(self, server: Task, clients: Sequence[Task]) -> None:
        self._server, self._clients = server, clients

    def initial(self) -> tuple[Model, Buffers]:
        """The server's."""
        return self._server.initial()

    def batch(self, client: int, step: int) -> Batch:
        """A client is alone in its own task."""
        return client, self._clients[client].batch(0, step)

    def gradient(self, model: Model, buffers: Buffers, batch: Batch) -> tuple[Model, Buffers]:
        """Of the client whose batch it is."""
        client, mine = batch
        task: Task = self._clients[client]
        return task.gradient(model, buffers, mine)

    def evaluate(self, model: Model, buffers: Buffers) -> Score:
        """By the server."""
        return self._server.evaluate(model, buffers)

    def export(self, model: Model, buffers: Buffers) -> dict[str, Tensor]:
        """By the server."""
        return self._server.export(model, buffers)


def hold_out(brought: Local) -> tuple[Data, Local]:
    """A tenth of the examples, whatever the run's seed, and the party without them."""
    data = _data(brought)
    size = trees.size(data[0])
    order = torch.randperm(size, generator=torch.Generator().manual_seed(derive("validation")))
    return take(data, order[: size // 10]), replace(brought, data=take(data, order[size // 10 :]))
