"""Evaluation where the data are: clients judge the server's model, and are given the last one."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import PROMPT, federation
from parties import free_port
from safetensors.torch import load_file
from stages import PATIENT, Puppet, Stage, problem
from torch import nn
from torch.nn import functional
from waiting import wait_for

import quafl
from quafl.codec import Lattice
from quafl.codec.seams import WireError
from quafl.core.judgement import across, judged, weighted
from quafl.core.optim import sgd
from quafl.core.quafl import QuAFL
from quafl.core.seams import Totals
from quafl.deploy import provision
from quafl.deploy.server import Goals
from quafl.protocol.judging import Judgement, score_from, score_to_bytes
from quafl.protocol.messages import Evaluate, Evaluated, as_text, model_from, to_bytes
from quafl.protocol.server import ServerSide
from quafl.record import report
from quafl.record.evaluations import Evaluations
from quafl.record.summary import read_curve
from quafl.tasks import Quadratic

X = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def stage() -> Stage:
    limits = replace(PATIENT, judge_seconds=5.0)
    return Stage(QuAFL(sampled=1, local_steps=3, patience=60.0), Lattice(bits=4), sgd(0.2), limits)


class Unwilling(Quadratic):
    """It fails at judging."""

    __slots__ = ()

    def judge(self, client: int, model: Any, buffers: Any) -> Any:
        raise ValueError("its data are locked")


class Silent(Quadratic):
    """It has nothing to judge by."""

    __slots__ = ()

    def judge(self, client: int, model: Any, buffers: Any) -> Any:
        return None


def test_clients_say_how_good_the_model_is_on_their_own_data_and_go_on_training() -> None:
    made = stage()
    tasks = {"a": problem(1.0), "b": problem(2.0)}
    parties = {name: made.join(name, task, step_seconds=1.0) for name, task in tasks.items()}
    for _ in range(4):
        made.round()
    model = made.machine.server.model.clone()
    made.server.do(lambda machine: machine.judge(model, torch.empty(0), 2))
    made.round()  # goes on meanwhile
    made.until(lambda: made.machine.judgement.is_over)
    scores = made.machine.judgement.scores
    assert scores == {
        name: judged(task, 0, model, torch.empty(0), optimizer=sgd(0.2), personal_steps=2)
        for name, task in tasks.items()
    }
    assert scores["a"]["personal_loss"] < scores["a"]["loss"]
    before = [int(party.machine.client.steps) for party in parties.values()]
    made.run(5.0)
    assert all(int(p.machine.client.steps) > b for p, b in zip(parties.values(), before, strict=True))


def test_who_cannot_judge_says_why_and_nobody_waits_for_who_is_not_there() -> None:
    made = stage()
    made.join("a", problem())
    made.join("locked", Unwilling(torch.ones(3000), torch.ones(1, 3000)))
    made.join("silent", Silent(torch.ones(3000), torch.ones(1, 3000)))
    made.join("gone", problem())
    made.parties["gone"] = Puppet(lambda octets: None)
    made.server.do(lambda machine: machine.judge(machine.server.model, machine.server.buffers))
    began = made.now
    made.until(lambda: made.machine.judgement.is_over)
    assert made.now == began + 5.0
    assert set(made.machine.judgement.scores) == {"a"}
    said = "; ".join(made.server.said)
    assert "locked does not judge the model: 'this client cannot judge a model (its data are locked)'" in said
    assert "gone has not judged the model: did not answer in time" in said
    assert "silent" not in said.split("judge", 1)[1]


@pytest.mark.parametrize("comes_back", [True, False])
def test_after_a_restart_those_who_were_there_are_waited_for_as_long_as_one_may_be_silent(comes_back: bool) -> None:
    made = stage()
    made.join("a"), made.join("b")
    made.round()
    b = made.kill("b")
    made.restart_server(made.checkpoint())
    found: list[Judgement] = []

    def judge(machine: ServerSide) -> None:
        found.extend(filter(None, [machine.judge(machine.server.model, machine.server.buffers)]))

    made.server.do(judge)
    made.until(lambda: made.live() == ["a"])
    made.server.do(judge)
    assert not found
    if comes_back:
        b.alive, made.parties["b"] = True, b
        made.hello_again("b")
    else:
        made.run(PATIENT.silence)
    made.server.do(judge)
    assert found[0].waiting == ({"a", "b"} if comes_back else {"a"})


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"loss": "low", "examples": 3}, "judges the model by 'loss' = 'low', must be a finite number"),
        ({"loss": float("nan"), "examples": 3}, "must be a finite number"),
        ({"loss": True, "examples": 3}, "must be a finite number"),
        ({"loss": 10**400, "examples": 3}, "must be a finite number"),
        ({"loss": 1.0}, "judges by 0 examples"),
        ({"loss": 1.0, "examples": 10**12}, "judges by 1000000000000 examples, must be from 1 to"),
        ({"x" * 200: 1.0, "examples": 1}, "with short names"),
    ],
)
def test_a_score_that_cannot_be_is_not_believed(said: dict[str, Any], why: str) -> None:
    with pytest.raises(WireError, match=why):
        score_from(as_text(said))
    made = stage()
    made.join("liar", problem())

    def lying(octets: bytes) -> bytes | None:
        message = made.heard[-1].message
        return to_bytes(Evaluated(message.ticket, as_text(said))) if isinstance(message, Evaluate) else None

    made.parties["liar"] = Puppet(lying)
    made.server.do(lambda machine: machine.judge(machine.server.model, machine.server.buffers))
    made.until(lambda: made.machine.judgement.is_over)
    assert not made.machine.judgement.scores
    assert "liar" in made.server.said[-1]
    assert made.machine.members["liar"].faults == 0  # nobody is left out of the training for that


def test_measures_that_are_no_numbers_are_left_out() -> None:
    assert score_from(score_to_bytes({"loss": float("nan"), "examples": 3.0})) == {"examples": 3}
    assert score_from(score_to_bytes({"loss": 1.0, "f1": float("nan"), "examples": 3.0})) == {
        "loss": 1.0,
        "examples": 3,
    }
    assert score_from(score_to_bytes(None)) is None


def test_a_model_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(WireError, match="a model has 8 octets, expected 12"):
        model_from(bytes(8), 2, 1)
    with pytest.raises(WireError, match="not finite"):
        model_from(torch.tensor([1.0, torch.nan]).numpy().tobytes(), 2, 0)


def test_scores_of_clients_come_to_their_mean_spread_tenth_and_worst() -> None:
    scores = [{"loss": float(k), "accuracy": k / 10, "examples": 1.0 + 9 * (k == 0)} for k in range(11)]
    found = across(scores)
    assert found["accuracy_clients_mean"] == pytest.approx(0.5)
    assert found["accuracy_clients_weighted"] == pytest.approx(5.5 / 20)
    assert found["accuracy_clients_p10"] == pytest.approx(0.1)
    assert found["accuracy_clients_worst"] == 0.0
    assert found["accuracy_clients_spread"] == pytest.approx(0.1**0.5)
    assert weighted(scores)["loss"] == pytest.approx(55 / 20)


def test_who_answers_first_does_not_decide_what_is_measured() -> None:
    both = {"loss": 1.0, "accuracy": 0.5, "examples": 2.0}
    for odd in {"loss": 9.0, "examples": 1.0}, {"examples": 1.0}, {**both, "f1": 0.1}, {**both, "accuracy": nan}:
        found = across([odd, both, both])
        assert found["accuracy_clients_mean"] == 0.5
        assert "f1_clients_mean" not in found  # of a lone one
    assert weighted([{"loss": 3.0, "examples": 1.0}, both])["loss"] == pytest.approx(5 / 3)


def test_what_clients_say_does_not_end_a_run_and_takes_no_column_of_others() -> None:
    task = quafl.Local(nn.Linear(4, 2)).build()
    state = QuAFL().start(*task.initial())
    made = Evaluations(task, state, every=1.0, seed=0, metric="accuracy", lower_is_better=False, trains=False)
    fine = {"loss": 0.7, "accuracy": 0.5, "round": 77.0, "examples": 2.0}
    first = made.conclude(made.begin(Totals()), {"a": fine, "b": fine})
    assert (first["round"], first["accuracy"], first["clients_judging"]) == (0, 0.5, 2)
    huge = {"loss": 1e29, "accuracy": 0.5, "examples": 1e9}
    assert made.conclude(made.begin(Totals()), {"a": fine, "liar": huge})["clients_judging"] == 2
    assert "loss" not in made.conclude(made.begin(Totals()), {})
    with pytest.raises(ValueError, match="does not say by how many examples"):
        judged(Counting(torch.ones(2), torch.ones(1, 2)), 0, torch.ones(2), torch.empty(0), optimizer=sgd(0.1))


class Counting(Quadratic):
    """It forgets to."""

    __slots__ = ()

    def judge(self, client: int, model: Any, buffers: Any) -> Any:
        return {"loss": torch.tensor(0.5)}


def brought(name: str) -> quafl.Local:
    """The server has a model and no data, a client keeps a third of its own apart."""
    if name == "server":
        return quafl.Local(nn.Linear(4, 2))
    part = {"north": slice(0, 30), "south": slice(30, 90)}[name]
    return quafl.Local(nn.Linear(4, 2), (X[part], Y[part]), held_out=1 / 3, batch_size=10)


def test_a_server_without_data_sees_how_good_the_model_is_at_its_clients_who_are_given_the_last_one(
    tmp_path: Path,
) -> None:
    provision.init(tmp_path, f"localhost:{free_port()}", ["north", "south"])
    settings = {
        "clients": {"start_with": 2},
        "algorithm": {"name": "quafl", "sampled": 2, "lr": 0.5, "wait": 0.01, "patience": 20.0},
        "run": {"rounds": 20, "every": 0.1, "personal_steps": 2},
    }
    kits = {name: tmp_path / "clients" / name for name in ("north", "south")}
    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(quafl.join, kit, task=brought, step_seconds=0.001) for kit in kits.values()]
        served = quafl.serve(tmp_path / "server", settings, task=brought("server"))
        assert [client.result(60.0) for client in clients] == [True, True]
    first, last = served.rows[0], served.rows[-1]
    assert last["loss"] < first["loss"]
    assert last["accuracy"] == pytest.approx(last["accuracy_clients_weighted"])
    assert last["accuracy_clients_worst"] <= last["accuracy_clients_mean"]
    assert last["accuracy_personal_mean"] > 0
    assert last["bytes_judging"] > 2 * 2 * 4 * 10  # two evaluations at least, of ten numbers, by two clients
    for kit in kits.values():
        final = load_file(kit / "state" / "model.safetensors")
        assert final.keys() == served.last.keys()
        assert all(torch.equal(final[name], served.last[name]) for name in final)
    model = nn.Linear(4, 2)
    model.load_state_dict(served.last)
    parts = [brought(name).parts()[1] for name in kits]
    with torch.no_grad():
        losses = [float(functional.cross_entropy(model(x), y, reduction="sum")) for x, y in parts]
    loss = sum(losses) / sum(len(y) for _, y in parts)
    assert last["loss"] == pytest.approx(loss, rel=1e-4)


class Slow(Quadratic):
    """It takes its time to judge."""

    __slots__ = ()

    def judge(self, client: int, model: Any, buffers: Any) -> Any:
        time.sleep(0.6)
        return super().judge(client, model, buffers)


@pytest.mark.parametrize("rounds", [2, 1000], ids=["at the end", "in the middle"])
def test_an_evaluation_that_a_stop_has_interrupted_is_made_by_the_next_process(rounds: int, tmp_path: Path) -> None:
    goals = Goals(rounds=rounds, every=0.3, checkpoint_seconds=0.0)

    def site(center: float) -> Slow:
        return Slow(torch.ones(3), torch.full((1, 3), center))

    start, limits = site(1.0), replace(PROMPT, start_with=2)
    with federation(tmp_path, QuAFL(sampled=2, local_steps=2, wait=0.02), quafl.Identity(), sgd(0.2), limits) as made:
        run = made.coordinator(Unjudging(start), goals)
        for number in range(2):
            made.join(f"client-{number}", site(1.0 + number), step_seconds=0.001)
        pool = ThreadPoolExecutor(1)
        done = pool.submit(run.run)
        wait_for(lambda: run._pending is not None and run.evaluations.rows and run._judgement is not None)
        made.stop.set()
        assert done.result(20.0) is False  # it has not ended
        before = [row["round"] for row in run.evaluations.rows]
        again = made.coordinator(Unjudging(start), goals)
        done = pool.submit(again.run)
        wait_for(lambda: len(again.evaluations.rows) > len(before))
        row = again.evaluations.rows[len(before)]
        assert row["clients_judging"] == 2
        assert row["loss"] > 0
        made.stop.set()
        done.result(20.0)
        pool.shutdown()


class Unjudging(Quadratic):
    """A server's, without data."""

    __slots__ = ()
    has_test = False

    def __init__(self, other: Quadratic) -> None:
        super().__init__(other.curvature, other.centers, start=other.start)

    def evaluate(self, model: Any, buffers: Any) -> Any:
        return {}


