"""A client with a certificate and bad intentions: `python rogue.py KIT NAME`. Prints what it was answered, as JSON."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.utils import new_cell_message

from quafl.deploy import messages
from quafl.deploy.flare import CHANNEL, SERVER, TOPIC, run_client
from quafl.deploy.messages import Contact, Hello, Octets
from quafl.deploy.worker import Unreachable


class Rogue:
    def __init__(self) -> None:
        self.stop = Event()

    def is_welcome(self, name: str) -> bool:
        return True

    def hear(self, name: str, octets: Octets) -> bytes:
        return b""

    def run(self, ask: Callable[[str, bytes, float], Octets]) -> int:
        cell: Any = ask.__self__._cell  # type: ignore[attr-defined]
        hello = messages.to_bytes(Hello(messages.as_text({"dim": 1, "buffers": 0, "session": "rogue"})))
        contact = messages.to_bytes(Contact(0, 0, 1, 1.0, b""))

        def attempt(name: str, octets: bytes) -> str:
            try:
                return type(messages.from_bytes(ask(name, octets, 5.0))).__name__
            except Unreachable as error:
                return str(error)

        def attempt_in_one_frame(octets: bytes) -> str:
            reply = cell.core_cell.send_request(
                channel=CHANNEL, topic=TOPIC, target=SERVER, request=new_cell_message({}, octets), timeout=5.0
            )
            return f"cannot be reached ({reply.get_header(MessageHeaderKey.RETURN_CODE)})"

        answers = {
            "hello with another model": attempt(SERVER, hello),
            "nonsense": attempt(SERVER, b"\x80\x04nonsense"),
            "contact to another client": attempt("client-1", contact),
            "large contact to another client": attempt("client-1", contact + bytes(6_000_000)),
            "more than the limit": attempt(SERVER, hello + bytes(30_000_000)),
            "more than the limit in one frame": attempt_in_one_frame(hello + bytes(30_000_000)),
        }
        cell.core_cell.my_info.fqcn = "client-1"
        answers["in another's name"] = attempt(SERVER, hello)
        print("ANSWERS", json.dumps(answers), flush=True)
        os._exit(0)


if __name__ == "__main__":
    run_client(Path(sys.argv[1]), sys.argv[2], Rogue(), largest_message=100_000_000)
