"""Our messages in Flower's: a mod for a ClientApp, a strategy for a ServerApp, and our algorithms as strategies.

    app = ClientApp(mods=[quafl_mod()])                       # at the client
    strategy = Compressed(FedAvg(...), bits=4)                # at the server

Only Flower's public API is used: `flwr.app`, `flwr.clientapp`, `flwr.serverapp`. docs/howto/flower.md has the rest.
"""

import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any, NamedTuple

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from torch import Tensor

from quafl.bridges.contact import Answer, Kept, arrive, check_runs_here, depart, read, up_coder
from quafl.bridges.records import (
    FEWEST_DOWN,
    FULL,
    LostError,
    Sender,
    Sent,
    check_bits,
    check_layout,
    fingerprint,
    hear,
    layout_of,
    short,
    tell,
)
from quafl.codec.coders import Coder
from quafl.codec.difference import Difference
from quafl.codec.messages import flattened, name_of, shaped_like
from quafl.codec.seams import DecodeError, WireError
from quafl.core.conversation import Await, Clients, Look, Replies, Sleep, Tell, Want
from quafl.core.randomness import Generators, derive
from quafl.core.seams import Algorithm

_log = getLogger(__name__)

VERSION = 1
RECORD = "quafl"  # what we say beside the records of others
OCTETS = "quafl octets"  # an array in place of those that are encoded
STYPE = "quafl"  # its kind: who does not know it cannot take it for numbers
NUMPY = "numpy.ndarray"  # Flower's own kind
IN_FULL, ALGORITHM, RECEIPT, NUMBERS, STEPS, NEAR = "in full", "algorithm", "receipt", "numbers", "steps", "near"
LOCAL_STEPS = "local-steps"  # in the configuration that a client gets, and in the metrics that it returns
PRECONDITION = 6  # Flower's code for a mod that cannot go on
GLANCE, LONGEST_GLANCE = 0.02, 1.0  # seconds between two looks for answers

Shown = dict[str, tuple[ArrayRecord, dict[str, Tensor]]]  # by key: what a client has heard, and its floats


# Records


def _floats(record: ArrayRecord) -> dict[str, Tensor]:
    """The arrays that are encoded: those of floating-point numbers."""
    return {
        name: torch.from_numpy(array.numpy().copy())
        for name, array in record.items()
        if array.stype == NUMPY and array.dtype.startswith("float")
    }


def _others(record: ArrayRecord, floats: Iterable[str]) -> dict[str, Array]:
    encoded = set(floats)
    return {name: array for name, array in record.items() if name not in encoded}


def _layout(record: ArrayRecord) -> str:
    return layout_of((name, tuple(array.shape), array.dtype) for name, array in record.items())


def _record(like: ArrayRecord, floats: dict[str, Tensor], others: ArrayRecord) -> ArrayRecord:
    """The arrays of `like`, in its order: the floats, and what has come beside them."""
    missing = [name for name in like if name not in floats and name not in others]
    if missing:
        raise DecodeError(f"array {missing[0]!r} has not come; do both ends use the same model?")
    return ArrayRecord({name: Array(floats[name]) if name in floats else others[name] for name in like})


def _encoded(octets: bytes, others: dict[str, Array]) -> ArrayRecord:
    return ArrayRecord({OCTETS: Array("uint8", (len(octets),), STYPE, octets), **others})


def _octets(record: ArrayRecord, name: str = OCTETS) -> bytes:
    if name not in record or record[name].stype != STYPE:
        raise WireError(f"a record has no array {name!r} of the kind {STYPE!r}")
    return record[name].data


def _plain(content: RecordDict) -> RecordDict:
    """Without what is ours."""
    return RecordDict({key: record for key, record in content.items() if key != RECORD})


# The client


