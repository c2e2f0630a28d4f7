"""What people give: their data as tensors, their model and loss tried out on two examples. What cannot be used is said
in a sentence, with the number of the client whose it is.

Numpy arrays and lists are taken, and float64 as float32. Octets that the model itself cannot take are pictures, and are
scaled to 0..1.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from quafl.tasks import trees
from quafl.tasks.files import DataError
from quafl.tasks.trees import Tree

Pair: TypeAlias = tuple[Tree, Tree]  # inputs and targets
PAIR = "a pair (inputs, targets) with an example a row"


def usable(device: torch.device | str) -> torch.device:
    """A device that PyTorch has here; `auto` is a GPU, if there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(
            f"device is {str(device)!r}, must be one that PyTorch can use here ({line(error)}); 'cpu' always is, "
            f"'auto' finds a GPU"
        ) from error


def listed(clients: Any) -> list[Any]:
    """The clients, of whatever can be gone through."""
    if isinstance(clients, Mapping):
        raise TypeError("clients is a dictionary, must be a list; give list(clients.values())")
    if not isinstance(clients, Iterable):
        raise TypeError(f"clients is {clients!r}, must be a list, with {PAIR} for each client")
    return list(clients)


def hands(clients: Any, whose: Callable[[int], str] = "client {}".format) -> list[Pair]:
    """Every client's data, alike in all but their number."""
    found = [examples(data, whose(number)) for number, data in enumerate(listed(clients))]
    if not found:
        raise ValueError("there are no clients; give at least one")
    known = form(found[0])
    for number, data in enumerate(found):
        if form(data) != known:
            raise ValueError(
                f"{whose(number)} has {_said(data)}, {whose(0)} has {_said(found[0])}; give every client the same "
                f"kinds and shapes"
            )
    return found


def kinds_of(data: Pair) -> Any:
    """Names and types of the parts, whatever their shapes: those of texts may differ from batch to batch."""
    return [[(name, dtype) for name, dtype, _ in _leaves(tree)] for tree in data]


def check_alike(data: Pair, whose: str, kinds: Any, known: Any, first: str) -> None:
    """Whether a batch has the parts that the first one had."""
    if kinds != known:
        raise ValueError(
            f"{whose} has {_said(data)}, which is not what {first} has; give every client the same parts and types"
        )


def examples(data: Any, whose: str) -> Pair:
    """Inputs and targets as tensors, as many of one as of the other."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        kind = f"{len(data)} things" if isinstance(data, tuple | list) else f"a {type(data).__name__}"
        raise TypeError(f"{whose} is {kind}, must be {PAIR}; quafl.tasks.partition deals a dataset out to clients")
    inputs, targets = _tensors(data[0], f"{whose}'s inputs"), _tensors(data[1], f"{whose}'s targets")
    try:
        sizes = trees.size(inputs), trees.size(targets)
    except ValueError as error:
        raise ValueError(f"{whose}: {error}") from None
    if sizes[0] != sizes[1] or sizes[0] == 0:
        raise ValueError(
            f"{whose} has {sizes[0]} inputs and {sizes[1]} targets; "
            f"give as many of one as of the other, and at least one"
        )
    return inputs, trees.change(targets, _numbers)


def _numbers(targets: Tensor) -> Tensor:
    """Class numbers of whatever kind."""
    whole = not targets.is_floating_point() and not targets.is_complex() and targets.dtype != torch.bool
    return targets.to(torch.int64) if whole else targets


def _tensors(tree: Any, whose: str) -> Tree:
    """A tuple or dictionary has parts; a list has examples."""
    if isinstance(tree, Mapping):
        return {name: _tensor(part, whose) for name, part in tree.items()}
    return tuple(_tensor(part, whose) for part in tree) if isinstance(tree, tuple) else _tensor(tree, whose)


def _tensor(value: Any, whose: str) -> Tensor:
    try:
        tensor = _as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{whose} are a {type(value).__name__} that is no tensor ({line(error)}); give a tensor or a numpy array "
            f"of numbers, with an example a row"
        ) from error
    if not tensor.ndim:
        raise ValueError(f"{whose} are a single number, must have an example a row")
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, list) and value and all(isinstance(one, Tensor) for one in value):
        return torch.stack(value)
    if not isinstance(value, list) and not hasattr(value, "__array__"):
        raise TypeError("not an array")
    array = np.asarray(value)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)  # torch has little for them
    return torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else array.copy())


def suiting(loss: Any, outputs: Tree) -> Any:
    """The loss itself; for outputs that have `logits`, as those of Hugging Face's models, one of classes is of
    these."""
    if is_class_loss(loss) and not isinstance(outputs, Tensor) and hasattr(outputs, "logits"):
        return OfLogits(loss)
    return loss


class OfLogits:
    """A loss of a model's `logits`."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def __call__(self, outputs: Any, targets: Tree) -> Tensor:
        """Of a batch."""
        value: Tensor = self.loss(outputs.logits, targets)
        return value


def is_class_loss(loss: Any) -> bool:
    """Whether its targets are numbers of classes."""
    loss = loss.loss if isinstance(loss, OfLogits) else loss
    return loss is functional.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)


