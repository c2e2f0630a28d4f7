"""Batches as their users know them: a tensor, or a tuple or dictionary of tensors, an example a row. What a module
gives back may be a named tuple, or a dictionary with attributes, and stays one."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any, TypeAlias

import torch
from torch import Tensor

Tree: TypeAlias = Any  # Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def change(tree: Tree, how: Callable[[Tensor], Tensor]) -> Tree:
    """Every tensor changed in the same way."""
    return combine([tree], lambda tensors: how(tensors[0]))


def _refuse(thing: Any) -> Any:
    raise TypeError(f"a batch has a {type(thing).__name__}, must be made of tensors; torch.as_tensor may make one")


def combine(
    trees: Sequence[Tree], merge: Callable[[list[Tensor]], Tensor | None], other: Callable[[Any], Any] = _refuse
) -> Tree:
    """Trees of the same shape as one, of the first one's type: `merge` gets the tensors that stand at the same place,
    `other` what is no tensor."""
    first = trees[0]
    if isinstance(first, Tensor):
        return merge(list(trees))
    if isinstance(first, Mapping):
        return _like(first, {name: combine([tree[name] for tree in trees], merge, other) for name in first})
    if isinstance(first, tuple | list):
        parts = tuple(combine(parts, merge, other) for parts in zip(*trees, strict=True))
        return type(first)(*parts) if hasattr(first, "_fields") else parts
    return None if first is None else other(first)


def _like(first: Mapping[str, Any], values: dict[str, Any]) -> Mapping[str, Any]:
    """The values in a dictionary of the same type, whose attributes they may be, too."""
    if type(first) is dict or not isinstance(first, MutableMapping):
        return values
    made = copy(first)
    for name, value in values.items():
        made[name] = value
    return made


def join(trees: Sequence[Tree]) -> Tree:
    """One after another."""
    return combine(trees, torch.cat)


def join_outputs(trees: Sequence[Tree]) -> Tree:
    """What a module gave for one batch after another, as it would give it for all. Numbers of a whole batch, such as a
    mean, and what is no tensor, such as a cache, are left out."""
    return combine(trees, lambda parts: torch.cat(parts) if parts[0].ndim else None, other=lambda _: None)


def size(tree: Tree) -> int:
    """Examples; all parts must have as many."""
    parts = list(tree.values()) if isinstance(tree, Mapping) else tree if isinstance(tree, tuple | list) else [tree]
    sizes = {len(part) for part in parts}
    if len(sizes) != 1:
        raise ValueError(f"the parts of a dataset have {sorted(sizes)} examples; give all of them the same number")
    return int(sizes.pop())


def octets(tree: Tree) -> int:
    """Of all tensors."""
    if isinstance(tree, Tensor):
        return tree.nbytes
    parts = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, tuple | list) else ()
    return sum(map(octets, parts))


def call(module: Callable[..., Any], inputs: Tree) -> Tree:
    """module(x), module(*parts) or module(**parts)."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, tuple | list):
        return module(*inputs)
    return module(inputs)