def quafl_mod(algorithm: Algorithm | None = None, *, bits: int = 4) -> Mod:
    """A mod that decodes what the server's strategy has encoded, and encodes the answer in `bits` a parameter.

    It goes first among the mods, so that the others see models. With an `algorithm`, the one of the server's
    `Federated`, it plays that one's client. What it keeps is in the Context's state: the model that was heard last, and
    what the algorithm remembers.
    """
    check_bits(bits)
    coder = None
    if algorithm is not None:
        check_runs_here(algorithm)
        coder = up_coder(algorithm, Difference(bits=bits))

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if not message.has_content() or not (message.content.array_records or RECORD in message.content):
            return call_next(message, context)
        try:
            said = _heard_said(message, algorithm)
            before = _held(context)
            shown = _shown(message.content, said, before)
        except LostError as lost:
            _log.warning("this client asks for the model in full: %s", lost)
            return Message(RecordDict({RECORD: ConfigRecord({IN_FULL: str(lost)})}), reply_to=message)
        except (WireError, DecodeError, ValueError) as error:
            return _failed(message, error)
        for key, (record, _) in shown.items():
            context.state[f"{RECORD} {key}"] = record
        message.content = RecordDict({**_plain(message.content), **{key: record for key, (record, _) in shown.items()}})
        try:
            if algorithm is None or coder is None or ALGORITHM not in said:
                reply = call_next(message, context)
                return reply if reply.has_error() else _answered(reply, shown, bits, context.node_id)
            return _taken_part(message, context, call_next, algorithm, coder, said, shown, before)
        except (WireError, DecodeError, ValueError) as error:
            return _failed(message, error)

    return mod


def _heard_said(message: Message, algorithm: Algorithm | None) -> ConfigRecord:
    """What the server says beside its records."""
    said = message.content.config_records.get(RECORD)
    if said is None:
        raise ValueError(
            "the server sent a model without saying that it reads quantized answers; wrap its strategy in "
            "quafl.bridges.flower.Compressed, or take quafl_mod away"
        )
    if said.get("version") != VERSION:
        raise ValueError(
            f"the server's messages have version {said.get('version')!r}, expected {VERSION}; upgrade the older end"
        )
    mine = type(algorithm).__name__ if algorithm is not None else "no algorithm"
    theirs = str(said.get(ALGORITHM, "no algorithm"))
    if mine != theirs and (theirs != "no algorithm" or message.metadata.message_type == MessageType.TRAIN):
        raise ValueError(f"the server runs {theirs}, quafl_mod has {mine}; give both the same algorithm")
    return said


def _held(context: Context) -> Shown:
    """What was heard before."""
    mine = {
        key.removeprefix(f"{RECORD} "): record
        for key, record in context.state.array_records.items()
        if key.startswith(f"{RECORD} ")
    }
    return {key: (record, _floats(record)) for key, record in mine.items()}


def _shown(content: RecordDict, said: ConfigRecord, held: Shown) -> Shown:
    """The server's records, decoded."""
    shown = {}
    for key, record in content.array_records.items():
        how, name, layout = _strings(said, f"record {key}")
        if how == FULL:
            floats = _floats(record)
            if fingerprint(floats) != name:
                raise WireError(f"record {key!r} is not what the server says that it is; was it changed on the way?")
            shown[key] = (record, floats)
            continue
        mine, before = held.get(key, (None, None))
        if mine is not None and short(_layout(mine)) != layout:
            raise LostError(f"the model held here for {key!r} has other arrays")
        octets = _octets(record) if OCTETS in record else b""
        floats = hear(Sent(how, name, octets), before)
        assert mine is not None
        shown[key] = (_record(mine, floats, record), floats)
    return shown


def _strings(said: ConfigRecord, key: str) -> tuple[str, str, str]:
    told = said.get(key)
    if not isinstance(told, list) or len(told) != 3:
        raise WireError(f"nothing is said about {key!r}; does another mod or strategy add records after ours?")
    return str(told[0]), str(told[1]), str(told[2])


def _answered(reply: Message, shown: Shown, bits: int, node: int) -> Message:
    """The reply with its models encoded, each as a difference from what was heard."""
    said = ConfigRecord({"version": VERSION, **{f"heard {key}": fingerprint(own) for key, (_, own) in shown.items()}})
    content = RecordDict(dict(reply.content.items()))
    for key, record in reply.content.array_records.items():
        near = key if key in shown else next((one for one in shown if _layout(shown[one][0]) == _layout(record)), None)
        if near is None:
            continue  # a record that is near to nothing travels as it is
        heard, base = shown[near]
        check_layout(_layout(heard), _layout(record), f"the answer's record {key!r}")
        floats = _floats(record)
        if not floats:
            continue
        octets = tell(floats, base, bits, derive("up", node, key, fingerprint(base)))
        content[key] = _encoded(octets, _others(record, floats))
        said[f"record {key}"] = near
    content[RECORD] = said
    reply.content = content
    return reply


