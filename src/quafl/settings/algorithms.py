"""[algorithm]: what the clients and the server do."""

from math import inf
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field
from torch import Tensor

from quafl.core import FedAvg, FedBuff, FedNova, QuAFL, adam, cosine, linear, momentum, sgd
from quafl.core.defence import NO_DEFENCE, Defence
from quafl.core.optim import Schedule
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm, Codecs, Optimizer
from quafl.settings.base import NotNegative, Positive, Section, Share

if TYPE_CHECKING:
    from quafl.sim import World


class LinearSchedule(Section):
    """See core.optim."""

    name: Literal["linear"]
    points: list[Annotated[tuple[int, NotNegative], Field(strict=False)]] = Field(min_length=1)

    def build(self) -> Schedule:
        """The schedule."""
        return linear(self.points)


class CosineSchedule(Section):
    """See core.optim."""

    name: Literal["cosine"]
    rounds: int = Field(ge=1)
    floor: Share = 0.0

    def build(self) -> Schedule:
        """The schedule."""
        return cosine(self.rounds, self.floor)


class Local(Section):
    """What all algorithms have."""

    sampled: int = Field(default=5, ge=1)
    local_steps: int = Field(default=5, ge=1)
    lr: Positive = 0.1
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of the optimizer of that name
    fresh_optimizer: bool = False  # momentum and adam begin anew after each contact
    schedule: LinearSchedule | CosineSchedule | None = Field(default=None, discriminator="name")
    patience: Annotated[float, Field(gt=0)] = inf  # how long the server waits for answers

    def build_optimizer(self) -> Optimizer:
        """Of the clients' local steps."""
        schedule = None if self.schedule is None else self.schedule.build()
        if self.optimizer == "momentum":
            return momentum(self.lr, self.momentum, schedule=schedule, fresh=self.fresh_optimizer)
        if self.optimizer == "adam":
            return adam(self.lr, schedule=schedule, fresh=self.fresh_optimizer)
        return sgd(self.lr, schedule)

    def expected_steps(self, world: "World", clients: int, codecs: Codecs, seed: int) -> Tensor | None:
        """H_i, where it is not to be measured."""
        return None


class QuAFLSettings(Local):
    """See core.quafl."""

    name: Literal["quafl"] = "quafl"
    weighted: bool = False
    server_averaging: Share = 1.0
    client_averaging: Share = 1.0
    wait: NotNegative = 0.0
    slowest_floor: Positive = 0.1
    speeds: Literal["measured", "closed form"] = "measured"  # H_i: a running mean, or known in advance

    def build(self, defence: Defence = NO_DEFENCE) -> Algorithm:
        """The algorithm."""
        return QuAFL(
            sampled=self.sampled,
            local_steps=self.local_steps,
            weighted=self.weighted,
            server_averaging=self.server_averaging,
            client_averaging=self.client_averaging,
            wait=self.wait,
            patience=self.patience,
            slowest_floor=self.slowest_floor,
            defence=defence,
        )

    def expected_steps(self, world: "World", clients: int, codecs: Codecs, seed: int) -> Tensor | None:
        """H_i, where it is not to be measured."""
        if self.speeds == "measured":
            return None
        return world.expected_steps(self.build(), clients, codecs, Generators(seed))


class FedAvgSettings(Local):
    """See core.fedavg."""

    name: Literal["fedavg"]

    def build(self, defence: Defence = NO_DEFENCE) -> Algorithm:
        """The algorithm."""
        return FedAvg(sampled=self.sampled, local_steps=self.local_steps, patience=self.patience, defence=defence)


class FedNovaSettings(Local):
    """See core.fednova."""

    name: Literal["fednova"]

    def build(self, defence: Defence = NO_DEFENCE) -> Algorithm:
        """The algorithm."""
        return FedNova(sampled=self.sampled, local_steps=self.local_steps, patience=self.patience, defence=defence)


class FedBuffSettings(Local):
    """See core.fedbuff."""

    name: Literal["fedbuff"]
    server_lr: Positive = 1.0
    staleness: bool = False

    def build(self, defence: Defence = NO_DEFENCE) -> Algorithm:
        """The algorithm."""
        return FedBuff(
            sampled=self.sampled,
            local_steps=self.local_steps,
            server_lr=self.server_lr,
            staleness=self.staleness,
            patience=self.patience,
            defence=defence,
        )


Algorithms: TypeAlias = QuAFLSettings | FedAvgSettings | FedBuffSettings | FedNovaSettings
