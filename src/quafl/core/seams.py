"""The seams of the house: what algorithms, tasks and optimizers promise each other.

Models are flat float32 vectors with free leading axes ("... d"): one expression serves one client or a stack of
them. Everything else that belongs to a client or a message carries the same leading axes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from quafl.core.messages import Buffers, Message, Model
from quafl.core.randomness import Generators
from quafl.core.structs import Struct

if TYPE_CHECKING:
    from quafl.core.conversation import Round

Ids: TypeAlias = Tensor  # "m", int64
Counts: TypeAlias = Tensor  # "m", int64
Batch: TypeAlias = Any  # what a task's `batch` hands to its `gradient`; opaque to everybody else
Score: TypeAlias = Mapping[str, float]  # "loss" and the user's metrics by name
EXAMPLES = "examples"  # in a client's score: how many it was judged by
OptimizerState: TypeAlias = tuple[Tensor, ...]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]  # of tensors by name, in the order in which a vector has them


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientState(Struct):
    """What every client keeps, a row per client. An algorithm that keeps more declares it in a subclass: vectors
    "... d", which local steps do not change, and numbers "..."."""

    base: Model  # X^i
    progress: Model  # X^i − the local model: η·h̃_i, when the optimizer is SGD
    buffers: Buffers
    optimizer: OptimizerState
    steps: Counts  # completed ever; with the client's id, the key of its next batch
    taken: Counts  # completed since the last contact
    budget: Counts  # most of those
    round: Counts  # of the server's message that it heard last; −1: none
    left_out: tuple[Model, ...] = ()  # of the vectors that it has sent, where the codec gives that back to it


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState(Struct):
    """What every server needs to go on. An algorithm that keeps more declares it in a subclass. A vector that is sent
    down has the same name here and in the message."""

    model: Model  # X_t
    buffers: Buffers
    round: int = 0  # t
    # How far a vector sent down will be from the client's; within a simulation, as a device has it.
    expected: Mapping[str, float | Tensor] = field(default_factory=dict)
    votes: Mapping[str, Tensor] = field(default_factory=dict)  # of the defence


@dataclass(slots=True)
class Totals:
    """What clients have done so far."""

    steps: int = 0  # local steps that went into an answer
    up: int = 0  # octets of the codec's messages; those of names, tickets and greetings do not count
    down: int = 0
    contacts: int = 0  # answered
    idle: int = 0  # of those, the ones that found a client without a completed step
    slow_contacts: int = 0  # of clients at most half as fast as the fastest, where somebody knows them
    slow_idle: int = 0
    refined: int = 0  # messages that needed a repair
    lost: int = 0  # contacts without an answer
    broken: int = 0  # of those, because the client's progress was not finite


class Task(Protocol):
    """What is learned, and from what.

    A task may have more. `layout() -> tuple[Shapes, Shapes]` says of which tensors its model and its buffers are made:
    a federation refuses clients that have others. `judge(client, model, buffers) -> Score | None` is how good the model
    is on a client's own data, with their number as `examples`. `has_test` is False where `evaluate` has no loss, and
    the clients are to judge. `expect(keys)`, if not None, is told which batches will be asked for next, as (client,
    step), and may read them ahead. `examples(client) -> int` is how many a client learns from: algorithms may weigh
    clients by them.
    """

    def initial(self) -> tuple[Model, Buffers]:
        """The model everybody starts from."""

    def batch(self, client: int, step: int) -> Batch:
        """The client's data for its step number `step`, the same whenever asked."""

    def gradient(self, model: Model, buffers: Buffers, batch: Batch) -> tuple[Model, Buffers]:
        """g̃_i at the model, and the buffers after the pass."""

    def evaluate(self, model: Model, buffers: Buffers) -> Score:
        """How good the model is."""

    def export(self, model: Model, buffers: Buffers) -> dict[str, Tensor]:
        """The model as named tensors, the way its users know it."""


def examples_of(task: Task, client: int) -> int:
    """How many the client learns from, if the task counts them."""
    count: Callable[[int], int] | None = getattr(task, "examples", None)
    if count is None:
        raise ValueError(
            f"the algorithm weighs clients by their examples, and the task, a {type(task).__name__}, does not count "
            f"them; give it a method examples(client), or set weighted to False"
        )
    return count(client)


class Optimizer(NamedTuple):
    """A local optimizer as two pure functions; its state stays with the client. A rate beside them instead of in them
    need not be compiled. `update` is given a gradient, the state, and the model at which the gradient was taken."""

    init: Callable[[Model], OptimizerState]
    update: Callable[[Model, OptimizerState, Model], tuple[Model, OptimizerState]]  # -> displacement, at rate 1
    factor: Callable[[Counts], Tensor] | None = None  # of the displacement, by the server's round: a schedule
    fresh: bool = False  # begin anew after each contact
    rate: float = 1.0
    name: str = ""  # how it was made, for people

    def __repr__(self) -> str:
        return self.name or tuple.__repr__(self)


Applied: TypeAlias = Callable[[Any, Any], Any]  # client, up as it was decoded -> client
Direction: TypeAlias = Callable[[Any, Model], Model]  # client, gradient -> what the optimizer gets in its place


class Records(NamedTuple):
    """What an algorithm declares."""

    client: type[Any]  # a ClientState
    server: type[Any]  # a ServerState
    down: type[Message]  # server to client
    up: type[Message]  # client to server
    idle: bool = True  # whether a client answers that has taken no step


class Algorithm(Protocol):
    """Both sides of a federated algorithm, in one file, with the records it declares.

    At the server, a round is a generator of wants (`core.conversation`). All that a later round needs is in the state
    that it returns. Evaluating, recording, checkpointing and stopping belong to whoever runs it.

    At the client, a contact is `hear`, then local steps until the client's budget is used up, then `answer`. Between
    contacts, a client takes local steps as long as it has a budget.
    """

    @property
    def records(self) -> Records:
        """What its sides keep, and say to each other."""

    @property
    def sampled(self) -> int:
        """s: clients that talk to the server at a time."""

    @property
    def local_steps(self) -> int:
        """K: most local steps behind an answer."""

    @property
    def wait(self) -> float:
        """Time that the server lets pass between two rounds."""

    @property
    def direction(self) -> Direction | None:
        """Of a local step, in place of the gradient; None: the gradient."""

    @property
    def applied(self) -> Applied | None:
        """The client when it hears that its last answer was applied; None: nothing changes. Of the answer it may use
        the numbers, and the vectors near nothing, which are as the server has decoded them. What a client changes here
        alone, both ends know alike, whatever crashes or gets lost. Its local steps before it hears the next message see
        nothing of that."""

    def start(self, model: Model, buffers: Buffers) -> Any:
        """The server at the beginning."""

    def round(self, server: Any, rng: Generators) -> "Round[Any]":
        """One round, from this state to the next. It may be begun and dropped, so it changes nothing but `rng`."""

    def newcomer(self, client: ClientState, speed: Tensor) -> Any:
        """A client that has just received the model, with what the algorithm keeps beside it. It is `speed` times as
        fast as the fastest client."""

    def hear(self, client: Any, down: Any) -> Any:
        """The client when the server's message has come."""

    def answer(self, client: Any, down: Any) -> tuple[Any, Any]:
        """What it says to that when its budget is used up, and what it becomes."""

    def lost(self, client: Any, up: Any) -> Any:
        """The client when it hears that its last answer was not applied."""
