"""Settings: what a TOML file may say, checked before anything runs, and what it builds.

A file describes one run, or, with a `[curves."name"]` table per curve, a comparison: each curve is the common part with
its own sections laid over it.
"""

import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from quafl.codec import QSGD, Identity, Lattice
from quafl.core import FedAvg, QuAFL, sgd
from quafl.core.randomness import derive
from quafl.core.seams import Algorithm, Codec, Optimizer, Task
from quafl.sim import World
from quafl.tasks import Quadratic, Supervised, digits, partition
from quafl.tasks.models import mlp

Raw: TypeAlias = dict[str, Any]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]


class SettingsError(Exception):
    """One sentence about what is wrong with the settings."""


class Section(BaseModel):
    """A table of the file: unknown keys and wrong types are errors, nothing is converted in silence."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DigitsTask(Section):
    """scikit-learn's handwritten digits and a two-layer network."""

    name: Literal["digits"] = "digits"
    most_clients: ClassVar[int] = 500
    hidden: int = Field(default=64, ge=1)
    batch: int = Field(default=16, ge=1)
    partition: Literal["iid", "by label"] = "iid"
    judge: Literal["test", "validation"] = "test"  # validation: learn from less, to choose settings by the rest

    def build(self, clients: int, seed: int) -> Task:
        """The task for one seed: data dealt out, network initialised."""
        data = digits()
        train, judge = data.train, data.validation
        if self.judge == "test":
            train = (torch.cat((train[0], judge[0])), torch.cat((train[1], judge[1])))
            judge = data.test
        deal = {"iid": partition.iid, "by label": partition.by_label}[self.partition]
        module = mlp(64, self.hidden, 10, seed=derive(seed, "model"))
        return Supervised(module, deal(train, clients, seed=seed), test=judge, batch_size=self.batch, seed=seed)


class QuadraticTask(Section):
    """A problem with a known answer; the clients' minima are normally distributed around one another."""

    name: Literal["quadratic"]
    most_clients: ClassVar[int] = 1_000_000
    dim: int = Field(default=100, ge=1)
    smoothness: Positive = 1.0  # largest curvature
    condition: float = Field(default=10.0, ge=1, allow_inf_nan=False)  # largest over smallest curvature
    spread: float = Field(default=1.0, ge=0, allow_inf_nan=False)  # of the clients' minima
    noise: float = Field(default=0.1, ge=0, allow_inf_nan=False)  # of the gradients

    def build(self, clients: int, seed: int) -> Task:
        """The task for one seed."""
        generator = torch.Generator().manual_seed(derive(seed, "model"))
        centers = 1 + self.spread * torch.randn(clients, self.dim, generator=generator)
        curvature = torch.linspace(self.smoothness / self.condition, self.smoothness, self.dim)
        return Quadratic(curvature, centers, noise=self.noise, seed=seed)


class Clients(Section):
    """Who takes part."""

    count: int = Field(default=20, ge=1)
    slow: Share = 0.25
    fast_step: Positive = 2.0
    slow_step: Positive = 8.0
    step_law: Literal["exponential", "constant"] = "exponential"
    latency_at_32_bits: float = Field(default=10.0, ge=0, allow_inf_nan=False)  # sit = this · b/32
    unreachable: Share = 0.0

    def build(self) -> World:
        """The simulated world around them."""
        return World(
            slow=self.slow,
            step_times=(self.fast_step, self.slow_step),
            exponential=self.step_law == "exponential",
            latency_at_32_bits=self.latency_at_32_bits,
            unreachable=self.unreachable,
        )


class Local(Section):
    """What all algorithms have."""

    sampled: int = Field(default=5, ge=1)
    local_steps: int = Field(default=5, ge=1)
    lr: Positive = 0.1

    def optimizer(self) -> Optimizer:
        """Of the clients' local steps."""
        return sgd(self.lr)


class QuAFLSettings(Local):
    """See core.quafl."""

    name: Literal["quafl"] = "quafl"
    weighted: bool = False
    averaging: Literal["both", "server", "client", "neither"] = "both"
    wait: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def build(self) -> Algorithm:
        """The algorithm."""
        return QuAFL(
            sampled=self.sampled,
            local_steps=self.local_steps,
            weighted=self.weighted,
            server_averaging=self.averaging in ("both", "server"),
            client_averaging=self.averaging in ("both", "client"),
            wait=self.wait,
        )


class FedAvgSettings(Local):
    """See core.fedavg."""

    name: Literal["fedavg"]

    def build(self) -> Algorithm:
        """The algorithm."""
        return FedAvg(sampled=self.sampled, local_steps=self.local_steps)


class LatticeSettings(Section):
    """See codec.lattice; 32 bits mean no compression."""

    name: Literal["lattice"] = "lattice"
    bits: int = 4
    resolution: Positive | None = None
    spread: Positive = 6.0

    @field_validator("bits")
    @classmethod
    def _known_width(cls, bits: int) -> int:
        if bits != Identity.bits and not 1 <= bits <= 16:
            raise ValueError("must be from 1 to 16, or 32 for no compression")
        return bits

    def build(self) -> Codec:
        """The codec."""
        if self.bits == Identity.bits:
            return Identity()
        return Lattice(bits=self.bits, resolution=self.resolution, spread=self.spread)


class IdentitySettings(Section):
    """See codec.identity."""

    name: Literal["identity"]
    bits: Literal[32] = 32

    def build(self) -> Codec:
        """The codec."""
        return Identity()


