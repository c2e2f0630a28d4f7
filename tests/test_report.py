"""What the report says, on rows made by hand, and that a real browser shows it."""

import csv
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape, unescape
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from matplotlib import image
from matplotlib.colors import to_rgb

from quafl.core.seams import ServerState, Totals
from quafl.record.attendance import Attendance, Book, read_events
from quafl.record.plots import COLOURS, ROUNDS, SIMULATED_TIME, column, draw, looks
from quafl.record.report import page, table
from quafl.record.rows import Row, by_seed, make_row, read_rows, write_rows
from quafl.record.summary import Curve, RecordError, check_showable, final, ranked, read_curves, time_to_target, verdict

VERSIONS = {"quafl": "0", "platform": "a test", "date": "2024-01-01"}


def row(seed: int, time: float, accuracy: float) -> Row:
    return {
        "seed": seed,
        "round": time // 10,
        "time": time,
        "local_steps": time * 3,
        "bytes_up": time * 1e5,
        "bytes_down": time * 2e5,
        "loss": 2 - accuracy,
        "accuracy": accuracy,
        "refined": 1,
        "contacts": 10,
        "zero_step_contacts": 2,
    }


def curve(label: str, *seeds: list[float], target: float = 0.8) -> Curve:
    """Accuracies at times 0, 10, 20, …"""
    rows = [row(seed, 10.0 * i, value) for seed, values in enumerate(seeds) for i, value in enumerate(values)]
    run = {"target": target, "metric": "accuracy", "lower_is_better": False, "seeds": list(range(len(seeds)))}
    return Curve(label, by_seed(rows), {"label": label, "run": run, "clients": {"count": 20}}, VERSIONS)


QUICK = curve("QuAFL", [0.1, 0.8, 0.9], [0.1, 0.7, 0.95])
SLOW = curve("FedAvg", [0.1, 0.2, 0.8], [0.1, 0.1, 0.85])
NEVER = curve("Baseline", [0.1, 0.9, 0.9], [0.1, 0.2, 0.3])


def test_time_to_target_is_the_first_evaluation_at_the_target() -> None:
    assert time_to_target(QUICK).values == (10.0, 20.0)
    assert time_to_target(NEVER).values == (10.0,)
    assert final(QUICK, "accuracy").values == (0.9, 0.95)


@pytest.mark.parametrize("curves", [[QUICK, SLOW, NEVER], [NEVER, SLOW, QUICK]])
def test_the_verdict_names_whoever_came_first(curves: list[Curve]) -> None:
    assert verdict(curves) == (
        "First at accuracy 0.8 per simulated time: QuAFL after 15 ± 7, then FedAvg after 20 ± 0 time units. "
        "Not with every seed: Baseline."
    )
    assert [c.label for c in ranked(curves)] == ["QuAFL", "FedAvg", "Baseline"]


def test_of_equally_soon_ones_the_one_that_ends_best_comes_first() -> None:
    worse, better = curve("worse", [0.1, 0.8, 0.85]), curve("better", [0.1, 0.8, 0.9])
    assert [c.label for c in ranked([worse, better])] == ["better", "worse"]


def test_the_verdict_is_not_always_quafl() -> None:
    swapped = replace(QUICK, label="FedAvg"), replace(SLOW, label="QuAFL")
    assert verdict(swapped).startswith("First at accuracy 0.8 per simulated time: FedAvg after 15")
    hopeless = curve("QuAFL", [0.1, 0.2]), curve("FedAvg", [0.1, 0.3])
    assert verdict(hopeless) == "No algorithm reached accuracy 0.8 with every seed."


def test_lower_is_better_where_the_settings_say_so_and_for_the_loss() -> None:
    distance = curve("QuAFL", [4.0, 0.9, 0.5], [4.0, 3.0, 0.7])
    settings = {**distance.settings, "run": {**distance.settings["run"], "lower_is_better": True}}
    assert time_to_target(replace(distance, settings=settings)).values == (20.0, 20.0)
    settings = {**QUICK.settings, "run": {**QUICK.settings["run"], "metric": "loss", "target": 1.3}}
    assert time_to_target(replace(QUICK, settings=settings)).values == (10.0, 10.0)  # 2 − accuracy ≤ 1.3


