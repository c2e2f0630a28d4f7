"""Sections that name a function of the user's own, `make = "package.module:function"`, where others have a `name`."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import ConfigDict

from quafl.codec.seams import Codec, Codecs
from quafl.core.defence import NO_DEFENCE, Defence
from quafl.core.randomness import derive
from quafl.core.seams import Algorithm, Task
from quafl.protocol.carrier import SERVER
from quafl.settings.algorithms import Steps
from quafl.settings.base import Raw, Section, SettingsError
from quafl.tasks import DataError, local, own
from quafl.tasks.hands import joined
from quafl.tasks.local import Local

if TYPE_CHECKING:  # a federation's client has no need of the simulator
    from quafl.settings.world import Clients, Run

VALIDATION = 0.1  # of a client's examples
OWN = "own"  # the name of whatever has a `make`
SECTIONS = "task", "algorithm", "codec"  # that may have a function of one's own
_ALGORITHM = (
    *("records", "sampled", "local_steps", "wait", "direction", "applied"),
    *("start", "round", "newcomer", "hear", "answer", "lost"),
)
_CODEC = "bits", "keyed", "difference", "encode", "refine", "decode", "noise"


class Own(Section):
    """A function, and what it is given: all keys that nobody here knows, by their names."""

    model_config = ConfigDict(extra="allow")

    name: Literal["own"] = "own"
    make: str

    def options(self) -> dict[str, Any]:
        """What the function is given."""
        return dict(self.model_extra or {})


class OwnTask(Own):
    """What the parties of a federation bring along, here for all of them: see tasks.local."""

    judge: Literal["test", "validation"] = "test"  # validation: by a tenth of the clients' data, and learn from less
    most_clients: ClassVar[int] = 1_000_000
    what: ClassVar[str] = "task.make ="

    def check(self, clients: "Clients") -> None:
        """See whether the function serves the server, and a client."""
        first = clients.named()[0]
        server, client = (local.make(self.make, name, 0, self.options(), what=self.what) for name in (SERVER, first))
        client.batch(0, 0)
        models = len(server.initial()[0]), len(client.initial()[0])
        if models[0] != models[1]:
            raise DataError(
                f"{self.what} {self.make} returns a model with {models[0]} parameters for the server, and one with "
                f"{models[1]} for {first}; return the same one for everybody"
            )

    def build(self, clients: "Clients", run: "Run", seed: int) -> Task:
        """The task for one seed: the function is asked for the server's, and for every client's."""
        server = self._brought(SERVER, seed)
        parties: Sequence[Local | Task] = [
            self._brought(name, derive(seed, "client", name)) for name in clients.named()
        ]
        if self.judge == "validation":
            server, parties = self._validated(server, parties)
        try:
            task = local.together(
                server,
                parties,
                seed=seed,
                device=run.device,
                precision=run.precision,
                per_class=run.per_class,
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise DataError(f"what {self.what} {self.make} returned cannot be used ({error})") from error
        here = task.initial()[0].device.type
        if here != torch.device(run.device).type:
            raise DataError(f"{self.what} {self.make} returned a task on {here}; run.device = {run.device!r}, use that")
        return task

    def _brought(self, name: str, seed: int) -> Local | Task:
        return local.bring(self.make, name, seed, self.options(), what=self.what)

    def _validated(self, server: Local | Task, parties: Sequence[Local | Task]) -> tuple[Local, list[Local]]:
        """With a tenth of each client's data at the server, in place of what that had."""
        brought = [one for one in parties if isinstance(one, Local)]
        if not isinstance(server, Local) or len(brought) < len(parties):
            raise DataError(
                f"{self.what} {self.make} returned a Task, and nobody knows how to judge it by a part of its data; "
                f"return a quafl.Local for every party"
            )
        halves = [one.without(VALIDATION) for one in brought]
        return replace(server, data=joined([aside for _, aside in halves])), [rest for rest, _ in halves]


class OwnAlgorithm(Steps, Own):
    """An algorithm of one's own: see core.seams. The local steps' rate and optimizer are not its business: the function
    is given the rate if it takes it, and the defence likewise."""

    def build(self, defence: Defence = NO_DEFENCE) -> Algorithm:
        """The algorithm."""
        more = {"lr": self.lr, "defence": defence}
        made: Algorithm = _returned(self, "algorithm", _ALGORITHM, more)
        return made

    def work(self, speeds: object, exchange: float, clients: int, until: float) -> float:
        """Nobody knows."""
        return float("nan")


class OwnCodec(Own):
    """A codec of one's own: see codec.seams."""

    def build(self) -> Codec | Codecs:
        """The codec, or one for each direction."""
        made: Codec | Codecs = _returned(self, "codec", _CODEC, {})
        return made


def _returned(section: Own, kind: str, parts: Sequence[str], more: dict[str, Any]) -> Any:
    """What the function returns, if it has these parts; it is given some more, if it takes that."""
    what, make = f"{kind}.make =", section.make
    try:
        taken = {name: value for name, value in more.items() if own.takes(make, what, name)}
        made = own.call(make, what, options=taken | section.options())
    except DataError as error:
        raise SettingsError(str(error)) from error
    for one in made if isinstance(made, Codecs) and kind == "codec" else [made]:
        missing = next((part for part in parts if not hasattr(one, part)), None)
        if missing is not None:
            raise SettingsError(
                f"{what} {make} returned a {type(one).__name__}, which has no {missing}; return what has all of the "
                f"protocol {kind.capitalize()}: {', '.join(parts)}"
            )
    return made


def completed(raw: Raw, beside: Path | None) -> Raw:
    """With `name = "own"` in each section that has a `make`, and with the folders in which their modules are: those
    that the settings remember, the one of the settings file, and where we are."""
    mine = {key: raw[key] for key in SECTIONS if isinstance(raw.get(key), dict) and "make" in raw[key]}
    both = next((key for key, section in mine.items() if section.get("name", OWN) != OWN), None)
    if both is not None:
        raise SettingsError(
            f"{both} has name = {mine[both]['name']!r} and make = {mine[both]['make']!r}; give one of the two"
        )
    if not mine:
        return raw
    remembered = [Path(folder) for folder in raw.get("modules", [])]
    places = [place.resolve() for place in [*remembered, *([beside] if beside else []), Path.cwd()]]
    own.reach(places)
    found = []
    for section in mine.values():
        with suppress(DataError):  # said when it is used, which may be elsewhere
            found.append(own.folder_of(str(section["make"]), "make ="))
    folders = list(dict.fromkeys(str(place) for place in found if place in places))
    named = {key: {"name": OWN, **section} for key, section in mine.items()}
    return {**raw, **named, **({"modules": folders} if folders else {})}


def sources(*sections: Section) -> str:
    """The files of their functions, and digests of them."""
    mine = [section for section in sections if isinstance(section, Own)]
    return ", ".join(sorted({own.source_of(section.make, "make =") for section in mine}))
