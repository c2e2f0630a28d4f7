"""Tables laid over each other, and what `key=value` says as a table."""

import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

from quafl.settings.base import Raw, SettingsError


def changes_of(overrides: Sequence[str]) -> Raw:
    """What `key=value` overrides say, as one table."""
    return reduce(merged, map(_parse_override, overrides), {})


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Raw:
    """One table laid over another. Of `name` and `make`, which say who is meant, the one laid over counts. Another
    codec keeps the bits alone."""
    rivals = {"name": "make", "make": "name"}
    result = {key: value for key, value in base.items() if key in over or rivals.get(key) not in over}
    for key, value in over.items():
        below = result.get(key)
        if not (isinstance(value, dict) and isinstance(below, dict)):
            result[key] = value
        elif key == "codec" and _is_another(value, below):
            result[key] = merged({name: below[name] for name in ("bits",) if name in below}, value)
        else:
            result[key] = merged(below, value)
    return result


def _is_another(over: Raw, below: Raw) -> bool:
    return "name" in over and over["name"] != below.get("name", over["name"])


def _parse_override(text: str) -> Raw:
    """A line of TOML, in which quotes around names and words may be left out."""
    key, equals, value = text.partition("=")
    if equals and not text.lstrip().startswith("["):
        with suppress(tomllib.TOMLDecodeError):
            return tomllib.loads(text)
    names = [name.strip() for name in key.split(".")]
    if not equals or not all(names):
        raise SettingsError(f"--set {text}: must look like section.key=value, for example algorithm.lr=0.2")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word is a string
    for name in reversed(names):
        parsed = {name: parsed}
    return dict(parsed)