def test_a_target_is_not_taken_for_one_of_the_loss_that_stands_in_for_the_metric() -> None:
    rows = {seed: [{**row, "loss": 0.1} for row in rows] for seed, rows in QUICK.seeds.items()}
    bare = {seed: [{k: v for k, v in row.items() if k != "accuracy"} for row in some] for seed, some in rows.items()}
    loss = replace(QUICK, seeds=bare)
    assert loss.metric == "loss"
    assert time_to_target(loss).values == ()
    assert verdict([loss]) == (
        "There is no accuracy, and no target for the loss: set run.metric and run.target, or --target."
    )
    assert table([loss])[0][2] == "time to target"
    assert table([loss])[1][0][2] == "–"
    assert "There is no accuracy" in page([loss])
    assert time_to_target(replace(loss, goal=0.2)).values == (0.0, 0.0)


def test_seeds_that_are_missing_count_as_never(tmp_path: Path) -> None:
    settings = {**QUICK.settings, "run": {**QUICK.settings["run"], "seeds": [0, 1, 2]}}
    interrupted = replace(QUICK, settings=settings)
    assert table([interrupted])[1][0][2] == "15 ± 7 (2/3)"
    assert verdict([interrupted, SLOW]).startswith("First at accuracy 0.8 per simulated time: FedAvg")


def test_the_table_shows_mean_spread_and_seeds_that_never_arrived() -> None:
    headings, lines = table([QUICK, NEVER])
    assert headings[:3] == ["", "final accuracy", "time to 0.8"]
    assert lines[0][:3] == ["QuAFL", "0.925 ± 0.035", "15 ± 7"]
    assert lines[1][2] == "10 (1/2)"
    assert lines[0][4] == "6.0 ± 0.0"  # (1e5 + 2e5) octets a time unit, for 20


def test_rows_survive_the_disk(tmp_path: Path) -> None:
    rows = [row(0, 0.1 + 0.2, 1 / 3), row(1, 5.0, 0.5)]
    write_rows(tmp_path / "rows.csv", rows)
    assert read_rows(tmp_path / "rows.csv") == rows


def save(folder: Path, saved: Curve) -> None:
    folder.mkdir(parents=True)
    write_rows(folder / "rows.csv", [row for rows in saved.seeds.values() for row in rows])
    (folder / "settings.toml").write_text(tomli_w.dumps(saved.settings))
    (folder / "versions.json").write_text(json.dumps(saved.versions))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("settings.toml", None),
        ("settings.toml", "label = 'x'"),
        ("versions.json", "{"),
        ("rows.csv", "seed,time\n"),
        ("rows.csv", "seed,time,accuracy\n0,0.0\n"),
    ],
)
def test_an_incomplete_folder_is_named(tmp_path: Path, name: str, content: str | None) -> None:
    save(tmp_path / "run", QUICK)
    (tmp_path / "run" / name).unlink() if content is None else (tmp_path / "run" / name).write_text(content)
    with pytest.raises(RecordError, match="does not hold a complete run"):
        read_curves([tmp_path])


def test_folders_are_read_once_and_labels_that_repeat_are_told_apart(tmp_path: Path) -> None:
    save(tmp_path / "a", QUICK)
    save(tmp_path / "b", QUICK)
    labels = [c.label for c in read_curves([tmp_path, tmp_path / "a"])]
    assert labels == ["QuAFL (a)", "QuAFL (b)"]
    for figure in "one", "two":
        save(tmp_path / "figures" / figure / "curves" / "quafl", QUICK)
    curves = read_curves([tmp_path / "figures"])
    assert [c.label for c in curves] == ["QuAFL (one/curves/quafl)", "QuAFL (two/curves/quafl)"]
    assert "QuAFL (two/curves/quafl)" in page(curves)


def test_a_variant_has_its_algorithms_colour_and_a_line_of_its_own() -> None:
    names = "QuAFL", "QuAFL, 4 bits", "FedBuff", "K = 5", "K = 10"
    known = looks(names)
    assert [known[name].colour for name in names[:3]] == [COLOURS["QuAFL"], COLOURS["QuAFL"], COLOURS["FedBuff"]]
    assert (known["QuAFL"].line, known["QuAFL, 4 bits"].line) == ("-", "--")
    assert len(set(known.values())) == 5
    assert looks(names[2::-1]).items() <= known.items(), "in any order"
    assert looks([*names[:4], *[names[3]] * 7, names[4]]) == known, "however often one is named"
    assert '"dash":"7 3"' in page([replace(QUICK, label=name) for name in names[:2]])
    shared = looks(["QuAFL, 32 bits", "QuAFL, 4 bits", "FedBuff", "FedBuff, 4 bits"])
    two = looks(["QuAFL, 32 bits", "QuAFL, unlimited link", "FedBuff, 4 bits", "FedBuff, 8 bits"])
    assert len(set(two.values())) == 4
    assert shared["QuAFL, 32 bits"].line != shared["QuAFL, 4 bits"].line == shared["FedBuff, 4 bits"].line != "-"


