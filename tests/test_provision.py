"""Who is in a federation: kits, certificates, and one sentence for whatever is wrong with them."""

import json
import os
import shutil
import ssl
import stat
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from errno import ENOSPC
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from threading import Event, Thread
from time import sleep
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from typer.testing import CliRunner

from quafl.cli import app
from quafl.deploy import provision
from quafl.deploy.certificates import Expiry, ProvisionError, issue, read_peer
from quafl.record.files import InUse, alone
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


def certificate(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "certificate.pem").read_bytes())


def purposes(of: x509.Certificate) -> list[x509.ObjectIdentifier]:
    return list(of.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def alternatives(of: x509.Certificate) -> list[Any]:
    return [name.value for name in of.extensions.get_extension_for_class(x509.SubjectAlternativeName).value]


def open_to_others(folder: Path) -> list[Path]:
    """What lies there, is still there when looked at, and is not for its owner only."""
    found = []
    for root, _, files in os.walk(folder):
        for path, expected in ((Path(root), 0o700), *((Path(root, name), 0o600) for name in files)):
            with suppress(FileNotFoundError):
                if stat.S_IMODE(path.stat().st_mode) != expected:
                    found.append(path)
    return found


def greet(server: provision.Kit, client: provision.Kit, host: str) -> None:
    """A TLS handshake between two kits, in memory; an ssl.SSLError if either refuses the other."""
    ends = []
    for kit, side in ((server, ssl.PROTOCOL_TLS_SERVER), (client, ssl.PROTOCOL_TLS_CLIENT)):
        context = ssl.SSLContext(side)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(kit.path / "authority.pem")
        context.load_cert_chain(kit.path / "certificate.pem", kit.path / "key.pem")
        ends.append(context)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [ends[1].wrap_bio(down, up, server_hostname=host), ends[0].wrap_bio(up, down, server_side=True)]
    for _ in range(4):
        for side in sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert all(side.getpeercert() for side in sides)


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "federation"
    provision.init(folder, "localhost:8002", ["north", "south"])
    return folder


def test_a_kit_without_its_authority_is_told_so(tmp_path: Path) -> None:
    provision.init(tmp_path, "localhost:8002", ["north"])
    kit = provision.open_kit(tmp_path / "clients" / "north")
    (kit.path / "authority.pem").unlink()
    with pytest.raises(
        ProvisionError, match=r"authority.pem cannot be read \(No such file or directory\): take it from"
    ):
        kit.credentials()


def test_everybody_gets_a_kit_under_one_authority(founded: Path) -> None:
    kits = {kit.name: kit for kit in provision.kits(founded)}
    assert list(kits) == ["server", "north", "south"]
    assert {kit.target for kit in kits.values()} == {"localhost:8002"}
    assert sorted(path.name for path in founded.rglob("*") if path.is_file()) == sorted(
        ["federation.json", "revoked.json", *["key.pem", "certificate.pem"] * 4, *["authority.pem", "kit.json"] * 3]
    )
    for name, kit in kits.items():
        made = certificate(kit.path)
        made.verify_directly_issued_by(certificate(founded / "authority"))
        assert kit.serial == made.serial_number
        assert kit.is_server == (name == "server")
        assert provision.open_kit(kit.path) == kit
        assert kit.credentials().authority == (founded / "authority" / "certificate.pem").read_bytes()
    assert list(provision.kits(founded / "server")) == [kits["server"]]
    assert len({kit.serial for kit in kits.values()}) == 3


def test_certificates_say_what_they_are_for_and_no_more(founded: Path) -> None:
    authority = certificate(founded / "authority")
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(True, 0)
    assert authority.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    assert authority.not_valid_after_utc - datetime.now(UTC) > timedelta(days=3649)
    server, north = certificate(founded / "server"), certificate(founded / "clients" / "north")
    assert purposes(server) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert alternatives(server) == ["localhost", IPv4Address("127.0.0.1")]
    assert purposes(north) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert alternatives(north) == ["quafl:client/north"]
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    for made in (server, north):
        assert isinstance(made.public_key(), ec.EllipticCurvePublicKey)
        assert made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
        assert not made.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
        assert made.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier == identifier
        assert made.not_valid_before_utc < datetime.now(UTC) - timedelta(minutes=4)
        assert made.not_valid_after_utc - made.not_valid_before_utc == timedelta(days=360)


@pytest.mark.parametrize(
    ("address", "host", "target", "alternative"),
    [
        ("fed-1.example.org:8002", "fed-1.example.org", "fed-1.example.org:8002", "fed-1.example.org"),
        ("10.0.0.7:8002", "10.0.0.7", "10.0.0.7:8002", IPv4Address("10.0.0.7")),
        ("[::1]:8002", "::1", "[::1]:8002", IPv6Address("::1")),
        ("localhost:1", "localhost", "localhost:1", "localhost"),
    ],
)
def test_a_server_may_be_at_a_name_or_an_address(
    tmp_path: Path, address: str, host: str, target: str, alternative: object
) -> None:
    provision.init(tmp_path / "federation", address, ["a"])
    kit = provision.open_kit(tmp_path / "federation" / "server")
    assert (kit.host, kit.target) == (host, target)
    names = alternatives(certificate(kit.path))
    assert names == list(dict.fromkeys((alternative, "localhost", IPv4Address("127.0.0.1"))))
    greet(kit, provision.open_kit(tmp_path / "federation" / "clients" / "a"), host)


def test_a_client_cannot_pass_as_a_server_nor_a_server_as_a_client(tmp_path: Path) -> None:
    provision.init(tmp_path / "federation", "localhost:8002", ["localhost", "north"])
    server, impostor, north = provision.kits(tmp_path / "federation")
    greet(server, north, "localhost")
    with pytest.raises(ssl.SSLError, match="unsuitable certificate purpose"):
        greet(impostor, north, "localhost")
    with pytest.raises(ssl.SSLError, match="unsuitable certificate purpose"):
        greet(server, server, "localhost")
    policy = PolicyBuilder().store(Store([certificate(tmp_path / "federation" / "authority")]))
    policy.build_client_verifier().verify(certificate(north.path), [])
    policy.build_server_verifier(x509.DNSName("localhost")).verify(certificate(server.path), [])
    with pytest.raises(VerificationError):
        policy.build_server_verifier(x509.DNSName("localhost")).verify(certificate(impostor.path), [])


def test_a_peer_is_known_by_its_certificate(founded: Path, tmp_path: Path) -> None:
    server, north, _ = provision.kits(founded)
    assert read_peer(north.credentials().certificate) == ("north", north.serial, north.expires, True)
    assert read_peer(server.credentials().certificate) == ("server", server.serial, server.expires, False)
    assert not read_peer(server.credentials().authority).is_client
    with pytest.raises(ProvisionError, match="not of a QuAFL federation"):
        read_peer(b"nonsense")
    key = ec.generate_private_key(ec.SECP256R1())
    nameless = x509.CertificateBuilder(x509.Name([]), x509.Name([]), key.public_key(), 1, north.expires, north.expires)
    with pytest.raises(ProvisionError, match="not of a QuAFL federation"):
        read_peer(nameless.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))


