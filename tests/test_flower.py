"""Our messages and algorithms in Flower."""

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'quafl[flower]'")

from flowers import Here, octets
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import arrays_size_mod, message_size_mod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, FedMedian, Strategy

from quafl import SCAFFOLD, Calibrated, FedAsync, FedBuff, QuAFL
from quafl import FedAvg as OurFedAvg
from quafl.bridges.flower import Compressed, CompressedGrid, Federated, quafl_mod

EXAMPLE = Path(__file__).parents[1] / "examples" / "flower"
SIZE = 40 * 100 + 96
ALL: dict[str, Any] = {"fraction_evaluate": 0.0}


def zeros(**more: torch.Tensor) -> ArrayRecord:
    return ArrayRecord({"w": torch.zeros(40, 100), "b": torch.zeros(96), **more})


def towards(message: Message, context: Context) -> Message:
    """Half of the way to a point of the client's own."""
    state = message.content["arrays"].to_torch_state_dict()
    goal = float(context.node_config["partition-id"])
    for name, tensor in state.items():
        trained = tensor.dtype in (torch.float32, torch.float16)
        state[name] = tensor + (0.5 * (goal - tensor)).to(tensor.dtype) if trained else torch.tensor(int(tensor) + 1)
    metrics = MetricRecord({"num-examples": 1, "loss": float(state["b"].float().mean())})
    return Message(RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=message)


