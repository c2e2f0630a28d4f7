"""A real federation's settings: what its server is started with, and tells its clients."""

from math import inf
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from quafl.codec.coders import coders_for
from quafl.codec.seams import WireError
from quafl.core.seams import Task
from quafl.deploy.server import Goals
from quafl.protocol.client import Terms
from quafl.protocol.members import Limits
from quafl.protocol.messages import HELLO_SECONDS
from quafl.settings.algorithms import DEFAULT, LABELS, Algorithms
from quafl.settings.base import NotNegative, Positive, Section, Tracker
from quafl.settings.codecs import DEFAULT as DEFAULT_CODEC
from quafl.settings.codecs import CodecChoice
from quafl.settings.defence import FederationDefence
from quafl.settings.own import Own
from quafl.tasks import local


class FederationTask(Own):
    """What is learned: the function that makes the server's model and test data."""

    def build(self, name: str, seed: int) -> Task:
        """The task of the party of that name."""
        return local.make(self.make, name, seed, self.options(), what="task.make =")


class FederationClients(Section):
    """Who takes part, and what is put up with: see protocol.members."""

    start_with: int = Field(default=1, ge=1)  # clients that must be there before the first round
    most: int = Field(default=1000, ge=1)  # clients that can ever take part
    silence: float = Field(default=10.0, gt=2 * HELLO_SECONDS, allow_inf_nan=False)  # seconds until it is gone
    contact_seconds: Positive = 30.0  # that a client may take to answer a message,
    judge_seconds: Positive = 60.0  # and to judge a model
    slow: Annotated[float, Field(ge=1)] = 10.0  # times the usual time, from which on an answer is too late
    prompt: NotNegative = 0.25  # seconds that are never too late
    far: Positive = 20.0  # times the usual distance, from which on a reply is implausible
    faults: int = Field(default=3, ge=1)  # in a row, after which a client is left out
    exclusion: NotNegative = 60.0  # seconds; twice as many each further time

    def build(self) -> Limits:
        """The server's limits."""
        return Limits(
            clients=self.most,
            start_with=self.start_with,
            silence=self.silence,
            contact_seconds=self.contact_seconds,
            judge_seconds=self.judge_seconds,
            slow=self.slow,
            prompt=self.prompt,
            far=self.far,
            faults=self.faults,
            exclusion=self.exclusion,
        )


class FederationRun(Section):
    """How long, how often, what is looked at. All times are seconds."""

    clock: Literal["wall"] = "wall"  # real seconds
    until: Annotated[float, Field(gt=0)] = inf  # seconds
    rounds: int | None = Field(default=None, ge=1)  # of the server, at most
    every: Positive = 10.0  # between two evaluations
    metric: str = "accuracy"  # that the best model is chosen by; the loss where a task does not have it
    target: float = Field(default=0.9, allow_inf_nan=False)  # of the metric: when it is reached is shown
    lower_is_better: bool = False  # of the metric
    stop_at_target: bool = False  # the run ends with its first evaluation at the target
    checkpoint_seconds: NotNegative = 10.0  # between two checkpoints
    average: NotNegative = 0.0  # time constant of the average of models that is evaluated and exported; 0: none
    per_client: bool = False  # clients judge, too; they do anyway where the server has no data
    personal_steps: int = Field(default=0, ge=0)  # by which each client makes the model its own, and judges it
    seed: int = 0  # of all that the server draws
    track: list[Tracker] | None = None  # where evaluations are sent, too

    def build(self) -> Goals:
        """The server's goals."""
        others = "clock", "track"
        return Goals(**{name: getattr(self, name) for name in type(self).model_fields if name not in others})


class FederationSettings(Section):
    """What a server is started with."""

    label: str
    task: FederationTask
    clients: FederationClients = FederationClients()
    algorithm: Algorithms = Field(default=DEFAULT, discriminator="name")
    codec: CodecChoice = Field(default=DEFAULT_CODEC, discriminator="name")
    run: FederationRun = FederationRun()
    defence: FederationDefence = FederationDefence()
    modules: list[str] | None = None  # the folder of the task's module

    @model_validator(mode="before")
    @classmethod
    def _labelled(cls, raw: Any) -> Any:
        """By its algorithm, unless it has a label of its own."""
        name = raw.get("algorithm", {}).get("name") if isinstance(raw, dict) else None
        return {"label": LABELS.get(str(name), "federation"), **raw} if isinstance(raw, dict) else raw

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.algorithm.patience == inf:
            raise ValueError("algorithm.patience = inf: must be finite, real clients vanish")
        self.algorithm.check_real()
        if self.clients.start_with > self.clients.most:
            raise ValueError(f"clients.start_with = {self.clients.start_with}: must be at most {self.clients.most}")
        self.terms()
        return self

    def terms(self) -> Terms:
        """What the clients do, and the server with them."""
        algorithm = self.algorithm.build(self.defence.build())
        return Terms(algorithm, coders_for(algorithm, self.codec.build()), self.algorithm.build_optimizer())

    def welcome(self, run: str) -> dict[str, Any]:
        """What a client is told."""
        return {
            "run": run,
            "algorithm": self.algorithm.model_dump(mode="json"),
            "codec": self.codec.model_dump(mode="json"),
        }

    def to_toml(self) -> str:
        """Every setting, defaults too; a file that can be used again."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))


_ALGORITHM: TypeAdapter[Algorithms] = TypeAdapter(Annotated[Algorithms, Field(discriminator="name")])
_CODEC: TypeAdapter[CodecChoice] = TypeAdapter(Annotated[CodecChoice, Field(discriminator="name")])


def agree(welcome: dict[str, Any]) -> Terms:
    """What a client makes of a welcome; checked as a file would be."""
    try:
        local, codec = _ALGORITHM.validate_python(welcome["algorithm"]), _CODEC.validate_python(welcome["codec"])
        algorithm = local.build()
        return Terms(algorithm, coders_for(algorithm, codec.build()), local.build_optimizer())
    except (KeyError, ValueError, ValidationError) as error:
        raise WireError(f"the server's settings cannot be used here ({error}); upgrade the older of the two") from error