def test_curves_that_end_far_apart_can_all_be_seen() -> None:
    long, short = curve("QuAFL", [0.1] * 50), curve("FedAvg", [0.1] * 5)
    scales = [draw(some, ROUNDS, column("accuracy")).axes[0].get_xscale() for some in ([long], [long, short])]
    assert scales == ["linear", "log"]
    rising = curve("QuAFL", [min(n, 20) / 20 for n in range(5000)])
    axes = draw([rising, curve("FedAvg", [0.1] * 40)], ROUNDS, column("accuracy")).axes[0]
    places, values = (np.asarray(found) for found in axes.lines[0].get_data())
    np.testing.assert_allclose(values, np.minimum(places, 20) / 20, atol=0.06)  # a step is 0.05
    assert draw([long, short], SIMULATED_TIME, column("accuracy")).axes[0].get_xscale() == "linear"


def test_a_target_far_from_all_curves_does_not_cost_them_their_place() -> None:
    near, far = (
        draw([curve("QuAFL", [0.1, 0.4, 0.5])], SIMULATED_TIME, column("accuracy"), goal=goal).axes[0]
        for goal in (0.52, 0.9)
    )
    legends = [axes.get_legend() for axes in (near, far)]
    shown = [[text.get_text() for text in legend.get_texts()] for legend in legends if legend is not None]
    assert shown == [["QuAFL", "target 0.52"], ["QuAFL"]]
    assert far.get_ylim()[1] < 0.6


def test_a_picture_shows_the_end_of_training_with_its_bands() -> None:
    ends = [0.8, 0.9]
    (axes,) = draw([curve("QuAFL", *([0.0] + 99 * [end] for end in ends))], SIMULATED_TIME, column("accuracy")).axes
    low, high = axes.get_ylim()
    assert 0.6 < low < np.mean(ends) - np.std(ends, ddof=1) < np.mean(ends) + np.std(ends, ddof=1) < high < 1
    draw([], SIMULATED_TIME, column("accuracy"))
    draw([curve("QuAFL", [0.1, np.inf, 0.2])], SIMULATED_TIME, column("accuracy"))
    negative = draw([curve("QuAFL", [2.5, 2.6, 2.7])], SIMULATED_TIME, column("loss"), log=True)  # 2 − accuracy
    assert negative.axes[0].get_yscale() == "linear", "where a logarithm shows nothing"


def other(made: Curve, **sections: dict[str, object]) -> Curve:
    """With these settings in place of its own."""
    changed = {name: {**made.settings.get(name, {}), **section} for name, section in sections.items()}
    return replace(made, settings={**made.settings, **changed})


def test_runs_with_different_targets_are_compared_by_one_that_is_chosen(tmp_path: Path) -> None:
    save(tmp_path / "a", QUICK)
    save(tmp_path / "b", other(SLOW, run={"target": 0.5}))
    with pytest.raises(RecordError, match=r"different targets \(0.5, 0.8\); choose one with --target"):
        read_curves([tmp_path])
    curves = read_curves([tmp_path], target=0.7)
    assert verdict(curves).startswith("First at accuracy 0.7 per simulated time: QuAFL after 10 ± 0, then FedAvg")
    with pytest.raises(RecordError, match="--target nan: must be a finite number"):
        read_curves([tmp_path], target=float("nan"))
    assert curves[1].settings["run"]["target"] == 0.5  # what it was made with is not another


