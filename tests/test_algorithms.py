"""Every algorithm over the same small problems, and each against a hand computation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from worlds import NEVER, steady, world

import quafl
from quafl import Absence, Lattice, Simulation, adam, momentum, sgd
from quafl.codec import QSGD, Identity, wire
from quafl.codec.seams import Codec, Codecs
from quafl.core import (
    CA2FL,
    FAVANO,
    SCAFFOLD,
    Adaptive,
    Calibrated,
    Defence,
    FedAsync,
    FedAvg,
    FedBuff,
    FedNova,
    HeavyBall,
    QuAFL,
)
from quafl.core.client import newcomers
from quafl.core.messages import Message
from quafl.core.seams import Algorithm, Optimizer
from quafl.record.rows import Row
from quafl.sim import Diverged
from quafl.sim.piecewise import Piecewise
from quafl.sim.speeds import Constant
from quafl.tasks import Quadratic, Supervised, digits, partition
from quafl.testing import algorithms
from quafl.testing.algorithms import quadratic, simulation


class Entry(NamedTuple):
    """An algorithm under test, and a codec for it."""

    made: Callable[..., Any]
    codec: Codec | Codecs
    sgd_alone: bool = False  # it must know the rate of the clients' SGD; there is no other optimizer for it

    def make(self, lr: float = 0.1, **settings: Any) -> Any:
        """The algorithm, for clients that take SGD steps of that rate if it takes no others."""
        return self.made(lr=lr, **settings) if self.sgd_alone else self.made(**settings)

    def suited(self, optimizer: Optimizer) -> Optimizer:
        """This one, or SGD if it takes no other."""
        return sgd(0.1) if self.sgd_alone else optimizer


TABLE = {
    "QuAFL": Entry(QuAFL, Lattice(bits=6)),
    "QuAFL weighted": Entry(lambda **counts: QuAFL(weighted=True, **counts), Lattice(bits=6)),
    "QuAFL without averaging": Entry(
        lambda **counts: QuAFL(server_averaging=0.0, client_averaging=0.0, **counts), Lattice(bits=6)
    ),
    "Calibrated": Entry(lambda **counts: Calibrated(**{"local_steps": 5, **counts}), Lattice(bits=6)),
    "FedAvg": Entry(FedAvg, Lattice(bits=6)),
    "FedAvg weighted": Entry(lambda **counts: FedAvg(weighted=True, **counts), Lattice(bits=6)),
    "FedProx with momentum": Entry(
        lambda **counts: FedAvg(proximity=0.1, server=HeavyBall(0.5), server_lr=0.7, **counts), Lattice(bits=6)
    ),
    "FedBuff": Entry(FedBuff, Codecs(up=QSGD(bits=8), down=Identity())),
    "FedBuff stale": Entry(lambda **counts: FedBuff(staleness=True, server_lr=0.8, **counts), Lattice(bits=6)),
    "FADAS": Entry(
        lambda **counts: FedBuff(server=Adaptive(largest=True), server_lr=0.05, delay=2, **counts), Lattice(bits=6)
    ),
    "CA2FL": Entry(CA2FL, Lattice(bits=6)),
    "FAVANO": Entry(FAVANO, Lattice(bits=6)),
    "FedNova": Entry(FedNova, Lattice(bits=6)),
    "SCAFFOLD": Entry(SCAFFOLD, Lattice(bits=6), sgd_alone=True),
    "FedAsync": Entry(lambda **counts: FedAsync(proximity=0.5, staleness=1.0, **counts), Lattice(bits=6)),
}
EACH = pytest.mark.parametrize("entry", TABLE.values(), ids=TABLE.keys())
EACH_FILE = pytest.mark.parametrize(  # for what takes long
    "name", ["QuAFL", "Calibrated", "FedAvg", "FedBuff", "CA2FL", "FAVANO", "FedNova", "SCAFFOLD", "FedAsync"]
)
ELSEWHERE = algorithms.learns, algorithms.resumes, algorithms.survives_broken_clients  # in tests of their own
CONTRACT = [check for check in algorithms.CHECKS if check not in ELSEWHERE]
OPTIMIZERS = {"sgd": sgd(0.1), "momentum": momentum(0.01), "adam": adam(0.03)}
TAKEN = {
    f"{name} with {optimizer}": (entry, OPTIMIZERS[optimizer])
    for name, entry in TABLE.items()
    for optimizer in (OPTIMIZERS if name in ("QuAFL", "Calibrated", "FedAvg", "FedBuff") else ["sgd"])
}


def rows(run: Simulation) -> list[Row]:
    for _ in run:
        pass
    return run.rows


@pytest.mark.parametrize(("entry", "optimizer"), TAKEN.values(), ids=TAKEN.keys())
def test_finds_the_minimum_that_all_clients_share(entry: Entry, optimizer: Optimizer) -> None:
    algorithms.learns(entry.make(sampled=3, local_steps=4), entry.codec, optimizer)


@EACH
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_every_algorithm_keeps_the_contract(entry: Entry, check: algorithms.Check) -> None:
    check(entry.make(sampled=3, local_steps=3), entry.codec, sgd(0.1))


@EACH
@pytest.mark.parametrize("strange", algorithms.STRANGE)
def test_a_run_that_was_left_and_taken_up_again_has_the_same_rows(entry: Entry, strange: str) -> None:
    algorithms.resumes_in(strange, entry.make(sampled=3, patience=60.0), entry.codec, entry.suited(adam(0.02)))


@EACH_FILE
def test_learns_real_digits_from_clients_with_few_classes(name: str) -> None:
    entry = TABLE[name]
    torch.manual_seed(0)
    result = quafl.simulate(
        model=nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)),
        clients=partition.by_class(digits().train, 10, pieces=4),
        test=digits().test,
        algorithm=entry.make(lr=0.3, sampled=5, local_steps=5),
        codec=entry.codec,
        optimizer=sgd(0.3),
        until=400.0,
        evaluations=2,
    )
    assert result.rows[-1]["accuracy"] > 0.6
    assert isinstance(result.model, nn.Sequential)
    statistics = result.model[1].state_dict()
    assert statistics["running_mean"].abs().sum() > 0  # the buffers have travelled
    assert int(statistics["num_batches_tracked"]) == 0  # and the counters have not


@EACH_FILE
def test_a_network_with_batch_norm_and_dropout_is_taken_up_again_bit_for_bit(name: str) -> None:
    entry = TABLE[name]

    def fresh() -> Simulation:
        torch.manual_seed(0)
        layers = nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 10)
        task = Supervised(nn.Sequential(*layers), partition.by_class(digits().train, 6), test=digits().test)
        return simulation(
            task, 6, entry.make(sampled=3), entry.codec, entry.suited(momentum(0.05)), until=100.0, every=25.0
        )

    left, again = fresh(), fresh()
    for _ in zip(range(3), left, strict=False):
        pass
    again.restore(left.state())
    assert rows(again) == rows(fresh())


@EACH
def test_bytes_counted_are_the_bytes_of_the_messages(entry: Entry) -> None:
    wide = Lattice(bits=6, resolution=10.0)  # so wide that nothing needs a repair
    codec = wide if isinstance(entry.codec, Lattice) else entry.codec
    w = world(quadratic(6, dim=3000), 6, entry.make(sampled=3, patience=inf), codec=codec, latency=1.0)
    w.rounds(5)

    def octets(message: type[Message], way: Codec) -> int:
        """Of every vector that is declared."""
        one = len(wire.to_bytes(way.encode(torch.zeros(3000), torch.Generator())))
        return one * len(message.vectors())

    ways, records, totals = codec if isinstance(codec, Codecs) else (codec, codec), w.algorithm.records, w.fleet.totals
    silent = 0 if records.idle else totals.idle
    assert totals.up == (totals.contacts - silent) * octets(records.up, ways[0])
    asked = totals.contacts + totals.lost + len(w.fleet._traffic)
    assert totals.down == asked * octets(records.down, ways[1])


@EACH
def test_a_client_whose_progress_is_not_finite_is_named_once(entry: Entry, caplog: pytest.LogCaptureFixture) -> None:
    algorithms.survives_broken_clients(entry.make(sampled=3, local_steps=3), entry.codec, sgd(0.1))
    said = [record.getMessage() for record in caplog.records]
    assert sum("client 1, round" in text for text in said) == sum("client 2, round" in text for text in said) == 1


@EACH
def test_the_server_waits_for_somebody_when_nobody_is_there(entry: Entry) -> None:
    run = simulation(quadratic(2), 2, entry.make(sampled=2), entry.codec, absences=[Absence(0.0, 90.0)], every=1.0)
    assert rows(run)[1]["time"] >= 90


@EACH
def test_divergence_ends_the_run_and_keeps_the_rows_so_far(entry: Entry) -> None:
    run = simulation(quadratic(4), 4, entry.make(lr=1e25, sampled=2), entry.codec, sgd(1e25), every=10.0)
    with pytest.raises(Diverged, match=r"round \d+"):
        rows(run)
    assert len(run.rows) >= 1
    assert all(abs(row["loss"]) < inf for row in run.rows)


@EACH
def test_counts_below_one_are_refused(entry: Entry) -> None:
    for wrong in {"sampled": 0}, {"local_steps": 0}:
        with pytest.raises(ValueError, match="is 0, must be a whole number, at least 1"):
            entry.make(**wrong)


# By hand


def two(curvature: float = 2.0) -> Quadratic:
    """Minima at 0 and 4, start at 1."""
    return Quadratic(torch.tensor([curvature]), torch.tensor([[0.0], [4.0]]), start=torch.tensor([1.0]))


def test_fednova_divides_by_the_steps_and_multiplies_by_their_mean() -> None:
    """Client 1 is four times slower: τ = (4, 1). With η a = 1/2: x_0 = 1/16, x_1 = 4 − 3/2 = 5/2, so the directions
    are (15/16)/4 and −3/2, and x' = 1 − 5/2·(15/64 − 3/2)/2."""
    speeds = Constant(steady(torch.tensor([2.0, 8.0])))
    w = world(two(1.0), 2, FedNova(sampled=2, local_steps=4), lr=0.5, speeds=speeds, latency=1.0)
    state = w.rounds(1)[0]
    assert w.fleet.clients.everybody().pace.tolist() == [4, 1]
    assert state.model.item() == pytest.approx(1 - 2.5 * (15 / 64 - 1.5) / 2)
    assert w.clock.now() == 8.0 + 1.0
    assert w.fleet.totals.steps == 5


