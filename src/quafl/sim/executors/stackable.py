"""Layers as operations that can be done for a stack of models at once.

Under vmap, a convolution becomes one with groups, over which libraries loop, and batch norm does not mix precisions.
As matrix products and plain statistics, both are a few operations for all models together.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

PART = 2048  # places of a kernel whose shares of a gradient are summed by one product


class Stackable(TorchFunctionMode):
    """Inside, layers are computed in this way; what is not known here, as it always is."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = _PLAIN[function](*args, **(kwargs or {})) if function in _PLAIN else NotImplemented
        return function(*args, **(kwargs or {})) if result is NotImplemented else result


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """The weights times what lies under the kernel, for all its places."""
    if groups != 1 or x.ndim != 4 or isinstance(padding, str) or _pair(dilation) != (1, 1):
        return NotImplemented
    if torch.is_autocast_enabled(x.device.type):
        x, weight = (tensor.to(torch.get_autocast_dtype(x.device.type)) for tensor in (x, weight))
    outputs, inputs, *kernel = weight.shape
    across, down = _pair(padding)[::-1]
    padded = functional.pad(x, (across, across, down, down))
    under: Tensor = _Under.apply(padded, tuple(kernel), _pair(stride))  # type: ignore[no-untyped-call]  # torch has none
    flat = weight.reshape(outputs, -1), under.reshape(inputs * kernel[0] * kernel[1], -1)
    result: Tensor = _Product.apply(*flat)  # type: ignore[no-untyped-call]  # likewise
    result = result.view(outputs, *under.shape[3:])
    result = result if bias is None else result + bias.to(result.dtype).view(-1, 1, 1, 1)
    return result.transpose(0, 1).contiguous()


class _Under(torch.autograd.Function):
    """What lies under a kernel, for all its places: pictures "b c h w" as "c i j b h' w'"."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> Tensor:
        windows = x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
        return windows.permute(1, 4, 5, 0, 2, 3).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.kernel, ctx.stride = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Each place gets the sum of its shares: as many shifted pictures as the kernel has places."""
        batch, channels, height, width = ctx.shape
        back = torch.ops.aten.slice_backward
        total = None
        for i in range(ctx.kernel[0]):
            for j in range(ctx.kernel[1]):
                part = gradient[:, i, j]
                step_down, step_right = ctx.stride
                last = i + step_down * (part.shape[2] - 1) + 1, j + step_right * (part.shape[3] - 1) + 1
                part = back(part, [channels, batch, part.shape[2], width], 3, j, last[1], step_right)
                part = back(part, [channels, batch, height, width], 2, i, last[0], step_down)
                total = part if total is None else total + part
        assert total is not None
        return total.transpose(0, 1), None, None


class _Product(torch.autograd.Function):
    """Weights "o k" times "k p". The gradient of the weights is a sum over very many p: in parts, side by side."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, under: Tensor) -> Tensor:
        return weight @ under

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        weight, under = ctx.saved_tensors
        parts = next(parts for parts in range(max(1, under.shape[1] // PART), 0, -1) if under.shape[1] % parts == 0)
        left = gradient.unflatten(1, (parts, -1)).transpose(0, 1)
        right = under.unflatten(1, (parts, -1)).permute(1, 2, 0)
        return torch.bmm(left, right).sum(0, dtype=torch.float32).to(weight.dtype), weight.T @ gradient


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


_PLAIN: dict[Any, Callable[..., Any]] = {
    torch.conv2d: _conv2d,
    functional.conv2d: _conv2d,
    functional.batch_norm: _batch_norm,
}
