"""LEAF's datasets, on generated files of the same format: users, num_samples and user_data, in train/ and test/."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from quafl.settings.reading import load
from quafl.tasks import DataError, Supervised, femnist, models, people, sent140, shakespeare
from quafl.tasks.files import ENVIRONMENT
from quafl.tasks.people import ALPHABET, hashed

Samples = tuple[list[Any], list[Any]]  # x and y
EMPTY: Samples = ([], [])


def write(folder: Path, users: Mapping[str, Samples], *, left_out: tuple[str, ...] = ()) -> None:
    """As LEAF's split_data.py does: who has too few samples is empty in user_data, and not in users."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(users)
    for number, some in enumerate(part for part in (names[::2], names[1::2]) if part):  # LEAF writes several files
        content = {
            "users": some,
            "num_samples": [len(users[name][1]) for name in some],
            "user_data": {name: {"x": users[name][0], "y": users[name][1]} for name in some}
            | {name: {"x": [], "y": []} for name in left_out},
        }
        (folder / f"all_data_{number}_niid_0_keep_0_{folder.name}_9.json").write_text(json.dumps(content))


def picture(label: int, writer: int) -> list[float]:
    """White, but for a black row that says what it is, and a column that says whose."""
    rows = [[1.0] * 28 for _ in range(28)]
    rows[label % 28] = [0.0] * 28
    for row in rows:
        row[writer] = 128 / 255
    return [number for row in rows for number in row]


def writers(count: int) -> dict[str, Samples]:
    labels = [0, 9, 10, 61]
    return {f"f{w:04}_{w}": ([picture(y, w) for y in labels[: 2 + w]], labels[: 2 + w]) for w in range(count)}


def roles(lines: Mapping[str, str]) -> dict[str, Samples]:
    """As LEAF's shake_utils.py slides a window of 80 over each line."""
    padded = {role: " " * 80 + line for role, line in lines.items()}
    return {
        role: ([line[i : i + 80] for i in range(len(line) - 80)], [line[i + 80] for i in range(len(line) - 80)])
        for role, line in padded.items()
    }


def authors(count: int) -> dict[str, Samples]:
    texts = [("so happy today!", 1), ("this is sad, again", 0)] * 4
    return {
        f"user{a}": (
            [["2087", "Sat May 16 23:58:44 UTC 2009", "NO_QUERY", f"user{a}", text] for text, _ in texts],
            [mood for _, mood in texts],
        )
        for a in range(count)
    }


LINES = {"ROMEO": "But soft, what light\n", "JULIET": "Good night, good night!\n", "NURSE": "Peace, peace."}
DATASETS: dict[str, Callable[[], dict[str, Samples]]] = {
    "femnist": lambda: writers(3),
    "shakespeare": lambda: roles(LINES),
    "sent140": lambda: authors(3),
}


def both(folder: Path, users: Mapping[str, Samples]) -> Path:
    write(folder / "train", users, left_out=("nobody",))
    write(folder / "test", users, left_out=("nobody",))
    return folder


def test_femnist_has_pictures_in_62_classes_and_their_writers(tmp_path: Path) -> None:
    data = femnist(both(tmp_path, writers(3)))
    assert data.train[0].shape == (2 + 3 + 4, 1, 28, 28)
    assert data.train[0].dtype == torch.uint8
    assert data.users.bincount().tolist() == [2, 4, 3]  # the files' order: every second one is in the first
    assert data.judged.tolist() == data.users.tolist()
    assert sorted(data.train[1].tolist()) == [0, 0, 0, 9, 9, 9, 10, 10, 61]
    assert data.train[0][0, 0, 5].tolist() == [128] + [255] * 27  # LEAF's background is 1
    module = models.leaf_cnn()
    assert sum(p.numel() for p in module.parameters()) == 6_603_710
    assert module(data.train[0]).shape == (9, 62)
    assert module[0](data.train[0]).max() == 1.0


