"""The server's end: models in few bits, whatever the strategy."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from quafl.bridges.flower.arrays import (
    IN_FULL,
    PRECONDITION,
    RECORD,
    VERSION,
    encoded_record,
    floats_of,
    layout_in,
    octets_of,
    others_of,
    record_like,
    without_ours,
)
from quafl.bridges.records import FEWEST_DOWN, FULL, Sender, check_bits, check_encoded, fingerprint, short
from quafl.codec.seams import DecodeError, WireError

_log = getLogger(__name__)


class Wanted(Exception):
    """A client asks for the model in full."""


@dataclass(slots=True)
class Traffic:
    """Octets of messages' contents, by Flower's own count, and those of the same models in full."""

    up: int = 0
    down: int = 0
    plain_up: int = 0
    plain_down: int = 0

    def __str__(self) -> str:
        sent, plain = self.up + self.down, self.plain_up + self.plain_down
        return f"{sent:,} octets ({self.up:,} up, {self.down:,} down), in full {plain:,}: 1/{plain / max(sent, 1):.1f}"


def count(content: RecordDict) -> int:
    """Octets of all records, as Flower's `message_size_mod` counts them."""
    return sum(_without_empty(record).count_bytes() for record in content.values())


def _without_empty(record: ArrayRecord | ConfigRecord | MetricRecord) -> ArrayRecord | ConfigRecord | MetricRecord:
    """Flower cannot count empty texts and lists."""
    if not isinstance(record, ConfigRecord):
        return record
    return ConfigRecord({key: value for key, value in record.items() if value not in ("", b"", [])})


class Link:
    """Records on their way to clients, and back."""

    def __init__(self, bits: int, down_bits: int, seed: int) -> None:
        check_bits(bits, down_bits)
        self.sender = Sender(down_bits, seed)
        self._like: dict[tuple[str, str], ArrayRecord] = {}  # the last record of a key and a layout
        self._layouts: dict[tuple[int, str], str] = {}  # of what a node was sent
        self._last: tuple[ArrayRecord, str, dict[str, Tensor]] | None = None
        self._without: set[int] = set()
        self._spared: dict[str, set[str]] = {}  # by key: arrays that had no floating-point numbers at first
        self.traffic = Traffic()

    def pack(self, node: int, content: RecordDict, *, in_full: bool = False, **more: Any) -> RecordDict:
        """A message's content with its models encoded."""
        packed, said = dict(content.items()), ConfigRecord({"version": VERSION, **more})
        for key, record in content.array_records.items():
            dtypes = {name: array.dtype for name, array in record.items()}
            spared = self._spared.setdefault(key, {name for name in dtypes if not dtypes[name].startswith("float")})
            check_encoded(dtypes, spared)
            layout, floats = self._read(record)
            if not floats:
                said[f"record {key}"] = [FULL, fingerprint(floats), short(layout)]
                continue
            sent = self.sender.send(node, key, layout, floats, in_full=in_full)
            if sent.how != FULL:
                others = others_of(record, floats)
                packed[key] = encoded_record(sent.octets, others) if sent.octets else ArrayRecord(others)
            said[f"record {key}"] = [sent.how, sent.name, short(layout)]
            self._layouts[node, key] = layout
            self._like[key, layout] = record
        packed[RECORD] = said
        result = RecordDict(packed)
        self.traffic.down += count(result)
        self.traffic.plain_down += count(content)
        return result

    def unpack(self, node: int, content: RecordDict) -> RecordDict:
        """A reply's content with its models decoded; or WireError, or DecodeError, or Wanted."""
        self.traffic.up += count(content)
        said = self.listen(node, content)
        plain = without_ours(content)
        if said is None:
            self.traffic.plain_up += count(content)
            return content
        for key, record in content.array_records.items():
            near = said.get(f"record {key}")
            if near is None:
                continue
            floats = self.sender.receive(node, str(near), octets_of(record))
            like = self._like[str(near), self._layouts[node, str(near)]]
            plain[key] = record_like(like, floats, record)
        self.sender.answered(node)
        self.traffic.plain_up += count(plain)
        return plain

    def listen(self, node: int, content: RecordDict) -> ConfigRecord | None:
        """What the client says of itself; None if it has no mod of ours."""
        said = content.config_records.get(RECORD)
        if said is None:
            if content.array_records and node not in self._without:
                self._without.add(node)
                _log.warning("node %d answers in full: its ClientApp is without quafl_mod", node)
            return None
        if IN_FULL in said:
            self.sender.forget(node)
            raise Wanted(str(said[IN_FULL]))
        for key in said:
            if key.startswith("heard "):
                self.sender.heard(node, key.removeprefix("heard "), str(said[key]))
        return said

    def _read(self, record: ArrayRecord) -> tuple[str, dict[str, Tensor]]:
        """A model goes to many clients, and is read once."""
        if self._last is None or self._last[0] is not record:
            self._last = record, layout_in(record), floats_of(record)
        return self._last[1:]


def down_bits_of(bits: int, down_bits: int | None) -> int:
    """Those given, or as many as clients send, where a lattice can do with so few."""
    return max(bits, FEWEST_DOWN) if down_bits is None else down_bits


