"""Reading settings: files, built-in experiments and overrides, and one sentence for whatever is wrong with them."""

import tomllib
from collections.abc import Sequence
from functools import reduce
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from quafl.settings.algorithms import Algorithms, CosineSchedule, LinearSchedule
from quafl.settings.base import Raw, Section, SettingsError, meant
from quafl.settings.codecs import CodecChoice
from quafl.settings.curve import Settings
from quafl.settings.federation import FederationSettings
from quafl.settings.overrides import changes_of, merged
from quafl.settings.own import OWN, completed
from quafl.settings.tasks import Tasks
from quafl.settings.world import Absence, Change

AnySettings = TypeVar("AnySettings", Settings, FederationSettings)
AnySection = TypeVar("AnySection", bound=Section)
SERVER_PATIENCE = 60.0  # seconds that a real server waits for answers, where the settings do not say
_DEFAULTS: Raw = {"task": {"name": "digits"}, "algorithm": {"name": "quafl"}, "codec": {"name": "difference"}}


def load(source: str, overrides: Sequence[str] = ()) -> list[Settings]:
    """The curves of a built-in experiment or a TOML file, with `key=value` overrides laid over all of them."""
    return curves_of(read(source), overrides, beside=folder_of(source))


def curves_of(
    raw: Raw, overrides: Sequence[str] = (), over: Raw | None = None, beside: Path | None = None
) -> list[Settings]:
    """The curves of a file that has been read, with a table and then `key=value` overrides laid over all of them; an
    override of one curve counts more than one of all. The user's own modules may be beside the file."""
    changes = merged(over or {}, changes_of(overrides))
    single = changes.pop("curves", {})
    known = raw.pop("curves", {})
    curves = merged({"curves": known}, {"curves": single})["curves"]
    if not isinstance(curves, dict) or not all(isinstance(curve, dict) for curve in curves.values()):
        raise SettingsError(f'curves = {curves!r}: must be tables, such as [curves."QuAFL"]')
    strange = next((label for label in single if label not in known), None)
    if strange is not None:
        has = f"{meant(strange, list(known))}there are {', '.join(known) or 'none'}"
        raise SettingsError(f"curves.{strange}: there is no such curve; {has}")
    if not curves:
        return [_validate(Settings, _DEFAULTS, merged(raw, changes), beside)]
    found = []
    for label, curve in curves.items():
        whole = reduce(merged, [curve, changes, single.get(label, {})], {**raw, "label": label})
        found.append(_validate(Settings, _DEFAULTS, whole, beside, f" (in curve {label!r})"))
    return found


def load_federation(source: str, overrides: Sequence[str] = ()) -> FederationSettings:
    """A real federation's settings, with `key=value` overrides laid over them."""
    if source in builtin():
        raise SettingsError(
            f"settings '{source}' are a built-in experiment, which is simulated: a federation needs a TOML file that "
            f"names a task of your own (docs/federation.md); `quafl federation demo` shows one at work"
        )
    return federation_of(merged(read(source, ()), changes_of(overrides)), folder_of(source))


def federation_of(raw: Raw, beside: Path | None = None) -> FederationSettings:
    """A real federation's settings, from what a file or a program says."""
    defaults = {**_DEFAULTS, "task": {}, "algorithm": {"name": "quafl", "patience": SERVER_PATIENCE}}
    return _validate(FederationSettings, defaults, raw, beside)


def builtin() -> list[str]:
    """Names of the experiments that come with the package."""
    return preset_names("")


def preset_names(folder: str) -> list[str]:
    """The files in a folder of the presets."""
    entries = (_presets() / folder).iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml"))


def only_some(curves: Sequence[Settings], only: Sequence[str] | None) -> list[Settings]:
    """Those of these labels; all, if there is no choice."""
    labels = [curve.label for curve in curves]
    unknown = next((label for label in only or [] if label not in labels), None)
    if unknown is not None:
        raise SettingsError(f"--only {unknown}: there is no such curve, choose from {', '.join(labels)}")
    return [curve for curve in curves if only is None or curve.label in only]


