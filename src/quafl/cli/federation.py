"""Real federations: `quafl federation | server | client`."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from quafl.cli.terminal import complain, console, one_sentence, print_json, remedy

PASSPHRASE = "QUAFL_PASSPHRASE"  # the environment variable that answers whatever asks for a passphrase

app = typer.Typer()
federation = typer.Typer(no_args_is_help=True, help="Real federations: who is in, and who is there.")
app.add_typer(federation, name="federation")

_Folder = Annotated[Path, typer.Option("--dir", help="The federation's folder.", file_okay=False)]
_FolderOrKit = Annotated[
    Path, typer.Option("--dir", help="The federation's folder, or the server's kit.", file_okay=False)
]
_Encrypt = Annotated[
    bool, typer.Option("--encrypt", help=f"Encrypt new keys, with a passphrase that is asked for, or in {PASSPHRASE}.")
]
FOLDER = Path("federation")


@federation.command("init")
def federation_init(
    names: Annotated[list[str], typer.Argument(metavar="CLIENT…", help="The clients' names.")],
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where clients reach the server.")],
    folder: _Folder = FOLDER,
    valid_days: Annotated[
        int, typer.Option(help="For how long the authority is good; each certificate is for 360 days at most.")
    ] = 3650,
    encrypt: _Encrypt = False,
) -> None:
    """Found a federation: an authority, and a start-up kit with a certificate for every party."""
    with one_sentence(), _provisioning() as provision:
        provision.init(
            folder,
            server,
            names,
            valid_days=valid_days,
            authority_passphrase=_passphrase("the authority's key", encrypt, new=True),
            passphrase=_passphrase("the kits' keys", encrypt, new=True),
        )
        _say(
            f"{folder / provision.SERVER}: for the machine that is {server}\n"
            + "\n".join(f"{folder / provision.CLIENTS / name}: for {name}" for name in names)
            + f"\n{folder / provision.AUTHORITY}: stays with you; whoever has it can admit anybody"
        )


@federation.command("add")
def federation_add(
    name: Annotated[str, typer.Argument(metavar="CLIENT", help="The new client's name.")],
    folder: _Folder = FOLDER,
    encrypt: _Encrypt = False,
) -> None:
    """Admit one more client; the server need not be restarted."""
    with one_sentence(), _provisioning() as provision:
        kit = provision.add(
            folder,
            name,
            authority_passphrase=_passphrase(
                "the authority's key", provision.is_encrypted(folder / provision.AUTHORITY)
            ),
            passphrase=_passphrase(f"the key of {name}", encrypt, new=True),
        )
        _say(f"{kit}: for {name}")


@federation.command("renew")
def federation_renew(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A client, or 'server'.")],
    folder: _Folder = FOLDER,
    revoke_old: Annotated[
        bool, typer.Option("--revoke-old", help="Shut the old certificate out, as when its key has leaked.")
    ] = False,
    encrypt: _Encrypt = False,
) -> None:
    """Make a new key and certificate for a party whose certificate ends."""
    with one_sentence(), _provisioning() as provision:
        encrypt = encrypt or provision.is_encrypted(folder / provision.place_of(name))
        kit = provision.renew(
            folder,
            name,
            revoke_old=revoke_old,
            authority_passphrase=_passphrase(
                "the authority's key", provision.is_encrypted(folder / provision.AUTHORITY)
            ),
            passphrase=_passphrase(f"the new key of {name}", encrypt, new=True),
        )
        listed = folder / provision.SERVER / provision.REVOKED
        until = f"{provision.open_kit(kit).expires:%Y-%m-%d}"
        taken = "when it next connects" if name != provision.SERVER else "by itself, even while it runs"
        old = f"is shut out as soon as {_there(listed)}" if revoke_old else "stays good until its end"
        _say(
            f"{kit}: copy {provision.KEY} and {provision.CERTIFICATE} over the old ones at {name}, which takes them "
            f"over {taken}\nThe new certificate is good until {until}; the old one {old}"
        )


@federation.command("revoke")
def federation_revoke(
    name: Annotated[str, typer.Argument(metavar="CLIENT", help="Who is shut out.")], folder: _Folder = FOLDER
) -> None:
    """Shut a client out for good, even while the server runs."""
    with one_sentence(), _provisioning() as provision:
        _say(f"{name} is shut out as soon as {_there(provision.revoke(folder, name))}")


@federation.command("status")
def federation_status(
    folder: _FolderOrKit = FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show who is in, until when, and, on the server's machine, who is there and how far the run is."""
    with one_sentence(), _engine() as (federated, provision):
        path = folder if (folder / provision.KIT).exists() else folder / provision.SERVER
        kits, status = list(provision.kits(folder)), federated.read_status(path)
        revoked = provision.revoked(path) if (path / provision.REVOKED).exists() else {}
        if as_json:
            parties = [{"name": kit.name, "expires": kit.expires.isoformat(), "ended": kit.ended} for kit in kits]
            gone = [{"name": name, "serial": hex(serial)[2:]} for serial, name in revoked.items()]
            print_json({"parties": parties, "revoked": gone, "run": status})
            return
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("party", "certificate until", ""):
            table.add_column(heading)
        for kit in kits:
            remark = "has ended" if kit.ended else "ends soon" if kit.warning() else ""
            table.add_row(kit.name, f"{kit.expires:%Y-%m-%d}", remark)
        for serial, name in revoked.items():
            table.add_row(name, "–", f"revoked ({hex(serial)[2:10]}…)")
        console.print(table)
        console.print("The server has not run here." if status is None else _picture(status))