def sized(*sizes: int) -> Supervised:
    """One weight, with the minimum of client i's loss at i, and so many examples there."""
    hands = [(torch.ones(size, 1), torch.full((size, 1), float(client))) for client, size in enumerate(sizes)]
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    return Supervised(module, hands, loss=nn.functional.mse_loss, batch_size=max(sizes))


def test_clients_count_alike_or_by_their_examples() -> None:
    """η = ½: a step of the squared error leads to the client's own minimum, at 0, 1 and 2."""
    for weighted, mean in (False, 1.0), (True, (1 * 0 + 3 * 1 + 6 * 2) / 10):
        w = world(sized(1, 3, 6), 3, FedAvg(3, 1, weighted=weighted), lr=0.5)
        assert w.rounds(1)[-1].model.item() == pytest.approx(mean)
    heard = world(sized(1, 3, 6), 3, FedAvg(1, 1, weighted=True), lr=0.5)
    (alone,) = heard.rounds(1)
    assert alone.model.item() == pytest.approx(heard.came[-1].senders.item())
    assert heard.came[-1].up.examples.item() == (1, 3, 6)[heard.came[-1].senders.item()]


def test_with_a_defence_nobody_counts_for_much_more_than_is_usual() -> None:
    algorithm = FedAvg(3, 1, weighted=True, defence=Defence(clip=2.0))
    numbers = torch.tensor([5.0, 10.0, 2.0**40])
    assert algorithm.defence.usual_at_most(numbers).tolist() == [5.0, 10.0, 20.0]
    w = world(sized(4, 5, 500), 3, algorithm, lr=0.5)
    w.rounds(1)
    assert w.came[-1].up.examples.sort().values.tolist() == [4, 5, 500]


