"""L, σ², G² and B² of a task, estimated from gradients alone: what they are at some points on the way, not everywhere.

All that is asked of a task is what clients ask: batches and gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quafl.core.messages import Buffers, Model
from quafl.core.randomness import derive
from quafl.core.seams import Task

CLIENTS = 20  # that are probed, at most; of more, so many that are evenly spread
BATCHES = 8  # of each, behind a client's mean gradient and its variance
SHARP_CLIENTS, SHARP_BATCHES = 3, 4  # behind the curvature
ITERATIONS = 12  # of the power method, two gradients of each batch
STEPS = 10, 40  # of descent with all clients, after which there are the second and the third point
FAR = 1e-3  # how far the two gradients of a finite difference are from the point, relatively


@dataclass(frozen=True, slots=True)
class Estimate:
    """The largest value found, as the theorems ask for bounds, and the smallest, over clients and points."""

    value: float
    least: float
    gradients: int  # that it took


@dataclass(frozen=True, slots=True)
class Probe:
    """What was found."""

    smoothness: Estimate  # L
    variance: Estimate  # σ²
    dissimilarity: Estimate  # G², with B² = 1
    stretch: Estimate  # B², if G² were 0; it is not used beside G²
    gradient: Estimate  # ‖∇f‖²: what a bound is to be compared with
    clients: int  # that were probed
    points: int

    @property
    def gradients(self) -> int:
        """All that were computed; each of them of a batch. G², B² and ‖∇f‖² come from those of σ²."""
        return self.smoothness.gradients + self.variance.gradients


def probe(task: Task, clients: int, rate: float) -> Probe:
    """At the initial model, and after STEPS steps of descent, each along the mean of all clients' gradients.

    >>> from quafl.tasks import Quadratic
    >>> task = Quadratic(torch.tensor([0.5, 2.0]), torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    >>> found = probe(task, clients=2, rate=0.1)
    >>> round(found.smoothness.value, 2), round(found.dissimilarity.value, 2), found.variance.value
    (2.0, 0.25, 0.0)
    """
    return _Probing(task, clients).all_points(rate)


class _Probing:
    def __init__(self, task: Task, clients: int) -> None:
        self._task = task
        self._chosen = torch.linspace(0, clients - 1, min(clients, CLIENTS), dtype=torch.float64).long().tolist()
        self._taken = dict.fromkeys(self._chosen, 0)  # batches of each client so far
        self._count = 0  # gradients

    def all_points(self, rate: float) -> Probe:
        model, buffers = self._task.initial()
        spread: list[tuple[list[float], float, float]] = []
        sharp: list[float] = []
        sharp_cost = 0
        for point, steps in enumerate((0, *STEPS)):
            for _ in range(steps):
                model = model - rate * torch.stack(
                    [self._next(client, model, buffers) for client in self._chosen]
                ).mean(0)
            if not model.isfinite().all():
                raise ValueError(f"descent with lr = {rate:g} leaves the finite numbers; try a smaller algorithm.lr")
            spread.append(self._spread(model, buffers))
            before = self._count
            some = self._chosen[:: max(1, len(self._chosen) // SHARP_CLIENTS)][:SHARP_CLIENTS]
            sharp += [self._curvature(client, model, buffers, point) for client in some]
            sharp_cost += self._count - before
        return _probe(spread, sharp, (self._count - sharp_cost, sharp_cost), len(self._chosen))

    def _gradient(self, model: Model, buffers: Buffers, batch: Any) -> Model:
        self._count += 1
        return self._task.gradient(model, buffers, batch)[0]

    def _next(self, client: int, model: Model, buffers: Buffers) -> Model:
        """Of the client's next batch."""
        self._taken[client] += 1
        return self._gradient(model, buffers, self._task.batch(client, self._taken[client] - 1))

    def _spread(self, model: Model, buffers: Buffers) -> tuple[list[float], float, float]:
        """Each client's variance; (1/n) Σ ‖∇f_i‖² and ‖∇f‖², without what the noise of the means adds to them."""
        means, variances = [], []
        for client in self._chosen:
            found = torch.stack([self._next(client, model, buffers) for _ in range(BATCHES)]).double()
            means.append(found.mean(dim=0))
            variances.append(float((found - means[-1]).square().sum()) / (BATCHES - 1))
        rows, noise = torch.stack(means), sum(variances) / len(variances) / BATCHES
        each = float(rows.square().sum(dim=-1).mean()) - noise
        whole = float(rows.mean(dim=0).square().sum()) - noise / len(rows)
        return variances, max(each, 0.0), max(whole, 0.0)

    def _curvature(self, client: int, model: Model, buffers: Buffers, point: int) -> float:
        """‖∇²f_i‖ by the power method: v ← Hv/‖Hv‖ with Hv ≈ (∇f_i(x + εv) − ∇f_i(x − εv))/2ε on fixed batches."""
        batches = [self._task.batch(client, step) for step in range(SHARP_BATCHES)]
        generator = torch.Generator().manual_seed(derive("curvature", client, point))
        direction = torch.randn(model.shape, generator=generator).to(model)
        far, length = FAR * (1 + float(model.norm())), 0.0
        for _ in range(ITERATIONS):
            step = far * direction / direction.norm()
            ahead, behind = (
                torch.stack([self._gradient(model + side * step, buffers, batch) for batch in batches]).mean(dim=0)
                for side in (1, -1)
            )
            direction = (ahead - behind) / (2 * far)
            length = float(direction.norm())
            if not length:
                return 0.0
        return length


def _probe(
    spread: Sequence[tuple[list[float], float, float]], sharp: list[float], cost: tuple[int, int], clients: int
) -> Probe:
    variances = [one for mine, _, _ in spread for one in mine]
    apart = [max(each - whole, 0.0) for _, each, whole in spread]
    ratios = [max(each / whole, 1.0) for _, each, whole in spread if whole > 0] or [1.0]
    wholes = [whole for _, _, whole in spread]
    return Probe(
        Estimate(max(sharp), min(sharp), cost[1]),
        Estimate(max(variances), min(variances), cost[0]),
        Estimate(max(apart), min(apart), 0),
        Estimate(max(ratios), min(ratios), 0),
        Estimate(max(wholes), min(wholes), 0),
        clients,
        len(spread),
    )
