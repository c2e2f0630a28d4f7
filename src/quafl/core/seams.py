"""The seams of the house: what algorithms, codecs, fleets, clocks and tasks promise each other.

Models are flat float32 vectors with free leading axes ("... d"): one expression serves one client or a stack of
them. Everything else that belongs to a client or a message carries the same leading axes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from quafl.core.randomness import Generators
from quafl.core.rows import Rows

Model: TypeAlias = Tensor  # "... d", float32
Buffers: TypeAlias = Tensor  # "... e", float32: what a model carries but does not train (batch-norm statistics)
Ids: TypeAlias = Tensor  # "m", int64
Counts: TypeAlias = Tensor  # "m", int64
Batch: TypeAlias = Any  # what a task's `batch` hands to its `gradient`; opaque to everybody else
Score: TypeAlias = Mapping[str, float]  # "loss" and the user's metrics by name
OptimizerState: TypeAlias = tuple[Tensor, ...]

HEADER_BYTES = 52  # of every message; the layout is codec.wire's


class WireError(Exception):
    """Octets from a peer that are not a well-formed message."""


class DecodeError(Exception):
    """A well-formed message that this key cannot decode."""


@dataclass(frozen=True, slots=True)
class Packet(Rows):
    """One encoded vector per row, as it travels; a message to many receivers is a packet without leading axes.

    Beside the first message about a vector there are requests for more bits of some blocks (their numbers are the
    symbols), and the refinements that answer them.
    """

    codec: int  # the codec's id on the wire
    bits: int  # per coordinate
    dim: int  # d
    unit: int  # coordinates in a block
    symbols: Tensor  # "... words", int32: packed coordinates
    checks: Tensor  # "... blocks", int32: block checksums
    scales: Tensor  # "... blocks·k", float32: what a block's symbols are multiples of
    side: Tensor  # "...", float32: side γ of the lattice
    seed: Tensor  # "...", int64: what the sender's randomness was made from
    exact: Tensor  # "... e", float32: parts that travel in full precision
    dtype: torch.dtype = torch.float32  # of the vector
    kind: Literal["base", "request", "refinement"] = "base"
    sent: int = 0  # bits of the same coordinates that went before

    @property
    def nbytes(self) -> int:
        """Octets on the wire of all rows together: Σ len(wire.to_bytes(row))."""
        words = sum(part.shape[-1] for part in (self.symbols, self.checks, self.scales, self.exact))
        return self.side.numel() * (HEADER_BYTES + 4 * words)


# A row, and the request of its receiver for more bits -> the sender's refinement.
Refine: TypeAlias = Callable[[int, Packet], Packet]


@dataclass(frozen=True, slots=True)
class Note:
    """What rides along with the server's model."""

    round: int
    sampled: int  # s
    slowest: float  # H_min; infinite until some client has told its speed


@dataclass(frozen=True, slots=True)
class Answer(Rows):
    """What a contacted client sends back."""

    packet: Packet  # Enc(Y^i)
    round: Counts  # of the server's message that it answers
    steps: Counts  # local steps behind it
    distance: Tensor  # ‖Q(X_t) − X^i‖, the codec's own noise taken off
    speed: Tensor  # H_i; NaN: not told


@dataclass(frozen=True, slots=True)
class Replies:
    """The answers of some clients, a row each, and the way to ask their senders for a repair."""

    senders: Ids
    answer: Answer
    refine: Refine
    failed: Ids  # clients reached since the last time that have nothing to answer: their progress was not finite


@dataclass(frozen=True, slots=True)
class ClientState(Rows):
    """What a client keeps between contacts, a row per client."""

    base: Model  # X^i
    progress: Model  # X^i − the local model: η·h̃_i, when the optimizer is SGD
    buffers: Buffers
    optimizer: OptimizerState
    steps: Counts  # completed ever; with the client's id, the key of its next batch
    taken: Counts  # completed since the last contact
    budget: Counts  # most steps between two contacts: K
    round: Counts  # of the server's message that it heard last
    contacts: Counts  # that the mean below stands on
    expected_steps: Tensor  # H_i, a running mean over contacts


@dataclass(frozen=True, slots=True)
class ServerState:
    """All that a server needs to go on; `extra` belongs to the algorithm."""

    model: Model  # X_t
    buffers: Buffers
    round: int = 0  # t
    distance: float = 0.0  # expected ‖X_t − X^i‖ at the next contact
    extra: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Totals:
    """What a fleet has done so far."""

    steps: int = 0  # local steps that went into an answer
    up: int = 0  # octets
    down: int = 0
    contacts: int = 0  # answered
    idle: int = 0  # of those, the ones that found a client without a completed step
    slow_contacts: int = 0  # of clients at most half as fast as the fastest, where a fleet knows them
    slow_idle: int = 0
    refined: int = 0  # messages that needed a repair
    lost: int = 0  # contacts without an answer
    broken: int = 0  # of those, because the client's progress was not finite


