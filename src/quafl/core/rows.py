"""Records whose tensors share their leading axes, a row per client or message; and long rows, a piece at a time."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Self, get_args, get_type_hints

import torch
from torch import Tensor

PIECE = 2**22  # coordinates


def piecewise(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """What `function` makes of rows "... d", coordinate by coordinate: for large d a piece at a time, so that its
    intermediate values stay small."""
    dim = rows[0].shape[-1]
    if dim <= PIECE:
        return function(*rows)
    whole = None
    for start in range(0, dim, PIECE):
        piece = function(*(row[..., start : start + PIECE] for row in rows))
        if whole is None:
            whole = piece.new_empty((*piece.shape[:-1], dim))
        whole[..., start : start + PIECE] = piece
    assert whole is not None
    return whole


def lengthened(values: Tensor, size: int, fill: float) -> Tensor:
    """With `fill` for those who were not there when the values were kept."""
    return torch.cat((values, values.new_full((max(0, size - len(values)),), fill)))


def distance(mine: Tensor, theirs: Tensor) -> Tensor:
    """‖mine − theirs‖ of each row."""
    if mine.shape[-1] <= PIECE:
        near: Tensor = (mine - theirs).norm(dim=-1)
        return near
    pieces = zip(mine.split(PIECE, dim=-1), theirs.split(PIECE, dim=-1), strict=True)
    far: Tensor = torch.stack([(one - other).norm(dim=-1) for one, other in pieces]).norm(dim=0)
    return far


class Rows:
    """Base of frozen dataclasses of tensors, of tuples of them or of other such records.

    Fields of other types are common to all rows.
    """

    __slots__ = ()

    def __getitem__(self, rows: Any) -> Self:
        """The rows that an index, slice, id list or mask selects from the leading axis."""
        return self._combine(lambda tensors: tensors[0][rows], [self])

    @classmethod
    def stack(cls, records: Sequence[Self]) -> Self:
        """Single records as the rows of one."""
        return records[0]._combine(torch.stack, records)

    @classmethod
    def join(cls, records: Sequence[Self]) -> Self:
        """The rows of all records, one after another."""
        return records[0]._combine(torch.cat, records) if len(records) > 1 else records[0]

    def where(self, mask: Tensor, other: Self) -> Self:
        """My rows where the mask says so, the other's elsewhere."""

        def choose(tensors: list[Tensor]) -> Tensor:
            mine, theirs = tensors
            return torch.where(mask.view(-1, *[1] * (mine.ndim - 1)).to(mine.device), mine, theirs)

        return self._combine(choose, [self, other])

    def with_rows(self, rows: Tensor, other: Self) -> Self:
        """The other's rows, in the places given; mine elsewhere."""
        return self._combine(
            lambda tensors: tensors[0].index_copy(0, rows.to(tensors[0].device), tensors[1]), [self, other]
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Every tensor changed in the same way."""
        return self._combine(lambda tensors: change(tensors[0]), [self])

    def tree(self) -> dict[str, Any]:
        """As plain dictionaries and tuples of tensors and numbers, for `from_tree`."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]
        return {name: value.tree() if isinstance(value, Rows) else value for name, value in values}

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Self:
        """What `tree` was made from."""
        types = {name: next(iter(get_args(hint)), hint) for name, hint in get_type_hints(cls).items()}  # X | None: X
        return cls(
            **{name: types[name].from_tree(value) if isinstance(value, dict) else value for name, value in tree.items()}
        )

    def _combine(self, merge: Callable[[list[Tensor]], Tensor], records: Sequence[Self]) -> Self:
        merged: dict[str, Any] = {}
        for f in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            values = [getattr(record, f.name) for record in records]
            if isinstance(values[0], Tensor):
                merged[f.name] = merge(values)
            elif isinstance(values[0], Rows):
                merged[f.name] = values[0]._combine(merge, values)
            elif isinstance(values[0], tuple):
                merged[f.name] = tuple(merge(list(parts)) for parts in zip(*values, strict=True))
        return replace(self, **merged)  # type: ignore[type-var]
