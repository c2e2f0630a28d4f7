"""What can be named: experiments, figures, regimes, algorithms, codecs and tasks, and a line about each."""

import re
from importlib import import_module
from typing import Any, get_args

from quafl.settings.algorithms import Algorithms
from quafl.settings.base import Section
from quafl.settings.codecs import CodecChoice
from quafl.settings.figures import PAPER, REGIMES, figures, load_figure
from quafl.settings.reading import builtin, preset_text
from quafl.settings.tasks import Tasks


def catalogue() -> dict[str, dict[str, str]]:
    """By kind and name."""
    return {
        "experiments": {name: _first(preset_text("", name).lstrip("# ").replace("\n# ", " ")) for name in builtin()},
        "figures": {name: load_figure(name).figure.setting for name in figures(PAPER)},
        "regimes": {name: load_figure(name).figure.setting for name in figures(REGIMES)},
        "algorithms": _variants(Algorithms),
        "codecs": _variants(CodecChoice),
        "tasks": _variants(Tasks),
    }


def _variants(union: Any) -> dict[str, str]:
    return {str(one.model_fields["name"].annotation.__args__[0]): _about(one) for one in get_args(union)}


def _about(section: type[Section]) -> str:
    """What its docstring says, or that of the file to which it sends the reader."""
    said = section.__doc__ or ""
    other = re.match(r"See ([a-z0-9_]+(\.[a-z0-9_]+)+)", said)
    return _first(said if other is None else import_module(f"quafl.{other[1]}").__doc__ or "")


def _first(text: str) -> str:
    """The first sentence."""
    return re.split(r"\.\s", " ".join(text.split("\n\n", maxsplit=1)[0].split()) + " ")[0].rstrip()