def to_own(message: Message, context: Context) -> Message:
    """A tenth of the way to a random point of the client's own."""
    (model,) = message.content["arrays"].to_torch_state_dict().values()
    goal = torch.randn(model.shape, generator=torch.Generator().manual_seed(context.node_id))
    metrics = MetricRecord({"num-examples": 1})
    arrays = ArrayRecord({"w": torch.lerp(model, goal, 0.1)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def judged(message: Message, context: Context) -> Message:
    """How far the model is from 2."""
    state = message.content["arrays"].to_torch_state_dict()
    metrics = MetricRecord({"num-examples": 1, "off": float((state["w"] - 2).abs().mean())})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def app(*mods: Any, train: Any = towards) -> ClientApp:
    made = ClientApp(mods=list(mods))
    made.train()(train)
    made.evaluate()(judged)
    return made


def run(strategy: Strategy, grid: Any, initial: ArrayRecord | None = None, rounds: int = 6) -> dict[str, torch.Tensor]:
    start = zeros() if initial is None else initial
    return dict(strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds).arrays.to_torch_state_dict())


def reasons(grid: Here) -> list[str]:
    return [str(said.error.reason) for said in grid.said if said.has_error()]


# In few bits, whatever the strategy


def test_two_lines_make_a_plain_app_send_an_eighth_after_the_first_model() -> None:
    start = ArrayRecord({"w": torch.zeros(256, 256)})
    plain, few = Here(app(train=to_own), 5), Here(app(quafl_mod(), train=to_own), 5)
    full = run(FedAvg(**ALL), plain, start)
    mine = run(Compressed(FedAvg(**ALL), bits=4), few, start)
    assert float((mine["w"] - full["w"]).norm() / full["w"].norm()) < 0.1
    assert octets(few.told[0]) > octets(plain.told[0])
    assert octets(few.told[-1]) < octets(plain.told[-1]) / 7.8
    assert few.up < plain.up / 7.8


def test_the_original_and_ours_learn_digits_alike_and_ours_in_a_fifth_of_the_octets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    example = the_example(monkeypatch)
    reached, sent = {}, {}
    for name, (strategy, client) in example.APPS.items():
        random.seed(0)  # of Flower's sampling
        grid = Here(client, example.CLIENTS, slow=(1, 2, 3))
        start = ArrayRecord(example.make_model().state_dict())
        result = strategy.start(grid=grid, initial_arrays=start, num_rounds=30, evaluate_fn=example.accuracy)
        scores = [float(one["accuracy"]) for one in result.evaluate_metrics_serverapp.values()]
        reached[name], sent[name] = sum(scores[-5:]) / 5, grid.up + grid.down
        assert not reasons(grid)
        if name != "plain":
            assert strategy.traffic.down == grid.down
            assert 0 <= grid.up - strategy.traffic.up < 0.1 * grid.up  # what came when the run was over is not read
    with capsys.disabled():
        print("\n" + "; ".join(f"{name}: accuracy {reached[name]:.3f}, {sent[name]:,} octets" for name in sent))
    assert reached["compressed"] > reached["plain"] - 0.02
    assert reached["calibrated"] > reached["plain"]
    assert reached["fedbuff"] > 0.6
    assert all(sent["plain"] > 5.5 * sent[name] for name in sent if name != "plain")


def the_example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import app as example

    monkeypatch.delitem(sys.modules, "app")
    return example


def test_the_apps_of_the_how_to_page_run() -> None:
    text = (EXAMPLE.parents[1] / "docs" / "howto" / "flower.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r'^```python title="(\w+)\.py"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL))
    assert set(blocks) == {"client_app", "server_app"}
    client, server = ({"__name__": name} for name in blocks)
    for names, block in zip((client, server), blocks.values(), strict=True):
        exec(block, names)
    grid = Here(client["app"], 4)
    server["app"](grid, Context(1, 0, {}, RecordDict(), {}))
    losses = [said.content["metrics"]["loss"] for said in grid.said]
    assert not reasons(grid)
    assert losses[-1] < 0.9 * losses[0]
    assert octets(grid.told[-1]) < octets(grid.told[0]) / 5
    (algorithms,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(algorithms, names)
    assert isinstance(names["strategy"], Federated)


@pytest.mark.federation
def test_the_example_learns_in_flowers_simulation() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "app.py"), "--only", "calibrated"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ((accuracy, part),) = re.findall(r"^calibrated: accuracy (\S+); .*: 1/(\S+)$", done.stdout, re.MULTILINE)
    assert float(accuracy) > 0.75
    assert float(part) > 5


def test_a_model_that_was_sent_to_be_judged_is_not_sent_again_to_be_trained() -> None:
    grid = Here(app(quafl_mod()), 3)
    run(Compressed(FedAvg()), grid)
    trains = [one for one in grid.told if one.metadata.message_type == "train"]
    assert octets(trains[0]) > 4 * SIZE
    assert all(octets(one) < 200 for one in trains[3:])


def test_clients_judge_the_model_that_they_are_sent() -> None:
    result = Compressed(FedAvg()).start(grid=Here(app(quafl_mod()), 5), initial_arrays=zeros(), num_rounds=8)
    assert float(result.evaluate_metrics_clientapp[8]["off"]) < 0.1


def test_integers_and_statistics_travel_as_they_are_and_the_order_of_arrays_stays() -> None:
    start = zeros(**{"n.running_mean": torch.zeros(4), "n.num_batches_tracked": torch.tensor(0), "last": torch.ones(3)})
    seen: list[list[str]] = []

    def train(message: Message, context: Context) -> Message:
        seen.append(list(message.content["arrays"]))
        return towards(message, context)

    reached = run(Compressed(FedAvg(**ALL)), Here(app(quafl_mod(), train=train), 2), start, rounds=3)
    assert list(reached) == ["w", "b", "n.running_mean", "n.num_batches_tracked", "last"]
    assert all(names == list(reached) for names in seen)
    assert int(reached["n.num_batches_tracked"]) == 3
    assert torch.allclose(reached["n.running_mean"], torch.full((4,), 0.4375), atol=0.02)  # near exactly Σ 0.5/2^k


def test_half_precision_stays_so() -> None:
    start = ArrayRecord({"w": torch.zeros(3000, dtype=torch.float16), "b": torch.zeros(5, dtype=torch.float16)})
    reached = run(Compressed(FedAvg(**ALL)), Here(app(quafl_mod()), 3), start)
    assert reached["w"].dtype == torch.float16


def test_other_strategies_and_mods_see_models() -> None:
    private = DifferentialPrivacyServerSideFixedClipping(FedMedian(**ALL), 1e-9, 1000.0, 3)

    def train(message: Message, context: Context) -> Message:
        return towards(message, Context(0, 0, {"partition-id": context.node_id}, RecordDict(), {}))

    grid = Here(app(quafl_mod(), arrays_size_mod, train=train), 3)
    assert float((run(Compressed(private), grid)["w"] - 2).abs().mean()) < 0.05
    assert not reasons(grid)


def test_flowers_own_count_of_our_messages_works() -> None:
    grid = Here(app(message_size_mod, quafl_mod(Calibrated(sampled=3))), 3)
    run(Federated(Calibrated(sampled=3), **ALL), grid)
    assert not reasons(grid)


def test_a_loop_of_ones_own_pushes_and_pulls_over_a_compressed_grid() -> None:
    here = Here(app(quafl_mod()), 1)
    grid = CompressedGrid(here)
    for step in range(3):
        if step == 2:
            here.lose(1)
        arrays = ArrayRecord({"w": torch.full((2000,), 0.1 * step)})
        content = RecordDict({"arrays": arrays, "config": ConfigRecord()})
        here.app = ClientApp(mods=[quafl_mod()])
        here.app.train()(lambda message, _: Message(message.content, reply_to=message))
        waiting, came = list(grid.push_messages([Message(content, 1, "train")])), list[Message]()
        for _ in range(3):
            came += grid.pull_messages(waiting)
        ((reply),) = came
        back = reply.content["arrays"].to_torch_state_dict()["w"]
        assert torch.allclose(back, torch.full((2000,), 0.1 * step), atol=0.1)


# What does not fit


def test_a_client_that_has_lost_its_state_is_sent_the_model_in_full_in_the_same_round() -> None:
    grid = Here(app(quafl_mod()), 2)
    strategy = Compressed(FedAvg(**ALL))

    class Losing(Here):
        def push_messages(self, messages: Any) -> list[str]:
            if len(self.told) == 4:
                self.lose(2)
            return super().push_messages(messages)

    grid = Losing(app(quafl_mod()), 2)
    run(strategy, grid, rounds=4)
    assert not reasons(grid)
    assert [octets(one) > 4 * SIZE for one in grid.told] == [True, True, False, False, False, False, True, False, False]


def test_a_client_without_the_mod_is_served_in_full() -> None:
    grid = Here(app(), 2)
    assert float((run(Compressed(FedAvg(**ALL)), grid, rounds=8)["w"] - 0.5).abs().mean()) < 0.05
    assert all(octets(one) > 4 * SIZE for one in grid.told)


def test_what_is_encoded_cannot_be_taken_for_numbers() -> None:
    grid = Here(app(quafl_mod()), 2)
    run(Compressed(FedAvg(**ALL)), grid, rounds=2)
    with pytest.raises(TypeError, match="Unsupported serialization type"):
        grid.told[-1].content["arrays"].to_torch_state_dict()


def test_a_mod_without_the_strategy_says_so() -> None:
    grid = Here(app(quafl_mod()), 2)
    FedAvg(**ALL).start(grid=grid, initial_arrays=zeros(), num_rounds=1)
    assert all("wrap its strategy in quafl.bridges.flower.Compressed" in reason for reason in reasons(grid))


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ({"w": torch.zeros(100, 40), "b": torch.zeros(96)}, r"has 'w 100x40 float32' where .* has 'w 40x100 float32'"),
        ({"w": torch.zeros(40, 100)}, r"has 'nothing' where the model that was sent has 'b 96 float32'"),
        ({"w": torch.zeros(40, 100).double(), "b": torch.zeros(96)}, "has 'w neither float32 nor float16'"),
        ({"w": torch.full((40, 100), torch.nan), "b": torch.zeros(96)}, "array 'w' has NaN or infinite values"),
    ],
)
@pytest.mark.parametrize("algorithm", [None, FedBuff(sampled=2)])
def test_an_answer_that_does_not_fit_is_an_error_in_one_sentence(
    returned: dict[str, torch.Tensor], sentence: str, algorithm: Any
) -> None:
    def train(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": ArrayRecord(returned), "metrics": metrics}), reply_to=message)

    grid = Here(app(quafl_mod(algorithm), train=train), 2)
    strategy = Compressed(FedAvg(**ALL)) if algorithm is None else Federated(algorithm, **ALL)
    strategy.start(grid=grid, initial_arrays=zeros(), num_rounds=1, timeout=0.2)
    sentence = "training has led to values that are NaN" if algorithm and "NaN" in sentence else sentence
    assert reasons(grid)
    assert all(re.search(sentence, reason) and "\n" not in reason for reason in reasons(grid))


def test_doubles_are_refused_by_name_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match=r"array 'w' has dtype torch.float64, messages carry torch.float32"):
        run(Compressed(FedAvg(**ALL)), Here(app(quafl_mod()), 2), ArrayRecord({"w": torch.zeros(5).double()}))


