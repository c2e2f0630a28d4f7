"""In what arithmetic gradients are computed, in how many threads, with what drawn at random. Models, optimizers, codecs
and averages are float32 whatever it is."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, TypeAlias, get_args

import torch

Precision: TypeAlias = Literal["float32", "tf32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@contextmanager
def arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """On a GPU, matrix products and convolutions inside are those of float32, unless they may round their factors to 10
    bits ("tf32"; torch itself lets convolutions do so), and are computed in the same order every time."""
    if device.type != "cuda":
        yield
        return
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic
    products.allow_tf32 = convolutions.allow_tf32 = precision == "tf32"
    convolutions.deterministic = True
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic = before


def mixed(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """With "bfloat16", matrix products and convolutions inside are; for the forward pass, whose types the backward pass
    takes over."""
    if precision != "bfloat16":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes in one thread: sums are added up in one order, and a seed gives the same bits whatever the
    number of cores. The caller's number is set again afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, what is drawn from torch's own generators comes from the seed; afterwards they are as they were.

    `torch.manual_seed` would seed those of all devices there are, at a cost that a small model's step would feel.
    """
    if device.type == "cuda":
        with torch.random.fork_rng(devices=[device]), torch.cuda.device(device):
            torch.default_generator.manual_seed(seed)
            torch.cuda.manual_seed(seed)
            yield
        return
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
