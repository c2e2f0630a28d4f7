"""Local optimizers, as pairs of pure functions."""

from quafl.core.seams import Model, Optimizer, OptimizerState


def sgd(lr: float) -> Optimizer:
    """Displacement η·g̃ (Algorithm 1, LocalUpdates, lines 4-5)."""
    if not lr > 0:
        raise ValueError(f"lr is {lr}, must be positive")

    def init(model: Model) -> OptimizerState:
        return ()

    def update(gradient: Model, state: OptimizerState) -> tuple[Model, OptimizerState]:
        return lr * gradient, state

    return Optimizer(init, update)
