"""The front doors for programs and notebooks: simulate, compare, tune."""

import logging
import signal
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from quafl.codec.seams import Codec, Codecs
from quafl.core.seams import Algorithm, Optimizer
from quafl.record.evaluations import Diverged
from quafl.record.files import alone, write_atomically
from quafl.record.judged import Scores
from quafl.record.rows import Row
from quafl.record.summary import REPORT, Curve, ranked
from quafl.run.arguments import CODEC, OPTIMIZER, WORLD, Arguments, arguments
from quafl.run.bars import bars
from quafl.run.folders import Folder, opened, places
from quafl.run.heap import kept
from quafl.run.jobs import Job, News, compute
from quafl.run.pool import handling_signals, tracked
from quafl.run.results import Comparison, Models, Result, Tuning
from quafl.run.tracking import check as check_trackers
from quafl.run.versions import versions
from quafl.settings.base import Tracker
from quafl.sim import World
from quafl.sim.executors import ExecutorName
from quafl.tasks.hands import Data, HeldOut, OnDemand, joined, parted
from quafl.tasks.judging import Measure
from quafl.tasks.precision import Precision, one_thread
from quafl.tasks.reading import Collate
from quafl.tasks.supervised import Augment

_log = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 60.0
JUDGES = 64  # clients by whose data `tune` judges, where those are made on demand
Callback: TypeAlias = Callable[[Row], bool | None]
Callbacks: TypeAlias = Callable[[str, Row], bool | None]  # of several curves, by label