def test_a_task_that_does_not_count_its_examples_cannot_be_weighed() -> None:
    class Uncounted(Quadratic):
        examples = None

    with pytest.raises(ValueError, match=r"Uncounted, does not count them; give it a method examples\(client\)"):
        world(Uncounted(torch.ones(1), torch.zeros(2, 1)), 2, FedAvg(2, 1, weighted=True)).rounds(1)


def test_fednova_equals_fedavg_when_all_clients_are_as_fast() -> None:
    states = [world(two(1.0), 2, make(sampled=2), lr=0.1).rounds(4)[-1] for make in (FedNova, FedAvg)]
    torch.testing.assert_close(states[0].model, states[1].model)


def test_a_fednova_client_takes_at_least_one_step() -> None:
    clients = newcomers(FedNova(local_steps=5), torch.zeros(1), torch.empty(0), torch.tensor([1.0, 0.5, 0.3, 0.01]))
    assert clients.pace.tolist() == [5, 2, 2, 1]


def test_fedbuff_moves_by_displacements_against_what_each_client_started_from() -> None:
    """η a = 1: a step leads to the client's own minimum. Steps take 1 and 3; s = 1, no latency.

    t=1: client 0 started from 1, Δ = 1, x = 0. t=2: it started from 0, Δ = 0, x = 0. t=3: both are done, client 1 was
    asked first: it started from 1, Δ = −3, x = 3; then client 0, which started from 0: Δ = 0."""
    speeds = Constant(steady(torch.tensor([1.0, 3.0])))
    w = world(two(), 2, FedBuff(sampled=1, local_steps=1), lr=0.5, speeds=speeds)
    assert [state.model.item() for state in w.rounds(4)] == pytest.approx([0.0, 0.0, 3.0, 3.0])
    assert w.clock.now() == 3.0


def test_fedbuff_weighs_by_staleness_and_the_servers_rate() -> None:
    """As above; client 1's displacement is two rounds old: its weight is 1/√3."""
    speeds = Constant(steady(torch.tensor([1.0, 3.0])))
    w = world(two(), 2, FedBuff(sampled=1, local_steps=1, staleness=True, server_lr=0.5), lr=0.5, speeds=speeds)
    models = [state.model.item() for state in w.rounds(3)]
    assert models[0] == pytest.approx(1 - 0.5 * 1)
    assert models[1] == pytest.approx(0.5 - 0.5 * 0.5)
    assert models[2] == pytest.approx(0.25 + 0.5 * 3 / 3**0.5)


