"""A client with a certificate that floods the server: `python flooder.py KIT SECONDS`. It dials again when it is hung
up on, and does so in four ways at the same time."""

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

import grpc
import grpc.aio

from quafl.deploy import line, provision
from quafl.deploy.streams import METHOD, VERSION
from quafl.protocol import messages
from quafl.protocol.messages import Hello

FRAME = line._FRAME
HELLO = messages.to_bytes(Hello(messages.as_text({"session": "f" * 60_000})))


def question(number: int, body: bytes) -> bytes:
    return FRAME.pack(line.ASK, number, len(body)) + body


FLOODS: dict[str, Callable[[int], bytes]] = {
    "greetings": lambda number: question(number, HELLO),
    "nonsense": lambda number: question(number, b"\x80\x04" + bytes(50_000)),
    "given up": lambda number: FRAME.pack(line.GIVE_UP, number, 0),
    "too large": lambda number: FRAME.pack(line.ASK, number, 10**12) + bytes(500_000),
}


async def flood(kit: provision.Kit, kind: str, until: float) -> None:
    key, certificate, authority = kit.credentials()
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    number = 0
    while monotonic() < until:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(kit.target, credentials, options=options) as channel:
            said = (("quafl-version", VERSION), ("quafl-session", os.urandom(16).hex()))
            call = channel.stream_stream(METHOD)(metadata=said)
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                async with asyncio.timeout(until - monotonic()):
                    while True:
                        number = (number + 1) % 2**32
                        await call.write(FLOODS[kind](number))
            call.cancel()
        await asyncio.sleep(0.05)


async def main() -> None:
    kit, until = provision.open_kit(Path(sys.argv[1])), monotonic() + float(sys.argv[2])
    await asyncio.gather(*(flood(kit, kind, until) for kind in FLOODS))


if __name__ == "__main__":
    asyncio.run(main())
