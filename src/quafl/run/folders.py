"""Run folders: a curve's settings, rows, versions, models and checkpoints on disk."""

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from quafl.record.files import write_atomically
from quafl.record.rows import Row, by_seed, read_rows, write_rows
from quafl.record.summary import ROWS, SETTINGS, VERSIONS, RecordError, RunError
from quafl.run.jobs import Job, Outcome, Which, own_code, take_up
from quafl.run.versions import OWN, SITTING, UNKNOWN, joined, versions
from quafl.settings.base import SettingsError
from quafl.settings.curve import Settings
from quafl.settings.reading import load

TROUBLES, SECONDS = "troubles.json", "seconds.json"


@dataclass(slots=True)
class RunFolder:
    """A curve's folder: settings, rows of all its finished seeds, versions, and of each seed the best and last model or
    a checkpoint."""

    path: Path
    settings: Settings
    rows: dict[int, list[Row]] = field(default_factory=dict)
    troubles: dict[str, str] = field(default_factory=dict)  # by seed: why it ended before its time

    def begin(self) -> None:
        """Write what is known beforehand, in place of what an earlier run left."""
        self.path.mkdir(parents=True, exist_ok=True)
        fixed = self.path / ROWS, self.path / TROUBLES, self.path / SECONDS
        for old in (*fixed, *self.path.glob("model-seed*"), *self.path.glob("checkpoint-seed*")):
            old.unlink(missing_ok=True)
        with write_atomically(self.path / VERSIONS) as stream:
            json.dump(versions() | own_code(self.settings), stream, indent=2)
        self.write_settings()  # last: with them, a folder counts as begun

    def write_settings(self) -> None:
        """Which seeds there are to be, too."""
        with write_atomically(self.path / SETTINGS) as stream:
            stream.write(self.settings.to_toml())

    @classmethod
    def reopen(cls, path: Path, overrides: Sequence[str] = ()) -> "RunFolder":
        """A folder that an earlier run has begun."""
        (settings,) = load(str(path / SETTINGS), overrides)
        try:
            rows = by_seed(read_rows(path / ROWS)) if (path / ROWS).exists() else {}
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{path / ROWS} is damaged ({error}); delete it to run its seeds again") from error
        troubles = json.loads((path / TROUBLES).read_text()) if (path / TROUBLES).exists() else {}
        return cls(path, settings, rows, troubles)

    def missing(self) -> list[int]:
        """Seeds that are not finished."""
        return [seed for seed in self.settings.run.seeds if seed not in self.rows]

    def jobs(self, checkpoint_seconds: float) -> list[Job]:
        """What is left to do."""
        return [Job(self.settings, seed, self.checkpoint(seed), checkpoint_seconds) for seed in self.missing()]

    def add(self, seed: int, outcome: Outcome) -> None:
        """Keep a finished seed; it counts as finished once its rows are there."""
        for which, model in outcome.models.items():
            with write_atomically(self.model(seed, which), "wb") as stream:
                stream.write(safetensors.torch.save(model))
        known = json.loads((self.path / VERSIONS).read_text(encoding="utf-8"))
        now = joined(known, outcome.computed) if self.rows else known | outcome.computed
        if now != known:
            with write_atomically(self.path / VERSIONS) as stream:
                json.dump(now, stream, indent=2)
        spent = {**self.seconds(), str(seed): round(outcome.seconds, 1)}
        with write_atomically(self.path / SECONDS) as stream:
            json.dump(spent, stream, indent=2)
        if outcome.trouble is not None:
            self.troubles[str(seed)] = outcome.trouble
            with write_atomically(self.path / TROUBLES) as stream:
                json.dump(self.troubles, stream, indent=2)
        self.rows[seed] = outcome.rows
        write_rows(self.path / ROWS, [row for one in sorted(self.rows) for row in self.rows[one]])
        checkpoint = self.checkpoint(seed)
        for left in self.path.glob(f"{checkpoint.name}*"):  # also what a process that was killed had half written
            left.unlink(missing_ok=True)

    def outcome(self, seed: int) -> Outcome:
        """A finished seed, as it was when it was added."""
        kinds: tuple[Which, ...] = "best", "last"
        kept = {which: self.model(seed, which) for which in kinds if self.model(seed, which).exists()}
        models = {which: safetensors.torch.load_file(path) for which, path in kept.items()}
        made = json.loads((self.path / VERSIONS).read_text(encoding="utf-8"))
        computed = {"code": UNKNOWN} | {name: made[name] for name in (*SITTING, "date") if name in made}
        seconds = self.seconds().get(str(seed), 0.0)
        return Outcome(self.rows[seed], models, self.troubles.get(str(seed)), computed, seconds)

    def seconds(self) -> dict[str, float]:
        """What each finished seed has taken, on the wall."""
        path = self.path / SECONDS
        found: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found

    def model(self, seed: int, which: Which) -> Path:
        """Where a seed's model is kept."""
        return self.path / f"model-seed{seed}-{which}.safetensors"

    def checkpoint(self, seed: int) -> Path:
        """Where an unfinished seed stands."""
        return self.path / f"checkpoint-seed{seed}.pt"