def _taken_part(
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
    algorithm: Algorithm,
    coder: Coder,
    said: ConfigRecord,
    shown: Shown,
    before: Shown,
) -> Message:
    """A contact of the algorithm's, around the user's training."""
    ((key, (record, heard)),) = shown.items()
    down = _down(algorithm, heard, _numbers(said))
    held = before.get(key)
    earlier = None if held is None else _down(algorithm, held[1], _numbers(said))
    kept = _kept(context)
    client = arrive(algorithm, coder, kept, str(said.get(RECEIPT, "")), down, earlier)
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    trained = reply.content.array_records.get(key)
    if trained is None:
        raise ValueError(
            f"the answer has the records {sorted(reply.content)}, none of them is {key!r}; return the model under the "
            f"key that it came with"
        )
    check_layout(_layout(record), _layout(trained), f"the answer's record {key!r}")
    steps = _steps(reply.content, algorithm.local_steps)
    near = name_of(down.model)
    answer, after = depart(algorithm, coder, client, down, flattened(_floats(trained)), steps, near)
    _keep(context, after)
    content = _plain(reply.content)
    content[key] = ArrayRecord(
        {str(place): Array("uint8", (len(part),), STYPE, part) for place, part in enumerate(answer.octets)}
    )
    mine = ConfigRecord({"version": VERSION, f"heard {key}": fingerprint(heard), STEPS: steps, **_packed(answer)})
    content[RECORD] = mine
    reply.content = content
    return reply


def _down(algorithm: Algorithm, floats: dict[str, Tensor], numbers: list[float]) -> Any:
    """The server's message, as it was decoded."""
    kind = algorithm.records.down
    declared = [one.name for one in kind.numbers()]
    if len(numbers) != len(declared):
        raise WireError(
            f"the server sent {len(numbers)} numbers, {type(algorithm).__name__} has {len(declared)}; do both ends "
            f"have the same version of quafl?"
        )
    model, statistics = flattened(floats)
    told = {name: torch.tensor(value, dtype=torch.float64) for name, value in zip(declared, numbers, strict=True)}
    return kind(statistics=statistics, **{kind.vectors()[0].name: model}, **told)


def _numbers(said: ConfigRecord) -> list[float]:
    told = said.get(NUMBERS, [])
    return [float(one) for one in told] if isinstance(told, list) else []


def _steps(content: RecordDict, usual: int) -> int:
    """How many local steps the user says that there were; else those of the algorithm."""
    for metrics in content.metric_records.values():
        if LOCAL_STEPS in metrics:
            steps = metrics[LOCAL_STEPS]
            if not isinstance(steps, int | float) or steps < 0:
                raise ValueError(f"the metric {LOCAL_STEPS!r} is {steps!r}, must be a number of steps")
            return int(steps)
    return usual


def _told(numbers: Iterable[float]) -> dict[str, Any]:
    """Flower's records have no empty lists."""
    return {NUMBERS: told} if (told := list(numbers)) else {}


def _packed(answer: Answer) -> dict[str, Any]:
    return {**_told(answer.numbers), NEAR: f"{answer.name:016x}"}


_KEPT = f"{RECORD}.kept"


def _keep(context: Context, kept: Kept) -> None:
    assert kept.last is not None
    context.state[_KEPT] = ArrayRecord(
        {
            **{name: Array(tensor) for name, tensor in kept.tensors.items()},
            **{f"last.{i}": Array("uint8", (len(one),), STYPE, one) for i, one in enumerate(kept.last.octets)},
        }
    )
    context.state[f"{_KEPT}.numbers"] = ConfigRecord({STEPS: kept.steps, **_packed(kept.last)})


