"""The model of filters.py."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """For pictures of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """How much each of the ten digits is to be believed."""
        return self.second(torch.relu(self.first(x)))