def test_fedbuff_waits_for_a_full_buffer_and_averages_it() -> None:
    speeds = Constant(steady(torch.tensor([1.0, 3.0])))
    w = world(two(), 2, FedBuff(sampled=3, local_steps=1), lr=0.5, speeds=speeds)
    first = w.rounds(1)[0]  # client 0 at 1 and 2, both times from 1; client 1 at 3
    assert first.model.item() == pytest.approx(1 - (1 + 1 - 3) / 3)
    assert w.clock.now() == 3.0


@pytest.mark.parametrize(
    "codec",
    [
        Lattice(bits=4, spread=6.0),
        Codecs(up=Lattice(bits=4, spread=6.0), down=Lattice(bits=8, spread=6.0)),
        Codecs(up=QSGD(bits=8), down=Lattice(bits=8, spread=6.0)),
    ],
    ids=["lattice", "lattice both ways", "lattice down"],
)
def test_fedbuff_learns_through_the_lattice_with_zero_and_the_clients_base_as_keys(codec: Codec | Codecs) -> None:
    """Far from the origin, where a wrong key would need a repair for every message: on the way up zero is near a
    displacement, on the way down the client's base is near the model."""
    far = quadratic(8, dim=2048)
    task = Quadratic(far.curvature, 100 + far.centers, start=100 + torch.zeros(2048))
    w = world(task, 8, FedBuff(sampled=3, local_steps=4), codec=codec, lr=0.1, latency=1.0)
    state = w.rounds(60)[-1]
    assert (state.model - task.minimum).norm() < 0.05 * (w.start.model - task.minimum).norm()
    assert w.fleet.totals.refined <= 0.05 * 2 * w.fleet.totals.contacts + 8  # the first messages down


def test_scaffold_leads_every_client_to_the_common_minimum_once_it_knows_the_gradients() -> None:
    """η a = 1 and K = 1: without a correction, a step leads to the client's own minimum.

    Round 1, c = c_0 = c_1 = 0: y = (0, 4), x = 2. Line 12: c_0 = (1 − 0)/(1·1/2) = 2, c_1 = (1 − 4)/(1/2) = −6, the
    gradients at 1. Line 17: c = (2 − 6)/2 = −2.
    Round 2: g_0 − c_0 + c = 4 − 2 − 2 = 0 and g_1 − c_1 + c = −4 + 6 − 2 = 0, so that y = (2, 2), x = 2: the minimum.
    c_0 = 2 + 2 + 0 = 4, c_1 = −6 + 2 + 0 = −4, the gradients at 2; c = −2 + ((4 − 2) + (−4 + 6))/2 = 0."""
    w = world(two(), 2, SCAFFOLD(sampled=2, local_steps=1, lr=0.5), lr=0.5)
    first = w.rounds(1)[0]
    assert (first.model.item(), first.control.item()) == pytest.approx((2.0, -2.0))
    assert w.fleet.clients.everybody().control.flatten().tolist() == pytest.approx([2.0, -6.0])
    second = w.rounds(1, first)[0]
    assert (second.model.item(), second.control.item()) == pytest.approx((2.0, 0.0))
    clients = w.fleet.clients.everybody()
    assert clients.control.flatten().tolist() == pytest.approx([4.0, -4.0])
    assert clients.common.flatten().tolist() == pytest.approx([-2.0, -2.0])  # as it was heard last


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_scaffold_equals_two_rounds_computed_by_hand(server_lr: float) -> None:
    """η a = 1/2 and K = 2, so that a displacement is divided by K η = 1/2. With η_g = 1:

    Round 1: y_0 = 1, 1/2, 1/4; y_1 = 1, 5/2, 13/4. x = (1/4 + 13/4)/2 = 7/4. c_0 = (3/4)/(1/2) = 3/2,
    c_1 = −(9/4)/(1/2) = −9/2, c = −3/2.
    Round 2, client 0: g − c_0 + c = 2 y − 3; y = 7/4, 13/8, 25/16; c_0 = 3/2 + 3/2 + (3/16)/(1/2) = 27/8. Client 1:
    2 (y − 4) + 9/2 − 3/2 = 2 y − 5; y = 7/4, 17/8, 37/16; c_1 = −9/2 + 3/2 − (9/16)/(1/2) = −33/8.
    x = (25/16 + 37/16)/2 = 31/16, c = −3/2 + ((27/8 − 3/2) + (−33/8 + 9/2))/2 = −3/8.

    With η_g = 1/2 the first round is the same but for x = 1 + (7/4 − 1)/2 = 11/8. Then y_0 = 11/8, 11/8 − (−1/4)/4 =
    23/16, 23/16 − (−1/8)/4 = 47/32 and y_1 = 11/8, 11/8 + (9/4)/4 = 31/16, 31/16 + (9/8)/4 = 71/32, so that the mean is
    59/32, x = 11/8 + (59/32 − 11/8)/2 = 103/64, c_0 = 3 − (3/32)·2 = 45/16, c_1 = −3 − (27/32)·2 = −75/16."""
    w = world(two(), 2, SCAFFOLD(sampled=2, local_steps=2, lr=0.25, server_lr=server_lr), lr=0.25)
    first = w.rounds(1)[0]
    assert first.model.item() == pytest.approx(7 / 4 if server_lr == 1 else 11 / 8)
    assert first.control.item() == pytest.approx(-3 / 2)
    assert w.fleet.clients.everybody().control.flatten().tolist() == pytest.approx([3 / 2, -9 / 2])
    second = w.rounds(1, first)[0]
    assert second.model.item() == pytest.approx(31 / 16 if server_lr == 1 else 103 / 64)
    theirs = [27 / 8, -33 / 8] if server_lr == 1 else [45 / 16, -75 / 16]
    assert w.fleet.clients.everybody().control.flatten().tolist() == pytest.approx(theirs)
    assert second.control.item() == pytest.approx(sum(theirs) / 2)


