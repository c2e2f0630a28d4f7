"""However local steps are computed, they are the same steps."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quafl import cosine
from quafl.core.client import newcomer
from quafl.core.optim import adam, momentum, sgd
from quafl.core.seams import ClientState, Optimizer
from quafl.sim.executors import Choice, Executor, Name
from quafl.tasks import Supervised, digits, partition

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EACH_ENGINE = pytest.mark.parametrize("name", ["vectorised", "graph"])


def picture(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *layers)


class Tied(nn.Module):
    """One layer used twice, and one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.frozen = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)
        self.frozen.requires_grad_(False)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.twice(self.first(x)).relu())
        return self.frozen(self.dropout(self.twice(x).relu()))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)),
    "dropout": lambda: nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10)),
    "batch norm": lambda: picture(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    ),
    "all of it": lambda: picture(
        *(nn.Conv2d(1, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.Dropout2d(0.2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 10)),
    ),
    "tied": Tied,
}
OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: sgd(0.1),
    "momentum": lambda: momentum(0.05, nesterov=True),
    "adam": lambda: adam(0.005),
    "scheduled": lambda: sgd(0.1, schedule=cosine(10)),
}


def choice(task: Any, optimizer: Optimizer, clients: int, sampled: int) -> Choice:
    someone = newcomer(*task.initial(), optimizer)
    return Choice(task, optimizer, someone, clients=clients, sampled=sampled, steps=4)


def network(make: Callable[[], nn.Module], clients: int = 6, **settings: Any) -> Supervised:
    torch.manual_seed(0)
    return Supervised(make(), partition.iid(digits().train, clients), batch_size=16, device=DEVICE, **settings)


def trajectory(executor: Executor, task: Any, optimizer: Optimizer, visits: Sequence[Sequence[int]]) -> ClientState:
    """Six clients that are visited several times, each time for as many steps as it says, and move on with them."""
    clients = newcomer(*task.initial(), optimizer).each(lambda tensor: tensor.expand(6, *tensor.shape))
    for number, counts in enumerate(visits):
        clients = executor(clients, torch.tensor([3, 0, 5, 1, 4, 2]), torch.tensor(counts))
        clients = ClientState(
            base=clients.base - clients.progress,
            progress=torch.zeros_like(clients.base),
            buffers=clients.buffers,
            optimizer=clients.optimizer,
            steps=clients.steps,
            taken=torch.zeros_like(clients.taken),
            budget=clients.budget,
            round=torch.full_like(clients.round, number),
            contacts=clients.contacts,
            expected_steps=clients.expected_steps,
        )
    return clients


VISITS = [[3, 0, 5, 1, 1, 2], [0, 0, 0, 0, 0, 0], [2, 2, 2, 2, 2, 2], [0, 7, 0, 0, 0, 0]]


@EACH_ENGINE
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_clients_go_the_same_way_together_as_one_by_one(
    name: Name, make: Callable[[], nn.Module], optimizer: Callable[[], Optimizer]
) -> None:
    task = network(make)
    ways = choice(task, optimizer(), clients=6, sampled=4)
    together = ways.make(name)
    assert together.name.startswith(name)
    mine = trajectory(together, task, optimizer(), VISITS)
    theirs = trajectory(ways.make("sequential"), task, optimizer(), VISITS)
    torch.testing.assert_close(mine.tree(), theirs.tree(), rtol=2e-3, atol=2e-5)