def test_a_difference_from_another_model_and_damaged_octets_are_errors_of_their_node() -> None:
    class Mixed(Here):
        """Gives each answer the octets of another one, or damages them."""

        def _handled(self, message: Message) -> Message:
            reply = super()._handled(message)
            record = reply.content["arrays"]
            (name,) = record
            data = record[name].data
            stale = len(self.said) == 4
            new = self.said[0].content["arrays"][name].data if stale else data[:-1] + bytes([data[-1] ^ 1])
            if len(self.said) in (3, 4):
                record[name] = Array("uint8", (len(new),), "quafl", new)
            return reply

    grid = Mixed(app(quafl_mod()), 2)
    over = CompressedGrid(grid)
    for value in (0.0, 1.0):
        arrays = ArrayRecord({"w": torch.full((2000,), value)})
        messages = [Message(RecordDict({"arrays": arrays, "config": ConfigRecord()}), node, "train") for node in (1, 2)]
        grid.app = ClientApp(mods=[quafl_mod()])
        grid.app.train()(towards_any)
        replies = list(over.send_and_receive(messages))
    errors = {one.metadata.src_node_id: str(one.error.reason) for one in replies}
    assert any("crc32" in error for error in errors.values())
    assert any("a difference from something else" in error for error in errors.values())
    assert set(errors) == {1, 2}