def test_shakespeares_characters_are_places_in_leafs_alphabet_and_strange_ones_its_last(tmp_path: Path) -> None:
    assert len(ALPHABET) == 80
    data = shakespeare(both(tmp_path, roles({"ROMEO": "Ah=é{}\n", "JULIET": "No."})))
    assert data.train[0].shape == (10, 80)
    first = data.train[0][data.users == 0]
    after = data.train[1][data.users == 0].tolist()
    assert after == [ALPHABET.find(c) % 80 for c in "Ah=é{}\n"]  # find gives -1, which is LEAF's last class
    assert after[2:6] == [79, 79, 79, 79]
    assert first[0].tolist() == [ALPHABET.index(" ")] * 80
    assert first[-1].tolist()[-6:] == after[:6]
    module = models.leaf_lstm()
    lstm = sum(p.numel() for p in module.layers.parameters())
    assert lstm == 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2)
    assert sum(p.numel() for p in module.parameters()) == 80 * 8 + lstm + 256 * 80 + 80
    assert module(data.train[0]).shape == (10, 80)


def test_tweets_are_hashed_words_that_need_no_vocabulary(tmp_path: Path) -> None:
    data = sent140(both(tmp_path, authors(2)), vocabulary=50)
    assert data.train[0].shape == (16, 25)
    assert data.train[0][0].tolist() == [*hashed("so happy today!", 50), *[0] * 21]
    assert 0 < min(hashed("so happy today!", 50)) <= max(hashed("so happy today!", 50)) <= 50
    assert data.train[1].tolist() == [1, 0] * 8
    assert len(hashed("word " * 40)) == 25
    assert hashed("kitten") == [4093]  # on every machine, in every process
    module = models.bag_of_words(50, 8)
    longer = torch.cat((data.train[0], torch.zeros(16, 9, dtype=torch.int32)), dim=1)
    assert torch.allclose(module(data.train[0]), module(longer))  # where there is no word counts for nothing
    assert torch.isfinite(module(torch.zeros(1, 25, dtype=torch.int32))).all()


@pytest.mark.parametrize("name", DATASETS)
def test_each_user_is_a_client_that_learns_from_its_own_and_is_judged_by_its_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    both(tmp_path / name, DATASETS[name]())
    (tmp_path / "mine.toml").write_text(
        f'task = {{ name = "{name}", batch = 2 }}\nclients.count = 3\n'
        "algorithm = { sampled = 2, local_steps = 2, optimizer = 'adam', lr = 0.003 }\n"
        'codec.name = "identity"\n'
        "run = { until = 30.0, every = 30.0, per_client = true }\n"
    )
    smaller = ["run.until=20", "run.every=20"] if name == "femnist" else ["task.hidden=8"]
    (settings,) = load(str(tmp_path / "mine.toml"), smaller)
    settings.task.check(settings.clients)
    task, simulation = settings.simulation(0)
    for _ in simulation:
        pass
    last = simulation.rows[-1]
    assert last["train_loss"] < simulation.rows[0]["train_loss"]
    assert 0 <= last["accuracy_clients_worst"] <= last["accuracy_clients_mean"] <= 1
    assert last["accuracy_clients_weighted"] == pytest.approx(last["accuracy"])  # who is judged are these three
    assert isinstance(task, Supervised)
    sizes = sorted(len(y) for _, y in DATASETS[name]().values())
    assert sorted(int(task.judge(client, *task.initial())["examples"]) for client in range(3)) == sizes  # type: ignore[index]


def test_fewer_clients_than_users_are_some_users_one_each_or_have_all_of_them(tmp_path: Path) -> None:
    both(tmp_path, authors(5))
    (tmp_path / "mine.toml").write_text(f'task = {{ name = "sent140", path = "{tmp_path}" }}\nalgorithm.sampled = 1\n')

    def sizes(users: str, seed: int = 0) -> list[int]:
        (settings,) = load(str(tmp_path / "mine.toml"), ["clients.count=2", f"task.users={users}"])
        task = settings.task.build(settings.clients, settings.run, seed)
        return [int(task.judge(client, *task.initial())["examples"]) for client in range(2)]

    assert sizes("one each") == [8, 8]
    assert sizes("dealt out") == [24, 16]
    (settings,) = load(str(tmp_path / "mine.toml"), ["clients.count=6"])
    with pytest.raises(DataError, match=r"clients.count = 6: cannot deal 5 users out to 6 .* set it to 5 or less"):
        settings.task.check(settings.clients)


