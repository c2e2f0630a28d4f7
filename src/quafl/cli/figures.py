"""The paper's figures, `quafl reproduce | tune`; tune serves settings of one's own, too."""

from pathlib import Path
from typing import Annotated

import typer

from quafl.cli.terminal import Changes, Device, Jobs, Json, Only, one_sentence, only_json

app = typer.Typer()


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID…|all|regimes", help="Labels of the paper's figures, or names of regimes."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", help="Show the figures, what is claimed of them and what they cost.")
    ] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many, from 0 on; earlier ones are kept.")] = None,
    quick: Annotated[bool, typer.Option(help="A small version, to try it out; its verdict says nothing.")] = False,
    device: Device = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the results, one in it for each figure.", file_okay=False)
    ] = Path("runs/paper"),
    set_: Changes = None,
    only: Only = None,
    jobs: Jobs = None,
) -> None:
    """Reproduce figures: their runs, their pictures, and whether their claims hold. Given again, it goes on. The runs
    of several are worked off together. With --only, curves are run, and nothing is judged."""
    with one_sentence():
        from quafl.cli.reproductions import list_figures, reproduce_all, run_curves

        if show or not names:
            list_figures()
            return
        overrides = [*(set_ or []), *([f"run.device={device}"] if device else [])]
        overrides += [f"run.seeds={list(range(seeds))}"] if seeds else []
        if only:
            run_curves(names, only, overrides, out, jobs, quick=quick)
            return
        said = ["--seeds", str(seeds)] if seeds else []
        said += [*(["--quick"] if quick else []), *(["--device", device] if device else [])]
        said += [word for one in set_ or [] for word in ("--set", one)]
        reproduce_all(names, overrides, out, jobs, said, quick=quick)


@app.command()
def tune(
    name: Annotated[
        str,
        typer.Argument(metavar="ID|NAME|FILE.toml", help="A figure; with --over, an experiment or a settings file."),
    ],
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="What to try of a setting: algorithm.lr=0.1,0.2, or a range, algorithm.lr=0.01..1; may be repeated.",
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="How many points of a range are tried.")] = 20,
    quick: Annotated[bool, typer.Option(help="Of the small version of a figure.")] = False,
    device: Device = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the results, one in it for each figure or file.", file_okay=False)
    ] = Path("runs/tune"),
    set_: Changes = None,
    jobs: Jobs = None,
    json_: Json = False,
) -> None:
    """Try learning rates, judged on a part of the training set. Of a figure: as many for each algorithm. Of settings of
    your own: the values that --over gives. Given again, it goes on."""
    with one_sentence(), only_json(json_):
        from quafl.cli.tunings import show, tune_figure, tune_settings
        from quafl.settings.base import SettingsError

        changes = [*(set_ or []), *([f"run.device={device}"] if device else [])]
        place = out / ("quick" if quick else "") / (Path(name).stem if over else name)
        if not over and Path(name).is_file():
            raise SettingsError(f"say what to try: quafl tune {name} --over algorithm.lr=0.05,0.1,0.2")
        if over:
            tried = tune_settings(name, changes, over, trials, place, jobs)
        else:
            tried = tune_figure(name, changes, place, jobs, quick=quick)
        show(tried, place, as_json=json_)
