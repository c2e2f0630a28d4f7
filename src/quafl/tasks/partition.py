"""Who holds which examples."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quafl.core.randomness import derive
from quafl.tasks.supervised import Data


def iid(data: Data, clients: int, *, seed: int = 0) -> list[Data]:
    """Shuffled and dealt out evenly."""
    order = torch.randperm(_size(data, clients), generator=_generator(seed))
    return _deal(data, order.tensor_split(clients))


def by_label(data: Data, clients: int, *, pieces: int = 2, seed: int = 0) -> list[Data]:
    """Sorted by label and cut into `pieces` times as many pieces as there are clients; each client gets `pieces` of
    them at random, and so few labels (McMahan et al., 2017, section 3)."""
    if pieces < 1:
        raise ValueError(f"pieces is {pieces}, must be at least 1")
    generator = _generator(seed)
    shuffled = torch.randperm(_size(data, clients * pieces), generator=generator)
    by_label = shuffled[data[1][shuffled].argsort(stable=True)].tensor_split(clients * pieces)
    dealt = torch.randperm(clients * pieces, generator=generator).view(clients, pieces)
    return _deal(data, [torch.cat([by_label[piece] for piece in mine]) for mine in dealt.tolist()])


def _size(data: Data, parts: int) -> int:
    if parts < 1 or parts > len(data[1]):
        raise ValueError(f"cannot cut {len(data[1])} examples into {parts} parts, each with at least one")
    return len(data[1])


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, "partition"))


def _deal(data: Data, hands: Sequence[Tensor]) -> list[Data]:
    return [(data[0][hand], data[1][hand]) for hand in hands]
