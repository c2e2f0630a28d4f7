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
    if groups != 1 or x.ndim != 4 or isinstance(padding, str):
        return NotImplemented
    if torch.is_autocast_enabled(x.device.type):
        x, weight = (tensor.to(torch.get_autocast_dtype(x.device.type)) for tensor in (x, weight))
    outputs, inputs, *kernel = weight.shape
    strides, paddings, gaps = _pair(stride), _pair(padding), _pair(dilation)
    x = functional.pad(x, (paddings[1], paddings[1], paddings[0], paddings[0])).transpose(0, 1)
    spans = [
        [slice(gap * place, size - gap * (length - 1 - place), step) for place in range(length)]
        for length, gap, step, size in zip(kernel, gaps, strides, x.shape[2:], strict=True)
    ]
    under = torch.stack([x[:, :, rows, columns] for rows in spans[0] for columns in spans[1]], dim=1)
    shape = under.shape[2:]
    result = (weight.reshape(outputs, -1) @ under.reshape(inputs * len(under[0]), -1)).view(outputs, *shape)
    result = result if bias is None else result + bias.view(-1, 1, 1, 1)
    return result.transpose(0, 1).contiguous()


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