@pytest.mark.parametrize(
    ("sampled", "unreachable"), [(5, 0.0), (2, 0.0), (2, 0.4)], ids=["all", "some", "some do not answer"]
)
def test_scaffolds_common_control_is_the_mean_of_the_clients(sampled: int, unreachable: float) -> None:
    """c = Σ c_i/N: at first all are 0, and c moves by Σ Δc_i/N over those who answer, of all N there are."""
    task = quadratic(5, spread=1.0, noise=0.3)
    w = world(task, 5, SCAFFOLD(sampled=sampled, local_steps=3), latency=1.0, unreachable=unreachable)
    for state in islice(w.states(), 12):
        theirs = w.fleet.clients.everybody().control
        torch.testing.assert_close(state.control, theirs.mean(dim=0), atol=1e-5, rtol=0)
    assert state.control.norm() > 0
    assert (theirs.norm(dim=1) > 0).all()


def test_scaffolds_common_control_is_the_mean_whatever_comes_too_late_and_however_few_the_bits() -> None:
    """Client 2's step takes 12 until the time 40, and the server waits for 5. What was not applied, it does not
    remember either; and it remembers what the server has decoded."""
    speeds = Constant(Piecewise.of([[(0.0, 1.0)], [(0.0, 1.0)], [(0.0, 1 / 12), (40.0, 1.0)]]))
    task, algorithm = quadratic(3, dim=2000, spread=1.0, noise=0.3), SCAFFOLD(sampled=3, local_steps=1, patience=5.0)
    w = world(task, 3, algorithm, codec=Lattice(bits=3), speeds=speeds)
    for state in islice(w.states(), 20):
        theirs = w.fleet.clients.everybody().control
        torch.testing.assert_close(state.control, theirs.mean(dim=0), atol=1e-4, rtol=1e-4)
    assert w.fleet.totals.contacts <= 3 * 20 - 5
    assert (theirs.norm(dim=1) > 0.1).all()


@dataclass(frozen=True, slots=True)
class Uneven(Quadratic):
    """f_i(x) = ½ a_i (x − c_i)², in one dimension: steep for some clients, flat for others."""

    steepness: Tensor = field(default_factory=lambda: torch.ones(1))  # a_i

    @property
    def minimum(self) -> Tensor:
        return (self.steepness * self.centers[:, 0]).sum(dim=0, keepdim=True) / self.steepness.sum()

    def gradient(self, model: Tensor, buffers: Tensor, batch: tuple[int, Tensor]) -> tuple[Tensor, Tensor]:
        client, noise = batch
        return self.steepness[client] * (model - self.centers[client]) + noise, buffers


def test_scaffold_ends_at_the_minimum_where_fedavg_drifts_away_from_it() -> None:
    """Client i of FedAvg goes from x to c_i + (1 − η a_i)^K (x − c_i), so that x rests at the mean of the c_i with
    weights 1 − (1 − η a_i)^K. The minimum of Σ f_i is their mean with weights a_i. With a = (1, 9), c = (0, 4),
    η = 0.1 and K = 10: 2.42 in place of 3.6. SCAFFOLD rests where c_i is the gradient at x, and c = 0."""
    steepness, centers = torch.tensor([1.0, 9.0]), torch.tensor([[0.0], [4.0]])
    task = Uneven(torch.ones(1), centers, steepness=steepness)
    pulls = 1 - (1 - 0.1 * steepness) ** 10
    drifted = float((pulls * centers[:, 0]).sum() / pulls.sum())
    assert (task.minimum.item(), drifted) == pytest.approx((3.6, 2.42), abs=0.01)
    average = world(task, 2, FedAvg(sampled=2, local_steps=10), lr=0.1).rounds(300)[-1]
    assert average.model.item() == pytest.approx(drifted, abs=1e-4)
    w = world(task, 2, SCAFFOLD(sampled=2, local_steps=10, lr=0.1), lr=0.1)
    controlled = w.rounds(300)[-1]
    assert controlled.model.item() == pytest.approx(3.6, abs=1e-3)
    assert controlled.control.item() == pytest.approx(0.0, abs=1e-3)
    assert w.fleet.clients.everybody().control.flatten().tolist() == pytest.approx([3.6, -3.6], abs=1e-2)


