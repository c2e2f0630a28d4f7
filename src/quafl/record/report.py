"""A page that explains a run to a person: who came first, a table, the curves, the settings. One file that needs
nothing else; where scripts do not run, its pictures stand still."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

import tomli_w
from matplotlib.figure import Figure

from quafl.record import plots
from quafl.record.company import company
from quafl.record.judged import scores_table
from quafl.record.page import Panel, axes_of, data, script, style
from quafl.record.summary import (
    Curve,
    Spread,
    ended_without,
    final,
    megabytes,
    megabytes_to_target,
    time_to_target,
    verdict,
    zero_step_share,
)


def _time(curve: Curve) -> str:
    times, seeds = time_to_target(curve), curve.planned
    if not curve.aims:
        return "–"
    if not times.values:
        return f"not by {ended_without(curve):g}"
    return times.show("{:.0f}") + (f" ({len(times.values)}/{seeds})" if len(times.values) < seeds else "")


def _of_times(curves: Sequence[Curve]) -> str:
    """What those in the table mean that need to be explained."""
    said = []
    for curve in curves:
        count, time = len(time_to_target(curve).values), _time(curve)
        if 0 < count < curve.planned:
            said.append(f"({count}/{curve.planned}): of the seeds that reached the target, {count} of {curve.planned}.")
        elif curve.aims and not count:
            said.append(f"“{time}”: no seed had reached it when the run ended.")
    return "".join(f"{sentence} " for sentence in dict.fromkeys(said))


class Column(NamedTuple):
    """Of the table: its heading, its name for programs, what it is, and how that is said."""

    heading: str
    name: str
    of: Callable[[Curve], Spread]
    show: Callable[[Curve], str]


def _column(heading: str, name: str, of: Callable[[Curve], Spread], pattern: str) -> Column:
    return Column(heading, name, of, lambda curve: of(curve).show(pattern))


_COLUMNS = [
    _column("final {metric}", "final", lambda curve: final(curve, curve.metric), "{:.3f}"),
    Column("time to {target}", "time_to_target", time_to_target, _time),
    _column("MB to {target}", "megabytes_to_target", megabytes_to_target, "{:.2f}"),
    _column("MB sent", "megabytes", megabytes, "{:.1f}"),
    _column("repairs", "repairs", lambda curve: final(curve, "refined"), "{:.0f}"),
    _column("local steps", "local_steps", lambda curve: final(curve, "local_steps"), "{:,.0f}"),
    _column("zero-step contacts", "zero_step_share", zero_step_share, "{:.1%}"),
]
BRIEF = 5  # columns that fit a terminal


def table(curves: Sequence[Curve]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of the closing table, a curve's label first; mean ± standard deviation over seeds."""
    targets = {f"{curve.target:g}" for curve in curves if curve.aims}
    names = {"metric": curves[0].metric, "target": targets.pop() if len(targets) == 1 else "target"}
    headings = ["", *(column.heading.format(**names) for column in _COLUMNS)]
    return headings, [[curve.label, *(column.show(curve) for column in _COLUMNS)] for curve in curves]


def numbers(curves: Sequence[Curve]) -> dict[str, Any]:
    """The table for programs: what `table` rounds is here in full, with each seed's value; what is missing is NaN."""
    return {
        "verdict": verdict(curves),
        "metric": curves[0].metric,
        "target": _goal(curves),
        "curves": [
            {
                "label": curve.label,
                "seeds": sorted(curve.seeds),
                "planned_seeds": curve.planned,
                **{column.name: _plain(column.of(curve)) for column in _COLUMNS},
            }
            for curve in curves
        ],
    }


def heading(curves: Sequence[Curve]) -> str:
    """Of the table: what its numbers are."""
    return ("Mean ± standard deviation over " if _several(curves) else "Of ") + seeds_of(curves)


def _several(curves: Sequence[Curve]) -> bool:
    """Whether there is a spread over seeds."""
    return any(len(curve.seeds) > 1 for curve in curves)


