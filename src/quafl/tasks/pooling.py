"""The largest number of every 2×2 window, on a CPU: torch looks at one number after another, and takes a third of a
small network's time for it; two `maximum`s of whole tensors take a tenth of that. The same numbers and gradients."""

from typing import Any

import torch
from torch import Tensor, nn

FEW = 2**15  # numbers, which are pooled before several operations have begun
_PLAIN = {"kernel_size": 2, "stride": 2, "padding": 0, "dilation": 1}


class Halving(nn.MaxPool2d):
    """Max pooling with windows of 2×2, side by side."""

    def forward(self, x: Tensor) -> Tensor:
        """As torch has it, where a function is transformed, pictures are not plain, or a GPU has them."""
        plain = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
        plain = plain and x.dim() == 4 and min(x.shape[2:]) > 1 and x.is_contiguous()
        if not plain or x.numel() < FEW or torch._C._are_functorch_transforms_active():
            pooled: Tensor = super().forward(x)
            return pooled
        if not (x.requires_grad and torch.is_grad_enabled()):
            return _largest(x)
        halved: Tensor = _Learning.apply(x)  # type: ignore[no-untyped-call]  # torch has none
        return halved


def halve_faster(module: nn.Module) -> None:
    """Let those of its layers that pool so do it in this way; whatever hangs on them stays."""
    pools = [layer for layer in module.modules() if type(layer) is nn.MaxPool2d]
    for layer in pools:
        halves = all(getattr(layer, name) in (value, (value, value)) for name, value in _PLAIN.items())
        if halves and not (layer.ceil_mode or layer.return_indices):
            layer.__class__ = Halving


def _largest(x: Tensor) -> Tensor:
    height, width = (side // 2 * 2 for side in x.shape[2:])
    wider = torch.maximum(x[..., :height, :width:2], x[..., :height, 1:width:2])
    return torch.maximum(wider[..., ::2, :], wider[..., 1::2, :])


class _Learning(torch.autograd.Function):
    """With a gradient: of equal numbers the first in reading order has it, as with torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        height, width = (side // 2 * 2 for side in x.shape[2:])
        left, right = (x[..., :height, first:width:2].contiguous() for first in (0, 1))
        wider = torch.maximum(left, right)
        above, below = (wider[..., first::2, :].contiguous() for first in (0, 1))
        largest = torch.maximum(above, below)
        if largest.numel() and largest.max().isnan():
            largest, place = torch.ops.aten.max_pool2d_with_indices(x, 2, 2)
        else:
            right_wins, down = right > left, below > above
            right_above, right_below = (right_wins[..., first::2, :].contiguous() for first in (0, 1))
            across = (down & right_below) | (~down & right_above)
            corner = x.shape[3] * torch.arange(0, height, 2).unsqueeze(1) + torch.arange(0, width, 2)
            place = torch.add(across.long(), down.long(), alpha=x.shape[3]).add_(corner)
        ctx.save_for_backward(x, place)
        return largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, place = ctx.saved_tensors
        window = [2, 2], [2, 2], [0, 0], [1, 1], False
        given: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(gradient.contiguous(), x, *window, place)
        return given
