"""One simulated run, from its parts to its rows; it can be left and taken up again, bit for bit."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quafl.codec.coders import coders_for
from quafl.codec.seams import Codec, Codecs
from quafl.core.judgement import judged
from quafl.core.questions import Questions, put_off
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm, Optimizer, Score, ServerState, Task, Totals
from quafl.record.diagnostics import mean_model, potential
from quafl.record.evaluations import Evaluations, Standing, is_sound
from quafl.record.rows import Row, is_as_good
from quafl.sim.checks import check_parts
from quafl.sim.clock import VirtualClock
from quafl.sim.crew import Contacts
from quafl.sim.fleet import Mark, Placing, SimulatedFleet
from quafl.sim.world import World

_log = logging.getLogger(__name__)
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


class _Round(NamedTuple):
    """A round that has been run, or of which all is under way."""

    server: ServerState  # after it
    time: float  # likewise
    mark: Mark | None  # where the fleet stood before it, if it can be taken back
    questions: Questions | None  # that decide whether it went well, if they were put off


class Simulation:
    """An iterator of rounds: each gives the row of an evaluation, or None. Between two, `state` is all that another
    one, made from the same parts, needs to go on from there. `given` are numbers of the clients that the world knows in
    advance; `executor` is as in `simulate`. With `spread`, clients are elsewhere (`sim.spread`); beyond `memory`
    octets, what clients keep is on disk (`sim.shelf`). Clients that judge have `names`, or are called by their numbers.
    """

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
        names: Sequence[str] | None = None,
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
        judges = torch.linspace(0, clients - 1, min(clients, JUDGES), dtype=torch.float64).long().tolist()
        self._judges = {client: str(client) if names is None else names[client] for client in judges}
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
        self._ahead: _Round | None = None  # the round after the last that was reached, if it has been begun
        self._distrust, self._at_once = 0, 0  # rounds that went wrong in a row, and those that are not begun ahead
        self._reach(_Round(self.server, self._clock.now(), None, None))
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
        """What each client said of the model that was evaluated last, by its name; nothing, if none was asked."""
        return self._evaluations.clients

    @property
    def size(self) -> int:
        """How many clients there are."""
        return self._fleet.size

    @property
    def crew(self) -> Contacts:
        """The clients."""
        self._take_back()
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
            done = self._next()
            self._still = self._still + 1 if done.time == self.time else 0
            if self._still == MOTIONLESS:
                raise ValueError(
                    f"{MOTIONLESS} rounds took no simulated time: give the clients a latency or the algorithm a wait, "
                    f"and let somebody be there"
                )
            if done.time > self._plan.until:
                break
            self._reach(done)
            self._evaluated = False
            yield self._evaluate() if done.time >= self._evaluations.due else None
        if not self._evaluated:
            yield self._evaluate()

    def _next(self) -> "_Round":
        """The next round. On a GPU the one after it is begun before it is known that this one went well, so that the
        device need not wait for the host; if it did not, both are taken back, and this one is run again, at once."""
        one = self._ahead or self._attempt(self.server) or self._run(self.server)
        self._ahead = None
        if one.mark is None or one.questions is None:
            return one
        if one.time < min(self._evaluations.due, self._plan.until):
            self._ahead = self._attempt(one.server)
        if self._fleet.settle(one.questions, None if self._ahead is None else self._ahead.mark):
            self._distrust = 0
            return one
        self._ahead = None
        self._go_back(one.mark)
        return self._run(self.server)

    def _go_back(self, mark: Mark) -> None:
        """A round that was begun ahead was of no use: fewer are begun from now on."""
        self._fleet.back(mark)
        self._distrust = 2 * self._distrust + 1
        self._at_once = self._distrust

    def _run(self, server: ServerState) -> "_Round":
        """A round from there, at once."""
        self._at_once = max(0, self._at_once - 1)
        server = self._fleet.run(self._algorithm.round(server, self._rng))
        return _Round(server, self._clock.now(), None, None)

    def _attempt(self, server: ServerState) -> "_Round | None":
        """A round whose questions are put off; none, if it could not be taken back, or if something is wrong with it:
        that is said when it is run at once."""
        mark = None if self._plan.potential or self._at_once else self._fleet.mark()
        if mark is None:
            return None
        try:
            with put_off() as questions:
                server = self._fleet.run(self._algorithm.round(server, self._rng))
                is_sound(server)
        except Exception:
            _log.debug("a round that was begun ahead is run at once", exc_info=True)
            self._go_back(mark)
            return None
        questions.send()
        return _Round(server, self._clock.now(), mark, questions)

    def _is_good_enough(self) -> bool:
        plan, last = self._plan, self.rows[-1]
        if plan.stop_at is None:
            return False
        return is_as_good(last, plan.stop_at, plan.metric, lower_is_better=plan.lower_is_better)

    def state(self) -> dict[str, Any]:
        """For `restore`: dictionaries, lists, tensors and numbers."""
        self._take_back()
        self.server = replace(self.server, expected={name: float(far) for name, far in self.server.expected.items()})
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
        self._take_back()
        self.server = self._algorithm.records.server.from_tree(state["server"])
        self._evaluations.restore(state["evaluations"])
        self._clock.restore(state["clock"])
        self._rng.restore(state["rng"])
        self._fleet.restore(state["fleet"])
        self._totals, self._spread, self._mean = Totals(**state["totals"]), state["spread"], state["mean"]
        self._evaluated, self._still = state["evaluated"], state["still"]

    def _take_back(self) -> None:
        """A round that has been begun ahead."""
        if self._ahead is not None and self._ahead.mark is not None:
            self._fleet.back(self._ahead.mark)
        self._ahead = None

    def _reach(self, done: "_Round") -> None:
        """Where the run stands after a round."""
        state, ahead = done.server, self._ahead
        self._evaluations.reach(done.time, state, checked=done.questions is not None)
        totals = self._fleet.totals if ahead is None or ahead.mark is None else ahead.mark.totals
        self.server, self._totals = state, replace(totals)
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
            name: judged(
                self._task, client, shown.model, shown.buffers, optimizer=self._optimizer, personal_steps=steps
            )
            for client, name in self._judges.items()
        }
        return {client: score for client, score in scores.items() if score is not None}
