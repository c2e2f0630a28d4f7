"""What there is on this machine, what is missing, and what to do about it."""

import os
import platform
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import NamedTuple

import torch

from quafl.codec.kernels import kernel_named
from quafl.run.versions import versions
from quafl.tasks.datasets import CELEBA, CIFAR_10, CIFAR_100, FASHION_MNIST, MNIST
from quafl.tasks.files import ENVIRONMENT
from quafl.tasks.people import FEMNIST, SENT140, SHAKESPEARE

KERNELS = {"c": "CPUs", "triton": "GPUs", "torch": "any device"}  # what each is made for


class Finding(NamedTuple):
    """One of the things that were looked for."""

    part: str
    what: str
    there: bool
    says: str
    todo: str = ""  # if it is missed


def examine(extras: Mapping[str, tuple[str, str]]) -> list[Finding]:
    """Everything; `extras` are, by the module that each brings, the extra's name and what it is for."""
    here = versions()
    known = [Finding("versions", name, True, here[name]) for name in ("quafl", "python", "torch", "numpy", "platform")]
    return [*known, *_devices(), *_kernels(), *_data(), *_extras(extras)]


def _devices() -> Iterator[Finding]:
    yield Finding("devices", "cpu", True, f"{os.cpu_count()} cores, {platform.machine()}")
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        yield Finding("devices", f"cuda:{number}", True, f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            why, todo = "this build of PyTorch is for CPUs", "for a GPU, install PyTorch's CUDA build (pytorch.org)"
        else:
            why, todo = f"PyTorch (CUDA {torch.version.cuda}) finds no GPU", "see whether nvidia-smi shows one"
        yield Finding("devices", "cuda", False, why, todo)


def _kernels() -> Iterator[Finding]:
    for name, device in KERNELS.items():
        try:
            kernel = kernel_named(name)
        except ValueError as error:
            for_gpu = "pip install 'quafl[cuda]'" if torch.cuda.is_available() else ""
            todo = {"c": "install a C compiler, and then quafl again", "triton": for_gpu}[name]
            yield Finding("kernels", name, False, f"for {device}; {error}", todo)
        else:
            detail = getattr(kernel, "instruction_set", "")
            yield Finding("kernels", name, True, f"for {device}" + (f", with {detail} instructions" if detail else ""))


def _data() -> Iterator[Finding]:
    there = find_spec("sklearn") is not None
    yield Finding("data", "digits", there, "comes with scikit-learn", "" if there else "pip install 'quafl[data]'")
    for files in (MNIST, FASHION_MNIST, CIFAR_10, CIFAR_100, CELEBA, FEMNIST, SHAKESPEARE, SENT140):
        found, looked = files.here(), " or ".join(map(str, files.places()))
        if found is not None:
            yield Finding("data", files.title, True, f"in {next(iter(found.values())).parent}")
            continue
        where = f"put its files into a folder {files.folder}/ of the folder that {ENVIRONMENT} names"
        todo = f"{files.why}: {where}" if files.url is None else f"it is downloaded when it is first used, or {where}"
        yield Finding("data", files.title, False, f"not in {looked}", todo)


def _extras(extras: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
    for name in dict.fromkeys(name for name, _ in extras.values()):
        mine = {module: purpose for module, (extra, purpose) in extras.items() if extra == name}
        missing = [module for module in mine if find_spec(module) is None]
        says = f"for {next(iter(mine.values()))}" + (f"; {', '.join(missing)} not installed" if missing else "")
        yield Finding("extras", name, not missing, says, f"pip install 'quafl[{name}]'" if missing else "")
