"""[task]: what is learned, and from what."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from pydantic import Field
from torch import nn

from quafl.core.randomness import derive
from quafl.core.seams import Task
from quafl.settings.base import NotNegative, Positive, Section
from quafl.settings.world import Clients, Run
from quafl.tasks import (
    DataError,
    Quadratic,
    Supervised,
    breast_cancer,
    celeba,
    cifar10,
    cifar100,
    digits,
    fashion_mnist,
    femnist,
    flower,
    from_partitioner,
    leaf,
    mnist,
    models,
    partition,
    people,
    sent140,
    shakespeare,
)
from quafl.tasks.augment import crop_and_flip
from quafl.tasks.datasets import CELEBA, Splits
from quafl.tasks.hands import Data, take
from quafl.tasks.people import Users
from quafl.tasks.reading import Collate
from quafl.tasks.supervised import Augment


class LearningTask(Section):
    """What tasks with a network and examples have in common."""

    batch: int = Field(default=32, ge=1)  # examples of a local step

    def supervised(
        self,
        module: nn.Module,
        hands: Sequence[Data],
        test: Data,
        run: Run,
        seed: int,
        augment: Augment | None = None,
        held_out: Sequence[Data | None] | None = None,
        collate: Collate | None = None,
    ) -> Task:
        """The task for one seed, from its parts."""
        return Supervised(
            module,
            hands,
            test=test,
            held_out=held_out,
            batch_size=self.batch,
            augment=augment,
            collate=collate,
            per_class=run.per_class,
            seed=seed,
            device=run.device,
            precision=run.precision,
        )


class ClassTask(LearningTask):
    """Pictures in classes, dealt out to the clients in one of several ways."""

    partition: Literal["iid", "by class", "slow classes", "dirichlet"] = "iid"  # how examples are dealt out
    pieces: int = Field(default=2, ge=1)  # by class: pieces of the sorted examples a client gets
    slow_classes: list[int] = Field(default=[0, 1, 2], min_length=1)  # that the slow clients hold
    alpha: Positive = 0.3  # dirichlet: the smaller, the fewer classes a client has
    judge: Literal["test", "validation"] = "test"  # validation: learn from less, to choose settings by the rest
    norm: models.Norm = "batch"  # of networks that have convolutions
    most_clients: ClassVar[int]
    load: ClassVar[Callable[[], Splits]]
    augment: ClassVar[Augment | None] = None

    def check(self, clients: Clients) -> None:
        """Get the data, if they are not on this machine, and see whether they can be dealt out."""
        self._deal(type(self).load().train, clients, seed=0)

    def module(self, seed: int) -> nn.Module:
        """The network, initialised."""
        raise NotImplementedError

    def build(self, clients: Clients, run: Run, seed: int) -> Task:
        """The task for one seed: data dealt out, network initialised."""
        data = type(self).load()
        train, judge = data.train, data.validation
        if self.judge == "test":
            train = (torch.cat((train[0], judge[0])), torch.cat((train[1], judge[1])))
            judge = data.test
        hands = self._deal(train, clients, seed)
        return self.supervised(self.module(derive(seed, "model")), hands, judge, run, seed, type(self).augment)

    def _deal(self, train: Data, clients: Clients, seed: int) -> list[Data]:
        count, slow = clients.count, round(clients.slow * clients.count)
        if self.partition == "by class":
            return partition.by_class(train, count, pieces=self.pieces, seed=seed)
        if self.partition == "slow classes":
            return partition.slow_classes(train, count, slow=slow, classes=self.slow_classes, seed=seed)
        if self.partition == "dirichlet":
            return partition.dirichlet(train, count, alpha=self.alpha, seed=seed)
        return partition.iid(train, count, seed=seed)


class DigitsTask(ClassTask):
    """scikit-learn's handwritten digits and a two-layer network."""

    name: Literal["digits"] = "digits"
    hidden: int = Field(default=64, ge=1)  # width of the hidden layer
    batch: int = Field(default=16, ge=1)  # examples of a local step
    most_clients: ClassVar[int] = 500
    load: ClassVar[Callable[[], Splits]] = staticmethod(digits)

    def module(self, seed: int) -> nn.Module:
        """Two layers."""
        return models.mlp(64, self.hidden, 10, seed=seed)


