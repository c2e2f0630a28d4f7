"""One run over many devices and machines: its clients live with Ray actors, each with a core or a GPU."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from quafl.record.summary import RunError
from quafl.run import heap
from quafl.run.cluster import connected
from quafl.run.jobs import Experiment, Hire
from quafl.sim.crew import Crew
from quafl.sim.fleet import Spread as Placing
from quafl.sim.spread import Lost, Spread, Worker
from quafl.tasks import own


@contextmanager
def hiring(address: str, most: int) -> Iterator[Hire]:
    """Workers for one seed after another, from the Ray cluster of that address; `most` are needed at a time."""
    ray = connected(address, most)
    try:
        yield partial(_hired, ray)
    finally:
        ray.shutdown()


@contextmanager
def _hired(ray: Any, experiment: Experiment, seed: int, executor: str | None) -> Iterator[Placing]:
    """As many as the experiment asks for."""
    run = experiment.run
    if ":" in run.device:
        raise RunError(f"run.device = {run.device!r}: each worker has a GPU of its own, say 'cuda'")
    needs = {"CPU": 1, "GPU": int(run.device == "cuda")}
    there = ray.cluster_resources()
    for kind, one in needs.items():
        if one * run.workers > there.get(kind, 0):
            raise RunError(
                f"run.workers = {run.workers}: each needs a {kind}, of which there are {there.get(kind, 0):g}"
            )
    modules = own.pack(map(Path, getattr(experiment, "modules", None) or []))
    made = ray.remote(num_cpus=1, num_gpus=needs["GPU"], max_restarts=0)(Actor)
    places = [(number, run.workers) for number in range(run.workers)]
    actors = [made.remote(experiment, seed, executor, place, modules) for place in places]
    try:
        yield partial(Spread, _Actors(ray, actors))
    finally:
        for actor in actors:
            ray.kill(actor)


class Actor:
    """A worker's process: it makes the task for itself, and keeps its own clients' data."""

    def __init__(
        self, experiment: Experiment, seed: int, executor: str | None, place: tuple[int, int], modules: dict[str, bytes]
    ) -> None:
        number, count = place
        torch.set_num_threads(1)
        heap.keep()
        if modules:
            own.unpack(modules, Path(mkdtemp()) / "code")
        task, simulation = experiment.simulation(seed, executor)
        keep = getattr(task, "keep", None)
        if keep is not None:
            keep(torch.arange(number, simulation.size, count))
        assert isinstance(simulation.crew, Crew)
        self._worker = Worker(simulation.crew, simulation.server.model.device)

    def do(self, method: str, *contents: bytes) -> bytes:
        """See Worker."""
        return self._worker.do(method, *contents)


class _Actors:
    """The ways to the actors."""

    def __init__(self, ray: Any, actors: list[Any]) -> None:
        self._ray, self._actors = ray, actors
        self._told: list[Any] = []  # nobody has waited for it yet

    def __len__(self) -> int:
        return len(self._actors)

    def share(self, content: bytes) -> Any:
        """Put where all machines can fetch it."""
        return self._ray.put(content)

    def ask(self, asked: Mapping[int, tuple[str, Any]]) -> dict[int, bytes]:
        """See Workers."""
        told, self._told = self._told, []
        try:
            return dict(zip(asked, self._ray.get([*told, *self._begin(asked)])[len(told) :], strict=True))
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.ObjectLostError) as error:
            raise Lost("a worker was lost (killed, or out of memory?)") from error

    def tell(self, told: Mapping[int, tuple[str, Any]]) -> None:
        """See Workers."""
        self._told += self._begin(told)

    def _begin(self, asked: Mapping[int, tuple[str, Any]]) -> list[Any]:
        return [self._actors[worker].do.remote(method, *contents) for worker, (method, contents) in asked.items()]
