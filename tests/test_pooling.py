"""Max pooling on CPUs is torch's: the same numbers, and gradients in the same places."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import quafl
from quafl.tasks import flat as flats
from quafl.tasks import models, pooling
from quafl.tasks.flat import Flat
from quafl.tasks.pooling import Halving, halve_faster

SHAPES = [(2, 3, 6, 8), (1, 1, 7, 9), (3, 2, 2, 2), (2, 2, 5, 2), (0, 3, 4, 4), (2, 1, 1, 4)]


@pytest.fixture(autouse=True)
def _however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "FEW", 0)


def both(pool: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What it gives, and the gradient."""
    x = x.clone().requires_grad_()
    result = pool(x)
    (result * (torch.randn(result.shape, generator=torch.Generator().manual_seed(1)))).sum().backward()
    assert x.grad is not None
    return result.detach(), x.grad


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Few different ones: many ties."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("last", [False, True])
def test_it_gives_what_torch_gives_also_in_ties(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> None:
    x = numbers(shape, dtype)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    theirs_pool, mine_pool = nn.MaxPool2d(2), Halving(2)
    if min(shape[2:]) < 2:
        for pool in theirs_pool, mine_pool:
            with pytest.raises(RuntimeError, match="Output size is too small"):
                pool(x)
        return
    for mine, theirs in zip(both(mine_pool, x), both(theirs_pool, x), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()
    with torch.no_grad():
        assert torch.equal(mine_pool(x), theirs_pool(x))


def test_what_is_not_a_number_stays_so_and_is_where_torch_has_it() -> None:
    x = numbers((1, 2, 4, 6), torch.float32)
    x[0, 0, 0, 1] = x[0, 1, 2:, 4:] = torch.nan
    for mine, theirs in zip(both(Halving(2), x), both(nn.MaxPool2d(2), x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_it_can_be_transformed() -> None:
    def value(pool: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: functional_call(pool, {}, (x,)).square().sum()

    x = torch.randn(3, 2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(vmap(grad(value(Halving(2))))(x), vmap(grad(value(nn.MaxPool2d(2))))(x))


@pytest.mark.parametrize(
    ("layer", "taken"),
    [
        (nn.MaxPool2d(2), True),
        (nn.MaxPool2d((2, 2), stride=2), True),
        (nn.MaxPool2d(2, 1), False),
        (nn.MaxPool2d(3, 2), False),
        (nn.MaxPool2d(2, padding=1), False),
        (nn.MaxPool2d(2, ceil_mode=True), False),
        (nn.MaxPool2d(2, return_indices=True), False),
        (nn.AvgPool2d(2), False),
    ],
)
def test_plain_layers_are_taken_and_others_left(layer: nn.Module, taken: bool) -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), layer)
    halve_faster(module)
    assert isinstance(module[1], Halving) == taken


def test_the_callers_module_is_left_alone_and_hooks_are_called() -> None:
    module, seen = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2)), []

    def see(*_: Any) -> None:
        seen.append(True)

    module[1].register_forward_hook(see)
    flat = Flat(module)
    model, buffers = flat.initial()
    flat.at(model, buffers)(torch.rand(1, 1, 6, 6))
    assert seen
    assert type(module[1]) is type(flat.module(model, buffers)[1]) is nn.MaxPool2d  # type: ignore[index]  # Sequential


def test_a_run_is_the_same_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    clients = [(torch.rand(8, 1, 28, 28, generator=rng), torch.arange(8)) for _ in range(3)]
    algorithm = quafl.QuAFL(sampled=2)

    def run() -> Any:
        result = quafl.simulate(
            model=models.cnn(), clients=clients, test=clients[0], algorithm=algorithm, batch_size=4, until=10.0
        )
        return result.rows, list(result.model.state_dict().values())

    (rows, model), left = run(), list[nn.Module]()
    monkeypatch.setattr(flats, "halve_faster", left.append)
    their_rows, their_model = run()
    assert left
    assert rows == their_rows
    assert rows[-1]["local_steps"] > 0
    assert all(map(torch.equal, model, their_model))
