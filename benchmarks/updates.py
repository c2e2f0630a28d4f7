"""Real updates to try codecs on: what a client sends after some local steps, and what both ends have.

A convolutional network on Fashion-MNIST, ResNet20 on CIFAR-10, and the adapters (LoRA) of a small transformer that
predicts the next character of this project's own documentation.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from quafl.tasks import cifar10, fashion_mnist, models

DOCS = Path(__file__).parents[1]
Batches = Iterator[tuple[Tensor, Tensor]]


class Update(NamedTuple):
    """A client's model after its local steps, and the server's that it began from."""

    name: str
    mine: Tensor
    common: Tensor


def gaussian(dim: int = 1_000_000) -> Update:
    """What theory speaks of."""
    rng = torch.Generator().manual_seed(0)
    common = torch.randn(dim, generator=rng)
    return Update("Gaussian", common + 0.01 * torch.randn(dim, generator=rng), common)


def cnn() -> Update:
    (inputs, labels), model = fashion_mnist().train, models.cnn(seed=0, norm="group")
    return _trained("CNN", model, _batches(inputs.float(), labels, 64), 60, 10, 0.1)


def resnet20() -> Update:
    (inputs, labels), model = cifar10().train, models.resnet20(seed=0, norm="group")
    return _trained("ResNet20", model, _batches(inputs.float(), labels, 32), 60, 10, 0.1)


def lora() -> Update:
    """The adapters alone travel; the transformer beneath them has been trained on the same text before."""
    torch.manual_seed(0)
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("docs/**/*.md")))
    known = {character: place for place, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([known[character] for character in text])
    model = Transformer(len(known))
    batches = _windows(tokens, 16, 64)
    _descend(model, batches, 100, 0.002, torch.optim.Adam)
    adapters = model.adapt(rank=8)
    return _trained("LoRA", model, batches, 60, 10, 0.5, adapters)


class Transformer(nn.Module):
    """Two layers, 64 wide: enough for adapters to be real ones."""

    def __init__(self, characters: int, width: int = 64) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(64, width)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(width, 4, 256, 0.0, batch_first=True) for _ in "ab"])
        self.head = nn.Linear(width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.characters(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x).transpose(1, 2)

    def adapt(self, rank: int) -> list[nn.Parameter]:
        """Low-rank adapters beside the feed-forward layers; everything else stays as it is."""
        self.requires_grad_(False)
        found = []
        for layer in self.layers:
            for name in "linear1", "linear2":
                adapted = Adapted(getattr(layer, name), rank)
                setattr(layer, name, adapted)
                found += [adapted.inner, adapted.outer]
        return found


class Adapted(nn.Module):
    """W x + B A x (Hu et al., ICLR 2022)."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.inner = nn.Parameter(torch.randn(rank, linear.in_features) * linear.in_features**-0.5)
        self.outer = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.weight, self.bias = linear.weight, linear.bias  # looked at by the layer around it

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.linear(x) + x @ self.inner.T @ self.outer.T
        return added


def _trained(
    name: str,
    model: nn.Module,
    batches: Batches,
    before: int,
    steps: int,
    lr: float,
    parameters: list[nn.Parameter] | None = None,
) -> Update:
    """The model after some steps, and after some more."""
    torch.manual_seed(0)
    trained = parameters or [one for one in model.parameters() if one.requires_grad]
    _descend(model, batches, before, lr, torch.optim.SGD)
    common = nn.utils.parameters_to_vector(trained).detach().clone()
    _descend(model, batches, steps, lr, torch.optim.SGD)
    return Update(name, nn.utils.parameters_to_vector(trained).detach().clone(), common)


def _descend(
    model: nn.Module, batches: Batches, steps: int, lr: float, kind: Callable[..., torch.optim.Optimizer]
) -> None:
    optimizer = kind([one for one in model.parameters() if one.requires_grad], lr=lr)
    for _ in range(steps):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def _batches(inputs: Tensor, labels: Tensor, size: int) -> Batches:
    rng = torch.Generator().manual_seed(0)
    while True:
        rows = torch.randint(len(labels), (size,), generator=rng)
        yield inputs[rows], labels[rows].long()


def _windows(tokens: Tensor, size: int, length: int) -> Batches:
    rng = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(tokens) - length, (size, 1), generator=rng)
        window = tokens[starts + torch.arange(length + 1)]
        yield window[:, :-1], window[:, 1:]
