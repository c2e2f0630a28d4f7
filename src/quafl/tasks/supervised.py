"""Learning a module from the clients' inputs and targets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from quafl.core.randomness import derive
from quafl.core.seams import Buffers, Model, Score
from quafl.tasks import trees
from quafl.tasks.flat import Flat
from quafl.tasks.trees import Tree

Data: TypeAlias = tuple[Tree, Tree]  # inputs and targets: tensors, or tuples or dictionaries of them, an example a row
Measure: TypeAlias = Callable[[Tree, Tree], Tensor]  # of a batch's outputs and targets, a mean over the batch
Augment: TypeAlias = Callable[[Tree, torch.Generator], Tree]  # of a batch's inputs, at training alone

SAMPLE = 2000  # training examples whose loss is recorded
CHUNK = 500  # examples evaluated at a time


class Examples(NamedTuple):
    """A batch, and the seed of what the module itself draws at random for it (dropout)."""

    inputs: Tree
    targets: Tree
    seed: int


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of examples whose largest output is at the target."""
    return (outputs.argmax(dim=-1) == targets).float().mean()


class Supervised:
    """A task from a module, each client's data, and a loss.

    `metrics` are what evaluation reports beside the loss; `test` is what it looks at, all clients' data by default. The
    loss on a fixed sample of the training data is reported too; `per_client` adds the first metric on the clients' own
    data (mean, worst, and what nine tenths of the clients are no worse than), `per_class` the first metric on each
    class of the test data; it is the better the higher, unless `lower_is_better`.

    Each client goes through its data in an order drawn anew for every epoch; step q's batch depends on (client, q)
    alone. A client with less than a batch uses all it has. `augment` changes a training batch's inputs at random.
    Module and data are on the `device`.
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
        augment: Augment | None = None,
        per_client: bool = False,
        per_class: bool = False,
        lower_is_better: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, must be at least 1")
        if not clients:
            raise ValueError("there are no clients; give at least one")
        if metrics is not None and {"loss", "train_loss"} & metrics.keys():
            raise ValueError("a metric is called loss or train_loss, which are reported anyway; choose another name")
        self._device = torch.device(device)
        self.flat = Flat(module, self._device)
        self.metrics = {"accuracy": accuracy} if metrics is None else metrics
        self._sizes = [_examples(client, data) for client, data in enumerate(clients)]
        self._clients = clients = [_to(data, self._device) for data in clients]
        self._loss = loss
        self._test = _to(test, self._device) if test else _join(clients)
        self._sample = _sample(clients, self._sizes)
        self._batch_size = batch_size
        self._augment = augment
        self._per_client, self._per_class, self._lower_is_better = per_client, per_class, lower_is_better
        if (per_client or per_class) and not self.metrics:
            raise ValueError("per_client and per_class need a metric; give one")
        self._seed = seed
        self._order = lru_cache(maxsize=2 * len(clients))(
            lambda client, epoch: torch.randperm(
                self._sizes[client], generator=torch.Generator().manual_seed(derive(seed, "data", client, epoch))
            )
        )

    def initial(self) -> tuple[Model, Buffers]:
        """The module as it was given."""
        return self.flat.initial()

    def batch(self, client: int, step: int) -> Examples:
        """Full batches only: the remainder of an epoch is left out, a different one each time."""
        size = min(self._batch_size, self._sizes[client])
        epoch, place = divmod(step, self._sizes[client] // size)
        chosen = self._order(client, epoch)[place * size : (place + 1) * size]
        if len(chosen) < min(2, self._batch_size):
            chosen = chosen.repeat(2)  # the gradient is the same, and batch norm needs two
        inputs, targets = take(self._clients[client], chosen)
        if self._augment is not None:
            inputs = self._augment(
                inputs, torch.Generator().manual_seed(derive(self._seed, "augmentation", client, step))
            )
        return Examples(inputs, targets, derive(self._seed, "layers", client, step))

    def gradient(self, model: Model, buffers: Buffers, batch: Examples) -> tuple[Model, Buffers]:
        """Of the loss on the batch, for a single client."""
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(batch.seed)
            return self.flat.gradient(
                model, buffers, lambda module: self._loss(trees.call(module, batch.inputs), batch.targets)
            )

    @torch.no_grad()
    def evaluate(self, model: Model, buffers: Buffers) -> Score:
        """Loss and metrics on the test data, loss on the training sample, and what else was asked for."""
        module = self.flat.at(model, buffers)
        outputs, targets = _outputs(module, self._test), self._test[1]
        score = {
            name: float(measure(outputs, targets)) for name, measure in {"loss": self._loss, **self.metrics}.items()
        }
        score["train_loss"] = float(self._loss(_outputs(module, self._sample), self._sample[1]))
        if self._per_client:
            score |= self._on_own_data(module)
        if self._per_class:
            score |= self._on_classes(outputs, targets)
        return score

    def export(self, model: Model, buffers: Buffers) -> dict[str, Tensor]:
        """The module's state_dict; tied parameters stand under each of their names."""
        return {name: tensor.clone() for name, tensor in self.flat.module(model, buffers).state_dict().items()}

    def _on_own_data(self, module: nn.Module) -> Iterator[tuple[str, float]]:
        name, metric = next(iter(self.metrics.items()))
        mine = torch.tensor([float(metric(_outputs(module, data), data[1])) for data in self._clients]).double()
        yield f"{name}_clients_mean", float(mine.mean())
        yield f"{name}_clients_worst", float(mine.max() if self._lower_is_better else mine.min())
        yield f"{name}_clients_p10", float(mine.quantile(0.9 if self._lower_is_better else 0.1))

    def _on_classes(self, outputs: Tree, targets: Tree) -> Iterator[tuple[str, float]]:
        name, metric = next(iter(self.metrics.items()))
        if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.ndim != 1:
            raise ValueError("per_class needs targets that are class numbers; switch it off for this task")
        for label in targets.unique().tolist():
            chosen = targets == label
            yield f"{name}_class_{label}", float(metric(take((outputs, targets), chosen)[0], targets[chosen]))


