"""The task of the federation that runs on one machine to show what one is."""

from quafl.tasks import partition
from quafl.tasks.datasets import digits
from quafl.tasks.local import Local
from quafl.tasks.models import mlp

CLIENTS = tuple(f"client-{number}" for number in range(1, 5))


def digits_of(name: str) -> Local:
    """Handwritten digits: each of the clients has a share of its own, the server has those that nobody learns from."""
    data, model = digits(), mlp(64, 64, 10, seed=0)
    if name not in CLIENTS:
        return Local(model, data.test)
    shares = partition.iid(data.train, len(CLIENTS), seed=0)
    return Local(model, shares[CLIENTS.index(name)], batch_size=16)
