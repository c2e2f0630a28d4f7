"""A federation's run folder, computed again by the simulator."""

from pathlib import Path
from typing import NamedTuple

from quafl.core.randomness import derive
from quafl.protocol import history
from quafl.protocol.carrier import SERVER
from quafl.protocol.history import Line, Reached
from quafl.protocol.log import Returned
from quafl.record.summary import HISTORY, SETTINGS, RunError
from quafl.settings.reading import load_federation
from quafl.sim.replay import Deviation, follow


class Outcome(NamedTuple):
    """How far the history was followed."""

    rounds: int
    models: int  # of the server, that were compared, and were the same
    known: int  # models that the history has
    returned: list[str]  # clients that came back as another process on the way
    deviation: str | None  # why it could not be followed further


def replay(folder: Path, make_task: str | None = None) -> Outcome:
    """Compute the server's models again from who was contacted, with how many steps. `make_task` makes the clients'
    tasks, with what the server's function is given; by default it is that."""
    settings, lines = load_federation(str(folder / SETTINGS)), _read(folder / HISTORY)
    algorithm, coders, optimizer = settings.terms()
    start = settings.task.build(SERVER, settings.run.seed).initial()
    clients = settings.task.model_copy(update={"make": make_task}) if make_task else settings.task
    rounds, models, known = 0, 0, {line.round for line in lines if isinstance(line, Reached)}
    deviation = None
    states = follow(
        lines,
        lambda name: clients.build(name, derive("client", name)),
        start,
        algorithm,
        coders,
        optimizer,
    )
    try:
        for state in states:
            rounds += 1
            models += state.round in known
    except Deviation as error:
        deviation = str(error)
    returned = [line.name for line in lines if isinstance(line, Returned)]
    return Outcome(rounds, models, len(known - {0}), returned, deviation)


def _read(path: Path) -> list[Line]:
    if not path.exists():
        raise RunError(f"{path} does not exist; give the run folder of a federation's server")
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        return [history.from_text(line) for line in lines]
    except ValueError as error:
        raise RunError(f"{path} cannot be read ({error})") from error
