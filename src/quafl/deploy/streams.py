"""gRPC carries our messages: one service with one method, one stream a client, mutual TLS, and nothing behind it.

Who a client is, its certificate says, as the TLS session has proved it; nothing in a message does. The server has one
listening socket, a client none.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import re
import resource
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what matters of its complaints, this file says in a sentence

import grpc
import grpc.aio

from quafl.codec.seams import WireError
from quafl.deploy import provision
from quafl.deploy.carrier import Hears, Loop
from quafl.deploy.certificates import Peer, ProvisionError, read_peer
from quafl.deploy.line import AT_ONCE, LARGEST_FRAME, PENDING, Line
from quafl.deploy.provision import Kit
from quafl.protocol.carrier import Octets, Unadmitted, Unreachable

_log = logging.getLogger(__name__)

METHOD = "/quafl.Federation/Talk"
VERSION = "3"  # of the frames and what they carry
LOOK_SECONDS = 1.0  # between two looks at the kit: who was revoked, whose certificate has ended, what was renewed
ALIVE_MS = 10_000  # between two signs of life of a connection, and how long the other end may take to answer one
FILES = 65_536  # connections and files that a server may have open, if the system lets it
REDIAL_SECONDS = 0.5, 5.0  # at first, at most
STOP_SECONDS = 0.2
STREAMS = 4  # of one certificate; all but one are ending

_COMMON = (
    ("grpc.max_receive_message_length", LARGEST_FRAME),
    ("grpc.max_send_message_length", LARGEST_FRAME),
    ("grpc.max_metadata_size", 4096),
    ("grpc.absolute_max_metadata_size", 8192),
    ("grpc.keepalive_time_ms", ALIVE_MS),
    ("grpc.keepalive_timeout_ms", ALIVE_MS),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER = (
    *_COMMON,
    ("grpc.so_reuseport", 0),  # a second server on the port fails
    ("grpc.max_concurrent_streams", 2),  # of a connection
    ("grpc.http2.min_ping_interval_without_data_ms", ALIVE_MS // 2),
    ("grpc.server_handshake_timeout_ms", 10_000),  # strangers who say nothing are hung up on
    ("grpc.max_connection_idle_ms", 30_000),  # and so are certified ones
)
_CLIENT = (*_COMMON, ("grpc.use_local_subchannel_pool", 1))


# The server


@dataclass(slots=True)
class _Connected:
    """A client's stream."""

    peer: Peer
    address: str
    session: str
    line: Line
    reading: asyncio.Task[None]
    ended: tuple[grpc.StatusCode, str] | None = None  # why this end has ended it