def _kept(context: Context) -> Kept:
    if _KEPT not in context.state:
        return Kept()
    arrays, numbers = context.state.array_records[_KEPT], context.state.config_records[f"{_KEPT}.numbers"]
    octets = tuple(arrays[name].data for name in arrays if name.startswith("last."))
    tensors = {
        name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items() if not name.startswith("last.")
    }
    last = Answer(octets, tuple(_numbers(numbers)), int(str(numbers[NEAR]), 16))
    return Kept(int(str(numbers[STEPS])), tensors, last)


def _failed(message: Message, error: Exception) -> Message:
    _log.error("quafl_mod: %s", error)
    return Message(Error(PRECONDITION, f"quafl_mod: {error}"), reply_to=message)


# The server


class _Wanted(Exception):
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
    return sum(record.count_bytes() for record in content.values())


class _Link:
    """Records on their way to clients, and back."""

    def __init__(self, bits: int, down_bits: int, seed: int) -> None:
        check_bits(bits, down_bits)
        self.sender = Sender(down_bits, seed)
        self._like: dict[tuple[int, str], ArrayRecord] = {}
        self._last: tuple[ArrayRecord, str, dict[str, Tensor]] | None = None
        self._without: set[int] = set()
        self.traffic = Traffic()

    def pack(self, node: int, content: RecordDict, *, in_full: bool = False, **more: Any) -> RecordDict:
        """A message's content with its models encoded."""
        packed, said = dict(content.items()), ConfigRecord({"version": VERSION, **more})
        for key, record in content.array_records.items():
            layout, floats = self._read(record)
            if not floats:
                said[f"record {key}"] = [FULL, fingerprint(floats), short(layout)]
                continue
            sent = self.sender.send(node, key, layout, floats, in_full=in_full)
            if sent.how != FULL:
                others = _others(record, floats)
                packed[key] = _encoded(sent.octets, others) if sent.octets else ArrayRecord(others)
            said[f"record {key}"] = [sent.how, sent.name, short(layout)]
            self._like[node, key] = record
        packed[RECORD] = said
        result = RecordDict(packed)
        self.traffic.down += count(result)
        self.traffic.plain_down += count(content)
        return result

    def unpack(self, node: int, content: RecordDict) -> RecordDict:
        """A reply's content with its models decoded; or WireError, or DecodeError, or _Wanted."""
        self.traffic.up += count(content)
        said = self.listen(node, content)
        plain = _plain(content)
        if said is None:
            self.traffic.plain_up += count(content)
            return content
        for key, record in content.array_records.items():
            near = said.get(f"record {key}")
            if near is None:
                continue
            floats = self.sender.receive(node, str(near), _octets(record))
            plain[key] = _record(self._like[node, str(near)], floats, record)
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
            raise _Wanted(str(said[IN_FULL]))
        for key in said:
            if key.startswith("heard "):
                self.sender.heard(node, key.removeprefix("heard "), str(said[key]))
        return said

    def _read(self, record: ArrayRecord) -> tuple[str, dict[str, Tensor]]:
        """A model goes to many clients, and is read once."""
        if self._last is None or self._last[0] is not record:
            self._last = record, _layout(record), _floats(record)
        return self._last[1:]


def _down_bits(bits: int, down_bits: int | None) -> int:
    return max(bits, FEWEST_DOWN) if down_bits is None else down_bits