def test_scaffold_keeps_what_it_has_over_fedavg_through_the_lattice() -> None:
    """The server hears Q(Δc_i), and the client adds Δc_i: with 8 bits, what adds up in c is small beside the drift."""
    centers = 1 + torch.randn(20, 256, generator=torch.Generator().manual_seed(3))
    task = Quadratic(torch.linspace(0.2, 1, 256), centers)
    away = {}
    for algorithm in SCAFFOLD(sampled=5), FedAvg(sampled=5):
        w = world(task, 20, algorithm, codec=Lattice(bits=8), lr=0.1)
        last = torch.stack([state.model for state in w.rounds(150)[-50:]])
        away[type(algorithm)] = float((last - task.minimum).norm(dim=1).mean())
    assert away[SCAFFOLD] < 0.1 * away[FedAvg]


def test_fedasync_mixes_in_what_arrives_the_less_the_staler_it_is() -> None:
    """η a = 1: a step leads to the client's own minimum, 0 or 4. Steps take 1 and 3; no latency; α = 1/2, a = 1/2.

    t=1: client 0, not stale: x = 1/2·1 = 1/2. t=2: the same, x = 1/4. t=3: both are done, client 1 was asked first, two
    rounds ago: α_3 = 1/2·3^(−1/2), x = 1/4 + α_3·(4 − 1/4). Then client 0, one round ago: α_4 = 1/2·2^(−1/2),
    x = (1 − α_4) x."""
    speeds = Constant(steady(torch.tensor([1.0, 3.0])))
    w = world(two(), 2, FedAsync(sampled=2, local_steps=1, mixing=0.5, staleness=0.5), lr=0.5, speeds=speeds)
    third = 1 / 4 + 0.5 / 3**0.5 * (4 - 1 / 4)
    models = [state.model.item() for state in w.rounds(4)]
    assert models == pytest.approx([1 / 2, 1 / 4, third, (1 - 0.5 / 2**0.5) * third])
    assert w.clock.now() == 3.0
    plain = world(two(), 2, FedAsync(sampled=2, local_steps=1, mixing=1.0, staleness=0.0), lr=0.5, speeds=speeds)
    assert [state.model.item() for state in plain.rounds(4)] == pytest.approx([0.0, 0.0, 4.0, 0.0])  # replaced


def test_a_fedasync_client_is_pulled_to_what_it_started_from() -> None:
    """K = 2, η a = 1/2, ρ = 1, α = 1: g = 2 y + ρ (y − 1). y = 1, 1 − 2/4 = 1/2, 1/2 − (1 − 1/2)/4 = 3/8; without ρ,
    it would be 1/4."""
    for proximity, model in (1.0, 3 / 8), (0.0, 1 / 4):
        algorithm = FedAsync(sampled=1, local_steps=2, mixing=1.0, proximity=proximity)
        w = world(Quadratic(torch.tensor([2.0]), torch.zeros(1, 1), start=torch.ones(1)), 1, algorithm, lr=0.25)
        assert w.rounds(1)[0].model.item() == pytest.approx(model)


def test_a_stale_reply_is_decoded_with_the_model_that_its_sender_was_sent() -> None:
    """Far from the origin; and while the slow client takes its step, the server goes ten times as far as that client
    does, which the lattice does not reach: any other key than the model that was sent would need a repair."""
    start = 990 + torch.zeros(2048)
    centers = 1000 + torch.randn(6, 2048, generator=torch.Generator().manual_seed(7))
    speeds = Constant(steady(torch.tensor([1.0] * 5 + [30.0])))
    task = Quadratic(torch.ones(2048), centers, start=start)
    codec = Codecs(up=Lattice(bits=6, spread=6.0), down=Identity())
    w = world(task, 6, FedAsync(local_steps=1), codec=codec, lr=0.02, speeds=speeds, latency=0.1)
    models = [start, *(state.model for state in w.rounds(320))]
    late = [(now, reply) for now, reply in enumerate(w.came) if reply.senders.tolist() == [5]]
    assert len(late) == 2
    for now, reply in late:
        sent = models[int(reply.round)]
        assert now - int(reply.round) > 100
        assert (models[now] - sent).norm() > 10 * (reply.up.model[0] - sent).norm() > 0
        said = sent - 0.02 * (sent - centers[5])
        assert (reply.up.model[0] - said).norm() < 0.1 * (said - sent).norm()
    assert w.fleet.totals.refined == 0


def reports(make: Callable[..., Algorithm], codec: Codecs) -> tuple[Tensor, Tensor]:
    """What four clients say, as the server decodes it, and what they have said. η a = 1 and K = 1: each reports its own
    minimum, whatever it has heard. The model is about 100 times as long as what is new in a report."""
    generator = torch.Generator().manual_seed(0)
    start = 100 * torch.randn(2048, generator=generator)
    task = Quadratic(torch.ones(2048), start + torch.randn(4, 2048, generator=generator), start=start)
    w = world(task, 4, make(sampled=4, local_steps=1), codec=codec, lr=1.0, latency=1.0)
    w.rounds(3)  # before the second, QuAFL's clients have made no step; before the third, nobody knows a distance
    (vector,) = w.algorithm.records.up.vectors()
    return getattr(w.came[-1].up, vector.name), task.centers[w.came[-1].senders]


