"""Our algorithms as strategies of Flower's."""

import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from logging import getLogger
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from quafl.bridges.contact import Answer, check_runs_here, read, up_coder
from quafl.bridges.flower.arrays import (
    ALGORITHM,
    LOCAL_STEPS,
    NEAR,
    RECEIPT,
    STEPS,
    floats_of,
    numbers_of,
    octets_of,
    record_like,
    stating,
    without_ours,
)
from quafl.bridges.flower.strategy import CompressedGrid, Link, Traffic, Wanted, count, down_bits_of, outermost
from quafl.bridges.records import (
    check_bits,
)
from quafl.codec.difference import Difference
from quafl.codec.messages import flattened, name_of, shaped_like
from quafl.codec.seams import DecodeError, WireError
from quafl.core.conversation import Await, Clients, Look, Replies, Sleep, Tell, Want
from quafl.core.randomness import Generators
from quafl.core.seams import Algorithm

_log = getLogger(__name__)

GLANCE, LONGEST_GLANCE = 0.02, 1.0  # seconds between two looks for answers


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
        self._bits, self._down_bits = bits, down_bits_of(bits, down_bits)
        check_bits(self._bits, self._down_bits)
        self.traffic = Traffic()  # of the run

    def configure_train(self, *_: Any) -> Iterable[Message]:
        """The algorithm does it, in `start`."""
        raise outermost(self)

    def aggregate_train(self, *_: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The algorithm does it, in `start`."""
        raise outermost(self)

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
        run = _Run(self, grid, over.link, initial_arrays, timeout, train_config or ConfigRecord())
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
        link: Link,
        initial: ArrayRecord,
        timeout: float,
        config: ConfigRecord,
    ) -> None:
        self._strategy, self._grid, self.link, self._initial = strategy, grid, link, initial
        self._timeout, self._config = timeout, config
        self._algorithm = strategy.algorithm
        self._coder = up_coder(self._algorithm, Difference(bits=strategy._bits))
        self._floats = floats_of(initial)
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
        return record_like(self._initial, dict(floats), self._initial)

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
        more: dict[str, Any] = {
            ALGORITHM: type(self._algorithm).__name__,
            **stating(numbers),
        }
        if node in self._receipts:
            more[RECEIPT] = self._receipts[node]
        message = Message(self.link.pack(node, content, in_full=in_full, **more), node, MessageType.TRAIN)
        for id in self._grid.push_messages([message]):
            heard, statistics = flattened(self.link.sender.reference(node, self._strategy.arrayrecord_key))
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
                except Wanted as wanted:
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
        self.link.traffic.up += count(reply.content)
        said = self.link.listen(node, reply.content)
        if said is None or key not in reply.content.array_records:
            name = type(self._algorithm).__name__
            raise WireError(f"it does not take part in {name}; give its ClientApp mods=[quafl_mod({name}(...))]")
        record = reply.content.array_records[key]
        octets = tuple(octets_of(record, str(place)) for place in range(len(record)))
        named, steps = said.get(NEAR, ""), said.get(STEPS)
        if not isinstance(steps, int) or not isinstance(named, str):
            raise WireError("it does not say how many steps it has taken, and from what")
        differs = self._coder.has_differences
        answer = Answer(octets, tuple(numbers_of(said)), name_of(getattr(owed.down, owed.down.vectors()[0].name)))
        if not differs:
            answer = replace(answer, name=0)
        up = read(self._algorithm, self._coder, answer, owed.down)
        self._receipts[node] = answer.digest()
        self._contents.append(without_ours(reply.content))
        metrics = {one: record for one, record in self._contents[-1].items() if one != key}
        self.link.traffic.plain_up += count(RecordDict({**metrics, key: owed.content[key]}))
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
