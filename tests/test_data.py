"""Data as people have them: datasets that are read when they are needed, ahead by other processes, or made on demand;
what clients hold out; Hugging Face's datasets and flwr-datasets' partitioners."""

import gc
import multiprocessing
import re
import runpy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import quafl
from quafl.settings.reading import load
from quafl.tasks import DataError, Supervised, from_partitioner

ROOT = Path(__file__).parents[1]
SIZE, WIDTH = 40, 4
X = torch.randn(3 * SIZE, WIDTH, generator=torch.Generator().manual_seed(0))
Y = (X.sum(dim=1) > 0).long()

forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Rows(Dataset[Any]):
    """A client's examples, which notes down what is read."""

    def __init__(self, client: int, read: list[int] | None = None) -> None:
        self.first, self.read = client * SIZE, read

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, place: int) -> Any:
        if self.read is not None:
            self.read.append(self.first + place)
        return X[self.first + place], Y[self.first + place]


def pair(client: int) -> tuple[Tensor, Tensor]:
    mine = slice(client * SIZE, (client + 1) * SIZE)
    return X[mine], Y[mine]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 2)


def simulated(clients: Any, **more: Any) -> quafl.Result:
    usual = {"model": linear(), "algorithm": quafl.QuAFL(sampled=2, local_steps=3), "until": 40.0, "evaluations": 2}
    return quafl.simulate(**(usual | {"clients": clients, "batch_size": 8, "progress": False} | more))


def same(one: quafl.Result, other: quafl.Result) -> bool:
    return all(map(torch.equal, one.model.parameters(), other.model.parameters())) and one.rows == other.rows


# Map-style datasets


def test_a_dataset_for_each_client_is_learned_as_the_same_examples_in_memory_are() -> None:
    read, held = (simulated([make(client) for client in range(3)], test=(X, Y)) for make in (Rows, pair))
    assert all(map(torch.equal, read.model.parameters(), held.model.parameters()))
    assert read.rows[-1]["accuracy"] == held.rows[-1]["accuracy"]


def test_no_example_is_read_before_it_is_needed() -> None:
    read: list[int] = []
    task = Supervised(linear(), [Rows(client, read) for client in range(3)], test=(X, Y), batch_size=8)
    tried = len(read)
    assert tried <= 2 + len(X)  # two that the model is tried on, and the training sample, whose loss is recorded
    batch = task.batch(1, 0)
    assert len(read) == tried + 8
    assert torch.equal(batch.inputs, X[read[-8:]])
    assert set(read[-8:]) <= set(range(SIZE, 2 * SIZE))


def test_some_clients_may_have_datasets_and_others_pairs() -> None:
    mixed = simulated([Rows(0), pair(1), Rows(2)])
    assert same(mixed, simulated([Rows(client) for client in range(3)]))