class GrpcServer:
    """The server's end: a Carrier, from `start` to `stop`."""

    def __init__(self, loop: Loop, kit: Kit, passphrase: str | None) -> None:
        self._loop, self._kit, self._passphrase = loop, kit, passphrase
        self._service: Hears
        self._largest = 0
        self._connected: dict[str, _Connected] = {}
        self._streams: Counter[str] = Counter()  # by name; one that is not read by the client takes long to end
        self._revoked = provision.revoked(kit.path)
        self._certificate = b""

    def start(self, service: Hears, *, largest: int) -> None:
        """Listen, and have the service hear messages of at most so many octets; ProvisionError if that is not
        possible."""
        self._service, self._largest = service, largest
        with contextlib.suppress(ValueError, OSError):
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        self._loop.run(self._start())

    def stop(self) -> None:
        """Hang up on everybody."""
        self._loop.run(self._stop())

    async def ask(self, name: str, octets: bytes, within: float) -> Octets:
        """That client's answer, or Unreachable."""
        there = self._connected.get(name)
        if there is None:
            raise Unreachable("is not connected")
        return await there.line.ask(octets, within)

    async def _start(self) -> None:
        configuration = self._configuration()
        credentials = grpc.dynamic_ssl_server_credentials(
            configuration, self._renewed, require_client_authentication=True
        )
        self._server = grpc.aio.server(options=_SERVER)
        talk = grpc.stream_stream_rpc_method_handler(self._talk)
        self._server.add_generic_rpc_handlers([_OneMethod(talk)])
        where = _listening(self._kit.host)
        try:
            self._server.add_secure_port(f"{where}:{self._kit.port}", credentials)
        except RuntimeError as error:
            raise ProvisionError(
                f"port {self._kit.port} cannot be listened on; is the server running already, or another program there?"
            ) from error
        await self._server.start()
        self._watching = asyncio.create_task(self._watch())

    async def _stop(self) -> None:
        self._watching.cancel()
        await self._server.stop(STOP_SECONDS)

    async def _talk(self, _: Any, context: Any) -> None:
        """A client's stream, from its beginning to its end."""
        peer, session = await self._admit(context)
        self._streams[peer.name] += 1
        try:
            ended = await self._listen(context, peer, session)
            if ended is not None:
                await _abort(context, *ended)
        finally:
            self._streams[peer.name] -= 1

    async def _listen(self, context: Any, peer: Peer, session: str) -> tuple[grpc.StatusCode, str] | None:
        """Until the client hangs up, or this end has a reason to."""
        await context.send_initial_metadata(())
        name = peer.name
        line = Line(context.write, partial(self._service.hear, name), partial(self._service.room, name), self._largest)
        reading = asyncio.create_task(line.read(_frames(context)))
        here = _Connected(peer, _readable(context.peer()), session, line, reading)
        before = self._connected.get(name)
        self._connected[name] = here
        if before is not None:
            self._replace(before, here)
        try:
            await reading
        except WireError as error:
            _log.warning("%s: %s; it is hung up on", name, error)
            here.ended = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except asyncio.CancelledError:
            if here.ended is None:
                raise
        finally:
            reading.cancel()
            if self._connected.get(name) is here:
                del self._connected[name]
                self._service.gone(name)
        return here.ended

    async def _admit(self, context: Any) -> tuple[Peer, str]:
        """Who it is; the stream ends here, before a message of it is read, if it is nobody who is let in."""
        said = {key: value for key, value in context.invocation_metadata() or () if key.startswith("quafl-")}
        certificate = context.auth_context().get("x509_pem_cert", (b"",))[0]
        try:
            peer = read_peer(certificate)
        except ProvisionError as error:
            await _refuse(context, str(error))
        refusal = self._refusal(peer)
        if refusal is not None:
            _log.warning("%s, from %s, is not let in: %s", peer.name, _readable(context.peer()), refusal)
            await _refuse(context, refusal)
        if said.get("quafl-version") != VERSION:
            theirs = str(said.get("quafl-version"))[:20]
            await _refuse(context, f"the server speaks version {VERSION}, the client {theirs!r}; upgrade the older")
        session = str(said.get("quafl-session"))
        if not re.fullmatch(r"[0-9a-f]{32}", session):
            await _refuse(context, "the client does not say which process it is")
        if self._streams[peer.name] >= STREAMS:
            _log.warning("%s has %d streams that have not ended; another is not let in", peer.name, STREAMS)
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "earlier streams have not ended")
        return peer, session

    def _refusal(self, peer: Peer) -> str | None:
        if peer.serial in self._revoked:
            return f"the certificate of {peer.name} was revoked"
        if not peer.is_client:
            return f"the certificate of {peer.name} is not a client's"
        if peer.expires < datetime.now(UTC):
            return f"the certificate of {peer.name} ended on {peer.expires:%Y-%m-%d}"
        return None

    def _replace(self, before: _Connected, here: _Connected) -> None:
        """The newer wins; it is the same process, whose connection was lost, or a second holder of the certificate."""
        if before.session != here.session:
            _log.warning(
                "two processes have the certificate of %s, at %s and now at %s; the newer is heard. If one is not "
                "theirs: quafl federation revoke %s",
                here.peer.name,
                before.address,
                here.address,
                here.peer.name,
            )
        self._end(before, f"another process with the same certificate has connected, from {here.address}")

    def _end(self, there: _Connected, reason: str) -> None:
        there.ended = there.ended or (grpc.StatusCode.PERMISSION_DENIED, reason)
        there.reading.cancel()

    async def _watch(self) -> None:
        watch = provision.Watch(self._kit)
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                self._revoked = provision.revoked(self._kit.path)
            except ProvisionError as error:
                _log.error("%s; keeping to what was there before", error)
            except Exception:
                _log.exception("reading who was revoked; keeping to what was there before")
            for there in list(self._connected.values()):
                refusal = self._refusal(there.peer)
                if refusal is not None and there.ended is None:
                    _log.warning("%s is hung up on: %s", there.peer.name, refusal)
                    self._end(there, refusal)
            sentence = watch.due()
            if sentence is not None:
                _log.warning("%s", sentence)

    def _configuration(self) -> Any:
        key, self._certificate, authority = self._kit.credentials(self._passphrase)
        return grpc.ssl_server_certificate_configuration([(key, self._certificate)], root_certificates=authority)

    def _renewed(self) -> Any:
        """At every handshake: a new configuration, if the kit has another certificate than before."""
        try:
            if (self._kit.path / provision.CERTIFICATE).read_bytes() == self._certificate:
                return None
            configuration = self._configuration()
        except (OSError, ProvisionError) as error:
            _log.error("the renewed certificate cannot be used: %s", error)
            return None
        _log.info("the server has a new certificate")
        return configuration