class CompressedGrid(Grid):
    """A Grid whose messages carry models in few bits, for ServerApps with a loop of their own.

    A client that cannot decode a model, as its state is lost, is sent it in full at once. What a client sends that does
    not decode comes as a Message with an error, in one sentence.
    """

    def __init__(self, grid: Grid, bits: int = 4, *, down_bits: int | None = None, seed: int = 0) -> None:
        self._grid, self.link = grid, Link(bits, down_bits_of(bits, down_bits), seed)
        self._sent: dict[int, Message] = {}  # last, by node
        self._instead: dict[str, str] = {}

    @property
    def traffic(self) -> Traffic:
        """What was sent so far."""
        return self.link.traffic

    @property
    def run(self) -> Any:
        """The run that this belongs to."""
        return self._grid.run

    def set_run(self, run: Any) -> None:
        """For Flower itself."""
        self._grid.set_run(run)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """As Flower does."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Of those who are there."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """Those who are there."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send them, encoded."""
        return self._grid.push_messages([self._packed(message) for message in messages])

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """What has come, decoded. Where a client has asked for the model in full, its answer comes later."""
        ids = [self._instead.get(one, one) for one in message_ids]
        done, again = self._read(self._grid.pull_messages(ids))
        asked = {new: old for old, new in self._instead.items()}
        for message, about in again:
            for new in self._grid.push_messages([message]):
                self._instead[asked.get(about, about)] = new
        return done

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """The answers, decoded."""
        packed = [self._packed(message) for message in messages]
        done, again = self._read(self._grid.send_and_receive(packed, timeout=timeout))
        if again:
            more, _ = self._read(self._grid.send_and_receive([message for message, _ in again], timeout=timeout))
            done += more
        return done

    def _packed(self, message: Message) -> Message:
        """Another message: this one stays the caller's."""
        if not message.has_content() or not message.content.array_records:
            return message
        self._sent[message.metadata.dst_node_id] = message
        return self._anew(message)

    def _anew(self, message: Message, *, in_full: bool = False) -> Message:
        about = message.metadata
        packed = self.link.pack(about.dst_node_id, message.content, in_full=in_full)
        return Message(packed, about.dst_node_id, about.message_type, ttl=about.ttl, group_id=about.group_id)

    def _read(self, replies: Iterable[Message]) -> tuple[list[Message], list[tuple[Message, str]]]:
        """Those that are done, and what is to be sent in full, in place of which message."""
        done, again = [], []
        for reply in replies:
            node = reply.metadata.src_node_id
            if not reply.has_error():
                try:
                    reply.content = self.link.unpack(node, reply.content)
                except Wanted as wanted:
                    _log.warning("node %d is sent the model in full: %s", node, wanted)
                    again.append((self._anew(self._sent[node], in_full=True), reply.metadata.reply_to_message_id))
                    continue
                except (WireError, DecodeError) as error:
                    done.append(refused(reply, error))
                    continue
            done.append(reply)
        return done, again


def refused(reply: Message, error: Exception) -> Message:
    """In place of a reply that cannot be read, an error from the same node."""
    node = reply.metadata.src_node_id
    answered = Message(RecordDict(), reply_to=reply)  # back to the node: an answer to it comes from there
    return Message(Error(PRECONDITION, f"what node {node} has sent does not decode: {error}"), reply_to=answered)


class Compressed(Strategy):
    """Any strategy of Flower's, with models in `bits` a parameter both ways: from clients as differences from what they
    were sent, to clients by the lattice (`down_bits`, by default the same, and at least 3), the first time in full.

    It goes outermost, around other wrappers such as those for differential privacy. Clients have `quafl_mod()`; one
    without it is sent models in full, and answers so.
    """

    def __init__(self, strategy: Strategy, bits: int = 4, *, down_bits: int | None = None, seed: int = 0) -> None:
        check_bits(bits, down_bits_of(bits, down_bits))
        self.strategy, self.bits, self.down_bits, self.seed = strategy, bits, down_bits, seed
        self.traffic = Traffic()  # of the run

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """The strategy's own, over a CompressedGrid."""
        over = CompressedGrid(grid, self.bits, down_bits=self.down_bits, seed=self.seed)
        self.traffic = over.traffic
        return self.strategy.start(
            over, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
        )

    def summary(self) -> None:
        """Of the strategy."""
        self.strategy.summary()

    def configure_train(self, *_: Any) -> Iterable[Message]:
        """The strategy's own is called instead."""
        raise outermost(self)

    def aggregate_train(self, *_: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The strategy's own is called instead."""
        raise outermost(self)

    def configure_evaluate(self, *_: Any) -> Iterable[Message]:
        """The strategy's own is called instead."""
        raise outermost(self)

    def aggregate_evaluate(self, *_: Any) -> MetricRecord | None:
        """The strategy's own is called instead."""
        raise outermost(self)


def outermost(strategy: Strategy) -> RuntimeError:
    """That somebody has wrapped it."""
    name = type(strategy).__name__
    return RuntimeError(f"{name} is wrapped in another strategy, which would send models past it; put it outermost")
