"""Local optimizers, as pairs of pure functions, and schedules of the learning rate.

Every optimizer takes a `clip`, then a `weight_decay`, as PyTorch does when `clip_grad_norm_` comes before the step: the
gradient is g ← g·min(1, clip/‖g‖), and then g ← g + λ·x. Each is an optimizer made of another one, and acts on a stack
of models "... d" as on a single one.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf, pi
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quafl.core.checks import check_positive, check_share
from quafl.core.messages import Model
from quafl.core.seams import Counts, Optimizer, OptimizerState

WEIGHT_DECAY = 0.01  # of adamw, as in torch

Schedule: TypeAlias = Callable[[Counts], Tensor]  # the server's round, as a client knows it -> factor of its lr


def sgd(
    lr: float, schedule: Schedule | None = None, *, weight_decay: float = 0.0, clip: float | None = None
) -> Optimizer:
    """Displacement η·g̃ (Algorithm 1, LocalUpdates, lines 4-5).

    Args:
      lr: η.
      schedule: factor of η, by the server's round.
      weight_decay: λ; λ·x is added to the gradient.
      clip: the longest that a gradient may be; None: any length.
    """
    check_positive("lr", lr)

    def init(model: Model) -> OptimizerState:
        return ()

    def update(gradient: Model, state: OptimizerState, model: Model) -> tuple[Model, OptimizerState]:
        return gradient, state

    name = _made("sgd", lr=lr, schedule=schedule, weight_decay=weight_decay, clip=clip)
    return _of_clean_gradients(Optimizer(init, update, schedule, rate=lr, name=name), weight_decay, clip)


def momentum(
    lr: float,
    beta: float = 0.9,
    *,
    nesterov: bool = False,
    schedule: Schedule | None = None,
    fresh: bool = False,
    weight_decay: float = 0.0,
    clip: float | None = None,
) -> Optimizer:
    """Displacement η·v with v ← β·v + g̃ (torch's SGD with momentum); Nesterov's: η·(g̃ + β·v)."""
    check_positive("lr", lr)
    check_share("beta", beta)

    def init(model: Model) -> OptimizerState:
        return (torch.zeros_like(model),)

    def update(gradient: Model, state: OptimizerState, model: Model) -> tuple[Model, OptimizerState]:
        velocity = torch.add(gradient, state[0], alpha=beta)
        direction = torch.add(gradient, velocity, alpha=beta) if nesterov else velocity
        return direction, (velocity,)

    said = {"nesterov": nesterov, "schedule": schedule, "fresh": fresh, "weight_decay": weight_decay, "clip": clip}
    name = _made("momentum", lr=lr, beta=beta, **said)
    return _of_clean_gradients(Optimizer(init, update, schedule, fresh, rate=lr, name=name), weight_decay, clip)


def adam(
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    *,
    schedule: Schedule | None = None,
    fresh: bool = False,
    weight_decay: float = 0.0,
    clip: float | None = None,
) -> Optimizer:
    """Displacement η·m̂/(√v̂ + ε) (Kingma and Ba, 2015, Algorithm 1). Weight decay goes through the moments; `adamw` is
    what models are usually fine-tuned with."""
    check_positive("lr", lr)
    check_positive("eps", eps)
    for beta in betas:
        check_share("betas", beta)
    first, second = betas

    def init(model: Model) -> OptimizerState:
        return torch.zeros_like(model), torch.zeros_like(model), torch.zeros(model.shape[:-1], device=model.device)

    def update(gradient: Model, state: OptimizerState, model: Model) -> tuple[Model, OptimizerState]:
        mean, square, count = state
        count = count + 1
        mean = torch.lerp(mean, gradient, 1 - first)
        square = (second * square).addcmul_(gradient, gradient, value=1 - second)
        size = (lr / (1 - first**count)).unsqueeze(-1)
        scale = (1 - second**count).rsqrt().unsqueeze(-1)
        return (size * mean).div_(square.sqrt().mul_(scale).add_(eps)), (mean, square, count)

    said = {"schedule": schedule, "fresh": fresh, "weight_decay": weight_decay, "clip": clip}
    name = _made("adam", lr=lr, betas=betas, eps=eps, **said)
    return _of_clean_gradients(Optimizer(init, update, schedule, fresh, name=name), weight_decay, clip)


def adamw(
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    *,
    weight_decay: float = WEIGHT_DECAY,
    schedule: Schedule | None = None,
    fresh: bool = False,
    clip: float | None = None,
) -> Optimizer:
    """Displacement η·(m̂/(√v̂ + ε) + λ·x): Adam with weight decay beside the moments (Loshchilov and Hutter, "Decoupled
    Weight Decay Regularization", 2019, Algorithm 2). The schedule is a factor of both."""
    _check_decay(weight_decay)
    plain = adam(lr, betas, eps, schedule=schedule, fresh=fresh, clip=clip)

    def update(gradient: Model, state: OptimizerState, model: Model) -> tuple[Model, OptimizerState]:
        displacement, state = plain.update(gradient, state, model)
        return torch.add(displacement, model, alpha=lr * weight_decay), state

    said = {"weight_decay": weight_decay, "schedule": schedule, "fresh": fresh, "clip": clip}
    return plain._replace(update=update, name=_made("adamw", lr=lr, betas=betas, eps=eps, **said))


def _of_clean_gradients(optimizer: Optimizer, weight_decay: float, clip: float | None) -> Optimizer:
    """The optimizer of g·min(1, clip/‖g‖) + λ·x."""
    _check_decay(weight_decay)
    return _clipped(_decayed(optimizer, weight_decay) if weight_decay else optimizer, clip)


def _decayed(optimizer: Optimizer, weight_decay: float) -> Optimizer:
    """The optimizer of g + λ·x, the gradient of f + λ/2 ‖x‖²."""

    def update(gradient: Model, state: OptimizerState, model: Model) -> tuple[Model, OptimizerState]:
        return optimizer.update(torch.add(gradient, model, alpha=weight_decay), state, model)

    return optimizer._replace(update=update)


def _clipped(optimizer: Optimizer, longest: float | None) -> Optimizer:
    """The optimizer of g·min(1, longest/‖g‖) (Pascanu et al., "On the difficulty of training recurrent neural
    networks", 2013, Algorithm 1), the norm being each model's own."""
    if longest is None:
        return optimizer
    check_positive("clip", longest)

    def update(gradient: Model, state: OptimizerState, model: Model) -> tuple[Model, OptimizerState]:
        norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        return optimizer.update(gradient * (longest / norm.clamp(min=longest)), state, model)

    return optimizer._replace(update=update)


def _check_decay(weight_decay: float) -> None:
    if not 0 <= weight_decay < inf:
        raise ValueError(f"weight_decay is {weight_decay}, must not be negative, and finite; 0 is none")


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
