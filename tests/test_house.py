"""The import arrows of ARCHITECTURE.md."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "quafl"
OWN = {
    "core": {"core"},
    "codec": {"codec", "core.seams"},
    "tasks": {"tasks", "core.seams", "core.randomness", "core.counter"},
    "record": {"record", "core.seams"},
    "sim": {"sim", "core", "codec", "tasks", "record"},
    "deploy": {"deploy", "core", "codec", "tasks", "record"},
    "settings": {"settings", "core", "codec", "tasks", "sim", "deploy"},
    "run": {"run", "core", "codec", "tasks", "record", "sim", "deploy", "settings"},
    "cli": {"cli", "run", "record", "settings", "tasks", "deploy.provision", "deploy.certificates", "version"},
    "theory": {"theory"},
    "version": set(),
    "__init__": {"core", "codec", "sim", "tasks.local", "version"},  # lazily
}
FOREIGN = {
    "core": {"torch"},
    "codec": {"torch", "numpy", "triton"},
    "tasks": {"torch", "numpy", "sklearn", "pooch", "PIL", "rich"},
    "record": {"torch", "numpy", "scipy", "matplotlib", "tomli_w"},
    "sim": {"torch"},
    "deploy": {"torch", "grpc", "nvflare", "cryptography"},
    "settings": {"torch", "pydantic", "pydantic_core", "tomli_w"},
    "run": {"torch", "safetensors", "ray"},
    "cli": {"typer", "rich", "safetensors"},
    "theory": set(),
    "version": set(),
    "__init__": set(),
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_arrows_of_the_house(path: Path) -> None:
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "quafl":
            allowed = OWN[room(path)]
            assert any(rest == target or rest.startswith(target + ".") for target in allowed), name
        elif top not in sys.stdlib_module_names:
            assert top in FOREIGN[room(path)], name


@pytest.mark.parametrize("path", [p for p in FILES if room(p) == "core"], ids=lambda path: path.name)
def test_core_does_no_input_output_and_has_no_hidden_randomness(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & {"time", "random", "logging", "os", "pathlib", "socket"}


def test_every_room_is_in_the_picture() -> None:
    assert {room(path) for path in FILES} == set(OWN) == set(FOREIGN)


def test_algorithm_1_stays_readable_next_to_the_paper() -> None:
    code = [line for line in (PACKAGE / "core" / "quafl.py").read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(code) <= 120


LEAN = """
import sys
import quafl.cli, quafl.cli.federation, quafl.run.federation
heavy = {"matplotlib", "scipy", "sklearn", "pooch", "PIL", "ray", "nvflare", "pandas"}
print(sorted(name for name in sys.modules if name.split(".")[0] in heavy or name.startswith("quafl.sim")))
"""


def test_a_client_s_process_imports_neither_the_simulator_nor_plots() -> None:
    done = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_carrier_stays_behind_its_seam() -> None:
    for package, file in ("nvflare", "deploy/flare.py"), ("grpc", "deploy/streams.py"):
        users = {path for path in FILES if any(name.split(".")[0] == package for name in imports(path))}
        assert users == {PACKAGE / file}
