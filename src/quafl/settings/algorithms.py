"""[algorithm]: what the clients and the server do."""

from math import inf
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from quafl.codec.coders import Coders
from quafl.core import (
    CA2FL,
    FAVANO,
    SCAFFOLD,
    Calibrated,
    FedAsync,
    FedAvg,
    FedBuff,
    FedNova,
    QuAFL,
    adam,
    adamw,
    cosine,
    linear,
    momentum,
    sgd,
)
from quafl.core.defence import NO_DEFENCE, Defence
from quafl.core.descent import Adaptive, Descent, HeavyBall, Plain
from quafl.core.optim import WEIGHT_DECAY, Schedule
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm, Optimizer
from quafl.settings.base import NotNegative, Positive, Section, Share

if TYPE_CHECKING:
    from quafl.sim import World
    from quafl.sim.speeds import Constant, Exponential


CERTAIN = 2**40  # contacts behind a mean that one more does not change


class LinearSchedule(Section):
    """See core.optim."""

    name: Literal["linear"]
    points: list[Annotated[tuple[int, NotNegative], Field(strict=False)]] = Field(min_length=1)  # (round, factor of lr)

    def build(self) -> Schedule:
        """The schedule."""
        return linear(self.points)


class CosineSchedule(Section):
    """See core.optim."""

    name: Literal["cosine"]
    rounds: int = Field(ge=1)  # until the floor is reached
    floor: Share = 0.0  # the last factor of lr

    def build(self) -> Schedule:
        """The schedule."""
        return cosine(self.rounds, self.floor)


class Contacts(Section):
    """How often clients are contacted, and how much they do in between."""

    sampled: int = Field(default=5, ge=1)  # s: clients contacted in a round
    local_steps: int = Field(default=5, ge=1)  # K: most steps behind an answer


class Steps(Section):
    """How clients take their local steps."""

    lr: Positive = 0.1  # of the clients' steps
    optimizer: Literal["sgd", "momentum", "adam", "adamw"] = "sgd"  # of the clients' steps
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of the optimizer of that name
    weight_decay: NotNegative | None = None  # λ of the clients' steps; none: 0.01 for adamw, 0 for the others
    clip: Positive | None = None  # the longest that a local step's gradient may be; none: any length
    fresh_optimizer: bool = False  # momentum, adam and adamw begin anew after each contact
    schedule: LinearSchedule | CosineSchedule | None = Field(default=None, discriminator="name")  # of lr

    def build_optimizer(self) -> Optimizer:
        """Of the clients' local steps."""
        schedule = None if self.schedule is None else self.schedule.build()
        decay, fresh = self.weight_decay or 0.0, self.fresh_optimizer
        if self.optimizer == "momentum":
            return momentum(self.lr, self.momentum, schedule=schedule, fresh=fresh, weight_decay=decay, clip=self.clip)
        if self.optimizer == "adam":
            return adam(self.lr, schedule=schedule, fresh=fresh, weight_decay=decay, clip=self.clip)
        if self.optimizer == "adamw":
            decay = WEIGHT_DECAY if self.weight_decay is None else self.weight_decay
            return adamw(self.lr, schedule=schedule, fresh=fresh, weight_decay=decay, clip=self.clip)
        return sgd(self.lr, schedule, weight_decay=decay, clip=self.clip)

    def given(self, world: "World", clients: int, coders: Coders, seed: int) -> dict[str, Tensor]:
        """Numbers of the clients that are not to be measured."""
        return {}


class Local(Steps, Contacts):
    """What all algorithms have."""

    patience: Annotated[float, Field(gt=0)] = inf  # how long the server waits for answers

    def check_real(self) -> None:
        """ValueError for what only a simulation knows."""

    def work(self, speeds: "Exponential | Constant", exchange: float, clients: int, until: float) -> float:
        """About how many local steps are taken until then: by default, in rounds that wait for the slowest client."""
        rate = speeds.rates.values[:, 0]
        return float(until / ((self.local_steps / rate).max() + exchange) * self.sampled * self.local_steps)


