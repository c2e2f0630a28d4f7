"""Ranges of settings, searched by Optuna: a trial is a run, and one that falls behind the others is given up."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from quafl.record.rows import Row
from quafl.record.summary import RunError, read_curve
from quafl.run.folders import accumulate
from quafl.run.jobs import Job, News
from quafl.run.pool import run
from quafl.run.sweeps import Point, values_of
from quafl.run.tuning import Tried, validated
from quafl.settings.base import SettingsError
from quafl.settings.curve import Settings

STUDY = "study.log"
FIRST = 4  # trials that are never given up
WARM = 0.25  # share of a run before which it is not given up
_NUMBER = r"[-+]?(?:[0-9]*\.)?[0-9]+(?:[eE][-+]?[0-9]+)?"


class Range(NamedTuple):
    """From here to there; on a logarithmic scale where both ends are positive and not whole numbers."""

    low: float
    high: float
    whole: bool


def range_of(key: str, values: str) -> Range | None:
    """What `low..high` says; None: it is something else."""
    found = re.fullmatch(rf"({_NUMBER})\.\.({_NUMBER})", values)
    if found is None:
        return None
    low, high = map(float, found.groups())
    if low >= high:
        raise SettingsError(f"--over {key}={values}: must go from the smaller number to the larger one")
    return Range(low, high, all(re.fullmatch(r"[-+]?[0-9]+", end) for end in found.groups()))


def search(
    source: str,
    overrides: Sequence[str],
    label: str,
    axes: Mapping[str, str],
    trials: int,
    out: Path,
    tell: Callable[[str], None],
) -> list[Tried]:
    """So many runs of the curve of that label, each at a point that is chosen by what the earlier ones came to, the
    mean of their metric over time. Those that ended are given back. Called again, it goes on."""
    optuna = _optuna()
    states = optuna.trial.TrialState
    study = _study(optuna, label, out)
    while len(study.get_trials(deepcopy=False, states=[states.COMPLETE, states.PRUNED])) < trials:
        trial = study.ask()
        point = {key: _suggested(trial, key, values) for key, values in axes.items()}
        mine = [one.settings for one in validated(source, overrides, [point]) if one.origin == label]
        (folder,) = accumulate(mine, out)
        watch = _Watch(trial, folder.settings)
        troubles = run([folder], processes=1, on_news=watch, given_up=watch.is_behind)
        for seed in folder.rows:
            watch.rows = folder.rows[seed]
        ended = not folder.missing() and not troubles
        if ended:
            trial.set_user_attr("ended", [point, folder.path.name])
        study.tell(trial, watch.cost if ended else None, states.COMPLETE if ended else states.PRUNED)
        how = "" if ended else ", ended before its time" if troubles else ", given up"
        tell(f"{folder.settings.label}: {watch.metric} {watch.mean:.4g} in the mean{how}")
    found = {name: Tried(point, read_curve(out / name)) for point, name in _ended(study)}
    if not found:
        raise RunError(f"all of the {trials} runs in {out} ended before their time; try smaller values")
    return list(found.values())


def _ended(study: Any) -> list[tuple[Point, str]]:
    trials = study.get_trials(deepcopy=False)
    return [tuple(trial.user_attrs["ended"]) for trial in trials if "ended" in trial.user_attrs]


def _study(optuna: Any, label: str, out: Path) -> Any:
    """In a file, so that it can be taken up again: a trial that was interrupted comes first."""
    out.mkdir(parents=True, exist_ok=True)
    kept = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(out / STUDY)))
    study = optuna.create_study(
        study_name=label,
        storage=kept,
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(FIRST, n_warmup_steps=round(100 * WARM)),
    )
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))  # taken up, it does not draw the same again
    for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        study.enqueue_trial(trial.params)
    return study


def _suggested(trial: Any, key: str, values: str) -> Any:
    found = range_of(key, values)
    if found is None:
        return trial.suggest_categorical(key, values_of(values))
    if found.whole:
        return trial.suggest_int(key, int(found.low), int(found.high))
    return float(f"{trial.suggest_float(key, found.low, found.high, log=found.low > 0):.3g}")


class _Watch:
    """How a trial comes along: the mean of its metric, reported by the percentage of the run that is behind it."""

    def __init__(self, trial: Any, settings: Settings) -> None:
        self._trial, self._run = trial, settings.run
        self.rows: list[Row] = []

    @property
    def metric(self) -> str:
        """The one of the settings, or the loss where there is no such."""
        return self._run.metric if self.rows and self._run.metric in self.rows[0] else "loss"

    @property
    def mean(self) -> float:
        """Over the rows so far."""
        return fmean(row[self.metric] for row in self.rows)

    @property
    def cost(self) -> float:
        """What is to be made small."""
        return self.mean if self.metric == "loss" or self._run.lower_is_better else -self.mean

    def __call__(self, job: Job, word: News) -> None:
        if isinstance(word, str):
            return
        self.rows.append(word)
        self._trial.report(self.cost, round(100 * word["time"] / self._run.until))

    def is_behind(self) -> bool:
        """Behind the median of the others at that time."""
        return bool(self._trial.should_prune())


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise RunError(
            "a range is searched by Optuna, which is not installed: pip install 'quafl[tune]', or give values, such as "
            "algorithm.lr=0.05,0.1,0.2"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
