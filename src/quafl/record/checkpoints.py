"""Where a run stands, on disk: dictionaries, lists, tensors and numbers, no code."""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import torch

from quafl.record.files import write_atomically
from quafl.record.summary import RecordError


def save(path: Path, state: dict[str, Any]) -> None:
    """Whole, or not at all."""
    with write_atomically(path, "wb") as stream:
        torch.save(state, stream)


def load(path: Path) -> dict[str, Any]:
    """What `save` wrote."""
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, BadZipFile, UnpicklingError) as error:
        raise RecordError(f"{path} cannot be read ({type(error).__name__}); delete it to run that seed anew") from error
    return state
