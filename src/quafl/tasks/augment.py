"""Pictures changed at random, for training."""

import torch
from torch import Tensor
from torch.nn import functional

from quafl.core.counter import Draws


def crop_and_flip(pictures: Tensor, draws: Draws, *, margin: int = 4) -> Tensor:
    """Each picture moved by up to `margin` pixels over a black border, and mirrored half of the time."""
    count, _, height, width = pictures.shape
    here = pictures.device
    padded = functional.pad(pictures, [margin] * 4)
    down, right = draws.integers(2 * margin + 1, 2, count, 1)
    mirrored = draws.uniform(count, 1) < 0.5
    places = torch.arange(width, device=here).expand(count, width)
    columns = torch.where(mirrored, width - 1 - places, places) + right
    rows = torch.arange(height, device=here) + down
    which = torch.arange(count, device=here).view(-1, 1, 1)
    return padded.movedim(1, -1)[which, rows.unsqueeze(-1), columns.unsqueeze(1)].movedim(-1, 1).contiguous()
