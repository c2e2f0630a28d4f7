"""Real data, read from their original files. The digits ship inside scikit-learn: no download."""

import gzip
import zlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quafl.core.randomness import derive
from quafl.tasks.files import DataError, Files, needed
from quafl.tasks.given import Pair as Data
from quafl.tasks.hands import take
from quafl.tasks.people import Users


class Splits(NamedTuple):
    """What to learn from, what to choose settings by, and what to judge by."""

    train: Data
    validation: Data
    test: Data


MNIST = Files(
    "MNIST",
    "mnist",
    {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    url="https://ossci-datasets.s3.amazonaws.com/mnist/",
)
FASHION_MNIST = Files(
    "Fashion-MNIST",
    "fashion-mnist",
    {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)
CIFAR_10 = Files(
    "CIFAR-10",
    "cifar-10-batches-bin",
    {
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
    url="https://www.cs.toronto.edu/~kriz/",
    archive=("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
)
CIFAR_100 = Files(
    "CIFAR-100",
    "cifar-100-binary",
    dict.fromkeys(("train.bin", "test.bin"), ""),  # only the archive's sum was published
    url="https://www.cs.toronto.edu/~kriz/",
    archive=("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
)
CELEBA = Files(
    "CelebA", "celeba", dict.fromkeys(("img_align_celeba", "identity_CelebA.txt", "list_attr_celeba.txt"), "")
)


def digits() -> Splits:
    """1,797 handwritten digits of 8×8 pixels scaled to 0..1 (E. Alpaydin and C. Kaynak, UCI 1998): a fixed 60/20/20
    split."""
    with needed():
        from sklearn.datasets import load_digits
    inputs, targets = load_digits(return_X_y=True)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(derive("digits")))
    x = torch.as_tensor(inputs, dtype=torch.float32)[order] / 16
    y = torch.as_tensor(targets, dtype=torch.int64)[order]
    parts = zip(*(t.split([1077, 360, 360]) for t in (x, y)), strict=True)
    return Splits(*parts)


def breast_cancer() -> Splits:
    """569 tumours, malignant (0) or benign (1), by 30 measurements of their cells, each scaled to mean 0 and variance 1
    (W. Wolberg, O. Mangasarian and W. Street, UCI 1995; inside scikit-learn): a fixed 60/20/20 split."""
    with needed():
        from sklearn.datasets import load_breast_cancer
    inputs, targets = load_breast_cancer(return_X_y=True)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(derive("breast-cancer")))
    x, y = torch.as_tensor(inputs, dtype=torch.float64)[order], torch.as_tensor(targets, dtype=torch.int64)[order]
    learned = x[:341]
    x = ((x - learned.mean(dim=0)) / learned.std(dim=0)).float()
    return Splits(*zip(*(t.split([341, 114, 114]) for t in (x, y)), strict=True))


def mnist() -> Splits:
    """60,000 and 10,000 handwritten digits of 28×28 pixels (LeCun, Cortes and Burges)."""
    return _idx(MNIST)


def fashion_mnist() -> Splits:
    """60,000 and 10,000 pictures of clothes of 28×28 pixels (Xiao, Rasul and Vollgraf, 2017)."""
    return _idx(FASHION_MNIST)


def cifar10() -> Splits:
    """50,000 and 10,000 colour pictures of 32×32 pixels (Krizhevsky, 2009), from the binary batches."""
    *train, test = (_cifar_batch(path) for path in CIFAR_10.find().values())
    pictures, labels = zip(*train, strict=True)
    return _with_validation((torch.cat(pictures), torch.cat(labels)), test)


def cifar100() -> Splits:
    """50,000 and 10,000 colour pictures of 32×32 pixels in 100 classes (Krizhevsky, 2009), from the binary files. The
    20 coarser classes are left out."""
    train, test = (_cifar_batch(path, labels=2) for path in CIFAR_100.find().values())
    return _with_validation(train, test)


def celeba(attribute: str = "Smiling", *, pixels: int = 100, least: int = 10) -> Users:
    """Faces of celebrities with at least `least` pictures each, whether they have the attribute (Liu et al., 2015). The
    middle square of each aligned picture, scaled; every fifth picture of a celebrity is for judging."""
    folder, identities, attributes = CELEBA.find().values()
    person = {name: int(number) for name, number in map(str.split, _lines(identities))}
    _, header, *lines = _lines(attributes)
    if attribute not in header.split():
        raise DataError(f"{attributes} has no attribute {attribute!r}; it has {', '.join(header.split())}")
    column = 1 + header.split().index(attribute)
    labels = {line.split()[0]: int(line.split()[column] == "1") for line in lines}
    pictures_of: dict[int, list[str]] = {}
    for name in sorted(labels.keys() & person.keys()):
        pictures_of.setdefault(person[name], []).append(name)
    chosen = [
        (name, who, place % 5 == 4)
        for who, names in sorted(pictures_of.items())
        if len(names) >= least
        for place, name in enumerate(names)
    ]
    if not chosen:
        raise DataError(f"no celebrity in {folder.parent} has {least} pictures or more")
    x = torch.empty(len(chosen), 3, pixels, pixels, dtype=torch.uint8)
    for row, (name, _, _) in enumerate(chosen):
        x[row] = _face(folder / name, pixels)
    y = torch.tensor([labels[name] for name, _, _ in chosen])
    who, judged = torch.tensor([who for _, who, _ in chosen]), torch.tensor([judged for _, _, judged in chosen])
    return Users(take((x, y), ~judged), who[~judged], take((x, y), judged), who[judged])


def _idx(files: Files) -> Splits:
    train_x, train_y, test_x, test_y = (_read_idx(path) for path in files.find().values())
    return _with_validation((train_x.unsqueeze(1), train_y.long()), (test_x.unsqueeze(1), test_y.long()))


def _with_validation(train: Data, test: Data) -> Splits:
    """A fixed tenth of the training set, for choosing settings."""
    order = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(derive("validation")))
    held = len(order) // 10
    return Splits(take(train, order[held:]), take(train, order[:held]), test)


def _read_idx(path: Path) -> Tensor:
    """A tensor of octets: two zeros, the type 8, the number of axes, their sizes as big-endian words, the octets."""
    try:
        about = path.stat()
        return _unpacked(path, about.st_mtime_ns, about.st_size, about.st_ino).clone()
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); replace it with the original file") from error


@lru_cache(maxsize=4)
def _unpacked(path: Path, *_written: int) -> Tensor:
    """A set's four files are looked at before a run, and read again for it."""
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    axes = content[3]
    shape = np.frombuffer(content, ">u4", axes, 4).astype(int)
    octets = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    if content[:3] != b"\0\0\x08" or octets.size != shape.prod():
        raise ValueError("not an idx file of octets")
    return torch.from_numpy(octets.reshape(shape).copy())


def _cifar_batch(path: Path, labels: int = 1) -> Data:
    """Many times a label, or several of which the last one counts, and three planes of 32×32 pixels."""
    octets, row = np.fromfile(path, np.uint8), labels + 3 * 32 * 32
    if octets.size == 0 or octets.size % row:
        raise DataError(f"{path} has {octets.size} octets, not a multiple of {row}; replace it with the original file")
    rows = torch.from_numpy(octets.reshape(-1, row))
    return rows[:, labels:].reshape(-1, 3, 32, 32).contiguous(), rows[:, labels - 1].long()


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _face(path: Path, pixels: int) -> Tensor:
    with needed():
        from PIL import Image
    try:
        with Image.open(path) as picture:
            side = min(picture.size)
            left, top = (picture.width - side) // 2, (picture.height - side) // 2
            square = picture.convert("RGB").resize((pixels, pixels), box=(left, top, left + side, top + side))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); replace it with the original file") from error
    return torch.from_numpy(np.array(square)).movedim(-1, 0).contiguous()
