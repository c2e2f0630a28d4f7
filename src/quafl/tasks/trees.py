"""Batches as their users know them: a tensor, or a tuple or dictionary of tensors, an example a row."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Tree: TypeAlias = Any  # Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def change(tree: Tree, how: Callable[[Tensor], Tensor]) -> Tree:
    """Every tensor changed in the same way."""
    return combine([tree], lambda tensors: how(tensors[0]))


def combine(trees: Sequence[Tree], merge: Callable[[list[Tensor]], Tensor]) -> Tree:
    """Trees of the same shape as one: `merge` gets the tensors that stand at the same place."""
    first = trees[0]
    if isinstance(first, Mapping):
        return {name: merge([tree[name] for tree in trees]) for name in first}
    if isinstance(first, tuple | list):
        return tuple(merge(list(parts)) for parts in zip(*trees, strict=True))
    return merge(list(trees))


def join(trees: Sequence[Tree]) -> Tree:
    """One after another."""
    return combine(trees, torch.cat)


def size(tree: Tree) -> int:
    """Examples; all parts must have as many."""
    parts = list(tree.values()) if isinstance(tree, Mapping) else tree if isinstance(tree, tuple | list) else [tree]
    sizes = {len(part) for part in parts}
    if len(sizes) != 1:
        raise ValueError(f"the parts of a dataset have {sorted(sizes)} examples; give all of them the same number")
    return int(sizes.pop())


def call(module: Callable[..., Any], inputs: Tree) -> Tree:
    """module(x), module(*parts) or module(**parts)."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, tuple | list):
        return module(*inputs)
    return module(inputs)
