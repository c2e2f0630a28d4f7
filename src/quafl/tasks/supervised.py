"""Learning a module from the clients' inputs and targets."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from quafl.core.randomness import derive
from quafl.core.seams import Buffers, Model, Score
from quafl.tasks.flat import Flat

Data: TypeAlias = tuple[Tensor, Tensor]  # inputs and targets, an example a row
Measure: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # of a batch's outputs and targets, a mean over the batch


class Examples(NamedTuple):
    """A batch, and the seed of what the module itself draws at random for it (dropout)."""

    inputs: Tensor
    targets: Tensor
    seed: int


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of examples whose largest output is at the target."""
    return (outputs.argmax(dim=-1) == targets).float().mean()


class Supervised:
    """A task from a module, each client's data, and a loss.

    `metrics` are what evaluation reports beside the loss; `test` is what it looks at, all clients' data by default.
    Each client goes through its data in an order drawn anew for every epoch; step q's batch depends on (client, q)
    alone. A client with less than a batch uses all it has.
    """

    def __init__(
        self,
        module: nn.Module,
        clients: Sequence[Data],
        *,
        loss: Measure = functional.cross_entropy,
        metrics: Mapping[str, Measure] | None = None,
        test: Data | None = None,
        batch_size: int = 32,
        seed: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, must be at least 1")
        for client, (inputs, targets) in enumerate(clients):
            if len(inputs) != len(targets) or len(inputs) == 0:
                raise ValueError(
                    f"client {client} has {len(inputs)} inputs and {len(targets)} targets; "
                    f"give every client as many of one as of the other, and at least one"
                )
        self.flat = Flat(module)
        self._clients = clients
        self._loss = loss
        self._metrics = {"accuracy": accuracy} if metrics is None else metrics
        self._test = test or (torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients]))
        self._batch_size = batch_size
        self._seed = seed
        self._order = lru_cache(maxsize=2 * len(clients))(
            lambda client, epoch: torch.randperm(
                len(clients[client][1]), generator=torch.Generator().manual_seed(derive(seed, "data", client, epoch))
            )
        )

    def initial(self) -> tuple[Model, Buffers]:
        """The module as it was given."""
        return self.flat.initial()

    def batch(self, client: int, step: int) -> Examples:
        """Full batches only: the remainder of an epoch is left out, a different one each time."""
        inputs, targets = self._clients[client]
        size = min(self._batch_size, len(targets))
        epoch, place = divmod(step, len(targets) // size)
        chosen = self._order(client, epoch)[place * size : (place + 1) * size]
        return Examples(inputs[chosen], targets[chosen], derive(self._seed, "layers", client, step))

    def gradient(self, model: Model, buffers: Buffers, batch: Examples) -> tuple[Model, Buffers]:
        """Of the loss on the batch, for a single client."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(batch.seed)
            return self.flat.gradient(model, buffers, lambda module: self._loss(module(batch.inputs), batch.targets))

    @torch.no_grad()
    def evaluate(self, model: Model, buffers: Buffers) -> Score:
        """Loss and metrics on the test data."""
        inputs, targets = self._test
        outputs = self.flat.at(model, buffers)(inputs)
        measures = {"loss": self._loss, **self._metrics}
        return {name: float(measure(outputs, targets)) for name, measure in measures.items()}

    def export(self, model: Model, buffers: Buffers) -> dict[str, Tensor]:
        """The module's state_dict; tied parameters stand under each of their names."""
        return {name: tensor.clone() for name, tensor in self.flat.module(model, buffers).state_dict().items()}
