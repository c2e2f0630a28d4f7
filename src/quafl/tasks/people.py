"""Data of people in LEAF's format (Caldas et al., 2018), as its preprocess.sh writes them.

JSON files in train/ and test/ of a dataset's folder, each with `users` (names), `num_samples` (of each), and
`user_data` ({name: {"x": [...], "y": [...]}}). A user whose samples LEAF has left out may still stand in
`user_data`, empty; who counts is who stands in `users`.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from quafl.tasks.files import DataError, Files
from quafl.tasks.given import Pair as Data

Array: TypeAlias = Any  # of numpy, an example a row
Reader: TypeAlias = Callable[[list[Any]], Array]  # of one user's x or y; raises ValueError with the rest of a sentence

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"  # LEAF's 80 characters
WINDOW = 80  # characters that the next one follows
WORDS = 25  # of a tweet that are looked at
VOCABULARY = 8192  # numbers that words may have
TEXT = 4  # where a tweet's text is, after its id, date, query and user
SYMBOLS = 62  # digits, capitals, small letters
SIDE = 28  # of their pictures

_WORD = re.compile(r"[\w']+|[.,!?;]")  # as LEAF splits
_PLACES = np.full(128, len(ALPHABET) - 1, np.uint8)
_PLACES[[ord(letter) for letter in ALPHABET]] = np.arange(len(ALPHABET))


class Users(NamedTuple):
    """Data of people: whose each training example is, what to judge by, and whose that is."""

    train: Data
    users: Tensor
    test: Data
    judged: Tensor


def _files(title: str, folder: str, options: str) -> Files:
    why = f"LEAF's ./preprocess.sh {options} makes it, in its folder data/{folder}"
    return Files(title, folder, dict.fromkeys(("train", "test"), ""), why=why)


FEMNIST = _files("FEMNIST", "femnist", "-s niid --sf 0.05 -k 0 -t sample")
SHAKESPEARE = _files("Shakespeare", "shakespeare", "-s niid --sf 0.2 -k 0 -t sample -tf 0.8")
SENT140 = _files("Sent140", "sent140", "-s niid --sf 0.05 -k 3 -t sample")


def leaf(folder: Path | str) -> Users:
    """Whatever has numbers as features and class numbers as labels, in LEAF's format."""
    return _read(Path(folder), _numbers, _labels)


def femnist(folder: Path | str | None = None) -> Users:
    """Handwritten digits and letters in 62 classes, 28×28 grey pixels, and who wrote them (Cohen et al., 2017;
    Caldas et al., 2018). LEAF's numbers from 0 to 1 are made octets again."""
    return _read(_folder(FEMNIST, folder), _pictures, partial(_labels, classes=SYMBOLS))


def shakespeare(folder: Path | str | None = None) -> Users:
    """80 characters of a role's lines and the next one, as numbers in LEAF's alphabet. A character that is not in it
    counts as the last one of it, as LEAF has it."""
    return _read(_folder(SHAKESPEARE, folder), _windows, _letters)


def sent140(folder: Path | str | None = None, *, vocabulary: int = VOCABULARY) -> Users:
    """Tweets that were happy (1) or not (0), and who wrote them (Go et al., 2009). The first 25 words, each as a number
    from 1 to `vocabulary` that is a hash of it, and 0 where there are no more: LEAF looks words up in GloVe instead, a
    download."""
    return _read(_folder(SENT140, folder), partial(_tweets, vocabulary=vocabulary), partial(_labels, classes=2))


def _folder(files: Files, own: Path | str | None) -> Path:
    return files.find()["train"].parent if own is None else Path(own)


# Files


def _read(folder: Path, inputs: Reader, targets: Reader) -> Users:
    names: dict[str, int] = {}
    train, users = _part(folder / "train", names, inputs, targets)
    test, judged = _part(folder / "test", names, inputs, targets)
    return Users(train, users, test, judged)


def _part(folder: Path, names: dict[str, int], inputs: Reader, targets: Reader) -> tuple[Data, Tensor]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise DataError(
            f"{folder} holds no JSON files; name the folder of a dataset in LEAF's format, which has them in train/ "
            f"and test/"
        )
    features: list[Array] = []
    labels: list[Array] = []
    users: list[int] = []
    for path in files:
        for name, mine in _people(path).items():
            x, y = _samples(mine, f"{path}: user {name!r}", inputs, targets)
            if features and x.shape[1:] != features[0].shape[1:]:
                raise DataError(
                    f"{path}: user {name!r} has x of shape {x.shape[1:]}, others have {features[0].shape[1:]}; all "
                    f"samples must have the same shape"
                )
            features.append(x)
            labels.append(y)
            users.append(names.setdefault(name, len(names)))
    counts = torch.tensor([len(y) for y in labels])
    data = torch.from_numpy(np.concatenate(features)), torch.from_numpy(np.concatenate(labels))
    return data, torch.tensor(users).repeat_interleave(counts)


