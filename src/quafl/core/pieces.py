"""Long rows, a piece at a time: intermediate values of large models stay small."""

from collections.abc import Callable
from math import isfinite

import torch
from torch import Tensor

PIECE = 2**22  # coordinates
CACHED = 2**17  # which a processor's cache holds, a few rows of them


def in_pieces(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """What `function` makes of rows "... d", coordinate by coordinate."""
    dim, most = rows[0].shape[-1], CACHED if rows[0].device.type == "cpu" else PIECE
    if dim <= most:
        return function(*rows)
    whole = None
    for start in range(0, dim, most):
        piece = function(*(row[..., start : start + most] for row in rows))
        if whole is None:
            whole = piece.new_empty((*piece.shape[:-1], dim))
        whole[..., start : start + most] = piece
    assert whole is not None
    return whole


def distance(mine: Tensor, theirs: Tensor) -> Tensor:
    """‖mine − theirs‖ of each row."""
    if mine.shape[-1] <= PIECE:
        near: Tensor = (mine - theirs).norm(dim=-1)
        return near
    pieces = zip(mine.split(PIECE, dim=-1), theirs.split(PIECE, dim=-1), strict=True)
    far: Tensor = torch.stack([(one - other).norm(dim=-1) for one, other in pieces]).norm(dim=0)
    return far


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """Σ w_i x_i of rows "m d"."""
    weights = weights.to(rows.device, rows.dtype)
    return in_pieces(lambda rows: weights @ rows, rows)


def is_finite(x: Tensor) -> bool:
    """Whether all of it is; in one pass that keeps nothing."""
    return x.numel() == 0 or all(map(isfinite, torch.stack(x.aminmax()).tolist()))


def zeros(model: Tensor) -> Tensor:
    """In the model's shape; takes no memory."""
    return model.new_zeros(()).expand_as(model)


def lengthened(values: Tensor, size: int, fill: float) -> Tensor:
    """With `fill` for those who were not there when the values were kept."""
    return torch.cat((values, values.new_full((max(0, size - len(values)),), fill)))