class BreastCancerTask(ClassTask):
    """scikit-learn's breast cancer data, 30 measurements of each of 569 tumours, and a small two-layer network."""

    name: Literal["breast-cancer"]
    hidden: int = Field(default=16, ge=1)  # width of the hidden layer
    batch: int = Field(default=16, ge=1)  # examples of a local step
    slow_classes: list[int] = Field(default=[0], min_length=1)  # that the slow clients hold
    most_clients: ClassVar[int] = 100
    load: ClassVar[Callable[[], Splits]] = staticmethod(breast_cancer)

    def module(self, seed: int) -> nn.Module:
        """Two layers."""
        return models.mlp(30, self.hidden, 2, seed=seed)


class MNISTTask(ClassTask):
    """MNIST and the paper's two-layer network."""

    name: Literal["mnist"]
    hidden: int = Field(default=32, ge=1)  # width of the hidden layer
    batch: int = Field(default=128, ge=1)  # examples of a local step
    most_clients: ClassVar[int] = 20_000
    load: ClassVar[Callable[[], Splits]] = staticmethod(mnist)

    def module(self, seed: int) -> nn.Module:
        """784, 32, 10."""
        return models.mlp(784, self.hidden, 10, seed=seed, pixels=models.MNIST())


class FashionTask(ClassTask):
    """Fashion-MNIST and a convolutional network."""

    name: Literal["fashion-mnist"]
    batch: int = Field(default=100, ge=1)  # examples of a local step
    most_clients: ClassVar[int] = 20_000
    load: ClassVar[Callable[[], Splits]] = staticmethod(fashion_mnist)

    def module(self, seed: int) -> nn.Module:
        """Two convolutions, three dense layers."""
        return models.cnn(seed=seed, norm=self.norm)


class CIFARTask(ClassTask):
    """CIFAR-10, pictures moved and mirrored, and ResNet20."""

    name: Literal["cifar-10"]
    batch: int = Field(default=64, ge=1)  # examples of a local step
    most_clients: ClassVar[int] = 15_000
    load: ClassVar[Callable[[], Splits]] = staticmethod(cifar10)
    augment: ClassVar[Augment | None] = staticmethod(crop_and_flip)

    def module(self, seed: int) -> nn.Module:
        """ResNet20."""
        return models.resnet20(seed=seed, norm=self.norm)


class CIFAR100Task(ClassTask):
    """CIFAR-100, pictures moved and mirrored, and ResNet20."""

    name: Literal["cifar-100"]
    batch: int = Field(default=64, ge=1)  # examples of a local step
    most_clients: ClassVar[int] = 15_000
    load: ClassVar[Callable[[], Splits]] = staticmethod(cifar100)
    augment: ClassVar[Augment | None] = staticmethod(crop_and_flip)

    def module(self, seed: int) -> nn.Module:
        """ResNet20 with 100 classes."""
        return models.resnet20(100, seed=seed, norm=self.norm, pixels=models.CIFAR_100())


class CelebATask(LearningTask):
    """CelebA's faces, clients with disjoint celebrities, and ResNet18."""

    name: Literal["celeba"]
    norm: models.Norm = "batch"  # of the network
    attribute: str = "Smiling"  # what is to be told of a face
    pixels: int = Field(default=100, ge=32)  # side of the pictures
    batch: int = Field(default=128, ge=1)  # examples of a local step
    most_clients: ClassVar[int] = 10_000

    def check(self, clients: Clients) -> None:
        """It cannot be downloaded: say so before anything runs."""
        CELEBA.find()

    def build(self, clients: Clients, run: Run, seed: int) -> Task:
        """The task for one seed."""
        data = celeba(self.attribute, pixels=self.pixels)
        hands = partition.by_user(data.train, data.users, clients.count, seed=seed)
        module = models.resnet18(2, seed=derive(seed, "model"), norm=self.norm)
        return self.supervised(module, hands, data.test, run, seed)