def read_preset(folder: str, name: str) -> Raw:
    """A file that comes with the package, as it is."""
    return tomllib.loads(preset_text(folder, name))


def preset_text(folder: str, name: str) -> str:
    """The same, not yet read."""
    text: str = (_presets() / folder / f"{name}.toml").read_text(encoding="utf-8")
    return text


def checked(made: type[AnySection], raw: Raw, where: str) -> AnySection:
    """A table of a file that comes with the package."""
    try:
        return made.model_validate(raw)
    except ValidationError as error:
        raise SettingsError(_sentence(error.errors()[0], made) + where) from None


def _presets() -> Any:
    return resources.files("quafl") / "presets"


def read(source: str, names: Sequence[str] | None = None) -> Raw:
    """What a file or a built-in experiment says, as it is; names are offered to who gives neither, by default all."""
    if source in builtin():
        text = preset_text("", source)
    else:
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text file"
            if not (known := ", ".join(builtin() if names is None else names)):
                raise SettingsError(f"cannot read settings '{source}' ({reason}): give a TOML file") from error
            raise SettingsError(
                f"cannot read settings '{source}' ({reason}): give a TOML file, or one of the built-in names: {known}"
            ) from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{source} is not valid TOML: {error}") from error


def folder_of(source: str) -> Path | None:
    """Of a settings file; a built-in experiment has none."""
    return None if source in builtin() else Path(source).parent


def _validate(made: type[AnySettings], defaults: Raw, raw: Raw, beside: Path | None, where: str = "") -> AnySettings:
    try:
        return made.model_validate(completed(merged(defaults, raw), beside))
    except ValidationError as error:
        raise SettingsError(_sentence(error.errors()[0], made) + where) from None


def _sentence(error: ErrorDetails, made: type[Section]) -> str:
    """Key, value, and what is allowed."""
    place = _without_variants([str(part) for part in error["loc"]])
    key, value = ".".join(place), error["input"]
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if error["type"] == "extra_forbidden":
        allowed = _keys_beside(list(error["loc"]), made)
        return f"unknown key {key} = {value!r}; {meant(place[-1], allowed)}allowed here: {', '.join(allowed)}"
    if error["type"] == "union_tag_invalid":
        return _no_such(key, value, error["ctx"]["expected_tags"])
    if error["type"] == "missing":
        return f"{key} is missing; it is needed"
    if error["type"] == "none_required":
        return f"{key} = {value!r}: must be left out here"
    if not place:
        return message  # a rule between keys, which names them itself
    return f"{key} = {value!r}: {message}"


def _no_such(key: str, section: Raw, known: str) -> str:
    if section.get("name") == OWN:
        return f"{key}.make = {section.get('make')!r}: is for simulations; a client runs no code that a server names"
    names, name = known.removesuffix(f", '{OWN}'"), section.get("name")
    return f"{key}.name = {name!r}: {meant(str(name), names.replace(chr(39), '').split(', '))}must be one of {names}"


def _without_variants(place: list[str]) -> list[str]:
    """Without the names of variants, which pydantic puts into the path."""
    return [
        part
        for number, part in enumerate(place)
        if number == 0
        or number == len(place) - 1
        or place[number - 1] not in ("task", "algorithm", "codec", "up", "down", "schedule")
    ]


def _keys_beside(place: list[int | str], made: type[Section]) -> list[str]:
    """The keys that the table of an unknown key may have."""
    path = [str(part) for part in place[:-1] if isinstance(part, str)]
    parent = _sections(made).get(path[-1], made) if path else made
    return list(parent.model_fields)


def _sections(made: type[Section]) -> dict[str, type[Section]]:
    """Every table, by the last word of pydantic's path to it: its key, or its variant's name."""
    own = {name: field.annotation for name, field in made.model_fields.items()}
    tables = {name: table for name, table in own.items() if isinstance(table, type) and issubclass(table, Section)}
    variants = (*get_args(Tasks), *get_args(Algorithms), *get_args(CodecChoice), LinearSchedule, CosineSchedule)
    named = {get_args(variant.model_fields["name"].annotation)[0]: variant for variant in variants}
    return {"changes": Change, "absences": Absence, **tables, **named}