class Asynchronous(Local):
    """What algorithms have whose clients train all the time, and are not waited for."""

    def work(self, speeds: "Exponential | Constant", exchange: float, clients: int, until: float) -> float:
        """About how many local steps are taken until then."""
        alone = self.local_steps / speeds.rates.values[:, 0]
        return float((until / (alone + exchange) * self.local_steps).sum())


class Moving(Section):
    """What algorithms have whose server moves along the direction that the clients give: see core.descent."""

    server_lr: Positive = 1.0  # of the server's steps
    server_optimizer: Literal["sgd", "momentum", "adam", "amsgrad"] = "sgd"  # of the server's steps
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of momentum, adam and amsgrad
    server_tau: Positive = 1e-3  # of adam and amsgrad

    def descent(self) -> Descent:
        """How the server moves."""
        if self.server_optimizer == "momentum":
            return HeavyBall(self.server_momentum)
        if self.server_optimizer == "sgd":
            return Plain()
        return Adaptive((self.server_momentum, 0.99), self.server_tau, largest=self.server_optimizer == "amsgrad")


class Polled(Local):
    """What algorithms have whose clients train all the time and answer at once."""

    wait: NotNegative = 0.0  # time between two rounds

    def work(self, speeds: "Exponential | Constant", exchange: float, clients: int, until: float) -> float:
        """About how many local steps are taken until then: H_i at every contact."""
        each = speeds.expected_steps(self.sampled / clients, exchange + self.wait, self.local_steps)
        return float(until / (exchange + self.wait) * self.sampled * each.mean())


class QuAFLSettings(Polled):
    """See core.quafl."""

    name: Literal["quafl"] = "quafl"
    weighted: bool = False  # fast clients' progress counts less, by H_min/H_i
    server_averaging: Share = 1.0  # 1: the paper's average with the server's own model; 0: the clients' alone
    client_averaging: Share = 1.0  # 1: the paper's average with the client's own model; 0: the server's is adopted
    slowest_floor: Positive = 0.1  # H_min is never taken for less
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

    def given(self, world: "World", clients: int, coders: Coders, seed: int) -> dict[str, Tensor]:
        """H_i, where it is not to be measured."""
        if self.speeds == "measured":
            return {}
        known = world.expected_steps(self.build(), clients, coders, Generators(seed))
        return {"expected_steps": known, "contacts": torch.full((clients,), CERTAIN)}

    def check_real(self) -> None:
        """ValueError for what only a simulation knows."""
        if self.speeds != "measured":
            raise ValueError(f"algorithm.speeds = {self.speeds!r}: must be 'measured' where clients are real")


class CalibratedSettings(Polled, Moving):
    """See core.calibrated."""

    name: Literal["calibrated"]
    local_steps: int = Field(default=10, ge=1)  # K: most steps behind an answer
    forget: NotNegative = 0.02  # share of the memories that fades in a sweep

    def build(self, defence: Defence = NO_DEFENCE) -> Algorithm:
        """The algorithm."""
        return Calibrated(
            sampled=self.sampled,
            local_steps=self.local_steps,
            server_lr=self.server_lr,
            server=self.descent(),
            forget=self.forget,
            wait=self.wait,
            patience=self.patience,
            defence=defence,
        )


class FedAvgSettings(Local, Moving):
    """See core.fedavg."""

    name: Literal["fedavg"]
    proximity: NotNegative = 0.0  # μ of FedProx
    weighted: bool = False  # clients count by their numbers of examples

    def build(self, defence: Defence = NO_DEFENCE) -> Algorithm:
        """The algorithm."""
        adopts = self.server_optimizer == "sgd" and self.server_lr == 1
        return FedAvg(
            sampled=self.sampled,
            local_steps=self.local_steps,
            proximity=self.proximity,
            server_lr=self.server_lr,
            server=None if adopts else self.descent(),
            patience=self.patience,
            defence=defence,
            weighted=self.weighted,
        )


