"""What is learned: modules as vectors, data, partitions, and problems with known answers."""

from quafl.tasks import partition
from quafl.tasks.datasets import celeba, cifar10, digits, fashion_mnist, leaf, mnist
from quafl.tasks.files import DataError
from quafl.tasks.judging import accuracy
from quafl.tasks.language import next_token, next_token_accuracy
from quafl.tasks.quadratic import Quadratic
from quafl.tasks.supervised import Supervised

__all__ = [
    "DataError",
    "Quadratic",
    "Supervised",
    "accuracy",
    "celeba",
    "cifar10",
    "digits",
    "fashion_mnist",
    "leaf",
    "mnist",
    "next_token",
    "next_token_accuracy",
    "partition",
]
