"""Real datasets in their original files, wherever they are; who holds which examples."""

import gzip
import hashlib
import json
import os
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from quafl.core.counter import Draws, key_from
from quafl.settings.reading import load
from quafl.tasks import DataError, breast_cancer, cifar10, cifar100, fashion_mnist, leaf, mnist, models, partition
from quafl.tasks import celeba as read_celeba
from quafl.tasks.augment import crop_and_flip
from quafl.tasks.datasets import CIFAR_100
from quafl.tasks.files import ENVIRONMENT, Files


def has(folder: str) -> bool:
    return (Path(os.environ.get(ENVIRONMENT, "")) / folder).is_dir()


@pytest.mark.skipif(
    not has("mnist"), reason=f"needs the files of MNIST; name the folder that holds mnist/ in {ENVIRONMENT}"
)
def test_mnist_is_what_was_published() -> None:
    data = mnist()
    assert [tuple(part[0].shape) for part in data] == [(54_000, 1, 28, 28), (6_000, 1, 28, 28), (10_000, 1, 28, 28)]
    classes = torch.cat((data.train[1], data.validation[1])).bincount()
    assert classes.tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    pixels = torch.cat((data.train[0], data.validation[0])).float() / 255
    assert pixels.mean().item() == pytest.approx(0.1307, abs=1e-4)
    assert pixels.std().item() == pytest.approx(0.3081, abs=1e-4)