def test_where_leaf_has_split_by_user_everybody_is_judged_by_people_that_nobody_learns_from(tmp_path: Path) -> None:
    write(tmp_path / "train", authors(3))
    write(tmp_path / "test", {"stranger": authors(1)["user0"]})
    (tmp_path / "mine.toml").write_text(f'task = {{ name = "sent140", path = "{tmp_path}" }}\nalgorithm.sampled = 1\n')
    (settings,) = load(str(tmp_path / "mine.toml"), ["clients.count=3"])
    task = settings.task.build(settings.clients, settings.run, 0)
    assert 0 <= task.evaluate(*task.initial())["accuracy"] <= 1
    assert task.judge(0, *task.initial()) is None


def test_missing_files_are_asked_for_with_the_command_that_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("quafl.tasks.files.SYSTEM", tmp_path)
    with pytest.raises(
        DataError, match=r"FEMNIST is not on this machine .* \(LEAF's ./preprocess.sh .*put train, test"
    ):
        femnist()
    with pytest.raises(DataError, match=r"train holds no JSON files; name the folder of a dataset in LEAF's format"):
        shakespeare(tmp_path)


ONE = "a"
MISTAKES: list[tuple[Callable[[Path], Any], Any, str]] = [
    (femnist, [1, 2], "is not LEAF data .* it must have users, num_samples, and user_data"),
    (femnist, {"users": ["a"]}, r"is not LEAF data \(no 'user_data'\)"),
    (femnist, {"users": ["a"], "user_data": {}}, r"is not LEAF data \(no 'a'\)"),
    (femnist, {"users": [], "user_data": {}}, "has no users, must have at least one"),
    (femnist, {"users": ["a"], "user_data": {"a": [1]}}, "user 'a' is not LEAF data, must have a list x and a list y"),
    (femnist, EMPTY, "user 'a' has no samples, must have at least one; run LEAF's preprocess.sh with -k 1"),
    (femnist, ([picture(0, 0)], []), "user 'a' has 1 x and 0 y, must have as many of one as of the other"),
    (femnist, ([[0.5] * 100], [3]), "has pictures of 100 numbers from 0.5 to 0.5, must have 784 from 0 to 1"),
    (femnist, ([[255] * 784], [3]), "has pictures of 784 numbers from 255 to 255, must have 784 from 0 to 1"),
    (femnist, ([picture(0, 0)], [62]), "has the label 62, must be from 0 to 61; is this another dataset's folder"),
    (femnist, ([["a"] * 784], [0]), "which is not LEAF data with numbers as features"),
    (femnist, ([picture(0, 0)], ["A"]), "has 'A' in y, must have class numbers"),
    (shakespeare, (["To be"], ["e"]), "has 5 characters in x, must have texts of 80"),
    (shakespeare, ([[1, 2]], ["e"]), r"has no text but \[1, 2\] in x, must have texts of 80"),
    (shakespeare, ([" " * 80], ["en"]), "has 'en' in y, must have single characters"),
    (sent140, (["so happy"], [1]), "has 'so happy' in x, must have lists of a tweet's id, date, query, user and text"),
    (sent140, ([["1", "2", "3", "4", "sad"]], [4]), "has the label 4, must be from 0 to 1"),
    (people.leaf, ([[1.0, 2.0]], [-1]), "has the label -1, must be from 0; "),
]


@pytest.mark.parametrize(
    ("reader", "content", "sentence"), MISTAKES, ids=[sentence[:30] for _, _, sentence in MISTAKES]
)
def test_what_is_not_leafs_is_said_in_a_sentence(
    reader: Callable[[Path], Any], content: Any, sentence: str, tmp_path: Path
) -> None:
    if isinstance(content, tuple):
        content = {"users": [ONE], "num_samples": [1], "user_data": {ONE: {"x": content[0], "y": content[1]}}}
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "all.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=sentence) as error:
        reader(tmp_path)
    assert str(error.value).startswith(str(tmp_path / "train" / "all.json"))


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train", authors(2))
    (tmp_path / "train" / "half.json").write_text('{"users": ["a"')
    with pytest.raises(DataError, match=r"half.json is not LEAF data \(Expecting"):
        sent140(tmp_path)


def test_users_with_samples_of_another_shape_are_named(tmp_path: Path) -> None:
    write(tmp_path / "train", {"a": ([[1.0, 2.0]], [0]), "b": ([[1.0]], [0])})
    with pytest.raises(DataError, match=r"user 'b' has x of shape \(1,\), others have \(2,\)"):
        people.leaf(tmp_path)
