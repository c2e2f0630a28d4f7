"""The gRPC carrier, attacked: real certificates, real sockets on loopback, both ends in this process."""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import grpc
import grpc.aio
import pytest
from parties import free_port, listening, resident_mb
from waiting import wait_for

from quafl.deploy import line, provision
from quafl.deploy.carrier import Loop
from quafl.deploy.certificates import ProvisionError, read_peer
from quafl.deploy.provision import Kit
from quafl.deploy.streams import METHOD, VERSION, GrpcClient, GrpcServer
from quafl.protocol.carrier import Octets, Unadmitted, Unreachable

LARGEST = 20_000_000
FRAME = line._FRAME


class Service:
    """What stands behind the carrier: sends back what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.left: list[str] = []
        self.most = LARGEST

    async def hear(self, name: str, octets: Octets) -> bytes:
        self.heard.append((name, len(octets)))
        return bytes(octets)

    def room(self, name: str) -> int:
        return self.most

    def gone(self, name: str) -> None:
        self.left.append(name)


class Network:
    """A federation's folder, its server, and whoever dials."""

    def __init__(self, folder: Path, others: Sequence[str] = ()) -> None:
        self.folder, self.port = folder, free_port()
        provision.init(folder, f"localhost:{self.port}", ["a", "b", *others])
        self.loop, self.service = Loop("test"), Service()
        self.server = GrpcServer(self.loop, self.kit("server"), None)
        self.clients: list[GrpcClient] = []

    def kit(self, name: str) -> Kit:
        return provision.open_kit(self.folder / provision.place_of(name))

    def dial(self, name: str, session: str = "0a" * 16, hear: Callable[[Octets], bytes] = bytes) -> GrpcClient:
        client = GrpcClient(self.loop, self.kit(name).path, None)
        client.start(session, hear, largest=LARGEST)
        self.clients.append(client)
        return client

    def ask(self, name: str, octets: bytes, within: float = 10.0) -> Octets:
        return self.loop.run(self.server.ask(name, octets, within))

    def raw(self, name: str = "a", method: str = METHOD) -> "Raw":
        """A certified client that keeps to no rules."""
        return self.loop.run(Raw.dial(self.kit(name), method))


class Raw:
    """A stream of ours, frame by frame."""

    def __init__(self, channel: Any, call: Any) -> None:
        self.channel, self.call = channel, call

    @classmethod
    async def dial(cls, kit: Kit, method: str = METHOD) -> "Raw":
        key, certificate, authority = kit.credentials()
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.secure_channel(kit.target, credentials, options=options)
        said = (("quafl-version", VERSION), ("quafl-session", os.urandom(16).hex()))
        return cls(channel, channel.stream_stream(method)(metadata=said))

    async def says(self, *frames: bytes) -> tuple[grpc.StatusCode, str]:
        """How the server ends it."""
        try:
            for frame in frames:
                await self.call.write(frame)
            while await asyncio.wait_for(self.call.read(), 10.0) is not grpc.aio.EOF:
                pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        return await self.call.code(), await self.call.details()


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with served(tmp_path / "federation") as made:
        yield made


@contextmanager
def served(folder: Path, others: Sequence[str] = ()) -> Iterator[Network]:
    made = Network(folder, others)
    made.server.start(made.service, largest=LARGEST)
    try:
        yield made
    finally:
        for client in made.clients:
            client.close()
        made.server.stop()
        made.loop.close()


def reach(client: GrpcClient, octets: bytes = b"hello") -> Octets:
    """The server's answer, as soon as there is one."""
    until = monotonic() + 15.0
    while True:
        try:
            return client.ask(octets, 10.0)
        except Unadmitted:
            raise
        except Unreachable:
            assert monotonic() < until, "never reached"
            sleep(0.05)


def refused(client: GrpcClient) -> str:
    """The server's reason."""
    with pytest.raises(Unadmitted) as caught:
        reach_for_ever(client)
    return str(caught.value)