@pytest.mark.parametrize("make", [QuAFL, FedAvg])
@pytest.mark.parametrize("down", [Identity(), QSGD(bits=12), Lattice(bits=4)], ids=["exact", "qsgd", "lattice"])
def test_a_difference_to_what_both_know_is_coded_more_finely_than_a_model(
    make: Callable[..., Algorithm], down: Codec
) -> None:
    errors = [
        torch.dist(*reports(make, Codecs(up=QSGD(bits=6, difference=difference), down=down)))
        for difference in (True, False)
    ]
    assert 0 < errors[0] < 0.03 * errors[1]


@pytest.mark.parametrize("make", [QuAFL, FedAvg])
@pytest.mark.parametrize("down", [QSGD(bits=4), Lattice(bits=2)], ids=["qsgd", "lattice"])
def test_a_difference_is_added_to_what_the_client_has_heard_however_coarse_that_was(
    make: Callable[..., Algorithm], down: Codec
) -> None:
    heard, said = reports(make, Codecs(up=QSGD(bits=16, difference=True), down=down))
    torch.testing.assert_close(heard, said, atol=0.003, rtol=0)


def test_the_servers_link_carries_s_exchanges_at_a_time_in_order_of_arrival() -> None:
    """Six clients are ready at 1; with s = 2 and exchanges of 10, two arrive at 11, two at 21, two at 31."""
    busy = world(quadratic(6), 6, FedBuff(sampled=2, local_steps=1), latency=10.0)
    free = world(quadratic(6), 6, FedBuff(sampled=2, local_steps=1), latency=10.0, limited=False)
    for w, times in (busy, [11.0, 21.0, 31.0]), (free, [11.0, 11.0, 11.0]):
        assert [w.clock.now() for _ in islice(w.states(), 3)] == times


def time_of_round(round: int, algorithm: FedBuff, **changes: Any) -> float:
    w = world(quadratic(8), 8, algorithm, latency=1.0, **changes)
    next(state for state in w.states() if state.round == round)
    return w.clock.now()


def test_fedbuff_asks_silent_clients_again() -> None:
    """Three contacts in ten are lost: a server of endless patience works with fewer and fewer until nobody is left."""
    patient, impatient = FedBuff(sampled=2, local_steps=1), FedBuff(sampled=2, local_steps=1, patience=6.0)
    assert time_of_round(60, impatient, unreachable=0.3) < 0.8 * time_of_round(60, patient, unreachable=0.3)
    assert time_of_round(60, impatient) == time_of_round(60, patient)


def test_a_fedbuff_client_that_is_asked_again_starts_anew() -> None:
    """It needs 10 for a step: asked again every 4, it never gets there, and every 30, it answers at 10, 20, 30."""
    for patience, rounds in (4.0, 0), (30.0, 3), (inf, 3):
        w = world(quadratic(1), 1, FedBuff(sampled=1, local_steps=1, patience=patience), speeds=10.0)
        assert next(state for state in w.states() if w.clock.now() >= 30).round == rounds


@pytest.mark.parametrize("never", [{"unreachable": 1.0}, {"absences": [Absence(50.0, inf)]}], ids=["lost", "gone"])
@EACH
def test_a_run_ends_although_nobody_answers_any_more(entry: Entry, never: dict[str, Any]) -> None:
    run = simulation(quadratic(2), 2, entry.make(sampled=2), entry.codec, until=120.0, every=30.0, **never)
    try:
        reached = rows(run)
    except ValueError as error:  # when everybody has gone for good, nothing can make the time pass
        assert "let somebody be there" in str(error)  # noqa: PT017
    else:
        assert reached[-1]["contacts"] < 60


def test_buffers_that_fill_at_the_same_time_are_rounds_of_their_own() -> None:
    changes: dict[str, Any] = {"step_law": "constant", "slow": 0.0, "link_limited": False}
    run = simulation(quadratic(6), 6, FedBuff(sampled=2, local_steps=1), QSGD(bits=8), until=30.0, **changes)
    assert rows(run)[-1]["round"] >= 3


def test_the_best_model_is_the_one_with_the_least_loss_or_error() -> None:
    run = simulation(quadratic(4, noise=0.5), 4, QuAFL(sampled=2), Lattice(bits=8), until=300.0, every=10.0)
    reached = rows(run)
    best = min(reached, key=lambda row: row["loss"])
    assert run.best.round == best["round"] > 0
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    result = quafl.simulate(
        model=nn.Linear(2, 1),
        clients=[(x, x.sum(dim=1, keepdim=True))] * 2,
        algorithm=FedAvg(sampled=2),
        loss=functional.mse_loss,
        metrics={"mae": functional.l1_loss},
        lower_is_better=True,
        until=300.0,
    )
    error = functional.l1_loss(result.best(x), x.sum(dim=1, keepdim=True)).item()
    assert error == pytest.approx(min(row["mae"] for row in result.rows), abs=1e-6)


