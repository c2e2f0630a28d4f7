"""Clients side by side: each of a fixed number of lanes takes the steps of one client after another.

Shapes are fixed, so that a step can be traced, compiled and captured once, whoever is contacted. Which lane takes whose
steps is known beforehand: all is launched, nothing is waited for. A client that takes fewer steps leaves its lane to
the next one, who may change lanes; those that run dry are the last, and need not be moved on.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard

import torch
from torch import Tensor

from quafl.core.messages import Buffers, Model
from quafl.core.pieces import placed
from quafl.core.seams import ClientState, Counts, Direction, Ids, Optimizer, OptimizerState, Task
from quafl.sim.executors.sequential import Sequential
from quafl.tasks.precision import Precision

ALIGNED = 64  # octets: where lanes begin, so that what was compiled for one serves all


class Unsuitable(Exception):
    """A task that cannot be executed in this way, and why."""


class Together(Task, Protocol):
    """A task that clients can learn together."""

    @property
    def precision(self) -> Precision:
        """In what arithmetic."""

    @property
    def in_memory(self) -> bool:
        """Whether the data are where models are."""

    def same_shape(self, ids: Ids) -> Tensor:
        """Which clients have batches of the common shape."""

    def pure_gradient(self, model: Model, buffers: Buffers, client: Tensor, step: Tensor) -> tuple[Model, Buffers]:
        """`gradient` of the client's batch for the step, as a function that can be vectorised and traced."""


class State(NamedTuple):
    """What changes in a step: of one client, or of all lanes, a row each."""

    model: Model
    buffers: Buffers
    optimizer: OptimizerState


class Lane(NamedTuple):
    """All that a step needs."""

    state: State
    own: dict[str, Model]  # what the algorithm's direction may look at, and a step does not change
    factor: Tensor  # of the displacement
    client: Tensor
    step: Tensor


Step: TypeAlias = Callable[[Lane], State]
Advance: TypeAlias = Callable[[int], object]  # the first so many lanes take a step, in place; more do no harm
Gradient: TypeAlias = Callable[..., tuple[Model, Buffers]]


def can_be_together(task: Task) -> TypeGuard[Together]:
    """Whether the task has what lanes need."""
    return all(hasattr(task, part) for part in ("precision", "in_memory", "same_shape", "pure_gradient"))


class Hooked(NamedTuple):
    """A client in a lane, as the algorithm's direction sees it."""

    progress: Model
    own: dict[str, Model]

    def __getattr__(self, name: str) -> Model:
        try:
            return self.own[name]
        except KeyError:
            raise AttributeError(f"a local step's direction may use a client's vectors, not its {name!r}") from None


def step_of(gradient: Gradient, optimizer: Optimizer, direction: Direction | None) -> Step:
    """`core.client.local_step` on the local model itself: x ← x − factor·displacement. For one lane or all of them, as
    the gradient is."""

    def step(lane: Lane) -> State:
        model, buffers, state = lane.state
        gradients, buffers = gradient(model, buffers, lane.client, lane.step)
        if direction is not None:
            gradients = direction(Hooked(lane.own["base"] - model, lane.own), gradients)
        displacement, state = optimizer.update(gradients, state, model)
        return State(model - lane.factor.unsqueeze(-1) * displacement, buffers, state)

    return step


def lanes_for(newcomer: Any, client: int, width: int, *, hooked: bool) -> Lane:
    """Room for `width` clients, filled with newcomers that have a client's data; if `hooked`, also for the vectors that
    a direction may look at."""

    def row_each(tensor: Tensor) -> Tensor:
        return _aligned(tensor.expand(width, *tensor.shape))

    state = State(row_each(newcomer.base), row_each(newcomer.buffers), tuple(map(row_each, newcomer.optimizer)))
    own = {name: row_each(vector) for name, vector in vectors_of(newcomer).items()} if hooked else {}
    factor, someone, first = (torch.tensor(value, device=newcomer.base.device) for value in (1.0, client, 0))
    return Lane(state, own, row_each(factor), row_each(someone), row_each(first))


def vectors_of(clients: Any) -> dict[str, Model]:
    """Those that local steps do not change: the base, and what an algorithm has beside it."""
    changing = {f.name for f in fields(ClientState)} - {"base"}
    found = {f.name: getattr(clients, f.name) for f in fields(clients) if f.name not in changing}
    return {name: tensor for name, tensor in found.items() if tensor.dim() == clients.base.dim()}


