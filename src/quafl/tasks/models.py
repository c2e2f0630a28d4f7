"""Networks of the experiments, each initialised from a seed of its own."""

import torch
from torch import nn


def mlp(inputs: int, hidden: int, outputs: int, *, seed: int = 0) -> nn.Module:
    """Two layers with a ReLU between."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
