"""A task for a real federation: each hospital has a CSV of its own, nobody sees another's.

    python patients.py                      # writes one CSV for each party, to try it with
    quafl run rehearsal.toml --out runs/rehearsal    # the same function, simulated
    quafl federation init north south --server localhost:8002
    quafl server federation/server --settings fed.toml
    quafl client federation/clients/north --task patients:make_task
    quafl client federation/clients/south --task patients:make_task

Thirty measurements of a tumour in every row, and whether it was benign (1) in the last column.
"""

import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from quafl import Local

FOLDER = Path(os.environ.get("PATIENTS", "."))


def make_task(name: str) -> Local:
    """The network that all train, and this party's own data; `name` is the one in its certificate."""
    table = torch.from_numpy(np.loadtxt(FOLDER / f"{name}.csv", delimiter=",", skiprows=1, dtype=np.float32))
    network = nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))
    return Local(network, (table[:, :-1], table[:, -1].long()), batch_size=16)


def write_csvs(folder: Path = FOLDER) -> None:
    """Deal out scikit-learn's breast cancer data: a third to the server, to judge by, a third to each hospital."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    rows = np.column_stack((data.data, data.target))[np.random.default_rng(0).permutation(len(data.target))]
    for name, part in zip(("server", "north", "south"), np.array_split(rows, 3), strict=True):
        header = ",".join([*data.feature_names, "benign"])
        np.savetxt(folder / f"{name}.csv", part, delimiter=",", header=header, comments="")


if __name__ == "__main__":
    write_csvs()
