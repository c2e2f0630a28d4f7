"""What all commands share: options and complaints. Help shows them, and imports nothing that takes its time."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

console = Console()
UNREAD = 141  # exit code where nobody reads the output any more, as of a process that SIGPIPE ends
GO_ON = "the same command goes on where it was"

Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of every curve, e.g. algorithm.lr=0.2."),
]
Only = Annotated[
    list[str] | None, typer.Option("--only", metavar="CURVE", help="Run this curve alone; may be repeated.")
]
Jobs = Annotated[
    int | None, typer.Option("-j", "--jobs", min=1, help="Processes; by default one per core, or per GPU.")
]
EXTRAS = {  # by what they bring: what an extra is called, and what it is for
    **dict.fromkeys(("matplotlib", "scipy"), ("figures", "tables, reports and figures")),
    **dict.fromkeys(("sklearn", "pooch", "PIL"), ("data", "the built-in datasets")),
    **dict.fromkeys(("grpc", "cryptography"), ("federation", "real federations")),
    "ray": ("ray", "clusters"),
    "triton": ("cuda", "the codec's GPU kernels"),
    "optuna": ("tune", "searches of ranges"),
    "nvflare": ("flare", "jobs of NVIDIA FLARE"),
    **dict.fromkeys(("transformers", "peft"), ("lora", "language models and adapters")),
    "flwr": ("flower", "Flower apps"),
    **dict.fromkeys(("pandas", "ipywidgets"), ("notebook", "frames of results, and bars in Jupyter")),
    **{name: (name, f'run.track = ["{name}"]') for name in ("tensorboard", "mlflow", "wandb")},
}
Json = Annotated[bool, typer.Option("--json", help="Write JSON to stdout, and all else to stderr.")]
Device = Annotated[str | None, typer.Option(help="Where to compute: cpu, cuda, cuda:1.")]


@contextmanager
def one_sentence() -> Iterator[None]:
    """Bad input, or an extra that is not installed, ends with a sentence and exit code 2, not with a traceback. Where a
    reader such as `head` has seen enough, there is no word."""
    from quafl.record.files import InUse
    from quafl.record.summary import RecordError, RunError
    from quafl.settings.base import SettingsError
    from quafl.tasks import DataError

    try:
        yield
        sys.stdout.flush()  # here, and not when Python has ended
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(UNREAD) from None
    except (SettingsError, RecordError, DataError, InUse, RunError) as error:
        complain(str(error))
    except OSError as error:
        complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ModuleNotFoundError as error:
        complain(remedy(error))


@contextmanager
def only_json(wanted: bool) -> Iterator[None]:
    """Where the answer is to be JSON, all else goes to stderr."""
    console.stderr = wanted
    try:
        yield
    finally:
        console.stderr = False


def remedy(error: ModuleNotFoundError) -> str:
    """For a module that comes with an extra; another's error is raised again."""
    missing = (error.name or "").partition(".")[0]
    if missing not in EXTRAS:
        raise error
    return lacking(missing)


def lacking(module: str) -> str:
    """What a module that comes with an extra is for, and how to get it."""
    name, purpose = EXTRAS[module]
    return f"{purpose} need {module}, which is not installed: pip install 'quafl[{name}]'"


def print_json(content: dict[str, Any]) -> None:
    """For a program that reads what is printed; JSON has no NaN, and null in its place."""
    plain = json.loads(json.dumps(content), parse_constant=lambda name: None)
    print(json.dumps(plain, indent=2))


def complain(sentence: str, code: int = 2) -> NoReturn:
    """End with a sentence."""
    Console(stderr=True, soft_wrap=True).print(f"quafl: {sentence}", style="red", markup=False, highlight=False)
    raise typer.Exit(code) from None
