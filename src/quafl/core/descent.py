"""How a server moves along the direction that its clients give: at once, with momentum, or as Adam does.

Each is a pair of pure functions, as a client's optimizer is (`core.optim`), at rate 1; the algorithm has the rate. The
direction is one to descend: where the server stands less where its clients would have it.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from quafl.core.checks import check_positive, check_share
from quafl.core.messages import Model
from quafl.core.seams import OptimizerState


class Descent(Protocol):
    """Of a server."""

    def init(self, model: Model) -> OptimizerState:
        """What it keeps, at the beginning."""

    def update(self, direction: Model, state: OptimizerState) -> tuple[Model, OptimizerState]:
        """How far it moves, and what it keeps then."""


@dataclass(frozen=True, slots=True)
class Plain:
    """As far as the clients say."""

    def init(self, model: Model) -> OptimizerState:
        """Nothing."""
        return ()

    def update(self, direction: Model, state: OptimizerState) -> tuple[Model, OptimizerState]:
        """The direction itself."""
        return direction, state


PLAIN = Plain()


@dataclass(frozen=True, slots=True)
class HeavyBall:
    """v ← β v + Δ, and v is the step (FedAvgM: Hsu et al., "Measuring the Effects of Non-Identical Data Distribution
    for Federated Visual Classification", 2019, section 4.3)."""

    beta: float = 0.9

    def __post_init__(self) -> None:
        check_share("beta", self.beta)

    def init(self, model: Model) -> OptimizerState:
        """v = 0."""
        return (torch.zeros_like(model),)

    def update(self, direction: Model, state: OptimizerState) -> tuple[Model, OptimizerState]:
        """v."""
        velocity = torch.add(direction, state[0], alpha=self.beta)
        return velocity, (velocity,)


@dataclass(frozen=True, slots=True)
class Adaptive:
    """m ← β₁ m + (1 − β₁) Δ, v ← β₂ v + (1 − β₂) Δ², and m/(√v + τ) is the step, without Adam's correction of the
    first steps (FedAdam: Reddi et al., "Adaptive Federated Optimization", 2021, Algorithm 2). With `largest`, the
    largest v so far is taken (AMSGrad), as FADAS does (Wang et al., 2024, Algorithm 1)."""

    betas: tuple[float, float] = (0.9, 0.99)
    tau: float = 1e-3
    largest: bool = False

    def __post_init__(self) -> None:
        for beta in self.betas:
            check_share("betas", beta)
        check_positive("tau", self.tau)

    def init(self, model: Model) -> OptimizerState:
        """m = 0; v = τ², the least that the paper begins with."""
        square = torch.full_like(model, self.tau**2)
        return (torch.zeros_like(model), square, square) if self.largest else (torch.zeros_like(model), square)

    def update(self, direction: Model, state: OptimizerState) -> tuple[Model, OptimizerState]:
        """m/(√v + τ)."""
        first, second = self.betas
        mean = torch.lerp(state[0], direction, 1 - first)
        square = torch.addcmul(second * state[1], direction, direction, value=1 - second)
        if not self.largest:
            return mean / (square.sqrt() + self.tau), (mean, square)
        most = torch.maximum(state[2], square)
        return mean / (most.sqrt() + self.tau), (mean, square, most)
