"""The wheel, built and installed into an empty environment that sees our dependencies: make test-wheel."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "runs", "docs", "tests", "*.egg-info", "*.so", "__pycache__")
TINY = ["--set", "run.until=5", "--set", "run.seeds=[0]", "--only", "QuAFL", "-j", "1"]


def done(*command: str | Path, cwd: Path, **env: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    ended = subprocess.run(
        [str(word) for word in command], cwd=cwd, env={**clean, **env}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.wheel
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_built_is_installed_and_runs_where_nothing_is(kind: str, tmp_path: Path) -> None:
    source, built, empty = tmp_path / "source", tmp_path / "built", tmp_path / "empty"
    shutil.copytree(ROOT, source, ignore=LEFT_OUT)
    empty.mkdir()
    build = f"from setuptools import build_meta; build_meta.build_{kind}({str(built)!r})"
    built.mkdir()
    done(sys.executable, "-c", build, cwd=source)
    (package,) = built.iterdir()

    venv.create(tmp_path / "env", with_pip=False)
    home = tmp_path / "env" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    pip = [sys.executable, "-m", "pip", "--python", tmp_path / "env" / "bin" / "python", "install", "--no-deps"]
    (home / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")  # torch and all the others
    done(*pip, "--no-build-isolation", "--no-index", "--ignore-installed", package, cwd=empty)
    quafl, world = tmp_path / "env" / "bin" / "quafl", {"HOME": str(empty), "COLUMNS": "200"}

    where = done(home.parents[2] / "bin" / "python", "-c", "import quafl; print(quafl.__file__)", cwd=empty, **world)
    assert Path(where.strip()).is_relative_to(tmp_path / "env")
    assert done(quafl, "--version", cwd=empty, **world).startswith("quafl ")
    found = {one["what"]: one for one in json.loads(done(quafl, "doctor", "--json", cwd=empty, **world))}
    assert found["c"]["there"], found["c"]
    assert "demo" in json.loads(done(quafl, "list", "--json", cwd=empty, **world))["experiments"]
    done(quafl, "run", "demo", "--out", "out", *TINY, cwd=empty, **world)
    assert (empty / "out" / "report.html").exists()