@pytest.mark.skipif(
    not has("mnist"), reason=f"needs the files of MNIST; name the folder that holds mnist/ in {ENVIRONMENT}"
)
def test_the_papers_network_learns_real_mnist() -> None:
    changes = ["run.until=100", "run.every=100", "run.per_client=true", "run.per_class=true"]
    quafl = next(curve for curve in load("mnist", changes) if curve.label == "QuAFL")
    assert (quafl.algorithm.lr, quafl.task.batch) == (0.5, 128)
    _, simulation = quafl.simulation(0)
    for _ in simulation:
        pass
    assert len(simulation.server.model) == 784 * 32 + 32 + 32 * 10 + 10
    last = simulation.rows[-1]
    assert last["accuracy"] > 0.8
    assert last["train_loss"] < simulation.rows[0]["train_loss"]
    assert last["accuracy_clients_worst"] <= last["accuracy_clients_p10"] <= last["accuracy_clients_mean"]
    classes = [last[f"accuracy_class_{label}"] for label in range(10)]
    shares = mnist().test[1].bincount() / 10_000
    assert sum(c * s for c, s in zip(classes, shares.tolist(), strict=True)) == pytest.approx(
        last["accuracy"], abs=1e-5
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without data."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr("quafl.tasks.files.SYSTEM", tmp_path / "system")
    return tmp_path


def write_idx(path: Path, values: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    content = header + values.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path.read_bytes()


def write_small_fashion(folder: Path, suffix: str = ".gz") -> None:
    for part, count in ("train", 20), ("t10k", 10):
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", np.arange(count * 784).reshape(count, 28, 28) % 251)
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", np.arange(count) % 10)


@pytest.mark.parametrize("suffix", [".gz", ""], ids=["gzipped", "plain"])
@pytest.mark.parametrize("place", ["own", "cache/quafl", "system"])
def test_files_are_looked_for_in_ones_own_folder_then_the_cache_then_debians(
    place: str, suffix: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(home / "own"))
    write_small_fashion(home / place / "fashion-mnist", suffix)
    data = fashion_mnist()
    assert [len(part[1]) for part in data] == [18, 2, 10]
    assert data.test[0].dtype == torch.uint8
    assert data.test[0].flatten().tolist() == [k % 251 for k in range(7840)]


def test_what_is_read_again_is_ones_own_and_what_has_changed_is_seen(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(home))
    write_small_fashion(home / "fashion-mnist")
    for _ in range(2):
        pictures = fashion_mnist().test[0]
        assert pictures.flatten().tolist() == [k % 251 for k in range(7840)]
        pictures.zero_()
    write_idx(home / "fashion-mnist" / "t10k-images-idx3-ubyte.gz", np.full((10, 28, 28), 7))
    assert fashion_mnist().test[0].unique().tolist() == [7]


def test_a_file_that_is_not_what_it_should_be_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(home))
    write_small_fashion(home / "fashion-mnist")
    (home / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\x09abc"))
    with pytest.raises(
        DataError, match=r"t10k-labels-idx1-ubyte.gz cannot be read .* replace it with the original file"
    ):
        fashion_mnist()
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        (home / "cifar-10-batches-bin").mkdir(exist_ok=True)
        (home / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(b"x" * 5000)
    with pytest.raises(DataError, match="has 5000 octets, not a multiple of 3073"):
        cifar10()


def test_cifar_batches_are_read_plane_by_plane(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(home))
    folder = home / "cifar-10-batches-bin"
    folder.mkdir()
    for number, name in enumerate((*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")):
        rows = np.tile(np.concatenate(([number], np.repeat([10, 20, 30], 1024))).astype(np.uint8), (4, 1))
        rows.tofile(folder / f"{name}.bin")
    data = cifar10()
    assert [len(part[1]) for part in data] == [18, 2, 4]
    assert data.test[1].tolist() == [5] * 4
    assert data.test[0].float().mean(dim=(0, 2, 3)).tolist() == [10, 20, 30]


def write_cifar100(folder: Path) -> None:
    """Each row: a coarse class, a fine one, a red, a green and a blue plane."""
    folder.mkdir(parents=True)
    for name, count in ("train", 200), ("test", 100):
        rows = [np.concatenate(([7, k % 100], np.repeat([k % 100, 20, 30], 1024))) for k in range(count)]
        np.stack(rows).astype(np.uint8).tofile(folder / f"{name}.bin")


def test_cifar_100_has_the_fine_classes_of_both_labels(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(home))
    write_cifar100(home / "cifar-100-binary")
    data = cifar100()
    assert [tuple(part[0].shape) for part in data] == [(180, 3, 32, 32), (20, 3, 32, 32), (100, 3, 32, 32)]
    assert data.test[1].tolist() == list(range(100))
    assert data.test[0].float().mean(dim=(2, 3))[41].tolist() == [41, 20, 30]
    assert torch.equal(data.train[0][:, 0, 5, 5].long(), data.train[1])
    (home / "cifar-100-binary" / "test.bin").write_bytes(b"x" * 5000)
    with pytest.raises(DataError, match=r"test.bin has 5000 octets, not a multiple of 3074; replace it with the orig"):
        cifar100()


def test_cifar_100_runs_with_its_resnet(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(home))
    write_cifar100(home / "cifar-100-binary")
    (home / "mine.toml").write_text('task = { name = "cifar-100", batch = 4 }\nalgorithm = { sampled = 1 }\n')
    (settings,) = load(str(home / "mine.toml"), ["clients.count=2", "run.until=9", "run.every=9"])
    _, simulation = settings.simulation(0)
    for _ in simulation:
        pass
    assert len(simulation.server.model) == 275_572
    assert simulation.rows[-1]["local_steps"] > 0
    assert models.resnet20(100, pixels=models.CIFAR_100())[0].shift.flatten().tolist() == pytest.approx(
        [129.3, 124.1, 112.4], abs=0.1
    )


@pytest.mark.filterwarnings("ignore:unclosed")
def test_an_archive_that_is_not_cifar_100_as_published_is_refused(server: tuple[Path, str], home: Path) -> None:
    folder, url = server
    write_cifar100(home / "made" / "cifar-100-binary")
    with tarfile.open(folder / "cifar-100-binary.tar.gz", "w:gz") as archive:
        archive.add(home / "made" / "cifar-100-binary", "cifar-100-binary")
    with pytest.raises(
        DataError, match=r"CIFAR-100 is not on .*not the file that was published\): put train.bin, test"
    ):
        replace(CIFAR_100, url=url).find()
    mine = CIFAR_100.archive and (CIFAR_100.archive[0], md5(folder / "cifar-100-binary.tar.gz"))
    found = replace(CIFAR_100, url=url, archive=mine).find()
    assert found["test.bin"].stat().st_size == 100 * 3074


@pytest.mark.parametrize("deal", ["iid", "dirichlet", "slow classes"])
def test_a_table_of_measurements_is_learned_however_it_is_dealt_out(deal: str, tmp_path: Path) -> None:
    data = breast_cancer()
    assert [tuple(part[0].shape) for part in data] == [(341, 30), (114, 30), (114, 30)]
    assert data.train[0].mean(dim=0).abs().max() < 1e-5
    (tmp_path / "mine.toml").write_text(f'task = {{ name = "breast-cancer", partition = "{deal}" }}\n')
    (settings,) = load(str(tmp_path / "mine.toml"), ["clients.count=10", "run.until=200", "run.every=200"])
    _, simulation = settings.simulation(0)
    for _ in simulation:
        pass
    assert simulation.rows[-1]["accuracy"] > 0.9


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address under which it is served."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{httpd.server_port}/"
        httpd.shutdown()
        thread.join()


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.mark.filterwarnings("ignore:unclosed")
def test_what_is_missing_is_downloaded_once_and_checked(server: tuple[Path, str], home: Path) -> None:
    folder, url = server
    (folder / "a.bin").write_bytes(b"octets" * 1000)
    files = Files("Small", "small", {"a.bin": md5(folder / "a.bin")}, url=url)
    assert files.find() == {"a.bin": home / "cache" / "quafl" / "small" / "a.bin"}
    (folder / "a.bin").unlink()
    assert files.find()["a.bin"].read_bytes() == b"octets" * 1000
    (folder / "b.bin").write_bytes(b"not what was published")
    with pytest.raises(DataError, match=r"Wrong is not on this machine.*not the file that was published"):
        Files("Wrong", "wrong", {"b.bin": "0" * 32}, url=url).find()
    assert not (home / "cache" / "quafl" / "wrong" / "b.bin").exists()


@pytest.mark.filterwarnings("ignore:unclosed")
def test_an_archive_is_downloaded_and_unpacked(server: tuple[Path, str], home: Path, tmp_path: Path) -> None:
    folder, url = server
    (tmp_path / "x.bin").write_bytes(b"inside")
    with tarfile.open(folder / "all.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "x.bin", "batches/x.bin")
    files = Files("Packed", "batches", {"x.bin": ""}, url=url, archive=("all.tar.gz", md5(folder / "all.tar.gz")))
    assert files.find()["x.bin"].read_bytes() == b"inside"


def test_offline_and_missing_says_which_files_to_put_where(home: Path) -> None:
    files = Files("Far", "far", {"a.bin": "0" * 32, "b.bin": "0" * 32}, url="http://127.0.0.1:9/")
    with pytest.raises(DataError) as error:
        files.find()
    sentence = str(error.value)
    assert sentence.startswith("Far is not on this machine and cannot be downloaded (")
    assert (
        "put a.bin, b.bin into a folder far/, and name the folder that holds it in QUAFL_DATA (now not set)" in sentence
    )


def write_celeba(folder: Path, people: dict[int, int]) -> None:
    """Generated pictures in CelebA's format: a person's are of one grey, those that smile have a white mouth."""
    (folder / "img_align_celeba").mkdir(parents=True)
    identities, attributes = [], []
    for person, count in people.items():
        for k in range(count):
            name = f"{len(identities) + 1:06}.jpg"
            picture = Image.new("RGB", (178, 218), (person, person, person))
            if k % 2:
                picture.paste((255, 255, 255), (60, 130, 118, 150))
            picture.save(folder / "img_align_celeba" / name)
            identities.append(f"{name} {person}")
            attributes.append(f"{name}  -1 {1 if k % 2 else -1}")
    (folder / "identity_CelebA.txt").write_text("\n".join(identities) + "\n")
    (folder / "list_attr_celeba.txt").write_text("\n".join([str(len(attributes)), "Bald Smiling", *attributes]) + "\n")


def test_celebrities_with_ten_pictures_are_split_inside_each(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On generated pictures in the same format: CelebA itself may not be passed on."""
    monkeypatch.setenv(ENVIRONMENT, str(home))
    write_celeba(home / "celeba", {40: 10, 80: 9, 120: 20, 160: 12})
    data = read_celeba(pixels=32)
    assert data.train[0].shape == (34, 3, 32, 32)
    assert data.users.bincount()[[40, 80, 120, 160]].tolist() == [8, 0, 16, 10]
    assert len(data.test[1]) == 8
    smiles = data.train[0][:, :, 20, 16].float().mean(dim=1) > 200
    assert torch.equal(smiles, data.train[1] == 1)
    corner = data.train[0][:, 0, 0, 0].long()
    assert ((corner - data.users).abs() <= 3).all()
    hands = partition.by_user(data.train, data.users, 3)
    assert sorted(len(y) for _, y in hands) == [8, 10, 16]
    with pytest.raises(DataError, match="has no attribute 'Happy'; it has Bald, Smiling"):
        read_celeba("Happy")


def test_the_celeba_experiment_runs_on_its_format(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(home))
    write_celeba(home / "celeba", {40: 10, 80: 10})
    changes = ["clients.count=2", "algorithm.sampled=2", "algorithm.local_steps=1", "task.pixels=32", "task.batch=4"]
    (settings,) = load("celeba", [*changes, "run.until=9", "run.every=9"])
    _, simulation = settings.simulation(0)
    for _ in simulation:
        pass
    assert len(simulation.server.model) == 11_177_538
    assert simulation.rows[-1]["local_steps"] > 0


def test_leaf_users_keep_their_examples(tmp_path: Path) -> None:
    for part, count in ("train", 6), ("test", 2):
        (tmp_path / part).mkdir()
        people = {
            f"user{u}": {"x": [[float(u), k % 2] for k in range(count + u)], "y": [k % 2 for k in range(count + u)]}
            for u in range(5)
        }
        content = {"users": list(people), "num_samples": [count] * 5, "user_data": people}
        (tmp_path / part / "all.json").write_text(json.dumps(content))
    data = leaf(tmp_path)
    hands = partition.by_user(data.train, data.users, 5)
    assert sorted(len(y) for _, y in hands) == [6, 7, 8, 9, 10]
    assert all(len(x[:, 0].unique()) == 1 for x, _ in hands)
    (tmp_path / "leaf.toml").write_text(f'task = {{ name = "leaf", path = "{tmp_path}" }}')
    settings = load(str(tmp_path / "leaf.toml"), ["clients.count=5", "algorithm.sampled=2", "run.until=100"])
    _, simulation = settings[0].simulation(0)
    for _ in simulation:
        pass
    assert simulation.rows[-1]["loss"] < simulation.rows[0]["loss"]
    (tmp_path / "test" / "all.json").write_text('{"users": ["a"], "user_data": {"a": {"x": ["words"], "y": [0]}}}')
    with pytest.raises(DataError, match="is not LEAF data with numbers as features"):
        leaf(tmp_path)


# Partitions

DATA = (torch.arange(1000), torch.arange(1000) % 10)


def check_partition(hands: list[tuple[torch.Tensor, torch.Tensor]], clients: int) -> None:
    assert len(hands) == clients
    assert all(len(y) > 0 for _, y in hands)
    assert sorted(torch.cat([x for x, _ in hands]).tolist()) == list(range(1000))
    assert all(torch.equal(x % 10, y) for x, y in hands)


@given(st.floats(1e-6, 1e4), st.integers(1, 300), st.integers(0, 50))
def test_dirichlet_always_ends_and_leaves_no_client_empty(alpha: float, clients: int, seed: int) -> None:
    check_partition(partition.dirichlet(DATA, clients, alpha=alpha, seed=seed), clients)


def test_a_small_alpha_gives_few_classes_and_a_large_one_all() -> None:
    def classes(alpha: float) -> float:
        return sum(len(y.unique()) for _, y in partition.dirichlet(DATA, 10, alpha=alpha)) / 10

    assert classes(0.05) < 4
    assert classes(100.0) > 9


def test_slow_clients_hold_the_classes_given_and_the_others_the_rest() -> None:
    hands = partition.slow_classes(DATA, 20, slow=5, classes=[0, 1, 2])
    check_partition(hands, 20)
    assert {label for _, y in hands[15:] for label in y.tolist()} == {0, 1, 2}
    assert {label for _, y in hands[:15] for label in y.tolist()} == {3, 4, 5, 6, 7, 8, 9}
    for slow, classes in (0, [0]), (20, [0]), (5, list(range(10))):
        with pytest.raises(ValueError, match=r"some, and not all|choose other classes"):
            partition.slow_classes(DATA, 20, slow=slow, classes=classes)


def test_more_clients_than_users_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot deal 3 users out to 4 clients"):
        partition.by_user((torch.arange(6), torch.arange(6)), torch.tensor([0, 0, 1, 1, 2, 2]), 4)


def test_pictures_are_moved_by_at_most_four_pixels_and_mirrored_half_of_the_time() -> None:
    pictures = torch.zeros(2000, 1, 32, 32, dtype=torch.uint8)
    pictures[:, :, 10, 12] = 200
    changed = crop_and_flip(pictures, Draws(key_from(0)))
    assert changed.shape == pictures.shape
    assert (changed.sum(dim=(1, 2, 3)) == 200).all()
    places = changed.flatten(1).argmax(dim=1)
    rows, columns = places // 32, places % 32
    assert set(rows.tolist()) == set(range(6, 15))
    assert set(columns.tolist()) == set(range(8, 17)) | {31 - column for column in range(8, 17)}
    assert (columns > 17).float().mean().item() == pytest.approx(0.36, abs=0.1)
