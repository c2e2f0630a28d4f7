"""The front doors for programs: simulate, compare, tune."""

import inspect
import re
import signal
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quafl
from quafl.record.files import InUse, alone
from quafl.record.summary import read_curves
from quafl.run.folders import RunFolder, trained_model

X = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def given(**more: Any) -> dict[str, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    clients = [(X[i::4], Y[i::4]) for i in range(4)]
    usual = {"model": model, "clients": clients, "algorithm": quafl.QuAFL(sampled=2), "optimizer": quafl.sgd(0.3)}
    return {**usual, "until": 40.0, "evaluations": 8, "batch_size": 8, **more}


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


class Stop:
    """A callback that has enough at the fifth row."""

    def __init__(self) -> None:
        self.rows: list[quafl.Row] = []

    def __call__(self, row: quafl.Row) -> bool:
        self.rows.append(row)
        return len(self.rows) == 5


def test_several_seeds_are_the_runs_of_each() -> None:
    both = quafl.simulate(**given(seeds=[3, 5]))
    each = [quafl.simulate(**given(seed=seed)) for seed in (3, 5)]
    assert both.rows == each[0].rows + each[1].rows
    assert same(both.model, each[0].model)
    assert same(both.models[5].last, each[1].model)
    finest = max(each, key=lambda one: max(row["accuracy"] for row in one.rows))
    assert same(both.best, finest.best)
    assert repr(both).startswith("<Result: QuAFL, 2 seeds until time ")


def test_what_a_callback_stops_is_kept_and_goes_on_bit_for_bit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, out = quafl.simulate(**given(seeds=[0, 1])), tmp_path / "run"
    first, second, third = Stop(), [], []
    stopped = quafl.simulate(**given(seeds=[0, 1], out=out, callback=first))
    assert stopped.interrupted
    assert stopped.rows == first.rows == whole.rows[:5]
    assert f"call it again with out={str(out)!r}" in caplog.text
    again = quafl.simulate(**given(seeds=[0, 1], out=str(out), callback=second.append))
    assert not again.interrupted
    assert again.rows == whole.rows
    assert second == whole.rows[5:]
    kept = quafl.simulate(**given(seeds=[0, 1], out=out, callback=third.append))
    assert third == []
    for found in again, kept:
        assert found.rows == whole.rows
        assert all(same(a, b) for seed in (0, 1) for a, b in zip(found.models[seed], whole.models[seed], strict=True))
    assert [curve.label for curve in read_curves([tmp_path])] == ["QuAFL"]
    exported = trained_model(out, seed=1, which="best")
    assert all(torch.equal(exported[name], value) for name, value in whole.models[1].best.state_dict().items())
    with pytest.raises(quafl.RecordError, match="was made by a program"):
        RunFolder.reopen(out)


def test_a_folder_takes_more_seeds_and_no_other_run(tmp_path: Path) -> None:
    quafl.simulate(**given(out=tmp_path))
    news: list[quafl.Row] = []
    more = quafl.simulate(**given(out=tmp_path, seeds=[0, 1], callback=news.append))
    assert {row["seed"] for row in news} == {1}
    assert list(more.curve.seeds) == [0, 1]
    data = given()["clients"]
    others: list[tuple[str, dict[str, Any]]] = [
        ("optimizer", {"optimizer": quafl.sgd(0.2)}),
        ("algorithm.local_steps", {"algorithm": quafl.QuAFL(sampled=2, local_steps=3)}),
        ("codec.up.bits, codec.down.bits", {"codec": quafl.compressed(bits=5)}),
        ("clients.slow", {"world": quafl.World(slow=0.5)}),
    ]
    for changed, argument in others:
        with pytest.raises(quafl.RecordError, match=f"was made with another {changed}; put it back"):
            quafl.simulate(**given(out=tmp_path, **argument))
    with pytest.raises(quafl.RecordError, match=r"another model or other data; call torch\.manual_seed before"):
        quafl.simulate(**given(out=tmp_path, clients=[*data[:3], (data[3][0] + 1, data[3][1])]))
    with alone(tmp_path, ""), pytest.raises(InUse, match="in use by another process; choose another folder"):
        quafl.simulate(**given(out=tmp_path))


def test_ctrl_c_gives_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    handler, seen = signal.getsignal(signal.SIGINT), []

    def press(row: quafl.Row) -> None:
        seen.append(row)
        if len(seen) == 4:
            signal.raise_signal(signal.SIGINT)

    result = quafl.simulate(**given(callback=press))
    assert result.interrupted
    assert result.rows == seen == quafl.simulate(**given()).rows[:4]
    assert "stopped; the result has the rows so far" in caplog.text
    assert repr(result).endswith(", interrupted>")
    assert signal.getsignal(signal.SIGINT) is handler
    seen.clear()
    with pytest.raises(KeyboardInterrupt):
        quafl.simulate(**given(callback=lambda row: [signal.raise_signal(signal.SIGINT) for _ in range(2)]))


def test_a_run_that_diverges_says_so_and_has_its_rows() -> None:
    with pytest.raises(quafl.Diverged, match="try a smaller lr") as caught:
        quafl.simulate(**given(optimizer=quafl.sgd(1e30)))
    assert caught.value.rows[0]["round"] == 0


def test_a_comparison_has_a_table_a_picture_a_page_and_results(tmp_path: Path) -> None:
    curves = {
        "QuAFL": {"codec": quafl.Lattice(bits=6)},
        "QuAFL, 32 bits": {"codec": quafl.Identity()},
        "Rash": {"optimizer": quafl.sgd(1e30)},
    }
    found = quafl.compare(curves, seeds=[0, 1], target=0.6, out=tmp_path, **given())
    alone = quafl.simulate(**given(codec=quafl.Identity(), seeds=[0, 1]))
    assert found["QuAFL, 32 bits"].rows == alone.rows
    heading, *lines = repr(found).splitlines()
    assert heading.split() == ["final", "accuracy", "time", "to", "0.6", "MB", "sent"]
    assert sorted(line.split("  ")[0] for line in lines) == ["QuAFL", "QuAFL, 32 bits", "Rash (diverged)"]
    page = (tmp_path / "report.html").read_text()
    assert "QuAFL, 32 bits" in page
    assert "sgd(lr=0.3)" in page
    picture = found.plot("train_loss", x="megabytes")
    (axes,) = picture.axes
    assert [line.get_label() for line in axes.get_lines()] == list(curves)
    assert picture._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="y is 'f1', must be a column of the rows: seed, round"):
        found["QuAFL"].plot("f1")
    with pytest.raises(ValueError, match="x is 'weeks', must be one of time"):
        found.plot(x="weeks")


