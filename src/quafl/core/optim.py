"""Local optimizers, as pairs of pure functions, and schedules of the learning rate."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import pi
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quafl.core.checks import check_positive, check_share
from quafl.core.messages import Model
from quafl.core.seams import Counts, Optimizer, OptimizerState

Schedule: TypeAlias = Callable[[Counts], Tensor]  # the server's round, as a client knows it -> factor of its lr


def sgd(lr: float, schedule: Schedule | None = None) -> Optimizer:
    """Displacement η·g̃ (Algorithm 1, LocalUpdates, lines 4-5)."""
    check_positive("lr", lr)

    def init(model: Model) -> OptimizerState:
        return ()

    def update(gradient: Model, state: OptimizerState) -> tuple[Model, OptimizerState]:
        return gradient, state

    return Optimizer(init, update, schedule, rate=lr, name=_made("sgd", lr=lr, schedule=schedule))


def momentum(
    lr: float, beta: float = 0.9, *, nesterov: bool = False, schedule: Schedule | None = None, fresh: bool = False
) -> Optimizer:
    """Displacement η·v with v ← β·v + g̃ (torch's SGD with momentum); Nesterov's: η·(g̃ + β·v)."""
    check_positive("lr", lr)
    check_share("beta", beta)

    def init(model: Model) -> OptimizerState:
        return (torch.zeros_like(model),)

    def update(gradient: Model, state: OptimizerState) -> tuple[Model, OptimizerState]:
        velocity = torch.add(gradient, state[0], alpha=beta)
        direction = torch.add(gradient, velocity, alpha=beta) if nesterov else velocity
        return direction, (velocity,)

    name = _made("momentum", lr=lr, beta=beta, nesterov=nesterov, schedule=schedule, fresh=fresh)
    return Optimizer(init, update, schedule, fresh, rate=lr, name=name)


def adam(
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    *,
    schedule: Schedule | None = None,
    fresh: bool = False,
) -> Optimizer:
    """Displacement η·m̂/(√v̂ + ε) (Kingma and Ba, 2015, Algorithm 1)."""
    check_positive("lr", lr)
    check_positive("eps", eps)
    for beta in betas:
        check_share("betas", beta)
    first, second = betas

    def init(model: Model) -> OptimizerState:
        return torch.zeros_like(model), torch.zeros_like(model), torch.zeros(model.shape[:-1], device=model.device)

    def update(gradient: Model, state: OptimizerState) -> tuple[Model, OptimizerState]:
        mean, square, count = state
        count = count + 1
        mean = torch.lerp(mean, gradient, 1 - first)
        square = (second * square).addcmul_(gradient, gradient, value=1 - second)
        size = (lr / (1 - first**count)).unsqueeze(-1)
        scale = (1 - second**count).rsqrt().unsqueeze(-1)
        return (size * mean).div_(square.sqrt().mul_(scale).add_(eps)), (mean, square, count)

    name = _made("adam", lr=lr, betas=betas, eps=eps, schedule=schedule, fresh=fresh)
    return Optimizer(init, update, schedule, fresh, name=name)


def linear(points: Sequence[tuple[float, float]]) -> Schedule:
    """From point to point (round, factor) in straight lines; before the first and after the last, as there."""
    rounds = [place for place, _ in points]
    if not points or any(later <= earlier for earlier, later in pairwise(rounds)):
        raise ValueError(f"the schedule's rounds are {rounds}, must be at least one and increase")
    if min(factor for _, factor in points) < 0:
        raise ValueError("the schedule has a negative factor; the learning rate would change its sign")

    def factor(now: Counts) -> Tensor:
        result = torch.full(now.shape, points[0][1], device=now.device)
        for (start, before), (stop, after) in pairwise(points):
            share = ((now - start) / (stop - start)).clamp(0, 1)
            result = result + share * (after - before)
        return result

    factor.__name__ = _made("linear", points=list(points))
    return factor


def cosine(rounds: int, floor: float = 0.0) -> Schedule:
    """From 1 to `floor` along half a cosine over that many rounds, then the floor (Loshchilov and Hutter, 2017)."""
    if rounds < 1 or not 0 <= floor <= 1:
        raise ValueError(f"the schedule has {rounds} rounds and floor {floor}: must be at least 1, and from 0 to 1")

    def factor(now: Counts) -> Tensor:
        return floor + (1 - floor) * 0.5 * (1 + torch.cos(pi * (now / rounds).clamp(0, 1)))

    factor.__name__ = _made("cosine", rounds=rounds, floor=floor)
    return factor


def _made(name: str, **arguments: Any) -> str:
    """How something was made: sgd(lr=0.1)."""
    said = {key: getattr(value, "__name__", value) for key, value in arguments.items() if value not in (None, False)}
    return f"{name}({', '.join(f'{key}={value}' for key, value in said.items())})"
