"""The parts of a simulation: a sentence for what cannot be one."""

from inspect import signature
from typing import Any

from quafl.codec.seams import Codecs
from quafl.core.checks import check_whole
from quafl.core.seams import Optimizer
from quafl.sim.world import World

ALGORITHM = "an algorithm, such as quafl.QuAFL(sampled=5)"
CODEC = "a codec, such as quafl.Lattice(bits=4), or quafl.Identity() to send models as they are"
OPTIMIZER = (
    "one of quafl.sgd(lr=0.1), quafl.momentum(lr=0.1), quafl.adam(lr=0.001) and quafl.adamw(lr=0.001), or your own "
    "quafl.Optimizer"
)


def check_parts(algorithm: Any, codec: Any, optimizer: Any, world: Any) -> None:
    """TypeError for what is something else."""
    _check("algorithm", algorithm, ALGORITHM, ("records", "sampled", "local_steps", "start", "round", "hear", "answer"))
    for one in codec if isinstance(codec, Codecs) else (codec,):
        _check("codec", one, CODEC, ("bits", "encode", "refine", "decode", "noise"))
        check_whole("the codec's bits", one.bits, 1, 32)
    _check("optimizer", optimizer, OPTIMIZER, Optimizer._fields)
    try:
        signature(optimizer.update).bind("gradient", "state", "model")
    except TypeError:
        raise TypeError(
            f"the optimizer's update takes {signature(optimizer.update)}, must take (gradient, state, model); it may "
            f"leave the model alone"
        ) from None
    if not isinstance(world, World):
        raise TypeError(f"world is {_shown(world)}, must be a world, such as quafl.World(slow=0.5)")


def _check(name: str, value: Any, wanted: str, parts: tuple[str, ...]) -> None:
    if isinstance(value, type) or not all(hasattr(value, part) for part in parts):
        raise TypeError(f"{name} is {_shown(value)}, must be {wanted}")


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    if hasattr(value, "__qualname__"):
        return f"the function {value.__qualname__}"
    return f"a {type(value).__module__}.{type(value).__qualname__}"