def simulate(
    *,
    model: nn.Module,
    clients: Sequence[Data],
    algorithm: Algorithm,
    until: float,
    codec: Codec | Codecs = CODEC,
    optimizer: Optimizer = OPTIMIZER,
    loss: Measure = functional.cross_entropy,
    metrics: Mapping[str, Measure] | None = None,
    lower_is_better: bool = False,
    test: Data | None = None,
    held_out: HeldOut | None = None,
    per_client: bool = False,
    personal_steps: int = 0,
    batch_size: int = 32,
    accumulate: int = 1,
    augment: Augment | None = None,
    collate: Collate | None = None,
    workers: int = 0,
    world: World = WORLD,
    evaluations: int = 50,
    average: float = 0.0,
    memory: float = inf,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    executor: ExecutorName = "auto",
    precision: Precision = "float32",
    callback: Callback | None = None,
    out: Path | str | None = None,
    track: Sequence[Tracker] = (),
    progress: bool = True,
) -> Result:
    r"""Train a model on clients' data, for some virtual time.

    Client i has examples of its own and a model X^i; the server has X_t. In round t the server and `sampled` of the
    clients exchange their models, packed by the `codec`; between contacts, a client takes local steps by the
    `optimizer`, as many as its speed in the `world` allows. What is exchanged, and what becomes of it, is the
    `algorithm`'s. One seed is one run, bit for bit: it is computed in one thread, whatever torch is set to.

    Args:
      model: any module. It is not touched; it is trained in float32, and given back in its own type.
      clients: a pair (inputs, targets) for each client: tensors, numpy arrays or lists, or tuples or dictionaries of
        them, with an example a row. Or a map-style dataset for each (torch's, Hugging Face's), which is read when it is
        needed. `quafl.OnDemand(n, make)` makes client i's data by make(i) when they are needed. Numbers of float64 are
        taken as float32; octets, where the model cannot take them as they are, as pictures, scaled to 0..1.
      algorithm: what clients and server do: `quafl.Calibrated(sampled=5)`, `quafl.FedAvg(sampled=5)`, …
      until: how much virtual time to simulate; a step of a fast client takes 2 by default.
      codec: how models are packed, in both directions or `quafl.Codecs(up, down)`; `quafl.Identity()` for not at all.
      optimizer: of the clients' steps: `quafl.sgd`, `quafl.momentum`, `quafl.adam`, `quafl.adamw`; each can have a
        `weight_decay` and a `clip`.
      loss: of a batch's outputs and targets, a mean over the batch.
      metrics: functions likewise, by name, which are reported beside the loss; by default the accuracy, if targets are
        class numbers. The best model is chosen by the first one.
      lower_is_better: of that metric; of the loss it always is.
      test: what models are evaluated on, a pair or a dataset; by default what is held out, or all the clients' data.
      held_out: what each client is judged by: a share of its examples, which it does not learn from, or a list with
        data for each. Rows then have means over clients, their spread, the 10th percentile and the worst.
      per_client: the same of clients that hold nothing out, by what they learn from.
      personal_steps: each client takes so many steps from the server's model, and judges that, too.
      batch_size: examples of a local step.
      accumulate: parts in which a batch's gradient is computed, one after another, to save memory.
      augment: changes a training batch's inputs at random: a function of inputs and `Draws`.
      collate: makes a pair (inputs, targets) of a list of a dataset's examples; by default as torch does.
      workers: processes that read datasets ahead.
      world: how fast clients are, when they are there, how long messages take.
      evaluations: how many, at equal distances in time.
      average: with a time constant, what is evaluated and given back is an average of the server's models over time.
      memory: gigabytes of what clients keep: models, memories, optimizers. Beyond, it is on disk, in $TMPDIR or
        /var/tmp.
      seed: of all that is drawn at random; or
      seeds: several, one run for each.
      device: where models, data and messages are.
      executor: how local steps are computed: "sequential", "vectorised", "graph", or on a GPU what is fastest, "auto".
      precision: of gradients: "float32", "tf32" or "bfloat16".
      callback: is given each row as it comes; if it returns True, the run stops there, as it does on Ctrl-C. What it
        raises ends the run.
      out: a folder for rows, models, settings and, every minute, a checkpoint. If it holds the same run already, that
        is continued, and only what is missing is computed.
      track: experiment trackers that get each row, too, beside that folder: "tensorboard", "mlflow", "wandb".
      progress: show bars, in a terminal or notebook.

    Returns:
      A `Result`: `rows`, `model`, `best`, `frame`, `plot()`. On Ctrl-C it is what there is by then, and `interrupted`
      is True; a second Ctrl-C is a KeyboardInterrupt.

    Raises:
      Diverged: training has left the finite numbers; `rows` of the exception are those until then.
      RecordError: `out` holds another run.

    Examples:
      >>> import quafl, torch
      >>> x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
      >>> y = (x.sum(1) > 0).long()
      >>> result = quafl.simulate(
      ...     model=torch.nn.Linear(3, 2),
      ...     clients=[(x[i::6], y[i::6]) for i in range(6)],
      ...     algorithm=quafl.QuAFL(sampled=2),
      ...     optimizer=quafl.sgd(lr=0.5),
      ...     until=100,
      ...     seeds=[0, 1],
      ... )
      >>> len(result.curve.seeds), result.rows[-1]["accuracy"] > 0.9
      (2, True)
    """
    if seeds is not None and seed != 0:
        raise ValueError(f"seed is {seed} and seeds {list(seeds)}; give one of them")
    curve = Arguments(
        model=model,
        clients=clients,
        algorithm=algorithm,
        until=until,
        codec=codec,
        optimizer=optimizer,
        loss=loss,
        metrics=metrics,
        lower_is_better=lower_is_better,
        test=test,
        held_out=held_out,
        per_client=per_client,
        personal_steps=personal_steps,
        batch_size=batch_size,
        accumulate=accumulate,
        augment=augment,
        collate=collate,
        workers=workers,
        world=world,
        evaluations=evaluations,
        average=average,
        memory=memory,
        device=device,
        executor=executor,
        precision=precision,
        track=track,
        seeds=[seed] if seeds is None else seeds,
    )
    path = None if out is None else Path(out)
    called = None if callback is None else lambda label, row: callback(row)
    (result,) = _work_off([curve], [path], path, called, progress).values()
    if result.curve.troubles:
        diverged = Diverged(next(iter(result.curve.troubles.values())))
        diverged.rows = result.rows
        raise diverged
    return result