def test_curves_that_are_stopped_are_those_begun() -> None:
    found = quafl.compare({"a": {}, "b": {}, "c": {}}, callback=lambda label, row: label == "b", **given())
    assert [len(found[label].rows) for label in ("a", "b")] == [9, 1]
    assert list(found.results) == ["a", "b"]
    assert found.interrupted
    last = quafl.simulate(**given(seeds=[0, 1], callback=lambda row: row["seed"] == 1))
    assert last.interrupted
    assert [len(rows) for rows in last.curve.seeds.values()] == [9, 1]
    assert last.curve.settings["run"]["until"] == 0.0  # as far as all seeds have come


def test_a_grid_is_judged_by_what_nobody_learns_from() -> None:
    seen: list[torch.Tensor] = []

    def look(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(targets)
        return (outputs.argmax(-1) == targets).double().mean()

    rates = [quafl.sgd(0.0001), quafl.sgd(0.3)]
    tests = (X[:1], Y[:1])
    tuned = quafl.tune({"optimizer": rates, "batch_size": [4, 8]}, **given(metrics={"right": look}, test=tests))
    assert tuned.best["optimizer"] is rates[1]
    assert list(tuned.points) == [f"sgd(lr={lr}) {size}" for lr in (0.0001, 0.3) for size in (4, 8)]
    assert {len(targets) for targets in seen} == {16}  # a fifth of each client's twenty
    assert repr(tuned).splitlines()[1].startswith("sgd(lr=0.3)")
    quafl.simulate(**{**given(), **tuned.best})


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda: quafl.simulate(**given(seed=1, seeds=[2])), ValueError, "seed is 1 and seeds"),
        (lambda: quafl.simulate(**given(seeds=[2, 2])), ValueError, r"seeds = \[2, 2\]: must be distinct"),
        (lambda: quafl.simulate(**given(model=nn.Linear, out="x")), TypeError, "the model is the class Linear"),
        (lambda: quafl.simulate(**given(seeds=3)), TypeError, "seeds is 3, must be whole numbers, such as"),
        (lambda: quafl.simulate(**given(until="long")), ValueError, "until is 'long', must be a number"),
        (lambda: quafl.simulate(**given(evaluations=0)), ValueError, "evaluations is 0, must be a whole number"),
        (lambda: quafl.compare({}, **given()), ValueError, "there are no curves"),
        (lambda: quafl.compare({"a": {"algoritm": 1}}, **given()), TypeError, "did you mean 'algorithm'"),
        (lambda: quafl.compare({"a": {}}, until=3.0), TypeError, "a has no model and no clients and no algorithm"),
        (
            lambda: quafl.compare({"a": {}, "A": {}}, out="x", **given()),
            quafl.RecordError,
            "two curves would share the folder",
        ),
        (lambda: quafl.tune({}, **given()), ValueError, "grid is {}, must have at least one argument"),
        (lambda: quafl.tune({"until": [1.0, 1.0]}, **given()), ValueError, "two points of the grid look alike"),
        (lambda: quafl.tune({"until": [1.0]}, validation=0.01, **given()), ValueError, "choose a larger share"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(call: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        call()


def test_progress_is_shown_where_somebody_can_see_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quafl.simulate(**given())
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes anything for a terminal
    quafl.simulate(**given(progress=False))
    assert capsys.readouterr().err == ""
    quafl.simulate(**given())
    shown = capsys.readouterr().err
    assert "QuAFL" in shown
    assert "100 %" in shown


def test_rows_are_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    result = quafl.simulate(**given())
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pandas", None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'quafl\[notebook\]'"):
            _ = result.frame
    pytest.importorskip("pandas")
    assert list(result.frame["accuracy"]) == [row["accuracy"] for row in result.rows]
    assert set(quafl.compare({"a": {}}, **given()).frame["curve"]) == {"a"}


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {"print": print})
    assert {path.name for path in tmp_path.rglob("*.*g")} == {"compared.png"}
    assert (tmp_path / "runs" / "compared" / "report.html").exists()


def named_by(hint: Any) -> set[str]:
    """Our classes in a type."""
    own = isinstance(hint, type) and hint.__module__.startswith("quafl") and not typing.get_args(hint)
    return ({hint.__name__} if own else set()).union(*map(named_by, typing.get_args(hint)))


def test_everything_that_a_signature_names_can_be_imported() -> None:
    for name in set(quafl.__all__) - {"__version__"}:
        found = getattr(quafl, name)
        if inspect.isfunction(found) or (inspect.isclass(found) and not typing.is_typeddict(found)):
            made = found.__init__ if inspect.isclass(found) else found
            for hint in typing.get_type_hints(made).values() if inspect.isfunction(made) else ():
                assert named_by(hint) <= set(quafl.__all__), name
    assert set(dir(quafl)) >= set(quafl.__all__)