def prepare(curves: Sequence[Settings], out: Path, *, overwrite: bool) -> list[RunFolder]:
    """A run folder per curve: `out` itself for a single one, folders in it for several."""
    folders = [RunFolder(out / _slug(curve.label) if len(curves) > 1 else out, curve) for curve in curves]
    _check_distinct(folders)
    if out.is_dir() and any(out.rglob(SETTINGS)) and not overwrite:
        raise RecordError(
            f"{out} already holds a run; choose another --out, add --overwrite to replace it, or continue it with "
            f"quafl run --resume {out}"
        )
    _check(folders)
    for folder in folders:
        folder.begin()
    return folders


def accumulate(curves: Sequence[Settings], out: Path) -> list[RunFolder]:
    """A run folder per curve in `out`, in which seeds of earlier sittings count, if they had the same settings."""
    folders = []
    _check_distinct([RunFolder(out / _slug(curve.label), curve) for curve in curves])
    for curve in curves:
        path = out / _slug(curve.label)
        if not (path / SETTINGS).exists():
            folders.append(RunFolder(path, curve))
            continue
        before = RunFolder.reopen(path)
        changed = _different(before.settings.model_dump(), curve.model_dump())
        if changed:
            raise RecordError(
                f"{path} was made with another {', '.join(changed)}; put it back, or choose another --out"
            )
        other = _other_versions(path)
        if before.rows and other:
            raise RecordError(f"{path} was made with {' and '.join(other)}; use that again, or choose another --out")
        seeds = sorted({*before.rows, *curve.run.seeds})
        wanted = curve.model_copy(update={"run": curve.run.model_copy(update={"seeds": seeds})})
        folders.append(RunFolder(path, wanted, before.rows, before.troubles))
    _check(folders)
    for folder in folders:
        if not (folder.path / SETTINGS).exists():
            folder.begin()
        else:
            folder.write_settings()
    return folders


def share(folders: Sequence[RunFolder], among: Path) -> list[str]:
    """What other curves below `among` have finished with the same settings need not be computed again: it is taken
    over, and said. The target is looked at only afterwards, and may be another."""
    words = []
    wanted = [(folder, tomllib.loads(folder.settings.to_toml())) for folder in folders]
    for path in sorted(place.parent for place in among.rglob(SETTINGS)):
        try:
            known = tomllib.loads((path / SETTINGS).read_text(encoding="utf-8"))
            alike = [
                folder
                for folder, settings in wanted
                if folder.missing() and set(_different(known, settings)) <= {"label", "run.target"}
            ]
            for folder in alike:
                other = path == folder.path or _other_versions(path) or _made_with(path) != own_code(folder.settings)
                taken = [] if other else _taken_over(folder, path)
                if taken:
                    words.append(f"{folder.settings.label}: seed {', '.join(taken)} as in {path.relative_to(among)}")
        except (RecordError, SettingsError, OSError, ValueError, safetensors.SafetensorError) as error:
            words.append(f"{path} cannot be read, and nothing is taken from it: {error}")
    return words


def _taken_over(folder: RunFolder, path: Path) -> list[str]:
    """The seeds that the folder missed and has now from the one at `path`."""
    other = RunFolder.reopen(path)
    taken = [seed for seed in folder.missing() if seed in other.rows]
    for seed in taken:
        folder.add(seed, other.outcome(seed))
    return [str(seed) for seed in taken]