def compare(
    curves: Mapping[str, Mapping[str, Any]],
    *,
    seeds: Sequence[int] = (0,),
    target: float = 0.9,
    callback: Callbacks | None = None,
    out: Path | str | None = None,
    progress: bool = True,
    **common: Any,
) -> Comparison:
    """Simulate several curves with the same seeds.

    Args:
      curves: by label, the arguments of `simulate` that a curve has for itself.
      seeds: a run for each, of each curve.
      target: the value of the metric whose time the table and the page give.
      callback: is given a label and a row, as it comes; if it returns True, all of them stop there.
      out: a folder, in which each curve has one of its own, and report.html shows them all. If it holds the same runs
        already, they are continued.
      progress: show bars, in a terminal or notebook.
      **common: the arguments of `simulate` that all curves have.

    Returns:
      A `Comparison`: a table as its text, `frame`, `plot()`, and a `Result` for each label. A curve that diverges is
      kept as far as it came.

    Examples:
      >>> import quafl, torch
      >>> x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
      >>> y = (x.sum(1) > 0).long()
      >>> found = quafl.compare(
      ...     {
      ...         "QuAFL": dict(algorithm=quafl.QuAFL(sampled=2)),
      ...         "QuAFL, 32 bits": dict(algorithm=quafl.QuAFL(sampled=2), codec=quafl.Identity()),
      ...     },
      ...     model=torch.nn.Linear(3, 2),
      ...     clients=[(x[i::6], y[i::6]) for i in range(6)],
      ...     optimizer=quafl.sgd(lr=0.5),
      ...     until=100,
      ... )
      >>> [label for label, result in found.results.items() if result.rows[-1]["accuracy"] > 0.8]
      ['QuAFL', 'QuAFL, 32 bits']
    """
    given = [arguments(label, common, own, {"seeds": seeds, "target": target}) for label, own in curves.items()]
    return Comparison(_all(given, out, callback, progress))


def tune(
    grid: Mapping[str, Sequence[Any]],
    *,
    validation: float = 0.2,
    seeds: Sequence[int] = (0,),
    callback: Callbacks | None = None,
    out: Path | str | None = None,
    progress: bool = True,
    **common: Any,
) -> Tuning:
    """Try every point of a grid, judged by examples that the clients do not learn from.

    A point's score is the mean over time and seeds of the metric on the validation data, by which a fast start counts
    as well as a good end (as `quafl tune` has it).

    Args:
      grid: for some of the arguments of `simulate`, the values to try.
      validation: the share of each client's examples that is judged by, drawn at random, the same for every point.
      seeds: a run for each, of each point; others than those of the final run.
      callback: as in `compare`.
      out: as in `compare`.
      progress: as in `compare`.
      **common: the other arguments of `simulate`. `test` is not looked at.

    Returns:
      A `Tuning`: a table as its text, and `best`, the arguments of the best point.

    Examples:
      >>> import quafl, torch
      >>> x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
      >>> given = dict(model=torch.nn.Linear(3, 2), clients=[(x[i::6], (x[i::6].sum(1) > 0).long()) for i in range(6)])
      >>> given |= dict(algorithm=quafl.QuAFL(sampled=2), until=50)
      >>> tuned = quafl.tune({"optimizer": [quafl.sgd(lr) for lr in (0.001, 0.5)]}, seeds=[7], **given)
      >>> tuned.best
      {'optimizer': sgd(lr=0.5)}
      >>> result = quafl.simulate(**given, **tuned.best)
    """
    try:
        from quafl.run.tuning import area
    except ModuleNotFoundError as error:
        sentence = f"tune needs {error.name}, which is not installed: pip install 'quafl[figures]'"
        raise ModuleNotFoundError(sentence, name=error.name) from error
    if not grid or not all(grid.values()):
        raise ValueError(f"grid is {dict(grid)}, must have at least one argument, and values for each")
    if not 0 < validation < 1:
        raise ValueError(f"validation is {validation}, must be a share between 0 and 1")
    learned, judged = _held_out(common.get("clients", ()), validation)
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    labelled = {" ".join(map(_short, point.values())): point for point in points}
    if len(labelled) < len(points):
        raise ValueError(f"two points of the grid look alike: {', '.join(labelled)}; give values that differ")
    mine = {"seeds": seeds, "clients": learned, "test": judged}
    given = [arguments(label, common, point, mine) for label, point in labelled.items()]
    results = _all(given, out, callback, progress)
    return Tuning(results, labelled, {label: area(result.curve) for label, result in results.items()})