def test_a_collate_makes_batches_of_texts_of_different_length() -> None:
    def padded(examples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        texts, labels = zip(*examples, strict=True)
        return nn.utils.rnn.pad_sequence(list(texts), batch_first=True), torch.tensor(labels)

    class Texts(Dataset[Any]):
        def __len__(self) -> int:
            return 30

        def __getitem__(self, place: int) -> Any:
            return torch.full((1 + place % 5,), 1 + place % 2), place % 2

    model = nn.Sequential(nn.EmbeddingBag(3, 4, padding_idx=0), nn.Linear(4, 2))
    result = simulated([Texts(), Texts()], model=model, collate=padded, optimizer=quafl.adam(0.05), until=100.0)
    assert result.rows[-1]["accuracy"] == 1.0


# Ahead


class Shaken(Rows):
    """Changes its examples at random, by all generators there are."""

    def __getitem__(self, place: int) -> Any:
        inputs, target = super().__getitem__(place)
        return inputs + torch.rand(WIDTH), target


@forks
@pytest.mark.parametrize("kind", [Rows, Shaken])
@pytest.mark.parametrize("algorithm", [quafl.QuAFL(sampled=2, local_steps=3), quafl.FedBuff(sampled=2)])
def test_workers_that_read_ahead_give_the_same_run_bit_for_bit(kind: type[Rows], algorithm: Any) -> None:
    clients = [kind(client) for client in range(3)]
    alone, ahead = (simulated(clients, workers=workers, algorithm=algorithm, until=20.0) for workers in (0, 2))
    assert same(alone, ahead)


@forks
def test_a_batch_that_nobody_expected_is_the_same_and_so_are_those_after_it() -> None:
    clients = [Rows(client) for client in range(3)]
    alone, ahead = (Supervised(linear(), clients, batch_size=8, workers=workers) for workers in (0, 1))
    assert alone.expect is None
    assert ahead.expect is not None
    ahead.expect([(0, 0), (0, 1), (2, 0)])
    for key in [(0, 0), (1, 5), (1, 6), (1, 7), (0, 1)]:
        assert torch.equal(ahead.batch(*key).inputs, alone.batch(*key).inputs)


class Broken(Rows):
    """Can be read, or not, by the process that learns; never by others."""

    def __init__(self, client: int, *, here: bool) -> None:
        super().__init__(client)
        self.here = here

    def __getitem__(self, place: int) -> Any:
        if not self.here or get_worker_info() is not None:
            raise OSError("the disk is gone")
        return super().__getitem__(place)


@forks
@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_read_is_said_in_a_sentence_whoever_reads_it(workers: int) -> None:
    clients = [Rows(0), Broken(1, here=workers > 0)]
    with pytest.raises(DataError, match=r"^client 1: its examples cannot be read \(the disk is gone\)$"):
        simulated(clients, workers=workers)


@forks
def test_processes_that_read_ahead_end_with_their_task_at_once() -> None:
    task = Supervised(linear(), [Rows(0)], workers=2)
    task.batch(0, 0)
    task.batch(0, 1)
    assert multiprocessing.active_children()
    began = perf_counter()
    del task
    gc.collect()
    assert not multiprocessing.active_children()
    assert perf_counter() - began < 4  # torch waits five seconds for each that does not hear that it is to end


# On demand


def test_data_on_demand_are_made_when_they_are_needed() -> None:
    made: list[int] = []

    def make(client: int) -> tuple[Tensor, Tensor]:
        made.append(client)
        return pair(client % 3)

    result = simulated(quafl.OnDemand(1_000_000, make), test=(X, Y))
    assert result.rows[-1]["contacts"] > 0
    assert len(set(made)) < 100


def test_data_made_on_demand_are_learned_as_those_of_a_list_are() -> None:
    demanded = simulated(quafl.OnDemand(3, Rows), test=(X, Y))
    assert same(demanded, simulated([Rows(client) for client in range(3)], test=(X, Y)))


def test_clients_on_demand_can_be_cut_and_counted_from_the_end() -> None:
    clients = quafl.OnDemand(10, lambda client: client)
    assert [clients[4:8][1], clients[-1], len(clients[::3])] == [5, 9, 4]
    with pytest.raises(IndexError):
        clients[10]
    with pytest.raises(ValueError, match="count is 0, must be a whole number, at least 1"):
        quafl.OnDemand(0, pair)


# What is held out


class Places(Dataset[Any]):
    """Each example is its own place."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, place: int) -> Any:
        return torch.full((WIDTH,), float(place)), place % 2


PLACES = torch.arange(SIZE).float().unsqueeze(1).expand(SIZE, WIDTH), torch.arange(SIZE) % 2


@pytest.mark.parametrize(
    "clients", [[Places(), Places()], [PLACES, PLACES], quafl.OnDemand(2, lambda client: Places())], ids=type
)
def test_a_share_that_is_held_out_is_judged_and_not_learned(clients: Any) -> None:
    seen: list[float] = []

    class Sees(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            seen.extend(inputs[:, 0].tolist())
            return super().forward(inputs)

    task = Supervised(Sees(WIDTH, 2), clients, held_out=0.25, batch_size=10)
    learned = {place for step in range(6) for place in task.batch(0, step).inputs[:, 0].tolist()}
    assert len(learned) == 30
    seen.clear()
    score = task.judge(0, *task.initial())
    assert score is not None
    assert score["examples"] == len(seen) == 10
    assert sorted({*seen, *learned}) == list(range(SIZE))


def test_each_client_may_be_judged_by_data_of_its_own_or_by_none() -> None:
    result = simulated([Rows(0), Rows(1), pair(2)], held_out=[Rows(2), None, pair(0)])
    task = Supervised(linear(), [Rows(0), Rows(1), pair(2)], held_out=[Rows(2), None, pair(0)])
    scores = [task.judge(client, *task.initial()) for client in range(3)]
    assert [score and score["examples"] for score in scores] == [SIZE, None, SIZE]
    assert 0 < result.rows[-1]["accuracy_clients_worst"] <= result.rows[-1]["accuracy_clients_mean"]


def test_rows_of_a_run_without_test_data_have_what_clients_say_of_what_they_hold_out() -> None:
    first, last = simulated([Rows(client) for client in range(3)], held_out=0.2, until=200.0).rows[::2]
    assert last["accuracy_clients_mean"] > first["accuracy_clients_mean"]
    assert last["accuracy_clients_spread"] >= 0


# What cannot be used


class Other(Rows):
    """Examples changed in some way."""

    def __init__(self, client: int, change: Callable[[Any, Any, int], Any]) -> None:
        super().__init__(client)
        self.change = change

    def __getitem__(self, place: int) -> Any:
        return self.change(*super().__getitem__(place), place)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


class Counted(Stream):
    def __len__(self) -> int:
        return len(X)


def each(change: Callable[[Any, Any, int], Any]) -> list[Any]:
    return [Other(0, change), Other(1, change)]


NO_PLACES = "which has no length or gives its examples one after another; give a map-style dataset"
MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    ([Rows(0), Stream()], {}, f"client 1 is a Stream, {NO_PLACES}"),
    ([Stream()], {"held_out": 0.2}, f"client 0 is a Stream, {NO_PLACES}"),
    ([Counted()], {}, f"client 0 is a Counted, {NO_PLACES}"),
    ([DataLoader(Rows(0))], {}, f"client 0 is a DataLoader, {NO_PLACES}"),
    ([(one for one in Rows(0))], {}, f"client 0 is a generator, {NO_PLACES}"),
    (quafl.OnDemand(3, lambda client: Stream()), {"test": (X, Y)}, f"client 0 is a Stream, {NO_PLACES}"),
    (quafl.OnDemand(3, lambda client: None), {"test": (X, Y)}, "client 0 is a NoneType, must be a pair"),
    (quafl.OnDemand(3, Rows), {}, "the data of 3 clients are made on demand; give `test` or `held_out` as well"),
    ([Rows(0)], {"test": Stream()}, f"the test data is a Stream, {NO_PLACES}"),
    ([Rows(0)], {"held_out": [Stream()]}, f"what client 0 is judged by is a Stream, {NO_PLACES}"),
    ([Rows(0), torch.utils.data.Subset(Rows(1), [])], {}, "client 1 has no examples; give at least one"),
    (
        each(lambda x, y, place: (x[: 1 + place % 3], y)),
        {},
        r"client 0: its examples do not make a batch \(stack expects",
    ),
    (each(lambda x, y, place: (object(), y)), {}, r"client 0: its examples do not make a batch .*; give a collate"),
    (each(lambda x, y, place: ("text", y)), {}, "client 0's batch's inputs are a .* that is no tensor"),
    (each(lambda x, y, place: (x, y, y)), {}, r"client 0's batch is 3 things, must be a pair \(inputs, targets\)"),
    (each(lambda x, y, place: {"x": x, "class": y}), {}, "the parts x, class, of which none is called labels or label"),
    (
        [Rows(0), Other(1, lambda x, y, place: (x[:3], y))],
        {},
        r"cannot take inputs that are float32 \(3,\) each .*\(4,\)",
    ),
    ([Rows(0), Other(1, lambda x, y, place: (x, y.float()))], {}, "client 1 has inputs .* is not what client 0 has"),
    ([Rows(0), Other(1, lambda x, y, place: (x, y + 5))], {}, "client 1 has the label [56], the model has 2 outputs"),
    (
        [Rows(0), Rows(1)],
        {"collate": lambda examples: 1 / 0},
        r"do not make a batch \(division by zero\); mend the coll",
    ),
    ([Rows(0), Rows(1)], {"workers": -1}, "workers is -1, must be a whole number, at least 0"),
    ([Rows(0), Rows(1)], {"held_out": [Rows(0)]}, "held_out has data of 1 clients, of whom there are 2"),
    ([Rows(0), Rows(1)], {"held_out": 1.5}, "held_out is 1.5, must be a share between 0 and 1"),
]


@pytest.mark.parametrize(("clients", "more", "sentence"), MISTAKES, ids=[sentence[:40] for *_, sentence in MISTAKES])
def test_what_cannot_be_read_or_used_is_said_in_a_sentence(clients: Any, more: dict[str, Any], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError, DataError), match=sentence):
        simulated(clients, algorithm=quafl.QuAFL(sampled=1), **more)


# Hugging Face's datasets, and flwr-datasets' partitioners


def table(rows: int = 3 * SIZE) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": X[:rows].tolist(), "label": Y[:rows].tolist()})


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_a_hugging_face_dataset_for_each_client_is_learned_in_whatever_format_it_is(form: str | None) -> None:
    shards = [table().shard(3, client, contiguous=True).with_format(form) for client in range(3)]
    result = simulated(shards, test=(X, Y))
    assert all(map(torch.equal, result.model.parameters(), simulated([*map(Rows, range(3))]).model.parameters()))


def test_a_hugging_face_dataset_that_is_streamed_or_has_parts_is_refused() -> None:
    datasets = pytest.importorskip("datasets")
    with pytest.raises(TypeError, match=f"client 0 is a IterableDataset, {NO_PLACES}"):
        simulated([table().to_iterable_dataset()])
    with pytest.raises(TypeError, match="clients is a dictionary"):
        simulated(datasets.DatasetDict({"train": table()}))


def test_a_partitioners_partitions_are_clients_that_hold_all_examples_once() -> None:
    flower = pytest.importorskip("flwr_datasets.partitioner")
    even, skewed = flower.IidPartitioner(4), flower.DirichletPartitioner(4, "label", 0.3, min_partition_size=1, seed=1)
    for partitioner in even, skewed:
        clients = from_partitioner(partitioner, table())
        dealt = torch.cat([client[:]["x"] for client in clients])
        assert sorted(dealt.tolist()) == sorted(X.tolist())
    assert [len(client) for client in from_partitioner(even)] == [30] * 4
    assert len({len(client) for client in from_partitioner(skewed)}) > 1
    result = simulated(from_partitioner(skewed), test=(X, Y), until=200.0)
    assert result.rows[-1]["accuracy"] > 0.8


def test_columns_are_chosen_and_the_target_may_have_any_name() -> None:
    flower = pytest.importorskip("flwr_datasets.partitioner")
    data = table().rename_column("label", "klass").add_column("note", ["a"] * len(X))
    (client,) = from_partitioner(flower.IidPartitioner(1), data, inputs="x", target="klass")
    assert set(client[0]) == {"x", "labels"}
    for wrong, sentence in (
        ({}, "the dataset has no column called labels or label or targets or target; it has x, klass, note"),
        ({"inputs": "y", "target": "klass"}, "the dataset has no column 'y'; it has x, klass, note"),
    ):
        with pytest.raises(DataError, match=sentence):
            from_partitioner(flower.IidPartitioner(1), data, **wrong)


def test_what_a_partitioner_cannot_do_is_said_in_a_sentence() -> None:
    flower = pytest.importorskip("flwr_datasets.partitioner")
    with pytest.raises(TypeError, match="the partitioner is a int without num_partitions; give one of flwr_datasets'"):
        from_partitioner(4, table())
    with pytest.raises(DataError, match=r"IidPartitioner cannot deal the data out \(The dataset field should be set"):
        from_partitioner(flower.IidPartitioner(4))
    with pytest.raises(DataError, match=r"DirichletPartitioner cannot deal the data out .* options that suit it"):
        from_partitioner(flower.DirichletPartitioner(4, "klass", 0.3), table())


FLOWER = """
task = {{ name = "flwr-datasets", path = "{path}", {more} }}
clients.count = {clients}
algorithm = {{ sampled = 2, lr = 0.3 }}
run = {{ until = 150.0, every = 150.0, per_client = true }}
"""


def flower_settings(folder: Path, more: str, path: Path | None = None, clients: int = 4) -> Any:
    (folder / "mine.toml").write_text(FLOWER.format(path=path or folder / "data", more=more, clients=clients))
    return load(str(folder / "mine.toml"))[0]


def pictures(rows: int = 60) -> Any:
    """Bright ones and dark ones, and who took them."""
    datasets = pytest.importorskip("datasets")
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=2), "who": datasets.Value("int64")}
    octets = torch.randint(100, (rows, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()
    columns = {
        "image": [octets[row] + 150 * (row % 2) for row in range(rows)],
        "label": [row % 2 for row in range(rows)],
        "who": [row % 5 for row in range(rows)],
    }
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


@pytest.mark.parametrize(
    ("more", "clients"),
    [
        ('partitioner = "IidPartitioner"', 4),
        ('partitioner = "DirichletPartitioner", options = { alpha = 0.5, min_partition_size = 2 }', 4),
        ('partitioner = "NaturalIdPartitioner", options = { partition_by = "who" }, inputs = ["image"]', 5),
    ],
)
def test_a_settings_file_deals_a_saved_dataset_out_by_a_partitioner(more: str, clients: int, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("flwr_datasets")
    datasets.DatasetDict({"train": pictures(), "test": pictures(20)}).save_to_disk(tmp_path / "data")
    settings = flower_settings(tmp_path, more, clients=clients)
    settings.task.check(settings.clients)
    task, simulation = settings.simulation(0)
    for _ in simulation:
        pass
    assert simulation.rows[-1]["accuracy"] == 1.0
    assert simulation.rows[-1]["accuracy_clients_worst"] == 1.0
    (again, _), (other, _) = settings.simulation(0), settings.simulation(1)
    batches = [one.batch(0, 0).inputs for one in (task, again, other)]
    assert [one.shape == two.shape and torch.equal(one, two) for one, two in pairwise(batches)] == [True, False]


def test_a_file_of_numbers_needs_no_test_part(tmp_path: Path) -> None:
    pytest.importorskip("flwr_datasets")
    path = tmp_path / "table.parquet"
    table().to_parquet(path)
    settings = flower_settings(tmp_path, "hidden = 8", path)
    task = settings.task.build(settings.clients, settings.run, 0)
    assert sorted(int(task.judge(client, *task.initial())["examples"]) for client in range(4)) == [27] * 4


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ('partitioner = "Iid"', "task.partitioner = 'Iid': must be one of .*IidPartitioner"),
        ('partitioner = "DirichletPartitioner"', "DirichletPartitioner cannot deal the data out .*alpha.* it takes"),
        ("options = { num_partitions = 3 }", "IidPartitioner makes 3 partitions for 4 clients; set clients.count = 3"),
        ('inputs = ["pixels"]', "the dataset has no column 'pixels'; it has image, label, who"),
        ('target = "klass"', "the dataset has no column 'klass'"),
        ('inputs = ["note"]', "the column 'note' has 'a', must have numbers or pictures"),
    ],
)
def test_what_does_not_suit_a_partitioner_is_said_before_anything_runs(
    more: str, sentence: str, tmp_path: Path
) -> None:
    pytest.importorskip("flwr_datasets")
    data = pictures().add_column("note", ["a"] * 60) if "note" in more else pictures()
    data.save_to_disk(tmp_path / "data")
    settings = flower_settings(tmp_path, more)
    with pytest.raises(DataError, match=sentence):
        settings.task.check(settings.clients)


def test_data_that_are_not_there_are_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    settings = flower_settings(tmp_path, "hidden = 8")
    with pytest.raises(DataError, match=r"task.path = .*data': must be a folder that Hugging Face's save_to_disk"):
        settings.task.check(settings.clients)
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match=r"data cannot be read .*; write it by Hugging Face's save_to_disk"):
        settings.task.check(settings.clients)


@pytest.mark.parametrize("title", ["hugging.py", "flower.py"])
def test_the_pages_code_with_packages_that_not_everybody_has_runs(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code with a title is a file: tests/test_docs.py runs all the others."""
    pytest.importorskip("flwr_datasets" if title == "flower.py" else "datasets")
    text = (ROOT / "docs" / "howto" / "datasets.md").read_text(encoding="utf-8")
    (code,) = re.findall(rf'^```python title="{title}"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / title).write_text(code, encoding="utf-8")
    runpy.run_path(str(tmp_path / title))
