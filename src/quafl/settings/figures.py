"""Figures: what is run for each, and what is claimed of it, said before anything runs. Those of the paper, and the
regimes, in which all algorithms are compared."""

import json
from collections.abc import Sequence
from copy import deepcopy
from itertools import product
from math import prod
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias

from pydantic import Field, model_validator

from quafl.codec.coders import coders_for
from quafl.core.randomness import Generators
from quafl.settings.algorithms import LABELS
from quafl.settings.base import NotNegative, Raw, Section, SettingsError, meant
from quafl.settings.curve import Settings
from quafl.settings.overrides import changes_of, merged
from quafl.settings.reading import checked, curves_of, preset_names, read_preset

PAPER, REGIMES = "paper", "regimes"  # folders of the presets
Measure: TypeAlias = Literal["to target", "area"]  # of what was tuned: what is best
Axis: TypeAlias = Literal["time", "rounds", "local steps", "megabytes"]


class _OfCurves(Section):
    """What is said of some curves."""

    text: str
    curves: list[str] = Field(min_length=1)
    axis: Axis = "time"
    metric: str = "accuracy"


class Order(_OfCurves):
    """That they come in this order, the best first."""

    kind: Literal["order"]
    measure: Literal["to target", "area", "end", "rise"] = "to target"
    margin: NotNegative = 0.0  # by which one may be worse than the next and still be no worse


class Level(_OfCurves):
    """That something is about so much for each of them; `within` is how far off it may be."""

    kind: Literal["level"]
    measure: Literal["end", "zero-step share", "zero-step share of slow clients", "deviation"] = "end"
    value: float
    within: NotNegative
    side: Literal["about", "at least", "at most"] = "about"


Claim: TypeAlias = Annotated[Order | Level, Field(discriminator="kind")]


class Figure(Section):
    """A figure: where it is in the paper, what it shows, and what is claimed of it."""

    number: int  # in the order of its page
    part: Literal["main", "appendix", "beyond", "regimes"]
    setting: str
    axis: Axis = "time"
    metric: str = "accuracy"
    of: str | None = None  # the figure whose runs it shows in another way
    instead_of: str | None = None  # the figure whose data cannot be had by everybody
    claims: list[Claim] = Field(default=[])
    questions: list[Claim] = Field(default=[])  # beside the paper, and no part of the verdict
    tuned: bool = False  # whether learning rates are those that `quafl tune` has found
    compression: bool = False  # whether the curves differ in bits alone: how few are enough?
    grid: dict[str, list[Any]] = Field(default={})  # settings, and the values of each: a map of who is first where


class Tuning(Section):
    """The learning rates that are tried. A curve that has more to choose than that has a grid of its own, by its label
    or by its algorithm's name: some values of some settings of the algorithm, of which all combinations are tried.

    `around`: then the neighbours of each one's best are tried, too, and further ones while the best is at the edge.
    """

    lr: list[float] = Field(min_length=1)
    own: dict[str, dict[str, Annotated[list[Any], Field(min_length=1)]]] = Field(default={})
    seeds: list[int] = Field(default=[100], min_length=1)
    around: bool = False
    measure: Measure = "to target"  # what is best

    def grid(self, label: str, algorithm: str) -> dict[str, list[Any]]:
        """For a curve whose label begins so, or of that algorithm: values by setting."""
        return self.own.get(self.name(label), self.own.get(algorithm, {"lr": list(self.lr)}))

    def name(self, label: str) -> str:
        """By which a curve of that label has a grid of its own; empty if it has none."""
        return max((name for name in self.own if label.startswith(name)), key=len, default="")

    @model_validator(mode="after")
    def _same_size(self) -> Self:
        for name, own in self.own.items():
            combinations = prod(map(len, own.values()))
            if combinations != len(self.lr):
                raise ValueError(
                    f"tuning tries {len(self.lr)} learning rates, and {combinations} combinations of "
                    f"{', '.join(own)} for {name}; every algorithm must be given equally many"
                )
        return self


class Cell(NamedTuple):
    """A place of a map, and the curves that are run for it."""

    place: dict[str, Any]
    curves: list[Settings]


