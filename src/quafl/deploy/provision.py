"""Who is in a federation: an authority of its own, and a start-up kit with a key and a certificate for every party.

`authority/` stays with the organiser. A kit (`server/`, `clients/NAME/`) goes to its party: `kit.json` says who that is
and where the server is, `key.pem` and `certificate.pem` prove it, `authority.pem` proves the others. The server's kit
also lists the revoked certificates, in `revoked.json`. Only their owner can read these files, from their first byte on.
What the certificates say is `deploy.certificates`.
"""

import ipaddress
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from quafl.deploy.certificates import LIFETIME, Expiry, Pair, ProvisionError, found, issue, key_pem, pem, read_peer
from quafl.protocol.carrier import SERVER
from quafl.record.files import alone, make_private, write_atomically

FORMAT = 2  # of kits and of the authority's record; the first was NVIDIA FLARE's
AUTHORITY, CLIENTS = "authority", "clients"
FEDERATION, REVOKED, KIT = "federation.json", "revoked.json", "kit.json"
KEY, CERTIFICATE, ROOT = "key.pem", "certificate.pem", "authority.pem"
LONGEST = 36500  # days that an authority may be good for
EARLIER = (
    "is of an earlier release, which used NVIDIA FLARE; make new kits with 'quafl federation init' in a new folder"
)


class Credentials(NamedTuple):
    """What a party shows and what it trusts, as PEM; the key is not encrypted, and is to stay in memory."""

    key: bytes
    certificate: bytes
    authority: bytes


@dataclass(frozen=True, slots=True)
class Kit:
    """A party's folder: its key, its certificate, and where the server is."""

    path: Path
    name: str
    host: str
    port: int
    expires: datetime
    serial: int

    @property
    def is_server(self) -> bool:
        """Or a client's."""
        return self.name == SERVER

    @property
    def ended(self) -> bool:
        """Its certificate is no longer good."""
        return datetime.now(UTC) > self.expires

    @property
    def is_encrypted(self) -> bool:
        """Its key can be read with a passphrase only."""
        return is_encrypted(self.path)

    @property
    def target(self) -> str:
        """HOST:PORT of the server."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def warning(self, now: datetime | None = None) -> str | None:
        """About its certificate, if that ends in less than 30 days, or has ended."""
        return Expiry(self.name, self.expires).due(now)

    def credentials(self, passphrase: str | None = None) -> Credentials:
        """What lies in the kit now, which may be newer than what was opened, if all of it belongs together."""
        pair = _load(self.path, passphrase)
        try:
            root = (self.path / ROOT).read_bytes()
        except OSError as error:
            why = f"{self.path / ROOT} cannot be read ({error.strerror})"
            raise ProvisionError(f"{why}: take it from the kit as it was handed out, or ask for a new one") from error
        try:
            authority = x509.load_pem_x509_certificate(root)
            pair.certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise ProvisionError(f"{self.path / CERTIFICATE} is not issued by the authority in {ROOT} there") from error
        return Credentials(key_pem(pair.key), pem(pair.certificate), pem(authority))


class Watch:
    """Of a kit while its party runs, which may be renewed meanwhile: what there is to say of its certificate's end."""

    def __init__(self, kit: Kit) -> None:
        self._path, self._expires, self._expiry = kit.path, kit.expires, Expiry(kit.name, kit.expires)

    def due(self) -> str | None:
        """A sentence, if there is something new to say."""
        try:
            kit = open_kit(self._path)
        except (ProvisionError, OSError):  # it is just being copied
            return None
        if kit.expires != self._expires:
            self._expires, self._expiry = kit.expires, Expiry(kit.name, kit.expires)
        return self._expiry.due()


def init(
    folder: Path,
    address: str,
    names: Sequence[str],
    *,
    valid_days: int = 3650,
    passphrase: str | None = None,
    authority_passphrase: str | None = None,
) -> None:
    """A new federation: an authority that is good for some time, the server's kit, and one for each client. Their
    certificates are good for 360 days, if the authority is. The passphrase encrypts all keys; the authority's may have
    one of its own."""
    host, port = _address(address)
    if any((folder / part).exists() for part in (AUTHORITY, SERVER, CLIENTS)):
        raise ProvisionError(f"{folder} holds a federation already; choose another folder, or add clients to it")
    for number, name in enumerate(names):
        _check_name(name, names[:number])
    if not 1 <= valid_days <= LONGEST:
        raise ProvisionError(f"--valid-days {valid_days}: must be from 1 to {LONGEST}")
    authority = found(timedelta(days=valid_days))
    federation = {"format": FORMAT, "host": host, "port": port, "clients": list(names), "issued": [], "revoked": []}
    made = {place_of(name): _make_kit(federation, authority, name, passphrase) for name in (SERVER, *names)}
    made[Path(SERVER)][REVOKED] = _json([])
    made[Path(AUTHORITY)] = {
        KEY: key_pem(authority.key, authority_passphrase or passphrase),
        CERTIFICATE: pem(authority.certificate),
        FEDERATION: _json(federation),
    }
    make_private(folder)
    with TemporaryDirectory(dir=folder, prefix=".") as scratch:
        for place, files in made.items():
            _fill(Path(scratch) / place, files)
        for part in sorted(Path(scratch).iterdir()):  # the authority first: of two at once, one fails here
            part.rename(folder / part.name)