def _other_versions(path: Path) -> list[str]:
    """What a folder was made with that is not what there is now, and may give other numbers."""
    made = json.loads((path / VERSIONS).read_text(encoding="utf-8"))
    return [f"{name} {made.get(name)}" for name in ("quafl", "torch") if made.get(name) != versions()[name]]


def _check_distinct(folders: Sequence[RunFolder]) -> None:
    paths = [folder.path for folder in folders]
    alike = next((path for path in paths if paths.count(path) > 1), None)
    if alike is not None:
        raise RecordError(
            f"two curves would share the folder {alike}; give them labels that differ in letters or digits"
        )


def _different(one: Any, other: Any, path: str = "") -> list[str]:
    """The settings that are not the same, apart from the seeds and the places of modules."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return [] if one == other or path in ("run.seeds", "modules") else [path]
    keys = dict.fromkeys([*one, *other])
    return [name for key in keys for name in _different(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))]


def reopen(out: Path) -> list[RunFolder]:
    """The folders that an earlier run has begun."""
    folders = [RunFolder.reopen(path.parent) for path in sorted(out.rglob(SETTINGS))]
    if not folders:
        raise RecordError(f"{out} holds no run to continue; give the folder that 'quafl run --out' was given")
    _check(folders)
    return folders


def changed_code(folders: Sequence[RunFolder]) -> list[str]:
    """A sentence for each unfinished curve whose seeds so far were computed with other code of the user's own."""
    words = []
    for folder in folders:
        now = own_code(folder.settings)
        if now and folder.missing() and _made_with(folder.path) != now:
            before = _made_with(folder.path).get(OWN)
            words.append(
                f"{folder.settings.label}: your code has changed since it was begun ({before}, now {now[OWN]}); it "
                f"goes on with the new code, run it anew for numbers of one kind"
            )
    return words


def _made_with(path: Path) -> dict[str, str]:
    """The user's own code, as `own_code` has it."""
    made = json.loads((path / VERSIONS).read_text(encoding="utf-8"))
    return {OWN: made[OWN]} if OWN in made else {}


def _check(folders: Sequence[RunFolder]) -> None:
    """Whether the data are here and fit, before anything is overwritten; once for all who have the same."""
    known: set[str] = set()
    for folder in folders:
        task, clients = folder.settings.task, folder.settings.clients
        same = f"{task.model_dump_json()} {clients.model_dump_json()}"
        if same in known:
            continue
        known.add(same)
        try:
            task.check(clients)
        except ValueError as error:
            raise RunError(f"{folder.settings.label}: {error}") from error


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.") or "curve"


def trained_model(folder: Path, *, seed: int | None, which: Which) -> dict[str, Tensor]:
    """A seed's model as a state_dict, by default the first seed's; of an unfinished one, that of its checkpoint."""
    if not (folder / SETTINGS).exists():
        curves = ", ".join(str(path.parent) for path in sorted(folder.rglob(SETTINGS)))
        raise RecordError(
            f"{folder} holds several curves; choose one of {curves}" if curves else f"{folder} holds no run"
        )
    plan = tomllib.loads((folder / SETTINGS).read_text(encoding="utf-8")).get("run", {})
    if plan.get("clock") == "wall":  # a federation's: it has one seed, and its models when it has stopped or ended
        path = folder / f"model-seed{plan['seed']}-{which}.safetensors"
        if not path.exists():
            raise RecordError(f"{folder} has no model yet; stop its server, or wait for its end")
        return safetensors.torch.load_file(path)
    run_folder = RunFolder.reopen(folder, ["run.device=cpu"])  # nothing is trained; the run's own may not be here
    settings = run_folder.settings
    seed = settings.run.seeds[0] if seed is None else seed
    if seed not in settings.run.seeds:
        raise RecordError(f"{folder} has no seed {seed}; it has {', '.join(map(str, settings.run.seeds))}")
    if run_folder.model(seed, which).exists():
        return safetensors.torch.load_file(run_folder.model(seed, which))
    if not run_folder.checkpoint(seed).exists():
        raise RecordError(f"{folder} has neither a model nor a checkpoint of seed {seed} yet; run it first")
    task, simulation = settings.simulation(seed, "sequential")
    take_up(run_folder.checkpoint(seed), simulation)
    shown = simulation.last if which == "last" else simulation.best
    return task.export(shown.model, shown.buffers)
