"""What people give, in whatever form they have it; and a sentence for what cannot be used."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import quafl
from quafl.tasks import Supervised, partition

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3
PAIR = (X, Y)


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def scores(clients: list[Any], model: nn.Module | None = None, **more: Any) -> dict[str, float]:
    task = Supervised(model or module(), clients, **more)
    return dict(task.evaluate(*task.initial()))


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (X.numpy(), Y.numpy()),
        (X.double(), Y.int()),
        (X.double().numpy(), Y.numpy().astype(np.uint16)),
        (X.tolist(), Y.tolist()),
        (list(X), list(Y)),
        ([row.numpy() for row in X], Y.to(torch.uint8)),
    ],
)
def test_numbers_are_taken_in_whatever_form_they_come(inputs: Any, targets: Any) -> None:
    assert scores([(inputs, targets)]) == scores([PAIR])
    assert scores([PAIR], test=(inputs, targets)) == scores([PAIR])
    dealt = partition.by_class((inputs, targets), 3)
    assert all(map(torch.equal, *(sum(hands, ()) for hands in (dealt, partition.by_class(PAIR, 3)))))


def test_a_float64_model_with_float64_data_is_trained_in_float32_and_given_back_in_its_own() -> None:
    model, clients = module().double(), [(X.double(), Y)]
    result = quafl.simulate(model=model, clients=clients, algorithm=quafl.QuAFL(sampled=1), until=10.0)
    assert result.model.weight.dtype == torch.float64
    assert not torch.equal(result.model.weight, model.weight)


def test_arrays_that_must_not_be_written_to_are_copied() -> None:
    frozen = X.numpy().copy()
    frozen.flags.writeable = False
    assert scores([(frozen, Y)]) == scores([PAIR])


def test_octets_are_scaled_for_a_model_that_cannot_take_them_and_left_to_one_that_can() -> None:
    class Octets(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype == torch.uint8
            return super().forward(x / 255)

    pixels = torch.randint(256, (12, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    plain = scores([(pixels, Y)])
    assert plain == scores([(pixels / 255, Y)])
    own = Octets(4, 3)
    own.load_state_dict(module().state_dict())
    assert scores([(pixels, Y)], own) == plain


def test_numbers_of_no_class_have_no_accuracy() -> None:
    assert "accuracy" not in scores([(X, X[:, :3])], loss=functional.mse_loss)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, dtype=torch.complex64))


def frozen() -> nn.Module:
    return module().requires_grad_(False)


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"codec": None}, TypeError, r"codec is None, must be a codec, such as quafl.Lattice\(bits=4\)"),
    ({"codec": quafl.Lattice}, TypeError, "codec is the class Lattice"),
    ({"algorithm": "quafl"}, TypeError, r"algorithm is 'quafl', must be an algorithm, such as quafl.QuAFL\("),
    ({"algorithm": quafl.QuAFL}, TypeError, "algorithm is the class QuAFL"),
    ({"optimizer": torch.optim.SGD}, TypeError, "optimizer is the class SGD, must be one of quafl.sgd"),
    ({"optimizer": torch.optim.Adam(module().parameters())}, TypeError, "optimizer is a torch.optim.adam.Adam"),
    ({"optimizer": quafl.sgd}, TypeError, "optimizer is the function sgd"),
    (
        {"optimizer": quafl.sgd(0.1)._replace(update=lambda gradient, state: (gradient, state))},
        TypeError,
        r"the optimizer's update takes \(gradient, state\), must take \(gradient, state, model\)",
    ),
    ({"world": 0.5}, TypeError, "world is 0.5, must be a world"),
    ({"model": nn.Linear}, TypeError, "the model is the class Linear, must be a torch.nn.Module; give an instance"),
    ({"model": lambda x: x}, TypeError, "the model is a function, must be a torch.nn.Module"),
    ({"model": nn.Flatten()}, ValueError, "the model has 0 parameters, of which none can be trained"),
    ({"model": frozen()}, ValueError, "the model has 15 parameters, of which none can be trained"),
    ({"model": Complex()}, ValueError, "parameter w is complex64, must be real"),
    ({"model": nn.LazyLinear(3)}, ValueError, "parameter weight has no shape yet; call the model once"),
    ({"model": nn.Linear(5, 3)}, ValueError, r"the model cannot take inputs that are float32 \(4,\) each"),
    ({"clients": None}, TypeError, r"clients is None, must be a list, with a pair \(inputs, targets\)"),
    ({"clients": {"a": PAIR}}, TypeError, "clients is a dictionary"),
    ({"clients": PAIR}, TypeError, r"client 0 is a Tensor, must be a pair \(inputs, targets\)"),
    ({"clients": [PAIR, (X, Y, Y)]}, TypeError, "client 1 is 3 things, must be a pair"),
    ({"clients": [PAIR, (["a", "b"], Y[:2])]}, TypeError, "client 1's inputs are a list that is no tensor"),
    ({"clients": [PAIR, (X[:, :3], Y)]}, ValueError, r"client 1 has inputs that are float32 \(3,\)"),
    ({"clients": [PAIR, (X, Y.float())]}, ValueError, "client 1 has inputs .* and targets that are float32"),
    ({"clients": [(X, Y.float())]}, ValueError, r"the targets are float32 \(\) each.*give targets.long\(\)"),
    ({"clients": [(X, functional.one_hot(Y))]}, ValueError, r"the targets are int64 \(3,\) each.*targets.argmax"),
    ({"clients": [PAIR, (X[:5], Y[:5]), (X, Y + 1)]}, ValueError, "client 2 has the label 3, the model has 3 outputs"),
    ({"test": (X, Y - 1)}, ValueError, "the test data has the label -1"),
    ({"test": (X[:0], Y[:0])}, ValueError, "the test data has 0 inputs and 0 targets"),
    ({"test": (X.byte(), torch.zeros(3))}, ValueError, "the test data has 12 inputs and 3 targets"),
    ({"loss": nn.CrossEntropyLoss(reduction="none")}, ValueError, r"shape \(2,\), must give one number; take its mean"),
    ({"loss": nn.CrossEntropyLoss}, TypeError, "the loss is the class CrossEntropyLoss"),
    ({"loss": lambda o, y: (o.argmax(1) == y).float().mean()}, ValueError, "the loss does not depend on the model's"),
    ({"loss": lambda o, y: 1.0}, TypeError, "the loss gives a float, must give a tensor"),
    ({"loss": functional.mse_loss}, ValueError, "the loss cannot be computed from outputs that are float32"),
    ({"metrics": {"each": lambda o, y: o}}, ValueError, r"the metric 'each' gives a tensor of shape \(24, 3\)"),
    ({"batch_size": 2.5}, ValueError, "batch_size is 2.5, must be a whole number"),
    ({"device": "cuda:99"}, ValueError, "device is 'cuda:99', must be one that PyTorch can use here"),
]


@pytest.mark.parametrize(("given", "kind", "sentence"), MISTAKES, ids=[sentence[:40] for _, _, sentence in MISTAKES])
@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:Lazy modules")
def test_what_cannot_be_used_is_said_in_a_sentence(given: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    usual = {"model": module(), "clients": [PAIR, PAIR], "algorithm": quafl.QuAFL(sampled=1), "until": 1.0}
    with pytest.raises(kind, match=sentence):
        quafl.simulate(**(usual | given))


@pytest.mark.parametrize(
    "make", [lambda: quafl.QuAFL(sampled=True), lambda: quafl.sgd("0.1"), lambda: quafl.QuAFL(patience=None)]
)
def test_settings_that_are_no_numbers_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"must be a (whole|positive)? ?number"):
        make()