@pytest.mark.parametrize(
    "device",
    [
        "auto",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
    ],
)
def test_a_client_trains_and_judges_on_a_device_of_its_own(device: str, tmp_path: Path) -> None:
    """The server is on the CPU, and so is the other client."""
    provision.init(tmp_path, f"localhost:{free_port()}", ["north", "south"])
    settings = {
        "clients": {"start_with": 2},
        "algorithm": {"name": "calibrated", "sampled": 1, "lr": 0.5, "wait": 0.05, "patience": 20.0},
        "run": {"rounds": 10, "every": 0.2},
    }

    def there(name: str) -> quafl.Local:
        return replace(brought(name), device=device, precision="bfloat16") if name == "north" else brought(name)

    with ThreadPoolExecutor(2) as pool:
        clients = [
            pool.submit(quafl.join, tmp_path / "clients" / name, task=there, step_seconds=0.001)
            for name in ("north", "south")
        ]
        served = quafl.serve(tmp_path / "server", settings, task=brought("server"))
        assert [client.result(60.0) for client in clients] == [True, True]
    assert served.rows[-1]["loss"] < served.rows[0]["loss"]
    scores = read_curve(tmp_path / "server" / "run").clients[0]
    assert set(scores) == {"north", "south"}


def test_the_simulation_says_the_same_columns_and_the_report_shows_each_client(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "model": nn.Linear(4, 2),
        "clients": [(X[:30], Y[:30]), (X[30:], Y[30:])],
        "algorithm": quafl.QuAFL(sampled=2),
        "until": 40,
        "evaluations": 2,
        "held_out": 1 / 3,
        "personal_steps": 2,
        "out": tmp_path,
    }
    result = quafl.simulate(**given)
    row = result.rows[-1]
    assert {f"accuracy_clients_{name}" for name in ("mean", "weighted", "spread", "p10", "worst")} <= row.keys()
    assert row["accuracy"] == pytest.approx(row["accuracy_clients_weighted"])
    assert "accuracy_personal_mean" in row
    mine = result.clients[0]
    assert set(mine) == {"0", "1"}
    assert mine["1"]["examples"] == 20
    assert min(score["accuracy"] for score in mine.values()) == pytest.approx(row["accuracy_clients_worst"])
    assert quafl.simulate(**given).clients == result.clients  # read from the folder
    page = report.page([read_curve(tmp_path)])
    assert "At the clients" in page
    assert f"<td>{mine['1']['personal_accuracy']:.4f}</td>" in page
