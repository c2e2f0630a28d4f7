"""Examples that are read when they are needed: batches out of map-style datasets."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from quafl.tasks import given
from quafl.tasks.files import DataError
from quafl.tasks.given import Pair

Collate: TypeAlias = Callable[[list[Any]], Any]  # examples -> a pair (inputs, targets) with an example a row
TARGETS = "labels", "label", "targets", "target"  # what the targets are called in examples that are dictionaries


def is_dataset(data: Any) -> bool:
    """Whether it gives examples by their places, or one after another; not a pair of all inputs and all targets."""
    if isinstance(data, tuple | list | Mapping | Tensor | np.ndarray | str):
        return False
    return any(hasattr(data, name) for name in ("__getitem__", "__iter__"))


def check(dataset: Any, whose: str) -> None:
    """Whether it can be read: it has a length, and examples by their places."""
    by_place = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not by_place or isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{whose} is a {type(dataset).__name__}, which has no length or gives its examples one after another; give "
            f"a map-style dataset, with __len__ and __getitem__, or all examples as a pair (inputs, targets)"
        )
    if not len(dataset):
        raise ValueError(f"{whose} has no examples; give at least one")


def collated(examples: list[Any]) -> Any:
    """Examples (input, target), or dictionaries of which one part is called labels, label, targets or target, as inputs
    and targets with an example a row. Inputs with a single part are that part. A list of numbers in a dictionary is a
    row of them, as Hugging Face's datasets have it."""
    if isinstance(examples[0], Mapping):
        examples = [{name: _row(part) for name, part in one.items()} for one in examples]
    batch = _parts(default_collate(examples))
    if not isinstance(batch, Mapping):
        return batch
    target = next((name for name in TARGETS if name in batch), None)
    if target is None:
        raise TypeError(
            f"the examples have the parts {', '.join(map(str, batch))}, of which none is called {' or '.join(TARGETS)}"
        )
    inputs = {name: part for name, part in batch.items() if name != target}
    return (next(iter(inputs.values())) if len(inputs) == 1 else inputs), batch[target]


def _row(part: Any) -> Any:
    if not isinstance(part, list):
        return part
    try:
        return torch.tensor(part)
    except (TypeError, ValueError):  # whatever it is, torch may know what to make of it
        return part


def _parts(batch: Any) -> Any:
    """Lists are of parts here, and tuples of parts elsewhere."""
    if isinstance(batch, list | tuple) and not all(isinstance(part, str | bytes) for part in batch):
        return tuple(map(_parts, batch))
    return {name: _parts(part) for name, part in batch.items()} if isinstance(batch, Mapping) else batch


def read(dataset: Any, places: Sequence[int], collate: Collate | None, whose: str) -> Pair:
    """The examples at those places."""
    several = getattr(dataset, "__getitems__", None)
    try:
        examples = several(list(places)) if several is not None else [dataset[place] for place in places]
    except Exception as error:  # of a dataset that nobody here has seen before
        raise DataError(f"{whose}: its examples cannot be read ({given.line(error)})") from error
    try:
        batch = (collate or collated)(examples)
    except Exception as error:  # likewise
        how = "give a collate that makes a pair (inputs, targets) of them" if collate is None else "mend the collate"
        raise DataError(f"{whose}: its examples do not make a batch ({given.line(error)}); {how}") from error
    try:
        return given.examples(batch, f"{whose}'s batch")
    except (TypeError, ValueError) as error:
        raise DataError(str(error)) from error


class Part:
    """Some examples of a dataset, by their places."""

    def __init__(self, dataset: Any, places: Sequence[int]) -> None:
        self._dataset, self._places = dataset, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: int) -> Any:
        """An example."""
        return self._dataset[self._places[place]]

    def __getitems__(self, places: list[int]) -> list[Any]:
        """Several, as the dataset itself gives them."""
        mine = [self._places[place] for place in places]
        several = getattr(self._dataset, "__getitems__", None)
        found: list[Any] = several(mine) if several is not None else [self._dataset[place] for place in mine]
        return found
