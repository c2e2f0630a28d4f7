"""Layers as operations that suit a stack of models, or a single one.

Under vmap, a convolution becomes one with groups, over which libraries loop, and batch norm does not mix precisions.
As matrix products and plain statistics, both are a few operations for all models together. The convolutions of a single
model in mixed precision want their channels last, and would otherwise move them there and back, each by itself. Those
of a stack have kernels of their own on a GPU, unless they are plain float32.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import cache
from itertools import product
from math import prod
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

PART = 1024  # places of a kernel that a product takes at most, or those in one picture
ALIGNED = 8  # numbers, for products on tensor cores
MOST = 127  # places of a pool's window that have a number of one octet
DEVICE = "cuda"  # which has kernels for stacks
LARGEST = 2**29  # numbers of a client that they take, as they count in 32 bits, and there is padding
Forms: TypeAlias = Mapping[Any, Callable[..., Any]]


_TF32 = ContextVar("tf32", default=False)  # of this thread, whatever another one is at


class Layers(TorchFunctionMode):
    """Inside, layers are computed in these forms; what has none, as it always is. With tf32, factors may be rounded to
    10 bits."""

    def __init__(self, forms: Forms, *, tf32: bool = False) -> None:
        super().__init__()
        self._forms, self._tf32 = forms, tf32

    def __enter__(self) -> Self:
        self._before = _TF32.set(self._tf32)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types for it
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # likewise
        _TF32.reset(self._before)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        form = self._forms.get(function)
        result = NotImplemented if form is None else form(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {})) if result is NotImplemented else result


def _channels_last(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    if input.ndim != 4 or input.device.type != "cuda" or not torch.is_autocast_enabled("cuda"):
        return NotImplemented
    x, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (input, weight))
    return torch.conv2d(x, weight, *args, **kwargs)


def _reshape(x: Tensor, *shape: Any, **dtype: Any) -> Any:
    """What a model may take for a view need not be one here."""
    if dtype or any(isinstance(part, torch.dtype) for part in shape):
        return NotImplemented
    return x.reshape(*shape)


def _product(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """The weights times what lies under the kernel, for all its places; without kernels for it, some pictures at a
    time: the gradient of the weights is a sum over very many places, whose parts are products side by side."""
    plain = groups == 1 and input.ndim == 4 and input.shape[1] == weight.shape[1] and not isinstance(padding, str)
    if not plain or {len(_pair(stride)), len(_pair(padding))} != {2} or set(_pair(dilation)) != {1}:
        return NotImplemented
    x = input
    if torch.is_autocast_enabled(x.device.type):
        x, weight = (tensor.to(torch.get_autocast_dtype(x.device.type)) for tensor in (x, weight))
    if (kernels := _kernels(x, weight)) is not None:
        return kernels.convolution(x, weight, bias, stride, padding)
    across, down = _pair(padding)[::-1]
    padded = functional.pad(x, (across, across, down, down))
    kernel, strides = (weight.shape[2], weight.shape[3]), _pair(stride)
    height, width = _places(padded.shape, kernel, strides)
    batch, outputs = len(x), len(weight)
    pictures = next(n for n in range(max(1, PART // (height * width)), 0, -1) if batch % n == 0)
    under: Tensor = _Under.apply(padded, kernel, strides, pictures)  # type: ignore[no-untyped-call]  # torch has none
    flat = functional.pad(weight.reshape(outputs, -1), (0, under.shape[1] - weight[0].numel()))
    result: Tensor = _Product.apply(flat, under)  # type: ignore[no-untyped-call]  # likewise
    result = result.view(batch // pictures, outputs, pictures, height, width).transpose(1, 2)
    result = result.reshape(batch, outputs, height, width)
    return result if bias is None else result + bias.to(result.dtype).view(-1, 1, 1)


def _kernels(x: Tensor, weight: Tensor) -> Any:
    """Those that can take these numbers, or None."""
    rounded = x.dtype in (torch.bfloat16, torch.float16)
    rounded |= x.dtype == torch.float32 and _TF32.get()
    if x.device.type != DEVICE or x.dtype != weight.dtype or not rounded:
        return None
    few = len(x) * x.shape[2] * x.shape[3] * max(x.shape[1], len(weight)) < LARGEST
    return _triton() if few else None


@cache
def _triton() -> Any:
    """None where Triton is not installed."""
    try:
        from quafl.sim.executors import convolutions
    except ImportError:
        return None
    return convolutions


def _places(shape: torch.Size, kernel: tuple[int, int], stride: tuple[int, int]) -> tuple[int, int]:
    """Where a kernel can be in a picture, down and across."""
    return (shape[2] - kernel[0]) // stride[0] + 1, (shape[3] - kernel[1]) // stride[1] + 1


class _Under(torch.autograd.Function):
    """What lies under a kernel, for all its places: of pictures "b c h w", some at a time, as "b' (c i j) (p h' w')",
    with zeros after the second axis until it is aligned."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], pictures: int) -> Tensor:
        windows = x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
        under = windows.unflatten(0, (-1, pictures)).permute(0, 2, 5, 6, 1, 3, 4)
        size = x.shape[1] * prod(kernel)
        return functional.pad(under.reshape(len(under), size, -1), (0, 0, 0, -size % ALIGNED)).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.kernel, ctx.stride, ctx.pictures = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Each place gets the sum of its shares: as many shifted pictures as the kernel has places."""
        channels, height, width = ctx.shape[1:]
        lines, columns = _places(ctx.shape, ctx.kernel, ctx.stride)
        shares = gradient[:, : channels * prod(ctx.kernel)].unflatten(2, (ctx.pictures, lines, columns))
        shares = shares.unflatten(1, (channels, *ctx.kernel)).permute(2, 3, 0, 4, 1, 5, 6)
        back, (down, right), total = torch.ops.aten.slice_backward, ctx.stride, None
        for i in range(ctx.kernel[0]):
            for j in range(ctx.kernel[1]):
                part = shares[i, j]
                part = back(part, [*part.shape[:4], width], 4, j, j + right * (columns - 1) + 1, right)
                part = back(part, [*part.shape[:3], height, width], 3, i, i + down * (lines - 1) + 1, down)
                total = part if total is None else total + part
        assert total is not None
        return total.flatten(0, 1), None, None, None


class _Product(torch.autograd.Function):
    """Weights "o k" times each of "b k p"."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, under: Tensor) -> Tensor:
        return torch.bmm(weight.expand(len(under), *weight.shape), under)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        weight, under = ctx.saved_tensors
        parts = torch.bmm(gradient, under.transpose(1, 2))
        across = weight.T.expand(len(under), *weight.T.shape)
        return parts.sum(0, dtype=torch.float32).to(weight.dtype), torch.bmm(across, gradient)