class CompressedGrid(Grid):
    """A Grid whose messages carry models in few bits, for ServerApps with a loop of their own.

    A client that cannot decode a model, as its state is lost, is sent it in full at once. What a client sends that does
    not decode comes as a Message with an error, in one sentence.
    """

    def __init__(self, grid: Grid, bits: int = 4, *, down_bits: int | None = None, seed: int = 0) -> None:
        self._grid, self._link = grid, _Link(bits, _down_bits(bits, down_bits), seed)
        self._sent: dict[int, tuple[Message, RecordDict]] = {}
        self._instead: dict[str, str] = {}

    @property
    def traffic(self) -> Traffic:
        """What was sent so far."""
        return self._link.traffic

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
        node = message.metadata.dst_node_id
        if message.has_content() and message.content.array_records:
            self._sent[node] = (message, message.content)
            message.content = self._link.pack(node, message.content)
        return message

    def _read(self, replies: Iterable[Message]) -> tuple[list[Message], list[tuple[Message, str]]]:
        """Those that are done, and what is to be sent in full, in place of which message."""
        done, again = [], []
        for reply in replies:
            node = reply.metadata.src_node_id
            if not reply.has_error():
                try:
                    reply.content = self._link.unpack(node, reply.content)
                except _Wanted as wanted:
                    _log.warning("node %d is sent the model in full: %s", node, wanted)
                    again.append((self._in_full(node), reply.metadata.reply_to_message_id))
                    continue
                except (WireError, DecodeError) as error:
                    done.append(refused(reply, error))
                    continue
            done.append(reply)
        return done, again

    def _in_full(self, node: int) -> Message:
        message, content = self._sent[node]
        about = message.metadata
        packed = self._link.pack(node, content, in_full=True)
        return Message(packed, node, about.message_type, ttl=about.ttl, group_id=about.group_id)


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
        check_bits(bits, _down_bits(bits, down_bits))
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
        raise _outermost(self)

    def aggregate_train(self, *_: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The strategy's own is called instead."""
        raise _outermost(self)

    def configure_evaluate(self, *_: Any) -> Iterable[Message]:
        """The strategy's own is called instead."""
        raise _outermost(self)

    def aggregate_evaluate(self, *_: Any) -> MetricRecord | None:
        """The strategy's own is called instead."""
        raise _outermost(self)


def _outermost(strategy: Strategy) -> RuntimeError:
    name = type(strategy).__name__
    return RuntimeError(f"{name} is wrapped in another strategy, which would send models past it; put it outermost")


# Our algorithms


class _Owed(NamedTuple):
    """An answer that is being waited for."""

    client: int
    round: int
    down: Any
    message: Message
    content: RecordDict


class Federated(FedAvg):
    """One of our algorithms as a strategy, compressed both ways: it says whom to ask, and makes the next model.

    Clients have `quafl_mod(algorithm)`, and train as for any strategy: the model comes as "arrays", and goes back under
    the same key. The number of steps that is wanted is "local-steps" in their configuration; who takes another one
    says so in a metric of that name. A client is not interrupted: it answers when it has trained. Answers are taken as
    they come, so that FedBuff and its like are asynchronous here, too.

    Of FedAvg are the evaluation at the clients and the mean of metrics.
    """

    def __init__(
        self, algorithm: Algorithm, bits: int = 4, *, down_bits: int | None = None, seed: int = 0, **fedavg: Any
    ) -> None:
        check_runs_here(algorithm)
        super().__init__(**fedavg)
        self.algorithm, self._seed = algorithm, seed
        self._bits, self._down_bits = bits, _down_bits(bits, down_bits)
        check_bits(self._bits, self._down_bits)
        self.traffic = Traffic()  # of the run

    def configure_train(self, *_: Any) -> Iterable[Message]:
        """The algorithm does it, in `start`."""
        raise _outermost(self)

    def aggregate_train(self, *_: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The algorithm does it, in `start`."""
        raise _outermost(self)

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
        """So many rounds of the algorithm; `timeout` is the longest that one wait for answers may take."""
        over = CompressedGrid(grid, self._bits, down_bits=self._down_bits, seed=self._seed)
        self.traffic = over.traffic
        run = _Run(self, grid, over._link, initial_arrays, timeout, train_config or ConfigRecord())
        result, judged = Result(), evaluate_config or ConfigRecord()
        if evaluate_fn and (score := evaluate_fn(0, initial_arrays)) is not None:
            result.evaluate_metrics_serverapp[0] = score
        for number in range(1, num_rounds + 1):
            _log.info("round %d of %d", number, num_rounds)
            replies = run.round(number)
            result.arrays = arrays = run.arrays()
            if metrics := self._mean(replies):
                result.train_metrics_clientapp[number] = metrics
            asked = self.configure_evaluate(number, arrays, judged, grid)
            answers = over.send_and_receive(asked, timeout=timeout)
            score = self.aggregate_evaluate(number, answers)
            if score is not None:
                result.evaluate_metrics_clientapp[number] = score
            if evaluate_fn and (score := evaluate_fn(number, arrays)) is not None:
                result.evaluate_metrics_serverapp[number] = score
        return result

    def _mean(self, contents: list[RecordDict]) -> MetricRecord | None:
        """Of the metrics that came with the answers."""
        told = [one for one in contents if any(self.weighted_by_key in m for m in one.metric_records.values())]
        return self.train_metrics_aggr_fn(told, self.weighted_by_key) if told else None


class _Run:
    """The driver of an algorithm: it carries out what the server's side wants, over a Grid."""

    def __init__(
        self,
        strategy: Federated,
        grid: Grid,
        link: _Link,
        initial: ArrayRecord,
        timeout: float,
        config: ConfigRecord,
    ) -> None:
        self._strategy, self._grid, self._link, self._initial = strategy, grid, link, initial
        self._timeout, self._config = timeout, config
        self._algorithm = strategy.algorithm
        self._coder = up_coder(self._algorithm, Difference(bits=strategy._bits))
        self._floats = _floats(initial)
        if not self._floats:
            raise ValueError("the initial arrays have no floating-point ones among them; there is nothing to learn")
        self._server = self._algorithm.start(*flattened(self._floats))
        self._rng = Generators(strategy._seed)
        self._numbers: dict[int, int] = {}  # by node id
        self._nodes: list[int] = []  # their ids, by number
        self._owed: dict[str, _Owed] = {}  # by message id
        self._arrived: list[tuple[_Owed, Message]] = []  # and not been taken yet
        self._receipts: dict[int, str] = {}
        self._contents: list[RecordDict] = []

    def arrays(self) -> ArrayRecord:
        """The server's model."""
        floats = shaped_like(self._floats, self._server.model, self._server.buffers)
        return _record(self._initial, dict(floats), self._initial)

    def round(self, number: int) -> list[RecordDict]:
        """One of the algorithm's; what has come beside the answers."""
        self._contents = []
        self._config["server-round"] = number
        self._config[LOCAL_STEPS] = self._algorithm.local_steps
        wants: Generator[Want, Any, Any] = self._algorithm.round(self._server, self._rng)
        answer: Any = None
        while True:
            try:
                want = wants.send(answer)
            except StopIteration as ended:
                self._server = ended.value
                return self._contents
            match want:
                case Sleep(seconds):
                    time.sleep(seconds)
                    answer = None
                case Look():
                    answer = self._look()
                case Tell(to, down, server):
                    self._tell([int(one) for one in to], down, server.round)
                    answer = None
                case Await(most, within, since):
                    answer = self._await(most, min(within, self._timeout), since)

    def _look(self) -> Clients:
        while len(ids := list(self._grid.get_node_ids())) < max(1, self._strategy.min_available_nodes):
            time.sleep(LONGEST_GLANCE)
        for node in ids:
            if node not in self._numbers:
                self._numbers[node] = len(self._nodes)
                self._nodes.append(node)
        present = torch.tensor(sorted(self._numbers[node] for node in ids))
        return Clients(present, len(self._nodes), time.monotonic())

    def _tell(self, to: list[int], down: Any, round: int) -> None:
        """Whoever is told anew is not waited for any more."""
        self._owed = {id: owed for id, owed in self._owed.items() if owed.client not in to}
        self._arrived = [one for one in self._arrived if one[0].client not in to]
        key = self._strategy.arrayrecord_key
        content = RecordDict({key: self.arrays(), self._strategy.configrecord_key: self._config})
        for client in to:
            self._push(client, round, down, content)

    def _push(self, client: int, round: int, down: Any, content: RecordDict, *, in_full: bool = False) -> None:
        node = self._nodes[client]
        numbers = [float(getattr(down, one.name)) for one in down.numbers()]
        more = {
            ALGORITHM: type(self._algorithm).__name__,
            **_told(numbers),
            RECEIPT: self._receipts.get(node, ""),
        }
        message = Message(self._link.pack(node, content, in_full=in_full, **more), node, MessageType.TRAIN)
        for id in self._grid.push_messages([message]):
            heard, statistics = flattened(self._link.sender.reference(node, self._strategy.arrayrecord_key))
            told = replace(down, statistics=statistics, **{down.vectors()[0].name: heard})
            self._owed[id] = _Owed(client, round, told, message, content)

    def _await(self, most: int, within: float, since: int) -> Replies:
        """The earliest answers; nobody is waited for whom nobody has asked."""
        came: list[tuple[_Owed, Any, int]] = []
        failed: list[int] = []
        until, glance = time.monotonic() + within, GLANCE
        while True:
            self._pull(since)
            news = bool(self._arrived)
            while self._arrived and len(came) < most:
                owed, reply = self._arrived.pop(0)
                try:
                    came.append((owed, *self._take(owed, reply)))
                except _Wanted as wanted:
                    _log.warning("node %d is sent the model in full: %s", self._nodes[owed.client], wanted)
                    self._push(owed.client, owed.round, owed.down, owed.content, in_full=True)
                except (WireError, DecodeError) as error:
                    _log.warning("what node %d has sent is left out: %s", self._nodes[owed.client], error)
                    failed.append(owed.client)
            if len(came) >= most or not self._owed or time.monotonic() >= until:
                break
            glance = GLANCE if news else min(2 * glance, LONGEST_GLANCE)
            time.sleep(max(0.0, min(glance, until - time.monotonic())))
        return self._replies(came, failed)

    def _pull(self, since: int) -> None:
        """What has come by now."""
        if not self._owed:
            return
        for reply in self._grid.pull_messages(list(self._owed)):
            owed = self._owed.pop(reply.metadata.reply_to_message_id, None)
            if owed is not None and owed.round >= since:
                self._arrived.append((owed, reply))

    def _take(self, owed: _Owed, reply: Message) -> tuple[Any, int]:
        """What a client says, and after how many steps."""
        node, key = self._nodes[owed.client], self._strategy.arrayrecord_key
        if reply.has_error():
            raise DecodeError(f"its ClientApp has failed: {reply.error.reason}")
        self._link.traffic.up += count(reply.content)
        said = self._link.listen(node, reply.content)
        if said is None or key not in reply.content.array_records:
            name = type(self._algorithm).__name__
            raise WireError(f"it does not take part in {name}; give its ClientApp mods=[quafl_mod({name}(...))]")
        record = reply.content.array_records[key]
        octets = tuple(_octets(record, str(place)) for place in range(len(record)))
        named, steps = said.get(NEAR, ""), said.get(STEPS)
        if not isinstance(steps, int) or not isinstance(named, str):
            raise WireError("it does not say how many steps it has taken, and from what")
        differs = self._coder.has_differences
        answer = Answer(octets, tuple(_numbers(said)), name_of(getattr(owed.down, owed.down.vectors()[0].name)))
        if not differs:
            answer = replace(answer, name=0)
        up = read(self._algorithm, self._coder, answer, owed.down)
        self._receipts[node] = answer.digest()
        self._contents.append(_plain(reply.content))
        metrics = {one: record for one, record in self._contents[-1].items() if one != key}
        self._link.traffic.plain_up += count(RecordDict({**metrics, key: owed.content[key]}))
        return up, steps

    def _replies(self, came: list[tuple[_Owed, Any, int]], failed: list[int]) -> Replies:
        if came:
            kind = self._algorithm.records.up
            up = kind.stack([one for _, one, _ in came])
            up = replace(up, **{one.name: getattr(up, one.name).float() for one in kind.numbers()})
        else:
            up = self._nothing()
        return Replies(
            senders=torch.tensor([owed.client for owed, _, _ in came], dtype=torch.int64),
            up=up,
            round=torch.tensor([owed.round for owed, _, _ in came], dtype=torch.int64),
            steps=torch.tensor([steps for _, _, steps in came], dtype=torch.int64),
            distances={},
            failed=torch.tensor(failed, dtype=torch.int64),
        )

    def _nothing(self) -> Any:
        """No rows."""
        kind, model, statistics = self._algorithm.records.up, self._server.model, self._server.buffers
        vectors = {one.name: model.new_empty(0, len(model)) for one in kind.vectors()}
        numbers = {one.name: torch.empty(0) for one in kind.numbers()}
        return kind(statistics=statistics.new_empty(0, len(statistics)), **vectors, **numbers)
