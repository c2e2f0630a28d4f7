"""Run folders: a curve's settings, rows, versions, models and checkpoints on disk."""

import json
import re
import shutil
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import safetensors
import safetensors.torch
from torch import Tensor

from quafl.record.files import LOCK, alone, write_atomically
from quafl.record.judged import JUDGED, read_scores, write_scores
from quafl.record.rows import Row, by_seed, read_rows, write_rows
from quafl.record.summary import REPORT, ROWS, SETTINGS, VERSIONS, RecordError, RunError, different
from quafl.run.jobs import Experiment, Job, Outcome, Which, own_code, take_up
from quafl.run.tracking import TENSORBOARD
from quafl.run.tracking import check as check_trackers
from quafl.run.versions import OWN, SITTING, UNKNOWN, joined, versions
from quafl.settings.base import SettingsError
from quafl.settings.curve import Settings
from quafl.settings.reading import load

TROUBLES, SECONDS = "troubles.json", "seconds.json"
MODEL = "model-seed{seed}-{which}.safetensors"
PROGRAM = "given by a program"  # the name of a task that is in no settings file
AnyExperiment = TypeVar("AnyExperiment", bound=Experiment)


@dataclass(slots=True)
class Folder(Generic[AnyExperiment]):
    """A curve's folder: settings, rows of all its finished seeds, versions, and of each seed the best and last model,
    or a checkpoint and the rows so far."""

    path: Path
    settings: AnyExperiment
    rows: dict[int, list[Row]] = field(default_factory=dict)
    troubles: dict[str, str] = field(default_factory=dict)  # by seed: why it ended before its time

    def begin(self) -> None:
        """Write what is known beforehand, in place of what an earlier run left."""
        self.path.mkdir(parents=True, exist_ok=True)
        _clear(self.path)
        with write_atomically(self.path / VERSIONS) as stream:
            json.dump(versions() | own_code(self.settings), stream, indent=2)
        self.write_settings()  # last: with them, a folder counts as begun

    def write_settings(self) -> None:
        """Which seeds there are to be, too."""
        with write_atomically(self.path / SETTINGS) as stream:
            stream.write(self.settings.to_toml())

    def read(self) -> Self:
        """With what an earlier run has left there."""
        path = self.path
        try:
            self.rows = by_seed(read_rows(path / ROWS)) if (path / ROWS).exists() else {}
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{path / ROWS} is damaged ({error}); delete it to run its seeds again") from error
        self.troubles = json.loads((path / TROUBLES).read_text()) if (path / TROUBLES).exists() else {}
        return self

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
        if outcome.clients:
            write_scores(self.path / JUDGED.format(seed=seed), outcome.clients)
        self.rows[seed] = outcome.rows
        write_rows(self.path / ROWS, [row for one in sorted(self.rows) for row in self.rows[one]])
        for done in (self.checkpoint(seed), self.rows_so_far(seed)):
            for left in self.path.glob(f"{done.name}*"):  # also what a process that was killed had half written
                left.unlink(missing_ok=True)

    def outcome(self, seed: int) -> Outcome:
        """A finished seed, as it was when it was added."""
        kinds: tuple[Which, ...] = "best", "last"
        kept = {which: self.model(seed, which) for which in kinds if self.model(seed, which).exists()}
        models = {which: safetensors.torch.load_file(path) for which, path in kept.items()}
        made = json.loads((self.path / VERSIONS).read_text(encoding="utf-8"))
        computed = {"code": UNKNOWN} | {name: made[name] for name in (*SITTING, "date") if name in made}
        seconds = self.seconds().get(str(seed), 0.0)
        clients = read_scores(self.path, [seed]).get(seed, {})
        return Outcome(self.rows[seed], models, self.troubles.get(str(seed)), computed, seconds, clients)

    def seconds(self) -> dict[str, float]:
        """What each finished seed has taken, on the wall."""
        path = self.path / SECONDS
        found: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found

    def rows_so_far(self, seed: int) -> Path:
        """Where an unfinished seed's rows are."""
        return self.path / f"rows-seed{seed}.csv"

    def model(self, seed: int, which: Which) -> Path:
        """Where a seed's model is kept."""
        return self.path / MODEL.format(seed=seed, which=which)

    def checkpoint(self, seed: int) -> Path:
        """Where an unfinished seed stands."""
        return self.path / f"checkpoint-seed{seed}.pt"


