"""In what arithmetic gradients are computed. Models, optimizers, codecs and averages are float32 whatever it is."""

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
