"""Randomness that is counted: the same everywhere, and random enough."""

import pytest
import torch
from torch import nn

from quafl.core.counter import Draws, key_from, permuted, subkey
from quafl.tasks.dropout import count_dropout

KEYS = subkey(key_from(20240515), torch.arange(4000))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 50, 200, 2500])
def test_an_order_has_every_place_once(size: int) -> None:
    keys = KEYS[: max(2, 4000 // size)].unsqueeze(-2)
    orders = permuted(keys, torch.arange(size), torch.tensor(size))
    assert torch.equal(orders.sort(dim=-1).values, torch.arange(size).expand_as(orders))
    assert torch.equal(orders, permuted(keys, torch.arange(size), torch.tensor(size), blind=True))


def test_every_example_comes_to_every_place_equally_often() -> None:
    orders = permuted(KEYS.unsqueeze(-2), torch.arange(10), torch.tensor(10))
    often = torch.stack([(orders == example).sum(dim=0) for example in range(10)]).double()
    assert ((often - 400) / (400 * 0.9) ** 0.5).square().sum() < 150  # χ² with 81 degrees of freedom


def test_sizes_may_differ_from_client_to_client() -> None:
    sizes = torch.tensor([3, 50, 7])
    together = permuted(KEYS[:3].unsqueeze(-2), torch.arange(3), sizes.unsqueeze(-1))
    for row, size in enumerate(sizes):
        assert torch.equal(together[row], permuted(KEYS[row], torch.arange(3), size))


def test_draws_are_uniform_and_independent_from_call_to_call_and_key_to_key() -> None:
    first, second = Draws(KEYS[0]), Draws(KEYS[1])
    samples = torch.stack([first.uniform(100, 400).ravel(), first.uniform(40_000), second.uniform(40_000)]).double()
    assert (samples >= 0).all()
    assert (samples < 1).all()
    assert ((samples.mean(dim=1) - 0.5).abs() < 4 / (12 * 40_000) ** 0.5).all()
    assert (torch.corrcoef(samples) - torch.eye(3)).abs().max() < 4 / 40_000**0.5


def test_the_same_key_draws_the_same_whatever_was_drawn_elsewhere() -> None:
    torch.manual_seed(1)
    one = Draws(KEYS[5]).integers(9, 30)
    torch.rand(7)
    assert torch.equal(one, Draws(KEYS[5]).integers(9, 30))
    assert set(Draws(KEYS[5]).integers(9, 500).tolist()) == set(range(9))
    assert torch.equal(
        torch.rand(3, generator=Draws(KEYS[5]).generator()), torch.rand(3, generator=Draws(KEYS[5]).generator())
    )


def test_counted_dropout_drops_as_many_as_torchs_and_keeps_the_mean() -> None:
    module = nn.Sequential(nn.Dropout(0.3), nn.Sequential(nn.Dropout2d(0.5)))
    first, second = (layer for _, layer in count_dropout(module))
    for layer in first, second:
        layer.key.copy_(KEYS[0])
    x = torch.ones(100, 50, 4, 4)
    once, again = first(x), first(x)
    assert (once == 0).float().mean() == pytest.approx(0.3, abs=0.01)
    assert once.mean() == pytest.approx(1.0, abs=0.01)
    assert not torch.equal(once, again)  # called twice in a step, it draws twice
    channels = second(x).flatten(2)
    assert ((channels == 0).all(dim=-1) | (channels == 2).all(dim=-1)).all()  # whole channels
    module.eval()
    assert torch.equal(module(x), x)


def test_channel_dropout_takes_the_axes_that_torch_takes() -> None:
    (_, layer), *_ = count_dropout(nn.Sequential(nn.Dropout2d(0.5)))
    layer.key.copy_(KEYS[0])
    rows = layer(torch.ones(50, 40, 7))
    whole = (rows == 0).all(dim=-1)
    assert whole.any()
    assert not whole.all(dim=-1).any()  # channels of examples, not examples


def test_a_layer_in_two_places_is_one_layer() -> None:
    shared = nn.Dropout(0.5)
    places = count_dropout(nn.Sequential(shared, nn.ReLU(), shared))
    assert [name for name, _ in places] == ["0", "2"]
    assert places[0][1] is places[1][1]
