"""What is learned: modules as vectors, data, partitions, and problems with known answers."""

from quafl.tasks import partition
from quafl.tasks.datasets import digits
from quafl.tasks.quadratic import Quadratic
from quafl.tasks.supervised import Supervised, accuracy

__all__ = ["Quadratic", "Supervised", "accuracy", "digits", "partition"]
