"""Hugging Face's datasets dealt out by flwr-datasets' partitioners. Neither is imported before it is used."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quafl.core.randomness import derive
from quafl.tasks.files import DataError
from quafl.tasks.given import Pair, line
from quafl.tasks.reading import TARGETS

TARGET = TARGETS[0]  # what targets are called here, whatever the column's name is
JUDGED = 0.1  # of data that have no test part


def from_partitioner(
    partitioner: Any, dataset: Any = None, *, inputs: str | Sequence[str] | None = None, target: str | None = None
) -> list[Any]:
    """A client's dataset for each partition: what `quafl.simulate` takes. Examples are read when they are needed.

    Args:
      partitioner: of flwr-datasets, such as `IidPartitioner(20)`, or whatever has `num_partitions` and
        `load_partition`.
      dataset: what it deals out, a `datasets.Dataset`; left out where the partitioner has one already.
      inputs: the columns that the model takes; by default all but the target. One alone is the model's only argument;
        several are arguments by their names.
      target: the column of class numbers or values; by default the one called labels, label, targets or target.

    Returns:
      A list with a `datasets.Dataset` for each client, whose examples are tensors.
    """
    missing = [part for part in ("num_partitions", "load_partition") if not hasattr(type(partitioner), part)]
    if missing:
        raise TypeError(
            f"the partitioner is a {type(partitioner).__name__} without {missing[0]}; give one of flwr_datasets', such "
            f"as IidPartitioner(20)"
        )
    try:
        if dataset is not None:
            partitioner.dataset = dataset
        parts = [partitioner.load_partition(number) for number in range(partitioner.num_partitions)]
    except Exception as error:  # of a package that says it in its own way
        raise DataError(
            f"{type(partitioner).__name__} cannot deal the data out ({line(error)}); give "
            f"from_partitioner(partitioner, dataset) a dataset once, and the partitioner options that suit it"
        ) from error
    empty = [number for number, part in enumerate(parts) if not len(part)]
    if empty:
        raise DataError(
            f"{type(partitioner).__name__} leaves client {empty[0]} without examples; give it fewer partitions, or "
            f"another seed"
        )
    return [columns(part, inputs, target) for part in parts]


def columns(dataset: Any, inputs: str | Sequence[str] | None = None, target: str | None = None) -> Any:
    """A Hugging Face dataset with these columns alone, as tensors; the target's is called labels."""
    there = list(dataset.column_names)
    target = target or next((name for name in TARGETS if name in there), None)
    chosen = [inputs] if isinstance(inputs, str) else list(inputs or [name for name in there if name != target])
    unknown = [name for name in (*chosen, target) if name not in there]
    if unknown:
        wanted = f"no column {unknown[0]!r}" if unknown[0] else f"no column called {' or '.join(TARGETS)}"
        raise DataError(f"the dataset has {wanted}; it has {', '.join(there)}: name them as inputs and target")
    if target != TARGET and TARGET in chosen:
        raise DataError(f"the column {TARGET!r} is not the target, {target!r} is; leave it out of the inputs")
    picked = dataset.select_columns([*chosen, target])
    return (picked if target == TARGET else picked.rename_column(target, TARGET)).with_format("torch")


class Rows:
    """Makes a batch of examples whose parts are numbers or pictures: each example one row of numbers, octets scaled to
    0..1."""

    def __call__(self, examples: list[Mapping[str, Any]]) -> Pair:
        """Inputs and targets."""
        rows = [torch.cat([_flat(one[name]) for name in one if name != TARGET]) for one in examples]
        return torch.stack(rows), torch.stack([torch.as_tensor(one[TARGET]) for one in examples])


def _flat(part: Any) -> Tensor:
    numbers = torch.as_tensor(part)
    return (numbers.float() / 255 if numbers.dtype == torch.uint8 else numbers.float()).reshape(-1)


# For settings files


def opened(path: str) -> tuple[Any, Any]:
    """What to learn from, and what to judge by: the parts train and test of what `save_to_disk` has written, or a tenth
    of it, or of a Parquet, CSV or JSON file, where there are no such parts."""
    found = _loaded(Path(path).expanduser())
    if isinstance(found, Mapping):
        if "train" not in found:
            raise DataError(f"{path} has the parts {', '.join(found)}, must have one called train")
        if "test" in found:
            return found["train"], found["test"]
        found = found["train"]
    if len(found) < 2:
        raise DataError(f"{path} has {len(found)} examples, must have two at least: one to learn from, one to judge by")
    parts = found.train_test_split(test_size=max(1, round(JUDGED * len(found))), seed=0)
    return parts["train"], parts["test"]


def _loaded(path: Path) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise _absent(error) from error
    readers = {
        "": datasets.load_from_disk,
        ".parquet": datasets.Dataset.from_parquet,
        ".csv": datasets.Dataset.from_csv,
        ".json": datasets.Dataset.from_json,
        ".jsonl": datasets.Dataset.from_json,
    }
    kind = "" if path.is_dir() else path.suffix
    if not path.exists() or kind not in readers:
        raise DataError(
            f"task.path = {str(path)!r}: must be a folder that Hugging Face's save_to_disk has written, or a Parquet, "
            f"CSV or JSON file"
        )
    try:
        return readers[kind](str(path))
    except Exception as error:  # of a package that says it in its own way
        raise DataError(f"{path} cannot be read ({line(error)}); write it by Hugging Face's save_to_disk") from error


def dealt(dataset: Any, name: str, clients: int, options: Mapping[str, Any], target: str, seed: int) -> Any:
    """The partitioner of that name, with its data. What it takes and the options do not say follows from the
    others."""
    try:
        from flwr_datasets import partitioner as known
    except ModuleNotFoundError as error:
        raise _absent(error) from error
    kind = getattr(known, name, None)
    if not isinstance(kind, type) or name not in known.__all__:
        raise DataError(f"task.partitioner = {name!r}: must be one of {', '.join(known.__all__)}")
    usual = {"num_partitions": clients, "partition_by": target, "seed": derive(seed, "partition") % 2**31}
    taken = inspect.signature(kind).parameters
    try:
        made = kind(**{key: value for key, value in usual.items() if key in taken} | dict(options))
        made.dataset = dataset
        count = made.num_partitions
    except Exception as error:  # likewise
        raise DataError(
            f"task.options = {dict(options)}: {name} cannot deal the data out ({line(error)}); it takes "
            f"{', '.join(taken)}"
        ) from error
    if count != clients:
        raise DataError(f"{name} makes {count} partitions for {clients} clients; set clients.count = {count}")
    return made


def width(dataset: Any, whose: str) -> int:
    """How many numbers an example has, as `Rows` makes them."""
    for name, part in dataset[0].items():
        if not isinstance(part, Tensor):
            raise DataError(
                f"{whose}: the column {name!r} has {part!r}, must have numbers or pictures; name the others in "
                f"task.inputs, or make numbers of it (class_encode_column)"
            )
    return int(Rows()([dataset[0]])[0].shape[1])


def classes(datasets: Sequence[Any], target: str) -> int:
    """As many as the target's column has names for, or numbers."""
    named = getattr(datasets[0].features[target], "num_classes", None)
    return int(named) if named else 1 + max(int(max(one[target])) for one in datasets)


def _absent(error: ModuleNotFoundError) -> DataError:
    return DataError(f"the task 'flwr-datasets' needs {error.name}: pip install flwr-datasets")
