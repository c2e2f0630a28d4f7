"""What clients keep beyond a budget of memory is in a file, and nothing else changes."""

import errno
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_spread import ALGORITHMS, NARROW, parts
from torch import Tensor

from quafl import Calibrated, Simulation, TopK, World, compressed, momentum, sgd, simulate
from quafl.codec import Lattice
from quafl.codec.seams import Codecs
from quafl.core import SCAFFOLD
from quafl.record import checkpoints
from quafl.record.summary import RecordError
from quafl.run.folders import prepare
from quafl.run.jobs import Job, compute
from quafl.settings.reading import load
from quafl.sim import shelf
from quafl.sim.shelf import Shelf

CLIENTS = 5


def tensor(number: int) -> Tensor:
    dtype = (torch.float32, torch.bfloat16, torch.int64, torch.bool)[number % 4]
    return (torch.arange(3 + number % 5) * number).to(dtype)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.integers(0, CLIENTS - 1), st.integers(1, 9), st.booleans()
            ),  # a client's; shared with the last
            st.tuples(st.just("drop"), st.integers(0, CLIENTS - 1), st.just(False)),
            st.tuples(st.just("look"), st.just(0), st.just(False)),
        ),
        max_size=60,
    ),
    st.sampled_from([1, 100, 400]),
)
def test_a_shelf_is_a_dictionary_whatever_its_budget(steps: Sequence[tuple[int | str, int, bool]], budget: int) -> None:
    """Also one that was looked at, and has gone on; files are written anew at every chance."""
    small, shelf.SMALL = shelf.SMALL, 0
    try:
        mine, plain, last, seen = Shelf(budget), {}, tensor(1), []
        for what, number, shared in steps:
            if what == "drop":
                mine.pop(number, None), plain.pop(number, None)
            elif what == "look":
                seen.append((mine.copy(), dict(plain)))
            else:
                last = last if shared else tensor(number)
                mine[what] = plain[what] = (last, torch.full((), number), torch.empty(0))
                here, there = mine.octets
                assert here <= budget
                assert there <= 2 * 64 * 2 * len(plain)  # a tensor takes 64 octets of it, and half may be of no use
        seen += [(mine.copy(), plain), (dict(mine), plain)]
        for one, other in seen:
            assert one.keys() == other.keys()
            for client, row in one.items():
                assert [x.dtype for x in row] == [x.dtype for x in other[client]]
                assert all(torch.equal(x, y) for x, y in zip(row, other[client], strict=True))
    finally:
        shelf.SMALL = small


def test_what_clients_share_is_counted_and_written_once() -> None:
    mine, one = Shelf(1000), torch.ones(200)
    for client in range(10):
        mine[client] = (one,)
    assert mine.octets == (800, 0)
    mine[10] = (torch.zeros(200),)
    assert mine.octets == (800, 832)
    assert all(torch.equal(mine[client][0], one) for client in range(10))
    assert len({row[0].data_ptr() for row in mine.copy().values()}) == 2


@pytest.mark.parametrize("algorithm", ["Calibrated", "QuAFL", "SCAFFOLD"])
def test_a_budget_of_memory_changes_nothing(algorithm: str) -> None:
    """Run through, and continued from a checkpoint with another budget."""
    mine = parts(ALGORITHMS[algorithm], Codecs(up=TopK(share=0.1), down=Lattice(bits=4)), momentum(0.05))
    wanted = [row for row in Simulation(*mine) if row is not None]
    tight = Simulation(*mine, memory=30_000)
    assert [row for row in tight if row is not None] == wanted
    known = tight.crew.everybody()._known
    assert isinstance(known, Shelf)
    here, there = known.octets
    assert here <= 30_000 < there
    for first, then in (20_000, float("inf")), (float("inf"), 1.0), (10_000, 50_000):
        run = Simulation(*mine, memory=first)
        for _ in islice(run, 5):
            pass
        state = run.state()
        for _ in islice(run, 4):  # which does not change what was seen
            pass
        other = Simulation(*mine, memory=then)
        other.restore(state)
        for _ in other:
            pass
        assert other.rows == wanted


