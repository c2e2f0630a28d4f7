"""However local steps are computed, they are the same steps."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.utils import _pytree as pytree

from quafl import Lattice, Plan, Simulation, World, cosine, simulate
from quafl.codec import QSGD
from quafl.codec.seams import Codec, Codecs
from quafl.core import SCAFFOLD, Calibrated, FedAsync, FedAvg, FedBuff, QuAFL
from quafl.core.client import begin, newcomers
from quafl.core.optim import adam, adamw, momentum, sgd
from quafl.core.seams import Algorithm, Optimizer
from quafl.sim.executors import Choice, Executor, ExecutorName, layers
from quafl.sim.executors.lanes import Lane, flatten, lanes_for, share_out, step_of, vectors_of
from quafl.sim.executors.layers import STACKED, Layers
from quafl.sim.executors.tracing import opened, trace
from quafl.tasks import Quadratic, Supervised, digits, partition
from quafl.tasks.augment import crop_and_flip

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
        outputs: Tensor = self.frozen(self.dropout(self.twice(x).relu()))
        return outputs


class Viewed(nn.Module):
    """Convolutions called by hand, and what comes out of them taken for a view of something flat."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3, bias=False), nn.Conv2d(3, 4, 2)
        self.last = nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.conv2d(input=x.view(-1, 1, 8, 8), weight=self.first.weight, stride=(1,)).relu()
        outputs: Tensor = self.last(self.second(x).view(len(x), -1))
        return outputs


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
    "viewed": Viewed,
}
OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: sgd(0.1),
    "momentum": lambda: momentum(0.05, nesterov=True),
    "adam": lambda: adam(0.005),
    "adamw": lambda: adamw(0.005, weight_decay=0.5, clip=0.5),
    "decayed": lambda: momentum(0.05, weight_decay=0.5, clip=0.5),
    "scheduled": lambda: sgd(0.1, schedule=cosine(10)),
}


def newcomer(task: Any, optimizer: Optimizer, algorithm: Algorithm = FedAvg()) -> Any:  # noqa: B008
    """One client, as the algorithm has it."""
    model, buffers = task.initial()
    one = newcomers(algorithm, model, buffers, torch.ones(()))
    return replace(one, optimizer=optimizer.init(one.base))


def choice(
    task: Any,
    optimizer: Optimizer,
    clients: int,
    sampled: int,
    algorithm: Algorithm = FedAvg(),  # noqa: B008  # immutable
) -> Choice:
    return Choice(
        task,
        optimizer,
        algorithm.direction,
        newcomer(task, optimizer, algorithm),
        clients=clients,
        sampled=sampled,
        typical=lambda: torch.full((clients,), 4),
    )


def network(make: Callable[[], nn.Module], clients: int = 6, **settings: Any) -> Supervised:
    torch.manual_seed(0)
    return Supervised(make(), partition.iid(digits().train, clients), batch_size=16, device=DEVICE, **settings)


def trajectory(
    executor: Executor,
    task: Any,
    optimizer: Optimizer,
    visits: Sequence[Sequence[int]],
    algorithm: Algorithm = FedAvg(),  # noqa: B008  # immutable
) -> Any:
    """Six clients that are visited several times, each time for as many steps as it says, and move on with them. The
    vectors that an algorithm has beside the base are each client's own."""
    clients = newcomer(task, optimizer, algorithm).each(lambda tensor: tensor.expand(6, *tensor.shape))
    generator = torch.Generator().manual_seed(1)
    own = {
        name: 0.1 * torch.randn(rows.shape, generator=generator).to(rows.device)
        for name, rows in vectors_of(clients).items()
        if name != "base"
    }
    clients = replace(clients, **own)
    for number, counts in enumerate(visits):
        clients = executor(clients, torch.tensor([3, 0, 5, 1, 4, 2]), torch.tensor(counts))
        clients = begin(clients, clients.base - clients.progress, clients.buffers, 0)
        clients = replace(clients, round=torch.full_like(clients.round, number))
    return clients


VISITS = [[3, 0, 5, 1, 1, 2], [0, 0, 0, 0, 0, 0], [2, 2, 2, 2, 2, 2], [0, 7, 0, 0, 0, 0]]


