"""What is learned: modules as vectors, data, partitions, and problems with known answers."""

from quafl.tasks import partition
from quafl.tasks.datasets import breast_cancer, celeba, cifar10, cifar100, digits, fashion_mnist, mnist
from quafl.tasks.files import DataError
from quafl.tasks.flower import from_partitioner
from quafl.tasks.judging import accuracy
from quafl.tasks.language import next_token, next_token_accuracy
from quafl.tasks.people import femnist, leaf, sent140, shakespeare
from quafl.tasks.quadratic import Quadratic
from quafl.tasks.supervised import Supervised

__all__ = [
    "DataError",
    "Quadratic",
    "Supervised",
    "accuracy",
    "breast_cancer",
    "celeba",
    "cifar10",
    "cifar100",
    "digits",
    "fashion_mnist",
    "femnist",
    "from_partitioner",
    "leaf",
    "mnist",
    "next_token",
    "next_token_accuracy",
    "partition",
    "sent140",
    "shakespeare",
]
