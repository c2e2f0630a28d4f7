"""Settings: what a TOML file may say, checked before anything runs, and what it builds.

A file describes one run, or, with a `[curves."name"]` table per curve, a comparison: each curve is the common part with
its own sections laid over it.
"""

from quafl.settings.curve import Settings
from quafl.settings.federation import FederationSettings, agree
from quafl.settings.reading import SettingsError, builtin, load, load_federation

__all__ = ["FederationSettings", "Settings", "SettingsError", "agree", "builtin", "load", "load_federation"]