def _max_pool(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The largest number of each window, where windows lie side by side."""
    kernel = _pair(kernel_size)
    if input.ndim != 4 or input.device.type != DEVICE or len(kernel) != 2 or prod(kernel) > MOST:
        return NotImplemented
    if input.shape[2] < kernel[0] or input.shape[3] < kernel[1]:
        return NotImplemented
    padded = {*_pair(padding)} != {0} or {*_pair(dilation)} != {1}
    if _pair(stride or kernel) != kernel or padded or ceil_mode or return_indices:
        return NotImplemented
    largest: Tensor = _Largest.apply(input, kernel)[0]  # type: ignore[no-untyped-call]  # torch has none
    return largest


class _Largest(torch.autograd.Function):
    """Of each window of pictures "b c h w" the largest number, and the place in the window where it is first."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, kernel: tuple[int, int]) -> tuple[Tensor, Tensor]:
        down, across = kernel
        lines, columns = x.shape[2] // down * down, x.shape[3] // across * across
        first, *others = (x[:, :, i:lines:down, j:columns:across] for i, j in product(range(down), range(across)))
        largest, place = first, torch.zeros_like(first, dtype=torch.int8)
        for number, other in enumerate(others, 1):
            larger = (other > largest) | other.isnan()
            largest, place = torch.where(larger, other, largest), torch.where(larger, number, place)
        return largest.clone(), place

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.kernel = inputs
        ctx.shape = x.shape
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
        """All of a window's gradient goes to that place; what lies in no window gets nothing."""
        (place,), (down, across), (height, width) = ctx.saved_tensors, ctx.kernel, ctx.shape[2:]
        number = torch.arange(down * across, dtype=torch.int8, device=place.device).view(down, 1, across)
        spread = [tensor[:, :, :, None, :, None] for tensor in (place, gradient)]
        shares = torch.where(spread[0] == number, spread[1], 0).flatten(4, 5).flatten(2, 3)
        return functional.pad(shares, (0, width - shares.shape[3], 0, height - shares.shape[2])), None


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """(x − mean)/√(variance + ε) over all axes but the channels; running values move towards those of the batch."""
    if not training:
        return NotImplemented
    axes, shape = [0, *range(2, x.ndim)], (-1, *[1] * (x.ndim - 2))
    values = x.float()
    mean, variance = values.mean(axes), values.var(axes, correction=0)
    examples = values.numel() // values.shape[1]
    for running, new in (running_mean, mean), (running_var, variance * (examples / max(examples - 1, 1))):
        if running is not None:
            running.mul_(1 - momentum).add_(new.detach(), alpha=momentum)
    result = (values - mean.view(shape)) * (variance + eps).rsqrt().view(shape)
    result = result if weight is None else result * weight.view(shape)
    return (result if bias is None else result + bias.view(shape)).to(x.dtype)


STACKED: Forms = {
    torch.conv2d: _product,
    functional.conv2d: _product,
    functional.batch_norm: _batch_norm,
    torch.max_pool2d: _max_pool,
    functional.max_pool2d: _max_pool,
    Tensor.view: _reshape,
}
SINGLE: Forms = {torch.conv2d: _channels_last, functional.conv2d: _channels_last, Tensor.view: _reshape}
