"""Dropout whose masks are counted from a step's key: the same ones however and wherever the step is computed."""

import torch
from torch import Tensor, nn

from quafl.core.counter import Draws, subkey

_KINDS = {nn.Dropout: False, nn.Dropout1d: True, nn.Dropout2d: True, nn.Dropout3d: True}  # whole channels?


class CountedDropout(nn.Module):
    """Drops out with probability p, numbers or whole `channels`. All layers have the same key, and draw from it by
    their number and how often they have been called in the pass."""

    key: Tensor  # of the step, "2"

    def __init__(self, number: int, p: float, *, channels: bool) -> None:
        super().__init__()
        self.number, self.p, self.channels, self.calls = number, p, channels, 0
        self.register_buffer("key", torch.zeros(2, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x·mask/(1 − p) in training."""
        if not self.training or self.p == 0:
            return x
        self.calls += 1
        apart = x.ndim if not self.channels else 2 if x.ndim > 2 else 1  # as torch has it
        shape = *x.shape[:apart], *[1] * (x.ndim - apart)
        draws = Draws(subkey(subkey(self.key, self.number), self.calls)).uniform(*shape)
        return x * (draws >= self.p) * (0.0 if self.p == 1 else 1 / (1 - self.p))


def count_dropout(module: nn.Module) -> list[tuple[str, CountedDropout]]:
    """Put counted layers in the place of torch's, and say where they are."""
    counted: dict[nn.Module, CountedDropout] = {}
    places: list[tuple[str, CountedDropout]] = []
    for path, parent in list(module.named_modules()):
        for name, layer in list(parent._modules.items()):  # a layer in several places is named in each
            if layer is not None and type(layer) in _KINDS:
                new = CountedDropout(len(counted), layer.p, channels=_KINDS[type(layer)])
                setattr(parent, name, counted.setdefault(layer, new))
                places.append((f"{path}.{name}" if path else name, counted[layer]))
    return places
