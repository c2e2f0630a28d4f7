"""A page that explains a run to a person: who came first, a table, the curves, the settings. One file, no scripts."""

from collections.abc import Callable, Sequence
from html import escape

import tomli_w
from matplotlib.figure import Figure

from quafl.record import plots
from quafl.record.summary import (
    Curve,
    ended_without,
    final,
    megabytes,
    megabytes_to_target,
    time_to_target,
    verdict,
    zero_step_share,
)

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 84rem; margin: 2rem auto;
  padding: 0 1.5rem }
h1 { font-size: 1.6rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.verdict { font-size: 1.1rem; border-left: 4px solid #0072B2; padding: .4rem 0 .4rem 1rem; background: #f4f8fb }
table { border-collapse: collapse } th, td { padding: .3rem .9rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left } th { font-weight: 600 }
.swatch { display: inline-block; width: 1.6em; vertical-align: middle; border-top: 3px; margin-right: .5em }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(34rem, 1fr)); gap: 1rem }
figure { margin: 0 } figure svg { width: 100%; height: auto } figcaption { color: #555; font-size: .9rem }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .85rem }
.small { color: #555; font-size: .9rem }
"""


def _time(curve: Curve) -> str:
    times, seeds = time_to_target(curve), curve.planned
    if not curve.aims:
        return "–"
    if not times.values:
        return f"not by {ended_without(curve):g}"
    return times.show("{:.0f}") + (f" ({len(times.values)}/{seeds})" if len(times.values) < seeds else "")


_COLUMNS: list[tuple[str, Callable[[Curve], str]]] = [
    ("final {metric}", lambda curve: final(curve, curve.metric).show("{:.3f}")),
    ("time to {target}", _time),
    ("MB to {target}", lambda curve: megabytes_to_target(curve).show("{:.2f}")),
    ("MB sent", lambda curve: megabytes(curve).show("{:.1f}")),
    ("repairs", lambda curve: final(curve, "refined").show("{:.0f}")),
    ("local steps", lambda curve: final(curve, "local_steps").show("{:,.0f}")),
    ("zero-step contacts", lambda curve: zero_step_share(curve).show("{:.1%}")),
]
BRIEF = 5  # columns that fit a terminal


def table(curves: Sequence[Curve]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of the closing table, a curve's label first; mean ± standard deviation over seeds."""
    targets = {f"{curve.target:g}" for curve in curves if curve.aims}
    names = {"metric": curves[0].metric, "target": targets.pop() if len(targets) == 1 else "target"}
    headings = ["", *(heading.format(**names) for heading, _ in _COLUMNS)]
    return headings, [[curve.label, *(show(curve) for _, show in _COLUMNS)] for curve in curves]


def seeds_of(curves: Sequence[Curve]) -> str:
    """Which there are, said once if all curves have the same."""
    said = {curve.label: ", ".join(map(str, sorted(curve.seeds))) for curve in curves}
    if len(set(said.values())) == 1:
        return f"seed{'s' if len(curves[0].seeds) > 1 else ''} {said[curves[0].label]}"
    return "seeds: " + "; ".join(f"{label} {seeds}" for label, seeds in said.items())


def main_figure(curves: Sequence[Curve]) -> Figure:
    """The metric against time."""
    return plots.draw(curves, plots.time_of(curves), plots.column(curves[0].metric), goal=_goal(curves))


def _goal(curves: Sequence[Curve]) -> float | None:
    """The line in the pictures."""
    return curves[0].target if curves[0].aims else None


def page(curves: Sequence[Curve]) -> str:
    """The whole report."""
    metric = plots.column(curves[0].metric)
    time = plots.time_of(curves)
    figures = [
        (f"Against {time.label}", main_figure(curves)),
        ("Against what was sent", plots.draw(_talking(curves), plots.MEGABYTES, metric, goal=_goal(curves))),
        (f"Loss against {time.label}", plots.draw(curves, time, _loss(curves), log=True)),
        ("Against the work done", plots.draw(curves, plots.STEPS, metric, goal=_goal(curves))),
    ]
    pictures = "".join(
        f"<figure>{plots.to_svg(figure)}<figcaption>{escape(caption)}</figcaption></figure>"
        for caption, figure in figures
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>QuAFL report</title><style>{_STYLE}</style></head><body>
<h1>QuAFL report</h1>
<p class="small">{escape(_provenance(curves[0].versions))}; {escape(seeds_of(curves))}</p>
<p class="verdict">{escape(verdict(curves))}</p>
{_table(curves)}
<p class="small">Mean ± standard deviation over seeds. A time followed by (2/3) is of the two seeds of three that
reached the target; "not by 60" means that none had when the run ended, at time 60. A repair is a message that did not
decode at first and was refined.</p>
<h2>Curves</h2>
<div class="figures">{pictures}</div>
<p class="small">Lines are means over seeds, bands one standard deviation; the thin grey line is the target.</p>
<h2>Settings</h2>
{"".join(_settings(curve) for curve in curves)}
</body></html>
"""


def _loss(curves: Sequence[Curve]) -> plots.Axis:
    """On the training sample, as the paper plots it, where all tasks have one."""
    everywhere = all("train_loss" in rows[0] for curve in curves for rows in curve.seeds.values())
    return plots.column("train_loss" if everywhere else "loss")


def _talking(curves: Sequence[Curve]) -> list[Curve]:
    """Without those that have nothing to send."""
    return [curve for curve in curves if curve.talks] or list(curves)


def _table(curves: Sequence[Curve]) -> str:
    looks = plots.looks([curve.label for curve in curves])
    headings, lines = table(curves)
    head = "".join(f"<th>{escape(text)}</th>" for text in headings)
    rows = ""
    for label, *cells in lines:
        colour, line = looks[label]
        swatch = f'<span class="swatch" style="border-top-color:{colour};border-top-style:{plots.LINES[line]}"></span>'
        rows += f"<tr><td>{swatch}{escape(label)}</td>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _provenance(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions.items())


def _settings(curve: Curve) -> str:
    text = tomli_w.dumps(curve.settings)
    made = curve.versions
    how = f"Gradients in {made['precision']}, local steps {made['executor']}." if "executor" in made else ""
    return (
        f'<details><summary>{escape(curve.label)}</summary><p class="small">{escape(how)}</p>'
        f"<pre>{escape(text)}</pre></details>"
    )