def _held_out(clients: Sequence[Data], share: float) -> tuple[Sequence[Data], Data]:
    """What every client learns from, and what all are judged by; where there are very many, by some of them."""
    learned, judged = parted(clients, share)
    assert judged is not None
    some = range(0, len(judged), -(-len(judged) // JUDGES)) if isinstance(clients, OnDemand) else range(len(judged))
    try:
        return learned, joined([judged[client] for client in some])
    except ValueError as error:
        raise ValueError(f"validation is {share}: {error}; choose a larger share") from None


def _short(value: Any) -> str:
    """For a label: what an object was made with beside its defaults."""
    if not is_dataclass(value) or isinstance(value, type):
        return str(value)
    own = {field.name: getattr(value, field.name) for field in fields(value)}
    usual = {field.name: field.default for field in fields(value)}
    said = ", ".join(f"{name}={one}" for name, one in own.items() if one != usual[name])
    return f"{type(value).__name__}({said})"


def _all(
    curves: list[Arguments], out: Path | str | None, callback: Callbacks | None, progress: bool
) -> dict[str, Result]:
    """Each curve's result, by its label; with a folder, a page."""
    if not curves:
        raise ValueError("there are no curves; give at least one")
    path = None if out is None else Path(out)
    own = [None] * len(curves) if path is None else places(path, curves)
    results = _work_off(curves, own, path, callback, progress)
    if path is not None:
        _write_report([result.curve for result in results.values()], path / REPORT)
    return results


def _write_report(curves: list[Curve], page: Path) -> None:
    try:
        from quafl.record import report
    except ModuleNotFoundError as error:
        _log.warning("no %s: it needs %s; pip install 'quafl[figures]'", page.name, error.name)
        return
    with write_atomically(page) as stream:
        stream.write(report.page(ranked(curves)))


def _work_off(
    curves: list[Arguments],
    own: Sequence[Path | None],
    out: Path | None,
    callback: Callbacks | None,
    progress: bool,
) -> dict[str, Result]:
    """All seeds of all curves, the curves side by side, until somebody stops them; those that were begun, by label."""
    _check_trackers(curves, out)
    with (
        _to_itself(out),
        one_thread(),
        kept(),
        tracked(lambda job, news: None) as track,
        _noticing_interrupts() as asked,
    ):
        runs = [_Run(curve, place) for curve, place in zip(curves, own, strict=True)]
        with bars(curves, shown=progress) as tell:
            for seed, (number, run) in product(curves[0].run.seeds, enumerate(runs)):
                run.go_on(seed, partial(tell, number, seed), callback, track, asked)
                if asked:
                    break
    if asked:
        where = "" if out is None else f"; call it again with out={str(out)!r} to go on"
        _log.warning("stopped; the result has the rows so far%s", where)
    return {run.curve.label: run.result() for run in runs if run.rows}


def _check_trackers(curves: list[Arguments], out: Path | None) -> None:
    wanted = sorted({tracker for curve in curves for tracker in curve.run.track or ()})
    check_trackers(wanted)
    if wanted and out is None:
        raise ValueError(f"track is {wanted}, which needs a folder; give out")


@contextmanager
def _to_itself(out: Path | None) -> Iterator[None]:
    """Where there is a folder, no other process is in it."""
    if out is None:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with alone(out, "choose another folder, or wait until it is done"):
        yield


@contextmanager
def _noticing_interrupts() -> Iterator[list[int]]:
    """Ctrl-C is written down, and looked at after each round; the second is Python's usual one."""
    asked: list[int] = []

    def notice(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt

    with handling_signals(notice, [signal.SIGINT]):
        yield asked


class _Run:
    """One curve: what there is of it, and the folder where it is kept."""

    def __init__(self, curve: Arguments, place: Path | None) -> None:
        self.curve = curve if place is None else curve.known()
        self.rows: dict[int, list[Row]] = {}
        self._folder = None if place is None else opened(place, self.curve)
        self._models: dict[int, Models] = {}
        self._clients: dict[int, Scores] = {}
        self._troubles: dict[int, str] = {}
        self._interrupted = False

    def go_on(
        self,
        seed: int,
        tell: Callable[[Row], None],
        callback: Callbacks | None,
        track: Callable[[Job, News], None],
        asked: list[int],
    ) -> None:
        """To the end of a seed, or until `asked` has something in it; each row is told, and new ones are tracked and
        called back."""
        if self._folder is not None and seed in self._folder.rows:
            self._take_over(self._folder, seed)
            tell(self._at_end(seed))
            return
        with TemporaryDirectory() as scratch:  # of what nobody keeps, too, there is a checkpoint when it is stopped
            checkpoint = Path(scratch) / "checkpoint" if self._folder is None else self._folder.checkpoint(seed)
            known = checkpoint.exists()

            def on_news(row: News) -> None:
                nonlocal known
                if isinstance(row, dict):
                    tell(row)
                    if not known:
                        track(job, row)
                    if not known and callback is not None and callback(self.curve.label, row) is True:
                        asked.append(0)
                    known = False

            job = Job(self.curve, seed, checkpoint, inf if self._folder is None else CHECKPOINT_SECONDS)
            outcome = compute(job, on_news, lambda: bool(asked))
        task, simulation = self.curve.made
        last, best = (task.flat.module(shown.model, shown.buffers) for shown in (simulation.last, simulation.best))
        self.rows[seed], self._models[seed] = simulation.rows, Models(last, best)
        self._clients[seed] = simulation.clients
        if outcome is None:
            self._interrupted = True
            return
        if outcome.trouble is not None:
            self._troubles[seed] = outcome.trouble
        if self._folder is not None:
            self._folder.add(seed, outcome)
        tell(self._at_end(seed))

    def _at_end(self, seed: int) -> Row:
        """The last evaluation may be a little before the end."""
        return {**self.rows[seed][-1], "time": self.curve.run.until}

    def _take_over(self, folder: Folder[Arguments], seed: int) -> None:
        """What was computed earlier."""
        kept = folder.outcome(seed)
        self.rows[seed], self._clients[seed] = kept.rows, kept.clients
        last, best = deepcopy(self.curve.model), deepcopy(self.curve.model)
        last.load_state_dict(kept.models["last"])
        best.load_state_dict(kept.models["best"])
        self._models[seed] = Models(last, best)
        if kept.trouble is not None:
            self._troubles[seed] = kept.trouble

    def result(self) -> Result:
        """What there is. Of a run that was interrupted, as much as all its seeds have come to."""
        settings = tomllib.loads(self.curve.to_toml())
        interrupted = self._interrupted or len(self.rows) < len(self.curve.run.seeds)
        if interrupted:
            settings["run"]["until"] = min(rows[-1]["time"] for rows in self.rows.values())
        curve = Curve(self.curve.label, self.rows, settings, versions(), self._troubles, clients=self._clients)
        return Result(curve, self._models, interrupted)