@EACH_ENGINE
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [*((model, "sgd") for model in MODELS), *(("all of it", optimizer) for optimizer in list(OPTIMIZERS)[1:])],
)
def test_clients_go_the_same_way_together_as_one_by_one(name: ExecutorName, model: str, optimizer: str) -> None:
    task, make = network(MODELS[model]), OPTIMIZERS[optimizer]
    ways = choice(task, make(), clients=6, sampled=4)
    together = ways.make(name)
    assert together.name.startswith(name)
    mine = trajectory(together, task, make(), VISITS)
    theirs = trajectory(ways.make("sequential"), task, make(), VISITS)
    torch.testing.assert_close(mine.tree(), theirs.tree(), rtol=2e-3, atol=2e-5)


DIRECTED: dict[str, Algorithm] = {"SCAFFOLD": SCAFFOLD(), "FedAsync": FedAsync(proximity=2.0)}


@EACH_ENGINE
@pytest.mark.parametrize("make", [MODELS["dropout"], MODELS["batch norm"]], ids=["dropout", "batch norm"])
@pytest.mark.parametrize("algorithm", DIRECTED.values(), ids=DIRECTED.keys())
def test_steps_in_an_algorithms_own_direction_are_the_same_together_as_one_by_one(
    name: ExecutorName, make: Callable[[], nn.Module], algorithm: Algorithm
) -> None:
    task = network(make)
    ways = choice(task, sgd(0.1), clients=6, sampled=4, algorithm=algorithm)
    together = ways.make(name)
    assert together.name.startswith(name)
    mine, theirs = (trajectory(one, task, sgd(0.1), VISITS, algorithm) for one in (together, ways.make("sequential")))
    torch.testing.assert_close(mine.tree(), theirs.tree(), rtol=2e-3, atol=2e-5)
    straight = trajectory(choice(task, sgd(0.1), 6, 4).make("sequential"), task, sgd(0.1), VISITS)
    assert (straight.base - theirs.base).norm() > 0.1 * (theirs.base - task.initial()[0]).norm()


@EACH_ENGINE
def test_a_direction_that_looks_at_what_is_no_vector_is_refused_in_one_line(
    name: ExecutorName, caplog: pytest.LogCaptureFixture
) -> None:
    def slower(client: Any, gradient: Tensor) -> Tensor:
        slowed: Tensor = gradient / (1 + client.steps)
        return slowed

    ways = replace(choice(network(MODELS["dense"]), sgd(0.1), clients=6, sampled=3), direction=slower)
    with caplog.at_level(logging.WARNING, logger="quafl"):
        assert ways.make(name).name == "sequential"
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("quafl")]
    assert "a local step's direction may use a client's vectors, not its 'steps'" in line