def test_a_state_is_a_snapshot() -> None:
    def fresh() -> Simulation:
        return simulation(quadratic(6, noise=0.3), 6, FedBuff(sampled=3), QSGD(bits=8), until=200.0)

    first, second = fresh(), fresh()
    for _ in zip(range(4), first, strict=False):
        pass
    kept = first.state()
    straight = rows(first)
    second.restore(kept)
    assert rows(second) == straight


def test_steps_and_octets_count_when_they_arrive() -> None:
    """Twenty clients train all the time; after a round of five answers, five count."""
    w = world(quadratic(20), 20, FedBuff(sampled=5, local_steps=3), latency=1.0)
    w.rounds(1)
    message = len(wire.to_bytes(Identity().encode(torch.zeros(30))))
    assert (w.fleet.totals.contacts, w.fleet.totals.steps, w.fleet.totals.up) == (5, 15, 5 * message)


def test_adam_sends_displacements_not_gradients() -> None:
    """The first step of Adam moves every coordinate by lr, whatever the gradient's size."""
    for make in FedAvg, FedNova, FedBuff:
        task = Quadratic(torch.tensor([1.0, 1000.0]), torch.ones(2, 2))
        w = world(task, 2, make(sampled=2, local_steps=1), optimizer=adam(0.01))
        torch.testing.assert_close(w.rounds(1)[0].model, torch.full((2,), 0.01))
    w = world(Quadratic(torch.tensor([1.0, 1000.0]), torch.ones(2, 2)), 2, QuAFL(2, 1, wait=1.0), optimizer=adam(0.01))
    torch.testing.assert_close(w.rounds(1)[0].model, torch.full((2,), 0.01 * 2 / 3))
    task = Quadratic(torch.tensor([1.0, 1000.0]), torch.ones(2, 2))
    w = world(task, 2, FedAsync(local_steps=1, mixing=0.5), optimizer=adam(0.01))
    torch.testing.assert_close(w.rounds(1)[0].model, torch.full((2,), 0.01 * 0.5))


def test_buffers_are_averaged_by_every_server() -> None:
    data = digits().train
    task = Supervised(nn.Sequential(nn.Linear(64, 10), nn.BatchNorm1d(10)), partition.iid(data, 3))
    everybody = [0, 1, 2]
    table: list[tuple[Algorithm, list[int]]] = [
        *((make(3, 2), everybody) for make in (FedAvg, FedNova, SCAFFOLD)),
        (FedBuff(1, 2), [0]),
    ]
    for algorithm, answering in table:
        w = world(task, 3, algorithm)
        state = w.rounds(1)[0]
        theirs = w.fleet.clients[torch.tensor(answering)].buffers
        torch.testing.assert_close(state.buffers, theirs.mean(dim=0))
    w = world(task, 3, FedAsync(1, 2, mixing=0.25))
    state = w.rounds(1)[0]
    theirs = w.fleet.clients[torch.tensor([0])].buffers[0]
    torch.testing.assert_close(state.buffers, 0.75 * w.start.buffers + 0.25 * theirs)


def test_nobody_moves_while_nobody_has_time() -> None:
    w = world(quadratic(3), 3, QuAFL(sampled=3), speeds=NEVER, latency=1.0)
    assert torch.equal(w.rounds(5)[-1].model, w.start.model)


def test_looking_at_a_run_does_not_change_it_even_if_clients_are_broken() -> None:
    """The local steps behind answers under way are computed when somebody asks; nothing else may depend on it."""
    train = digits().train
    hands = partition.iid(train, 8)
    hands[2], hands[5] = ((inputs * torch.nan, targets) for inputs, targets in (hands[2], hands[5]))

    def run(*, looking: bool) -> list[dict[str, float]]:
        torch.manual_seed(0)
        task = Supervised(nn.Linear(64, 10), hands, test=digits().test, batch_size=16)
        made = simulation(task, 8, FedBuff(sampled=3), QSGD(bits=8), sgd(0.1), until=150.0, every=10.0)
        for _ in made:
            if looking:
                made.state()
        return [{name: value for name, value in row.items() if name != "train_loss"} for row in made.rows]  # it is NaN

    rows = run(looking=False)
    assert rows == run(looking=True)
    assert rows[-1]["broken_replies"] > 0


def test_a_client_keeps_nothing_alive_but_its_own_state() -> None:
    made = simulation(quadratic(30, noise=0.3), 30, FedBuff(sampled=3), QSGD(bits=8), momentum(0.02), until=200.0)
    list(made)
    for row in made._fleet.clients._known.values():
        for tensor in row:
            assert tensor.untyped_storage().nbytes() <= tensor.nbytes
