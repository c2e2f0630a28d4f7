"""[clients] and [run]: who takes part, for how long, and what is kept."""

from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from quafl import sim
from quafl.settings.base import NotNegative, Positive, Section, Share, Tracker
from quafl.sim import Plan, World
from quafl.sim.executors import ExecutorName
from quafl.tasks import given
from quafl.tasks.precision import Precision


def _known(clients: object) -> object:
    numbers = isinstance(clients, list) and all(isinstance(client, int) for client in clients)
    if not numbers and clients not in ("slow", "fast", "all"):
        raise ValueError("must be 'slow', 'fast', 'all' or a list of client numbers")
    return clients


Who: TypeAlias = Annotated[Any, BeforeValidator(_known)]


class Change(Section):
    """See sim.world."""

    at: float = Field(ge=0, allow_inf_nan=False)  # from this time on
    step: Positive  # mean time of a step
    clients: Who = "all"  # 'slow', 'fast', 'all' or a list of numbers


class Absence(Section):
    """See sim.world."""

    start: float = Field(ge=0, allow_inf_nan=False)  # away from this time; 0: arrives late
    stop: Positive  # until this one
    clients: Who = "all"  # 'slow', 'fast', 'all' or a list of numbers


class Clients(Section):
    """Who takes part: see sim.world."""

    count: int = Field(default=20, ge=1)  # n
    slow: Share = 0.25  # share of slow clients, the last ones
    fast_step: Positive = 2.0  # mean time of a step of the others
    slow_step: Positive = 8.0  # and of theirs
    step_range: tuple[Positive, Positive] | None = Field(default=None, strict=False)  # of mean step times
    step_spread: NotNegative = 0.0  # σ of a log-normal law by which clients' step times differ; 0: they do not
    step_tail: NotNegative = 0.0  # a of Zipf's law, likewise: the r-th fastest takes r^a times as long
    step_law: Literal["exponential", "constant"] = "exponential"  # whether a step's time is random or always its mean
    changes: list[Change] = Field(default=[])  # steps that take another time from some time on
    absences: list[Absence] = Field(default=[])  # clients that are away for a while
    present_for: Annotated[float, Field(gt=0)] = inf  # mean time until a client leaves,
    away_for: NotNegative = 0.0  # and until it is back; both exponential
    day: NotNegative = 0.0  # length of a day, of whose hours each client is there for some; 0: no days
    day_share: Annotated[float, Field(gt=0, lt=1)] = 0.5  # for this share of it, from an hour of its own on
    day_zones: Share = 1.0  # which hours are spread over this share of the day
    trace: str | None = None  # a CSV file with every client's speeds and bandwidths, or a folder with FedScale's traces
    trace_batch: int = Field(default=32, ge=1)  # examples of a local step, for FedScale's milliseconds an example
    latency_at_32_bits: NotNegative = 10.0  # sit = this · b/32
    up_bandwidth: Positive | list[Positive] | None = None  # octets per time unit, one number or one a client
    down_bandwidth: Positive | list[Positive] | None = None  # likewise; an exchange then takes the time of its octets
    bandwidth_spread: NotNegative = 0.0  # σ of a log-normal law by which clients' bandwidths differ
    link_limited: bool = True  # the server talks to `sampled` clients at a time
    unreachable: Share = 0.0  # probability that a contact is lost
    names: list[str] | None = Field(default=None, min_length=1)  # what a task of one's own is asked for, by `task.make`

    @model_validator(mode="before")
    @classmethod
    def _counted(cls, raw: Any) -> Any:
        """Names say how many there are."""
        names = raw.get("names") if isinstance(raw, dict) else None
        return {"count": len(names), **raw} if isinstance(names, list) else raw

    @field_validator("names")
    @classmethod
    def _one_each(cls, names: list[str] | None, others: ValidationInfo) -> list[str] | None:
        count = others.data.get("count")
        if names is not None and (len(names) != count or len(set(names)) != count):
            raise ValueError(f"must be as many different ones as clients.count = {count}")
        return names

    def named(self) -> list[str]:
        """Their names; where they have none, client-1 and so on."""
        return self.names or [f"client-{number}" for number in range(1, self.count + 1)]

    def build(self) -> World:
        """The simulated world around them."""
        plain = {name: getattr(self, name) for name in type(self).model_fields if name not in ("count", "names")}
        return World(
            **{
                **plain,
                "changes": [sim.Change(**change.model_dump()) for change in self.changes],
                "absences": [sim.Absence(**absence.model_dump()) for absence in self.absences],
                "trace": None if self.trace is None else Path(self.trace),
            }
        )


class Run(Section):
    """How long, how often, what is kept."""

    until: Positive = 1000.0  # simulated time
    every: Positive = 10.0  # simulated time between evaluations
    seeds: list[int] = Field(default=[0, 1, 2], min_length=1)  # a run for each
    metric: str = "accuracy"  # for "time to"; the loss where a task does not have it
    target: float = Field(default=0.9, allow_inf_nan=False)  # of the metric: when it is reached is shown
    lower_is_better: bool = False  # of the metric; of the loss it always is
    stop_at_target: bool = False  # a seed ends with its first evaluation at the target
    per_client: bool = False  # clients judge, too, each by data of its own: means, spread, 10th percentile, worst
    personal_steps: int = Field(default=0, ge=0)  # by which each client makes the model its own, and judges it
    per_class: bool = False  # the metric on each class
    potential: bool = False  # record Φ_t, how far X_t is from μ_t, and the loss of μ_t
    average: NotNegative = 0.0  # time constant of the average of models that is evaluated and exported; 0: none
    device: str = "cpu"  # or "cuda", "cuda:1", "auto": where models, data and messages are
    executor: ExecutorName = "auto"  # how local steps are computed; on a GPU, what a measurement finds fastest
    precision: Precision = "float32"  # of gradients; models, averages and codecs are float32
    workers: int = Field(default=1, ge=1)  # processes that share the clients of one run, with a core or GPU each (Ray)
    memory: Annotated[float, Field(gt=0)] = inf  # gigabytes of what clients keep; beyond, it is on disk
    track: list[Tracker] | None = None  # where evaluations are sent, too

    @field_validator("device")
    @classmethod
    def _usable(cls, device: str) -> str:
        try:
            return str(given.usable(device))
        except ValueError as error:
            raise ValueError(str(error).partition(", ")[2]) from error

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("must be distinct")
        return seeds

    def plan(self, seed: int) -> Plan:
        """Of one seed."""
        return Plan(
            until=self.until,
            every=self.every,
            seed=seed,
            metric=self.metric,
            lower_is_better=self.lower_is_better,
            potential=self.potential,
            per_client=self.per_client,
            personal_steps=self.personal_steps,
            average=self.average,
            stop_at=self.target if self.stop_at_target else None,
        )
