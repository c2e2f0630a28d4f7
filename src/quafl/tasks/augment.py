"""Pictures changed at random, for training."""

import torch
from torch import Tensor
from torch.nn import functional


def crop_and_flip(pictures: Tensor, rng: torch.Generator, *, margin: int = 4) -> Tensor:
    """Each picture moved by up to `margin` pixels over a black border, and mirrored half of the time."""
    count, _, height, width = pictures.shape
    padded = functional.pad(pictures, [margin] * 4)
    down, right = torch.randint(2 * margin + 1, (2, count, 1), generator=rng)
    columns = torch.arange(width).expand(count, width)
    mirrored = torch.rand(count, 1, generator=rng) < 0.5
    columns = torch.where(mirrored, columns.flip(-1), columns) + right
    rows = torch.arange(height) + down
    which = torch.arange(count).view(-1, 1, 1)
    return padded.movedim(1, -1)[which, rows.unsqueeze(-1), columns.unsqueeze(1)].movedim(-1, 1).contiguous()