def towards_any(message: Message, context: Context) -> Message:
    state = {name: tensor + 0.1 for name, tensor in message.content["arrays"].to_torch_state_dict().items()}
    return Message(RecordDict({"arrays": ArrayRecord(state)}), reply_to=message)


def test_compressed_within_another_strategy_is_refused() -> None:
    outer = DifferentialPrivacyServerSideFixedClipping(Compressed(FedAvg(**ALL)), 1e-9, 100.0, 2)
    with pytest.raises(RuntimeError, match="put it outermost"):
        run(outer, Here(app(quafl_mod()), 2))


@pytest.mark.parametrize(("bits", "down"), [(0, 4), (9, 4), (4, 2), (4, 17)])
def test_bits_without_a_code_are_refused(bits: int, down: int) -> None:
    with pytest.raises(ValueError, match="bits is"):
        Compressed(FedAvg(**ALL), bits=bits, down_bits=down)


# Our algorithms


@pytest.mark.parametrize(
    "algorithm",
    [FedBuff(sampled=3), Calibrated(sampled=3), OurFedAvg(sampled=3), QuAFL(sampled=3), FedAsync(sampled=3)],
    ids=lambda one: type(one).__name__,
)
def test_every_algorithm_without_steps_of_its_own_gets_to_where_its_clients_want(algorithm: Any) -> None:
    grid = Here(app(quafl_mod(algorithm)), 5, slow=(2,))
    result = Federated(algorithm, min_train_nodes=3).start(grid=grid, initial_arrays=zeros(), num_rounds=20)
    reached = result.arrays.to_torch_state_dict()["w"]
    assert not reasons(grid)
    assert float((reached - 2).abs().mean()) < 0.8
    assert result.evaluate_metrics_clientapp[20]["off"] == pytest.approx(float((reached - 2).abs().mean()), abs=0.1)
    assert "loss" in result.train_metrics_clientapp[20]


