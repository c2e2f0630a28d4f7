"""Who holds which examples."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quafl.core.randomness import derive
from quafl.tasks import trees
from quafl.tasks.given import Pair as Data
from quafl.tasks.given import examples
from quafl.tasks.hands import take

WHOLE = "the dataset"


def iid(data: Data, clients: int, *, seed: int = 0) -> list[Data]:
    """Shuffled and dealt out evenly."""
    data = examples(data, WHOLE)
    order = torch.randperm(_size(data, clients), generator=_generator(seed))
    return _deal(data, order.tensor_split(clients))


def by_class(data: Data, clients: int, *, pieces: int = 2, seed: int = 0) -> list[Data]:
    """Sorted by class and cut into `pieces` times as many pieces as there are clients; each client gets `pieces` of
    them at random, and so few classes (McMahan et al., 2017, section 3)."""
    if pieces < 1:
        raise ValueError(f"pieces is {pieces}, must be at least 1")
    data, generator = examples(data, WHOLE), _generator(seed)
    shuffled = torch.randperm(_size(data, clients * pieces), generator=generator)
    sorted_pieces = shuffled[data[1][shuffled].argsort(stable=True)].tensor_split(clients * pieces)
    dealt = torch.randperm(clients * pieces, generator=generator).view(clients, pieces)
    return _deal(data, [torch.cat([sorted_pieces[piece] for piece in mine]) for mine in dealt.tolist()])


def slow_classes(data: Data, clients: int, *, slow: int, classes: Sequence[int], seed: int = 0) -> list[Data]:
    """The last `slow` clients hold the given classes, shuffled and dealt out evenly; the others hold the rest."""
    data = examples(data, WHOLE)
    _size(data, clients)
    if not 0 < slow < clients:
        raise ValueError(
            f"{slow} of {clients} clients are slow; some, and not all, must be to hold classes of their own"
        )
    order = torch.randperm(len(data[1]), generator=_generator(seed))
    theirs = torch.isin(data[1][order], torch.tensor(list(classes)))
    sides = (order[~theirs], clients - slow), (order[theirs], slow)
    for part, hands in sides:
        if len(part) < hands:
            raise ValueError(
                f"classes {list(classes)} leave {len(part)} examples for {hands} clients; choose other classes"
            )
    return _deal(data, [hand for part, hands in sides for hand in part.tensor_split(hands)])


def dirichlet(data: Data, clients: int, *, alpha: float, seed: int = 0) -> list[Data]:
    """Each class is dealt out in proportions drawn from Dirichlet(α, …, α) (Hsu et al., 2019): the smaller α, the fewer
    classes a client has. Whoever would get nothing gets an example of who has most."""
    if not alpha > 0:
        raise ValueError(f"alpha is {alpha}, must be positive")
    data = examples(data, WHOLE)
    order = torch.randperm(_size(data, clients), generator=_generator(seed))
    hands: list[list[int]] = [[] for _ in range(clients)]
    proportions = np.random.default_rng(derive(seed, "partition"))
    for label in data[1].unique().tolist():
        mine = order[data[1][order] == label]
        ends = np.rint(proportions.dirichlet([alpha] * clients).cumsum() * len(mine)).astype(int)[:-1]
        for hand, part in zip(hands, mine.tensor_split(ends.tolist()), strict=True):
            hand.extend(part.tolist())
    for hand in hands:
        if not hand:
            hand.append(max(hands, key=len).pop())
    return _deal(data, [torch.tensor(hand) for hand in hands])


def by_user(data: Data, users: Tensor, clients: int, *, seed: int = 0) -> list[Data]:
    """The users, each with all its examples, shuffled and dealt out evenly: disjoint people for every client."""
    found = of_users(data, users, deal_users(users, clients, seed=seed))
    return [mine for mine in found if mine is not None]


def deal_users(users: Tensor, clients: int, *, one_each: bool = False, seed: int = 0) -> list[Tensor]:
    """Who each client is, of whose each example is: all users, shuffled and dealt out evenly; or one user each, and
    the others nobody."""
    names = torch.as_tensor(users).unique()
    if not 0 < clients <= len(names):
        raise ValueError(f"cannot deal {len(names)} users out to {clients} clients, each with at least one")
    shuffled = names[torch.randperm(len(names), generator=_generator(seed))]
    return list((shuffled[:clients] if one_each else shuffled).tensor_split(clients))


def of_users(data: Data, users: Tensor, dealt: Sequence[Tensor]) -> list[Data | None]:
    """What each client has of the examples, by who it is and whose each of them is. None: nothing."""
    data = examples(data, WHOLE)
    client_of = {name: client for client, mine in enumerate(dealt) for name in mine.tolist()}
    names, place = torch.as_tensor(users).unique(return_inverse=True)
    owner = torch.tensor([client_of.get(name, len(dealt)) for name in names.tolist()])[place]
    hands = owner.argsort(stable=True).split(owner.bincount(minlength=len(dealt) + 1).tolist())
    return [take(data, hand) if len(hand) else None for hand in hands[: len(dealt)]]


def _size(data: Data, parts: int) -> int:
    size = trees.size(data[0])
    if parts < 1 or parts > size:
        raise ValueError(f"cannot cut {size} examples into {parts} parts, each with at least one")
    return size


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, "partition"))


def _deal(data: Data, hands: Sequence[Tensor]) -> list[Data]:
    return [take(data, hand) for hand in hands]
