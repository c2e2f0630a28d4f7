"""Learning a module from the clients' inputs and targets."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from quafl.core.checks import check_whole
from quafl.core.counter import Draws, key_from, permuted, subkey
from quafl.core.messages import Buffers, Model
from quafl.core.randomness import derive
from quafl.core.seams import Ids, Score, Shapes
from quafl.tasks import given, trees
from quafl.tasks.flat import Call, Flat
from quafl.tasks.precision import PRECISIONS, Precision, arithmetic, drawing_from, mixed
from quafl.tasks.trees import Tree

Data: TypeAlias = tuple[Tree, Tree]  # inputs and targets: tensors, or tuples or dictionaries of them, an example a row
Measure: TypeAlias = Callable[[Tree, Tree], Tensor]  # of a batch's outputs and targets, a mean over the batch
Augment: TypeAlias = Callable[[Tree, Draws], Tree]  # of a batch's inputs, at training alone

AUGMENTATION = -1  # the number of its stream; dropout layers have those from 0 on
AHEAD = 1000  # examples of a client that are put in order at a time, or one epoch
SAMPLE = 2000  # training examples whose loss is recorded
CHUNK = defaultdict(lambda: 500, cuda=5000)  # examples evaluated at a time, by the kind of device


class Examples(NamedTuple):
    """A batch, and the key of what the module itself draws at random for it (dropout)."""

    inputs: Tree
    targets: Tree
    key: Tensor


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of examples whose largest output is at the target; in double precision, in which 8500 of 10000 are not
    less than 0.85."""
    return (outputs.argmax(dim=-1) == targets).double().mean()


