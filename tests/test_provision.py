"""Who is in a federation: kits, certificates, and one sentence for whatever is wrong with them."""

import stat
import sys
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from quafl.cli import app
from quafl.deploy import provision
from quafl.deploy.provision import ProvisionError
from quafl.tasks import DataError
from quafl.tasks.local import Local, make

BROKEN = """
from torch import nn


def task(name):
    return {}[name]


def pair():
    return 1, 2


def blind(name):
    return nn.Linear(2, 2), None
"""
FED = """
[task]
make = "quafl.tasks.demo:digits_of"
"""


def certificate(kit: Path) -> x509.Certificate:
    (path,) = (kit / "startup").glob("*.crt")
    return x509.load_pem_x509_certificate(path.read_bytes())


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "federation"
    provision.init(folder, "localhost:8002", ["north", "south"])
    return folder


def test_everybody_gets_a_folder_that_only_its_owner_can_read(founded: Path) -> None:
    kits = {kit.name: kit for kit in provision.kits(founded)}
    assert set(kits) == {"server", "north", "south"}
    assert all(kit.port == 8002 for kit in kits.values())
    for folder in (*(kit.path for kit in kits.values()), founded / "authority"):
        for path in (folder, *folder.rglob("*")):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    issuers = {certificate(kit.path).issuer for kit in kits.values()}
    assert len(issuers) == 1
    assert not list(founded.rglob("*.sh"))


def test_a_client_is_added_under_the_same_authority_and_shut_out_for_good(tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    provision.init(folder, "localhost:8002", ["north"])
    before = certificate(folder / "clients" / "north")
    kit = provision.add(folder, "east")
    before.verify_directly_issued_by(_authority(folder))
    certificate(kit).verify_directly_issued_by(_authority(folder))
    assert certificate(folder / "clients" / "north") == before
    (folder / "server" / "run").mkdir()
    (folder / "server" / "run" / "rows.csv").write_text("kept")
    listed = provision.revoke(folder, "north")
    assert listed.is_relative_to(folder / "server")
    assert provision.revoked(folder / "server") == ["north"]
    with pytest.raises(ProvisionError, match="there is or was one of that name"):
        provision.add(folder, "north")
    with pytest.raises(ProvisionError, match="there are east"):
        provision.revoke(folder, "north")
    old = certificate(folder / "server")
    assert provision.renew(folder, "server") == folder / "server"
    assert certificate(folder / "server").serial_number != old.serial_number
    assert provision.revoked(folder / "server") == ["north"]
    assert (folder / "server" / "run" / "rows.csv").read_text() == "kept"
    listed.write_text("[")
    with pytest.raises(ProvisionError, match="must be a list of names"):
        provision.revoked(folder / "server")


def _authority(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "server" / "startup" / "rootCA.pem").read_bytes())