@federation.command("demo")
def federation_demo(
    out: Annotated[Path, typer.Option(help="Folder for everything.", file_okay=False)] = Path("runs/federation"),
    overwrite: Annotated[bool, typer.Option(help="Replace what is in the folder.")] = False,
) -> None:
    """Run a whole federation on this machine: certificates, a server, four clients."""
    with one_sentence(), _engine() as (federated, _):
        raise typer.Exit(federated.demo(out, overwrite=overwrite))


@federation.command("replay")
def federation_replay(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The run folder of the server.", exists=True)],
    task: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Makes the clients' tasks; by default the server's.")
    ] = None,
) -> None:
    """Compute a federation's models again, by the simulator, and compare them bit for bit."""
    with one_sentence():
        from quafl.run.replay import replay

        outcome = replay(folder, task)
        same = f"{outcome.models} of the server's {outcome.known} recorded models are the same, bit for bit"
        _say(f"{outcome.rounds:,} rounds computed again; {same}.")
        if outcome.returned:
            _say(f"Came back as another process: {', '.join(outcome.returned)}. Nobody here knows what they had kept.")
        if outcome.deviation is not None:
            complain(f"the history could be followed until then: {outcome.deviation}")


@app.command()
def server(
    kit: Annotated[Path, typer.Argument(metavar="KIT", help="The server's start-up kit.")],
    settings: Annotated[Path, typer.Option(metavar="FILE.toml", help="What is learned, and how.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the run; by default in the kit.", file_okay=False)
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. algorithm.lr=0.2.")
    ] = None,
) -> None:
    """Be the server of a federation; started again, it goes on where it was."""
    with one_sentence(), _engine() as (federated, provision):
        from quafl.settings.base import SettingsError
        from quafl.settings.reading import load_federation

        opened = provision.open_kit(kit)
        if not opened.is_server:
            raise SettingsError(f"{kit} is the kit of {opened.name}; a server needs the server's")
        _check_certificate(opened)
        passphrase = _passphrase(f"the key of {opened.name}", opened.is_encrypted)
        opened.credentials(passphrase)
        loaded, folder = load_federation(str(settings), set_ or []), (out or kit / federated.RUN).resolve()
        with federated.at_work(opened, folder, "choose another --out, or end that process"), _live() as show:
            process = federated.ServerProcess(opened, passphrase, loaded, folder, show, lambda: _conclude_run(folder))
            raise typer.Exit(process.serve())


@app.command()
def client(
    kit: Annotated[Path, typer.Argument(metavar="KIT", help="The client's start-up kit.")],
    task: Annotated[str, typer.Option(metavar="PACKAGE.MODULE:FUNCTION", help="Makes the model and the local data.")],
    state: Annotated[
        Path | None, typer.Option(help="Folder for its checkpoints; by default in the kit.", file_okay=False)
    ] = None,
    step_seconds: Annotated[
        float, typer.Option(min=0, help="Take at least that long for a local step, to leave the machine to others.")
    ] = 0.0,
    keep_speed: Annotated[bool, typer.Option(help="Do not tell the server how many steps are taken.")] = False,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda|auto", help="Where to train; by default where the task says.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Give the function this, e.g. hidden=64.")
    ] = None,
) -> None:
    """Take part in a federation; started again, it goes on where it was."""
    with one_sentence(), _engine() as (federated, provision):
        from quafl.settings.base import SettingsError
        from quafl.settings.overrides import changes_of

        opened = provision.open_kit(kit)
        if opened.is_server:
            raise SettingsError(f"{kit} is the server's kit; a client needs one of its own")
        _check_certificate(opened)
        passphrase = _passphrase(f"the key of {opened.name}", opened.is_encrypted)
        opened.credentials(passphrase)
        folder = (state or kit / "state").resolve()
        with federated.at_work(opened, folder, "choose another --state, or end that process"):
            process = federated.ClientProcess(
                opened,
                passphrase,
                task,
                changes_of(set_ or []),
                folder,
                step_seconds=step_seconds,
                tell_speed=not keep_speed,
                device=device,
            )
            raise typer.Exit(process.take_part())