def test_a_row_of_zeros_that_takes_no_room_is_kept_too() -> None:
    """As SCAFFOLD's client has before it has moved, if it is contacted alone."""
    mine = parts(SCAFFOLD(sampled=1, local_steps=2), Lattice(bits=4), sgd(0.05))
    wanted = [row for row in Simulation(*mine) if row is not None]
    assert [row for row in Simulation(*mine, memory=8000) if row is not None] == wanted


def test_a_checkpoint_has_what_is_on_disk(tmp_path: Path) -> None:
    run = Simulation(*parts(ALGORITHMS["Calibrated"], NARROW, sgd(0.05)), memory=1.0)
    for _ in islice(run, 12):
        pass
    wanted = run.crew.everybody().everybody()
    checkpoints.save(tmp_path / "checkpoint.pt", run.state())
    other = Simulation(*parts(ALGORITHMS["Calibrated"], NARROW, sgd(0.05)), memory=1.0)
    other.restore(checkpoints.load(tmp_path / "checkpoint.pt", mapped=True))
    found = other.crew.everybody().everybody()
    assert torch.equal(found.base, wanted.base)
    assert torch.equal(found.memory, wanted.memory)


def test_a_run_is_resumed_with_another_budget(tmp_path: Path) -> None:
    (tmp_path / "curve.toml").write_text(
        """
        task = { name = "digits" }
        clients = { count = 12 }
        algorithm = { name = "calibrated", sampled = 5, lr = 0.2 }
        run = { until = 60.0, every = 20.0, seeds = [0], memory = 1e-5 }
        """
    )
    (curve,) = load(str(tmp_path / "curve.toml"))
    (other,) = load(str(tmp_path / "curve.toml"), ["run.memory=1"])
    found = []
    for first, then in (curve, other), (other, other):
        (folder,) = prepare([first], tmp_path / str(len(found)), overwrite=False)
        stops = iter([False] * 20 + [True]).__next__
        path = folder.path / "checkpoint-seed0.pt"
        assert compute(Job(first, 0, path, 0.0), lambda word: None, stops) is None
        outcome = compute(Job(then, 0, path, 60.0), lambda word: None, lambda: False)
        assert outcome is not None
        found.append(outcome.rows)
    assert found[0] == found[1]


def test_a_file_larger_than_memory_can_be_looked_at() -> None:
    mine = Shelf(1)
    mine[0] = (torch.arange(10),)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert mine._file is not None
    os.ftruncate(mine._file.number, 3 * memory)  # sparse: it takes no room
    assert torch.equal(mine.copy()[0][0], torch.arange(10))


def test_a_checkpoint_larger_than_memory_is_not_called_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 99 bytes from file <checkpoint.pt>: Cannot allocate memory (12)")

    monkeypatch.setattr(torch, "load", refused)
    with pytest.raises(RecordError, match="is larger than this machine's memory; continue on one with more"):
        checkpoints.load(tmp_path / "checkpoint.pt", mapped=True)


def test_a_file_that_cannot_be_written_anew_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "SMALL", 0)
    mine, write = Shelf(1), os.pwritev
    mine[0] = (torch.zeros(4),)
    first, refused = mine._file, 0
    assert first is not None

    def no_other(file: int, octets: list[memoryview], place: int) -> int:
        nonlocal refused
        if file != first.number:
            refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, octets, place)

    monkeypatch.setattr(os, "pwritev", no_other)
    for turn in range(10):
        for client in 0, 1:
            mine[client] = (torch.full((4,), turn * 10 + client),)
    assert refused > 5
    assert mine._file is first
    assert [mine[client][0].tolist() for client in (0, 1)] == [[90] * 4, [91] * 4]


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    mine = Shelf(10)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match=f"do not fit on the disk of {tmp_path}; make room, set TMPDIR"):
        mine[0] = (torch.ones(100),)


def test_in_python() -> None:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    clients = [(x[i::6], (x[i::6].sum(1) > 0).long()) for i in range(6)]
    common = {"model": torch.nn.Linear(3, 2), "clients": clients, "algorithm": Calibrated(sampled=2), "until": 50.0}
    common |= {"codec": compressed(bits=4), "world": World(), "evaluations": 3}
    assert simulate(**common, memory=1e-8).rows == simulate(**common).rows
    with pytest.raises(ValueError, match="memory"):
        simulate(**common, memory=0)
