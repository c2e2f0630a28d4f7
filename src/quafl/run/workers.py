"""One run over many devices and machines: its clients live with Ray actors, each with a core or a GPU."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from quafl.record.summary import RunError
from quafl.run import heap
from quafl.run.cluster import connected
from quafl.run.jobs import Experiment, Hire
from quafl.sim.crew import Crew
from quafl.sim.fleet import Placing
from quafl.sim.spread import Call, Lost, Spread, Worker
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
    actors = [made.remote(modules) for _ in range(run.workers)]
    ways = _Actors(ray, actors)
    try:
        executor = ways.wait({0: actors[0].live.remote(experiment, seed, executor, (0, run.workers))})[0]
        for number in range(1, run.workers):  # all compute steps as the first one has chosen to
            ways.begun({number: actors[number].live.remote(experiment, seed, executor, (number, run.workers))})
        yield partial(Spread, ways)
    finally:
        for actor in actors:
            ray.kill(actor)


class Actor:
    """A worker's process: it makes the task for itself, and keeps its own clients' data."""

    def __init__(self, modules: dict[str, bytes]) -> None:
        torch.set_num_threads(1)
        heap.keep()
        self._code = TemporaryDirectory()  # the user's own
        own.unpack(modules, Path(self._code.name) / "code")

    def live(self, experiment: Experiment, seed: int, executor: str | None, place: tuple[int, int]) -> str:
        """Make the clients of that place; how they compute their steps."""
        number, count = place
        task, simulation = experiment.simulation(seed, executor)
        keep = getattr(task, "keep", None)
        if keep is not None:
            keep(torch.arange(simulation.size)[number::count])  # nobody, where there are more workers than clients
        assert isinstance(simulation.crew, Crew)
        self._worker = Worker(simulation.crew, simulation.server.model.device)
        return simulation.executor

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

    def ask(self, asked: Mapping[int, Call], meanwhile: Mapping[int, Iterator[Call]]) -> dict[int, bytes]:
        """See Workers."""
        calls = self._begin(asked)
        if meanwhile:
            self._occupy(calls, meanwhile)
        return self.wait(calls)

    def _occupy(self, calls: Mapping[int, Any], meanwhile: Mapping[int, Iterator[Call]]) -> None:
        """Until those calls are over, workers that have nothing to do are told more."""
        at = {call: worker for worker, call in calls.items()}
        idle = [worker for worker in meanwhile if worker not in calls]
        while not at.keys().isdisjoint(calls.values()):
            for worker in idle:
                if (more := next(meanwhile.get(worker, iter(())), None)) is not None:
                    at[self._begin({worker: more})[worker]] = worker
            (done,), _ = self._ray.wait(list(at))
            idle = [at.pop(done)]

    def tell(self, told: Mapping[int, Call]) -> None:
        """See Workers."""
        self.begun(self._begin(told))

    def begun(self, calls: Mapping[int, Any]) -> None:
        """Something that nobody waits for; what goes wrong in it is raised by the next `wait`."""
        self._told += calls.values()

    def wait(self, calls: Mapping[int, Any]) -> dict[int, Any]:
        """What comes of those calls."""
        told, self._told = self._told, []
        gone = self._ray.exceptions
        try:
            return dict(zip(calls, self._ray.get([*told, *calls.values()])[len(told) :], strict=True))
        except (gone.RayActorError, gone.ObjectLostError, gone.OutOfMemoryError, gone.NodeDiedError) as error:
            raise Lost("a worker was lost (killed, or out of memory?)") from error
        except gone.RayTaskError as error:
            raise error.cause from error  # what went wrong there, as if it had been here

    def _begin(self, asked: Mapping[int, Call]) -> dict[int, Any]:
        return {
            worker: self._actors[worker].do.remote(method, *contents) for worker, (method, contents) in asked.items()
        }
