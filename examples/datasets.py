"""A dataset that is larger than what is held: each client reads its part of a file when it needs it.

    python examples/datasets.py

The file has 200,000 rows. No client keeps any of them; two processes read ahead of what is learned.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

import quafl

ROWS, WIDTH, CLIENTS = 200_000, 64, 10


def write(path: Path) -> None:
    """64 octets a row; the label is whether the first half is brighter than the second one."""
    rows = np.memmap(path, np.uint8, "w+", shape=(ROWS, WIDTH))
    numbers = np.random.default_rng(0)
    for start in range(0, ROWS, 10_000):
        rows[start : start + 10_000] = numbers.integers(256, size=(10_000, WIDTH))
    rows.flush()


class Part(Dataset[tuple[Tensor, int]]):
    """A client's rows of the file."""

    def __init__(self, path: Path, client: int) -> None:
        self.rows: NDArray[np.uint8] = np.memmap(path, np.uint8, "r", shape=(ROWS, WIDTH))[client::CLIENTS]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        """Read from the disk, here and now."""
        row = torch.from_numpy(self.rows[place].astype(np.float32) / 255 - 0.5)
        return row, int(row[: WIDTH // 2].sum() > row[WIDTH // 2 :].sum())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.bin"
        write(file)
        result = quafl.simulate(
            model=nn.Linear(WIDTH, 2),
            clients=[Part(file, client) for client in range(CLIENTS)],
            held_out=0.005,  # of each client's rows, by which it is judged
            workers=2,
            algorithm=quafl.QuAFL(sampled=3),
            optimizer=quafl.sgd(lr=0.5),
            until=100,
            evaluations=2,
        )
        last = result.rows[-1]
        print(f"accuracy {last['accuracy_clients_mean']:.2f}, of the worst client {last['accuracy_clients_worst']:.2f}")
