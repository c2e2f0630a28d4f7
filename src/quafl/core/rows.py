"""Records whose tensors share their leading axes: a row per client or message."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Self

import torch
from torch import Tensor


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
    def cat(cls, records: Sequence[Self]) -> Self:
        """Records with a leading axis, one after another."""
        return records[0]._combine(torch.cat, records)

    def put(self, rows: Any, new: Self) -> None:
        """Overwrite the selected rows in place."""

        def write(tensors: list[Tensor]) -> Tensor:
            old, fresh = tensors
            old[rows] = fresh
            return old

        self._combine(write, [self, new])

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