class RunFolder(Folder[Settings]):
    """Of a curve whose settings are in a file."""

    __slots__ = ()

    @classmethod
    def reopen(cls, path: Path, overrides: Sequence[str] = ()) -> "RunFolder":
        """A folder that an earlier run has begun."""
        if _settings_of(path).get("task", {}).get("name") == PROGRAM:
            raise RecordError(
                f"{path} was made by a program, through quafl.simulate or its like; run that again to go on"
            )
        (settings,) = load(str(path / SETTINGS), overrides)
        return cls(path, settings).read()


def _settings_of(path: Path) -> dict[str, Any]:
    """As they are in a folder."""
    return tomllib.loads((path / SETTINGS).read_text(encoding="utf-8"))


def prepare(curves: Sequence[Settings], out: Path, *, overwrite: bool) -> list[RunFolder]:
    """A run folder per curve: `out` itself for a single one, folders in it for several. What an earlier run has left in
    `out` goes, if it is to be overwritten: also curves that there are no more, and the report."""
    folders = [RunFolder(out / _slug(curve.label) if len(curves) > 1 else out, curve) for curve in curves]
    _check_distinct(folders)
    earlier = _earlier(out, overwrite=overwrite)
    _check(folders)
    with held([out, *earlier, *(folder.path for folder in folders)]):
        for path in _earlier(out, overwrite=overwrite):  # nobody else has begun meanwhile
            _clear(path)
        _forget_report(out)
        for folder in folders:
            folder.begin()
    for path in set(earlier) - {folder.path for folder in folders}:
        (path / LOCK).unlink(missing_ok=True)
        with suppress(OSError):  # somebody keeps something else there
            path.rmdir()
    return folders


def _earlier(out: Path, *, overwrite: bool) -> list[Path]:
    """The folders of an earlier run in `out`, which is to be overwritten; a RecordError if it is not, or if they are
    runs of their own, which nobody has asked to delete."""
    found = sorted(path.parent for path in out.rglob(SETTINGS)) if out.is_dir() else []
    if found and not overwrite:
        raise RecordError(
            f"{out} already holds a run; choose another --out, add --overwrite to replace it, or continue it with "
            f"quafl run --resume {out}"
        )
    begun = any((out / name).exists() for name in (SETTINGS, REPORT, LOCK))  # here, by a run of one or of several
    foreign = [path for path in found if path != out and not (begun and _is_curve_in(out, path))]
    if foreign:
        raise RecordError(
            f"{out} holds runs of their own, such as {foreign[0]}, which --overwrite does not replace; choose another "
            f"--out, or delete them"
        )
    return found


def _is_curve_in(out: Path, path: Path) -> bool:
    """Whether the run folder `path` is where a run in `out` puts a curve of that label."""
    try:
        label = tomllib.loads((path / SETTINGS).read_text(encoding="utf-8"))["label"]
    except (OSError, ValueError, KeyError):
        return False
    return path == out / _slug(str(label))


def _clear(path: Path) -> None:
    """Remove what a run has left in its folder."""
    fixed = (path / name for name in (SETTINGS, VERSIONS, ROWS, TROUBLES, SECONDS))
    for old in (
        *fixed,
        *(old for kind in ("model", "checkpoint", "rows", "clients") for old in path.glob(f"{kind}-seed*")),
    ):
        old.unlink(missing_ok=True)
    for old in (path / TENSORBOARD).glob("seed*"):
        shutil.rmtree(old)


def _forget_report(out: Path) -> None:
    """It shows what was there before."""
    for old in (out / REPORT, (out / REPORT).with_suffix(".png")):
        old.unlink(missing_ok=True)


@contextmanager
def held(paths: Iterable[Path]) -> Iterator[None]:
    """No other process runs anything in these folders, which are made if they are not there."""
    with ExitStack() as locks:
        for path in dict.fromkeys(paths):
            path.mkdir(parents=True, exist_ok=True)
            locks.enter_context(alone(path, "wait until that has ended, or choose another --out"))
        yield


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
    with held(folder.path for folder in folders):
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
            known = _settings_of(path)
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