def _plain(spread: Spread) -> dict[str, Any]:
    return {"mean": spread.mean, "deviation": spread.deviation, "values": list(spread.values)}


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
    metric, loss = curves[0].metric, _loss(curves)
    panels = [
        Panel("time", metric),
        Panel("megabytes", metric),
        Panel("time", loss, log=True),
        Panel("local_steps", metric),
    ]
    bands = "Lines are means over seeds, bands one standard deviation. " if _several(curves) else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>QuAFL report</title>{style()}</head><body>
<h1>QuAFL report</h1>
<p class="small">{escape(_provenance(curves[0].versions))}; {escape(seeds_of(curves))}</p>
<p class="verdict">{escape(verdict(curves))}</p>
{_table(curves)}
<p class="small">{escape(heading(curves))}. {escape(_of_times(curves))}A repair is a message that did not
decode at first and was refined.</p>
<h2>Curves</h2>
<div class="moving"><p class="small">Click a name to hide its curve, double-click it (or press i) to see it alone.</p>
<div id="legend"></div><div id="tools"></div><div id="panels"></div></div>
<div class="still">{"".join(_picture(curves, panel) for panel in panels)}</div>
<p class="small">{bands}The thin dashed line is the target.</p>
{_apart(curves)}
{_at_clients(curves)}
{"".join(company(curve.label, curve.attendance) for curve in curves if curve.attendance is not None)}
<h2>Settings</h2>
{"".join(_settings(curve) for curve in curves)}
{data(curves, panels, _goal(curves))}
{script()}
</body></html>
"""


def _apart(curves: Sequence[Curve]) -> str:
    """Φ_t beside the lemma's contraction, of curves that have recorded it."""
    recorded = [curve for curve in curves if all("potential" in rows[0] for rows in curve.seeds.values())]
    counts = {curve.settings["clients"].get("count") for curve in recorded}
    if len(counts) != 1 or not isinstance(clients := counts.pop(), int):
        return ""
    figure = plots.to_svg(plots.draw_potential(recorded, clients))
    return f"""<h2>How far apart the models are</h2>
<figure>{figure}<figcaption>Φ = ‖X − μ‖² + Σ‖X_i − μ‖² over the server's and the clients' models. The dashed line
is how the largest value would fall by the lemma, if nobody moved; local steps and quantization add to Φ.</figcaption>
</figure>"""


def _at_clients(curves: Sequence[Curve]) -> str:
    """What clients have said of the last models."""
    tables = "".join(
        scores_table(curve.label, seed, scores, curve.metric, lower_is_better=curve.lower_is_better)
        for curve in curves
        for seed, scores in curve.clients.items()
    )
    return f"<h2>At the clients</h2>{tables}" if tables else ""


def _picture(curves: Sequence[Curve], panel: Panel) -> str:
    """One that stands still."""
    axis = axes_of(curves)[panel.x]
    shown = _talking(curves) if panel.x == "megabytes" else curves
    goal = _goal(curves) if panel.y == curves[0].metric else None
    figure = plots.draw(shown, axis, plots.column(panel.y), goal=goal, log=panel.log)
    caption = f"{panel.y.replace('_', ' ')} against {axis.label}"
    return f"<figure>{plots.to_svg(figure)}<figcaption>{escape(caption)}</figcaption></figure>"


def _loss(curves: Sequence[Curve]) -> str:
    """On the training sample, as the paper plots it, where all tasks have one."""
    everywhere = all("train_loss" in rows[0] for curve in curves for rows in curve.seeds.values())
    return "train_loss" if everywhere else "loss"


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
        swatch = (
            f'<svg class="swatch ink" style="--c:{colour}" viewBox="0 0 26 4" aria-hidden="true">'
            f'<line x2="26" y1="2" y2="2" stroke-dasharray="{plots.LINES[line]}"/></svg>'
        )
        rows += f"<tr><td>{swatch}{escape(label)}</td>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>"
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _provenance(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions.items())


def _settings(curve: Curve) -> str:
    text = tomli_w.dumps(curve.settings)
    made = curve.versions
    how = f"Gradients in {made['precision']}; local steps: {made['executor']}." if "executor" in made else ""
    return (
        f'<details><summary>{escape(curve.label)}</summary><p class="small">{escape(how)}</p>'
        f"<pre>{escape(text)}</pre></details>"
    )
