"""A problem whose answers are known: client i holds f_i(x) = ½ Σ_j a_j (x_j − c_ij)², with noisy gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quafl.core.messages import Buffers, Model
from quafl.core.randomness import derive
from quafl.core.seams import EXAMPLES, Score


@dataclass(frozen=True, slots=True)
class Quadratic:
    """f = mean of the f_i: minimum at the mean centre, smoothness max a, gradient variance `noise`²."""

    curvature: Tensor  # a, "d"
    centers: Tensor  # c, "n d"
    noise: float = 0.0  # σ: E‖g̃ − ∇f_i‖² = σ²
    start: Tensor | None = None  # x_0, the origin by default
    seed: int = 0

    @property
    def minimum(self) -> Model:
        """argmin f."""
        return self.centers.mean(dim=0)

    @property
    def smoothness(self) -> float:
        """L, the largest curvature."""
        return float(self.curvature.max())

    def initial(self) -> tuple[Model, Buffers]:
        """x_0; there are no buffers."""
        start = torch.zeros_like(self.curvature) if self.start is None else self.start
        return start, torch.empty(0)

    def batch(self, client: int, step: int) -> tuple[int, Tensor]:
        """Here a batch is the client and the noise of its gradient."""
        generator = torch.Generator().manual_seed(derive(self.seed, "data", client, step))
        dim = len(self.curvature)
        return client, torch.randn(dim, generator=generator) * (self.noise / dim**0.5)

    def examples(self, client: int) -> int:
        """All clients' f_i count alike in f."""
        return 1

    def gradient(self, model: Model, buffers: Buffers, batch: tuple[int, Tensor]) -> tuple[Model, Buffers]:
        """a ∘ (x − c_i) + noise."""
        client, noise = batch
        return self.curvature * (model - self.centers[client]) + noise, buffers

    def evaluate(self, model: Model, buffers: Buffers) -> Score:
        """f(x) − min f, and how far away the minimum is."""
        away = model - self.minimum
        return {"loss": float((0.5 * self.curvature * away.square()).sum()), "distance": float(away.norm())}

    def judge(self, client: int, model: Model, buffers: Buffers) -> Score:
        """f_i(x), of a client's own centre."""
        away = model - self.centers[client]
        return {"loss": float((0.5 * self.curvature * away.square()).sum()), EXAMPLES: 1}

    def export(self, model: Model, buffers: Buffers) -> dict[str, Tensor]:
        """The point itself."""
        return {"x": model}
