"""One simulated run, from its parts to its rows; it can be left and taken up again, bit for bit."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from quafl.codec.coders import coders_for
from quafl.codec.seams import Codec, Codecs
from quafl.core.judgement import judged
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm, Optimizer, Score, ServerState, Task, Totals
from quafl.record.diagnostics import mean_model, potential
from quafl.record.evaluations import Evaluations, Standing
from quafl.record.rows import Row, is_as_good
from quafl.sim.checks import check_parts
from quafl.sim.clock import VirtualClock
from quafl.sim.crew import Contacts
from quafl.sim.fleet import Placing, SimulatedFleet
from quafl.sim.world import World

JUDGES = 1000  # clients that judge, at most; of more, so many that are evenly spread
MOTIONLESS = 1000  # rounds at the same time, after which a run has no hope of ending


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how often, and what is looked at."""

    until: float  # simulated time
    every: float  # simulated time between evaluations
    seed: int = 0
    metric: str = "accuracy"  # that the best model is chosen by; the loss where a task does not have it
    lower_is_better: bool = False  # of the metric; of the loss it always is
    potential: bool = False  # record Φ_t, how far X_t is from μ_t, and the loss of μ_t
    per_client: bool = False  # clients judge, too, each by data of its own
    personal_steps: int = 0  # local steps by which each makes the model its own, which it then judges as well
    average: float = 0.0  # time constant of the average of models that is evaluated; 0: the model itself is
    stop_at: float | None = None  # of the metric: the first evaluation as good as that is the last

    def __post_init__(self) -> None:
        if not 0 < self.until < inf or not self.every > 0:
            raise ValueError(f"until is {self.until} and every {self.every}: both must be positive, and until finite")
        if not 0 <= self.average < inf:
            raise ValueError(f"average is {self.average}, must be a time that is not negative, and finite; 0 for none")