@pytest.mark.parametrize("mask", [0o022, 0o000])
def test_nothing_is_ever_open_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int) -> None:
    made, over, seen = tmp_path / "above", Event(), set[Path]()
    monkeypatch.delattr(os, "chmod")  # what is closed afterwards was open before

    def watch() -> None:
        while not over.is_set():
            if made.exists():
                seen.update(open_to_others(made))

    watcher, before, interval = Thread(target=watch), os.umask(mask), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that the watcher looks between any two steps
    watcher.start()
    try:
        for number in range(8):
            folder = made / str(number) / "federation"
            provision.init(folder, "localhost:8002", ["north", "south"], passphrase="x" if number == 0 else None)
            provision.add(folder, "east", passphrase="x")
            provision.renew(folder, "north", revoke_old=True, passphrase="x")
            provision.revoke(folder, "south")
            with alone(folder / "server", "wait"):
                pass
    finally:
        over.set()
        watcher.join()
        os.umask(before)
        sys.setswitchinterval(interval)
    assert not seen
    assert not open_to_others(made)
    assert not list(made.rglob(".*"))


def test_a_failed_init_leaves_no_kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            provision.init(tmp_path / "federation", "localhost:8002", ["north"])
    assert not list((tmp_path / "federation").iterdir())
    provision.init(tmp_path / "federation", "localhost:8002", ["north"])