class Reproduction(NamedTuple):
    """A figure, and the curves that are run for it: for a map, those that its cells begin from."""

    name: str
    figure: Figure
    curves: list[Settings]
    cells: list[Cell]
    tuning: Tuning
    smaller: str | None  # what a quick run is made smaller by


def figures(folder: str = PAPER) -> list[str]:
    """The names of all figures of a folder, in their order."""
    return sorted(preset_names(folder), key=lambda name: int(_read(name)["figure"]["number"]))


def load_figure(name: str, overrides: Sequence[str] = (), *, quick: bool = False, tuning: bool = False) -> Reproduction:
    """A figure by its label in the paper; `quick` makes it small enough to be tried out. For `tuning` a map has no
    cells: rates are found in one place."""
    known_names = [one for folder in (PAPER, REGIMES) for one in preset_names(folder)]
    if name not in known_names:
        hint = meant(name, known_names)
        raise SettingsError(f"there is no figure {name!r}; {hint}`quafl reproduce --list` shows them all")
    raw = _read(name)
    figure = checked(Figure, raw.pop("figure"), f" (in [figure] of {name})")
    rates = checked(Tuning, raw.pop("tuning"), f" (in [tuning] of {name})")
    small: Raw = raw.pop("quick")
    smaller, grid = small.pop("smaller"), small.pop("grid", figure.grid)
    if quick or tuning:
        figure = figure.model_copy(update={"grid": {} if tuning else grid})
    over, known = small if quick else {}, list(raw["curves"])
    curves = curves_of(deepcopy(raw), overrides, deepcopy(over))
    cells = []
    for values in product(*figure.grid.values()) if figure.grid else ():
        place = dict(zip(figure.grid, values, strict=True))
        here = [*overrides, *(f"{key}={json.dumps(value)}" for key, value in place.items())]
        cells.append(Cell(place, curves_of(deepcopy(raw), here, deepcopy(over))))
    labels = [curve.label for curve in curves]
    for grid_of in rates.own:
        if grid_of not in LABELS and not any(label.startswith(grid_of) for label in known):
            raise SettingsError(f"{name} has a grid for {grid_of!r}, which is neither a curve of it nor an algorithm")
    changes = changes_of(overrides)
    for key, part in product(figure.grid, [changes, *changes.get("curves", {}).values()]):
        section, _, setting = key.partition(".")
        if setting in part.get(section, {}):
            raise SettingsError(
                f"{key} cannot be set: {name} is a map over it ({', '.join(map(str, figure.grid[key]))}); leave it out"
            )
    for claim in [*figure.claims, *figure.questions]:
        unknown = next((label for label in claim.curves if label not in labels), None)
        if unknown is not None:
            raise SettingsError(f"{name} says something of {unknown!r}, which is none of {', '.join(labels)}")
    smaller += f", {curves[0].run.until:g} instead of {raw['run']['until']:g} time units"
    return Reproduction(name, figure, curves, cells, rates, smaller if quick else None)


def local_steps(curve: Settings) -> float:
    """About how many a seed of the curve takes."""
    world, algorithm, clients = curve.clients.build(), curve.algorithm.build(), curve.clients.count
    speeds = world.speeds(clients, Generators(0), curve.run.until)
    exchange = world.link(clients, coders_for(algorithm, curve.codec.build())).latency
    return curve.algorithm.work(speeds, exchange, clients, curve.run.until)


def _read(name: str) -> Raw:
    """A figure's file, laid over the one that it extends and, if it shows the runs of another figure, over that."""
    folder = REGIMES if name in preset_names(REGIMES) else PAPER
    raw = _extended(read_preset(folder, name), folder)
    other = raw["figure"].get("of")
    if other is None:
        return raw
    below = _read(other)
    raw["figure"].setdefault("tuned", below.pop("figure").get("tuned", False))
    return merged(below, raw)


def _extended(raw: Raw, folder: str) -> Raw:
    """Over what it extends, and what that extends."""
    name = raw.pop("extends", None)
    return raw if name is None else merged(_extended(read_preset(f"{folder}/common", name), folder), raw)
