"""Modules as vectors, data, partitions."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

import quafl
from quafl.core.judgement import across
from quafl.core.messages import Buffers, Model
from quafl.core.seams import Score, Task
from quafl.tasks import Quadratic, Supervised, digits, models, partition
from quafl.tasks.flat import Flat
from quafl.tasks.supervised import accuracy
from quafl.testing import tasks

KEY = torch.zeros(2, dtype=torch.int64)


class Tied(nn.Module):
    """One matrix used twice, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 3, bias=False)
        self.unembed = nn.Linear(3, 3, bias=False)
        self.unembed.weight = self.embed.weight
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unembed(self.frozen(self.embed(x)))


def test_frozen_parameters_stay_and_tied_ones_stay_tied() -> None:
    module = Tied()
    frozen = module.frozen.weight.clone()
    flat = Flat(module)
    model, buffers = flat.initial()
    assert len(model) == 9
    trained = flat.module(model + 1, buffers)
    assert isinstance(trained, Tied)
    assert trained.unembed.weight is trained.embed.weight
    torch.testing.assert_close(trained.embed.weight, module.embed.weight + 1)
    assert torch.equal(trained.frozen.weight, frozen)


def test_gradient_equals_autograd_on_the_module_itself() -> None:
    module, x, y = Tied(), torch.randn(5, 3), torch.randn(5, 3)
    flat = Flat(module)
    model, buffers = flat.initial()
    gradient, _ = flat.gradient(model, buffers, KEY, lambda m: functional.mse_loss(m(x), y))
    functional.mse_loss(module(x), y).backward()
    assert module.embed.weight.grad is not None
    torch.testing.assert_close(gradient, module.embed.weight.grad.flatten())
    pure, _ = flat.pure_gradient(model, buffers, KEY, lambda m: functional.mse_loss(m(x), y))
    torch.testing.assert_close(pure, gradient)


def test_a_parameter_that_the_loss_does_not_use_has_gradient_zero() -> None:
    module = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    flat = Flat(module)
    gradient, _ = flat.gradient(*flat.initial(), KEY, lambda m: m["used"](torch.ones(1, 2)).sum())
    assert gradient.tolist() == [1, 1, 1, 0, 0, 0]


def test_batch_norm_buffers_travel_and_counters_do_not() -> None:
    module = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    flat = Flat(module)
    model, buffers = flat.initial()
    assert len(buffers) == 8  # running mean and variance
    _, after = flat.gradient(model, buffers, KEY, lambda m: m(torch.randn(16, 2)).sum())
    assert buffers.tolist() == [0] * 4 + [1] * 4
    assert not torch.equal(after, buffers)
    norm = flat.module(model, after)[1]
    assert torch.equal(norm.running_mean, after[:4])
    assert torch.equal(module[1].running_mean, torch.zeros(4))  # the user's own module is not touched


def test_half_precision_modules_are_trained_in_float32_and_given_back_in_their_own() -> None:
    module = nn.Linear(2, 2).to(torch.bfloat16)
    flat = Flat(module)
    model, buffers = flat.initial()
    assert model.dtype == torch.float32
    trained = flat.module(model + 1, buffers)
    assert trained.weight.dtype == torch.bfloat16


def test_batch_norm_models_train_through_the_lattice_with_exact_buffers() -> None:
    torch.manual_seed(0)
    result = quafl.simulate(
        model=nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)),
        clients=partition.iid(digits().train, 5),
        test=digits().test,
        algorithm=quafl.QuAFL(sampled=2),
        optimizer=quafl.sgd(0.3),
        until=100.0,
        evaluations=5,
    )
    assert result.rows[-1]["accuracy"] > 0.7
    assert result.model[1].running_mean.abs().sum() > 0


def toy(count: int, batch_size: int) -> Supervised:
    data = (torch.arange(count).float().unsqueeze(1), torch.zeros(count, dtype=torch.int64))
    return Supervised(nn.Linear(1, 2), [data, data], batch_size=batch_size)


class Noisy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.rand_like(x) if self.training else x)


def supervised(*layers: nn.Module) -> Supervised:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    hands = partition.iid((x, (x.sum(dim=1) > 0).long()), 2)
    return Supervised(nn.Sequential(*layers), hands, batch_size=8)


