"""QuAFL as a job of NVIDIA FLARE."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from waiting import wait_for

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'quafl[flare]'")

from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace

from quafl.deploy.flare import OCTETS, SECRET, TASK, TOPIC, FlareClient, FlareServer
from quafl.protocol.carrier import Octets, Unreachable
from quafl.record.rows import read_rows
from quafl.run.flare import ALLOWED, make_job
from quafl.settings.base import SettingsError
from quafl.settings.reading import load_federation

EXAMPLE = Path(__file__).parents[1] / "examples" / "flare"
NAMES = "north", "south"


@pytest.mark.federation
def test_the_example_learns_in_flares_simulator_with_four_bits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "job.py"), "--workspace", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,  # the settings end the run after a minute
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (accuracy,) = re.findall(r"^accuracy (\S+);", done.stdout, re.MULTILINE)
    assert float(accuracy) > 0.85
    folder = tmp_path / "server" / "simulate_job" / "quafl"
    last = read_rows(folder / "rows.csv")[-1]
    assert last["round"] == 40
    assert last["lost_contacts"] == 0
    whole_models = 2 * 2 * 40 * 4 * 4810  # octets, were every message in full precision
    assert last["bytes_up"] + last["bytes_down"] < whole_models / 5
    assert (folder / "model-seed0-best.safetensors").exists()
    assert list((tmp_path / "client-1" / "simulate_job" / "quafl").glob("checkpoint-*"))
    assert not (tmp_path / "server" / "error_log.txt").read_text()


# The job


def test_a_job_has_the_settings_and_the_task_but_none_of_our_code(tmp_path: Path) -> None:
    settings = load_federation(str(EXAMPLE / "fed.toml"), ["task.make=elsewhere:make", "task.hidden=8"])
    make_job(settings, "mine:make").export_job(str(tmp_path))
    config = tmp_path / "quafl" / "app" / "config"
    assert {path.name for path in (tmp_path / "quafl" / "app").iterdir()} == {"config"}
    (server,) = json.loads((config / "config_fed_server.json").read_text())["workflows"]
    (client,) = json.loads((config / "config_fed_client.json").read_text())["executors"]
    assert tomllib.loads(server["args"]["settings"])["codec"]["bits"] == 4
    assert tomllib.loads(server["args"]["settings"])["task"] == {"name": "own", "make": "elsewhere:make", "hidden": 8}
    assert client["executor"]["args"] == {"task": "mine:make", "options": {"hidden": 8}}
    assert client["tasks"] == [TASK]
    for path in (server["path"], client["executor"]["path"]):
        assert path.startswith(ALLOWED)
    assert json.loads((tmp_path / "quafl" / "meta.json").read_text())["min_clients"] == 2


def test_settings_in_which_flare_would_replace_something_are_refused() -> None:
    settings = load_federation(str(EXAMPLE / "fed.toml"), ["label='{JOB_ID}'"])
    with pytest.raises(SettingsError, match="curly bracket"):
        make_job(settings)


# The two ends, with FLARE's engine replaced by function calls


class Engine:
    """A site's. What others send it, its handlers answer."""

    def __init__(self, name: str, folder: Path, sites: "dict[str, Engine]") -> None:
        for part in ("startup", "local"):
            (folder / part).mkdir(parents=True)
        self.fired: list[str] = []
        self.handlers: dict[str, Any] = {}
        self.tasks: dict[str, Any] = {}
        self._sites = sites
        self._contexts = FLContextManager(self, name, "job")
        self._workspace = Workspace(str(folder), name)
        sites[name] = self

    def new_context(self) -> FLContext:
        context = self._contexts.new_context()
        context.set_prop(FLContextKey.WORKSPACE_OBJECT, self._workspace, private=True)
        return context

    def get_clients(self) -> list[Client]:
        return [Client(name, "") for name in NAMES]

    def register_aux_message_handler(self, topic: str, message_handle_func: Any) -> None:
        self.handlers[topic] = message_handle_func

    def send_aux_request(self, targets: list[str] | None, topic: str, request: Shareable, **_: Any) -> dict[str, Any]:
        return {name: self._sites[name].heard(request) for name in targets or ["server"] if name in self._sites}

    def heard(self, request: Shareable) -> Shareable:
        reply: Shareable = self.handlers[TOPIC](topic=TOPIC, request=request, fl_ctx=self.new_context())
        return reply

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        self.fired.append(event_type)

    def send(self, task: Any, fl_ctx: FLContext, targets: list[str], *_: Any) -> None:
        """As the communicator of a controller."""
        self.tasks[targets[0]] = task


