"""Real data. The digits ship inside scikit-learn: no download."""

from typing import NamedTuple

import torch

from quafl.core.randomness import derive
from quafl.tasks.supervised import Data


class Splits(NamedTuple):
    """What to learn from, what to choose settings by, and what to judge by."""

    train: Data
    validation: Data
    test: Data


def digits() -> Splits:
    """1,797 handwritten digits of 8×8 pixels scaled to 0..1 (E. Alpaydin and C. Kaynak, UCI 1998): a fixed 60/20/20
    split."""
    from sklearn.datasets import load_digits

    inputs, targets = load_digits(return_X_y=True)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(derive("digits")))
    x = torch.as_tensor(inputs, dtype=torch.float32)[order] / 16
    y = torch.as_tensor(targets, dtype=torch.int64)[order]
    parts = zip(*(t.split([1077, 360, 360]) for t in (x, y)), strict=True)
    return Splits(*parts)