TASKS: dict[str, Callable[[], Task]] = {
    "quadratic": lambda: Quadratic(torch.ones(3), torch.tensor([[0.0] * 3, [1.0] * 3]), noise=0.5),
    "linear": lambda: supervised(nn.Linear(3, 2)),
    "batch norm and dropout": lambda: supervised(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2)),
    "a module that draws itself": lambda: supervised(Noisy(3, 2)),
    "frozen and tied": lambda: supervised(Tied()),
}


@pytest.mark.parametrize("check", tasks.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", TASKS.values(), ids=TASKS)
def test_every_task_keeps_the_contract(make: Callable[[], Task], check: Callable[[Task, int], None]) -> None:
    check(make(), 2)


def test_each_client_has_batches_of_its_own() -> None:
    task = toy(20, 4)
    assert not torch.equal(task.batch(1, 7)[0], task.batch(0, 7)[0])


def test_what_a_module_draws_itself_comes_from_its_batch() -> None:
    x, y = torch.ones(8, 3), torch.zeros(8, dtype=torch.int64)
    task = Supervised(Noisy(3, 2), [(x, y)], batch_size=4)
    batch = task.batch(0, 5)
    first = task.gradient(*task.initial(), batch)[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(batch.key[0]))
        noise = torch.rand(4, 3)
    by_hand = nn.Linear(3, 2)
    by_hand.load_state_dict(task.export(*task.initial()))
    functional.cross_entropy(by_hand(x[:4] * noise), y[:4]).backward()
    assert by_hand.weight.grad is not None
    torch.testing.assert_close(first[:6], by_hand.weight.grad.flatten())
    assert not torch.equal(first, task.gradient(*task.initial(), task.batch(0, 6))[0])


def test_an_epoch_goes_through_all_data_in_an_order_of_its_own() -> None:
    task = toy(20, 4)
    epochs = [torch.cat([task.batch(0, 5 * epoch + step)[0] for step in range(5)]).flatten() for epoch in range(2)]
    assert all(sorted(epoch.tolist()) == list(range(20)) for epoch in epochs)
    assert not torch.equal(*epochs)


def test_a_client_with_less_than_a_batch_uses_all_it_has() -> None:
    assert sorted(toy(3, 16).batch(0, 9)[0].flatten().tolist()) == [0, 1, 2]


def test_users_give_their_own_loss_and_metrics() -> None:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]])
    result = quafl.simulate(
        model=nn.Linear(3, 1),
        clients=[(x[i::5], y[i::5]) for i in range(5)],
        algorithm=quafl.QuAFL(sampled=2),
        loss=functional.mse_loss,
        metrics={"worst": lambda outputs, targets: (outputs - targets).abs().max()},
        until=200.0,
    )
    assert result.rows[-1]["loss"] < 1e-2 < result.rows[0]["loss"]
    assert "worst" in result.rows[0]
    assert "accuracy" not in result.rows[0]


def test_clients_without_data_are_refused() -> None:
    empty = (torch.empty(0, 2), torch.empty(0))
    with pytest.raises(ValueError, match="client 1 has 0 inputs and 0 targets"):
        Supervised(nn.Linear(2, 2), [(torch.ones(1, 2), torch.zeros(1)), empty])


@pytest.mark.parametrize("deal", [partition.iid, partition.by_class])
def test_partitions_deal_out_every_example_once(deal: type) -> None:
    data = (torch.arange(103), torch.arange(103) % 10)
    hands = deal(data, 7)
    assert len(hands) == 7
    assert sorted(torch.cat([x for x, _ in hands]).tolist()) == list(range(103))
    assert all(torch.equal(x % 10, y) for x, y in hands)


def test_partition_by_class_gives_clients_few_classes() -> None:
    data = (torch.arange(1000), torch.arange(1000) % 10)
    assert all(len(y.unique()) <= 2 for _, y in partition.by_class(data, 10))
    assert all(len(y.unique()) == 10 for _, y in partition.iid(data, 10))


def test_more_clients_than_examples_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot cut 3 examples into 4 parts"):
        partition.iid((torch.arange(3), torch.arange(3)), 4)