class PeopleTask(LearningTask):
    """People's data in LEAF's format. A client is judged by its own people's test data, the server by all of theirs."""

    path: str | None = None  # the dataset's folder, with train/ and test/; without, in $QUAFL_DATA
    users: Literal["one each", "dealt out"] = "one each"  # a user for each client, or all users dealt out to them
    most_clients: ClassVar[int] = 1_000_000

    def load(self) -> Users:
        """The data."""
        raise NotImplementedError

    def module(self, data: Users, seed: int) -> nn.Module:
        """The network, initialised."""
        raise NotImplementedError

    def check(self, clients: Clients) -> None:
        """See whether the people can be dealt out."""
        self._deal(self.load(), clients, seed=0)

    def build(self, clients: Clients, run: Run, seed: int) -> Task:
        """The task for one seed."""
        data = self.load()
        dealt = self._deal(data, clients, seed)
        hands = [mine for mine in partition.of_users(data.train, data.users, dealt) if mine is not None]
        judged = partition.of_users(data.test, data.judged, dealt)
        theirs = torch.isin(data.judged, torch.cat(dealt))
        test = take(data.test, theirs) if theirs.any() else data.test  # LEAF's `-t user`: by people nobody learns from
        return self.supervised(self.module(data, derive(seed, "model")), hands, test, run, seed, held_out=judged)

    def _deal(self, data: Users, clients: Clients, seed: int) -> list[torch.Tensor]:
        one_each = self.users == "one each"
        try:
            return partition.deal_users(data.users, clients.count, one_each=one_each, seed=seed)
        except ValueError as error:
            users = len(data.users.unique())
            raise DataError(f"clients.count = {clients.count}: {error}; set it to {users} or less") from error


class LeafTask(PeopleTask):
    """Any dataset of people in LEAF's format that has numbers as features, and a two-layer network."""

    name: Literal["leaf"]
    path: str  # the dataset's folder, with train/ and test/
    users: Literal["one each", "dealt out"] = "dealt out"  # a user for each client, or all users dealt out to them
    hidden: int = Field(default=64, ge=1)  # width of the hidden layer

    def load(self) -> Users:
        """From the folder."""
        return leaf(self.path)

    def module(self, data: Users, seed: int) -> nn.Module:
        """Two layers."""
        classes = 1 + int(torch.cat((data.train[1], data.test[1])).max())
        return models.mlp(data.train[0].shape[-1], self.hidden, classes, seed=seed)


class FEMNISTTask(PeopleTask):
    """FEMNIST's handwritten digits and letters, a writer for each client, and LEAF's convolutional network."""

    name: Literal["femnist"]
    batch: int = Field(default=10, ge=1)  # examples of a local step

    def load(self) -> Users:
        """From LEAF's files."""
        return femnist(self.path)

    def module(self, data: Users, seed: int) -> nn.Module:
        """Two convolutions, two dense layers."""
        return models.leaf_cnn(people.SYMBOLS, seed=seed)


class ShakespeareTask(PeopleTask):
    """Shakespeare's next characters, a role for each client, and LEAF's two-layer LSTM."""

    name: Literal["shakespeare"]
    hidden: int = Field(default=256, ge=1)  # width of the two LSTM layers
    batch: int = Field(default=10, ge=1)  # examples of a local step

    def load(self) -> Users:
        """From LEAF's files."""
        return shakespeare(self.path)

    def module(self, data: Users, seed: int) -> nn.Module:
        """An embedding, two LSTM layers, a dense one."""
        return models.leaf_lstm(len(people.ALPHABET), self.hidden, seed=seed)


