"""FedScale's traces of phones as a simulated world."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quafl import Lattice, QuAFL
from quafl.codec.coders import coders_for
from quafl.core.randomness import Generators
from quafl.run.folders import prepare
from quafl.run.pool import run as run_all
from quafl.settings.reading import load
from quafl.sim import World, fedscale
from quafl.sim.piecewise import Piecewise
from quafl.testing import fedscale_traces

DAY = 86_400
CODERS = coders_for(QuAFL(), Lattice(bits=4))


def written(folder: Path, devices: Any, behaviours: Any = None) -> Path:
    for name, table in (fedscale.CAPACITY, devices), (fedscale.BEHAVIOUR, behaviours):
        if table is not None:
            (folder / name).write_bytes(pickle.dumps(table))
    return folder


def test_a_phone_computes_talks_and_comes_and_goes_as_its_trace_says(tmp_path: Path) -> None:
    """By hand: 3 · 10 examples · 50 ms are 1.5 seconds a step; 800 kbit are 102,400 octets a second."""
    devices = {
        7: {"computation": 50.0, "communication": 800.0},
        9: {"computation": "25", "communication": np.float64(80)},
    }
    behaviours = {
        3: {"duration": 40, "active": [10, 60], "inactive": [20, 90], "finish_time": 100, "model": "a phone"},
        5: {"active": [50, 0, 70, 80], "inactive": [70, 20, 75], "finish_time": 100},  # one stay touches another
    }
    world = World(trace=written(tmp_path, devices, behaviours), trace_batch=10, step_law="constant")
    speeds = world.speeds(3, Generators(0), 250.0)
    there = {time: speeds.present(float(time)).tolist() for time in (0, 15, 20, 30, 60, 74, 90, 110, 150, 215)}
    assert {time for time, present in there.items() if present[0]} == {15, 60, 74, 110, 215}
    assert {time for time, present in there.items() if present[1]} == {0, 15, 60, 74, 110, 150, 215}
    assert all(present[2] == present[0] for present in there.values())  # of whom there are two, the third is the first
    ids, many = torch.arange(3), torch.full((3,), 999)
    assert speeds.steps_within(ids, torch.zeros(3), 100.0, many).tolist() == [
        int(40 / 1.5),
        int(45 / 0.75),
        int(40 / 1.5),
    ]
    assert speeds.next_return(95.0) == 100.0
    link = world.link(3, CODERS)
    assert link.transfer(ids, 5.0, 102_400, 51_200).tolist() == [1.5, 15.0, 1.5]


def test_stays_end_with_the_period_and_somebody_comes_back_after_the_run(tmp_path: Path) -> None:
    devices = {1: {"computation": 1, "communication": 1}}
    behaviours = {1: {"active": [80, 99], "inactive": [110, 80], "finish_time": 100.1}}  # the second pair is no stay
    speeds = World(trace=written(tmp_path, devices, behaviours)).speeds(1, Generators(0), 950.0)
    assert [bool(speeds.present(time)) for time in (79.0, 80.0, 100.0, 105.0, 181.0, 905.0)] == [0, 1, 1, 0, 1, 0]
    assert speeds.next_return(945.0) == pytest.approx(9 * 100.1 + 80)
    assert speeds.next_return(990.0) < float("inf")
    assert isinstance(speeds.rates, Piecewise)
    assert bool((speeds.rates.times[0].diff() > 0).all())


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int32, np.dtype(">f8").type])
def test_numpys_numbers_are_read_without_numpy(tmp_path: Path, protocol: int, kind: type) -> None:
    table = {1: {"computation": kind(12), "communication": kind(100)}}
    (tmp_path / fedscale.CAPACITY).write_bytes(pickle.dumps(table, protocol=protocol))
    speeds = World(trace=tmp_path, trace_batch=10, step_law="constant").speeds(1, Generators(0), 10.0)
    assert float(speeds.rates.values[0, 0]) == pytest.approx(1000 / (3 * 10 * 12))


class Forged:
    """A number whose dtype says that its octets are the address of an object."""

    def __reduce__(self) -> Any:
        return (
            np.dtype(np.float64).newbyteorder("=").__reduce__()[0],
            ("V8", False, True),
            (3, "|", None, ("a",), {}, 8, 1, 0),
        )


def test_without_behaviours_everybody_is_always_there(tmp_path: Path) -> None:
    folder = written(tmp_path, {1: {"computation": 10, "communication": 100}})
    speeds = World(trace=folder).speeds(2, Generators(0), 1e6)
    assert speeds.present(12345.0).tolist() == [True, True]


@pytest.mark.parametrize(
    ("devices", "behaviours", "sentence"),
    [
        ([1], None, "must hold a dictionary with an entry for each device, holds list"),
        ({}, None, "must hold a dictionary with an entry for each device"),
        (
            {1: {"computation": 10}},
            None,
            "client_device_capacity, 1: 'communication' is None, must be a positive number",
        ),
        ({1: {"computation": -1, "communication": 1}}, None, "'computation' is -1, must be a positive number"),
        ({1: 5}, None, "client_device_capacity, 1: 'computation' is None, must be a positive number"),
        (
            {1: {"computation": 1, "communication": 1}},
            {4: {"finish_time": 9}},
            "client_behave_trace, 4: must have lists",
        ),
        (
            {1: {"computation": 1, "communication": 1}},
            {4: {"finish_time": 1e-3, "active": [0], "inactive": [5e-4]}},
            "would come more than 100,000 times until 1000; choose a shorter run",
        ),
        (Path(), None, "it wants pathlib"),
        ({1: Forged()}, None, "it has numbers of numpy's kind 'V8', and must have plain ones"),
        ({1: {"computation": 10**400, "communication": 1}}, None, "must be a positive number"),
        (os.system, None, "it wants posix.system, and must hold nothing but numbers, texts and lists"),
    ],
)
def test_what_is_no_such_trace_is_said(tmp_path: Path, devices: Any, behaviours: Any, sentence: str) -> None:
    folder = written(tmp_path, devices, behaviours)
    with pytest.raises(ValueError, match=sentence):
        World(trace=folder).speeds(2, Generators(0), 1000.0)


def test_a_folder_without_a_trace_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the trace .*client_device_capacity \(No such file"):
        World(trace=tmp_path).speeds(2, Generators(0), 1000.0)
    (tmp_path / fedscale.CAPACITY).write_bytes(b"client,time\n")
    with pytest.raises(ValueError, match="is no trace of FedScale's"):
        World(trace=tmp_path).speeds(2, Generators(0), 1000.0)


def test_made_up_phones_charge_at_night_and_train(tmp_path: Path) -> None:
    """The same format, the same phones for the same seed; and a run with them, by settings."""
    folder, again, other = (fedscale_traces(tmp_path / str(n), 400, seed) for n, seed in enumerate((0, 0, 1)))
    for name in fedscale.CAPACITY, fedscale.BEHAVIOUR:
        assert (folder / name).read_bytes() == (again / name).read_bytes() != (other / name).read_bytes()
    speeds = World(trace=folder).speeds(400, Generators(0), 6.0 * DAY)
    by_hour = [float(speeds.present(DAY + 3600.0 * hour).float().mean()) for hour in range(24)]
    assert max(by_hour) > 0.4 > 4 * min(by_hour)
    (tmp_path / "phones.toml").write_text(
        f"""
        task = {{ name = "digits" }}
        clients = {{ count = 40, trace = "{folder}" }}
        algorithm = {{ name = "calibrated", sampled = 5, wait = 600.0, lr = 0.2 }}
        run = {{ until = {DAY}, every = {DAY}, seeds = [0] }}
        """
    )
    (run,) = prepare(load(str(tmp_path / "phones.toml")), tmp_path / "run", overwrite=False)
    last: list[Any] = []
    assert not run_all([run], on_news=lambda job, row: last.append(row), processes=1)
    assert last[-1]["local_steps"] > 100
    assert last[-1]["accuracy"] > 0.6