@contextmanager
def _provisioning() -> Iterator[Any]:
    """The part that makes and reads kits; what is wrong with them ends with a sentence."""
    from quafl.deploy import provision
    from quafl.deploy.certificates import ProvisionError

    try:
        yield provision
    except ProvisionError as error:
        complain(str(error))


@contextmanager
def _engine() -> Iterator[tuple[Any, Any]]:
    """The parts that make a party run."""
    with _provisioning() as provision:
        from quafl.run import federation as federated

        sys.path.insert(0, str(Path.cwd()))  # where a user's task may be
        yield federated, provision


def _passphrase(what: str, is_needed: bool, *, new: bool = False) -> str | None:
    """From the environment, or from whoever sits at the terminal."""
    if not is_needed:
        return None
    if given := os.environ.get(PASSPHRASE):
        return given
    if not sys.stdin.isatty():
        complain(f"{what} needs a passphrase, and there is no terminal to ask at; set {PASSPHRASE}")
    return str(typer.prompt(f"Passphrase for {what}", hide_input=True, confirmation_prompt=new, err=True))


def _there(listed: Path) -> str:
    return f"{listed} is in the same place in the server's kit"


def _say(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def _check_certificate(kit: Any) -> None:
    sentence = kit.warning()
    if kit.ended:
        complain(sentence)
    if sentence is not None:
        Console(stderr=True, soft_wrap=True).print(f"quafl: {sentence}", style="yellow", markup=False, highlight=False)


@contextmanager
def _live() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Shows a run's status as it changes, where there is a terminal."""
    if not console.is_terminal:
        yield lambda status: None
        return
    live = Live(console=console, transient=True, auto_refresh=False)

    def show(status: dict[str, Any]) -> None:
        if not live.is_started:
            live.start()
        live.update(_picture(status), refresh=True)
        if not status["running"]:
            live.stop()

    yield show


def _picture(status: dict[str, Any]) -> Table:
    """Of a federation's run."""
    scores = ", ".join(f"{name} {value:.3f}" for name, value in status["score"].items() if value is not None)
    megabytes = (status["bytes_up"] + status["bytes_down"]) / 1e6
    state = "running" if status["running"] else "not running"
    table = Table(
        title=f"{state}: round {status['round']:,}, {status['seconds']:.0f} s, {scores or 'no test data'}, "
        f"{megabytes:,.2f} MB, {status['refined']} repairs, {status['lost']} lost",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title_justify="left",
    )
    for heading in ("client", "", "contacts", "local steps", "a contact", "dropped"):
        table.add_column(heading, justify="left" if heading in ("client", "") else "right")
    for member in status["clients"]:
        speed = f"{member['steps'] / member['contacts']:.1f}" if member["steps"] else "–"
        there = "left out" if member["left_out"] else "there" if member["there"] else "away"
        there = there if status["running"] else "away"
        counts = f"{member['contacts']:,}", f"{member['steps']:,}", speed, f"{member['dropped']:,}"
        table.add_row(escape(member["name"]), there, *counts)
    return table


def _conclude_run(folder: Path) -> None:
    """Of a federation: its table and page, if there was something to judge by."""
    from quafl.record.summary import REPORT, RecordError, read_curve

    try:
        curve = read_curve(folder)
    except RecordError:
        console.print(f"The server has no test data; the model is in {folder}", highlight=False, soft_wrap=True)
        return
    try:
        from quafl.cli.results import conclude
    except ModuleNotFoundError as error:
        console.print(
            f"Rows and models are in {folder}; {remedy(error)}", highlight=False, soft_wrap=True, markup=False
        )
        return
    conclude([curve], folder / REPORT)
