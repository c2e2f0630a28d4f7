"""In what arithmetic gradients are computed. Everything else is float32: models, codecs, averages, evaluations."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal, TypeAlias, get_args

import torch

Precision: TypeAlias = Literal["float32", "tf32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@contextmanager
def arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """Matrix products and convolutions inside in float32, in float32 whose factors have 10 bits (tf32), or mixed with
    bfloat16. Torch itself lets convolutions use tf32."""
    mixed = (
        torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if precision == "bfloat16" else nullcontext()
    )
    if device.type != "cuda":
        with mixed:
            yield
        return
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = precision == "tf32"
    try:
        with mixed:
            yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before