def add(folder: Path, name: str, *, passphrase: str | None = None, authority_passphrase: str | None = None) -> Path:
    """A kit for one more client, under the same authority. The passphrase encrypts its key, and opens the authority's,
    unless that has one of its own."""
    with _changing(folder) as federation:
        _check_name(name, [entry["name"] for entry in federation["issued"]])
        federation["clients"].append(name)
        return _admit(folder, federation, name, LIFETIME, passphrase, authority_passphrase)


def renew(
    folder: Path,
    name: str,
    *,
    revoke_old: bool = False,
    passphrase: str | None = None,
    authority_passphrase: str | None = None,
    lifetime: timedelta = LIFETIME,
) -> Path:
    """A new key and certificate in a party's kit, for the server or a client; what else is there stays. The old
    certificate is good until its end, unless it is revoked. Passphrases are as in `add`."""
    with _changing(folder) as federation:
        _check_known(name, [SERVER, *federation["clients"]])
        if passphrase is None and is_encrypted(folder / place_of(name)):
            raise ProvisionError(f"the key of {name} is encrypted; the new one needs a passphrase as well")
        if revoke_old and name == SERVER:
            raise ProvisionError(
                "the server's certificate cannot be revoked, as clients have no list to look at; if its key has "
                "leaked, make a new federation with 'quafl federation init'"
            )
        if revoke_old:
            _shut_out(federation, name)
        kit = _admit(folder, federation, name, lifetime, passphrase, authority_passphrase)
        _fill(folder / SERVER, {REVOKED: _json(federation["revoked"])})
        return kit


def revoke(folder: Path, name: str) -> Path:
    """Shut a client out for good: none of its certificates is good any more, and its name is not given out again. Gives
    the list that the server goes by."""
    with _changing(folder) as federation:
        _check_known(name, federation["clients"])
        federation["clients"].remove(name)
        _shut_out(federation, name)
        _fill(folder / SERVER, {REVOKED: _json(federation["revoked"])})
        _fill(folder / AUTHORITY, {FEDERATION: _json(federation)})
    return folder / SERVER / REVOKED


def revoked(kit: Path) -> dict[int, str]:
    """Serial numbers, and whose they were, of the certificates that the server whose kit this is does not accept."""
    path = kit / REVOKED
    try:
        entries = json.loads(path.read_bytes())
        if not isinstance(entries, list):
            raise ValueError("it is not a list")
        return {int(entry["serial"], 16): str(entry["name"]) for entry in entries}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ProvisionError(
            f"{path} is damaged or missing ({error}); it must be as 'quafl federation revoke' writes it"
        ) from error


def kits(folder: Path) -> Iterator[Kit]:
    """Everybody's, as far as they are in the folder; the only one, if the folder is a kit itself."""
    if (folder / KIT).exists() or _is_of_flare(folder):
        yield open_kit(folder)
        return
    for name in (SERVER, *_read(folder)["clients"]):
        path = folder / place_of(name)
        if (path / KIT).exists():
            yield open_kit(path)


def open_kit(path: Path) -> Kit:
    """A party's kit, or a ProvisionError that says why it is none."""
    if _is_of_flare(path):
        raise ProvisionError(f"the kit {path} {EARLIER}")
    try:
        said = json.loads((path / KIT).read_bytes())
        version, name, host, port = said["format"], str(said["name"]), str(said["host"]), int(said["port"])
        peer = read_peer((path / CERTIFICATE).read_bytes())
    except (OSError, ValueError, TypeError, KeyError, ProvisionError) as error:
        raise ProvisionError(
            f"{path} is not a start-up kit ({error}); make one with 'quafl federation init'"
        ) from error
    if version != FORMAT:
        raise ProvisionError(f"the kit {path} has format {version!r}, this release reads {FORMAT}; update QuAFL")
    if (peer.name, peer.is_client) != (name, name != SERVER):
        raise ProvisionError(f"{path} is the kit of {name}, but its certificate is of {peer.name}; copy {name}'s there")
    return Kit(path.resolve(), name, host, port, peer.expires, peer.serial)


def place_of(name: str) -> Path:
    """Of a party's kit in the federation's folder."""
    return Path(SERVER) if name == SERVER else Path(CLIENTS, name)


def is_encrypted(folder: Path) -> bool:
    """Whether the key in it, a kit's or the authority's, needs a passphrase."""
    path = folder / KEY
    return path.exists() and path.read_bytes().startswith(b"-----BEGIN ENCRYPTED")


def open_authority(folder: Path, passphrase: str | None = None) -> Pair:
    """That of the federation in this folder."""
    _read(folder)
    return _load(folder / AUTHORITY, passphrase)