def as_the_model_takes_it(module: Callable[..., Any], inputs: Tree) -> tuple[Tree, Callable[[Tensor], Tensor] | None]:
    """Outputs for a few examples, and how all inputs are to be changed: not at all, or octets to numbers from 0 to
    1."""
    try:
        return trees.call(module, inputs), None
    except Exception as error:  # of a model that nobody here has seen before
        try:
            return trees.call(module, trees.change(inputs, _scaled)), _scaled
        except Exception:
            raise ValueError(
                f"the model cannot take inputs that are {_kinds(inputs)} each ({line(error)}); change one to suit the "
                f"other"
            ) from error


def check_shape(inputs: Tree, first: Tree, error: Exception) -> None:
    """Whether it is for their shape that the model cannot take the inputs."""
    if [shape for *_, shape in _leaves(inputs)] != [shape for *_, shape in _leaves(first)]:
        raise DataError(
            f"the model cannot take inputs that are {_kinds(inputs)} each ({line(error)}), where those read first are "
            f"{_kinds(first)}; give examples of one shape, or a collate that pads them"
        ) from error


def _scaled(tensor: Tensor) -> Tensor:
    return tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor


def check_loss(loss: Any, outputs: Tree, targets: Tree) -> None:
    """Whether it gives a number that one can learn from."""
    if isinstance(loss, type) or not callable(loss):
        kind = f"the class {loss.__name__}, of which to give an instance" if isinstance(loss, type) else repr(loss)
        raise TypeError(f"the loss is {kind}; it must be a function of outputs and targets")
    try:
        value = loss(outputs, targets)
    except Exception as error:  # likewise
        raise ValueError(
            f"the loss cannot be computed from outputs that are {_kinds(outputs)} and targets that are "
            f"{_kinds(targets)} ({line(error)}); give a loss(outputs, targets) that suits them"
        ) from error
    if not isinstance(value, Tensor):
        raise TypeError(f"the loss gives a {type(value).__name__}, must give a tensor; compute it by torch's functions")
    if value.ndim:
        raise ValueError(
            f"the loss gives a tensor of shape {tuple(value.shape)}, must give one number; take its mean over the batch"
        )
    if not value.requires_grad:
        raise ValueError(
            "the loss does not depend on the model's parameters; compute it from the outputs by torch's own functions"
        )


def check_classes(loss: Any, outputs: Tree, targets: Tree, whose: Callable[[int], str]) -> None:
    """Whether targets are numbers of classes that the model has outputs for; or a share of each class. `whose` says to
    whom an example belongs."""
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.ndim < 2:
        return
    classes, kind = outputs.shape[1], f"{_kinds(targets)} each, for outputs that are {_kinds(outputs)}"
    if targets.is_floating_point():
        if targets.shape[1:] != outputs.shape[1:]:
            raise ValueError(
                f"the targets are {kind}: cross_entropy takes numbers of classes; give targets.long(), or for other "
                f"numbers another loss, such as torch.nn.functional.mse_loss"
            )
        return
    if targets.ndim != outputs.ndim - 1:
        raise ValueError(
            f"the targets are {kind}: cross_entropy takes the number of a class for each; give targets.argmax(1) where "
            f"there is a column for every class, or targets.squeeze(1) where there is one column"
        )
    ignored = targets == getattr(loss, "ignore_index", -100)
    strange = ((targets < 0) | (targets >= classes)) & ~ignored
    if strange.any():
        row = int(strange.flatten(1).any(1).nonzero()[0] if strange.ndim > 1 else strange.nonzero()[0])
        label = int(targets[row][strange[row]].flatten()[0])
        raise ValueError(
            f"{whose(row)} has the label {label}, the model has {classes} outputs; labels must be from 0 to "
            f"{classes - 1}, or the model have more outputs"
        )


def number_of(name: str, value: Any, device: torch.device) -> Tensor:
    """What a measure gives."""
    number = torch.as_tensor(value, dtype=torch.float64, device=device)
    if number.ndim:
        raise ValueError(f"the metric {name!r} gives a tensor of shape {tuple(number.shape)}, must give one number")
    return number


def _leaves(tree: Tree) -> list[tuple[str, Any, tuple[int, ...]]]:
    """Name, kind and shape of an example."""
    if isinstance(tree, Mapping):
        named = {f"{name}: ": part for name, part in tree.items()}
    else:
        named = {f"{n}: ": part for n, part in enumerate(tree)} if isinstance(tree, tuple | list) else {"": tree}
    return [
        (name, part.dtype, tuple(part.shape[1:])) if isinstance(part, Tensor) else (name, type(part).__name__, ())
        for name, part in sorted(named.items())
    ]


def form(data: Pair) -> Any:
    """Names, types and shapes of the parts of an example."""
    return _leaves(data[0]), _leaves(data[1])


def _said(data: Pair) -> str:
    return f"inputs that are {_kinds(data[0])} and targets that are {_kinds(data[1])}"


def _kinds(tree: Tree) -> str:
    return ", ".join(f"{name}{str(dtype).removeprefix('torch.')} {shape}" for name, dtype, shape in _leaves(tree))


def line(error: BaseException) -> str:
    """The gist of an error that is not ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