def test_keys_may_be_encrypted(tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    provision.init(folder, "localhost:8002", ["north"], passphrase="kits", authority_passphrase="organiser")
    assert len([path for path in folder.rglob("key.pem") if b"ENCRYPTED" in path.read_bytes()]) == 3
    north = provision.open_kit(folder / "clients" / "north")
    assert north.is_encrypted
    assert north.credentials("kits").key.startswith(b"-----BEGIN PRIVATE KEY-----")
    with pytest.raises(ProvisionError, match=r"key\.pem is encrypted; it needs its passphrase"):
        north.credentials()
    with pytest.raises(ProvisionError, match="wrong passphrase"):
        north.credentials("organiser")
    before = (folder / "authority" / "federation.json").read_bytes()
    with pytest.raises(ProvisionError, match="wrong passphrase"):
        provision.add(folder, "east", passphrase="kits")
    with pytest.raises(ProvisionError, match="must not be empty"):
        provision.add(folder, "east", passphrase="", authority_passphrase="organiser")
    with pytest.raises(ProvisionError, match="the new one needs a passphrase as well"):
        provision.renew(folder, "north", authority_passphrase="organiser")
    assert (folder / "authority" / "federation.json").read_bytes() == before
    east = provision.open_kit(provision.add(folder, "east", authority_passphrase="organiser"))
    assert not east.is_encrypted
    assert east.credentials() == east.credentials("not needed")
    provision.renew(folder, "north", passphrase="new", authority_passphrase="organiser")
    provision.revoke(folder, "east")
    assert north.credentials("new") != east.credentials()


def test_a_key_and_a_certificate_belong_together(tmp_path: Path) -> None:
    for name in "ab":
        provision.init(tmp_path / name, "localhost:8002", ["north"])
    ours, theirs = (provision.open_kit(tmp_path / name / "clients" / "north") for name in "ab")
    shutil.copy(theirs.path / "key.pem", ours.path)
    with pytest.raises(ProvisionError, match="does not belong to certificate"):
        ours.credentials()
    shutil.copy(theirs.path / "certificate.pem", ours.path)
    with pytest.raises(ProvisionError, match="not issued by the authority"):
        ours.credentials()
    shutil.copy(tmp_path / "b" / "server" / "certificate.pem", ours.path)
    with pytest.raises(ProvisionError, match="is the kit of north, but its certificate is of server"):
        provision.open_kit(ours.path)


def test_a_client_is_added_and_shut_out_for_good(tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    provision.init(folder, "localhost:8002", ["north"])
    assert provision.revoked(folder / "server") == {}
    before = certificate(folder / "clients" / "north")
    east = provision.open_kit(provision.add(folder, "east"))
    certificate(east.path).verify_directly_issued_by(certificate(folder / "authority"))
    assert certificate(folder / "clients" / "north") == before
    provision.renew(folder, "north")
    serials = {before.serial_number, certificate(folder / "clients" / "north").serial_number}
    listed = provision.revoke(folder, "north")
    assert listed == folder / "server" / "revoked.json"
    assert provision.revoked(folder / "server") == dict.fromkeys(serials, "north")
    assert [kit.name for kit in provision.kits(folder)] == ["server", "east"]
    with pytest.raises(ProvisionError, match="there is or was one of that name"):
        provision.add(folder, "north")
    with pytest.raises(ProvisionError, match="there are east"):
        provision.revoke(folder, "north")
    shutil.rmtree(folder / "server")  # it has gone to its machine; the list is whole nevertheless
    provision.revoke(folder, "east")
    assert provision.revoked(folder / "server") == {**dict.fromkeys(serials, "north"), east.serial: "east"}


@pytest.mark.parametrize("damaged", ["[", "{}", "[1]", '["north"]', '[{"serial": "xyz", "name": "a"}]', None])
def test_a_damaged_list_is_never_taken_for_an_empty_one(tmp_path: Path, damaged: str | None) -> None:
    if damaged is not None:
        (tmp_path / "revoked.json").write_text(damaged)
    with pytest.raises(ProvisionError, match=r"revoked\.json is damaged or missing"):
        provision.revoked(tmp_path)


def test_renewal_replaces_key_and_certificate_and_keeps_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    provision.init(folder, "localhost:8002", ["north"])
    for name in ("server", "north"):
        kit = provision.open_kit(folder / provision.place_of(name))
        (kit.path / "run").mkdir()
        (kit.path / "run" / "rows.csv").write_text("kept")
        old = certificate(kit.path)
        assert provision.renew(folder, name).resolve() == kit.path
        assert certificate(kit.path).serial_number != old.serial_number
        assert certificate(kit.path).public_key() != old.public_key()
        assert (kit.path / "run" / "rows.csv").read_text() == "kept"
        kit.credentials()
    greet(*provision.kits(folder), "localhost")
    assert provision.revoked(folder / "server") == {}
    shutil.rmtree(folder / "clients" / "north")  # it has gone to its machine
    assert provision.open_kit(provision.renew(folder, "north")).name == "north"
    with pytest.raises(ProvisionError, match="there are server, north"):
        provision.renew(folder, "west")


def test_a_leaked_key_is_shut_out_and_its_client_stays(tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    provision.init(folder, "localhost:8002", ["north"])
    leaked = provision.open_kit(folder / "clients" / "north").serial
    provision.renew(folder, "north", revoke_old=True)
    assert provision.revoked(folder / "server") == {leaked: "north"}
    assert provision.open_kit(folder / "clients" / "north").serial != leaked
    with pytest.raises(ProvisionError, match="the server's certificate cannot be revoked"):
        provision.renew(folder, "server", revoke_old=True)


def test_a_certificate_that_has_ended_needs_no_revocation(tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    provision.init(folder, "localhost:8002", ["north"])
    first = provision.open_kit(folder / "clients" / "north").serial
    short = provision.open_kit(provision.renew(folder, "north", lifetime=timedelta(seconds=-1)))
    assert short.ended
    provision.revoke(folder, "north")
    assert provision.revoked(folder / "server") == {first: "north"}


def test_two_do_not_change_a_federation_at_once(tmp_path: Path) -> None:
    folder, names = tmp_path / "federation", [f"client-{number}" for number in range(8)]
    provision.init(folder, "localhost:8002", ["north"])

    def persist(name: str) -> None:
        while True:
            with suppress(InUse):
                provision.add(folder, name)
                return

    threads = [Thread(target=persist, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {kit.name for kit in provision.kits(folder)} == {"server", "north", *names}


def test_no_certificate_outlives_the_authority(tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    provision.init(folder, "localhost:8002", ["north"], valid_days=5)
    authority = provision.open_authority(folder)
    end = authority.certificate.not_valid_after_utc
    assert {kit.expires for kit in provision.kits(folder)} == {end}
    soon = issue(authority, "north", "localhost", timedelta(seconds=30)).certificate
    assert soon.not_valid_after_utc < datetime.now(UTC) + timedelta(seconds=31)
    warning = provision.open_kit(folder / "clients" / "north").warning()
    assert warning is not None
    assert "ends in 4 days" in warning
    assert "quafl federation renew north" in warning


def test_an_end_is_spoken_of_once_at_30_7_and_1_days_and_when_it_has_come() -> None:
    end = datetime(2026, 11, 16, tzinfo=UTC)
    expiry, said = Expiry("north", end), {}
    for hour in range(-60 * 24, 48):
        sentence = expiry.due(end + timedelta(hours=hour))
        if sentence is not None:
            said[hour] = sentence
    remedy = "the organiser renews it with 'quafl federation renew north'"
    assert said == {
        -30 * 24 + 1: f"the certificate of north ends in 29 days, on 2026-11-16; {remedy}",
        -7 * 24 + 1: f"the certificate of north ends in 6 days, on 2026-11-16; {remedy}",
        -23: f"the certificate of north ends within a day, on 2026-11-16; {remedy}",
        1: f"the certificate of north ended on 2026-11-16; {remedy}",
    }
    late = Expiry("north", end)
    assert "in 1 day," in str(late.due(end - timedelta(hours=30)))
    assert late.due(end - timedelta(hours=29)) is None


def test_a_kit_warns_from_30_days_before_its_end(founded: Path) -> None:
    kit = provision.open_kit(founded / "clients" / "north")
    assert kit.warning() is None
    assert "ends in 29 days" in str(kit.warning(kit.expires - timedelta(days=29, hours=1)))
    assert "ended on" in str(kit.warning(kit.expires + timedelta(seconds=1)))
    assert not kit.ended


def test_kits_and_federations_of_an_earlier_release_are_refused(tmp_path: Path) -> None:
    for party in ("server", "client"):
        startup = tmp_path / party / "startup"
        startup.mkdir(parents=True)
        (startup / f"fed_{party}.json").write_text("{}")
        for use in (provision.open_kit, lambda path: list(provision.kits(path))):
            with pytest.raises(ProvisionError, match=r"of an earlier release.*'quafl federation init'"):
                use(tmp_path / party)
    authority = tmp_path / "authority"
    authority.mkdir()
    (authority / "federation.json").write_text('{"host": "localhost", "port": 8002, "clients": ["north"]}')
    with pytest.raises(ProvisionError, match=r"of an earlier release.*'quafl federation init'"):
        provision.add(tmp_path, "east")
    with pytest.raises(ProvisionError, match="holds a federation already"):
        provision.init(tmp_path, "localhost:8002", ["north"])
    (authority / "federation.json").write_text('{"format": 3}')
    with pytest.raises(ProvisionError, match="has format 3, this release reads 2"):
        provision.add(tmp_path, "east")
    (authority / "federation.json").write_text("{")
    with pytest.raises(ProvisionError, match="is damaged"):
        provision.add(tmp_path, "east")
    (authority / "state").mkdir()
    with pytest.raises(ProvisionError, match="of an earlier release"):
        list(provision.kits(tmp_path))


def test_commands_take_passphrases_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def quafl(command: str, passphrase: str | None) -> str:
        result = CliRunner(env={"QUAFL_PASSPHRASE": passphrase}).invoke(app, command.split())
        assert result.exit_code == (2 if result.stderr else 0), result.output
        return result.stderr.replace("\n", " ") or result.stdout.replace("\n", " ")

    nobody = "needs a passphrase, and there is no terminal to ask at; set QUAFL_PASSPHRASE"
    assert nobody in quafl("federation init --server localhost:8002 north --encrypt", None)
    assert not (tmp_path / "federation").exists()
    assert "stays with you" in quafl("federation init --server localhost:8002 north --encrypt", "x")
    assert f"the authority's key {nobody}" in quafl("federation add east", None)
    assert "wrong passphrase" in quafl("federation add east", "y")
    assert "for east" in quafl("federation add east", "x")
    assert f"the key of north {nobody}" in quafl("client federation/clients/north --task a:b", None)
    assert "wrong passphrase" in quafl("client federation/clients/north --task a:b", "y")
    assert "No module named 'a'" in quafl("client federation/clients/north --task a:b", "x")
    renewed = quafl("federation renew north --revoke-old", "x")
    assert "copy key.pem and certificate.pem over the old ones at north" in renewed
    assert "the old one is shut out as soon as federation/server/revoked.json is" in renewed
    assert provision.open_kit(tmp_path / "federation" / "clients" / "north").credentials("x")
    assert "east is shut out as soon as" in quafl("federation revoke east", None)
    status = quafl("federation status", None)
    assert status.count("north") == 2
    assert status.count("revoked (") == 2
    told = json.loads(quafl("federation status --json", None))
    assert {party["name"] for party in told["parties"]} == {"server", "north"}
    assert [party["name"] for party in told["revoked"]] == ["north", "east"]
    assert told["run"] is None


def test_a_passphrase_is_asked_for_twice_on_a_terminal_and_not_shown(tmp_path: Path) -> None:
    terminal = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    command = [sys.executable, "-m", "quafl.cli", "federation", "init", "--server", "localhost:8002", "a", "--encrypt"]
    environment = {name: value for name, value in os.environ.items() if name != "QUAFL_PASSPHRASE"}
    with subprocess.Popen(
        [sys.executable, "-c", terminal, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        shown = b""
        for answer in (b"organiser", b"organiser", b"kits", b"kits"):
            prompt = b""
            while not prompt.endswith(b": "):
                octet = process.stdout.read(1)
                assert octet, shown + prompt
                prompt += octet
            shown += prompt
            sleep(0.1)  # the terminal forgets what was typed before it stops showing it
            process.stdin.write(answer + b"\n")
            process.stdin.flush()
        shown += process.stdout.read()
    assert process.returncode == 0, shown
    assert b"organiser" not in shown
    assert provision.open_kit(tmp_path / "federation" / "clients" / "a").credentials("kits")
    assert provision.open_authority(tmp_path / "federation", "organiser")


@pytest.mark.parametrize(
    ("address", "names", "complaint"),
    [
        ("localhost", ["a"], "must look like host.example.org:8002"),
        ("localhost:99999", ["a"], "must look like"),
        ("..:1", ["a"], "must look like"),
        ("::1:8002", ["a"], "must look like"),
        ("[nonsense]:8002", ["a"], "must look like"),
        ("localhost:８００２", ["a"], "must look like"),
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


@pytest.mark.parametrize("days", [0, 36501])
def test_an_authority_is_good_for_a_day_to_a_hundred_years(tmp_path: Path, days: int) -> None:
    with pytest.raises(ProvisionError, match="must be from 1 to 36500"):
        provision.init(tmp_path / "federation", "localhost:8002", ["a"], valid_days=days)
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
    kit = founded / "clients" / "north"
    with alone(kit, "wait"), pytest.raises(InUse, match="north is in use by another process; wait"), alone(kit, "wait"):
        pass
    with alone(kit, "wait"):
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
