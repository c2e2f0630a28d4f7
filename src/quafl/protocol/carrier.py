"""What the protocol knows of the network: somebody who carries octets between named parties, and proves the names."""

from typing import TypeAlias

Octets: TypeAlias = bytes | bytearray | memoryview

SERVER = "server"  # the server's name; the clients have others


class Unreachable(Exception):
    """The other end did not answer."""


class Unadmitted(Unreachable):
    """The other end does not listen to this one, and trying again does not help: its reason, in a sentence."""
