"""The contract of every algorithm, in small simulated worlds."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quafl.codec.lattice import Lattice
from quafl.codec.seams import Codec, Codecs
from quafl.core.optim import sgd
from quafl.core.seams import Algorithm, Optimizer, Task
from quafl.record import checkpoints
from quafl.record.rows import Row
from quafl.sim import Absence, Plan, Simulation, World
from quafl.tasks.quadratic import Quadratic
from quafl.testing.claims import claim

CLIENTS = 6  # at least as many as an algorithm samples
LEAVING = 8  # seeds, in one of which at least a client leaves that has not just been asked
STRANGE: dict[str, dict[str, Any]] = {
    "losses": {"unreachable": 0.3, "slow_step": 20.0},
    "churn": {"present_for": 30.0, "away_for": 30.0},
    "bandwidth": {"up_bandwidth": 100.0, "down_bandwidth": 300.0},
}


def check_algorithm(
    algorithm: Algorithm, *, codec: Codec | Codecs | None = None, optimizer: Optimizer | None = None
) -> None:
    """That the algorithm keeps its contract.

    Args:
      algorithm: one that samples at most 6 clients, and 2 of them or more, so that it is tried with several.
      codec: by default the lattice's, with 8 bits.
      optimizer: of the clients; by default `sgd(0.1)`.

    Raises:
      AssertionError: that says what is not kept.
    """
    claim(2 <= algorithm.sampled <= CLIENTS, f"sampled is {algorithm.sampled}, to be checked it must be 2 to {CLIENTS}")
    for check in CHECKS:
        check(algorithm, codec or Lattice(bits=8), optimizer or sgd(0.1))


def learns(algorithm: Algorithm, codec: Codec | Codecs, optimizer: Optimizer) -> None:
    """It comes near the minimum that all clients share."""
    rows = _rows(simulation(quadratic(8), 8, algorithm, codec, optimizer, until=800.0))
    before, after = rows[0]["distance"], rows[-1]["distance"]
    claim(
        after < 0.3 * before,
        f"it does not learn: from a distance of {before:.3g} to the minimum that all clients share it comes to "
        f"{after:.3g}, and has to come below {0.3 * before:.3g}",
    )


def repeats(algorithm: Algorithm, codec: Codec | Codecs, optimizer: Optimizer) -> None:
    """The same seed gives the same rows, and another gives others."""
    first, second, other = (
        _rows(simulation(quadratic(CLIENTS, noise=0.3), CLIENTS, algorithm, codec, optimizer, seed=seed, until=150.0))
        for seed in (4, 4, 5)
    )
    claim(first == second, "two runs with the same seed differ; draw from the generators that `round` is given")
    others = [row["loss"] for row in first] != [row["loss"] for row in other]
    claim(others, "two runs with different seeds are the same")


def resumes(algorithm: Algorithm, codec: Codec | Codecs, optimizer: Optimizer) -> None:
    """A run that was left and taken up again has the same rows, where messages are lost, clients come and go, and links
    are slow."""
    for name in STRANGE:
        resumes_in(name, algorithm, codec, optimizer)


def resumes_in(name: str, algorithm: Algorithm, codec: Codec | Codecs, optimizer: Optimizer) -> None:
    """The same in one of the STRANGE worlds."""

    def fresh() -> Simulation:
        task = quadratic(CLIENTS, spread=1.0, noise=0.3)
        return simulation(task, CLIENTS, algorithm, codec, optimizer, until=300.0, **STRANGE[name])

    straight = _rows(fresh())
    for stop in 1, 5:
        left, again = fresh(), fresh()
        for _ in zip(range(1 + stop), left, strict=False):
            pass
        with TemporaryDirectory() as folder:
            checkpoints.save(Path(folder) / "checkpoint.pt", left.state())
            again.restore(checkpoints.load(Path(folder) / "checkpoint.pt"))
        claim(
            _rows(again) == straight,
            f"a run that was left after round {stop} and taken up again, in a world with {name}, has other rows; all "
            f"that a later round needs must be in the state that `round` returns, or in the clients'",
        )


def lets_clients_leave_and_come_back(algorithm: Algorithm, codec: Codec | Codecs, optimizer: Optimizer) -> None:
    """Client 0 is away from 50 to 250; what it knows does not change in between, and then does."""
    away = [Absence(50.0, 250.0, [0])]
    for seed in range(LEAVING):  # a server may have to wait for one that left when it had just been asked
        run = simulation(quadratic(CLIENTS, spread=1.0), CLIENTS, algorithm, codec, optimizer, absences=away, seed=seed)
        left, back, steps = list[Tensor](), list[Tensor](), list[int]()
        for _ in run:
            mine = run._fleet.clients[torch.tensor([0])]
            if run.time > 50:
                (left if run.time < 250 else back).append(mine.base[0].clone())
                steps.append(int(mine.steps))
        if len(left) > 2:
            break
    claim(len(left) > 2, f"{len(left)} rounds end while a client is away; the server must not wait for it")
    claim(all(torch.equal(base, left[0]) for base in left), "what a client has changes while it is away")
    claim(len(back) > 0 and not torch.equal(back[-1], left[0]), "a client that has come back learns nothing new")
    claim(steps[-1] > steps[0], "a client that has come back takes no more steps")


def contacts_nobody_who_is_not_there(algorithm: Algorithm, codec: Codec | Codecs, optimizer: Optimizer) -> None:
    """Clients that arrive late are not contacted before."""
    late = [Absence(0.0, 100.0, [0, 1])]
    run = simulation(quadratic(CLIENTS), CLIENTS, algorithm, codec, optimizer, absences=late)
    early: set[int] = set()
    for _ in run:
        if run.time <= 100:
            early = set(run._fleet.clients._known)
    claim(not early & {0, 1}, "it contacts clients that are not there; choose from those that `Look` gives")
    claim({0, 1} <= set(run._fleet.clients._known), "it never contacts clients that arrive late")


def survives_an_empty_world(algorithm: Algorithm, codec: Codec | Codecs, optimizer: Optimizer) -> None:
    """Nobody is there before 90; then it goes on."""
    away = [Absence(0.0, 90.0)]
    rows = _rows(simulation(quadratic(CLIENTS), CLIENTS, algorithm, codec, optimizer, absences=away, every=1.0))
    early = [row["time"] for row in rows if row["time"] < 90 and row["contacts"] > 0]
    claim(not early, f"nobody is there before 90, and somebody was contacted by {early[:1]}")
    claim(rows[-1]["contacts"] > 0, "it contacts nobody after everybody has come")


class Poisoned(Quadratic):
    """Client 1's gradient is not a number in its third step, client 2's never is one after that."""

    def gradient(self, model: Tensor, buffers: Tensor, batch: tuple[int, Tensor]) -> tuple[Tensor, Tensor]:
        """NaN where the batch says so."""
        gradient, buffers = Quadratic.gradient(self, model, buffers, batch)
        return (gradient * torch.nan if bool((batch[1] > 90).all()) else gradient), buffers

    def batch(self, client: int, step: int) -> tuple[int, Tensor]:
        """Marked where the gradient is to be NaN."""
        bad = (client == 1 and step == 2) or (client == 2 and step > 2)
        client, noise = Quadratic.batch(self, client, step)
        return client, noise + 100 if bad else noise


def survives_broken_clients(algorithm: Algorithm, codec: Codec | Codecs, optimizer: Optimizer) -> None:
    """Progress that is not finite reaches neither the server nor what clients keep."""
    healthy = quadratic(CLIENTS, spread=0.5)
    task = Poisoned(healthy.curvature, healthy.centers)
    run = simulation(task, CLIENTS, algorithm, codec, optimizer)
    rows = _rows(run)
    claim(rows[-1]["broken_replies"] > 0, "no client has answered with NaN, though two compute it")
    claim(rows[-1]["lost_contacts"] >= rows[-1]["broken_replies"], "an answer of NaN does not count as lost")
    claim(rows[-1]["distance"] < rows[0]["distance"], "with two broken clients among six it learns nothing")
    clients = run._fleet.clients.everybody()
    kept = [clients.base, *clients.optimizer]
    claim(all(bool(part.isfinite().all()) for part in kept), "a client keeps values that are not finite")


Check: TypeAlias = Callable[[Algorithm, Codec | Codecs, Optimizer], None]
CHECKS: tuple[Check, ...] = (
    learns,
    repeats,
    resumes,
    lets_clients_leave_and_come_back,
    contacts_nobody_who_is_not_there,
    survives_an_empty_world,
    survives_broken_clients,
)


def quadratic(n: int, dim: int = 30, spread: float = 0.0, noise: float = 0.0) -> Quadratic:
    """Clients' minima around 1, with that spread."""
    centers = 1 + spread * torch.randn(n, dim, generator=torch.Generator().manual_seed(3))
    return Quadratic(torch.linspace(0.2, 1.0, dim), centers, noise=noise)


def simulation(
    task: Task, n: int, algorithm: Algorithm, codec: Codec | Codecs, optimizer: Optimizer | None = None, **changes: Any
) -> Simulation:
    """A run of a copy of the algorithm: what it hides in itself, another run must not need."""
    plan = Plan(until=changes.pop("until", 400.0), every=changes.pop("every", 40.0), seed=changes.pop("seed", 0))
    return Simulation(task, n, World(**changes), deepcopy(algorithm), codec, optimizer or sgd(0.1), plan)


def _rows(run: Simulation) -> list[Row]:
    for _ in run:
        pass
    return run.rows