class Lanes:
    """Executes steps in lanes, which `advance` moves on, `size` at a time; clients whose batches are smaller than the
    others' take theirs one after another."""

    def __init__(
        self,
        name: str,
        advance: Advance,
        size: int,
        task: Together,
        optimizer: Optimizer,
        direction: Direction | None,
        lanes: Lane,
    ) -> None:
        self.name = name
        self._task, self._optimizer, self._lanes, self._size = task, optimizer, lanes, size
        self._advance = advance
        self._alone = Sequential(task, optimizer, direction)
        seats = *flatten(lanes.state), lanes.factor, *lanes.own.values()
        self._seats = list(zip(*map(torch.unbind, seats), strict=True))  # by lane

    def __call__(self, clients: Any, ids: Ids, counts: Counts) -> Any:
        """The clients after `counts` more steps each."""
        together = self._task.same_shape(ids)
        with on(clients.base.device):
            after = self._in_lanes(clients, ids, counts.where(together, 0))
        rest = (~together & (counts > 0)).nonzero().squeeze(-1)
        return after.with_rows(rest, self._alone(after[rest], ids[rest], counts[rest])) if len(rest) else after

    def _in_lanes(self, clients: Any, ids: Ids, counts: Counts) -> Any:
        total, longest = int(counts.sum()), int(counts.max()) if len(counts) else 0
        if not total:
            return clients
        enough = -(-total // longest)  # lanes, so that those who take the most steps are not waited for
        plan = share_out(counts.tolist(), min(len(self._lanes.factor), -(-enough // self._size) * self._size))
        here, rows = clients.base.device, torch.tensor(plan.rows)
        work = placed(torch.stack((ids[rows], clients.steps[rows] + torch.tensor(plan.steps))), here)
        factor = torch.full((len(ids),), self._optimizer.rate)
        if self._optimizer.factor is not None:
            factor = factor * self._optimizer.factor(clients.round)
        vectors = vectors_of(clients)
        fixed = placed(factor, here), *(vectors[name] for name in self._lanes.own)
        before = clients.base, clients.buffers, *clients.optimizer
        after = [torch.empty(part.shape, dtype=part.dtype, device=here) for part in before]
        # By row: what a client has, at first and when it breaks off, and what does not change.
        at_first, then, given = (list(zip(*map(torch.unbind, some), strict=True)) for some in (before, after, fixed))
        _copy([(then[row], at_first[row]) for row, count in enumerate(counts.tolist()) if not count])
        now = list(at_first)
        client, step = (lanes[: plan.width] for lanes in (self._lanes.client, self._lanes.step))
        for tick, (active, whose, which) in enumerate(zip(plan.active, *map(torch.unbind, work), strict=True)):
            _copy([(self._seats[lane], (*now[row], *given[row])) for lane, row in plan.come[tick]])
            client.copy_(whose)
            step.copy_(which)
            self._advance(active)
            _copy([(then[row], self._seats[lane][: len(then[row])]) for lane, row in plan.go[tick]])
            for _, row in plan.go[tick]:
                now[row] = then[row]
        model, buffers, *optimizer = after
        return replace(
            clients,
            progress=clients.base - model,
            buffers=buffers,
            optimizer=tuple(optimizer),
            steps=clients.steps + counts,
            taken=clients.taken + counts,
        )


class Timetable(NamedTuple):
    """Who does what when: lists by tick, and in them by lane."""

    width: int
    rows: list[list[int]]  # whose step
    steps: list[list[int]]  # which of its steps
    active: list[int]  # how many lanes have something to do, always the first ones; the others repeat something
    come: list[list[tuple[int, int]]]  # (lane, row) that begin in the tick, or go on after a break
    go: list[list[tuple[int, int]]]  # that end in it, or break off


def share_out(counts: Sequence[int], width: int) -> Timetable:
    """As few ticks as there can be (McNaughton, 1959): lane after lane is filled to its end. What is left of a client
    then opens the next lane, and so comes first."""
    total, longest = sum(counts), max(counts, default=0)
    ticks = max(longest, -(-total // width))
    plan = Timetable(
        width=width,
        rows=[[counts.index(longest)] * width for _ in range(ticks)],
        steps=[[0] * width for _ in range(ticks)],
        active=[total // ticks + (tick < total % ticks) for tick in range(ticks)],
        come=[[] for _ in range(ticks)],
        go=[[] for _ in range(ticks)],
    )
    place = 0  # lane·ticks + tick
    for row, count in enumerate(counts):
        if not count:
            continue
        over = max(0, place % ticks + count - ticks)  # steps that do not fit into the lane
        for first, steps in (place, range(over, count)), (place + count - over, range(over)):
            lane, tick = divmod(first, ticks)
            if steps:
                plan.come[tick].append((lane, row))
                plan.go[tick + len(steps) - 1].append((lane, row))
            for moment, step in enumerate(steps, tick):
                plan.rows[moment][lane], plan.steps[moment][lane] = row, step
        place += count
    return plan


def _copy(moves: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
    """All tensors of each move's second part into those of the first: one launch, on a GPU."""
    if moves:
        to, what = ([tensor for move in moves for tensor in move[side]] for side in (0, 1))
        torch._foreach_copy_(to, what)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Streams and graphs are those of the device, whichever is torch's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def flatten(state: State) -> tuple[Tensor, ...]:
    """All its tensors."""
    return state.model, state.buffers, *state.optimizer


def _aligned(rows: Tensor) -> Tensor:
    """A copy whose rows all begin at aligned addresses."""
    step = ALIGNED // rows.element_size()
    strides = rows[0].contiguous().stride()
    result = torch.empty_strided(
        rows.shape, (-(-rows[0].numel() // step) * step, *strides), dtype=rows.dtype, device=rows.device
    )
    return result.copy_(rows)
