"""The command line. A command's file is imported when it is called or asked for help, and imports what it needs when it
is called: help is there at once, and a client needs neither plots nor the simulator."""

from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from quafl.cli.terminal import complain, console, lacking
from quafl.version import __version__


class _Command(NamedTuple):
    """What help says of a command, without importing it."""

    home: str  # its file
    says: str
    needs: tuple[str, ...] = ()  # modules that come with an extra


_DRAWS = "matplotlib", "scipy"
COMMANDS = {
    "run": _Command("runs", "Run an experiment: every curve, every seed.", _DRAWS),
    "sweep": _Command("sweeps", "Run an experiment with all combinations of some settings.", _DRAWS),
    "watch": _Command("watching", "Follow a run from another terminal, until it ends."),
    "report": _Command("runs", "Show recorded runs: a table here, and a page with the curves.", _DRAWS),
    "export": _Command("runs", "Write a trained model as a state_dict, in safetensors.", _DRAWS),
    "reproduce": _Command(
        "figures", "Reproduce figures: their runs, their pictures, and whether their claims hold.", _DRAWS
    ),
    "tune": _Command("figures", "Try learning rates, judged on a part of the training set.", _DRAWS),
    "theory": _Command("theory", "What the paper's theorems say of an experiment."),
    "advise": _Command("theory", "Which algorithm, s, wait, K and bits to try first, and what each of them rests on."),
    "list": _Command("machine", "Show what can be named: experiments, figures, regimes, algorithms, codecs and tasks."),
    "doctor": _Command("machine", "Look at this machine: versions, devices, kernels, data, extras."),
    "federation": _Command("federation", "Real federations: who is in, and who is there."),
    "server": _Command("federation", "Be the server of a federation."),
    "client": _Command("federation", "Take part in a federation."),
}


class _Commands(TyperGroup):
    """By their names, from their files."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """As help shows it."""
        if cmd_name not in COMMANDS:
            return None
        missing = _missing(cmd_name)
        says = COMMANDS[cmd_name].says if missing is None else escape(f"({lacking(missing)})")
        return TyperCommand(cmd_name, help=says)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """As it is called; what it needs in the end is missed at its beginning."""
        name, found, rest = super().resolve_command(ctx, args)
        if name is not None and "--help" not in rest and (missing := _missing(name)) is not None:
            complain(lacking(missing))
        return name, found if name is None else loaded(name), rest


def _missing(name: str) -> str | None:
    """The first module that a command needs and that is not installed."""
    return next((module for module in COMMANDS[name].needs if find_spec(module) is None), None)


def loaded(name: str) -> Any:
    """The command itself."""
    group: Any = typer.main.get_group(import_module(f"quafl.cli.{COMMANDS[name].home}").app)
    return group.commands[name]


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"quafl {__version__}", highlight=False)
        raise typer.Exit


@app.callback(
    epilog="Examples:\n\n"
    "  quafl run demo --out runs/demo\n\n"
    "  quafl run demo --out runs/one --set run.seeds=[7] --set curves.QuAFL.algorithm.lr=0.2\n\n"
    "  quafl run my.toml --out runs/mine\n\n"
    "  quafl run --resume runs/mine\n\n"
    "  quafl reproduce accuracy-vs-time-fmnist --quick\n\n"
    "  quafl report runs/demo runs/mine --out report.html\n\n"
    "  quafl export runs/demo/quafl --out model.safetensors"
)
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Quantized asynchronous federated learning: compare algorithms in virtual time."""
