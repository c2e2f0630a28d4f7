"""docs/settings.md: every setting, its type and its default, from the models that read them.

python docs/site/settings.py
"""

import inspect
import re
from math import isinf
from pathlib import Path
from typing import Any, get_args

from pydantic_core import PydanticUndefined

from quafl.settings.algorithms import Algorithms, CosineSchedule, LinearSchedule
from quafl.settings.base import Section
from quafl.settings.codecs import CodecChoice, DifferenceUpSettings, TopKSettings
from quafl.settings.defence import DefenceSettings, FederationDefence
from quafl.settings.federation import FederationClients, FederationRun
from quafl.settings.tasks import Tasks
from quafl.settings.world import Absence, Change, Clients, Run

PAGE = Path(__file__).parents[1] / "settings.md"
INTRODUCTION = """\
# All settings

A settings file is TOML. Each key belongs to a section; an unknown one is refused. `--set SECTION.KEY=VALUE` changes one
on the command line. A section `[curves."name"]` may hold any of them for one curve. `make` in place of a `name` brings
[code of your own](own.md). *federation:* marks sections of the file that `quafl server` is started with.

What the keys mean at length: [algorithms](algorithms/README.md), [codecs](codec.md), [clients, data, runs](worlds.md),
[federations](federation.md). This page is generated: `make docs`.

| section | `name` | key | default | allowed | |
|---|---|---|---|---|---|
"""


def variants(union: Any) -> list[tuple[str, type[Section]]]:
    """By their names."""
    return [(get_args(one.model_fields["name"].annotation)[0], one) for one in get_args(union)]


def sections() -> list[tuple[str, str, type[Section]]]:
    """A section of the file, the name it must have, and what reads it."""
    return [
        *(("task", name, one) for name, one in variants(Tasks)),
        ("clients", "", Clients),
        ("clients.changes", "", Change),
        ("clients.absences", "", Absence),
        *(("algorithm", name, one) for name, one in variants(Algorithms)),
        ("algorithm.schedule", "linear", LinearSchedule),
        ("algorithm.schedule", "cosine", CosineSchedule),
        *(("codec", name, one) for name, one in variants(CodecChoice)),
        ("codec.up", "difference", DifferenceUpSettings),
        ("codec.up", "top-k", TopKSettings),
        ("run", "", Run),
        ("defence", "", DefenceSettings),
        ("federation: clients", "", FederationClients),
        ("federation: run", "", FederationRun),
        ("federation: defence", "", FederationDefence),
    ]


def remarks(section: type[Section]) -> dict[str, str]:
    """What is said beside each key in the code."""
    found: dict[str, str] = {}
    for one in reversed(section.__mro__):
        if issubclass(one, Section) and one is not Section:
            lines = re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(one), flags=re.MULTILINE)
            found |= dict(lines)
    return found


def default(value: Any) -> str:
    """As a file has it."""
    if value is PydanticUndefined:
        return "needed"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, float):
        return "`inf`" if isinf(value) else f"`{value:g}`"
    return f"`{value}`"


def allowed(schema: dict[str, Any]) -> str:
    """In words, from the key's JSON schema."""
    if "enum" in schema:
        return ", ".join(default(one) for one in schema["enum"])
    if "const" in schema:
        return default(schema["const"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(allowed(one) for one in schema["anyOf"] if one.get("type") != "null"))
    if "$ref" in schema or "oneOf" in schema or schema.get("type") == "object":
        return "a table"
    kind = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true, false"}
    word = "list" if schema.get("type") == "array" else kind.get(schema.get("type", ""), "")
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return " ".join([word, ", ".join(bounds)]).strip()


def rows() -> list[str]:
    """The table; what several names of a section share stands in one row."""
    found: dict[tuple[str, ...], list[str]] = {}
    for place, name, section in sections():
        said, schema = remarks(section), section.model_json_schema()["properties"]
        for key, field in section.model_fields.items():
            if key == "name":
                continue
            rest = (place, key, default(field.default), allowed(schema[key]), said.get(key, "").replace("|", "\\|"))
            found.setdefault(rest, []).append(f'`"{name}"`' if name else "")
    counts = {place: sum(one[0] == place for one in sections()) for place, *_ in sections()}
    lines = []
    for (place, key, *rest), names in found.items():
        whose = "all" if len(names) == counts[place] > 1 else ", ".join(names)
        lines.append(f"| {_shown(place)} | {whose} | `{key}` | {' | '.join(rest)} |")
    return lines


def _shown(place: str) -> str:
    kind, _, section = place.rpartition(": ")
    return f"*{kind}:* `[{section}]`" if kind else f"`[{section}]`"


def text() -> str:
    """The page."""
    return INTRODUCTION + "\n".join(rows()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
