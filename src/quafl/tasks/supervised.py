"""Learning a module from the clients' inputs and targets."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from quafl.core.checks import check_whole
from quafl.core.counter import Draws, key_from, permuted, subkey
from quafl.core.messages import Buffers, Model
from quafl.core.randomness import derive
from quafl.core.seams import EXAMPLES, Ids, Score, Shapes
from quafl.tasks import given, trees
from quafl.tasks.ahead import Ahead
from quafl.tasks.flat import Call, Flat
from quafl.tasks.given import Pair
from quafl.tasks.hands import Data, Held, HeldOut, OnDemand, Read, hands_of, parted, take, to
from quafl.tasks.judging import Measure, accuracy, measured
from quafl.tasks.own import seeded
from quafl.tasks.precision import PRECISIONS, Precision, arithmetic, drawing_from, mixed
from quafl.tasks.reading import Collate
from quafl.tasks.trees import Tree

Augment: TypeAlias = Callable[[Tree, Draws], Tree]  # of a batch's inputs, at training alone
Export: TypeAlias = Callable[[nn.Module], Mapping[str, Tensor]]  # what is written of a trained model

AUGMENTATION = -1  # the number of its stream; dropout layers have those from 0 on
AHEAD = 1000  # examples of a client that are put in order at a time, or one epoch,
LONG = 100_000  # unless it has more than that: then each batch is found by itself
ORDERS = 4096  # orders that are kept, at most
SAMPLE, FEW = 2000, 256  # training examples whose loss is recorded: of those in memory, and of those that are read
READERS = 16  # clients of whom those are read
CHUNK = defaultdict(lambda: 500, cuda=5000)  # examples in memory that are evaluated at a time, by the kind of device
READ = 4  # times a batch: examples that are read and evaluated at a time


class Examples(NamedTuple):
    """A batch, and the key of what the module itself draws at random for it (dropout)."""

    inputs: Tree
    targets: Tree
    key: Tensor


class Supervised:
    """A task from a module, each client's data, and a loss.

    A client's data are a pair (inputs, targets), or a map-style dataset, whose examples are read when they are needed,
    and made a batch by `collate`; `workers` processes read ahead. `metrics` are what evaluation reports beside the
    loss; `test` is what it looks at, all clients' data by default. The loss on a fixed sample of the training data is
    reported too; `per_class` adds the first metric on each class of the test data. What is `held_out` of a client's
    data it does not learn from, but is judged by (`judge`); where that is all there is to judge by, `evaluate` does
    not.

    Each client goes through its data in an order drawn anew for every epoch; step q's batch depends on (client, q)
    alone. A client with less than a batch uses all it has. `augment` changes a training batch's inputs at random. A
    batch's gradient is computed in `accumulate` parts, one after another, which takes less memory. Module and data are
    on the `device`; gradients are computed in the `precision`. `export` says what is written of a trained module.
    """

    def __init__(
        self,
        module: nn.Module,
        clients: Sequence[Data],
        *,
        loss: Measure = functional.cross_entropy,
        metrics: Mapping[str, Measure] | None = None,
        test: Data | None = None,
        held_out: HeldOut | None = None,
        batch_size: int = 32,
        accumulate: int = 1,
        augment: Augment | None = None,
        collate: Collate | None = None,
        workers: int = 0,
        export: Export | None = None,
        per_class: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
        precision: Precision = "float32",
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}, must be one of {', '.join(PRECISIONS)}")
        check_whole("batch_size", batch_size, 1)
        check_whole("accumulate", accumulate, 1)
        check_whole("workers", workers, 0)
        _check_names(metrics or {})
        self._device, self.precision = given.usable(device), precision
        self.flat = Flat(module, self._device)
        self._loss, self._batch_size, self._accumulate, self._augment = loss, batch_size, accumulate, augment
        self._export = export
        learned, judged = parted(clients, held_out)
        if test is None and isinstance(judged, list | tuple) and all(own is None for own in judged):
            raise ValueError("no client has examples that are held out; give a larger share of held_out, or test")
        self._hands = hands_of(learned, self._device, collate)
        self._own = (
            None if judged is None else Read(judged, collate, "what client {} is judged by".format, optional=True)
        )
        self._test = None if test is None else hands_of([test], self._device, collate, lambda _: "the test data")
        if self._test is None and self._own is None and isinstance(clients, OnDemand):
            raise ValueError(
                f"the data of {len(clients)} clients are made on demand; give `test` or `held_out` as well"
            )
        self.metrics = self._tried(metrics)
        self._per_class = per_class
        if per_class and not self.metrics:
            raise ValueError("per_class needs a metric; give one")
        self._seed = seed
        self._shuffling, self._changing = key_from(derive(seed, "data")), key_from(derive(seed, "steps"))
        self._orders = lru_cache(maxsize=min(2 * len(self._hands), ORDERS))(self._orders_of)
        self._sample = self._sampled()
        self._ahead = Ahead(self._read, workers, pinned=self._device.type == "cuda") if workers else None
        if isinstance(self._hands, Held):
            self._there = self._made_from(self._hands)

    def _made_from(self, hands: Held) -> list[Tensor]:
        """What batches are made from, on the device."""
        mine = hands.sizes, hands.starts, self._shuffling, self._changing
        return [tensor.to(self._device) for tensor in mine]

    def keep(self, clients: Ids) -> None:
        """Of the data in memory, those of these clients alone: nobody will ask for batches of others, nor evaluate."""
        if isinstance(self._hands, Held):
            self._hands.keep(clients)
            self._orders.cache_clear()
            self._there = self._made_from(self._hands)

    @property
    def in_memory(self) -> bool:
        """Whether the examples are where models are; else they are read when they are needed."""
        return self._hands.in_memory

    @property
    def has_test(self) -> bool:
        """Whether `evaluate` judges; else the clients do."""
        return self._test is not None or self._own is None

    def _tried(self, metrics: Mapping[str, Measure] | None) -> Mapping[str, Measure]:
        """The metrics, if the model takes the data, and there is a loss of them."""
        precisely = arithmetic(self.precision, self._device), drawing_from(0, self._device)
        with precisely[0], precisely[1], torch.enable_grad(), mixed(self.precision, self._device):
            module = self.flat.at(*self.flat.initial())
            if self._test is not None:
                _, judged = self._fitted(module, self._test)
            outputs, (_, targets) = self._fitted(module, self._hands)
            self._loss = given.suiting(self._loss, outputs)
            if given.is_class_loss(self._loss):
                self._check_as_read(outputs)
                all_of = self._hands.all[1] if isinstance(self._hands, Held) else targets
                given.check_classes(self._loss, outputs, all_of, self._whose)
                if self._test is not None:
                    all_of = self._test.all[1] if isinstance(self._test, Held) else judged[1]
                    given.check_classes(self._loss, outputs, all_of, lambda row: "the test data")
            given.check_loss(self._loss, outputs, targets)
        if metrics is not None:
            return metrics
        return {} if _is_real(targets) else {"accuracy": accuracy}

    def _check_as_read(self, outputs: Tree) -> None:
        """Class numbers of data that nobody has looked at yet."""
        loss, logits = self._loss, getattr(outputs, "logits", outputs)
        known = torch.empty_like(logits, device="meta") if isinstance(logits, Tensor) else logits
        for hands in (self._hands, self._test, self._own):
            if isinstance(hands, Read):
                hands.check_targets(lambda targets, whose: given.check_classes(loss, known, targets, lambda _: whose))

    def _called(self, module: Call, inputs: Tree) -> Tree:
        """Outputs. Inputs of another shape than the first ones, that the model cannot take, are said."""
        try:
            return trees.call(module, inputs)
        except Exception as error:  # of a model that nobody here has seen before
            given.check_shape(inputs, self._first, error)
            raise

    def _fitted(self, module: nn.Module, hands: Held | Read) -> tuple[Tree, Pair]:
        """Outputs for two examples, and these. From then on, all inputs are as the model takes them."""
        two = to(hands.take(0, hands.first(0) + torch.arange(2) % hands.size(0)), self._device)
        self._first = two[0]
        outputs, change = given.as_the_model_takes_it(module, two[0])
        if change is not None:
            hands.change(change)
            if self._own is not None and hands is self._hands:
                self._own.change(change)
        return outputs, two

    def _whose(self, row: int) -> str:
        """Whose example it is, of all that have been looked at."""
        if not isinstance(self._hands, Held):
            return "client 0"
        return f"client {int(torch.searchsorted(self._hands.starts, row, right=True)) - 1}"

    def initial(self) -> tuple[Model, Buffers]:
        """The module as it was given."""
        return self.flat.initial()

    def layout(self) -> tuple[Shapes, Shapes]:
        """The module's tensors."""
        return self.flat.layout()

    # Batches

    def examples(self, client: int) -> int:
        """How many the client learns from."""
        return self._hands.size(client)

    def batch(self, client: int, step: int) -> Examples:
        """Full batches only: the remainder of an epoch is left out, a different one each time."""
        read = self._read if self._ahead is None else self._ahead.get
        return self._examples(read(client, step), subkey(subkey(self._changing, client), step))

    @property
    def expect(self) -> Callable[[Iterable[tuple[int, int]]], None] | None:
        """To be told the clients and steps whose batches will be asked for next, in this order; None: no need."""
        return None if self._ahead is None else self._ahead.expect

    def _read(self, client: int, step: int) -> Pair:
        places = self._places(client, step)
        if self.in_memory:
            return self._hands.take(client, places)
        with seeded(derive(self._seed, "reading", client, step)):  # a dataset may change its examples at random
            return self._hands.take(client, places)

    def _places(self, client: int, step: int) -> Tensor:
        """Of the step's examples."""
        examples = self._hands.size(client)
        size = min(self._batch_size, examples)
        epoch, place = divmod(step, examples // size)
        if examples > LONG:
            key = subkey(subkey(self._shuffling, client), torch.tensor(epoch))
            within = torch.arange(place * size, (place + 1) * size)
            chosen = self._hands.first(client) + permuted(key, within, torch.tensor(examples))
        else:
            chosen = self._order(client, epoch, examples)[place * size : (place + 1) * size]
        return chosen.repeat(2) if len(chosen) < min(2, self._batch_size) else chosen  # batch norm needs two

    def _order(self, client: int, epoch: int, examples: int) -> Tensor:
        """Where the client's examples are, in the order of the epoch."""
        ahead = max(1, AHEAD // examples)
        orders: Tensor = self._orders(client, epoch // ahead * ahead, ahead)
        return orders[epoch % ahead]

    def _orders_of(self, client: int, first: int, ahead: int) -> Tensor:
        """Of several epochs: for few examples, one costs as much as some."""
        size = self._hands.size(client)
        epochs = torch.arange(first, first + ahead)
        keys = subkey(subkey(self._shuffling, client), epochs)
        return self._hands.first(client) + permuted(keys.unsqueeze(-2), torch.arange(size), torch.tensor(size))

    def _examples(self, data: Pair, key: Tensor) -> Examples:
        inputs, targets = data if self.in_memory else to(data, self._device)
        if self._augment is not None:
            inputs = self._augment(inputs, Draws(subkey(key.to(self._device), AUGMENTATION)))
        return Examples(inputs, targets, key)

    # Gradients

    def gradient(self, model: Model, buffers: Buffers, batch: Examples) -> tuple[Model, Buffers]:
        """Of the loss on the batch, for a single client."""
        drawn = int(batch.key[0])  # for what a module draws by other means than dropout layers
        with arithmetic(self.precision, self._device), drawing_from(drawn, self._device):
            return self._in_parts(self.flat.gradient, model, buffers, batch)

    def same_shape(self, ids: Ids) -> Tensor:
        """Which clients have whole batches; only these can learn together."""
        assert isinstance(self._hands, Held)
        return self._hands.sizes[ids] >= self._batch_size

    def pure_gradient(self, model: Model, buffers: Buffers, client: Tensor, step: Tensor) -> tuple[Model, Buffers]:
        """`gradient` of the client's batch for the step, as a function that can be vectorised and traced; of examples
        in memory alone."""
        assert isinstance(self._hands, Held)
        sizes, starts, shuffling, changing = self._there
        size, start = (table.index_select(0, client.view(1)).view(()) for table in (sizes, starts))
        epoch, place = step // (size // self._batch_size), step % (size // self._batch_size)
        places = place * self._batch_size + torch.arange(self._batch_size, device=self._device)
        order = subkey(subkey(shuffling, client), epoch)
        chosen = start + permuted(order, places, size, blind=True)
        batch = self._examples(take(self._hands.all, chosen), subkey(subkey(changing, client), step))
        return self._in_parts(self.flat.pure_gradient, model, buffers, batch)

    def _in_parts(
        self,
        gradient: Callable[..., tuple[Model, Buffers]],
        model: Model,
        buffers: Buffers,
        batch: Examples,
    ) -> tuple[Model, Buffers]:
        """The batch's gradient, from those of `accumulate` parts of it."""
        size = trees.size(batch.targets)
        parts = min(self._accumulate, size)
        if parts == 1:
            return gradient(model, buffers, batch.key, lambda module: self._loss_of(module, batch))
        total = torch.zeros_like(model)
        for number, places in enumerate(torch.arange(size).tensor_split(parts)):
            mine = slice(int(places[0]), int(places[-1]) + 1)
            part = Examples(*take((batch.inputs, batch.targets), mine), subkey(batch.key, number))
            found, buffers = gradient(model, buffers, part.key, lambda module, part=part: self._loss_of(module, part))
            total = total + found * (len(places) / size)
        return total, buffers

    def _loss_of(self, module: Call, batch: Examples) -> Tensor:
        with mixed(self.precision, self._device):
            outputs = self._called(module, batch.inputs)
            try:
                value: Tensor = self._loss(outputs, batch.targets)
            except IndexError:
                if given.is_class_loss(self._loss):  # of data that were not looked at before
                    given.check_classes(self._loss, outputs, batch.targets, lambda row: "a client")
                raise
            return value

    # Evaluation

    @torch.no_grad()
    def evaluate(self, model: Model, buffers: Buffers) -> Score:
        """Loss and metrics on the test data, loss on the training sample, and what else was asked for."""
        with self._exactly():
            module = self.flat.at(model, buffers)
            score = dict(self._on_test(module))
            sample = (take(self._sample, places) for places in self._slices(trees.size(self._sample[1])))
            score["train_loss"] = self._score(module, sample, {"loss": self._loss})[0]["loss"]
            return self._numbers(score)

    @torch.no_grad()
    def judge(self, client: int, model: Model, buffers: Buffers) -> Score | None:
        """Loss and metrics on what is held out of the client's data, or where nothing is, on what it learns from; and
        how many examples that are. None, if it has none."""
        hands = self._own or self._hands
        if not hands.size(client):
            return None
        with self._exactly():
            chunks = hands.chunks(client, self._most(hands))
            score, examples = self._score(self.flat.at(model, buffers), chunks, {"loss": self._loss, **self.metrics})
            return {**self._numbers(score), EXAMPLES: examples}

    def _on_test(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        if not self.has_test:
            return
        hands = self._hands if self._test is None else self._test
        outputs: Iterable[Pair] = self._outputs(module, hands.everything(self._most(hands)))
        if self._per_class:
            outputs = list(outputs)
        score, _ = measured(outputs, {"loss": self._loss, **self.metrics}, self._device)
        yield from score.items()
        if self._per_class:
            yield from self._on_classes(*(trees.join_outputs(parts) for parts in zip(*outputs, strict=True)))

    def _score(
        self, module: nn.Module, chunks: Iterable[Pair], measures: Mapping[str, Measure]
    ) -> tuple[dict[str, Tensor], int]:
        return measured(self._outputs(module, chunks), measures, self._device)

    def _outputs(self, module: nn.Module, chunks: Iterable[Pair]) -> Iterator[Pair]:
        """Outputs and targets, a chunk at a time: in one go, the layers' values would not fit into a cache or a
        memory."""
        for chunk in chunks:
            inputs, targets = to(chunk, self._device)
            yield self._called(module, inputs), targets

    def _most(self, hands: Held | Read) -> int:
        """Examples of a chunk."""
        return CHUNK[self._device.type] if hands.in_memory else READ * self._batch_size

    def _slices(self, size: int) -> Iterator[slice]:
        chunk = CHUNK[self._device.type]
        return (slice(start, start + chunk) for start in range(0, size, chunk))

    def _exactly(self) -> ExitStack:
        """As precisely as evaluations are."""
        stack = ExitStack()
        stack.enter_context(arithmetic("float32" if self.precision == "float32" else "tf32", self._device))
        stack.enter_context(mixed(self.precision, self._device))
        return stack

    def _numbers(self, score: Mapping[str, Tensor]) -> dict[str, float]:
        """From the device, which is waited for once."""
        values = [torch.as_tensor(value, dtype=torch.float64, device=self._device) for value in score.values()]
        return dict(zip(score, torch.stack(values).tolist(), strict=True)) if values else {}

    def export(self, model: Model, buffers: Buffers) -> dict[str, Tensor]:
        """What is written of the module: its state_dict, in which tied parameters stand under each of their names."""
        return exported(self.flat.module(model, buffers), self._export)

    def _on_classes(self, outputs: Tree, targets: Tree) -> Iterator[tuple[str, Tensor]]:
        name, metric = next(iter(self.metrics.items()))
        if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.ndim != 1:
            raise ValueError("per_class needs targets that are class numbers; switch it off for this task")
        for label in targets.unique().tolist():
            chosen = (targets == label).nonzero().squeeze(-1)
            mine = ((trees.change(outputs, lambda tensor: tensor[chosen]), targets[chosen]),)  # noqa: B023  # used now
            yield f"{name}_class_{label}", measured(mine, {name: metric}, self._device)[0][name]

    def _sampled(self) -> Pair:
        """Training examples, the same ones whatever the seed, spread over all clients, or some of them."""
        if isinstance(self._hands, Held):
            return take(self._hands.all, _sample(int(self._hands.sizes.sum())).to(self._device))
        chosen = torch.linspace(0, len(self._hands) - 1, min(READERS, len(self._hands))).long().tolist()
        parts = []
        for client in chosen:
            with seeded(derive("training sample", client)):
                size = self._hands.size(client)
                places = torch.linspace(0, size - 1, min(FEW // len(chosen), size)).long()
                parts.append(to(self._hands.take(client, places), self._device))
        return self._joined(parts)

    def _joined(self, parts: list[Pair]) -> Pair:
        """As many of them as fit to each other: texts may have differing lengths."""
        forms = [given.form(part) for part in parts]
        alike = [part for part, form in zip(parts, forms, strict=True) if form == forms[0]]
        inputs, targets = (trees.join(part) for part in zip(*alike, strict=True))
        return inputs, targets


def exported(module: nn.Module, export: Export | None) -> dict[str, Tensor]:
    """The module's named tensors, none of which shares memory with another; by default its state_dict."""
    named = module.state_dict() if export is None else export(module)
    if not isinstance(named, Mapping) or not all(isinstance(tensor, Tensor) for tensor in named.values()):
        raise TypeError(f"export gives a {type(named).__name__}, must give tensors by name, as a state_dict has them")
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def _check_names(metrics: Mapping[str, Measure]) -> None:
    taken = {"loss", "train_loss", "client", EXAMPLES} & metrics.keys()
    if taken:
        raise ValueError(f"a metric is called {taken.pop()}, which is reported anyway; choose another name")


def _is_real(targets: Tree) -> bool:
    """Numbers of no class."""
    return isinstance(targets, Tensor) and targets.is_floating_point()


def _sample(examples: int) -> Tensor:
    """The same ones whatever the seed, spread over all clients."""
    generator = torch.Generator().manual_seed(derive("training sample"))
    return torch.randperm(examples, generator=generator)[:SAMPLE].sort().values
