"""The examples run, and learn something."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "pattern", "least"), [("regression", r"R² (\S+)", 0.4), ("text", r"accuracy (\S+)", 0.95)]
)
def test_the_example_learns(name: str, pattern: str, least: float) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    (value,) = re.findall(pattern, done.stdout)
    assert float(value) >= least
