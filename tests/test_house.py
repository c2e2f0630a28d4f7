"""The import arrows of ARCHITECTURE.md."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "quafl"
OWN = {
    "core": {"core"},
    "codec": {"codec", "core"},
    "tasks": {"tasks", "core.checks", "core.seams", "core.messages", "core.randomness", "core.counter"},
    "record": {"record", "core"},
    "protocol": {"protocol", "core", "codec"},
    "sim": {"sim", "core", "codec", "protocol", "tasks", "record"},
    "deploy": {"deploy", "core", "codec", "protocol", "tasks", "record"},
    "rehearsal": {"rehearsal", "core", "codec", "protocol", "tasks"},
    "settings": {"settings", "core", "codec", "protocol", "tasks", "sim", "deploy"},
    "run": {"run", "core", "codec", "protocol", "tasks", "record", "sim", "deploy", "settings"},
    "cli": {
        "cli",
        "run",
        "record",
        "settings",
        "tasks",
        "theory",
        "deploy.provision",
        "deploy.certificates",
        "version",
    },
    "testing": {"testing", "core", "codec", "tasks", "record", "sim"},
    "theory": {"theory", "core", "codec", "tasks", "record", "sim", "settings"},
    "bridges": {"bridges", "core", "codec"},
    "version": set(),
    "__init__": {"core", "codec", "sim", "tasks", "record", "settings", "run", "version"},  # lazily
}
FOREIGN = {
    "core": {"torch"},
    "codec": {"torch", "numpy", "triton"},
    "tasks": {"torch", "numpy", "sklearn", "pooch", "PIL", "rich", "datasets", "flwr_datasets"},
    "record": {"torch", "numpy", "scipy", "matplotlib", "tomli_w"},
    "protocol": {"torch"},
    "sim": {"torch", "triton"},
    "deploy": {"torch", "grpc", "nvflare", "cryptography"},
    "rehearsal": {"torch", "rich"},
    "settings": {"torch", "pydantic", "pydantic_core", "tomli_w"},
    "run": {"torch", "safetensors", "tomli_w", "rich", "pandas", "ray", "optuna", "mlflow", "wandb"},
    "cli": {"typer", "rich", "safetensors"},
    "testing": {"torch"},
    "theory": {"torch"},
    "bridges": {"torch", "numpy", "flwr", "nvflare"},
    "version": set(),
    "__init__": set(),
}
OUTSIDE = {"time", "random", "threading", "asyncio", "socket", "os", "pathlib", "logging"}  # of this process, or hidden
ALGORITHMS = ("fedasync", "fedavg", "fedbuff", "fednova", "quafl", "scaffold")
MAY_NAME_ALGORITHMS = {
    *(f"core/{name}.py" for name in ALGORITHMS),
    "core/__init__.py",
    "__init__.py",
    "settings/algorithms.py",
    "record/plots.py",  # one colour per label, everywhere
    "bridges/flower/federated.py",  # Flower's own class of that name
    "theory/advice.py",  # which of them to use
    "rehearsal/cast.py",  # the list of all that is rehearsed
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


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_follow_the_arrows_of_the_house(path: Path) -> None:
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "quafl":
            allowed = OWN[room(path)]
            assert any(rest == target or rest.startswith(target + ".") for target in allowed), name
        elif top not in sys.stdlib_module_names:
            assert top in FOREIGN[room(path)], name


@pytest.mark.parametrize("path", [p for p in FILES if room(p) in ("core", "protocol")], ids=name)
def test_what_is_computed_and_said_does_no_input_output_and_has_no_hidden_randomness(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & OUTSIDE


def test_every_room_is_in_the_picture() -> None:
    assert {room(path) for path in FILES} == set(OWN) == set(FOREIGN)


def test_algorithm_1_stays_readable_next_to_the_paper() -> None:
    code = [line for line in (PACKAGE / "core" / "quafl.py").read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(code) <= 190


def words(tree: ast.Module) -> set[str]:
    """Identifiers and texts of a module, but no comments and docstrings."""
    found = set()
    prose = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word) | ast.alias(name=word):
                found.add(word)
            case ast.ClassDef(name=word) | ast.FunctionDef(name=word) | ast.AsyncFunctionDef(name=word):
                found.add(word)
            case ast.keyword(arg=str(word)) | ast.ImportFrom(module=str(word)):
                found.add(word)
            case ast.Constant(value=str(word)) if node not in prose:
                found.add(word)
    return found


def algorithms_named(text: str) -> set[str]:
    """In the identifiers and texts of a module's source. QuAFL is the name of the project, too: its class and its
    settings count, and nothing else does."""
    others = "|".join(name for name in ALGORITHMS if name != "quafl")
    known = re.compile(rf"(?i:(?<![a-z0-9])({others})(settings)?(?![a-z0-9]))|^QuAFL(Settings)?$|core\.quafl")
    return {word for word in words(ast.parse(text)) if known.search(word)}


@pytest.mark.parametrize("path", [p for p in FILES if name(p) not in MAY_NAME_ALGORITHMS], ids=name)
def test_nothing_but_its_own_file_and_its_settings_names_an_algorithm(path: Path) -> None:
    assert not algorithms_named(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("rate = tuning.fedbuff_lr", 1),
        ("if name == 'FedAvg': pass", 1),
        ("from quafl.core.scaffold import x", 1),
        ("from quafl.core import QuAFL", 1),
        ("isinstance(settings, QuAFLSettings)", 1),
        ("isinstance(settings, FedAsyncSettings)", 1),
        ("def f():\n    'As FedBuff does.'", 0),
        ("import quafl.cli\nprint('QuAFL: quafl federation')", 0),
        ("class QuAFLController: ...", 0),
        ("scaffolding = 1", 0),
    ],
)
def test_an_algorithm_s_name_is_found_wherever_it_hides(text: str, count: int) -> None:
    assert len(algorithms_named(text)) == count


LEAN = """
import sys
import quafl.cli, quafl.cli.federation, quafl.run.federation
from quafl import join
heavy = {"matplotlib", "scipy", "sklearn", "pooch", "PIL", "ray", "nvflare", "pandas"}
print(sorted(name for name in sys.modules if name.split(".")[0] in heavy or name.startswith("quafl.sim")))
"""


def test_a_client_s_process_imports_neither_the_simulator_nor_plots() -> None:
    done = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


DECODING = """
import sys
import torch
from quafl import QSGD, Identity, Lattice
for codec in (Identity(), Lattice(4), QSGD(8)):
    packet = codec.encode(torch.ones(1, 100), torch.Generator(), distance=1.0)
    assert codec.decode(packet, key=torch.ones(3, 2, 100)).shape == (3, 2, 100)
print("sympy" in sys.modules)
"""


def test_a_newcomer_s_first_message_is_decoded_without_a_second_of_imports() -> None:
    """torch.broadcast_shapes imports SymPy: a client that does so is late with its first answers, and is left out."""
    done = subprocess.run([sys.executable, "-c", DECODING], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_carrier_stays_behind_its_seam() -> None:
    for package, places in (
        ("nvflare", ["deploy/flare.py", "bridges/flare.py"]),
        ("grpc", ["deploy/streams.py"]),
        ("flwr", ["bridges/flower/"]),
    ):
        users = [name(path) for path in FILES if any(one.split(".")[0] == package for one in imports(path))]
        assert users
        assert all(any(user.startswith(place) for place in places) for user in users)
