"""Flower's records and our tensors."""

from collections.abc import Iterable
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from quafl.bridges.contact import Answer
from quafl.bridges.records import AS_IT_IS, layout_of
from quafl.codec.seams import DecodeError, WireError

VERSION = 1
RECORD = "quafl"  # what we say beside the records of others
OCTETS = "quafl octets"  # an array in place of those that are encoded
STYPE = "quafl"  # its kind: who does not know it cannot take it for numbers
NUMPY = "numpy.ndarray"  # Flower's own kind
ENCODED = "float32", "float16"
IN_FULL, ALGORITHM, RECEIPT, NUMBERS, STEPS, NEAR = "in full", "algorithm", "receipt", "numbers", "steps", "near"
LOCAL_STEPS = "local-steps"  # in the configuration that a client gets, and in the metrics that it returns
PRECONDITION = 6  # Flower's code for a mod that cannot go on


def floats_of(record: ArrayRecord) -> dict[str, Tensor]:
    """The arrays that are encoded. Doubles are not: Flower makes them of integers when it takes their mean."""
    return {
        name: torch.from_numpy(array.numpy().copy())
        for name, array in record.items()
        if array.stype == NUMPY and array.dtype in ENCODED
    }


def others_of(record: ArrayRecord, floats: Iterable[str]) -> dict[str, Array]:
    """Those that travel as they are."""
    encoded = set(floats)
    return {name: array for name, array in record.items() if name not in encoded}


def layout_in(record: ArrayRecord) -> str:
    """A line for each array; of those that travel as they are, the names count."""
    return layout_of(
        (name, tuple(array.shape), array.dtype) if array.dtype in ENCODED else (name, (), AS_IT_IS)
        for name, array in record.items()
    )


def record_like(like: ArrayRecord, floats: dict[str, Tensor], others: ArrayRecord) -> ArrayRecord:
    """The arrays of `like`, in its order: the floats, and what has come beside them."""
    missing = [name for name in like if name not in floats and name not in others]
    if missing:
        raise DecodeError(f"array {missing[0]!r} has not come; do both ends use the same model?")
    return ArrayRecord({name: Array(floats[name]) if name in floats else others[name] for name in like})


def encoded_record(octets: bytes, others: dict[str, Array]) -> ArrayRecord:
    """A record as it travels."""
    return ArrayRecord({OCTETS: Array("uint8", (len(octets),), STYPE, octets), **others})


def octets_of(record: ArrayRecord, name: str = OCTETS) -> bytes:
    """Of a message in a record; or WireError."""
    if name not in record or record[name].stype != STYPE:
        raise WireError(f"a record has no array {name!r} of the kind {STYPE!r}")
    return record[name].data


def without_ours(content: RecordDict) -> RecordDict:
    """Without what is ours."""
    return RecordDict({key: record for key, record in content.items() if key != RECORD})


def numbers_of(said: ConfigRecord) -> list[float]:
    """That come with a message; none, if it has none."""
    told = said.get(NUMBERS, [])
    return [float(one) for one in told] if isinstance(told, list) else []


def stating(numbers: Iterable[float]) -> dict[str, Any]:
    """Flower's records have no empty lists."""
    return {NUMBERS: told} if (told := list(numbers)) else {}


def stating_answer(answer: Answer) -> dict[str, Any]:
    """The numbers of an answer, and what it is near to."""
    return {**stating(answer.numbers), NEAR: f"{answer.name:016x}"}
