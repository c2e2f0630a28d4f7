"""One curve, complete: all sections together, and the simulation that they build."""

from math import inf
from pathlib import Path
from typing import Self

import tomli_w
from pydantic import Field, model_validator

from quafl.codec.coders import coders_for
from quafl.core.randomness import Generators
from quafl.core.seams import Task
from quafl.settings.algorithms import DEFAULT, Algorithms
from quafl.settings.base import Section
from quafl.settings.codecs import DEFAULT as DEFAULT_CODEC
from quafl.settings.codecs import CodecChoice
from quafl.settings.defence import DefenceSettings
from quafl.settings.own import OwnAlgorithm, OwnCodec, OwnTask, sources
from quafl.settings.tasks import DigitsTask, Tasks
from quafl.settings.world import Clients, Run
from quafl.sim import Simulation
from quafl.sim.fleet import Placing
from quafl.tasks import own


class Settings(Section):
    """One curve, complete."""

    label: str = "run"
    task: Tasks | OwnTask = Field(default=DigitsTask(), discriminator="name")
    clients: Clients = Clients()
    algorithm: Algorithms | OwnAlgorithm = Field(default=DEFAULT, discriminator="name")
    codec: CodecChoice | OwnCodec = Field(default=DEFAULT_CODEC, discriminator="name")
    run: Run = Run()
    defence: DefenceSettings = DefenceSettings()
    modules: list[str] | None = None  # the folders of the user's own modules

    @model_validator(mode="after")
    def _served(self) -> Self:
        if self.clients.names is not None and not isinstance(self.task, OwnTask):
            raise ValueError(
                f"clients.names = {self.clients.names}: must be left out, only a task of one's own (task.make) is "
                f"asked for them"
            )
        if self.clients.count > self.task.most_clients:
            raise ValueError(
                f"clients.count = {self.clients.count}: must be at most {self.task.most_clients}, "
                f"or some would have no data of task {self.task.name!r}"
            )
        return self

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        algorithm, world, count = self.algorithm.build(self.defence.build()), self.clients.build(), self.clients.count
        if algorithm.sampled > count:
            raise ValueError(f"algorithm.sampled = {algorithm.sampled}: must be at most clients.count = {count}")
        coders = coders_for(algorithm, self.codec.build())
        world.speeds(count, Generators(0), self.run.until)
        world.link(count, coders)
        self.algorithm.given(world, count, coders, seed=0)
        self.algorithm.build_optimizer()
        return self

    def simulation(
        self, seed: int, executor: str | None = None, spread: Placing | None = None
    ) -> tuple[Task, Simulation]:
        """One seed of this curve, ready to run; with a particular executor, if it is not to be chosen, and with clients
        that are elsewhere."""
        own.reach(map(Path, self.modules or []))  # this may be another process
        task, world, algorithm, codec = (
            self.task.build(self.clients, self.run, seed),
            self.clients.build(),
            self.algorithm.build(self.defence.build()),
            self.codec.build(),
        )
        given = self.algorithm.given(world, self.clients.count, coders_for(algorithm, codec), seed)
        optimizer = self.algorithm.build_optimizer()
        parts = task, self.clients.count, world, algorithm, codec, optimizer, self.run.plan(seed)
        executor, memory = executor or self.run.executor, 1e9 * self.run.memory
        names = self.clients.names
        return task, Simulation(*parts, given=given, executor=executor, spread=spread, memory=memory, names=names)

    def only(self, *seeds: int) -> Self:
        """It with these seeds, none of which depends on what others there are to be, where code is, who is told, how
        many workers there are, or how much memory."""
        run = self.run.model_copy(update={"seeds": list(seeds), "track": None, "workers": 1, "memory": inf})
        return self.model_copy(update={"run": run, "modules": None})

    def sources(self) -> str:
        """The files of the user's own code, and digests of them."""
        return sources(self.task, self.algorithm, self.codec)

    def to_toml(self) -> str:
        """Every setting, defaults too; a file that can be run again."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))
