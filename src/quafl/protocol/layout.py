"""Which tensors a model's vectors are made of: two ends that average them must have the same ones in the same places.

A layout is a line for each tensor, `fc1.weight 64x32`: first the trained ones, then the buffers.
"""

import json
from typing import Any, TypeAlias

from quafl.codec.seams import WireError
from quafl.core.seams import Shapes, Task
from quafl.protocol import messages

Layout: TypeAlias = tuple[str, ...]

LONGEST = messages.LONGEST_TEXT // 2  # octets that a greeting has for it
SHOWN = 30, 70  # characters of a line, in a sentence: where the name begins, and where it ends, with the shape


def layout_of(task: Task) -> Layout:
    """The task's. One that names no tensors (it has no method `layout`) has two plain vectors."""
    model, buffers = task.initial()
    plain: tuple[Shapes, Shapes] = {"model": tuple(model.shape)}, {"buffers": tuple(buffers.shape)}
    trained, kept = task.layout() if hasattr(task, "layout") else plain
    return (*_lines(trained), *(f"buffer {line}" for line in _lines(kept)))


def _lines(shapes: Shapes) -> list[str]:
    return [f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in shapes.items()]


def digest_of(layout: Layout) -> str:
    """A name for it, as a greeting carries it."""
    return messages.digest(json.dumps(layout).encode()).hex()


def beginning(layout: Layout) -> Layout:
    """As many of the first lines as fit into a greeting."""
    room, lines = LONGEST, list[str]()
    for line in layout:
        room -= len(json.dumps(line)) + 2  # a comma and a space
        if room < 0:
            break
        lines.append(line)
    return tuple(lines)


def difference(mine: Layout, name: str, theirs: Any) -> str:
    """Where the layout of the client of this name, or its beginning, departs from the server's; a sentence."""
    if not isinstance(theirs, list) or not all(isinstance(line, str) for line in theirs):
        raise WireError("says hello without saying which tensors its model has, or in a way that nobody can read")
    pairs = enumerate(zip(mine, theirs, strict=False))
    place = next((place for place, (one, other) in pairs if one != other), min(len(mine), len(theirs)))
    if place == len(theirs):  # it has no more, or no more was said
        return f"the models of the server and of {name} have the same first {place} tensors, and differ then"
    here = _shown(mine[place]) if place < len(mine) else "no more"
    return f"tensor {place + 1} of the server's model is {here}, of {name}'s {_shown(theirs[place])}"


def _shown(line: str) -> str:
    first, last = SHOWN
    return repr(line if len(line) <= first + last else f"{line[:first]}…{line[-last:]}")
