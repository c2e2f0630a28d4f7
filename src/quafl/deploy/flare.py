"""NVIDIA FLARE carries our messages, inside a job of its own: for people who run it already (docs/flare.md).

Nothing but what FLARE documents: a Controller at the server, an Executor at each client, tasks, and aux messages, which
any two sites of a job may send each other. FLARE proves who a client is when it hands out tasks. The sender's name in
an aux message is only what the sender says. So each client gets a secret with its task, and every message between it
and the server shows it.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from secrets import token_hex
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

from nvflare.apis.controller_spec import Task
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.job_config.api import FedJob

from quafl.deploy.carrier import Hears, Loop
from quafl.protocol.carrier import Octets, Unreachable

_log = logging.getLogger(__name__)

TASK = TOPIC = "quafl"
FOLDER = "quafl"  # in the run directory of a site
OCTETS, SECRET = "octets", "secret"  # in a request, the first in an answer, the second in a task
GLANCE = 0.2  # seconds between two looks at whether the job was aborted
LINGER_SECONDS = 10.0  # for the clients to end their task, when the run is over


class FlareServer(Controller, ABC):
    """The server's end: a Carrier, while the job runs. A subclass says what runs over it."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = Event()  # set when the job is aborted, and when no client is left
        self.loop: Loop
        self._engine: Any
        self._service: Hears
        self._pool: ThreadPoolExecutor
        self._secrets: dict[str, str] = {}  # by name
        self._names: dict[str, str] = {}  # by secret
        self._there: set[str] = set()  # whose task is not done

    @abstractmethod
    def prepare(self, folder: Path) -> Hears:
        """What hears the clients; whatever goes wrong here ends the job."""

    @abstractmethod
    def run(self) -> bool:
        """Until the end, which is True, or until `stop` is set."""

    async def ask(self, name: str, octets: bytes, within: float) -> Octets:
        """That client's answer, or Unreachable; FLARE keeps a thread waiting for it."""
        work = partial(_exchange, self._engine, [name], self._secrets[name], octets, within)
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Everything begins with the control flow."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """The run, from its beginning to its end."""
        self._engine = fl_ctx.get_engine()
        names = [client.name for client in self._engine.get_clients()]
        self._secrets = {name: token_hex(16) for name in names}
        self._names = {secret: name for name, secret in self._secrets.items()}
        self._there = set(names)
        self._pool = ThreadPoolExecutor(1 + 2 * len(names), thread_name_prefix="ask")
        self.loop = Loop("carrier")
        self._service = self.prepare(_folder(fl_ctx))
        self._engine.register_aux_message_handler(topic=TOPIC, message_handle_func=self._heard)
        for name in names:
            task = Task(TASK, Shareable({SECRET: self._secrets[name]}), task_done_cb=partial(self._left, name))
            self.send(task, fl_ctx, targets=[name])
        with _heeding(abort_signal, self.stop):
            ended = self.run()
            self._linger(abort_signal)
        if not ended and not abort_signal.triggered:
            self.system_panic("every client has left before the run was over", fl_ctx)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """The job ends; whoever asks now is not waited for."""
        self.stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _heard(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        secret, octets = request.get(SECRET), request.get(OCTETS)
        name = self._names.get(secret) if isinstance(secret, str) else None
        if name is None:
            _log.warning("a message that does not show a client's secret is dropped")
            return make_reply(ReturnCode.BAD_REQUEST_DATA)
        if not isinstance(octets, bytes) or len(octets) > self._service.room(name):
            _log.warning("%s sent something that is no message, or larger than it may be; it is dropped", name)
            return make_reply(ReturnCode.BAD_REQUEST_DATA)
        return Shareable({OCTETS: self.loop.run(self._service.hear(name, octets))})

    def _left(self, name: str, task: Task, fl_ctx: FLContext) -> None:
        """A client's task is done, or will never be."""
        codes = [made.result.get_return_code() for made in task.client_tasks if made.result is not None]
        level = logging.INFO if codes == [ReturnCode.OK] else logging.WARNING
        _log.log(level, "%s has ended its task: %s", name, ", ".join(codes) or task.completion_status)
        self._service.gone(name)
        self._there.discard(name)
        if not self._there:
            self.stop.set()

    def _linger(self, abort_signal: Signal) -> None:
        until = monotonic() + LINGER_SECONDS
        while self._there and monotonic() < until and not abort_signal.triggered:
            sleep(GLANCE)


class FlareClient(Executor, ABC):
    """A client's end, likewise; its one task lasts as long as the run."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = Event()  # set when the task is aborted
        self._engine: Any
        self._secret = ""

    @abstractmethod
    def take_part(self, name: str, folder: Path) -> bool:
        """Until the end, or until `stop` is set; whether all went well."""

    @abstractmethod
    def hear(self, octets: Octets) -> bytes:
        """The answer to a message from the server."""

    def ask(self, octets: bytes, within: float) -> Octets:
        """The server's answer, or Unreachable."""
        return _exchange(self._engine, None, self._secret, octets, within)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """The job begins."""
        if event_type == EventType.START_RUN:
            self._engine = fl_ctx.get_engine()
            self._engine.register_aux_message_handler(topic=TOPIC, message_handle_func=self._heard)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """The run, from its beginning to its end."""
        if task_name != TASK:
            return make_reply(ReturnCode.TASK_UNKNOWN)
        self._secret = str(shareable.get(SECRET, ""))
        with _heeding(abort_signal, self.stop):
            well = self.take_part(fl_ctx.get_identity_name(), _folder(fl_ctx))
        return make_reply(ReturnCode.OK if well else ReturnCode.EXECUTION_EXCEPTION)

    def _heard(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        octets = request.get(OCTETS)
        if not self._secret or request.get(SECRET) != self._secret or not isinstance(octets, bytes):
            _log.warning("a message that does not show this client's secret is dropped")
            return make_reply(ReturnCode.BAD_REQUEST_DATA)
        return Shareable({OCTETS: self.hear(octets)})


def make_job(name: str, server: FlareServer, client: FlareClient, *, min_clients: int) -> FedJob:
    """The job; QuAFL itself is not copied into it, and must be installed at every site."""
    job = FedJob(name=name, min_clients=min_clients)
    job.set_app_packages(["quafl"])
    job.to_server(server)
    job.to_clients(client, tasks=[TASK])
    return job


def _exchange(engine: Any, targets: list[str] | None, secret: str, octets: bytes, within: float) -> Octets:
    """Octets there and back; to the server, if there are no targets."""
    with engine.new_context() as fl_ctx:
        replies = engine.send_aux_request(
            targets=targets,
            topic=TOPIC,
            request=Shareable({OCTETS: octets, SECRET: secret}),
            timeout=within,
            fl_ctx=fl_ctx,
            optional=True,
        )
    for reply in (replies or {}).values():
        code, answer = reply.get_return_code(), reply.get(OCTETS)
        if code != ReturnCode.OK or not isinstance(answer, bytes):
            raise Unreachable(f"did not answer ({code})")
        return answer
    raise Unreachable("cannot be reached")


def _folder(fl_ctx: FLContext) -> Path:
    """For what this site keeps of the run: FLARE keeps the server's with the job's results."""
    folder = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_run_dir(fl_ctx.get_job_id())) / FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


@contextmanager
def _heeding(abort_signal: Signal, stop: Event) -> Iterator[None]:
    """Within the block, `stop` is set when FLARE aborts."""
    over = Event()

    def watch() -> None:
        while not over.wait(GLANCE):
            if abort_signal.triggered:
                stop.set()
                return

    watcher = Thread(target=watch, name="abort", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
