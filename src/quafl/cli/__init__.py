"""The command line."""

from typing import Annotated

import typer

import quafl
from quafl.cli import federation, figures, runs
from quafl.cli.terminal import console

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
for part in runs, figures, federation:
    app.add_typer(part.app)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"quafl {quafl.__version__}", highlight=False)
        raise typer.Exit


@app.callback(
    epilog="Examples:\n\n"
    "  quafl run demo --out runs/demo\n\n"
    "  quafl run demo --out runs/one --set run.seeds=[7] --set curves.FedAvg.algorithm.lr=0.2\n\n"
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
