"""What each client said of the model that was evaluated last: a table beside the rows."""

import csv
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TypeAlias

from quafl.core.judgement import PERSONAL
from quafl.core.seams import EXAMPLES, Score
from quafl.record.files import write_atomically

JUDGED = "clients-seed{seed}.csv"
MOST = 1000  # clients in a page; the worst ones
Scores: TypeAlias = Mapping[str, Score]  # by client


def write_scores(path: Path, scores: Scores) -> None:
    """A line a client."""
    columns = dict.fromkeys(name for score in scores.values() for name in score)
    with write_atomically(path) as stream:
        writer = csv.DictWriter(stream, ["client", *columns], restval="nan", lineterminator="\n")
        writer.writeheader()
        writer.writerows({**score, "client": client} for client, score in scores.items())


def read_scores(folder: Path, seeds: Sequence[int]) -> dict[int, Scores]:
    """Of those seeds whose clients have judged."""
    found: dict[int, Scores] = {}
    for seed in seeds:
        path = folder / JUDGED.format(seed=seed)
        if path.exists():
            with path.open(newline="", encoding="utf-8") as stream:
                lines = list(csv.DictReader(stream))
            found[seed] = {line.pop("client"): {name: float(value) for name, value in line.items()} for line in lines}
    return found


def scores_table(label: str, seed: int, scores: Scores, metric: str, *, lower_is_better: bool) -> str:
    """Of a page: each client's measures, the worst client first."""
    names = list(dict.fromkeys(name for score in scores.values() for name in score))
    first = metric if metric in names else "loss"
    lower = lower_is_better or first == "loss"
    nobody = float("-inf") if lower else float("inf")
    ordered = sorted(scores, key=lambda client: scores[client].get(first, nobody), reverse=lower)
    head = "".join(f"<th>{escape(_heading(name))}</th>" for name in names)
    lines = ""
    for client in ordered[:MOST]:
        cells = "".join(_cell(name, scores[client].get(name)) for name in names)
        lines += f'<tr><td class="left">{escape(client)}</td>{cells}</tr>'
    many = f", the worst {MOST:,} of {len(ordered):,}" if len(ordered) > MOST else ""
    return f"""<details><summary>{escape(label)}, seed {seed}: the last model at each of its clients{many}</summary>
<div class="wide" tabindex="0"><table><thead><tr><th class="left">client</th>{head}</tr></thead>
<tbody>{lines}</tbody></table></div></details>
"""


def _heading(name: str) -> str:
    return f"{name.removeprefix(PERSONAL)}, personal" if name.startswith(PERSONAL) else name


def _cell(name: str, value: float | None) -> str:
    return f"<td>{'–' if value is None else f'{value:,.0f}' if name == EXAMPLES else f'{value:.4f}'}</td>"
