"""What numbers depend on besides the settings."""

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

UNKNOWN = "unknown"  # code of which no digest was kept
OWN = "own"  # the user's own code, if there is any
SITTING = "device", "executor", "precision", "code", OWN  # what may be another in every sitting


def versions() -> dict[str, str]:
    """Of what there is here."""
    return {
        **{package: version(package) for package in ("quafl", "torch", "numpy")},
        "code": _code(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.now(UTC).date().isoformat(),
    }


def joined(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Of two sittings: all that they had of what may differ, and else what the later one had."""
    sittings = [{"code": UNKNOWN, **made} for made in (one, other)]
    earlier, later = sorted(sittings, key=lambda made: made.get("date", ""))
    found = {**earlier, **later}
    for name in (name for name in SITTING if name in found):
        words = {word for made in sittings if name in made for word in made[name].split(", ")}
        found[name] = ", ".join(sorted(words))
    return found


@cache
def _code() -> str:
    """A digest of the package's own files: between two releases, the version says too little."""
    digest = blake2b(digest_size=6)
    for path in sorted(Path(__file__).parents[1].rglob("*")):
        if path.suffix in (".py", ".c", ".h"):
            digest.update(path.read_bytes())
    return digest.hexdigest()