def test_digits_are_real_and_split_without_overlap() -> None:
    data = digits()
    assert [len(part[1]) for part in data] == [1077, 360, 360]
    images = torch.cat([part[0] for part in data])
    assert images.shape == (1797, 64)
    assert (images.min(), images.max()) == (0, 1)
    classes = torch.cat([part[1] for part in data]).bincount()
    assert classes.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_quadratic_knows_its_minimum_smoothness_and_noise() -> None:
    task = Quadratic(torch.tensor([1.0, 3.0]), torch.tensor([[0.0, 0.0], [2.0, 4.0]]), noise=0.5)
    assert task.minimum.tolist() == [1.0, 2.0]
    assert task.smoothness == 3.0
    at_minimum = [task.gradient(task.minimum, torch.empty(0), task.batch(i, 0))[0] for i in range(2)]
    assert task.evaluate(task.minimum, torch.empty(0)) == {"loss": 0.0, "distance": 0.0}
    noise = torch.stack([task.batch(0, step)[1] for step in range(4000)])
    assert noise.square().sum(dim=-1).mean().item() == pytest.approx(0.25, rel=0.06)
    exact = task.curvature * (task.minimum - task.centers)
    torch.testing.assert_close(torch.stack(at_minimum) - exact, torch.stack([task.batch(i, 0)[1] for i in range(2)]))


def test_batches_may_be_tuples_or_dictionaries() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return self.layer(left + right)

    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = (x.sum(dim=1) > 0).long()
    shapes: list[Callable[[torch.Tensor], object]] = [
        lambda rows: (x[rows], x[rows]),
        lambda rows: {"right": x[rows], "left": x[rows]},
    ]
    losses = []
    for shape in shapes:
        torch.manual_seed(0)
        hands = [(shape(rows), y[rows]) for rows in torch.arange(40).split(8)]
        result = quafl.simulate(model=Sum(), clients=hands, algorithm=quafl.QuAFL(sampled=2), until=100.0)
        losses.append([row["loss"] for row in result.rows])
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


class ModelOutput(OrderedDict[str, Any]):
    """As Hugging Face's: a dictionary whose entries are attributes, too; what is None is no entry."""

    def __init__(self, logits: torch.Tensor, cache: object = None, hidden: object = None, mean: object = None) -> None:
        super().__init__()
        for name, value in (("logits", logits), ("cache", cache), ("hidden", hidden), ("mean", mean)):
            if value is not None:
                self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        setattr(self, name, value)

    def __reduce__(self) -> Any:
        return type(self), tuple(self.get(name) for name in ("logits", "cache", "hidden", "mean"))


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


