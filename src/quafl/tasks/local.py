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
from quafl.core.seams import Batch, Score, Shapes, Task, examples_of
from quafl.tasks import given, own
from quafl.tasks.files import DataError
from quafl.tasks.flat import Flat
from quafl.tasks.hands import Data, apart, ready
from quafl.tasks.judging import Measure
from quafl.tasks.precision import Precision
from quafl.tasks.reading import Collate
from quafl.tasks.supervised import Augment, Export, Supervised, exported

PARTS = "initial", "batch", "gradient", "evaluate", "export"  # of a Task
NOTHING = "the task has a model but no data; a client cannot learn from nothing"


@dataclass(frozen=True, slots=True)
class Local:
    """What a party brings along: the model that everybody trains, and data of its own. A client learns from its data;
    the server judges by them, and may have none.

    Attributes:
      model: any module. The weights of the server's are where everybody starts; of the clients' weights, only those
        that are not trained matter, and must be the same.
      data: a pair (inputs, targets) with an example a row, or a map-style dataset, which is read when it is needed.
      loss: of a batch's outputs and targets, a mean over the batch.
      metrics: what is reported beside the loss, by name.
      batch_size: examples of a local step.
      augment: changes a training batch's inputs at random.
      held_out: what a client is judged by at its own place: a share of its data, which it does not learn from, or other
        data.
      accumulate: parts in which a batch's gradient is computed, one after another, to save memory.
      collate: makes a pair (inputs, targets) of a list of a dataset's examples.
      workers: processes that read a dataset ahead.
      device: where this party computes: "cpu", "cuda", "cuda:1", or "auto" for a GPU if there is one.
      precision: of its gradients: "float32", "tf32" or "bfloat16".
      export: what the server writes of the trained model, tensors by name: a function of the model, by default its
        state_dict. `peft.get_peft_model_state_dict` writes the adapter alone.
    """

    model: nn.Module
    data: Data | None = None
    loss: Measure = functional.cross_entropy
    metrics: Mapping[str, Measure] | None = None
    batch_size: int = 32
    augment: Augment | None = None
    held_out: Data | float | None = None
    accumulate: int = 1
    collate: Collate | None = None
    workers: int = 0
    device: str = "cpu"
    precision: Precision = "float32"
    export: Export | None = None

    def build(self, seed: int = 0, device: str | None = None, precision: Precision | None = None) -> Task:
        """The task; on this device, if not on its own."""
        where = str(given.usable(device or self.device))
        if self.data is None:
            return _Unjudged(self.model, where, self.export)
        data, judged = self.parts()
        return Supervised(
            self.model,
            [data],
            held_out=None if judged is None else [judged],
            **self.settings(),
            metrics=self.metrics,
            export=self.export,
            seed=seed,
            device=where,
            precision=precision or self.precision,
        )

    def settings(self) -> dict[str, Any]:
        """What a client's training depends on, beside its model and data."""
        names = "loss", "batch_size", "augment", "accumulate", "collate", "workers"
        return {name: getattr(self, name) for name in names}

    def parts(self) -> tuple[Data, Data | None]:
        """What this party learns from, and what it is judged by at its own place."""
        data = self._data()
        if not isinstance(self.held_out, float | int):
            return data, self.held_out
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}, must be a share between 0 and 1, or data")
        return apart(data, self.held_out)

    def without(self, share: float) -> tuple["Local", Data | None]:
        """The party without a share of its data, and that share."""
        rest, aside = apart(self._data(), share, "tuning")
        return replace(self, data=rest), aside

    def _data(self) -> Data:
        if self.data is None:
            raise DataError(NOTHING)
        return ready(self.data, "the party's data")


class _Unjudged:
    """A model without data."""

    has_test = False

    def __init__(self, module: nn.Module, device: str = "cpu", export: Export | None = None) -> None:
        self._flat, self._export = Flat(module, torch.device(device)), export

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
        """What is written of the module."""
        return exported(self._flat.module(model, buffers), self._export)


def make(
    path: str,
    name: str,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    *,
    what: str = "--task",
    device: str | None = None,
) -> Task:
    """The task that a user's function, 'package.module:function', makes for the party of that name; on this device, if
    not on its own."""
    try:
        device = None if device is None else str(given.usable(device))
    except ValueError as error:
        raise DataError(str(error)) from error
    with _usable(path, what):
        brought = bring(path, name, seed, options, what=what)
        return brought.build(seed, device) if isinstance(brought, Local) else brought


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
    per_class: bool = False,
) -> Task:
    """All parties' tasks as one, for a simulation. The model and what it is judged by are the server's; where that has
    no data, the clients judge by what they have held out, or else it is judged by all they have. How clients train is
    as the first one does."""
    alike = [one for one in clients if isinstance(one, Local)]
    if isinstance(server, Local) and len(alike) == len(clients) and len({one.batch_size for one in alike}) == 1:
        parts = [one.parts() for one in alike]
        apart = any(judged is not None for _, judged in parts)
        return Supervised(
            server.model,
            [data for data, _ in parts],
            held_out=[data if judged is None else judged for data, judged in parts] if apart else None,
            **alike[0].settings(),
            metrics=alike[0].metrics if server.metrics is None and server.data is None else server.metrics,
            export=server.export,
            test=server.data,
            per_class=per_class,
            seed=seed,
            device=device,
            precision=precision,
        )
    if per_class:
        raise ValueError("per_class needs a quafl.Local of every party, with one batch size")
    if isinstance(server, Local) and server.data is None and any(one.held_out is None for one in alike):
        raise ValueError(
            "the server has no data to judge by, and the clients' are not of one kind; give it some, or every client "
            "`held_out`"
        )
    parties = [
        one.build(derive(seed, number), device, precision) if isinstance(one, Local) else one
        for number, one in enumerate([server, *clients])
    ]
    return _Everybody(parties[0], parties[1:])


class _Everybody:
    """The tasks of all parties as one: each client learns from its own, the server's has the model and judges."""

    def __init__(self, server: Task, clients: Sequence[Task]) -> None:
        self._server, self._clients = server, clients

    @property
    def has_test(self) -> bool:
        """Of the server."""
        return getattr(self._server, "has_test", True)

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

    def examples(self, client: int) -> int:
        """As the client's task counts them."""
        return examples_of(self._clients[client], 0)

    def evaluate(self, model: Model, buffers: Buffers) -> Score:
        """By the server."""
        return self._server.evaluate(model, buffers)

    def judge(self, client: int, model: Model, buffers: Buffers) -> Score | None:
        """By the client."""
        mine = getattr(self._clients[client], "judge", None)
        return None if mine is None else mine(0, model, buffers)

    def export(self, model: Model, buffers: Buffers) -> dict[str, Tensor]:
        """By the server."""
        return self._server.export(model, buffers)
