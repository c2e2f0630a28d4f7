"""Runs: `quafl run | export | report`."""

from pathlib import Path
from typing import Annotated

import typer

from quafl.cli.terminal import Changes, Jobs, Only, complain, console, one_sentence

app = typer.Typer()


@app.command()
def run(
    source: Annotated[
        str | None, typer.Argument(metavar="NAME|FILE.toml", help="A built-in experiment, or a settings file.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results.", file_okay=False)] = None,
    set_: Changes = None,
    only: Only = None,
    jobs: Jobs = None,
    ray: Annotated[
        str | None,
        typer.Option(help="Spread the runs over the Ray cluster at this address; 'local' starts one here."),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier run in the folder.")] = False,
    checkpoint: Annotated[
        float, typer.Option("--checkpoint-every", min=0, help="Seconds between checkpoints of an unfinished seed.")
    ] = 60.0,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Continue the run in this folder, bit for bit.")
    ] = None,
) -> None:
    """Run an experiment: every curve, every seed. Writes rows, models and report.html."""
    with one_sentence():
        from quafl.cli.results import conclude, work_off
        from quafl.record.summary import REPORT, read_curve
        from quafl.run.folders import prepare, reopen
        from quafl.settings.base import SettingsError
        from quafl.settings.reading import load, only_some

        if ray is not None and jobs is not None:
            raise SettingsError("--ray and -j exclude each other: a cluster knows how many processes it has")
        if resume is not None:
            if source is not None or out is not None or set_ or only or overwrite:
                raise SettingsError("--resume takes everything from the folder; give it alone, or with -j or --ray")
            out, folders = resume, reopen(resume)
        elif source is None or out is None:
            raise SettingsError("say what to run and where: quafl run NAME|FILE.toml --out DIR, or --resume DIR")
        else:
            folders = prepare(only_some(load(source, set_ or []), only), out, overwrite=overwrite)
        go_on = f"continue with: quafl run --resume {out}"
        troubles = work_off(folders, go_on, jobs=jobs, ray=ray, checkpoint_seconds=checkpoint)
        conclude([read_curve(folder.path) for folder in folders], out / REPORT)
        if troubles:
            complain("; ".join(troubles))


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A curve's folder that 'quafl run' wrote.")],
    out: Annotated[Path, typer.Option(help="The file.", dir_okay=False)] = Path("model.safetensors"),
    which: Annotated[str, typer.Option(help="The best model of all evaluations, or the last.")] = "best",
    seed: Annotated[int | None, typer.Option(help="By default the first.")] = None,
) -> None:
    """Write a trained model as a state_dict, in safetensors."""
    with one_sentence():
        import safetensors.torch

        from quafl.record.files import write_atomically
        from quafl.run.folders import trained_model
        from quafl.settings.base import SettingsError

        if which not in ("best", "last"):
            raise SettingsError(f"--which {which}: must be best or last")
        model = trained_model(folder, seed=seed, which="best" if which == "best" else "last")
        with write_atomically(out, "wb") as stream:
            stream.write(safetensors.torch.save(model))
        whose = f"the {which} model of {'the first seed' if seed is None else f'seed {seed}'}"
        numbers = sum(tensor.numel() for tensor in model.values())
        console.print(f"{whose}, {len(model)} tensors, {numbers:,} numbers: {out}", highlight=False)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders that 'quafl run' wrote.")],
    out: Annotated[Path | None, typer.Option(help="The page; by default report.html in the first folder.")] = None,
    target: Annotated[float | None, typer.Option(help="Of the metric, in place of what the settings say.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the table's numbers as JSON; a page is written only with --out.")
    ] = False,
) -> None:
    """Show recorded runs: a table here, and a page with the curves."""
    with one_sentence():
        from quafl.cli.results import conclude, conclude_as_json
        from quafl.record.summary import REPORT, read_curves

        curves = read_curves(folders, target)
        if as_json:
            conclude_as_json(curves, out)
        else:
            conclude(curves, out or folders[0] / REPORT)