def reach_for_ever(client: GrpcClient) -> None:
    until = monotonic() + 15.0
    while monotonic() < until:
        reach(client)
        sleep(0.05)


# What it is for


def test_questions_and_answers_go_both_ways_whatever_their_size(network: Network) -> None:
    client = network.dial("a", hear=lambda octets: bytes(octets)[::-1])
    assert client.ask(b"at once", 10.0) == b"at once"  # while it is dialling
    for size in (0, 1, line.PIECE - 1, line.PIECE, line.PIECE + 1, 3 * line.PIECE, 5_000_000):
        octets = os.urandom(size)
        assert reach(client, octets) == octets
        assert network.ask("a", octets) == octets[::-1]
    assert {name for name, _ in network.service.heard} == {"a"}
    with pytest.raises(Unreachable, match="is not connected"):
        network.ask("b", b"")


def test_a_greeting_is_not_stuck_behind_a_model(network: Network) -> None:
    """Both go at the same time; the small one, which begins later, is there first."""
    client = network.dial("a")
    reach(client)
    network.service.heard.clear()

    async def both() -> None:
        model = asyncio.create_task(client._ask(bytes(15_000_000), 30.0))
        await asyncio.sleep(0)
        await client._ask(b"small", 30.0)
        assert not model.done()
        await model

    network.loop.run(both())
    assert [octets for _, octets in network.service.heard] == [5, 15_000_000]


def test_a_client_dials_until_the_server_is_there_and_again_when_it_was_lost(tmp_path: Path) -> None:
    network = Network(tmp_path / "federation")
    client = network.dial("a")
    with pytest.raises(Unreachable, match="reached"):
        client.ask(b"early", 1.0)
    for _ in range(2):
        server = GrpcServer(network.loop, network.kit("server"), None)
        server.start(network.service, largest=LARGEST)
        assert reach(client) == b"hello"
        server.stop()
        wait_for(lambda: network.service.left == ["a"])
        network.service.left.clear()
    client.close()
    network.loop.close()


def test_an_answer_that_comes_too_late_is_dropped(network: Network) -> None:
    def hear(octets: Octets) -> bytes:
        sleep(0.3)
        return b"late"

    client = network.dial("a", hear=hear)
    reach(client)
    with pytest.raises(Unreachable, match="did not answer within"):
        network.ask("a", b"?", within=0.1)
    sleep(0.5)
    assert network.ask("a", b"?", within=5.0) == b"late"


# Strangers


