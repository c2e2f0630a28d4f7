"""A step as a graph of tensor operations, compiled where the device has a compiler."""

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from quafl.sim.executors.lanes import ALIGNED, Lane, State, Unsuitable, flatten

_log = logging.getLogger(__name__)


def trace(step: Callable[[Lane], State], lanes: Lane) -> fx.GraphModule:
    """`step` on the lanes with its result written back into them, as a function of the lanes' tensors."""
    tensors, shape = pytree.tree_flatten(lanes)

    def in_place(*tensors: Tensor) -> None:
        mine = pytree.tree_unflatten(tensors, shape)
        for seat, value in zip(flatten(mine.state), flatten(step(mine)), strict=True):
            seat.copy_(value)

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # of an operation, lane by lane
            with _NothingDrawn():  # type: ignore[no-untyped-call]  # torch has no types for it
                graph: fx.GraphModule = make_fx(in_place)(*tensors)
    except Unsuitable:
        raise
    except Exception as error:  # the model is the user's, and may do anything
        raise Unsuitable(first_line(error)) from error
    for node in graph.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.dynamic_output_shape in tags and not _indexes_by_numbers(node):
            raise Unsuitable(f"a shape depends on the data, by {node.target}")
    return graph


class _NothingDrawn(TorchDispatchMode):
    """Inside, a model that draws random numbers of its own is refused before it has: torch's generators are others',
    too."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        tags = getattr(operator, "tags", ())  # those of a higher order have none
        if torch.Tag.nondeterministic_seeded in tags and _dropout(operator, args, given) != 0:
            raise Unsuitable(f"the model draws random numbers of its own, by {operator}")
        return operator(*args, **given)


def _dropout(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """The probability that an operation such as attention is given; None if it is given none."""
    given = {argument.name: argument.default_value for argument in operator._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    return next((value for name, value in given.items() if name.startswith("dropout")), None)


def _indexes_by_numbers(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.index.Tensor:
        return False
    indices = [index.meta["val"] for index in node.args[1] if isinstance(index, fx.Node)]  # type: ignore[union-attr]  # a list
    return all(index.dtype not in (torch.bool, torch.uint8) for index in indices)


_COMPILED: dict[tuple[object, ...], Callable[..., object]] = {}  # in this process, whatever the seed


def compiled(graph: fx.GraphModule, lanes: Lane) -> Callable[[Lane], object]:
    """On a GPU, kernels made for this graph; elsewhere, or if that fails, its operations one by one."""
    constants = opened(graph, lanes.factor.device)
    run: Callable[..., object] = graph
    if lanes.factor.device.type == "cuda":
        key = _key(graph, [*pytree.tree_leaves(lanes), *constants])
        try:
            with preserved(lanes), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about tf32, which we have decided, and the compiler's own parts
                inputs = [*pytree.tree_leaves(lanes), *constants]
                run = _COMPILED[key] if key in _COMPILED else torch._inductor.compile(graph, inputs)
                run(*inputs)
            _COMPILED[key] = run
        except Exception as error:  # whatever a compiler may say
            _log.warning("the local step could not be compiled (%s): it runs uncompiled", first_line(error))
            _log.debug("the compiler's error", exc_info=True)
            run = graph
    return lambda lanes: run(*pytree.tree_leaves(lanes), *constants)


def _key(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> tuple[object, ...]:
    """By which one sees that what was compiled for a graph serves another: the same operations, with inputs of the same
    layout, and the same constants where they are not inputs."""
    names = [str(node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    held = [getattr(graph, name) for name in names]
    values = tuple(repr(one.tolist()) if isinstance(one, Tensor) else repr(one) for one in held)
    layouts = tuple((one.shape, one.stride(), one.dtype, one.device, one.data_ptr() % ALIGNED) for one in inputs)
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    return graph.code, values, layouts, flags


def opened(graph: fx.GraphModule, device: torch.device) -> list[Tensor]:
    """Make the tensors on the device that the graph has for constants, such as a task's data, its last arguments, and
    give them back: the compiler then knows the graph again that it has compiled for another seed, in its cache."""
    *_, last = (node for node in graph.graph.nodes if node.op == "placeholder")
    arguments: dict[str, fx.Node] = {}
    for node in list(graph.graph.nodes):
        known = getattr(graph, node.target, None) if node.op == "get_attr" else None
        if not isinstance(known, Tensor) or known.device != device:
            continue
        if node.target not in arguments:
            with graph.graph.inserting_after(last):
                last = arguments[node.target] = graph.graph.placeholder(node.target)
        node.replace_all_uses_with(arguments[node.target])
        graph.graph.erase_node(node)
    graph.recompile()
    return [getattr(graph, name) for name in arguments]


class preserved:  # used as a statement
    """What the lanes hold is the same after as before: for trying something out."""

    def __init__(self, lanes: Lane) -> None:
        self._tensors = pytree.tree_leaves(lanes.state)

    def __enter__(self) -> None:
        self._kept = [tensor.clone() for tensor in self._tensors]

    def __exit__(self, *_: Any) -> None:
        for tensor, kept in zip(self._tensors, self._kept, strict=True):
            tensor.copy_(kept)


def first_line(error: Exception) -> str:
    """The gist of an error that is not ours."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