def _admit(
    folder: Path,
    federation: dict[str, Any],
    name: str,
    lifetime: timedelta,
    passphrase: str | None,
    authority_passphrase: str | None,
) -> Path:
    """A kit for a party. Its serial number is recorded first, so that whatever gets out can be revoked."""
    authority = _load(folder / AUTHORITY, authority_passphrase or passphrase)
    files = _make_kit(federation, authority, name, passphrase, lifetime)
    _fill(folder / AUTHORITY, {FEDERATION: _json(federation)})
    _fill(folder / place_of(name), files)
    return folder / place_of(name)


def _make_kit(
    federation: dict[str, Any], authority: Pair, name: str, passphrase: str | None, lifetime: timedelta = LIFETIME
) -> dict[str, bytes]:
    """A kit's files; the federation remembers the certificate."""
    host, port = federation["host"], federation["port"]
    key, certificate = issue(authority, name, host, lifetime)
    end = certificate.not_valid_after_utc.isoformat()
    federation["issued"].append({"serial": f"{certificate.serial_number:x}", "name": name, "until": end})
    return {
        KEY: key_pem(key, passphrase),
        CERTIFICATE: pem(certificate),
        ROOT: pem(authority.certificate),
        KIT: _json({"format": FORMAT, "name": name, "host": host, "port": port}),
    }


def _shut_out(federation: dict[str, Any], name: str) -> None:
    """Revoke those of its certificates that have not ended."""
    now, known = datetime.now(UTC), {entry["serial"] for entry in federation["revoked"]}
    for entry in federation["issued"]:
        serial, until = entry["serial"], datetime.fromisoformat(entry["until"])
        if entry["name"] == name and until > now and serial not in known:
            federation["revoked"].append({"serial": serial, "name": name, "on": f"{now:%Y-%m-%d}"})


def _address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    label = "[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
    try:
        if host.startswith("[") and host.endswith("]"):
            host = str(ipaddress.IPv6Address(host[1:-1]))
        elif not re.fullmatch(rf"{label}(\.{label})*", host):
            raise ValueError(host)
        if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise ValueError(port)
    except ValueError as error:
        raise ProvisionError(f"--server {address}: must look like host.example.org:8002 or [::1]:8002") from error
    return host, int(port)


def _check_name(name: str, taken: Sequence[str]) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name) or name in (SERVER, AUTHORITY, CLIENTS):
        raise ProvisionError(f"client {name!r}: a name has letters, digits, - and _, and is not {SERVER!r}")
    if name in taken:
        raise ProvisionError(f"client {name!r}: there is or was one of that name; choose another")


def _check_known(name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ProvisionError(f"there is no {name!r} in this federation; there are {', '.join(known) or 'none'}")


@contextmanager
def _changing(folder: Path) -> Iterator[dict[str, Any]]:
    """What the authority remembers; nobody else changes it within the block."""
    _read(folder)
    with alone(folder / AUTHORITY, "try again when that has ended"):
        yield _read(folder)


def _read(folder: Path) -> dict[str, Any]:
    """What the authority remembers: where the server is, who is in, all certificates, those that are revoked."""
    path = folder / AUTHORITY / FEDERATION
    if (folder / AUTHORITY / "state").exists():
        raise ProvisionError(f"the federation in {folder} {EARLIER}")
    if not path.exists():
        raise ProvisionError(f"{folder} holds no federation; make one with 'quafl federation init'")
    try:
        federation: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise ProvisionError(f"{path} is damaged ({error}); restore it from a backup") from error
    if "format" not in federation:
        raise ProvisionError(f"the federation in {folder} {EARLIER}")
    if federation["format"] != FORMAT:
        raise ProvisionError(f"{path} has format {federation['format']!r}, this release reads {FORMAT}; update QuAFL")
    return federation


def _is_of_flare(kit: Path) -> bool:
    return any((kit / "startup" / f"fed_{party}.json").exists() for party in ("server", "client"))


def _load(folder: Path, passphrase: str | None) -> Pair:
    """The key and the certificate in a folder, if they belong together."""
    path = folder / KEY
    encrypted = is_encrypted(folder)
    if encrypted and passphrase is None:
        raise ProvisionError(f"{path} is encrypted; it needs its passphrase")
    try:
        certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
        password = passphrase.encode() if encrypted and passphrase else None
        key = serialization.load_pem_private_key(path.read_bytes(), password)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        reason = "wrong passphrase, or a damaged file" if encrypted else str(error)
        raise ProvisionError(f"{path} and {CERTIFICATE} beside it cannot be read: {reason}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ProvisionError(f"{path} does not belong to {CERTIFICATE} beside it; copy both from the same kit")
    return Pair(key, certificate)


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


def _fill(folder: Path, files: dict[str, bytes]) -> None:
    """Put files into a folder, each whole or not at all, and for their owner only."""
    make_private(folder)
    for name, octets in files.items():
        with write_atomically(folder / name, "wb", private=True) as stream:
            stream.write(octets)