class Supervised:
    """A task from a module, each client's data, and a loss.

    `metrics` are what evaluation reports beside the loss; `test` is what it looks at, all clients' data by default. The
    loss on a fixed sample of the training data is reported too; `per_client` adds the first metric on the clients' own
    data (mean, worst, and what nine tenths of the clients are no worse than), `per_class` the first metric on each
    class of the test data; it is the better the higher, unless `lower_is_better`.

    Each client goes through its data in an order drawn anew for every epoch; step q's batch depends on (client, q)
    alone. A client with less than a batch uses all it has. `augment` changes a training batch's inputs at random.
    Module and data are on the `device`; gradients are computed in the `precision`.
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
        precision: Precision = "float32",
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}, must be one of {', '.join(PRECISIONS)}")
        check_whole("batch_size", batch_size, 1)
        if metrics is not None and {"loss", "train_loss"} & metrics.keys():
            raise ValueError("a metric is called loss or train_loss, which are reported anyway; choose another name")
        self._device, self.precision = given.usable(device), precision
        self.flat = Flat(module, self._device)
        hands = given.hands(clients)
        self._sizes = torch.tensor([trees.size(targets) for _, targets in hands])
        self._starts = self._sizes.cumsum(0) - self._sizes  # of each client's examples among all
        self._loss = loss
        whole = _to(_join(hands), self._device)
        judged = whole if test is None else _to(given.examples(test, "the test data"), self._device)
        self._all, self._test = self._tried(whole, judged)
        self.metrics = ({} if _is_real(whole[1]) else {"accuracy": accuracy}) if metrics is None else metrics
        self._sample = take(self._all, _sample(int(self._sizes.sum())).to(self._device))
        self._batch_size = batch_size
        self._augment = augment
        self._per_client, self._per_class, self._lower_is_better = per_client, per_class, lower_is_better
        if (per_client or per_class) and not self.metrics:
            raise ValueError("per_client and per_class need a metric; give one")
        self._shuffling, self._changing = key_from(derive(seed, "data")), key_from(derive(seed, "steps"))
        mine = self._sizes, self._starts, self._shuffling, self._changing
        self._there = [tensor.to(self._device) for tensor in mine]  # what batches are made from, on the device
        self._orders = lru_cache(maxsize=2 * len(hands))(self._orders_of)

    def _tried(self, whole: Data, test: Data) -> tuple[Data, Data]:
        """All the clients' data and the test data, as the model takes them, if it does and there is a loss of them."""
        two = (torch.arange(2) % self._sizes[0]).to(self._device)
        some = (torch.arange(2) % trees.size(test[1])).to(self._device)
        precisely = arithmetic(self.precision, self._device), drawing_from(0, self._device)
        with precisely[0], precisely[1], torch.enable_grad(), mixed(self.precision, self._device):
            module = self.flat.at(*self.flat.initial())
            _, test = given.as_the_model_takes_it(module, test, some)
            outputs, whole = given.as_the_model_takes_it(module, whole, two)
            if given.is_class_loss(self._loss):
                given.check_classes(self._loss, outputs, whole[1], self._whose)
                given.check_classes(self._loss, outputs, test[1], lambda row: "the test data")
            given.check_loss(self._loss, outputs, take(whole, two)[1])
        return whole, test

    def _whose(self, row: int) -> str:
        """Whose example it is, of all."""
        return f"client {int(torch.searchsorted(self._starts, row, right=True)) - 1}"

    def initial(self) -> tuple[Model, Buffers]:
        """The module as it was given."""
        return self.flat.initial()

    def layout(self) -> tuple[Shapes, Shapes]:
        """The module's tensors."""
        return self.flat.layout()

    def batch(self, client: int, step: int) -> Examples:
        """Full batches only: the remainder of an epoch is left out, a different one each time."""
        examples = int(self._sizes[client])
        size = min(self._batch_size, examples)
        epoch, place = divmod(step, examples // size)
        chosen = self._order(client, epoch)[place * size : (place + 1) * size]
        if len(chosen) < min(2, self._batch_size):
            chosen = chosen.repeat(2)  # the gradient is the same, and batch norm needs two
        return self._take(chosen, subkey(subkey(self._changing, client), step))

    def gradient(self, model: Model, buffers: Buffers, batch: Examples) -> tuple[Model, Buffers]:
        """Of the loss on the batch, for a single client."""
        drawn = int(batch.key[0])  # for what a module draws by other means than dropout layers
        with arithmetic(self.precision, self._device), drawing_from(drawn, self._device):
            return self.flat.gradient(model, buffers, batch.key, lambda module: self._loss_of(module, batch))

    def same_shape(self, ids: Ids) -> Tensor:
        """Which clients have whole batches; only these can learn together."""
        return self._sizes[ids] >= self._batch_size

    def pure_gradient(self, model: Model, buffers: Buffers, client: Tensor, step: Tensor) -> tuple[Model, Buffers]:
        """`gradient` of the client's batch for the step, as a function that can be vectorised and traced."""
        sizes, starts, shuffling, changing = self._there
        size, start = (table.index_select(0, client.view(1)).view(()) for table in (sizes, starts))
        epoch, place = step // (size // self._batch_size), step % (size // self._batch_size)
        places = place * self._batch_size + torch.arange(self._batch_size, device=self._device)
        order = subkey(subkey(shuffling, client), epoch)
        chosen = start + permuted(order, places, size, blind=True)
        batch = self._take(chosen, subkey(subkey(changing, client), step))
        return self.flat.pure_gradient(model, buffers, batch.key, lambda module: self._loss_of(module, batch))

    def _order(self, client: int, epoch: int) -> Tensor:
        """Where the client's examples are, in the order of the epoch."""
        ahead = max(1, AHEAD // int(self._sizes[client]))
        orders: Tensor = self._orders(client, epoch // ahead * ahead, ahead)
        return orders[epoch % ahead]

    def _orders_of(self, client: int, first: int, ahead: int) -> Tensor:
        """Of several epochs: for few examples, one costs as much as some."""
        size = self._sizes[client]
        epochs = torch.arange(first, first + ahead)
        keys = subkey(subkey(self._shuffling, client), epochs)
        return self._starts[client] + permuted(keys.unsqueeze(-2), torch.arange(int(size)), size)

    def _take(self, places: Tensor, key: Tensor) -> Examples:
        inputs, targets = take(self._all, places)
        if self._augment is not None:
            inputs = self._augment(inputs, Draws(subkey(key.to(self._device), AUGMENTATION)))
        return Examples(inputs, targets, key)

    def _loss_of(self, module: Call, batch: Examples) -> Tensor:
        with mixed(self.precision, self._device):
            return self._loss(trees.call(module, batch.inputs), batch.targets)

    @torch.no_grad()
    def evaluate(self, model: Model, buffers: Buffers) -> Score:
        """Loss and metrics on the test data, loss on the training sample, and what else was asked for."""
        exactly: Precision = "float32" if self.precision == "float32" else "tf32"
        with arithmetic(exactly, self._device), mixed(self.precision, self._device):
            return self._score(self.flat.at(model, buffers))

    def _score(self, module: nn.Module) -> Score:
        outputs, targets = self._outputs(module, self._test), self._test[1]
        score = {"loss": self._loss(outputs, targets)}
        for name, measure in self.metrics.items():
            score[name] = given.number_of(name, measure(outputs, targets), self._device)
        score["train_loss"] = self._loss(self._outputs(module, self._sample), self._sample[1])
        if self._per_client:
            score |= self._on_own_data(module)
        if self._per_class:
            score |= self._on_classes(outputs, targets)
        return dict(zip(score, self._together(score.values()).tolist(), strict=True))

    def export(self, model: Model, buffers: Buffers) -> dict[str, Tensor]:
        """The module's state_dict; tied parameters stand under each of their names."""
        return {name: tensor.clone() for name, tensor in self.flat.module(model, buffers).state_dict().items()}

    def _on_own_data(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        name, metric = next(iter(self.metrics.items()))
        outputs, targets = self._outputs(module, self._all), self._all[1]
        ends = zip(self._starts.tolist(), (self._starts + self._sizes).tolist(), strict=True)
        each = (take((outputs, targets), slice(start, stop)) for start, stop in ends)
        mine = self._together(metric(*own) for own in each)
        yield f"{name}_clients_mean", mine.mean()
        yield f"{name}_clients_worst", mine.max() if self._lower_is_better else mine.min()
        yield f"{name}_clients_p10", mine.quantile(0.9 if self._lower_is_better else 0.1)

    def _together(self, values: Iterable[Tensor | float]) -> Tensor:
        """On the device, which is waited for once."""
        return torch.stack([torch.as_tensor(value, dtype=torch.float64, device=self._device) for value in values])

    def _outputs(self, module: nn.Module, data: Data) -> Tree:
        """Of all examples, a chunk at a time: in one go, the layers' values would not fit into a cache or a memory."""
        chunk = CHUNK[self._device.type]
        places = (slice(start, start + chunk) for start in range(0, trees.size(data[0]), chunk))
        return trees.join_outputs([trees.call(module, take(data, place)[0]) for place in places])

    def _on_classes(self, outputs: Tree, targets: Tree) -> Iterator[tuple[str, Tensor]]:
        name, metric = next(iter(self.metrics.items()))
        if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.ndim != 1:
            raise ValueError("per_class needs targets that are class numbers; switch it off for this task")
        for label in targets.unique().tolist():
            chosen = targets == label
            yield f"{name}_class_{label}", metric(take((outputs, targets), chosen)[0], targets[chosen])


def _to(data: Data, device: torch.device) -> Data:
    inputs, targets = (trees.change(part, lambda tensor: tensor.to(device)) for part in data)
    return inputs, targets


def take(data: Data, chosen: Tensor | slice) -> Data:
    """Some of the examples."""
    inputs, targets = (trees.change(part, lambda tensor: tensor[chosen]) for part in data)
    return inputs, targets


def _join(parts: Sequence[Data]) -> Data:
    return trees.join([inputs for inputs, _ in parts]), trees.join([targets for _, targets in parts])


def _is_real(targets: Tree) -> bool:
    """Numbers of no class."""
    return isinstance(targets, Tensor) and targets.is_floating_point()


def _sample(examples: int) -> Tensor:
    """The same ones whatever the seed, spread over all clients."""
    generator = torch.Generator().manual_seed(derive("training sample"))
    return torch.randperm(examples, generator=generator)[:SAMPLE].sort().values
