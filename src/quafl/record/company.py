"""A federation's clients in its report: what each has done, and when it was there."""

from collections.abc import Callable
from html import escape

from quafl.record.attendance import LEFT_OUT, THERE, Attendance

MOST_EVENTS = 1000  # in the page; the last ones
_COUNTS: list[tuple[str, str, Callable[[float], str]]] = [  # headings, names in the status, and how they are said
    ("contacts", "contacts", "{:,}".format),
    ("local steps", "steps", "{:,}".format),
    ("repairs", "refined", "{:,}".format),
    ("MB sent", "bytes_up", lambda octets: f"{octets / 1e6:,.2f}"),
    ("MB received", "bytes_down", lambda octets: f"{octets / 1e6:,.2f}"),
    ("replies dropped", "dropped", "{:,}".format),
]


def company(label: str, attendance: Attendance) -> str:
    """A federation's clients: their counts, when they were there, and all events."""
    stays = attendance.stays()
    known = [one for one in _COUNTS if all(one[1] in client for client in attendance.clients)]
    cells = ""
    for client in attendance.clients:
        mine = [stay for stay in stays if stay.client == client["name"]]
        there = sum(stay.stop - stay.start for stay in mine if stay.state == THERE) / (attendance.seconds or 1.0)
        out = sum(stay.state == LEFT_OUT for stay in mine)
        counts = "".join(f"<td>{show(client[name])}</td>" for _, name, show in known)
        share = f"{min(there, 1.0):.0%}" if attendance.events else "–"
        cells += f"<tr><td>{escape(client['name'])}</td>{counts}<td>{out}</td><td>{share}</td></tr>"
    head = "".join(f"<th>{text}</th>" for text in ("", *(text for text, _, _ in known), "left out", "there"))
    last = attendance.events[-MOST_EVENTS:]
    many = f"The last {len(last):,} of {len(attendance.events):,}" if len(last) < len(attendance.events) else "All"
    events = "".join(
        f'<tr><td>{event.time:,.1f}</td><td class="left">{escape(event.at)}</td><td>{event.round:,}</td>'
        f'<td class="left">{escape(event.client)}</td><td class="left">{escape(event.event)}</td></tr>'
        for event in last
    )
    return f"""<h2>Clients of {escape(label)}</h2>
<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table></div>
<p class="small">When each was there (blue), and left out for its faults (orange), in seconds of the run.</p>
<div class="wide" tabindex="0">{_timeline(attendance)}</div>
<details><summary>{many} events</summary><div class="wide" tabindex="0"><table>
<thead><tr><th>seconds</th><th class="left">at</th><th>round</th><th class="left">client</th>
<th class="left">event</th></tr></thead><tbody>{events}</tbody></table></div></details>
"""


def _timeline(attendance: Attendance) -> str:
    """A line for each client."""
    names = {str(client["name"]): number for number, client in enumerate(attendance.clients)}
    line, left, width, end = 24, 130, 850, attendance.seconds or 1.0
    low = line * len(names)
    drawn = ""
    for name, number in names.items():
        y, short = line * number, name if len(name) <= 16 else f"{name[:15]}…"
        drawn += f'<text x="{left - 8}" y="{y + 16}" class="end">{escape(short)}</text>'
        drawn += f'<line class="base" x1="{left}" x2="{left + width}" y1="{y + 12}" y2="{y + 12}"/>'
    for stay in attendance.stays():
        if stay.client not in names:
            continue
        y, start = line * names[stay.client], left + width * stay.start / end
        length = max(2.0, width * (stay.stop - stay.start) / end)
        kind = f'class="{"there" if stay.state == THERE else "out"}"'
        said = escape(f"{stay.client} {stay.state}: {stay.start:,.0f}–{stay.stop:,.0f} s")
        drawn += (
            f'<rect {kind} x="{start:.1f}" y="{y + 5}" width="{length:.1f}" height="14"><title>{said}</title></rect>'
        )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawn += f'<text x="{left + share * width:.0f}" y="{low + 18}" class="middle">{share * end:,.0f} s</text>'
    return (
        f'<svg class="times" viewBox="0 0 {left + width + 30} {low + 26}" role="img" '
        f'aria-label="When each client was there">{drawn}</svg>'
    )