class Sent140Task(PeopleTask):
    """Sent140's happy and unhappy tweets, an author for each client, and the mean of hashed words' embeddings."""

    name: Literal["sent140"]
    vocabulary: int = Field(default=people.VOCABULARY, ge=1)  # numbers that words are hashed to
    hidden: int = Field(default=64, ge=1)  # width of the hidden layer
    batch: int = Field(default=10, ge=1)  # examples of a local step

    def load(self) -> Users:
        """From LEAF's files."""
        return sent140(self.path, vocabulary=self.vocabulary)

    def module(self, data: Users, seed: int) -> nn.Module:
        """An embedding, two dense layers."""
        return models.bag_of_words(self.vocabulary, self.hidden, seed=seed)


class FlowerTask(LearningTask):
    """A Hugging Face dataset of numbers or pictures on this machine, dealt out by flwr-datasets, and a two-layer
    network."""

    name: Literal["flwr-datasets"]
    path: str  # a folder written by save_to_disk, or a Parquet, CSV or JSON file
    partitioner: str = "IidPartitioner"  # a class of flwr_datasets.partitioner
    options: dict[str, Any] = Field(default={})  # what it is given beside num_partitions, partition_by and seed
    inputs: list[str] | None = Field(default=None, min_length=1)  # columns to learn from; without, all others
    target: str = "label"  # the column of class numbers
    hidden: int = Field(default=64, ge=1)  # width of the hidden layer
    most_clients: ClassVar[int] = 1_000_000

    def check(self, clients: Clients) -> None:
        """See whether the data can be dealt out, and are numbers."""
        self._parts(clients, seed=0)

    def build(self, clients: Clients, run: Run, seed: int) -> Task:
        """The task for one seed."""
        hands, test, width, classes = self._parts(clients, seed)
        module = models.mlp(width, self.hidden, classes, seed=derive(seed, "model"))
        return self.supervised(module, hands, test, run, seed, collate=flower.Rows())

    def _parts(self, clients: Clients, seed: int) -> tuple[list[Data], Data, int, int]:
        """The clients' data, what to judge by, and how many numbers and classes there are."""
        train, test = flower.opened(self.path)
        judged = flower.columns(test, self.inputs, self.target)
        made = flower.dealt(train, self.partitioner, clients.count, self.options, self.target, seed)
        hands = from_partitioner(made, inputs=self.inputs, target=self.target)
        width = flower.width(judged, self.path)
        return hands, judged, width, flower.classes([train, test], self.target)


class QuadraticTask(Section):
    """A problem with a known answer; the clients' minima are normally distributed around one another."""

    name: Literal["quadratic"]
    most_clients: ClassVar[int] = 1_000_000
    dim: int = Field(default=100, ge=1)  # coordinates
    smoothness: Positive = 1.0  # largest curvature
    condition: float = Field(default=10.0, ge=1, allow_inf_nan=False)  # largest over smallest curvature
    spread: NotNegative = 1.0  # of the clients' minima
    noise: NotNegative = 0.1  # of the gradients

    def check(self, clients: Clients) -> None:
        """Nothing can be wrong."""

    def build(self, clients: Clients, run: Run, seed: int) -> Task:
        """The task for one seed."""
        generator = torch.Generator().manual_seed(derive(seed, "model"))
        centers = 1 + self.spread * torch.randn(clients.count, self.dim, generator=generator)
        curvature = torch.linspace(self.smoothness / self.condition, self.smoothness, self.dim)
        return Quadratic(curvature, centers, noise=self.noise, seed=seed)


Tasks: TypeAlias = (
    DigitsTask
    | MNISTTask
    | FashionTask
    | CIFARTask
    | CIFAR100Task
    | CelebATask
    | BreastCancerTask
    | FEMNISTTask
    | ShakespeareTask
    | Sent140Task
    | LeafTask
    | FlowerTask
    | QuadraticTask
)
