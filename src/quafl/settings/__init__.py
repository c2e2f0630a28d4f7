"""Settings: what a TOML file may say, checked before anything runs, and what it builds.

A file describes one run, or, with a `[curves."name"]` table per curve, a comparison: each curve is the common part with
its own sections laid over it.
"""

from quafl.settings.curve import Settings
from quafl.settings.federation import FederationSettings, agree
from quafl.settings.figures import Claim, Figure, Level, Order, Reproduction, figures, load_figure, local_steps
from quafl.settings.reading import SettingsError, builtin, load, load_federation

__all__ = [
    "Claim",
    "FederationSettings",
    "Figure",
    "Level",
    "Order",
    "Reproduction",
    "Settings",
    "SettingsError",
    "agree",
    "builtin",
    "figures",
    "load",
    "load_federation",
    "load_figure",
    "local_steps",
]