def _to(data: Data, device: torch.device) -> Data:
    inputs, targets = (trees.change(part, lambda tensor: tensor.to(device)) for part in data)
    return inputs, targets


def take(data: Data, chosen: Tensor | slice) -> Data:
    """Some of the examples."""
    inputs, targets = (trees.change(part, lambda tensor: tensor[chosen]) for part in data)
    return inputs, targets


def _join(parts: Sequence[Data]) -> Data:
    return trees.join([inputs for inputs, _ in parts]), trees.join([targets for _, targets in parts])


def _examples(client: int, data: Data) -> int:
    inputs, targets = map(trees.size, data)
    if inputs != targets or inputs == 0:
        raise ValueError(
            f"client {client} has {inputs} inputs and {targets} targets; "
            f"give every client as many of one as of the other, and at least one"
        )
    return inputs


def _sample(clients: Sequence[Data], sizes: Sequence[int]) -> Data:
    """The same examples whatever the seed, spread over all clients."""
    ends = torch.tensor(sizes).cumsum(0)
    generator = torch.Generator().manual_seed(derive("training sample"))
    chosen = torch.randperm(int(ends[-1]), generator=generator)[:SAMPLE].sort().values
    owner = torch.searchsorted(ends, chosen, right=True)
    starts = ends - torch.tensor(sizes)
    owners = owner.unique().tolist()
    return _join([take(clients[client], chosen[owner == client] - starts[client]) for client in owners])


def _outputs(module: nn.Module, data: Data) -> Tree:
    """Of all examples, a chunk at a time: in one go, the layers' values would not fit into a cache, or into memory."""
    places = (slice(start, start + CHUNK) for start in range(0, trees.size(data[0]), CHUNK))
    return trees.join([trees.call(module, take(data, place)[0]) for place in places])
