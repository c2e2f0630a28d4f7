"""A real federation whose parties are programs: serve and join, in threads here."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from parties import free_port
from torch import nn

import quafl
from quafl.deploy import provision

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def brought(name: str) -> quafl.Local:
    part = {"north": slice(0, 20), "south": slice(20, 40), "server": slice(40, 60)}[name]
    return quafl.Local(nn.Linear(4, 2), (X[part], Y[part]), batch_size=10)


def test_a_federation_is_served_and_joined_by_programs(tmp_path: Path) -> None:
    provision.init(tmp_path, f"localhost:{free_port()}", ["north", "south"])
    settings = {
        "clients": {"start_with": 2},
        "algorithm": {"name": "quafl", "sampled": 2, "lr": 0.5, "wait": 0.01, "patience": 20.0},
        "run": {"rounds": 12, "every": 0.05},
    }
    kits = {name: tmp_path / "clients" / name for name in ("north", "south")}
    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(quafl.join, kit, task=brought, step_seconds=0.001) for kit in kits.values()]
        served = quafl.serve(tmp_path / "server", settings, task=brought("server"))
        assert [client.result(60.0) for client in clients] == [True, True]
    assert served.ended
    assert served.rows[-1]["round"] == 12
    assert served.rows[-1]["contacts"] > 0
    model = nn.Linear(4, 2)
    model.load_state_dict(served.last)
    right = (model(X[40:]).argmax(1) == Y[40:]).double().mean()
    assert float(right) == served.rows[-1]["accuracy"]


def test_parties_need_their_own_kits_and_tasks(tmp_path: Path) -> None:
    provision.init(tmp_path, f"localhost:{free_port()}", ["north"])
    north, server = tmp_path / "clients" / "north", tmp_path / "server"
    with pytest.raises(ValueError, match="is the kit of north; a server needs the server's"):
        quafl.serve(north, {}, task=brought)
    with pytest.raises(ValueError, match="is the server's kit; a client needs one of its own"):
        quafl.join(server, task=brought)
    with pytest.raises(TypeError, match=r"the task is a int, must be a quafl.Local"):
        quafl.join(north, task=lambda name: 3)
    with pytest.raises(quafl.SettingsError, match=r"unknown key run.round = 3"):
        quafl.serve(server, {"run": {"round": 3}}, task=brought)