class QSGDSettings(Section):
    """See codec.qsgd."""

    name: Literal["qsgd"]
    bits: int = Field(default=8, ge=2, le=16)
    norm: Literal["l2", "min-max"] = "min-max"
    bucket: int = Field(default=512, ge=32, lt=65536, multiple_of=32)

    def build(self) -> Codec:
        """The codec."""
        return QSGD(bits=self.bits, norm=self.norm, bucket=self.bucket)


class Run(Section):
    """How long, how often, what is kept."""

    until: Positive = 1000.0  # simulated time
    every: Positive = 10.0  # simulated time between evaluations
    seeds: list[int] = Field(default=[0, 1, 2], min_length=1)
    metric: str = "accuracy"  # for "time to"; the loss where a task does not have it
    target: float = Field(default=0.9, allow_inf_nan=False)
    lower_is_better: bool = False  # of the metric; of the loss it always is
    potential: bool = False  # record Φ_t

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("must be distinct")
        return seeds


class Settings(Section):
    """One curve, complete."""

    label: str = "run"
    task: DigitsTask | QuadraticTask = Field(default=DigitsTask(), discriminator="name")
    clients: Clients = Clients()
    algorithm: QuAFLSettings | FedAvgSettings = Field(default=QuAFLSettings(), discriminator="name")
    codec: LatticeSettings | IdentitySettings | QSGDSettings = Field(default=LatticeSettings(), discriminator="name")
    run: Run = Run()

    @model_validator(mode="after")
    def _enough_clients(self) -> Self:
        if self.algorithm.sampled > self.clients.count:
            raise ValueError(
                f"algorithm.sampled = {self.algorithm.sampled}: must be at most clients.count = {self.clients.count}"
            )
        if self.clients.count > self.task.most_clients:
            raise ValueError(
                f"clients.count = {self.clients.count}: must be at most {self.task.most_clients}, "
                f"or some would have no data of task {self.task.name!r}"
            )
        return self

    def to_toml(self) -> str:
        """Every setting, defaults too; a file that can be run again."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))


def load(source: str, overrides: Sequence[str] = ()) -> list[Settings]:
    """The curves of a built-in experiment or a TOML file, with `key=value` overrides laid over all of them."""
    raw = _read(source)
    curves = raw.pop("curves", {})
    if not isinstance(curves, dict) or not all(isinstance(curve, dict) for curve in curves.values()):
        raise SettingsError(f'curves = {curves!r}: must be tables, such as [curves."QuAFL"]')
    changes: Raw = {}
    for override in overrides:
        changes = _merge(changes, _parse_override(override))
    curves = _merge(curves, changes.pop("curves", {}))
    if not curves:
        return [_validate(_merge(raw, changes))]
    return [
        _validate(_merge(_merge({**raw, "label": label}, curve), changes), f" (in curve {label!r})")
        for label, curve in curves.items()
    ]


def builtin() -> list[str]:
    """Names of the experiments that come with the package."""
    return sorted(entry.name.removesuffix(".toml") for entry in _presets().iterdir() if entry.name.endswith(".toml"))


def _presets() -> Any:
    return resources.files("quafl") / "presets"


def _read(source: str) -> Raw:
    if source in builtin():
        text = (_presets() / f"{source}.toml").read_text(encoding="utf-8")
    else:
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text file"
            known = ", ".join(builtin())
            raise SettingsError(
                f"cannot read settings '{source}' ({reason}): give a TOML file, or one of the built-in names: {known}"
            ) from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{source} is not valid TOML: {error}") from error


def _parse_override(text: str) -> Raw:
    key, equals, value = text.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals or not all(names):
        raise SettingsError(f"--set {text}: must look like section.key=value, for example algorithm.lr=0.2")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word is a string
    for name in reversed(names):
        parsed = {name: parsed}
    return dict(parsed)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Raw:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _validate(raw: Raw, where: str = "") -> Settings:
    defaults = {"task": {"name": "digits"}, "algorithm": {"name": "quafl"}, "codec": {"name": "lattice"}}
    try:
        return Settings.model_validate(_merge(defaults, raw))
    except ValidationError as error:
        raise SettingsError(_sentence(error.errors()[0]) + where) from None


def _sentence(error: ErrorDetails) -> str:
    """Key, value, and what is allowed."""
    place = [str(part) for part in error["loc"]]
    if place[:1] in (["task"], ["algorithm"], ["codec"]) and len(place) > 2:
        del place[1]  # the variant's name, which pydantic puts into the path
    key, value = ".".join(place), error["input"]
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if error["type"] == "extra_forbidden":
        allowed = _keys_beside(list(error["loc"]))
        close = get_close_matches(place[-1], allowed, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        return f"unknown key {key} = {value!r}; {hint}allowed here: {', '.join(allowed)}"
    if error["type"] == "union_tag_invalid":
        return f"{key}.name = {value.get('name')!r}: must be one of {error['ctx']['expected_tags']}"
    if not place:
        return message  # a rule between keys, which names them itself
    return f"{key} = {value!r}: {message}"


def _keys_beside(place: list[int | str]) -> list[str]:
    """The keys that the table of an unknown key may have."""
    sections: dict[str, type[Section]] = {
        "clients": Clients,
        "lattice": LatticeSettings,
        "identity": IdentitySettings,
        "qsgd": QSGDSettings,
        "run": Run,
        "digits": DigitsTask,
        "quadratic": QuadraticTask,
        "quafl": QuAFLSettings,
        "fedavg": FedAvgSettings,
    }
    parent = sections.get(str(place[-2]), Settings) if len(place) > 1 else Settings
    return list(parent.model_fields)