class _OneMethod(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def service(self, details: Any) -> Any:
        return self._handler if details.method == METHOD else None


async def _refuse(context: Any, sentence: str) -> NoReturn:
    await _abort(context, grpc.StatusCode.PERMISSION_DENIED, sentence)


async def _abort(context: Any, code: grpc.StatusCode, sentence: str) -> NoReturn:
    """End a stream with a reason, if its other end is still there."""
    try:
        await context.abort(code, sentence)
    except grpc.aio.AbortError:
        raise
    except Exception as error:  # it is gone; gRPC raises this and that
        raise asyncio.CancelledError from error
    raise AssertionError("gRPC goes on after an abort")


async def _frames(stream: Any) -> AsyncIterator[bytes]:
    while (frame := await stream.read()) is not grpc.aio.EOF:
        yield frame


def _listening(host: str) -> str:
    """On loopback if that is the address, else on all interfaces; one socket either way."""
    if host == "localhost":
        return "127.0.0.1"
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host.strip("[]"))
        if address.is_loopback:
            return f"[{address}]" if address.version == 6 else str(address)
    return "[::]"


def _readable(peer: str) -> str:
    """gRPC's 'ipv4:127.0.0.1:4711' as an address."""
    return peer.partition(":")[2].replace("%5B", "[").replace("%5D", "]")


# A client


class GrpcClient:
    """A client's end: from `start` on, dials until the server is there, and again whenever it was lost."""

    def __init__(self, loop: Loop, kit: Path, passphrase: str | None) -> None:
        self._loop, self._path, self._passphrase = loop, kit, passphrase
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="contact")
        self._line: Line | None = None
        self._refusal = Unreachable("has not been reached yet")
        self._tried = asyncio.Event()  # the first attempt to dial is over
        self._used = b""  # the certificate that it has dialled with

    def start(self, session: str, hear: Callable[[Octets], bytes], *, largest: int) -> None:
        """Dial, as this process, and have messages of at most so many octets heard, each in a thread."""
        self._session, self._hear_in_thread, self._largest = session, hear, largest
        self._dialling = self._loop.spawn(self._dial())

    def ask(self, octets: bytes, within: float) -> Octets:
        """The server's answer, or Unreachable."""
        return self._loop.run(self._ask(octets, within))

    def close(self) -> None:
        """Hang up."""
        self._dialling.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _ask(self, octets: bytes, within: float) -> Octets:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._tried.wait(), within)
        if self._line is None:
            raise self._refusal
        return await self._line.ask(octets, within)

    async def _hear(self, octets: Octets) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._hear_in_thread, octets)

    async def _dial(self) -> None:
        pause, most = REDIAL_SECONDS
        while True:
            began = monotonic()
            try:
                await self._talk()
            except Unadmitted as error:
                if self._used == self._certificate():
                    self._line, self._refusal = None, error
                    self._tried.set()
                    return
                self._refusal = Unreachable(f"says that {error}; dialling with the renewed one")
            except Unreachable as error:
                self._refusal = error
            except ProvisionError as error:  # as when somebody is just copying a renewed kit
                self._refusal = Unreachable(f"is not dialled: {error}")
            except Exception:
                _log.exception("dialling the server")
                self._refusal = Unreachable("cannot be dialled")
            self._line = None
            self._tried.set()
            pause = REDIAL_SECONDS[0] if monotonic() - began > most else min(2 * pause, most)
            await asyncio.sleep(pause)

    def _certificate(self) -> bytes:
        """The one in the kit now."""
        with contextlib.suppress(OSError):
            return (self._path / provision.CERTIFICATE).read_bytes()
        return b""

    async def _talk(self) -> None:
        """One connection, from its beginning to its end."""
        self._used = self._certificate()
        kit = provision.open_kit(self._path)  # anew: it may have been renewed
        if kit.ended:
            raise Unadmitted(kit.warning() or "the certificate has ended")
        key, certificate, authority = kit.credentials(self._passphrase)
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        where = kit.target
        async with grpc.aio.secure_channel(where, credentials, options=_CLIENT) as channel:
            talk = channel.stream_stream(METHOD)
            call = talk(metadata=(("quafl-version", VERSION), ("quafl-session", self._session)))
            try:
                await call.initial_metadata()
                line = Line(call.write, self._hear, lambda: PENDING * self._largest, self._largest, trusted=True)
                self._line = line
                self._tried.set()
                await line.read(_frames(call))
                raise _reason(await call.code(), await call.details(), where)
            except grpc.aio.AioRpcError as error:
                raise _reason(error.code(), error.details(), where) from error
            except WireError as error:
                raise Unreachable(f"broke the rules: {error}") from error
            finally:
                call.cancel()


def _reason(code: grpc.StatusCode, details: str | None, where: str) -> Unreachable:
    """Why a connection has ended, in a sentence."""
    said = str(details)[:300]
    if code == grpc.StatusCode.PERMISSION_DENIED:
        return Unadmitted(said)
    if code != grpc.StatusCode.UNAVAILABLE:
        return Unreachable(f"has hung up ({code.name.lower()}: {said!r})")
    if "handshake" in said.lower() or "ssl" in said.lower() or "certificate" in said.lower():
        return Unreachable(
            f"at {where} is not the server of this kit, or does not take its certificate (the TLS handshake failed)"
        )
    return Unreachable(f"cannot be reached at {where}")