class Simulation:
    """An iterator of rounds: each gives the row of an evaluation, or None. Between two, `state` is all that another
    one, made from the same parts, needs to go on from there. `given` are numbers of the clients that the world knows in
    advance; `executor` is as in `simulate`. With `spread`, clients are elsewhere (`sim.spread`); beyond `memory`
    octets, what clients keep is on disk (`sim.shelf`)."""

    def __init__(
        self,
        task: Task,
        clients: int,
        world: World,
        algorithm: Algorithm,
        codec: Codec | Codecs,
        optimizer: Optimizer,
        plan: Plan,
        *,
        given: Mapping[str, Tensor] | None = None,
        executor: str = "auto",
        spread: Placing | None = None,
        memory: float = inf,
    ) -> None:
        check_parts(algorithm, codec, optimizer, world)
        if algorithm.sampled > clients:
            raise ValueError(
                f"sampled is {algorithm.sampled}, there are only {clients} clients; sample at most all of them"
            )
        self.server: ServerState = algorithm.start(*task.initial())
        self._evaluations = Evaluations(
            task,
            self.server,
            every=plan.every,
            seed=plan.seed,
            metric=plan.metric,
            lower_is_better=plan.lower_is_better,
            trains=True,
            stops=plan.stop_at is not None,
            average=plan.average,
        )
        self._task, self._algorithm, self._plan, self._optimizer = task, algorithm, plan, optimizer
        self._judges = torch.linspace(0, clients - 1, min(clients, JUDGES), dtype=torch.float64).long().tolist()
        self._rng, self._clock, self._coders = Generators(plan.seed), VirtualClock(), coders_for(algorithm, codec)
        speeds, link = world.speeds(clients, self._rng, plan.until), world.link(clients, self._coders, self._rng)
        self._fleet = SimulatedFleet(
            task,
            optimizer,
            algorithm,
            self._coders,
            self._clock,
            speeds,
            self._rng,
            link=link,
            limited=world.link_limited,
            unreachable=world.unreachable,
            given=given,
            executor=executor,
            spread=spread,
            memory=memory,
        )
        self._spread: dict[str, float] = {}  # of all models, if it is wanted
        self._mean: Tensor | None = None  # μ_t, likewise
        self._reach(self.server)
        self._evaluated, self._still = False, 0

    @property
    def rows(self) -> list[Row]:
        """Of all evaluations so far."""
        return self._evaluations.rows

    @property
    def time(self) -> float:
        """Simulated, of the last model reached."""
        return self._evaluations.time

    @property
    def last(self) -> Standing:
        """The last model reached, or the average of models."""
        return self._evaluations.shown

    @property
    def best(self) -> Standing:
        """The best one evaluated so far."""
        return self._evaluations.best.shown

    @property
    def clients(self) -> dict[str, Score]:
        """What each client said of the model that was evaluated last, by its number; nothing, if none was asked."""
        return self._evaluations.clients

    @property
    def size(self) -> int:
        """How many clients there are."""
        return self._fleet.size

    @property
    def crew(self) -> Contacts:
        """The clients."""
        return self._fleet.crew

    @property
    def executor(self) -> str:
        """How local steps are computed."""
        return self._fleet.crew.name

    def __iter__(self) -> Iterator[Row | None]:
        """At time 0, whenever `every` more time has passed, and at the last state that is reached by the time `until`,
        there is a row."""
        if not self.rows:
            yield self._evaluate()
        while not self._is_good_enough():
            before = self._clock.now()
            state = self._fleet.run(self._algorithm.round(self.server, self._rng))
            self._still = self._still + 1 if self._clock.now() == before else 0
            if self._still == MOTIONLESS:
                raise ValueError(
                    f"{MOTIONLESS} rounds took no simulated time: give the clients a latency or the algorithm a wait, "
                    f"and let somebody be there"
                )
            if self._clock.now() > self._plan.until:
                break
            self._reach(state)
            self._evaluated = False
            yield self._evaluate() if self._clock.now() >= self._evaluations.due else None
        if not self._evaluated:
            yield self._evaluate()

    def _is_good_enough(self) -> bool:
        plan, last = self._plan, self.rows[-1]
        if plan.stop_at is None:
            return False
        return is_as_good(last, plan.stop_at, plan.metric, lower_is_better=plan.lower_is_better)

    def state(self) -> dict[str, Any]:
        """For `restore`: dictionaries, lists, tensors and numbers."""
        fleet = self._fleet.state()  # first: what it still has to compute draws from the generators
        return {
            "server": self.server.tree(),
            "clock": self._clock.state(),
            "rng": self._rng.state(),
            "fleet": fleet,
            "evaluations": self._evaluations.state(),
            "totals": asdict(self._totals),
            "spread": self._spread,
            "mean": self._mean,
            "evaluated": self._evaluated,
            "still": self._still,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.server = self._algorithm.records.server.from_tree(state["server"])
        self._evaluations.restore(state["evaluations"])
        self._clock.restore(state["clock"])
        self._rng.restore(state["rng"])
        self._fleet.restore(state["fleet"])
        self._totals, self._spread, self._mean = Totals(**state["totals"]), state["spread"], state["mean"]
        self._evaluated, self._still = state["evaluated"], state["still"]

    def _reach(self, state: ServerState) -> None:
        """Where the run stands after a round."""
        self._evaluations.reach(self._clock.now(), state)
        self.server, self._totals = state, replace(self._fleet.totals)
        if self._plan.potential:
            bases = self._fleet.clients.everybody().base
            self._mean = mean_model(state.model, bases)
            apart = float((state.model - self._mean).square().sum())
            self._spread = {"potential": potential(state.model, bases), "server_apart": apart}

    def _evaluate(self) -> Row:
        more = dict(self._spread)
        if self._mean is not None and "loss" in (score := self._task.evaluate(self._mean, self.server.buffers)):
            more["mean_model_loss"] = float(score["loss"])
        row = self._evaluations.conclude(self._evaluations.begin(self._totals), self._judged(), **more)
        self._evaluated = True
        return row

    def _judged(self) -> dict[str, Score] | None:
        """What clients say of the model that is shown."""
        if not self._plan.per_client and getattr(self._task, "has_test", True):
            return None
        shown, steps = self._evaluations.shown, self._plan.personal_steps
        scores = {
            str(client): judged(
                self._task, client, shown.model, shown.buffers, optimizer=self._optimizer, personal_steps=steps
            )
            for client in self._judges
        }
        return {client: score for client, score in scores.items() if score is not None}