def handshake(network: Network, *, authority: Path, kit: Path | None = None) -> bytes:
    """The first octets that the server says after a TLS handshake."""
    context = ssl.create_default_context(cafile=str(authority / provision.ROOT))
    context.set_alpn_protocols(["h2"])
    if kit is not None:
        context.load_cert_chain(kit / provision.CERTIFICATE, kit / provision.KEY)
    with (
        socket.create_connection(("127.0.0.1", network.port), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        return secure.recv(1)


def test_one_socket_listens_and_says_nothing_without_a_certificate_of_ours(network: Network, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    provision.init(theirs, "localhost:1", ["a"])
    reach(network.dial("a"))
    assert listening(os.getpid()) == {("127.0.0.1", network.port)}
    ours = network.folder / "clients" / "a"
    assert handshake(network, authority=ours, kit=ours)
    network.service.heard.clear()
    for kit in (None, theirs / "clients" / "a"):
        with suppress(ssl.SSLError, ConnectionResetError):
            assert not handshake(network, authority=ours, kit=kit), "the server has answered"
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64), os.urandom(4096)):
        with socket.create_connection(("127.0.0.1", network.port), timeout=5) as plain:
            plain.sendall(garbage)
            plain.shutdown(socket.SHUT_WR)
            try:
                answer = plain.recv(4096)
            except ConnectionResetError:
                answer = b""
            assert not answer or answer[0] == 21  # nothing, or a TLS alert
    assert network.service.heard == []


def test_strangers_who_hold_connections_keep_nobody_out(network: Network) -> None:
    held = [socket.create_connection(("127.0.0.1", network.port)) for _ in range(600)]
    try:
        for number, plain in enumerate(held):
            if number % 2:
                plain.sendall(b"\x16\x03\x01")  # a slow drip
        assert reach(network.dial("a")) == b"hello"
        assert network.ask("a", bytes(1_000_000)) == bytes(1_000_000)
    finally:
        for plain in held:
            plain.close()


# Certified attackers


def test_there_is_one_method_and_nothing_else(network: Network) -> None:
    for method in ("/quafl.Federation/Admin", "/grpc.health.v1.Health/Check", "/x"):
        code, _ = network.loop.run(network.raw(method=method).says())
        assert code == grpc.StatusCode.UNIMPLEMENTED
    assert network.service.heard == []


def test_a_name_is_the_certificate_s_whatever_is_said(network: Network) -> None:
    raw = network.raw("b")
    network.loop.run(raw.call.write(FRAME.pack(line.ASK, 1, 9) + b"I am a, a"))
    wait_for(lambda: network.service.heard == [("b", 9)])
    network.loop.run(raw.channel.close())


def test_a_revoked_client_is_refused_before_it_is_heard_and_cut_off_while_connected(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = network.dial("a"), network.dial("b")
    reach(a)
    reach(b)
    provision.revoke(network.folder, "a")
    assert refused(a) == "the certificate of a was revoked"
    wait_for(lambda: network.service.left == ["a"])
    network.service.heard.clear()
    assert refused(network.dial("a")) == "the certificate of a was revoked"
    code, _ = network.loop.run(network.raw("a").says(FRAME.pack(line.ASK, 1, 5) + b"hello"))
    assert code == grpc.StatusCode.PERMISSION_DENIED
    assert reach(b) == b"hello"
    assert network.service.heard == [("b", 5)]
    assert "a is hung up on: the certificate of a was revoked" in caplog.text


def test_the_server_s_own_certificate_is_no_client_s(network: Network) -> None:
    assert reach(network.dial("a")) == b"hello"
    network.service.heard.clear()
    code, reason = network.loop.run(network.raw("server").says(FRAME.pack(line.ASK, 1, 0)))
    assert code == grpc.StatusCode.UNAVAILABLE or "is not a client's" in reason
    assert network.service.heard == []
    assert reach(network.dial("b")) == b"hello"


def test_a_client_s_certificate_is_no_server_s(tmp_path: Path) -> None:
    """Not even that of a client who is called as the server's machine is."""
    port = free_port()
    folder = tmp_path / "federation"
    provision.init(folder, f"localhost:{port}", ["a", "localhost"])
    key, certificate, authority = provision.open_kit(folder / "clients" / "localhost").credentials()
    heard = []

    async def stream(_: Any, context: Any) -> None:
        heard.append(await context.read())

    class Any_(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return grpc.stream_stream_rpc_method_handler(stream)

    async def pretend() -> Any:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers([Any_()])
        server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([(key, certificate)], authority, True))
        await server.start()
        return server

    loop = Loop("pretender")
    server = loop.run(pretend())
    client = GrpcClient(loop, folder / "clients" / "a", None)
    client.start("0a" * 16, bytes, largest=LARGEST)
    wait_for(lambda: "TLS handshake failed" in str(client._refusal))
    assert heard == []
    client.close()
    loop.run(server.stop(0))
    loop.close()


def test_of_two_holders_of_a_certificate_the_newer_is_heard_and_both_are_named(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    old = network.dial("a", "01" * 16)
    reach(old)
    new = network.dial("a", "02" * 16, hear=lambda octets: b"new")
    reach(new)
    assert network.ask("a", b"?") == b"new"
    assert refused(old).startswith("another process with the same certificate has connected, from 127.0.0.1:")
    assert caplog.text.count("127.0.0.1:") >= 2
    assert "two processes have the certificate of a, at 127.0.0.1:" in caplog.text


HELLO = FRAME.pack(line.ASK, 1, 5) + b"hello"
BREACHES = {
    "a frame without a header": [b"abc"],
    "another kind": [b"\x07" + HELLO[1:]],
    "something where zeros belong": [HELLO[:2] + b"\x01" + HELLO[3:]],
    "a message that is too large": [FRAME.pack(line.ASK, 1, LARGEST + 1) + b"x"],
    "more than was announced": [FRAME.pack(line.ASK, 1, 2) + b"abc"],
    "more than was announced at first": [FRAME.pack(line.ASK, 1, 9) + b"a", FRAME.pack(line.ASK, 1, 2**50) + bytes(99)],
    "giving up at length": [FRAME.pack(line.GIVE_UP, 1, 0) + bytes(99)],
    "nothing, again and again": [FRAME.pack(line.ASK, 1, 2)],
    "an answer to nothing": [FRAME.pack(line.ANSWER, 1, 2) + b"ab"],
    "many messages, none finished": [FRAME.pack(line.ASK, number, 2) + b"a" for number in range(line.AT_ONCE + 1)],
    "many large ones": [FRAME.pack(line.ASK, number, LARGEST - 9) + b"a" for number in range(2)],
}


@pytest.mark.parametrize("frames", BREACHES.values(), ids=BREACHES.keys())
def test_whoever_breaks_the_rules_is_hung_up_on(
    network: Network, frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    honest = network.dial("b")
    reach(honest)
    code, _ = network.loop.run(network.raw("a").says(*frames))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "a: " in caplog.text
    assert reach(honest) == b"hello"


def test_a_frame_that_is_too_large_is_not_read(network: Network) -> None:
    code, _ = network.loop.run(network.raw("a").says(FRAME.pack(line.ASK, 1, 10**9) + bytes(50_000_000)))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert network.service.heard == []


def test_a_flood_is_read_slowly_and_takes_no_memory(network: Network) -> None:
    honest = network.dial("b")
    reach(honest)
    raw = network.raw("a")

    async def flood(seconds: float) -> int:
        sent, until = 0, monotonic() + seconds
        body = bytes(60_000)
        with suppress(TimeoutError):  # it waits until there is room
            async with asyncio.timeout(seconds):
                while monotonic() < until:
                    await raw.call.write(FRAME.pack(line.ASK, sent, len(body)) + body)
                    sent += 1
        return sent

    before, began = resident_mb(os.getpid()), monotonic()
    sent = network.loop.run(flood(3.0))
    heard = sum(name == "a" for name, _ in network.service.heard)
    assert heard <= line.BURST + line.PER_SECOND * (monotonic() - began) + line.AT_ONCE
    assert sent > heard
    assert resident_mb(os.getpid()) - before < 200
    assert reach(honest) == b"hello"
    network.loop.run(raw.channel.close())


def test_a_client_that_does_not_read_holds_no_memory(network: Network) -> None:
    raw = network.raw("a")
    network.loop.run(raw.call.write(HELLO))
    wait_for(lambda: network.service.heard == [("a", 5)])
    for _ in range(30):
        with pytest.raises(Unreachable):
            network.ask("a", bytes(15_000_000), within=0.02)
    before = resident_mb(os.getpid())
    for _ in range(300):
        with pytest.raises(Unreachable):
            network.ask("a", bytes(15_000_000), within=0.02)
    assert resident_mb(os.getpid()) - before < 30
    network.loop.run(raw.channel.close())


def test_a_certificate_has_few_streams_even_if_they_do_not_end(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer that does not read keeps a stream from ending; it is not let in again and again."""
    refused, raws = "a has 4 streams that have not ended; another is not let in", []
    for _ in range(30):
        raw = network.raw("a")
        raws.append(raw)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            network.loop.run(raw.call.write(HELLO))
        for _ in range(3):  # more than gRPC takes without being read
            with suppress(Unreachable):
                network.ask("a", bytes(15_000_000), within=0.1)
        assert network.server._streams["a"] <= 4
        if refused in caplog.text:
            break
    assert refused in caplog.text
    assert reach(network.dial("b")) == b"hello"
    for raw in raws:
        network.loop.run(raw.channel.close())


def test_a_question_that_is_given_up_in_its_first_piece_leaves_nothing_behind(network: Network) -> None:
    """As on a slow link: the next question is answered all the same."""
    network.service.most = 6_000_000
    client = network.dial("a")
    reach(client)
    written, slow = [], client._line._write_frame  # type: ignore[union-attr]

    async def slowly(frame: bytes) -> None:
        written.append(frame)
        await asyncio.sleep(0.2)
        await slow(frame)

    client._line._write_frame = slowly  # type: ignore[union-attr]
    with pytest.raises(Unreachable, match="did not answer within"):
        client.ask(bytes(5_000_000), 0.1)
    client._line._write_frame = slow  # type: ignore[union-attr]
    assert len(written) == 1
    assert client.ask(bytes(5_000_000), 10.0) == bytes(5_000_000)


def test_idle_clients_keep_nobody_out(tmp_path: Path) -> None:
    """110 streams were enough, once: each held a thread."""
    idle = [f"idle-{number}" for number in range(150)]
    with served(tmp_path / "federation", idle) as network:
        raws = [network.raw(name) for name in idle]
        for raw in raws:
            network.loop.run(raw.call.initial_metadata())
        threads = len(list(Path("/proc/self/task").iterdir()))
        assert reach(network.dial("a")) == b"hello"
        assert network.ask("a", bytes(1_000_000)) == bytes(1_000_000)
        assert threads < 100
        for raw in raws:
            network.loop.run(raw.channel.close())


# Certificates that end, and are renewed


def test_an_ended_certificate_is_cut_off_with_a_sentence_and_a_renewed_one_let_in(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    provision.renew(network.folder, "a", lifetime=timedelta(seconds=4))
    client = network.dial("a")
    reach(client)
    assert "the certificate of a ended on" in refused(client)
    provision.renew(network.folder, "a")
    assert reach(network.dial("a", "0b" * 16)) == b"hello"


def test_a_client_that_was_renewed_in_time_goes_on_when_its_old_certificate_ends(network: Network) -> None:
    provision.renew(network.folder, "a", lifetime=timedelta(seconds=3))
    client = network.dial("a")
    reach(client)
    provision.renew(network.folder, "a")
    until = monotonic() + 5.0
    while monotonic() < until:
        reach(client)  # which raises Unadmitted, if it is not let in
        sleep(0.01)


def test_a_server_takes_its_renewed_certificate_while_it_runs_and_warns_of_its_end(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    provision.renew(network.folder, "server", lifetime=timedelta(hours=1))
    old = network.kit("server").serial
    wait_for(lambda: "the certificate of server ends within a day" in caplog.text)
    assert served_serial(network) == old
    provision.renew(network.folder, "server")
    assert served_serial(network) == network.kit("server").serial != old


def served_serial(network: Network) -> int:
    pem = ssl.get_server_certificate(("127.0.0.1", network.port))
    return read_peer(pem.encode()).serial


def test_a_second_server_on_the_port_is_refused_with_a_sentence(network: Network) -> None:
    second = GrpcServer(network.loop, network.kit("server"), None)
    with pytest.raises(ProvisionError, match="is the server running already"):
        second.start(network.service, largest=LARGEST)


def test_refusals_are_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    from quafl.deploy.logs import LONGEST, OFTEN, Calm

    calm, logger = Calm(), logging.getLogger("calm")
    shown = []
    for number in range(1000):
        record = logger.makeRecord("calm", logging.WARNING, "", 0, "%s: %s", ("a", "x" * 9000 + str(number)), None)
        if calm.filter(record):
            shown.append(record.getMessage())
    assert len(shown) == OFTEN
    assert all(len(text) <= LONGEST + 1 for text in shown)
    other = logger.makeRecord("calm", logging.WARNING, "", 0, "%s: %s", ("b", "y"), None)
    assert calm.filter(other)