class Server(FlareServer):
    """Answers with the name that it heard and what that one said."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[str] = []

    def prepare(self, folder: Path) -> "Server":
        return self

    def run(self) -> bool:
        assert self.stop.wait(20)
        return False

    async def hear(self, name: str, octets: Octets) -> bytes:
        return name.encode() + b" said " + bytes(octets)

    def room(self, name: str) -> int:
        return 10

    def gone(self, name: str) -> None:
        self.left.append(name)


class Party(FlareClient):
    """Answers likewise."""

    def take_part(self, name: str, folder: Path) -> bool:
        assert self.stop.wait(20)
        return True

    def hear(self, octets: Octets) -> bytes:
        return b"heard " + bytes(octets)


class Job:
    """A server and its clients, while their job runs."""

    def __init__(self, folder: Path) -> None:
        self.sites: dict[str, Engine] = {}
        self.signal, self.server = Signal(), Server()
        self.engine = Engine("server", folder / "server", self.sites)
        self.server.communicator = self.engine
        self.threads = [Thread(target=self.server.control_flow, args=(self.signal, self.engine.new_context()))]
        self.threads[0].start()
        wait_for(lambda: len(self.engine.tasks) == 2)
        self.parties: dict[str, Party] = {}
        self.replies: dict[str, Shareable] = {}
        for name in NAMES:
            engine = Engine(name, folder / name, self.sites)
            party = self.parties[name] = Party()
            party.handle_event(EventType.START_RUN, engine.new_context())
            self.threads.append(Thread(target=self._execute, args=(name, engine)))
            self.threads[-1].start()
        wait_for(lambda: all(party._secret for party in self.parties.values()))

    def secret(self, name: str) -> str:
        return str(self.engine.tasks[name].data[SECRET])

    def end(self) -> None:
        self.server.stop_controller(self.engine.new_context())
        for party in self.parties.values():
            party.stop.set()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()

    def _execute(self, name: str, engine: Engine) -> None:
        task = self.engine.tasks[name]
        self.replies[name] = self.parties[name].execute(task.name, task.data, engine.new_context(), self.signal)


@contextmanager
def running(folder: Path) -> Iterator[Job]:
    job = Job(folder)
    try:
        yield job
    finally:
        job.signal.trigger(True)
        job.end()


def said(octets: Any, secret: Any, name: str = "") -> Shareable:
    request = Shareable({OCTETS: octets, SECRET: secret})
    request.set_peer_props({ReservedKey.IDENTITY_NAME: name})
    return request


def test_octets_go_there_and_back_between_a_server_and_its_clients(tmp_path: Path) -> None:
    with running(tmp_path) as job:
        assert job.parties["north"].ask(b"hello", 1.0) == b"north said hello"
        assert job.server.loop.run(job.server.ask("south", b"you", 1.0)) == b"heard you"
        del job.sites["south"]
        with pytest.raises(Unreachable):
            job.server.loop.run(job.server.ask("south", b"you", 1.0))


def test_a_client_cannot_speak_in_anothers_name(tmp_path: Path) -> None:
    with running(tmp_path) as job:
        assert job.secret("north") != job.secret("south")
        mine = job.engine.heard(said(b"hello", job.secret("north"), name="south"))
        assert mine[OCTETS] == b"north said hello"
        wrong: list[Any] = ["", "south", None, [], job.secret("south")[:-1]]
        for secret in wrong:
            reply = job.engine.heard(said(b"hello", secret, name="south"))
            assert reply.get_return_code() == ReturnCode.BAD_REQUEST_DATA
            assert OCTETS not in reply


def test_a_client_listens_to_the_server_alone(tmp_path: Path) -> None:
    with running(tmp_path) as job:
        for secret in ("", None, job.secret("south")):
            reply = job.sites["north"].heard(said(b"you", secret, name="server"))
            assert reply.get_return_code() == ReturnCode.BAD_REQUEST_DATA
            assert OCTETS not in reply


@pytest.mark.parametrize("octets", [b"more than ten", "hello", None, {}])
def test_what_is_no_message_or_larger_than_it_may_be_is_dropped(tmp_path: Path, octets: Any) -> None:
    with running(tmp_path) as job:
        reply = job.engine.heard(said(octets, job.secret("north")))
        assert reply.get_return_code() == ReturnCode.BAD_REQUEST_DATA


def test_an_aborted_job_ends_at_both_ends(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.signal.trigger(True)
    for thread in job.threads:
        thread.join(20)
        assert not thread.is_alive()
    assert EventType.FATAL_SYSTEM_ERROR not in job.engine.fired
    assert {reply.get_return_code() for reply in job.replies.values()} == {ReturnCode.OK}


def test_a_job_without_clients_ends_with_an_error(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for name in NAMES:
        assert not job.engine.fired
        task = job.engine.tasks[name]
        task.task_done_cb(task=task, fl_ctx=job.engine.new_context())
    job.end()
    assert job.server.left == list(NAMES)
    assert EventType.FATAL_SYSTEM_ERROR in job.engine.fired
