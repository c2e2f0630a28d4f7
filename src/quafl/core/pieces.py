"""Long rows, a piece at a time: intermediate values of large models stay small."""

from collections.abc import Callable
from math import isfinite

import torch
from torch import Tensor

from quafl.core.questions import is_right

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
    pieces = zip(mine.split(PIECE, dim=-1), theirs.split(PIECE, dim=-1), strict=True)
    return _together([(one - other).norm(dim=-1) for one, other in pieces])


def length(rows: Tensor) -> Tensor:
    """‖row‖ of each."""
    return _together([piece.norm(dim=-1) for piece in rows.split(PIECE, dim=-1)])


def _together(lengths: list[Tensor]) -> Tensor:
    """Of rows, from those of their pieces."""
    return lengths[0] if len(lengths) == 1 else torch.stack(lengths).norm(dim=0)


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """Σ w_i x_i of rows "m d"."""
    weights = weights.to(rows.device, rows.dtype)
    return in_pieces(lambda rows: weights @ rows, rows)


def is_finite(*vectors: Tensor | None) -> bool:
    """Whether all of them are, where there are some; in one pass that keeps nothing."""
    some = [x for x in vectors if x is not None and x.numel()]
    widest = torch.float64 if any(x.dtype == torch.float64 for x in some) else torch.float32
    ends = [end.to(widest) for x in some for end in x.aminmax()]
    return not ends or is_right(torch.stack(ends), lambda found: all(map(isfinite, found)))


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """On that device. The way from the host to a GPU is not waited for."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def zeros(model: Tensor) -> Tensor:
    """In the model's shape; takes no memory."""
    return model.new_zeros(()).expand_as(model)


def lengthened(values: Tensor, size: int, fill: float) -> Tensor:
    """With `fill` for those who were not there when the values were kept."""
    return torch.cat((values, values.new_full((max(0, size - len(values)),), fill)))
