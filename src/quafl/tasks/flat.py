"""Modules as flat vectors: trainable parameters in one, floating-point buffers in another."""

from collections.abc import Callable, Iterable
from copy import deepcopy

import torch
from torch import Tensor, nn


class Flat:
    """A private copy of a module, on a device, whose parameters are views of whatever vector it is given.

    Frozen parameters and integer buffers stay in the copy; a tied parameter appears once.
    """

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        self._original = module
        self._device = torch.device(device)
        self._module = deepcopy(module).float().to(device)
        self._parameters = [p for p in self._module.parameters() if p.requires_grad]
        self._buffers = [b for b in self._module.buffers() if b.is_floating_point()]

    def initial(self) -> tuple[Tensor, Tensor]:
        """The module's own parameters and buffers."""
        return self._flatten(p.detach() for p in self._parameters), self._flatten(self._buffers)

    def gradient(self, model: Tensor, buffers: Tensor, loss: Callable[[nn.Module], Tensor]) -> tuple[Tensor, Tensor]:
        """∇ loss(module) at the vector, and the buffers after the pass in training mode."""
        after = buffers.clone()
        self._point_at(model, after)
        self._module.train()
        gradients = torch.autograd.grad(loss(self._module), self._parameters, materialize_grads=True)
        return self._flatten(gradients), after

    def at(self, model: Tensor, buffers: Tensor) -> nn.Module:
        """The module at the vector, in evaluation mode; valid until the next call."""
        self._point_at(model, buffers.clone())
        return self._module.eval()

    def module(self, model: Tensor, buffers: Tensor) -> nn.Module:
        """A module like the one given, in its dtypes, with these parameters and buffers: the caller's to keep."""
        result = deepcopy(self._original)
        trainable = [p.data for p in result.parameters() if p.requires_grad]
        floating = [b for b in result.buffers() if b.is_floating_point()]
        for tensors, vector in ((trainable, model), (floating, buffers)):
            for tensor, part in zip(tensors, _split(vector, tensors), strict=True):
                tensor.copy_(part)
        return result

    def _point_at(self, model: Tensor, buffers: Tensor) -> None:
        for tensors, vector in ((self._parameters, model), (self._buffers, buffers)):
            for tensor, part in zip(tensors, _split(vector, tensors), strict=True):
                tensor.data = part

    def _flatten(self, tensors: Iterable[Tensor]) -> Tensor:
        parts = [t.reshape(-1) for t in tensors]
        return torch.cat(parts) if parts else torch.empty(0, device=self._device)


def _split(vector: Tensor, like: Iterable[Tensor]) -> Iterable[Tensor]:
    shapes = [t.shape for t in like]
    return (part.view(shape) for part, shape in zip(vector.split([s.numel() for s in shapes]), shapes, strict=True))
