"""The engine: NVIDIA FLARE carries our messages between processes that prove who they are.

FLARE starts our part as a component of its own process, and gives it a cell: something that sends octets to another by
name, and is called when octets arrive. Cells lie below FLARE's documented interface. The version is therefore pinned,
and everything that touches FLARE at run time is in this file.
"""

import logging
import os
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessagePropKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.mpm import MainProcessMonitor
from nvflare.private.fed.app.client import client_train
from nvflare.private.fed.app.server import server_train
from nvflare.private.fed.client.client_status import ClientStatus
from nvflare.private.fed.server.server_status import ServerStatus
from nvflare.widgets.widget import Widget

from quafl.deploy.messages import Octets
from quafl.deploy.worker import Unadmitted, Unreachable

_log = logging.getLogger(__name__)

SERVER = "server"  # the server's name, in its certificate and among the cells
CHANNEL, TOPIC = "quafl", "message"
FRAME = 4_000_000  # octets: larger messages go in chunks of a megabyte
SIGNALS = signal.SIGINT, signal.SIGTERM


class Service(Protocol):
    """What one of our processes does while the engine runs."""

    stop: Event  # set when it is asked to

    def run(self, ask: Callable[[str, bytes, float], Octets]) -> int:
        """From the moment that the engine is up until the end, or until asked to stop; gives the exit code."""

    def hear(self, name: str, octets: Octets) -> bytes:
        """The answer to a message from that party."""

    def is_welcome(self, name: str) -> bool:
        """Whether that party may say anything at all."""


class Bridge(Widget):
    """FLARE makes its components by the names in a kit's resources, and cannot be given objects: the service of this
    process waits in `service` until FLARE has made the bridge."""

    service: Service
    largest = 0  # octets of a message
    running = False
    code = 1  # unless the service ends by itself

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """FLARE is up."""
        if event_type != EventType.SYSTEM_START:
            return
        engine: Any = fl_ctx.get_engine()
        self._refused: set[tuple[str, str, str]] = set()
        server = getattr(engine, "server", None)
        self._cell = (server or engine.client).cell
        if server is not None:
            self._cell.core_cell.set_message_interceptor(self._intercept)
        self._cell.register_request_cb(channel=CHANNEL, topic=TOPIC, cb=self._hear)
        Bridge.running = True
        Thread(target=self._run, args=(engine,), name="service", daemon=True).start()

    def _run(self, engine: Any) -> None:
        try:
            Bridge.code = Bridge.service.run(self._ask)
        except Exception:
            _log.exception("this process ends with an error")
        finally:
            if hasattr(engine, "server"):
                engine.server.shutdown = True
                engine.server.status = ServerStatus.SHUTDOWN
            else:
                engine.client.communicator.heartbeat_done = True
                engine.client.status = ClientStatus.STOPPED

    def _ask(self, name: str, octets: bytes, within: float) -> Octets:
        """Octets there and back."""
        send = self._cell.send_request if len(octets) > FRAME else self._cell.core_cell.send_request
        reply = send(
            channel=CHANNEL,
            topic=TOPIC,
            target=name,
            request=new_cell_message({}, octets),
            timeout=within,
            optional=True,
        )
        code = reply.get_header(MessageHeaderKey.RETURN_CODE)
        if code != ReturnCode.OK:
            raise (Unadmitted if code == ReturnCode.UNAUTHENTICATED else Unreachable)(f"cannot be reached ({code})")
        return _octets(reply)

    def _hear(self, request: Message) -> Message:
        name = request.get_header(MessageHeaderKey.ORIGIN)
        if not self._is_welcome(name) or len(_octets(request)) > Bridge.largest:
            _log.warning("a message from %s was refused", name)
            return make_reply(ReturnCode.UNAUTHENTICATED)
        return make_reply(ReturnCode.OK, body=Bridge.service.hear(name, _octets(request)))

    def _intercept(self, message: Message) -> Message | None:
        """At the server, whatever arrives: nobody speaks in another's name, or with another through the server."""
        origin, sender = message.get_header(MessageHeaderKey.ORIGIN), message.get_prop(MessagePropKey.ENDPOINT).name
        destination = message.get_header(MessageHeaderKey.DESTINATION)
        if origin == sender and destination == SERVER and self._is_welcome(origin):
            return None
        if (sender, origin, destination) not in self._refused:  # each is said once
            self._refused.add((sender, origin, destination))
            reason = (
                "is not admitted, or was revoked" if origin == sender and destination == SERVER else "must not do that"
            )
            _log.warning("a message from %s as %s to %s was refused: it %s", sender, origin, destination, reason)
        refusal: Message = make_reply(ReturnCode.UNAUTHENTICATED)
        return refusal

    def _is_welcome(self, name: str) -> bool:
        """A name with a dot is that of a part of a party, which FLARE lets in with the party's certificate."""
        return "." not in name and Bridge.service.is_welcome(name)


class ToStderr(logging.Handler):
    """The log, on whatever stderr is at the moment: a live table takes its place while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        """A line."""
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except (OSError, ValueError):
            self.handleError(record)


def run_server(kit: Path, service: Service, *, largest_message: int) -> int:
    """The server's process, until it ends; gives the exit code."""
    return _run(
        kit,
        service,
        server_train.main,
        Namespace(fed_server="fed_server.json", set=["secure_train=true", "org=quafl", "config_folder=config"]),
        largest_message,
    )


def run_client(kit: Path, name: str, service: Service, *, largest_message: int) -> int:
    """A client's process, until it ends; gives the exit code."""
    settings = ["secure_train=true", f"uid={name}", "org=quafl", "config_folder=config"]
    return _run(
        kit,
        service,
        client_train.main,
        Namespace(fed_client="fed_client.json", set=settings, local_rank=0),
        largest_message,
    )


def is_free(port: int) -> bool:
    """Whether nobody listens there: a second server on the same port would not be noticed."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _run(kit: Path, service: Service, main: Callable[[Namespace], None], args: Namespace, largest_message: int) -> int:
    Bridge.service, Bridge.largest = service, largest_message
    os.environ["NVFLARE_STREAMING_MAX_BLOB_SIZE"] = str(largest_message)
    args.workspace = str(kit)

    def stop(number: int, frame: object) -> None:
        if service.stop.is_set() or not Bridge.running:
            os._exit(128 + number)  # asked again, or before there was anything to save
        service.stop.set()

    def until_the_end(args: Namespace) -> int:
        try:
            main(args)
        except RuntimeError as error:
            print(f"quafl: the server does not let this party in ({error}); was it revoked?", file=sys.stderr)
            return 1
        sys.stdout.flush()
        return Bridge.code

    for number in SIGNALS:
        signal.signal(number, stop)
    code: int = MainProcessMonitor.run(main_func=until_the_end, run_dir=str(kit), shutdown_grace_time=0, args=args)
    return code


def _octets(message: Message) -> Octets:
    payload = message.payload
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise Unreachable(f"sent a {type(payload).__name__} instead of octets")
    return payload