class Rich(nn.Module):
    """Gives more than logits."""

    def __init__(self, made: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.made = nn.Linear(3, 2), made

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.inner(x)
        return self.made(logits, (x, logits))


@pytest.mark.parametrize("by_client", [False, True])
@pytest.mark.parametrize(
    "made",
    [Pair, lambda logits, hidden: ModelOutput(logits, cache=object(), hidden=hidden, mean=logits.mean())],
    ids=["named tuple", "model output"],
)
def test_metrics_see_what_the_model_returned_however_many_examples_there_are(
    made: Callable[..., Any], by_client: bool
) -> None:
    torch.manual_seed(0)
    module = Rich(made)
    kinds = set()

    def hits(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        kinds.add(type(outputs))
        assert outputs.hidden[1].shape == outputs.logits.shape
        return accuracy(outputs.logits, targets)

    clients = [(torch.randn(700, 3), torch.randint(2, (700,))), (torch.randn(400, 3), torch.randint(2, (400,)))]
    for own in clients, clients[1:]:  # more than is evaluated at a time, and less
        task = Supervised(
            module,
            own,
            loss=lambda outputs, targets: functional.cross_entropy(outputs.logits, targets),
            metrics={"hits": hits},
        )
        score = task.judge(0, *task.initial()) if by_client else task.evaluate(*task.initial())
        assert score is not None
        inputs, targets = own[0] if by_client else (torch.cat(part) for part in zip(*own, strict=True))
        assert score["hits"] == pytest.approx(float(accuracy(module.inner(inputs), targets)))
    assert kinds == {type(made(torch.zeros(1, 2), ()))}


def test_parts_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"client 0: the parts of a dataset have \[2, 3\] examples"):
        Supervised(nn.Linear(2, 2), [((torch.ones(3, 2), torch.ones(2, 2)), torch.zeros(3))])


def test_training_loss_is_of_a_sample_that_never_changes() -> None:
    data = digits()
    tasks = [Supervised(nn.Linear(64, 10), partition.iid(data.train, 5), test=data.test, seed=seed) for seed in (0, 1)]
    model, buffers = tasks[0].initial()
    first, second = (task.evaluate(model, buffers) for task in tasks)
    assert first["train_loss"] == second["train_loss"]
    whole = functional.cross_entropy(tasks[0].flat.at(model, buffers)(data.train[0]), data.train[1])
    assert first["train_loss"] == pytest.approx(whole.item(), abs=1e-5)  # fewer examples than the sample may have
    assert first["train_loss"] != first["loss"]


def test_evaluation_in_chunks_equals_evaluation_in_one_go() -> None:
    data = digits()
    task = Supervised(nn.Linear(64, 10), [data.train], test=data.train)
    model, buffers = task.initial()
    score = task.evaluate(model, buffers)
    outputs = task.flat.at(model, buffers)(data.train[0])
    assert score["loss"] == pytest.approx(functional.cross_entropy(outputs, data.train[1]).item(), rel=1e-5)


def test_exactly_the_target_is_at_the_target() -> None:
    """In float32, 8500 of 10000 would be less than 0.85 on a GPU, and 7000 less than 0.7 everywhere."""
    outputs = torch.tensor([1.0, 0.0]).expand(10_000, 2)
    for right in 7000, 8500, 9000:
        targets = (torch.arange(10_000) >= right).long()
        assert float(accuracy(outputs, targets)) == right / 10_000


def by_clients(task: Supervised, model: Model, buffers: Buffers, *, lower_is_better: bool = False) -> Score:
    scores = [task.judge(client, model, buffers) for client in range(5)]
    return across([score for score in scores if score is not None], lower_is_better=lower_is_better)


def test_accuracy_on_own_data_and_by_class_is_given_on_request() -> None:
    data = digits()
    hands = partition.by_class(data.train, 5)
    task = Supervised(nn.Linear(64, 10), hands, test=data.test, per_class=True)
    score = {**task.evaluate(*task.initial()), **by_clients(task, *task.initial())}
    module = task.flat.at(*task.initial())
    own = sorted(float((module(x).argmax(dim=-1) == y).float().mean()) for x, y in hands)
    assert score["accuracy_clients_worst"] == pytest.approx(own[0])
    assert score["accuracy_clients_mean"] == pytest.approx(sum(own) / 5)
    assert own[0] <= score["accuracy_clients_p10"] <= own[1]
    right = module(data.test[0]).argmax(dim=-1) == data.test[1]
    assert score["accuracy_class_3"] == pytest.approx(float(right[data.test[1] == 3].float().mean()))
    numbers = [(torch.ones(3, 2), torch.ones(3, 1))]
    other = Supervised(
        nn.Linear(2, 1), numbers, loss=functional.mse_loss, metrics={"mae": functional.l1_loss}, per_class=True
    )
    with pytest.raises(ValueError, match="per_class needs targets that are class numbers"):
        other.evaluate(*other.initial())


def test_the_worst_client_is_the_one_with_the_largest_error() -> None:
    hands = [(torch.ones(3, 1), torch.full((3, 1), float(k))) for k in range(5)]
    task = Supervised(
        nn.Linear(1, 1),
        hands,
        loss=functional.mse_loss,
        metrics={"mae": functional.l1_loss},
    )
    score = by_clients(task, torch.zeros(2), torch.empty(0), lower_is_better=True)
    assert (score["mae_clients_worst"], score["mae_clients_mean"]) == (4.0, 2.0)
    assert score["mae_clients_p10"] == pytest.approx(3.6)


def test_a_lone_example_trains_a_network_with_batch_norm() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    task = Supervised(module, [(torch.ones(1, 2), torch.zeros(1, dtype=torch.int64))], batch_size=8)
    gradient, _ = task.gradient(*task.initial(), task.batch(0, 0))
    assert gradient.isfinite().all()


def test_names_that_rows_have_already_are_refused() -> None:
    for name in "loss", "train_loss":
        with pytest.raises(ValueError, match="choose another name"):
            Supervised(nn.Linear(1, 1), [(torch.ones(2, 1), torch.ones(2, 1))], metrics={name: functional.l1_loss})


def test_networks_have_the_sizes_they_should_and_are_drawn_from_their_seed() -> None:
    sizes = {models.cnn: 1_475_338, models.resnet20: 269_722, models.resnet18: 11_177_538}
    for make, size in sizes.items():
        first, second, other = (torch.cat([p.flatten() for p in make(seed=s).parameters()]) for s in (1, 1, 2))
        assert len(first) == size
        assert torch.equal(first, second)
        assert not torch.equal(first, other)
    pixels = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert models.resnet20()(pixels).shape == (2, 10)
    assert not [name for name, _ in models.resnet20()[0].named_buffers()]  # constants do not travel