@EACH_ENGINE
def test_augmented_pictures_are_the_same_together_as_one_by_one(name: ExecutorName) -> None:
    pictures = torch.randint(0, 256, (96, 3, 12, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    hands = partition.iid((pictures, torch.arange(96) % 10), 6)
    torch.manual_seed(0)
    module = nn.Sequential(nn.LayerNorm((3, 12, 12)), nn.Flatten(), nn.Linear(432, 10))
    task = Supervised(
        module, hands, batch_size=8, augment=lambda x, draws: crop_and_flip(x, draws).float(), device=DEVICE
    )
    ways = choice(task, sgd(0.1), clients=6, sampled=6)
    mine, theirs = (trajectory(ways.make(which), task, sgd(0.1), VISITS) for which in (name, "sequential"))
    torch.testing.assert_close(mine.tree(), theirs.tree(), rtol=2e-3, atol=2e-5)


@EACH_ENGINE
def test_clients_with_less_than_a_batch_take_part(name: ExecutorName) -> None:
    train = digits().train
    hands = [(train[0][start:stop], train[1][start:stop]) for start, stop in ((0, 40), (40, 50), (50, 90), (90, 91))]
    torch.manual_seed(0)
    task = Supervised(MODELS["dropout"](), hands * 2, batch_size=16, device=DEVICE)
    ways = choice(task, momentum(0.1), clients=8, sampled=6)
    mine, theirs = (trajectory(ways.make(which), task, momentum(0.1), VISITS) for which in (name, "sequential"))
    torch.testing.assert_close(mine.tree(), theirs.tree(), rtol=2e-3, atol=2e-5)


ALGORITHMS: dict[str, tuple[Algorithm, Codec | Codecs]] = {
    "QuAFL": (QuAFL(sampled=3, local_steps=4), Lattice(bits=8)),
    "Calibrated": (Calibrated(sampled=3, local_steps=4), Lattice(bits=8)),
    "FedBuff": (FedBuff(sampled=3, local_steps=4, server_lr=0.5), QSGD(bits=8)),
    "SCAFFOLD": (SCAFFOLD(sampled=3, local_steps=4, lr=0.1), Lattice(bits=8)),
}


@EACH_ENGINE
@pytest.mark.parametrize(("algorithm", "codec"), ALGORITHMS.values(), ids=ALGORITHMS.keys())
def test_whole_runs_are_the_same_whatever_takes_the_steps(
    name: ExecutorName, algorithm: Algorithm, codec: Codec | Codecs
) -> None:
    torch.manual_seed(0)
    model = MODELS["all of it"]()

    def rows(executor: ExecutorName) -> list[dict[str, float]]:
        return simulate(
            model=model,
            clients=partition.iid(digits().train, 8),
            test=digits().test,
            algorithm=algorithm,
            codec=codec,
            optimizer=sgd(0.1),
            world=World(slow=0.25),
            until=60.0,
            evaluations=3,
            device=DEVICE,
            executor=executor,
        ).rows

    for mine, theirs in zip(rows(name), rows("sequential"), strict=True):
        assert mine == pytest.approx(theirs, rel=0.05, abs=0.02)
        assert mine["local_steps"] == theirs["local_steps"]


class Looks(nn.Module):
    """Does one thing or another, as the data are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x) if x.mean() > 0.5 else self.layer(-x)
        return outputs


class Draws(nn.Module):
    """Draws its dropout by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(functional.dropout(x, 0.5, self.training))
        return outputs


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "control flow": (Looks, "data-dependent control flow"),
    "randomness": (Draws, "draws random numbers of its own"),
    "counting": (lambda: nn.Sequential(nn.BatchNorm1d(64, momentum=None), nn.Linear(64, 10)), "counts its batches"),
}


@EACH_ENGINE
@pytest.mark.parametrize(("make", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_done_together_is_done_one_by_one_and_one_line_says_why(
    name: ExecutorName, make: Callable[[], nn.Module], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="quafl"):
        made = choice(network(make), sgd(0.1), clients=6, sampled=3).make(name)
    assert made.name == "sequential"
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("quafl")]
    assert "clients train one after another" in line
    assert why in line
    assert "\n" not in line


def test_a_task_that_cannot_be_learned_together_is_still_learned(caplog: pytest.LogCaptureFixture) -> None:
    task = Quadratic(torch.ones(3), torch.randn(4, 3))
    with caplog.at_level(logging.WARNING, logger="quafl"):
        assert choice(task, sgd(0.1), clients=4, sampled=2).make("vectorised").name == "sequential"
    assert "Quadratic has no pure_gradient" in caplog.text


@pytest.mark.skipif(GPU, reason="with a GPU it is measured")
def test_without_a_gpu_clients_train_one_after_another_unless_asked() -> None:
    assert choice(network(MODELS["dense"]), sgd(0.1), clients=6, sampled=3).make("auto").name == "sequential"


@EACH_ENGINE
def test_mixed_precision_is_the_same_together_as_one_by_one_within_its_rounding(name: ExecutorName) -> None:
    task = network(MODELS["batch norm"], precision="bfloat16")
    ways = choice(task, sgd(0.1), clients=6, sampled=6)
    mine, theirs = (trajectory(ways.make(which), task, sgd(0.1), VISITS[:1]) for which in (name, "sequential"))
    moved = (theirs.base - task.initial()[0]).norm()
    assert (mine.base - theirs.base).norm() < 0.1 * moved
    exact = network(MODELS["batch norm"])
    other = trajectory(choice(exact, sgd(0.1), 6, 6).make("sequential"), exact, sgd(0.1), VISITS[:1])
    assert 0 < (other.base - theirs.base).norm() < 0.1 * moved


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="precision is 'float16', must be one of float32, tf32, bfloat16"):
        network(MODELS["dense"], precision="float16")


@given(st.lists(st.integers(0, 7), max_size=12), st.integers(1, 9))
def test_every_step_is_taken_once_and_in_order(counts: list[int], width: int) -> None:
    plan = share_out(counts, width)
    lanes: dict[int, int] = {}
    taken = [0] * len(counts)
    for tick, active in enumerate(plan.active):
        for lane, row in plan.come[tick]:
            assert row not in lanes.values()
            lanes[lane] = row
        assert set(lanes) == set(range(active))
        for lane in range(active):
            row = lanes[lane]
            assert (plan.rows[tick][lane], plan.steps[tick][lane]) == (row, taken[row])
            taken[row] += 1
        for lane, row in plan.go[tick]:
            assert lanes.pop(lane) == row
    assert taken == counts
    assert plan.active == sorted(plan.active, reverse=True)
    assert len(plan.active) == max(max(counts, default=0), -(-sum(counts) // width))


@pytest.mark.parametrize("kernel", [1, 3, (3, 2)])
@pytest.mark.parametrize("stride", [1, 2, (1, 2)])
@pytest.mark.parametrize("padding", [0, 1, (2, 0)])
@pytest.mark.parametrize("places", [1, 100, 1000])
def test_convolutions_of_a_stack_are_those_of_each(
    kernel: Any, stride: Any, padding: Any, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "PART", places)  # one picture at a time, some, or all
    generator = torch.Generator().manual_seed(0)
    layer = nn.Conv2d(2, 5, kernel)
    pictures, weights, bias = (
        torch.randn(3, *shape, generator=generator) for shape in ((4, 2, 7, 8), layer.weight.shape, (5,))
    )

    def gradients(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        def value(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return functional.conv2d(x, weight, bias, stride=stride, padding=padding).square().sum()

        result: tuple[Tensor, ...] = torch.func.grad(value, argnums=(0, 1, 2))(x, weight, bias)
        return result

    each = [gradients(*parts) for parts in zip(pictures, weights, bias, strict=True)]
    with Layers(STACKED):
        together = torch.func.vmap(gradients)(pictures, weights, bias)
    for mine, theirs in zip(together, map(torch.stack, zip(*each, strict=True)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_task_begins_where_it_began_however_long_it_was_trained() -> None:
    task = network(MODELS["batch norm"])
    model, buffers = (part.clone() for part in task.initial())
    trajectory(choice(task, sgd(0.1), 6, 3).make("sequential"), task, sgd(0.1), VISITS)
    assert torch.equal(task.initial()[0], model)
    assert torch.equal(task.initial()[1], buffers)


def test_clients_that_are_asked_one_by_one_are_trained_together() -> None:
    """FedBuff asks a client again as soon as it has answered; what it then does is needed only when it answers next."""
    task = network(MODELS["dense"], clients=20)
    run = Simulation(
        task, 20, World(), FedBuff(sampled=5, local_steps=3), QSGD(bits=8), sgd(0.1), Plan(until=100.0, every=50.0)
    )
    together: list[int] = []
    execute = run._fleet.crew.execute

    def listening(clients: Any, ids: Tensor, counts: Tensor) -> Any:
        together.append(len(ids))
        return execute(clients, ids, counts)

    run._fleet.crew.execute = listening  # type: ignore[assignment]  # it has no name
    assert len(list(run)) > 10
    assert together[0] == 20
    assert sum(together) / len(together) > 5


def test_a_stack_is_as_wide_as_the_work_is() -> None:
    task = network(MODELS["dense"])
    uneven = choice(task, sgd(0.1), clients=6, sampled=6)
    assert uneven.make("vectorised").name == "vectorised by 6"
    assert (
        replace(uneven, typical=lambda: torch.tensor([10, 1, 2, 7, 5, 5])).make("vectorised").name == "vectorised by 3"
    )
    assert (
        replace(uneven, typical=lambda: torch.tensor([50, 0, 0, 1, 0, 0])).make("vectorised").name == "vectorised by 2"
    )
    assert replace(uneven, typical=lambda: torch.zeros(6, dtype=torch.int64)).make("vectorised").name.startswith("vec")


@pytest.mark.parametrize("algorithm", [FedAvg(), *DIRECTED.values()], ids=["FedAvg", *DIRECTED])
def test_what_is_compiled_does_not_depend_on_the_data_and_the_seed(algorithm: Algorithm) -> None:
    """So that the compiler's cache knows it again: compiling takes a minute."""
    codes = []
    for seed in 1, 2:
        data = digits()
        hands = partition.iid(data.train, 6, seed=seed)
        task = Supervised(MODELS["dense"](), hands, batch_size=8, seed=seed, device=DEVICE)
        lanes = lanes_for(newcomer(task, sgd(0.1), algorithm), 0, 1, hooked=algorithm.direction is not None)
        lane: Lane = pytree.tree_map(lambda rows: rows[0], lanes)
        graph = trace(step_of(task.pure_gradient, sgd(0.1), algorithm.direction), lane)
        before = [tensor.clone() for tensor in flatten(lane.state)]
        graph(*pytree.tree_leaves(lane))
        after = [tensor.clone() for tensor in flatten(lane.state)]
        constants = opened(graph, lane.factor.device)
        assert any(len(tensor) == len(data.train[0]) for tensor in constants), "the data are among them"
        assert not any(node.op == "get_attr" for node in graph.graph.nodes)
        for tensor, old in zip(flatten(lane.state), before, strict=True):
            tensor.copy_(old)
        graph(*pytree.tree_leaves(lane), *constants)
        for mine, theirs in zip(flatten(lane.state), after, strict=True):
            assert torch.equal(mine, theirs)
        codes.append(graph.code)
    assert codes[0] == codes[1]


def test_what_is_not_a_tensor_stays_where_it_is() -> None:
    class Branches(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            outputs: Tensor = torch.cond(given.sum() > 0, lambda x: x + 1, lambda x: x - 1, (given,))
            return outputs

    graph = torch.export.export(Branches(), (torch.ones(3),)).graph_module
    before = graph.code
    assert opened(graph, torch.device("cpu")) == []
    assert graph.code == before


@pytest.mark.skipif(not GPU, reason="nothing is compiled without a GPU")
def test_another_seed_is_not_compiled_again() -> None:
    hits = []
    for seed in 1, 2:
        torch._dynamo.reset()
        hands = partition.iid(digits().train, 6, seed=seed)
        task = Supervised(MODELS["dense"](), hands, batch_size=8, seed=seed, device=DEVICE)
        counters.clear()
        assert choice(task, sgd(0.1), clients=6, sampled=3).make("graph").name == "graph"
        hits.append(counters["inductor"]["fxgraph_cache_hit"])
    assert hits[1] == 1


def test_a_single_client_at_a_time_needs_no_stack() -> None:
    task = network(MODELS["dense"])
    ways = choice(task, sgd(0.1), clients=6, sampled=1)
    assert ways.make("vectorised").name == "graph"
    mine, theirs = (trajectory(ways.make(which), task, sgd(0.1), VISITS) for which in ("vectorised", "sequential"))
    torch.testing.assert_close(mine.tree(), theirs.tree(), rtol=2e-3, atol=2e-5)


def test_clients_without_a_whole_batch_among_them_train_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    task = Supervised(MODELS["dense"](), partition.iid(digits().train, 200), batch_size=16, device=DEVICE)
    with caplog.at_level(logging.WARNING, logger="quafl"):
        assert choice(task, sgd(0.1), clients=200, sampled=3).make("graph").name == "sequential"
    assert "no client has a whole batch" in caplog.text


class Attends(nn.Module):
    """Attention without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(1, (8, 8))
        outputs: Tensor = self.out(self.attention(rows, rows, rows, need_weights=False)[0].flatten(1))
        return outputs


def test_attention_without_dropout_is_not_taken_for_random() -> None:
    task = network(Attends)
    ways = choice(task, sgd(0.1), clients=6, sampled=4)
    assert ways.make("graph").name == "graph"
    mine, theirs = (trajectory(ways.make(which), task, sgd(0.1), VISITS) for which in ("graph", "sequential"))
    torch.testing.assert_close(mine.tree(), theirs.tree(), rtol=2e-3, atol=2e-5)


@EACH_ENGINE
def test_a_loss_on_some_of_the_examples_is_computed_one_by_one(
    name: ExecutorName, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, reduction="none")[targets < 5].sum() / len(targets)

    with caplog.at_level(logging.WARNING, logger="quafl"):
        made = choice(network(MODELS["dense"], loss=loss), sgd(0.1), clients=6, sampled=3).make(name)
    assert made.name == "sequential"
    assert "clients train one after another" in caplog.text
