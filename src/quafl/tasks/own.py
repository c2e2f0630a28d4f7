"""People's own code: a function that settings or a command line name as 'package.module:function'."""

import importlib
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

import numpy as np
import torch

from quafl.tasks.files import DataError


def reach(folders: Iterable[Path]) -> None:
    """Let Python import what is in the folders, the first one first."""
    for folder in reversed([str(one) for one in folders]):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def pack(folders: Iterable[Path]) -> dict[str, bytes]:
    """The modules that lie in the folders, by the names of their files, to be used on another machine."""
    return {file.name: file.read_bytes() for folder in folders for file in sorted(folder.glob("*.py"))}


def unpack(modules: Mapping[str, bytes], folder: Path) -> None:
    """Let Python import them there, where it finds no others of these names."""
    folder.mkdir(exist_ok=True)
    for name, content in modules.items():
        (folder / name).write_bytes(content)
    sys.path.append(str(folder))


def folder_of(path: str, what: str) -> Path:
    """The folder from which the function's module was imported."""
    module = _module(path, what)
    file = Path(module.__file__ or "").resolve()
    return file.parents[module.__name__.count(".") + (file.name == "__init__.py")]


def source_of(path: str, what: str) -> str:
    """The name of the function's file, and a digest of its content."""
    file = Path(_module(path, what).__file__ or "")
    return f"{file.name} {blake2b(file.read_bytes(), digest_size=6).hexdigest()}" if file.is_file() else path


def call(
    path: str, what: str, name: str | None = None, options: Mapping[str, Any] | None = None, seed: int | None = None
) -> Any:
    """What the function returns. The name is its first parameter that the options do not give; a function without
    such a one is not given it. With a seed, all that it draws at random follows from that."""
    function, options = _function(path, what), options or {}
    try:
        with seeded(seed):
            named = name is not None and _has_place(function, options)
            return function(name, **options) if named else function(**options)
    except Exception as error:  # it is the user's, and may raise anything
        raise DataError(f"{what} {path} failed: {_said(error)}") from error


def takes(path: str, what: str, name: str) -> bool:
    """Whether the function has a parameter of this name."""
    return name in inspect.signature(_function(path, what)).parameters


def _module(path: str, what: str) -> ModuleType:
    name, colon, function = path.partition(":")
    if not colon or not function or not name or name.startswith("."):
        raise DataError(f"{what} {path}: must look like package.module:function")
    try:
        return importlib.import_module(name)
    except Exception as error:  # it is the user's, and may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise DataError(
                f"{what} {path}: {error}; is it installed, beside the settings file, or in the folder where you are "
                f"({Path.cwd()})?"
            ) from error
        raise DataError(f"{what} {path} cannot be imported: {_said(error)}") from error


def _function(path: str, what: str) -> Callable[..., Any]:
    module, name = _module(path, what), path.partition(":")[2]
    if not hasattr(module, name):
        close = get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise DataError(f"{what} {path}: there is no {name} in {module.__file__ or module.__name__}{hint}")
    function: Callable[..., Any] = getattr(module, name)
    if not callable(function):
        raise DataError(f"{what} {path}: {name} is not a function")
    return function


def _has_place(function: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Whether a parameter can be given by its place."""
    parameters = inspect.signature(function).parameters
    by_name = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    return any(one.kind not in by_name for name, one in parameters.items() if name not in options)


def _said(error: Exception) -> str:
    """What the user's code raised, in a line, and where."""
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    frames = extract_tb(error.__traceback__)
    theirs = [one for one in frames if one.filename not in (__file__, importlib.__file__) and one.filename[0] != "<"]
    return f"{first} ({theirs[0].filename}, line {theirs[0].lineno})" if theirs else first


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """All generators that code of its own accord draws from."""
    if seed is None:
        yield
        return
    numbers, words = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numbers)
            random.setstate(words)