class Codec(Protocol):
    """Vectors to packets and back."""

    @property
    def bits(self) -> int:
        """b, per coordinate."""

    @property
    def keyed(self) -> bool:
        """Whether decoding needs a vector near the encoded one."""

    def encode(
        self, x: Model, rng: torch.Generator, *, distance: Tensor | float | None = None, exact: Tensor | None = None
    ) -> Packet:
        """A fresh message; `distance` is the sender's estimate of ‖x − the receiver's key‖."""

    def refine(self, x: Model, request: Packet) -> Packet:
        """What the receiver of an encoding of x asks for; stateless."""

    def decode(self, packet: Packet, *, key: Model, refine: Refine | None = None) -> Model:
        """The vector, or DecodeError; never a guess."""

    def noise(self, packet: Packet) -> Tensor:
        """E‖Q(x) − x‖² of each row."""


class Codecs(NamedTuple):
    """One codec a direction: `up` from client to server, `down` from server to client."""

    up: Codec
    down: Codec


class Clock(Protocol):
    """Seconds, real or simulated."""

    def now(self) -> float:
        """Since some beginning."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""


class Fleet(Protocol):
    """The clients, as the server sees them."""

    @property
    def size(self) -> int:
        """n."""

    @property
    def totals(self) -> Totals:
        """What has been done and sent so far."""

    def available(self) -> Ids:
        """Clients that can be contacted now."""

    def send(self, to: Ids, packet: Packet, note: Note, refine: Refine) -> None:
        """One message to many; `refine` repairs it for those who cannot decode it."""

    def receive(self, count: int, within: float, since: int) -> Replies:
        """The earliest answers, 0 to `count` of them, waiting at most `within`. Those to rounds before `since` are
        dropped: they come too late."""


class Speeds(Protocol):
    """How fast clients take local steps, and when they are there at all."""

    def present(self, time: float) -> Tensor:
        """Whether each client is there."""

    def next_return(self, after: float) -> float:
        """When somebody comes back, or for the first time."""

    def relative(self) -> Tensor:
        """Each client's speed when it first appears, over that of the fastest."""

    def steps_within(self, ids: Ids, start: Tensor, stop: float, at_most: Counts) -> Counts:
        """Steps completed in (start, stop]; the one under way at `stop` is dropped."""

    def duration(self, ids: Ids, start: float, steps: Counts) -> Tensor:
        """Time until `steps` steps are completed."""

    def expected_steps(self, chance: float, round_time: float, budget: int) -> Tensor:
        """H_i: each client's mean number of steps between two contacts, if it goes on as it begins, and takes part in a
        round with this probability."""


class Task(Protocol):
    """What is learned, and from what."""

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


class Optimizer(NamedTuple):
    """A local optimizer as two pure functions; its state stays with the client."""

    init: Callable[[Model], OptimizerState]
    update: Callable[[Model, OptimizerState], tuple[Model, OptimizerState]]  # gradient -> displacement
    factor: Callable[[Counts], Tensor] | None = None  # of the displacement, by the server's round: a schedule
    fresh: bool = False  # begin anew after each contact


class Algorithm(Protocol):
    """Both sides of a federated algorithm. The server side is an iterator of states: evaluating, recording,
    checkpointing and stopping belong to whoever consumes it."""

    @property
    def answers(self) -> Literal["at once", "when done"]:
        """Whether a contacted client answers with what it has, or first takes its budget of steps."""

    @property
    def compressed(self) -> Literal["both ways", "uplink"]:
        """Where it uses the codec that it is given. An algorithm that compresses the uplink alone sends something for
        which the server has no key."""

    @property
    def sampled(self) -> int:
        """s: clients that talk to the server at a time."""

    @property
    def wait(self) -> float:
        """Time that the server lets pass between two rounds."""

    def budget(self, speed: Tensor) -> Counts:
        """Most local steps between two contacts, of clients that are `speed` times as fast as the fastest."""

    def rounds(
        self, state: ServerState, fleet: Fleet, codecs: Codecs, clock: Clock, rng: Generators
    ) -> Iterator[ServerState]:
        """One state a round, from the one given on; all that a later call needs to go on is in it."""

    def report(self, client: ClientState, note: Note) -> Model:
        """What the client sends: Y^i."""

    def adopt(self, client: ClientState, model: Model, buffers: Buffers, note: Note) -> ClientState:
        """The client after it has decoded the server's model and buffers, ready for new local steps."""
