"""Dropout whose masks are counted from a step's key: the same ones however and wherever the step is computed."""

import torch
from torch import Tensor, nn

from quafl.core.counter import Draws, subkey

_CHANNEL_AXES = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}  # that share a mask


class CountedDropout(nn.Module):
    """Drops out with probability p; the last `shared` axes go together. All layers have the same key, and draw from it
    by their number and how often they have been called in the step."""

    key: Tensor  # of the step, "2"

    def __init__(self, number: int, p: float, shared: int) -> None:
        super().__init__()
        self.number, self.p, self.shared, self.calls = number, p, shared, 0
        self.register_buffer("key", torch.zeros(2, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x·mask/(1 − p) in training."""
        if not self.training or self.p == 0:
            return x
        self.calls += 1
        apart = x.ndim - self.shared
        draws = Draws(subkey(subkey(self.key, self.number), self.calls)).uniform(*x.shape[:apart], *[1] * self.shared)
        return x * (draws >= self.p) * (0.0 if self.p == 1 else 1 / (1 - self.p))


def count_dropout(module: nn.Module) -> list[tuple[str, CountedDropout]]:
    """Put counted layers in the place of torch's, and say where they are."""
    counted: list[tuple[str, CountedDropout]] = []
    for path, parent in list(module.named_modules()):
        for name, layer in parent.named_children():
            if type(layer) in _CHANNEL_AXES:
                mine = CountedDropout(len(counted), layer.p, _CHANNEL_AXES[type(layer)])
                setattr(parent, name, mine)
                counted.append((f"{path}.{name}" if path else name, mine))
    return counted
