"""An algorithm that the library has never heard of: what it declares is kept, coded, sent, executed and resumed."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from worlds import world

from quafl import Calibrated, Lattice, Plan, Simulation, World, sgd
from quafl.codec import QSGD, Identity, wire
from quafl.codec.seams import Codec, Codecs
from quafl.core.client import begin
from quafl.core.conversation import Await, Clients, Look, Replies, Round, Tell
from quafl.core.messages import Buffers, Message, Model, heard, number, own, vector
from quafl.core.pieces import zeros
from quafl.core.randomness import Generators
from quafl.core.seams import ClientState, Counts, Direction, Records, ServerState
from quafl.core.server import mean_or, proceed, sample
from quafl.record import checkpoints
from quafl.tasks import Quadratic, Supervised, digits, partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Down(Message):
    """Server to client: two vectors that the client has something near to, and a number."""

    model: Model = vector(near=own("base"))
    push: Model = vector(near=own("pushed"))
    reach: Tensor = number(low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Up(Message):
    """Client to server: one vector near what both know, one near zero, and a number that may be kept private."""

    model: Model = vector(near=heard("model"))
    pull: Model = vector(near=None)
    visits: Tensor = number(private=True, low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client(ClientState):
    pushed: Model  # the push that was heard last
    reach: Tensor  # likewise
    visits: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Server(ServerState):
    push: Model
    visits: Tensor  # of each client, as it has told; NaN: not told


@dataclass(frozen=True, slots=True)
class FedProxPush:
    """FedProx (Li et al., 2020) with a heavy ball: clients are pulled back to where they began with strength μ, and
    pushed on in the direction in which the server has moved. They also say how they were pulled: μ·progress."""

    sampled: int = 3
    local_steps: int = 4
    mu: float = 0.2
    friction: float = 0.5

    records: ClassVar = Records(Client, Server, Down, Up)
    wait: ClassVar[float] = 0.0
    applied: ClassVar[None] = None

    def start(self, model: Model, buffers: Buffers) -> Server:
        return Server(model=model, buffers=buffers, push=torch.zeros_like(model), visits=torch.empty(0))

    def round(self, server: Server, rng: Generators) -> Round[Server]:
        clients: Clients = yield Look()
        visits = torch.cat((server.visits, torch.full((clients.size - len(server.visits),), torch.nan)))
        chosen = sample(clients.present, self.sampled, rng["sampling"])
        down = Down(
            model=server.model, push=server.push, reach=torch.tensor(1.0 + server.round), statistics=server.buffers
        )
        yield Tell(chosen, down, server)
        replies: Replies = yield Await(len(chosen), within=60.0, since=server.round)
        model = mean_or(server.model, replies.up.model)
        return proceed(
            server,
            replies.distances,
            model=model,
            push=self.friction * (model - server.model) + 0.01 * replies.up.pull.sum(dim=0),
            buffers=mean_or(server.buffers, replies.up.statistics),
            visits=visits.index_copy(0, replies.senders, replies.up.visits),
        )

    @property
    def direction(self) -> Direction:
        return lambda client, gradient: gradient - self.mu * client.progress - client.pushed

    def newcomer(self, client: ClientState, speed: Tensor) -> Client:
        none = torch.zeros_like(client.steps)
        return Client.extending(client, pushed=zeros(client.base), reach=none.float(), visits=none)

    def hear(self, client: Client, down: Down) -> Client:
        return begin(
            client,
            down.model,
            down.statistics,
            self.local_steps,
            pushed=down.push.expand_as(client.base),
            reach=down.reach.expand_as(client.reach),
        )

    def answer(self, client: Client, down: Down) -> tuple[Up, Client]:
        visits = client.visits + 1
        up = Up(
            model=client.base - client.progress,
            pull=self.mu * client.progress,
            visits=visits.float().where(visits > 1, torch.nan),  # private at first
            statistics=client.buffers,
        )
        return up, begin(client, client.base, client.buffers, 0, visits=visits)

    def lost(self, client: Client, up: Up) -> Client:
        return client


CODECS: dict[str, Codec | Codecs] = {
    "identity": Identity(),
    "lattice": Lattice(bits=8),
    "qsgd": QSGD(bits=8),
    "differences": QSGD(bits=8, difference=True),
    "one each": Codecs(up=QSGD(bits=8, difference=True), down=Lattice(bits=8)),
}
EXECUTORS = ["sequential", "vectorised", "graph"]
# Every codec; with the executors that take a while to trace, the one that has a way of its own for each direction.
RESUMED = [*((codec, "sequential") for codec in CODECS), *(("one each", executor) for executor in EXECUTORS[1:])]


def fresh(codec: str, executor: str) -> Simulation:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))
    task = Supervised(network, partition.iid(digits().train, 6), test=digits().test, batch_size=16)
    plan = Plan(until=300.0, every=60.0)
    return Simulation(task, 6, World(unreachable=0.1), FedProxPush(), CODECS[codec], sgd(0.2), plan, executor=executor)


def ended(run: Simulation) -> Simulation:
    for _ in run:
        pass
    return run


@cache
def straight(codec: str, executor: str) -> Simulation:
    """From its beginning to its end."""
    return ended(fresh(codec, executor))


@pytest.mark.parametrize("codec", CODECS)
def test_it_learns_with_every_executor_and_they_agree(codec: str) -> None:
    runs = [straight(codec, executor) for executor in EXECUTORS]
    assert [run.executor.split()[0] for run in runs] == EXECUTORS
    assert runs[0].rows[-1]["accuracy"] > runs[0].rows[0]["accuracy"] + 0.3
    for run in runs[1:]:
        assert run.rows[-1] == pytest.approx(runs[0].rows[-1], rel=0.05, abs=0.02)
        assert run.rows[-1]["local_steps"] == runs[0].rows[-1]["local_steps"]


@pytest.mark.parametrize(("codec", "executor"), RESUMED)
def test_a_run_that_was_left_and_taken_up_again_is_the_same_bit_for_bit(
    codec: str, executor: str, tmp_path: Path
) -> None:
    left, again = fresh(codec, executor), fresh(codec, executor)
    for _ in zip(range(5), left, strict=False):
        pass
    checkpoints.save(tmp_path / "checkpoint.pt", left.state())
    again.restore(checkpoints.load(tmp_path / "checkpoint.pt"))
    whole = straight(codec, executor)
    assert ended(again).rows == whole.rows
    mine, theirs = ([run.server.tree(), run._fleet.clients.everybody().tree()] for run in (again, whole))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def two() -> Quadratic:
    """Minima at 0 and 4, start at 1, curvature 2."""
    return Quadratic(torch.tensor([2.0]), torch.tensor([[0.0], [4.0]]), start=torch.tensor([1.0]))


def test_its_two_sides_say_and_keep_what_was_declared() -> None:
    """η = 1/4, K = 2, μ = 1, friction 1/2; a step goes along 2 (y − c) − μ (x − y) − push.

    Round 1, push 0: y_0 = 1, 1/2, 1/2 − (1 − 1/2)/4 = 3/8; y_1 = 1, 5/2, 5/2 − (−3 + 3/2)/4 = 23/8. x = 13/8. The pulls
    are 5/8 and −15/8; push = (13/8 − 1)/2 − 5/4/100 = 3/10.
    Round 2: y_0 = 13/8, 13/8 − (13/4 − 3/10)/4 = 71/80, 71/80 − (71/40 − 59/80 − 3/10)/4 = 45/64;
    y_1 = 13/8, 13/8 − (−19/4 − 3/10)/4 = 231/80, 231/80 − (−89/40 + 101/80 − 3/10)/4 = 205/64. x = 125/64."""
    w = world(two(), 2, FedProxPush(sampled=2, local_steps=2, mu=1.0), lr=0.25)
    first = w.rounds(1)[0]
    assert (first.model.item(), first.push.item()) == pytest.approx((13 / 8, 3 / 10))
    assert first.visits.isnan().all()
    second = w.rounds(1, first)[0]
    assert second.model.item() == pytest.approx(125 / 64)
    assert second.visits.tolist() == [2.0, 2.0]
    clients = w.fleet.clients.everybody()
    assert clients.pushed.flatten().tolist() == pytest.approx([3 / 10, 3 / 10])
    assert (clients.reach.tolist(), clients.visits.tolist()) == ([2.0, 2.0], [2, 2])


def test_every_vector_is_sent_and_its_octets_are_counted() -> None:
    codec = Lattice(bits=4, resolution=10.0)  # so wide that nothing needs a repair
    task = Quadratic(torch.ones(3000), torch.zeros(3, 3000))
    w = world(task, 3, FedProxPush(), codec=codec)
    w.rounds(5)
    message = 2 * len(wire.to_bytes(codec.encode(torch.zeros(3000), torch.Generator())))
    assert w.fleet.totals.up == w.fleet.totals.down == 5 * 3 * message


def test_each_vector_is_decoded_with_what_is_near_it() -> None:
    """Far from the origin, and the pushes far from the models: only the right keys decode without a repair."""
    centers = 1000 + torch.randn(4, 2048, generator=torch.Generator().manual_seed(0))
    task = Quadratic(torch.ones(2048), centers, start=1000 + torch.zeros(2048))
    w = world(task, 4, FedProxPush(sampled=4), codec=Lattice(bits=6), lr=0.05)
    states = w.rounds(20)
    assert set(states[-1].expected) == {"model", "push"}
    assert w.fleet.totals.refined <= 2 * 4 + 8  # the first messages, when nobody knows a distance


def test_a_broken_client_keeps_what_the_algorithm_keeps_for_it() -> None:
    class Poisoned(Quadratic):
        """Client 1's gradient is not a number in its sixth step."""

        def gradient(self, model: Tensor, buffers: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
            gradient, buffers = Quadratic.gradient(self, model, buffers, batch)
            return gradient * batch[1], buffers

        def batch(self, client: int, step: int) -> Any:
            return client, torch.tensor(torch.nan if (client, step) == (1, 5) else 1.0)

    healthy = two()
    task = Poisoned(healthy.curvature, healthy.centers, start=healthy.start)
    w = world(task, 2, FedProxPush(sampled=2, local_steps=4), lr=0.1)
    states = w.rounds(3)
    clients = w.fleet.clients.everybody()
    assert clients.visits.tolist() == [3, 2]  # the second was never completed
    assert clients.pushed.flatten().tolist() == pytest.approx([states[1].push.item()] * 2)
    assert w.fleet.totals.broken == 1
    assert all(state.model.isfinite().all() for state in states)


def test_a_record_that_was_made_elsewhere_is_read_again() -> None:
    one = FedProxPush().start(torch.ones(3), torch.empty(0))
    again = Server.from_tree(replace(one, expected={"push": 2.0}).tree())
    assert isinstance(again, Server)
    assert again.expected == {"push": 2.0}


class MovesItsBase(Calibrated):
    """In `applied`, though local steps go on from there."""

    def applied(self, client: Any, up: Any) -> Any:
        return replace(Calibrated.applied(self, client, up), base=client.base + 1)


class LooksAtItsMemory(Calibrated):
    """In its local steps, which do not wait for the next message."""

    @staticmethod
    def direction(client: Any, gradient: Model) -> Model:
        return gradient + client.memory


@pytest.mark.parametrize("made", [MovesItsBase, LooksAtItsMemory])
def test_what_steps_stand_on_is_not_changed_by_what_is_heard_only_later(made: type[Calibrated]) -> None:
    w = world(Quadratic(torch.ones(4), torch.zeros(6, 4)), 6, made(sampled=3, wait=5.0))
    with pytest.raises(ValueError, match=rf"{made.__name__}\.applied changes what local steps before the next message"):
        w.rounds(3)
