"""Records whose tensors share their leading axes, a row per client or message."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Self, get_args, get_type_hints

import torch
from torch import Tensor

from quafl.core.pieces import placed


class Struct:
    """Base of frozen dataclasses of tensors, of tuples or dictionaries of them, or of other such records.

    Fields of other types are common to all rows.
    """

    __slots__ = ()

    def __getitem__(self, rows: Any) -> Self:
        """The rows that an index, slice, id list or mask selects from the leading axis."""
        if isinstance(rows, Tensor) and rows.dtype == torch.bool and rows.dim() == 1:
            rows = rows.nonzero().squeeze(-1)

        def pick(tensors: list[Tensor]) -> Tensor:
            (whole,) = tensors
            if not isinstance(rows, Tensor) or rows.device == whole.device:
                return whole[rows]
            if whole.dim() > 1 and len(rows):  # a GPU gathers long rows twice as fast if it need not look up which
                each = whole.unbind()
                return torch.stack([each[row] for row in rows.tolist()])
            return whole[placed(rows, whole.device)]

        return self._combine(pick, [self])

    @classmethod
    def stack(cls, records: Sequence[Self]) -> Self:
        """Single records as the rows of one."""
        if len(records) == 1:
            return records[0].each(lambda tensor: tensor.unsqueeze(0))  # not a copy
        return records[0]._combine(torch.stack, records)

    @classmethod
    def join(cls, records: Sequence[Self]) -> Self:
        """The rows of all records, one after another."""
        return records[0]._combine(torch.cat, records) if len(records) > 1 else records[0]

    @classmethod
    def gather(cls, places: Sequence[tuple[Self, int]]) -> Self:
        """Rows of several records, given by their places there, as the rows of one."""
        first, rows = places[0][0], [row for _, row in places]
        if all(record is first for record, _ in places) and rows == list(range(rows[0], rows[0] + len(rows))):
            return first[rows[0] : rows[0] + len(rows)]  # not a copy

        def pick(tensors: list[Tensor]) -> Tensor:
            return torch.stack([tensor[row] for tensor, row in zip(tensors, rows, strict=True)])

        return first._combine(pick, [record for record, _ in places])

    def where(self, mask: Tensor, other: Self) -> Self:
        """My rows where the mask says so, the other's elsewhere."""

        def choose(tensors: list[Tensor]) -> Tensor:
            mine, theirs = tensors
            return torch.where(placed(mask.view(-1, *[1] * (mine.ndim - 1)), mine.device), mine, theirs)

        return self._combine(choose, [self, other])

    def with_rows(self, rows: Tensor, other: Self) -> Self:
        """The other's rows, in the places given; mine elsewhere."""
        return self._combine(
            lambda tensors: tensors[0].index_copy(0, placed(rows, tensors[0].device), tensors[1]), [self, other]
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Every tensor changed in the same way."""
        return self._combine(lambda tensors: change(tensors[0]), [self])

    def tree(self) -> dict[str, Any]:
        """As plain dictionaries and tuples of tensors and numbers, for `from_tree`."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Self:
        """What `tree` was made from."""
        hints = get_type_hints(cls)
        inner = {name: next(filter(_is_struct, (hint, *get_args(hint))), None) for name, hint in hints.items()}
        return cls(**{name: _restored(value, inner[name]) for name, value in tree.items()})

    @classmethod
    def extending(cls, less: "Struct", **more: Any) -> Self:
        """A record of a base class, with what this class has beside."""
        return cls(**{f.name: getattr(less, f.name) for f in fields(less)}, **more)  # type: ignore[arg-type]

    def _combine(self, merge: Callable[[list[Tensor]], Tensor], records: Sequence[Self]) -> Self:
        names = [f.name for f in fields(self)]  # type: ignore[arg-type]  # every subclass is a dataclass
        return type(self)(**{name: _merged(merge, [getattr(one, name) for one in records]) for name in names})


def _merged(merge: Callable[[list[Tensor]], Tensor], values: list[Any]) -> Any:
    """One value of all; the first, if they are of a kind that is common to all rows."""
    first = values[0]
    if isinstance(first, Tensor):
        return merge(values)
    if isinstance(first, Struct):
        return first._combine(merge, values)
    if isinstance(first, dict):
        return {key: _merged(merge, [value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        return tuple(_merged(merge, list(parts)) for parts in zip(*values, strict=True))
    return first


def _plain(value: Any) -> Any:
    if isinstance(value, Struct):
        return value.tree()
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _restored(value: Any, made: type[Struct] | None) -> Any:
    if made is None or value is None:
        return value
    return tuple(made.from_tree(part) for part in value) if isinstance(value, tuple) else made.from_tree(value)


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Struct)