class FedNovaSettings(Local):
    """See core.fednova."""

    name: Literal["fednova"]

    def build(self, defence: Defence = NO_DEFENCE) -> Algorithm:
        """The algorithm."""
        return FedNova(sampled=self.sampled, local_steps=self.local_steps, patience=self.patience, defence=defence)

    def check_real(self) -> None:
        """ValueError for what only a simulation knows."""
        raise ValueError(
            "algorithm.name = 'fednova': must be another where clients are real: nobody knows their speeds"
        )

    def work(self, speeds: "Exponential | Constant", exchange: float, clients: int, until: float) -> float:
        """About how many local steps are taken until then: slow clients take fewer."""
        each = (self.local_steps * speeds.relative()).round().clamp(min=1)
        longest = (each / speeds.rates.values[:, 0]).max()
        return float(until / (longest + exchange) * self.sampled * each.mean())


class FedBuffSettings(Asynchronous, Moving):
    """See core.fedbuff."""

    name: Literal["fedbuff"]
    staleness: bool = False  # old displacements count less, by 1/√(1 + age)
    delay: Annotated[float, Field(ge=1)] = inf  # τ_c of FADAS: rounds, beyond which age slows the server

    def build(self, defence: Defence = NO_DEFENCE) -> Algorithm:
        """The algorithm."""
        return FedBuff(
            sampled=self.sampled,
            local_steps=self.local_steps,
            server_lr=self.server_lr,
            server=self.descent(),
            staleness=self.staleness,
            delay=self.delay,
            patience=self.patience,
            defence=defence,
        )


class CA2FLSettings(Asynchronous):
    """See core.ca2fl."""

    name: Literal["ca2fl"]
    server_lr: Positive = 1.0  # of the server's steps

    def build(self, defence: Defence = NO_DEFENCE) -> Algorithm:
        """The algorithm."""
        return CA2FL(
            sampled=self.sampled,
            local_steps=self.local_steps,
            server_lr=self.server_lr,
            patience=self.patience,
            defence=defence,
        )


class FAVANOSettings(Polled):
    """See core.favano."""

    name: Literal["favano"]
    reweight: Literal["steps", "mean"] = "steps"  # divide progress by the steps taken, or by their mean

    def build(self, defence: Defence = NO_DEFENCE) -> Algorithm:
        """The algorithm."""
        return FAVANO(
            sampled=self.sampled,
            local_steps=self.local_steps,
            reweight=self.reweight,
            wait=self.wait,
            patience=self.patience,
            defence=defence,
        )


class SCAFFOLDSettings(Local):
    """See core.scaffold."""

    name: Literal["scaffold"]
    optimizer: Literal["sgd"] = "sgd"  # its correction is made for no other
    schedule: None = None  # none: its control variates know one rate
    clip: None = None  # none: its control variates are means of whole gradients
    server_lr: Positive = 1.0  # of the server's steps

    def build(self, defence: Defence = NO_DEFENCE) -> Algorithm:
        """The algorithm."""
        return SCAFFOLD(
            sampled=self.sampled,
            local_steps=self.local_steps,
            lr=self.lr,
            server_lr=self.server_lr,
            patience=self.patience,
            defence=defence,
        )


class FedAsyncSettings(Asynchronous):
    """See core.fedasync."""

    name: Literal["fedasync"]
    mixing: Annotated[float, Field(gt=0, le=1)] = 0.6  # α: share of an answer in the server's model
    staleness: NotNegative = 0.5  # a: it counts less by (1 + age)^−a
    proximity: NotNegative = 0.0  # ρ: pull to what a client started from

    def build(self, defence: Defence = NO_DEFENCE) -> Algorithm:
        """The algorithm."""
        return FedAsync(
            sampled=self.sampled,
            local_steps=self.local_steps,
            mixing=self.mixing,
            staleness=self.staleness,
            proximity=self.proximity,
            patience=self.patience,
            defence=defence,
        )


Algorithms: TypeAlias = (
    QuAFLSettings
    | CalibratedSettings
    | FedAvgSettings
    | FedBuffSettings
    | FedNovaSettings
    | SCAFFOLDSettings
    | FedAsyncSettings
    | CA2FLSettings
    | FAVANOSettings
)
DEFAULT = QuAFLSettings()
LABELS = {
    "quafl": "QuAFL",
    "calibrated": "Calibrated",
    "fedavg": "FedAvg",
    "fedbuff": "FedBuff",
    "fednova": "FedNova",
    "scaffold": "SCAFFOLD",
    "fedasync": "FedAsync",
    "ca2fl": "CA2FL",
    "favano": "FAVANO",
}