def test_a_certificate_near_its_end_is_warned_of_and_can_be_renewed(tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    provision.init(folder, "localhost:8002", ["north"], valid_days=5)
    warning = provision.open_kit(folder / "clients" / "north").warning()
    assert warning is not None
    assert "ends in 4 days" in warning
    assert "quafl federation renew north" in warning
    old = certificate(folder / "clients" / "north")
    provision.renew(folder, "north")
    new = certificate(folder / "clients" / "north")
    assert new.serial_number != old.serial_number
    assert new.public_key() != old.public_key()
    fresh = tmp_path / "other"
    provision.init(fresh, "localhost:8002", ["north"])
    assert provision.open_kit(fresh / "clients" / "north").warning() is None


@pytest.mark.parametrize(
    ("address", "names", "complaint"),
    [
        ("localhost", ["a"], "must look like host.example.org:8002"),
        ("localhost:99999", ["a"], "must look like"),
        ("..:1", ["a"], "must look like"),
        ("localhost:8002", ["../evil"], "a name has letters"),
        ("localhost:8002", ["server"], "is not 'server'"),
        ("localhost:8002", ["a", "a"], "there is or was one of that name"),
    ],
)
def test_bad_names_and_addresses_are_said_in_a_sentence(
    tmp_path: Path, address: str, names: list[str], complaint: str
) -> None:
    with pytest.raises(ProvisionError, match=complaint):
        provision.init(tmp_path / "federation", address, names)
    assert not (tmp_path / "federation").exists()


def test_a_federation_is_not_overwritten(founded: Path) -> None:
    before = certificate(founded / "server")
    with pytest.raises(ProvisionError, match="holds a federation already"):
        provision.init(founded, "localhost:8002", ["x"])
    assert certificate(founded / "server") == before


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["client", "{}/server", "--task", "a:b"], "is the server's kit; a client needs one of its own"),
        (["server", "{}/clients/north", "--settings", "fed.toml"], "is the kit of north; a server needs the server's"),
        (["server", "{}", "--settings", "fed.toml"], "is not a start-up kit"),
        (["server", "{}/server", "--settings", "nowhere.toml"], "cannot read settings 'nowhere.toml'"),
        (["server", "{}/server", "--settings", "fed.toml", "--set", "clients.fat=3"], "unknown key clients.fat = 3"),
        (["server", "{}/server", "--settings", "fed.toml", "--set", "algorithm.patience=inf"], "must be finite"),
        (
            ["server", "{}/server", "--settings", "fed.toml", "--set", "algorithm.name=fednova"],
            "algorithm.name = 'fednova'",
        ),
        (["server", "{}/server", "--settings", "fed.toml", "--set", "codec.bits=17"], "codec.bits = 17"),
        (["server", "{}/server", "--settings", "bad.toml"], "task.make is missing"),
        (["client", "{}/clients/north", "--task", "nonsense"], "must look like package.module:function"),
        (["client", "{}/clients/north", "--task", ":f"], "must look like package.module:function"),
        (["client", "{}/clients/north", "--task", "builtins:dir"], "builtins:dir failed: ValueError"),
        (["client", "{}/clients/north", "--task", "broken:task"], "broken:task failed: KeyError"),
        (["client", "{}/clients/north", "--task", "broken:pair"], "cannot be used"),
        (["client", "{}/clients/north", "--task", "broken:blind"], "cannot learn from nothing"),
        (["client", "{}/clients/north", "--task", "not.there:make"], "No module named 'not'"),
        (["client", "{}/clients/north", "--task", "math:tau"], "tau is not a function"),
        (["client", "{}/clients/north", "--task", "os:getcwd"], "os:getcwd returned a str"),
        (["federation", "add", "west", "--dir", "nowhere"], "nowhere holds no federation"),
        (["federation", "status", "--dir", "nowhere"], "nowhere holds no federation"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence_before_anything_starts(
    founded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fed.toml").write_text(FED)
    (tmp_path / "bad.toml").write_text("")
    (tmp_path / "broken.py").write_text(BROKEN)
    sys.modules.pop("broken", None)
    result = CliRunner().invoke(app, [argument.format(founded) for argument in arguments])
    assert result.exit_code == 2, result.output
    assert complaint in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.output


def test_a_kit_is_used_by_one_process_at_a_time(founded: Path) -> None:
    kit = provision.open_kit(founded / "clients" / "north")
    with provision.in_use(kit), pytest.raises(ProvisionError, match="in use by another process"), provision.in_use(kit):
        pass
    with provision.in_use(kit):
        pass


def test_a_task_may_be_a_local_a_pair_or_a_task() -> None:
    one = make("quafl.tasks.demo:digits_of", "client-1")
    assert one.initial()[0].shape == (4810,)
    assert make("quafl.tasks.demo:digits_of", "server").evaluate(*one.initial())["accuracy"] < 0.5


def test_a_server_without_data_has_nothing_to_say(founded: Path) -> None:
    from torch import nn

    task = Local(nn.Linear(2, 2)).build()
    assert task.evaluate(*task.initial()) == {}
    assert set(task.export(*task.initial())) == {"weight", "bias"}
    with pytest.raises(DataError, match="cannot learn from nothing"):
        task.batch(0, 0)
