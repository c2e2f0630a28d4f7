"""The front doors to a real federation, for programs: serve and join."""

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

from torch import Tensor, nn

from quafl.core.randomness import derive
from quafl.core.seams import Task
from quafl.deploy.provision import Kit, open_kit
from quafl.protocol.carrier import SERVER
from quafl.record.rows import Row
from quafl.run.federation import RUN, ClientProcess, ServerProcess, at_work, stopped_when_asked
from quafl.tasks import local
from quafl.tasks.hands import Data
from quafl.tasks.local import Local

# A model and data, or a task of one's own; or a function of the party's name that gives them, or where there is one.
Brought: TypeAlias = Local | tuple[nn.Module, Data] | Task | Callable[[str], Any] | str


class Served(NamedTuple):
    """What `serve` gives back."""

    rows: list[Row]  # a dictionary per evaluation
    last: dict[str, Tensor]  # the last model, as a state_dict
    best: dict[str, Tensor]  # the best one evaluated
    ended: bool  # False: it was stopped, and goes on when it is called again


def serve(
    kit: Path | str,
    settings: Mapping[str, Any] | Path | str,
    *,
    task: Brought | None = None,
    out: Path | str | None = None,
    passphrase: str | None = None,
) -> Served:
    """Be the server of a real federation, until its end or Ctrl-C; called again, it goes on where it was.

    Args:
      kit: the folder that `quafl federation init` made for the server.
      settings: a settings file, or its tables as a dictionary: `{"algorithm": {"name": "calibrated"}, "run":
        {"rounds": 100}}`.
      task: the model that everybody trains, and data to judge it by: `quafl.Local(model, data)`, a pair, a `Task`, a
        function of the party's name that gives one, or "package.module:function". By default the settings' `task.make`.
      out: a folder for the run; by default in the kit.
      passphrase: of the kit's key, if that is encrypted.

    Returns:
      Rows, the last and the best model as state_dicts, and whether the run has ended.

    Raises:
      Diverged: training has left the finite numbers.

    Examples:
      On the machine that the clients know as the server::

        served = quafl.serve("federation/server", {"run": {"rounds": 100}}, task=(model, (test_x, test_y)))
        model.load_state_dict(served.best)
    """
    from quafl.settings.overrides import merged  # with the simulator, of which clients have no need
    from quafl.settings.reading import federation_of, folder_of, read

    opened = _opened(kit, passphrase)
    if not opened.is_server:
        raise ValueError(f"{kit} is the kit of {opened.name}; a server needs the server's")
    if isinstance(settings, Mapping):
        raw, beside = dict(settings), None
    else:
        raw, beside = read(str(settings)), folder_of(str(settings))
    if task is not None:
        raw = merged(raw, {"task": {"make": _place(task)}})
    loaded, folder = federation_of(raw, beside), Path(out or opened.path / RUN).resolve()
    seed = loaded.run.seed
    mine = loaded.task.build(SERVER, seed) if task is None else _task(task, SERVER, seed)
    with at_work(opened, folder, "choose another folder, or end that process"):
        process = ServerProcess(opened, passphrase, loaded, folder, lambda status: None, lambda: None, mine)
        with stopped_when_asked(process.stop, _interrupt, signal.SIGINT):
            ended = process.run()
        evaluations = process.party.coordinator.evaluations
    last, best = (mine.export(one.model, one.buffers) for one in (evaluations.shown, evaluations.best.shown))
    return Served(evaluations.rows, last, best, ended)


def join(
    kit: Path | str,
    *,
    task: Brought,
    state: Path | str | None = None,
    step_seconds: float = 0.0,
    keep_speed: bool = False,
    passphrase: str | None = None,
) -> bool:
    """Be a client of a real federation, until its end or Ctrl-C; called again, it goes on where it was.

    Args:
      kit: the folder that `quafl federation init` made for this client.
      task: the model that everybody trains, and this client's own data, in any form that `serve` takes.
      state: a folder for its checkpoints; by default in the kit.
      step_seconds: take at least that long for a local step, to leave the machine to others.
      keep_speed: do not tell the server how many steps are taken.
      passphrase: of the kit's key, if that is encrypted.

    Returns:
      Whether all went well; if not, the log says why.

    Examples:
      On a client's machine::

        quafl.join("federation/clients/north", task=quafl.Local(model, (x, y), batch_size=16))
    """
    opened = _opened(kit, passphrase)
    if opened.is_server:
        raise ValueError(f"{kit} is the server's kit; a client needs one of its own")
    mine = _task(task, opened.name, derive("client", opened.name))
    folder = Path(state or opened.path / "state").resolve()
    with at_work(opened, folder, "choose another folder, or end that process"):
        process = ClientProcess(
            opened, passphrase, mine, {}, folder, step_seconds=step_seconds, tell_speed=not keep_speed
        )
        with stopped_when_asked(process.stop, _interrupt, signal.SIGINT):
            return process.run()


def _opened(kit: Path | str, passphrase: str | None) -> Kit:
    """A kit whose certificate is good, and whose key can be read."""
    opened = open_kit(Path(kit))
    if opened.ended:
        raise ValueError(str(opened.warning()))
    opened.credentials(passphrase)
    return opened


def _place(brought: Brought) -> str:
    """What the settings say of it."""
    made: Any = brought if hasattr(brought, "__qualname__") else type(brought)
    return brought if isinstance(brought, str) else f"{made.__module__}:{made.__qualname__}"


def _task(brought: Brought, name: str, seed: int) -> Task:
    """Of a party."""
    if isinstance(brought, str):
        return local.make(brought, name, seed)
    made = brought(name) if callable(brought) else brought
    if isinstance(made, tuple):
        made = Local(*made)
    if isinstance(made, Local):
        return made.build(seed)
    if not all(hasattr(made, part) for part in ("initial", "batch", "gradient", "evaluate", "export")):
        raise TypeError(
            f"the task is a {type(made).__name__}, must be a quafl.Local(model, data), a pair or a quafl.Task"
        )
    task: Task = made
    return task


def _interrupt(code: int) -> NoReturn:
    raise KeyboardInterrupt
