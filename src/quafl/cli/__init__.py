"""The command line. A command's file is imported when it is called: a client needs neither plots nor the simulator."""

from importlib import import_module
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from quafl.cli.terminal import complain, console, remedy
from quafl.version import __version__

HOMES = {
    **dict.fromkeys(("run", "export", "report"), "runs"),
    **dict.fromkeys(("reproduce", "tune"), "figures"),
    **dict.fromkeys(("federation", "server", "client"), "federation"),
}


class _Commands(TyperGroup):
    """By their names, from their files."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(HOMES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in HOMES:
            return None
        try:
            group: Any = typer.main.get_command(import_module(f"quafl.cli.{HOMES[cmd_name]}").app)
        except ModuleNotFoundError as error:
            return _absent(cmd_name, remedy(error))
        return group.commands[cmd_name]


def _absent(name: str, sentence: str) -> TyperCommand:
    """A command whose extra is not installed: it says so, whatever it is called with."""
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return TyperCommand(
        name, callback=lambda: complain(sentence), help=escape(f"({sentence})"), context_settings=anything
    )


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
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
