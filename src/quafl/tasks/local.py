"""One party's own model and data, for a real federation."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from quafl.core.messages import Buffers, Model
from quafl.core.seams import Batch, Score, Shapes, Task
from quafl.tasks.files import DataError
from quafl.tasks.flat import Flat
from quafl.tasks.supervised import Augment, Data, Measure, Supervised


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

    def build(self, seed: int = 0) -> Task:
        """The task."""
        if self.data is None:
            return _Unjudged(self.model)
        return Supervised(
            self.model,
            [self.data],
            loss=self.loss,
            metrics=self.metrics,
            batch_size=self.batch_size,
            augment=self.augment,
            seed=seed,
        )


class _Unjudged:
    """A model without data."""

    def __init__(self, module: nn.Module) -> None:
        self._flat = Flat(module)

    def initial(self) -> tuple[Model, Buffers]:
        """The module as it was given."""
        return self._flat.initial()

    def layout(self) -> tuple[Shapes, Shapes]:
        """The module's tensors."""
        return self._flat.layout()

    def batch(self, client: int, step: int) -> Batch:
        """None."""
        raise DataError("the task has a model but no data; a client cannot learn from nothing")

    def gradient(self, model: Model, buffers: Buffers, batch: Batch) -> tuple[Model, Buffers]:
        """None."""
        raise DataError("the task has a model but no data; a client cannot learn from nothing")

    def evaluate(self, model: Model, buffers: Buffers) -> Score:
        """Nobody knows."""
        return {}

    def export(self, model: Model, buffers: Buffers) -> dict[str, Tensor]:
        """The module's state_dict."""
        return {name: tensor.clone() for name, tensor in self._flat.module(model, buffers).state_dict().items()}


def make(path: str, name: str, seed: int = 0) -> Task:
    """The task that a user's function, 'package.module:function', makes for the party of that name.

    The function takes the name, or nothing, and returns a `Local`, a pair (model, data), or a `Task`.
    """
    made = _call(_find(path), path, name)
    try:
        if isinstance(made, tuple):
            made = Local(*made)
        if isinstance(made, Local):
            return made.build(seed)
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(f"what {path} returned cannot be used ({error}); return quafl.Local(model, data)") from error
    if all(hasattr(made, part) for part in ("initial", "batch", "gradient", "evaluate", "export")):
        task: Task = made
        return task
    raise DataError(f"{path} returned a {type(made).__name__}; return quafl.Local(model, data), or a Task")


def _find(path: str) -> Callable[..., Any]:
    module_name, colon, function_name = path.partition(":")
    if not colon or not function_name or not module_name or module_name.startswith("."):
        raise DataError(f"--task {path}: must look like package.module:function")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise DataError(f"--task {path}: {error}; is it installed, or in the folder where you are?") from error
    if not callable(function):
        raise DataError(f"--task {path}: {function_name} is not a function")
    found: Callable[..., Any] = function
    return found


def _call(function: Callable[..., Any], path: str, name: str) -> Any:
    try:
        takes_name = len(inspect.signature(function).parameters) > 0
        return function(name) if takes_name else function()
    except Exception as error:  # it is the user's, and may raise anything
        raise DataError(f"{path} failed: {type(error).__name__}: {error}") from error
