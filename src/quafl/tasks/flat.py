"""Modules as flat vectors: trainable parameters in one, floating-point buffers in another."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from quafl.core.seams import Shapes
from quafl.tasks.dropout import count_dropout
from quafl.tasks.pooling import halve_faster

Call: TypeAlias = Callable[..., Any]  # a module, or what stands for one


class Flat:
    """A private copy of a module, on a device, whose parameters are views of whatever vector it is given.

    Frozen parameters and integer buffers stay in the copy; a tied parameter appears once. Dropout is counted from the
    `key` of a step.
    """

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        check_module(module)
        self._original = module
        self._device = torch.device(device)
        self._module = deepcopy(module).float()
        self._dropouts = count_dropout(self._module)
        _stop_counting_batches(self._module)
        halve_faster(self._module)
        self._module.to(device)
        self._parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        self._buffers = {name: b for name, b in self._module.named_buffers() if b.is_floating_point()}
        model = self._flatten(p.detach() for p in self._parameters.values())
        self._initial = model, self._flatten(self._buffers.values())

    def initial(self) -> tuple[Tensor, Tensor]:
        """The module's own parameters and buffers, as they were given."""
        return self._initial

    def layout(self) -> tuple[Shapes, Shapes]:
        """The tensors of the model and of the buffers, in the order of their vectors."""
        model, buffers = (
            {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            for tensors in (self._parameters, self._buffers)
        )
        return model, buffers

    def gradient(
        self, model: Tensor, buffers: Tensor, key: Tensor, loss: Callable[[Call], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """∇ loss(module) at the vector, and the buffers after the pass in training mode."""
        after = buffers.clone()
        self._point_at(model, after)
        self._module.train()
        for _, layer in self._dropouts:
            layer.key.copy_(key)
        self._call_anew()
        value = loss(self._module)
        self._call_anew()  # a backward pass may compute parts of the forward pass again
        gradients = torch.autograd.grad(value, list(self._parameters.values()), materialize_grads=True)
        return self._flatten(gradients), after

    def pure_gradient(
        self, model: Tensor, buffers: Tensor, key: Tensor, loss: Callable[[Call], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The same without touching anything: it can be vectorised and traced."""
        if any(getattr(layer, "num_batches_tracked", None) is not None for layer in self._module.modules()):
            raise TypeError("a layer of the model counts its batches (batch norm with momentum=None)")
        self._module.train()
        self._call_anew()

        def value(model: Tensor) -> tuple[Tensor, Tensor]:
            after = [
                part.clone() for part in _split(buffers, self._buffers.values())
            ]  # vmap updates whole tensors only
            named = {
                **dict(zip(self._parameters, _split(model, self._parameters.values()), strict=True)),
                **dict(zip(self._buffers, after, strict=True)),
                **{f"{name}.key": key for name, _ in self._dropouts},
            }
            result = loss(lambda *args, **parts: torch.func.functional_call(self._module, named, args, parts))
            return result, self._flatten(after)

        gradient, after = torch.func.grad(value, has_aux=True)(model)
        return gradient, after

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

    def _call_anew(self) -> None:
        for _, layer in self._dropouts:
            layer.calls = 0

    def _point_at(self, model: Tensor, buffers: Tensor) -> None:
        for tensors, vector in ((self._parameters.values(), model), (self._buffers.values(), buffers)):
            for tensor, part in zip(tensors, _split(vector, tensors), strict=True):
                tensor.data = part

    def _flatten(self, tensors: Iterable[Tensor]) -> Tensor:
        parts = [t.reshape(-1) for t in tensors]
        return torch.cat(parts) if parts else torch.empty(0, device=self._device)


def check_module(module: nn.Module) -> None:
    """Whether it is one, and has numbers to learn."""
    if not isinstance(module, nn.Module):
        called = isinstance(module, type) and issubclass(module, nn.Module)
        kind = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        remedy = f"give an instance: {module.__name__}(…)" if called else "give one, such as torch.nn.Linear(4, 2)"
        raise TypeError(f"the model is {kind}, must be a torch.nn.Module; {remedy}")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(f"the model's parameter {name} has no shape yet; call the model once with an example")
        if parameter.is_complex():
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(
                f"the model's parameter {name} is {kind}, must be real; make two parameters of its parts, and "
                f"torch.complex of them in forward"
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        frozen = sum(parameter.numel() for parameter in module.parameters())
        raise ValueError(
            f"the model has {frozen} parameters, of which none can be trained; give it some, or set requires_grad of "
            f"those that are to learn"
        )


def _stop_counting_batches(module: nn.Module) -> None:
    """Batch norm counts its batches for a mean over all of them; with a momentum, for nothing."""
    for layer in module.modules():
        if getattr(layer, "momentum", None) is not None and getattr(layer, "num_batches_tracked", None) is not None:
            setattr(layer, "num_batches_tracked", None)  # noqa: B010  # torch's types know no buffer that is None


def _split(vector: Tensor, like: Iterable[Tensor]) -> Iterable[Tensor]:
    shapes = [t.shape for t in like]
    return (part.view(shape) for part, shape in zip(vector.split([s.numel() for s in shapes]), shapes, strict=True))