def _check_distinct(folders: Sequence[Folder[Any]]) -> None:
    paths = [folder.path for folder in folders]
    alike = next((path for path in paths if paths.count(path) > 1), None)
    if alike is not None:
        raise RecordError(
            f"two curves would share the folder {alike}; give them labels that differ in letters or digits"
        )


def _different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The settings that are not the same, apart from the seeds, the places of modules, and who is told."""
    return [name for name in different(one, other) if name not in ("run.seeds", "run.track", "modules")]


def reopen(out: Path) -> list[RunFolder]:
    """The folders that an earlier run has begun: `out` itself, or folders in it."""
    found = [out] if (out / SETTINGS).exists() else sorted(path.parent for path in out.glob(f"*/{SETTINGS}"))
    if not found:
        deeper = next((path.parents[1] for path in sorted(out.rglob(SETTINGS))), None)
        hint = "give the folder that 'quafl run --out' was given" if deeper is None else f"there is one in {deeper}"
        raise RecordError(f"{out} holds no run to continue; {hint}")
    folders = [RunFolder.reopen(path) for path in found]
    _check(folders)
    with held(found):
        _forget_report(out)
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
    """Whether the data are here and fit, before anything is overwritten; once for all who have the same. And whether
    all who are to be told can be."""
    known: set[str] = set()
    for folder in folders:
        check_trackers(folder.settings.run.track or ())
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


def opened(path: Path, curve: AnyExperiment) -> Folder[AnyExperiment]:
    """The folder of a curve that no settings file describes: begun, or continued; RecordError, if it holds another."""
    folder = Folder(path, curve)
    if not (path / SETTINGS).exists():
        folder.begin()
        return folder
    changed = [name for name in _different(_settings_of(path), tomllib.loads(curve.to_toml())) if name != "run.target"]
    if "task.fingerprint" in changed:
        raise RecordError(
            f"{path} was made with another model or other data; call torch.manual_seed before making the model, so "
            f"that it begins with the same weights, or choose another folder"
        )
    if changed:
        raise RecordError(f"{path} was made with another {', '.join(changed)}; put it back, or choose another folder")
    folder.read()
    other = _other_versions(path)
    if folder.rows and other:
        raise RecordError(f"{path} was made with {' and '.join(other)}; use that again, or choose another folder")
    folder.settings = curve.only(*sorted({*folder.rows, *curve.run.seeds}))
    folder.write_settings()
    return folder


def places(out: Path, curves: Sequence[AnyExperiment]) -> list[Path]:
    """A folder in `out` for each of several such curves."""
    folders = [Folder(out / _slug(curve.label), curve) for curve in curves]
    _check_distinct(folders)
    return [folder.path for folder in folders]


def trained_model(folder: Path, *, seed: int | None, which: Which) -> dict[str, Tensor]:
    """A seed's model as a state_dict, by default the first seed's; of an unfinished one, that of its checkpoint."""
    if not (folder / SETTINGS).exists():
        curves = ", ".join(str(path.parent) for path in sorted(folder.rglob(SETTINGS)))
        raise RecordError(
            f"{folder} holds several curves; choose one of {curves}" if curves else f"{folder} holds no run"
        )
    plan = _settings_of(folder).get("run", {})
    if plan.get("clock") == "wall":  # a federation's: it has one seed, and its models when it has stopped or ended
        path = folder / MODEL.format(seed=plan["seed"], which=which)
        if not path.exists():
            raise RecordError(f"{folder} has no model yet; stop its server, or wait for its end")
        return safetensors.torch.load_file(path)
    seeds = plan.get("seeds", [])
    seed = next(iter(seeds), 0) if seed is None else seed
    if seed not in seeds:
        raise RecordError(f"{folder} has no seed {seed}; it has {', '.join(map(str, seeds))}")
    path = folder / MODEL.format(seed=seed, which=which)
    if path.exists():
        return safetensors.torch.load_file(path)
    run_folder = RunFolder.reopen(folder, ["run.device=cpu"])  # nothing is trained; the run's own may not be here
    if not run_folder.checkpoint(seed).exists():
        raise RecordError(f"{folder} has neither a model nor a checkpoint of seed {seed} yet; run it first")
    task, simulation = run_folder.settings.simulation(seed, "sequential")
    take_up(run_folder.checkpoint(seed), simulation)
    shown = simulation.last if which == "last" else simulation.best
    return task.export(shown.model, shown.buffers)