@pytest.mark.parametrize(
    ("strange", "name"),
    [
        (other(SLOW, task={"partition": "by class"}), "task.partition"),
        (other(SLOW, task={"name": "mnist"}), "task.name"),
        (other(SLOW, clients={"count": 300}), "clients.count"),
        (other(SLOW, run={"target": 0.7}), "run.target"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_only_what_is_comparable_is_compared_and_what_differs_is_said(strange: Curve, name: str) -> None:
    also = replace(QUICK, label="FedBuff")
    assert verdict([QUICK, strange, also]).startswith(
        f"Not all are compared: they differ in {name}. QuAFL, FedBuff: First at accuracy 0.8 per simulated time: "
        "QuAFL after 15 ± 7, then FedBuff after 15 ± 7 time units. FedAvg: First at accuracy"
    )
    assert [c.label for c in ranked([strange, QUICK, also])] == ["FedAvg", "QuAFL", "FedBuff"]
    assert "Not all are compared" in page([QUICK, strange])


def test_other_worlds_are_said_and_a_single_client_is_compared_with_all() -> None:
    slow, alone = other(SLOW, clients={"slow_step": 99.0}), other(NEVER, clients={"count": 1, "slow": 0.0})
    assert verdict([QUICK, slow, alone]).endswith(
        "QuAFL after 15 ± 7, then FedAvg after 20 ± 0 time units. Not with every seed: Baseline. "
        "They differ in clients.slow_step, too."
    )


def test_marks_in_the_table_are_explained_where_there_are_some() -> None:
    assert "of the seeds that reached the target, 1 of 2." in page([QUICK, NEVER])
    assert "“not by 20”: no seed had reached it when the run ended." in page([QUICK, curve("FedAvg", [0.1, 0.2, 0.3])])
    assert not any(mark in page([QUICK, SLOW]) for mark in ("of the seeds that", "no seed had"))


def test_a_run_that_ended_early_is_not_said_to_have_never_got_there() -> None:
    long = other(curve("QuAFL", [0.1, 0.2, 0.3, 0.9]), run={"until": 35.0})
    short = other(curve("FedAvg", [0.1, 0.2]), run={"until": 15.0})
    diverged = replace(curve("FedBuff", [0.1, 0.9]), troubles={0: "it diverged"})
    stopped = other(curve("FedNova", [0.1, 0.85]), run={"until": 35.0, "stop_at_target": True})
    full = other(curve("Baseline", [0.1, 0.2, 0.2, 0.2]), run={"until": 35.0})
    curves = [replace(one, goal=0.87) for one in (long, short, diverged, stopped, full)]
    curves[3] = replace(curves[3], settings={**stopped.settings, "run": {**stopped.settings["run"], "target": 0.8}})
    assert verdict(curves) == (
        "First at accuracy 0.87 per simulated time: QuAFL after 30 time units. Not reached: Baseline. "
        "FedBuff ended before, at time 10. FedNova ended before, at time 10. FedAvg ended before, at time 15."
    )
    shown = {cells[0]: cells[2] for cells in table(curves)[1]}
    assert shown == {
        "QuAFL": "30",
        "FedAvg": "not by 15",
        "FedBuff": "not by 10",
        "FedNova": "not by 10",
        "Baseline": "not by 35",
    }


def test_seeds_are_said_for_each_curve_where_they_differ() -> None:
    assert "seeds 0, 1</p>" in page([QUICK, SLOW])
    few = replace(SLOW, seeds={1: SLOW.seeds[1]})
    assert "seeds: QuAFL 0, 1; FedAvg 1</p>" in page([QUICK, few])


def status(seconds: float, round: int, *, running: bool = True, **clients: str) -> dict[str, object]:
    """What a server says of itself; each client is "there", "away" or "left out"."""
    counts = {"contacts": 3, "steps": 1234, "dropped": 1, "refined": 2, "bytes_up": 4_560_000, "bytes_down": 7_000_000}
    members = [
        {"name": name, "there": state == "there", "left_out": state == "left out", **counts}
        for name, state in clients.items()
    ]
    return {"running": running, "at": 1e9 + seconds, "seconds": seconds, "round": round, "clients": members}


def test_a_federation_s_comings_and_goings_are_recorded_across_restarts(tmp_path: Path) -> None:
    book = Book(tmp_path / "events.csv")
    book.look(status(4.0, 0, north="there"))  # before the first round, with which the clock starts
    book.look(status(1.0, 1, north="there", south="there"))
    book.look(status(2.0, 2, north="there", south="left out"))
    book.look(status(3.0, 3, north="away", south="left out"))
    book.look(status(3.5, 3, north="away", south="left out"))
    book.look(status(5.0, 4, running=False, north="away", south="there"))
    again = Book(tmp_path / "events.csv")
    again.look(status(4.5, 3, north="away", south="away"))  # from a checkpoint
    again.look(status(6.0, 5, north="away", south="there"))
    events = read_events(tmp_path / "events.csv")
    assert [(event.time, event.round, event.client, event.event) for event in events] == [
        (1.0, 0, "", "server started"),
        (1.0, 0, "north", "joined"),
        (1.0, 1, "south", "joined"),
        (2.0, 2, "south", "left out"),
        (3.0, 3, "north", "away"),
        (4.5, 4, "south", "there"),
        (4.5, 4, "", "server stopped"),
        (4.5, 3, "", "server started"),
        (6.0, 5, "south", "there"),
    ]
    assert events[0].at == "2001-09-09T01:46:44+00:00"
    assert Attendance([], events, seconds=8.0).stays() == [
        ("south", "there", 1.0, 2.0),
        ("north", "there", 1.0, 3.0),
        ("south", "left out", 2.0, 4.5),
        ("south", "there", 4.5, 4.5),
        ("south", "there", 6.0, 8.0),
    ]


def test_a_federation_s_report_shows_its_clients(tmp_path: Path) -> None:
    save(tmp_path / "run", other(curve("QuAFL", [0.1, 0.8, 0.9]), run={"clock": "wall"}))
    book, last = Book(tmp_path / "run" / "events.csv"), status(20.0, 2, running=False, north="there", south="left out")
    book.look(status(0.0, 0, north="there", south="there"))
    book.look(status(5.0, 1, north="there", south="left out"))
    (tmp_path / "run" / "status.json").write_text(json.dumps(last))
    (read,) = read_curves([tmp_path])
    text = page([read])
    cells = "".join(f"<td>{cell}</td>" for cell in ("south", "3", "1,234", "2", "4.56", "7.00", "1", "1", "25%"))
    assert f"<tr>{cells}</tr>" in text
    assert '<i class="out" style="left:25.00%;width:75.00%" title="south left out: 5–20 s"></i>' in text
    assert "<summary>All events</summary>" in text
    assert "Clients of" not in page([QUICK])


def test_what_does_not_fit_into_one_table_is_reported_apart() -> None:
    check_showable([QUICK, SLOW])
    with pytest.raises(RecordError, match=r"measure different things \(accuracy, loss\); report them apart"):
        check_showable([QUICK, other(SLOW, run={"metric": "loss"})])
    with pytest.raises(RecordError, match="some of the runs are simulated and some are real"):
        check_showable([QUICK, other(SLOW, run={"clock": "wall"})])


def test_a_metric_may_not_be_called_like_a_column() -> None:
    state = ServerState(model=torch.zeros(1), buffers=torch.empty(0))
    with pytest.raises(ValueError, match="a metric is called 'time'"):
        make_row(0, 0.0, state, Totals(), {"loss": 1.0, "time": 2.0})


def browse(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open it in a real browser that has no window; what scripts complain of is in its stderr."""
    quiet = "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync", "--hide-scrollbars"
    alone = (
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={file.parent / 'profile'}",
    )
    return subprocess.run(
        ["chromium", "--headless", "--no-sandbox", *quiet, *alone, "--enable-logging=stderr", *options, str(file)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )


needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium (Debian package chromium)")


@needs_browser
@pytest.mark.parametrize("scripts", ["'unsafe-inline'", "'none'"])
def test_a_browser_shows_the_curves_in_their_colours_whether_scripts_may_run_or_not(
    tmp_path: Path, scripts: str
) -> None:
    rule = f'<meta http-equiv="Content-Security-Policy" content="script-src {scripts}">'
    text = page([QUICK, SLOW, NEVER]).replace("<head>", f"<head>{rule}")
    (tmp_path / "report.html").write_text(text, encoding="utf-8")
    shot = tmp_path / "shot.png"
    browse(tmp_path / "report.html", "--window-size=1400,1400", f"--screenshot={shot}")
    pixels = image.imread(shot)[..., :3]
    for label in "QuAFL", "FedAvg", "Baseline":
        shown = (np.abs(pixels - to_rgb(COLOURS[label])).max(axis=-1) < 0.02).sum()
        assert shown > 500, label  # the swatch alone has fewer


READER = """<!doctype html><pre id="seen"></pre><iframe style="width:390px;height:900px" srcdoc="{page}"></iframe>
<script>
const frame = document.querySelector("iframe"), seen = {{}};
const pause = () => new Promise((go) => setTimeout(go, 100));
(async () => {{
  while (!frame.contentDocument?.querySelector(".curve")) await pause();
  const there = frame.contentWindow, all = (what) => [...there.document.querySelectorAll(what)];
  const one = (what) => all(what)[0];
  const drawn = () => [...one(".box").querySelectorAll(".curve")].map((path) => path.dataset.label).sort();
  const choose = (what, value) => {{ what.value = value; what.dispatchEvent(new there.Event("change")); }};
  const does = (what, Kind, name, more) => what.dispatchEvent(new there[Kind](name, {{bubbles: true, ...more}}));
  const names = Object.fromEntries(all("#legend button").map((button) => [button.dataset.label, button]));
  seen.still = there.getComputedStyle(one(".still")).display;
  seen.wide = there.document.documentElement.scrollWidth;
  seen.first = drawn();
  names.FedAvg.click();
  seen.hidden = drawn();
  names.FedAvg.click();
  does(names.QuAFL, "MouseEvent", "dblclick");
  seen.isolated = drawn();
  does(names.QuAFL, "KeyboardEvent", "keydown", {{key: "i"}});
  seen.all = drawn();
  const before = one(".curve").getAttribute("d"), [vertical, horizontal] = one(".head").querySelectorAll("select");
  choose(horizontal, "megabytes");
  seen.axis = one(".box").textContent.includes("sent in both directions (MB)");
  choose(vertical, "loss");
  seen.metric = one(".curve").getAttribute("d") !== before;
  choose(horizontal, "time");
  const box = one(".box").getBoundingClientRect();
  does(one(".box"), "PointerEvent", "pointermove", {{clientX: box.right - 5, clientY: box.top + 50}});
  seen.tip = one(".tip").textContent;
  does(one(".box"), "KeyboardEvent", "keydown", {{key: "Home"}});
  seen.start = one(".tip").textContent;
  const [logX, logY] = one(".head").querySelectorAll("input"), [seeds, band] = all("#tools input");
  logX.click(); logY.click(); seeds.click(); band.click();
  seen.seeds = one(".box").querySelectorAll(".seed").length;
  seen.bands = one(".box").querySelectorAll(".band").length;
  seen.paths = all("path").every((path) => !/NaN|Infinity/.test(path.getAttribute("d")));
  const [smoothing] = all("input[type=range]"), rough = one(".curve").getAttribute("d");
  smoothing.value = 20; smoothing.dispatchEvent(new there.Event("input"));
  seen.smoothed = one(".curve").getAttribute("d") !== rough;
  const paper = () => there.getComputedStyle(there.document.body).backgroundColor;
  choose(one("#tools select"), "light");
  seen.light = paper();
  choose(one("#tools select"), "dark");
  seen.dark = paper();
  there.Blob = function (parts) {{ seen.csv = parts.join(""); }};
  there.URL.createObjectURL = () => "about:blank#";
  all("#tools button").at(-1).click();
  document.getElementById("seen").textContent = JSON.stringify(seen);
}})();
</script>"""


@needs_browser
def test_a_reader_can_choose_what_the_pictures_show(tmp_path: Path) -> None:
    strange = '</script><b>"'
    curves = [QUICK, SLOW, replace(NEVER, label=strange)]
    (tmp_path / "reader.html").write_text(READER.format(page=escape(page(curves))), encoding="utf-8")
    done = browse(
        tmp_path / "reader.html", "--dump-dom", "--virtual-time-budget=4000", "--allow-file-access-from-files"
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search('<pre id="seen">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found is not None
    seen = json.loads(unescape(found[1]))
    everybody = sorted(curve.label for curve in curves)
    assert seen["still"] == "none"
    assert seen["wide"] <= 390, "at which width nothing is to be scrolled sideways"
    assert seen["first"] == seen["all"] == everybody
    assert seen["hidden"] == sorted({*everybody} - {"FedAvg"})
    assert seen["isolated"] == ["QuAFL"]
    assert seen["axis"]
    assert seen["metric"]
    assert seen["tip"].startswith("simulated time (units): 20")
    assert "QuAFL 1.075 ± 0.035" in seen["tip"]  # 2 − 0.925
    assert seen["start"].startswith("simulated time (units): 0")
    assert "FedAvg 1.9 ± 0" in seen["start"]
    assert (seen["seeds"], seen["bands"], seen["paths"]) == (6, 0, True)
    assert seen["smoothed"]
    assert (seen["light"], seen["dark"]) == ("rgb(255, 255, 255)", "rgb(21, 24, 28)")
    rows = list(csv.DictReader(StringIO(seen["csv"])))
    assert len(rows) == 18
    assert [float(row["accuracy"]) for row in rows if row["curve"] == strange] == [0.1, 0.9, 0.9, 0.1, 0.2, 0.3]