def _people(path: Path) -> dict[str, Any]:
    """What a file has of each of its users."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        people = {str(name): content["user_data"][name] for name in content["users"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not LEAF data ({_said(error)}); it must have users, num_samples, and user_data with x and y of "
            f"each user, as LEAF's preprocess.sh writes them"
        ) from error
    if not people:
        raise DataError(f"{path} has no users, must have at least one; remove the file, or sample more of the data")
    return people


def _samples(mine: Any, whose: str, inputs: Reader, targets: Reader) -> tuple[Array, Array]:
    if not isinstance(mine, dict) or not all(isinstance(mine.get(part), list) for part in "xy"):
        raise DataError(f"{whose} is not LEAF data, must have a list x and a list y; make it by LEAF's preprocess.sh")
    x, y = mine["x"], mine["y"]
    if len(x) != len(y):
        raise DataError(f"{whose} has {len(x)} x and {len(y)} y, must have as many of one as of the other")
    if not x:
        raise DataError(f"{whose} has no samples, must have at least one; run LEAF's preprocess.sh with -k 1 or more")
    try:
        return inputs(x), targets(y)
    except (ValueError, TypeError) as error:
        raise DataError(f"{whose} {error}") from error


def _said(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no {error}"
    return error.strerror or "unreadable" if isinstance(error, OSError) else str(error)


# Samples


def _numbers(x: list[Any]) -> Array:
    try:
        rows = np.asarray(x, np.float32)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"has {_short(x[0])} in x, which is not LEAF data with numbers as features; lists of numbers must be of "
            f"the same length, and words need a reader of their own (shakespeare, sent140)"
        ) from error
    return rows


def _labels(y: list[Any], classes: int | None = None) -> Array:
    try:
        found = np.asarray([int(label) for label in y], np.int64)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"has {_short(y[0])} in y, must have class numbers; make it by LEAF's preprocess.sh"
        ) from error
    strange = found[(found < 0) | (found >= classes)] if classes is not None else found[found < 0]
    if len(strange):
        most = "" if classes is None else f" to {classes - 1}"
        raise ValueError(f"has the label {strange[0]}, must be from 0{most}; is this another dataset's folder?")
    return found


def _pictures(x: list[Any]) -> Array:
    rows = _numbers(x).reshape(len(x), -1)
    if rows.shape[1] != SIDE**2 or not (rows.min() >= 0 and rows.max() <= 1):
        raise ValueError(
            f"has pictures of {rows.shape[1]} numbers from {rows.min():g} to {rows.max():g}, must have {SIDE**2} from "
            f"0 to 1; make them by LEAF's preprocess.sh"
        )
    return np.rint(255 * rows).astype(np.uint8).reshape(-1, 1, SIDE, SIDE)


def _windows(x: list[Any]) -> Array:
    wrong = next((one for one in x if not isinstance(one, str) or len(one) != WINDOW), None)
    if wrong is not None:
        length = f"{len(wrong)} characters" if isinstance(wrong, str) else f"no text but {_short(wrong)}"
        raise ValueError(f"has {length} in x, must have texts of {WINDOW}; make them by LEAF's preprocess.sh")
    return _places("".join(x)).reshape(-1, WINDOW)


def _letters(y: list[Any]) -> Array:
    wrong = next((one for one in y if not isinstance(one, str) or len(one) != 1), None)
    if wrong is not None:
        raise ValueError(f"has {_short(wrong)} in y, must have single characters; make them by LEAF's preprocess.sh")
    return _places("".join(y)).astype(np.int64)


def _places(text: str) -> Array:
    """Each character's place in the alphabet: -1, the last one, if it has none."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return np.where(codes < len(_PLACES), _PLACES[codes % len(_PLACES)], _PLACES[0])


def _tweets(x: list[Any], vocabulary: int) -> Array:
    rows = np.zeros((len(x), WORDS), np.int32)
    for row, tweet in zip(rows, x, strict=True):
        if not isinstance(tweet, list) or len(tweet) <= TEXT or not isinstance(tweet[TEXT], str):
            raise ValueError(
                f"has {_short(tweet)} in x, must have lists of a tweet's id, date, query, user and text; make them by "
                f"LEAF's preprocess.sh"
            )
        numbers = hashed(tweet[TEXT], vocabulary)
        row[: len(numbers)] = numbers
    return rows


def hashed(text: str, vocabulary: int = VOCABULARY, most: int = WORDS) -> list[int]:
    """A text's first words as numbers from 1 to `vocabulary`: the same ones everywhere, and no list of words is needed.

    >>> hashed("So happy!") == hashed("so HAPPY !")
    True
    """
    words: Sequence[str] = _WORD.findall(text.lower())[:most]
    return [1 + crc32(word.encode("utf-8", "surrogatepass")) % vocabulary for word in words]


def _short(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 40 else f"{said[:37]}..."
