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
{_timeline(attendance)}
<details><summary>{many} events</summary><div class="wide" tabindex="0"><table>
<thead><tr><th>seconds</th><th class="left">at</th><th>round</th><th class="left">client</th>
<th class="left">event</th></tr></thead><tbody>{events}</tbody></table></div></details>
"""


def _timeline(attendance: Attendance) -> str:
    """A line for each client."""
    end, lines = attendance.seconds or 1.0, {str(client["name"]): "" for client in attendance.clients}
    for stay in attendance.stays():
        if stay.client in lines:
            place = f"left:{stay.start / end:.2%};width:{(stay.stop - stay.start) / end:.2%}"
            kind, said = (
                "there" if stay.state == THERE else "out",
                f"{stay.state}: {stay.start:,.0f}–{stay.stop:,.0f} s",
            )
            lines[stay.client] += f'<i class="{kind}" style="{place}" title="{escape(f"{stay.client} {said}")}"></i>'
    drawn = "".join(f"<span>{escape(name)}</span><div>{bars}</div>" for name, bars in lines.items())
    seconds = "".join(f"<span>{share * end:,.0f} s</span>" for share in (0.0, 0.25, 0.5, 0.75, 1.0))
    return f'<div class="times">{drawn}<span></span><p class="small">{seconds}</p></div>'
