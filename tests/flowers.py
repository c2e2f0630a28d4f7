"""Flower's ServerApp and ClientApps in this process: messages are delivered by function calls, and counted."""

from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = (
    1,
    1,
    1,
)  # Flower's runtime does it, before a ServerApp


def octets(message: Message) -> int:
    """By Flower's own count, as its message_size_mod logs it."""
    if not message.has_content():
        return 0
    return sum(record.count_bytes() for record in message.content.values())


def copied(message: Message) -> Message:
    """What somebody changes in it, nobody else sees."""
    if message.has_error():
        return message
    return Message(RecordDict(dict(message.content.items())), metadata=message.metadata)


class Here(Grid):
    """A grid with some nodes. A message is handled when its answer is asked for, in the order of pushing; `slow` nodes
    handle theirs only at every other glance."""

    def __init__(self, app: ClientApp, nodes: int, slow: Iterable[int] = ()) -> None:
        self.app, self.slow = app, set(slow)
        self.contexts = {node: self._context(node) for node in range(1, nodes + 1)}
        self.up = self.down = 0
        self.told: list[Message] = []
        self.said: list[Message] = []
        self._waiting: dict[str, Message] = {}
        self._looks: dict[str, int] = {}

    @staticmethod
    def _context(node: int) -> Context:
        return Context(0, node, {"partition-id": node - 1}, RecordDict(), {})

    def lose(self, node: int) -> None:
        """Its state."""
        self.contexts[node] = self._context(node)

    @property
    def run(self) -> Any:
        return None

    def set_run(self, run: Any) -> None:
        pass

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return Message(*args, **kwargs)

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())  # as Flower's own grids do
            self._waiting[message.metadata.message_id] = message
            self.down += octets(message)
            self.told.append(message)
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for id in message_ids:
            message = self._waiting.get(id)
            if message is None:
                continue
            self._looks[id] = looks = self._looks.get(id, 0) + 1
            if message.metadata.dst_node_id in self.slow and looks < 3:
                continue
            replies.append(self._handled(self._waiting.pop(id)))
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        waiting, replies = set(self.push_messages(messages)), list[Message]()
        while waiting:
            came = self.pull_messages(waiting)
            waiting -= {reply.metadata.reply_to_message_id for reply in came}
            replies += came
        return replies

    def _handled(self, message: Message) -> Message:
        try:
            reply = self.app(copied(message), self.contexts[message.metadata.dst_node_id])
        except Exception as error:
            reply = Message(Error(2, str(error)), reply_to=message)
        self.up += octets(reply)
        self.said.append(copied(reply))
        return reply
