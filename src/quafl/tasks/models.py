"""Networks of the experiments, each initialised from a seed of its own. All take pixels as they are stored (0..255).

Those with convolutions are normalised by batch, as in the papers, or by groups of channels of each picture. Group norm
has no running statistics, which in a federation are an average over clients that may see different classes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional


class Pixels(nn.Module):
    """Octets to numbers of mean 0 and variance 1: what a network sees is then the same wherever it is used."""

    def __init__(self, mean: Sequence[float], deviation: Sequence[float]) -> None:
        super().__init__()
        self.shift = 255 * torch.tensor(mean).view(-1, 1, 1)  # no buffers: constants do not travel
        self.scale = 1 / (255 * torch.tensor(deviation).view(-1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """(x/255 − mean)/deviation, channel by channel."""
        return (pixels - self.shift) * self.scale

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """The constants go where the module goes."""
        self.shift, self.scale = change(self.shift), change(self.scale)
        super()._apply(change, recurse)  # type: ignore[no-untyped-call]  # torch has no types for it
        return self


MNIST = partial(Pixels, [0.1307], [0.3081])
FASHION = partial(Pixels, [0.2860], [0.3530])
CIFAR = partial(Pixels, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])
CIFAR_100 = partial(Pixels, [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762])
OCTETS = partial(Pixels, [0.0], [1.0])  # 0..1, nothing else
FACES = partial(Pixels, [0.5, 0.5, 0.5], [0.5, 0.5, 0.5])


Norm: TypeAlias = Literal["batch", "group"]
GROUPS = 8  # of channels


def _norm(kind: Norm, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(GROUPS, channels)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """What is initialised inside is drawn from the seed; the global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def mlp(inputs: int, hidden: int, outputs: int, *, seed: int = 0, pixels: nn.Module | None = None) -> nn.Module:
    """Two layers with a ReLU between."""
    with _seeded(seed):
        layers = nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    return nn.Sequential(*layers) if pixels is None else nn.Sequential(pixels, nn.Flatten(), *layers)


def cnn(*, seed: int = 0, norm: Norm = "batch") -> nn.Module:
    """For 28×28 grey pictures: two convolutions with norms, three dense layers; 1,475,338 parameters."""
    with _seeded(seed):
        return nn.Sequential(
            FASHION(),
            *(nn.Conv2d(1, 32, 3, padding=1), _norm(norm, 32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3), _norm(norm, 64), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            *(nn.Linear(64 * 6 * 6, 600), nn.ReLU(), nn.Linear(600, 120), nn.ReLU(), nn.Linear(120, 10)),
        )


def leaf_cnn(outputs: int = 62, *, seed: int = 0) -> nn.Module:
    """LEAF's for FEMNIST: two 5×5 convolutions, a layer of 2048, no norms (Caldas et al., 2018); 6,603,710
    parameters."""
    with _seeded(seed):
        return nn.Sequential(
            OCTETS(),
            *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64 * 7 * 7, 2048), nn.ReLU(), nn.Linear(2048, outputs)),
        )


class Characters(nn.Module):
    """The next character, from those before: an embedding of 8, two LSTM layers, and what the last step says."""

    def __init__(self, alphabet: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(alphabet, 8)
        self.layers = nn.LSTM(8, hidden, num_layers=2, batch_first=True)
        self.next = nn.Linear(hidden, alphabet)

    def forward(self, window: Tensor) -> Tensor:
        """Of places in the alphabet, "... 80"."""
        after, _ = self.layers(self.embedding(window.long()))
        found: Tensor = self.next(after[:, -1])
        return found


def leaf_lstm(alphabet: int = 80, hidden: int = 256, *, seed: int = 0) -> nn.Module:
    """LEAF's for Shakespeare (McMahan et al., 2017; Caldas et al., 2018); 819,920 parameters, of which 2,048 are the
    second biases that torch's LSTM has."""
    with _seeded(seed):
        return Characters(alphabet, hidden)


class Words(nn.Module):
    """The mean of the words' embeddings, and two layers; 0 is no word."""

    def __init__(self, vocabulary: int, width: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1 + vocabulary, width)
        self.decide = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, words: Tensor) -> Tensor:
        """Of numbers of words, "... words"."""
        there = (words > 0).unsqueeze(-1)
        mean = (self.embedding(words) * there).sum(dim=-2) / there.sum(dim=-2).clamp(min=1)
        found: Tensor = self.decide(mean)
        return found


def bag_of_words(vocabulary: int, hidden: int, outputs: int = 2, *, width: int = 32, seed: int = 0) -> nn.Module:
    """For short texts."""
    with _seeded(seed):
        return Words(vocabulary, width, hidden, outputs)


class _Block(nn.Module):
    """Two 3×3 convolutions around which the input is added (He et al., 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm, *, project: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = _norm(norm, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = _norm(norm, outputs)
        self.stride, self.added = stride, outputs - inputs
        changes = stride != 1 or self.added != 0
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(norm, outputs))
            if project and changes
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """relu(F(x) + x); where the shapes differ, x is projected, or thinned out and padded with zero channels."""
        around = x
        if self.shortcut is not None:
            around = self.shortcut(x)
        elif self.added:
            around = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        inner = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(inner)) + around)


def _stage(inputs: int, outputs: int, blocks: int, stride: int, norm: Norm, *, project: bool) -> nn.Sequential:
    first = _Block(inputs, outputs, stride, norm, project=project)
    return nn.Sequential(first, *(_Block(outputs, outputs, 1, norm, project=project) for _ in range(blocks - 1)))


def resnet20(outputs: int = 10, *, seed: int = 0, norm: Norm = "batch", pixels: nn.Module | None = None) -> nn.Module:
    """For 32×32 colour pictures: three stages of three blocks (He et al., 2016, section 4.2); 269,722 parameters, and
    with 100 outputs 275,572."""
    with _seeded(seed):
        return _initialised(
            nn.Sequential(
                pixels or CIFAR(),
                *(nn.Conv2d(3, 16, 3, 1, 1, bias=False), _norm(norm, 16), nn.ReLU()),
                _stage(16, 16, 3, 1, norm, project=False),
                _stage(16, 32, 3, 2, norm, project=False),
                _stage(32, 64, 3, 2, norm, project=False),
                *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, outputs)),
            )
        )


def resnet18(outputs: int = 2, *, seed: int = 0, norm: Norm = "batch") -> nn.Module:
    """For larger colour pictures: four stages of two blocks (He et al., 2016, table 1); 11.2 million parameters."""
    with _seeded(seed):
        return _initialised(
            nn.Sequential(
                FACES(),
                *(nn.Conv2d(3, 64, 7, 2, 3, bias=False), _norm(norm, 64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
                _stage(64, 64, 2, 1, norm, project=True),
                _stage(64, 128, 2, 2, norm, project=True),
                _stage(128, 256, 2, 2, norm, project=True),
                _stage(256, 512, 2, 2, norm, project=True),
                *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, outputs)),
            )
        )


def _initialised(network: nn.Module) -> nn.Module:
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return network