def test_calibrated_s_memories_at_the_clients_are_those_that_the_server_adds_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Σ y_i of the clients' states is the server's, when all have heard of their last answers; nothing fades."""
    algorithm = Calibrated(sampled=2, forget=0.0)
    grid = Here(app(quafl_mod(algorithm)), 4)
    from quafl.bridges.flower import federated

    runs: list[Any] = []
    start = federated._Run.__init__

    def kept(self: Any, *args: Any) -> None:
        start(self, *args)
        runs.append(self)

    monkeypatch.setattr(federated._Run, "__init__", kept)
    run(Federated(algorithm, **ALL), grid, rounds=12)
    (made,) = runs
    from quafl.bridges.contact import arrive
    from quafl.bridges.flower.mod import _held, _kept

    total = torch.zeros(SIZE)
    for node, context in grid.contexts.items():
        _, floats = _held(context)["arrays"]
        model = torch.cat([tensor.flatten() for tensor in floats.values()])
        number = torch.zeros((), dtype=torch.float64)
        down = algorithm.records.down(statistics=torch.empty(0), model=model, sweeps=number, longest=number + torch.inf)
        total += arrive(algorithm, made._coder, _kept(context), made._receipts[node], down, None).memory
    assert torch.allclose(total, made._server.memory, atol=1e-5)
    assert float(total.norm()) > 1


def test_a_client_that_forgets_comes_back_as_a_newcomer() -> None:
    algorithm = Calibrated(sampled=3)

    class Losing(Here):
        def push_messages(self, messages: Any) -> list[str]:
            if len(self.told) == 9:
                self.lose(1)
            return super().push_messages(messages)

    grid = Losing(app(quafl_mod(algorithm)), 3)
    reached = run(Federated(algorithm, **ALL), grid, rounds=15)["w"]
    assert not reasons(grid)
    assert float((reached - 1).abs().mean()) < 0.4
    assert sum(octets(one) > 4 * SIZE for one in grid.told) == 4


def test_a_client_says_how_many_steps_it_has_taken() -> None:
    algorithm = FedBuff(sampled=2, local_steps=7)
    asked: list[Any] = []

    def train(message: Message, context: Context) -> Message:
        asked.append(message.content["config"]["local-steps"])
        reply = towards(message, context)
        reply.content["metrics"]["local-steps"] = 3
        return reply

    grid = Here(app(quafl_mod(algorithm), train=train), 2)
    run(Federated(algorithm, **ALL), grid, rounds=1)
    assert asked[0] == 7
    assert grid.said[0].content["quafl"]["steps"] == 3


def test_both_ends_must_have_the_same_algorithm() -> None:
    for mine, server, sentence in (
        (Calibrated(), Federated(FedBuff(sampled=2), **ALL), "the server runs FedBuff, quafl_mod has Calibrated"),
        (None, Federated(FedBuff(sampled=2), **ALL), "the server runs FedBuff, quafl_mod has no algorithm"),
        (Calibrated(), Compressed(FedAvg(**ALL)), "the server runs no algorithm, quafl_mod has Calibrated"),
    ):
        grid = Here(app(quafl_mod(mine)), 2)
        server.start(grid=grid, initial_arrays=zeros(), num_rounds=1, timeout=0.1)
        assert all(sentence in reason for reason in reasons(grid))
        assert reasons(grid)


def test_an_algorithm_that_changes_local_steps_is_refused_at_both_ends() -> None:
    for make in (quafl_mod, Federated):
        with pytest.raises(ValueError, match="SCAFFOLD changes every local step"):
            make(SCAFFOLD())
