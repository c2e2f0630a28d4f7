"""Local optimizers do what torch's do, for one client or many, and schedules follow the server's round."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from worlds import world

from quafl.core import FedAvg, QuAFL, adam, adamw, cosine, linear, momentum, sgd
from quafl.core.client import local_step, newcomers
from quafl.core.quafl import Client
from quafl.core.seams import Optimizer
from quafl.tasks import Quadratic

PAIRS: dict[str, tuple[Optimizer, Callable[[list[torch.Tensor]], torch.optim.Optimizer]]] = {
    "sgd": (sgd(0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
    "momentum": (momentum(0.1, 0.8), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8)),
    "nesterov": (
        momentum(0.1, 0.8, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
    ),
    "adam": (adam(0.05), lambda p: torch.optim.Adam(p, lr=0.05)),
    "adamw": (adamw(0.05), lambda p: torch.optim.AdamW(p, lr=0.05)),
    "adamw, more decay": (
        adamw(0.05, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.3),
    ),
    "sgd with decay": (sgd(0.3, weight_decay=0.2), lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.2)),
    "momentum with decay": (
        momentum(0.1, 0.8, nesterov=True, weight_decay=0.2),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.2),
    ),
    "adam with decay": (adam(0.05, weight_decay=0.2), lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.2)),
}


@pytest.mark.parametrize("rows", [(), (3,)], ids=["one client", "three clients"])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS.keys())
def test_moves_like_torchs_own(
    ours: Optimizer, theirs: Callable[[list[torch.Tensor]], torch.optim.Optimizer], rows: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*rows, 5, generator=generator)
    parameter = x.clone().requires_grad_()
    reference, state = theirs([parameter]), ours.init(x)
    for _ in range(20):
        gradient = torch.randn(*rows, 5, generator=generator)
        displacement, state = ours.update(gradient, state, x)
        displacement = ours.rate * displacement
        x = x - displacement
        parameter.grad = gradient
        reference.step()
        torch.testing.assert_close(x, parameter.detach())


CLIPPED: dict[str, tuple[Optimizer, Callable[[list[torch.Tensor]], torch.optim.Optimizer]]] = {
    "sgd": (sgd(0.3, weight_decay=0.2, clip=1.5), lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.2)),
    "momentum": (momentum(0.1, 0.8, clip=1.5), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8)),
    "adam": (adam(0.05, clip=1.5), lambda p: torch.optim.Adam(p, lr=0.05)),
    "adamw": (adamw(0.05, clip=1.5), lambda p: torch.optim.AdamW(p, lr=0.05)),
}


@pytest.mark.parametrize(("ours", "theirs"), CLIPPED.values(), ids=CLIPPED.keys())
def test_gradients_are_clipped_as_torch_does_before_a_step_each_client_by_its_own_norm(
    ours: Optimizer, theirs: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
) -> None:
    generator = torch.Generator().manual_seed(0)
    together = torch.randn(3, 5, generator=generator)
    alone = [row.clone().requires_grad_() for row in together]
    references, state = [theirs([row]) for row in alone], ours.init(together)
    long = []
    for _ in range(20):
        gradient = torch.randn(3, 5, generator=generator)
        displacement, state = ours.update(gradient, state, together)
        together = together - ours.rate * displacement
        for row, mine, reference in zip(alone, gradient, references, strict=True):
            row.grad = mine.clone()
            long.append(float(torch.nn.utils.clip_grad_norm_([row], 1.5)) > 1.5)
            reference.step()
        torch.testing.assert_close(together, torch.stack(alone).detach())
    assert 0 < sum(long) < len(long)


def test_a_gradient_that_is_short_enough_or_nothing_is_not_touched() -> None:
    gradient, model = torch.tensor([[0.3, 0.4], [0.0, 0.0]]), torch.ones(2, 2)
    assert sgd(1.0, clip=0.5).update(gradient, (), model)[0].equal(gradient)


def test_the_schedule_is_a_factor_of_adamws_decay_too() -> None:
    task = Quadratic(torch.ones(1), torch.zeros(1, 1), start=torch.ones(1))
    client = newcomers(FedAvg(), *task.initial(), torch.ones(()))
    halved = adamw(0.1, weight_decay=0.5, schedule=linear([(0, 0.5)]))
    client = replace(client, optimizer=halved.init(client.base))
    assert local_step(client, task, task.batch(0, 0), halved).progress.item() == pytest.approx(
        0.5 * 0.1 * (1 + 0.5), rel=1e-4
    )


def test_updates_are_pure() -> None:
    for optimizer, _ in PAIRS.values():
        model = torch.arange(4.0)
        gradient, state = torch.ones(4), optimizer.init(model)
        before = [part.clone() for part in state]
        first, _ = optimizer.update(gradient, state, model)
        second, _ = optimizer.update(gradient, state, model)
        assert torch.equal(first, second)
        assert all(torch.equal(now, then) for now, then in zip(state, before, strict=True))


def test_schedules_are_lines_or_half_a_cosine() -> None:
    rounds = torch.tensor([0, 5, 10, 30, 50, 99])
    warm = linear([(0, 0.0), (10, 1.0), (50, 0.2)])
    torch.testing.assert_close(warm(rounds), torch.tensor([0.0, 0.5, 1.0, 0.6, 0.2, 0.2]))
    torch.testing.assert_close(
        cosine(60, floor=0.1)(torch.tensor([0, 30, 60, 90])), torch.tensor([1.0, 0.55, 0.1, 0.1])
    )
    for wrong in [], [(5, 1.0), (5, 2.0)], [(0, -1.0)]:
        with pytest.raises(ValueError, match="schedule"):
            linear(wrong)


def test_a_client_steps_by_the_schedule_at_the_round_it_heard_last() -> None:
    task = Quadratic(torch.ones(1), torch.zeros(1, 1), start=torch.ones(1))
    client = newcomers(FedAvg(), *task.initial(), torch.ones(()))
    optimizer = sgd(0.5, linear([(0, 1.0), (10, 0.0)]))
    for heard, progress in (0, 0.5), (5, 0.25), (10, 0.0):
        stepped = local_step(replace(client, round=torch.tensor(heard)), task, task.batch(0, 0), optimizer)
        assert stepped.progress.item() == pytest.approx(progress)
    w = world(task, 1, FedAvg(1, 1), optimizer=optimizer)
    models = [state.model.item() for state in w.rounds(3)]
    assert models == pytest.approx([0.5, 0.5 * 0.55, 0.5 * 0.55 * 0.6])


def test_optimizer_state_stays_with_the_client_unless_it_is_to_begin_anew() -> None:
    task = Quadratic(torch.ones(1), torch.zeros(1, 1), start=torch.ones(1))
    kept = world(task, 1, FedAvg(1, 1), optimizer=momentum(0.1, 0.5)).rounds(2)[-1].model.item()
    fresh = world(task, 1, FedAvg(1, 1), optimizer=momentum(0.1, 0.5, fresh=True)).rounds(2)[-1].model.item()
    assert kept == pytest.approx(0.9 - 0.1 * (0.9 + 0.5))
    assert fresh == pytest.approx(0.9 - 0.1 * 0.9)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: sgd(0.0),
        lambda: adam(-1.0),
        lambda: momentum(0.1, 1.0),
        lambda: adamw(0.1, weight_decay=-0.1),
        lambda: sgd(0.1, weight_decay=float("inf")),
        lambda: adam(0.1, clip=0.0),
    ],
)
def test_rates_that_are_none_are_refused(wrong: Callable[[], Optimizer]) -> None:
    with pytest.raises(ValueError, match=r"must (not )?be"):
        wrong()


def test_rows_survive_as_plain_trees() -> None:
    plain = newcomers(QuAFL(), torch.arange(3.0), torch.ones(2), torch.ones(2))
    client = replace(plain, optimizer=adam(0.1).init(plain.base))
    again = Client.from_tree(client.tree())
    assert torch.equal(again.base, client.base)
    assert torch.equal(again.contacts, client.contacts)
    assert len(again.optimizer) == 3
