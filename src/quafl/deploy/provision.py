"""Who is in a federation: an authority of its own, and a start-up kit with a certificate for every party."""

import fcntl
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cryptography import x509
from nvflare.lighter.impl.cert import CertBuilder
from nvflare.lighter.impl.signature import SignatureBuilder
from nvflare.lighter.impl.static_file import StaticFileBuilder
from nvflare.lighter.impl.workspace import WorkspaceBuilder
from nvflare.lighter.provision import prepare_project
from nvflare.lighter.provisioner import Provisioner

from quafl.deploy.flare import SERVER
from quafl.record.files import write_atomically

PROJECT = "quafl"
AUTHORITY, CLIENTS = "authority", "clients"
FEDERATION, REVOKED = "federation.json", "revoked.json"
NEAR = 30  # days before its end, from which on a certificate is warned of
ROLES = ("project_admin", "org_admin", "lead", "member")
RIGHTS = ("submit_job", "clone_job", "manage_job", "download_job", "view", "operate", "shell_commands", "byoc")
LARGEST_FRAME = 64_000_000  # octets that the engine takes at once; large messages come in chunks


class ProvisionError(Exception):
    """One sentence about what is wrong with a federation's folder, a kit, or a name."""


@dataclass(frozen=True, slots=True)
class Kit:
    """A party's folder: its key, its certificate, and where the server is."""

    path: Path
    name: str
    host: str
    port: int
    expires: datetime

    @property
    def is_server(self) -> bool:
        """Or a client's."""
        return self.name == SERVER

    @property
    def ended(self) -> bool:
        """Its certificate is no longer good."""
        return datetime.now(UTC) > self.expires

    def warning(self) -> str | None:
        """About its certificate, if that ends soon, or has ended."""
        days = (self.expires - datetime.now(UTC)).days
        if days >= NEAR:
            return None
        if self.ended:
            return f"the certificate of {self.name} ended on {self.expires:%Y-%m-%d}; the organiser can renew it"
        return (
            f"the certificate of {self.name} ends in {days} days, on {self.expires:%Y-%m-%d}; the organiser renews it "
            f"with 'quafl federation renew {self.name}'"
        )


def init(folder: Path, address: str, names: Sequence[str], *, valid_days: int = 3650) -> None:
    """A new federation: an authority that is good for some time, the server's kit, and one for each client. Their
    certificates are good for 360 days, if the authority is."""
    host, port = _address(address)
    if (folder / AUTHORITY / FEDERATION).exists():
        raise ProvisionError(f"{folder} holds a federation already; choose another folder, or add clients to it")
    for number, name in enumerate(names):
        _check_name(name, names[:number])
    if valid_days < 1:
        raise ProvisionError(f"--valid-days {valid_days}: must be at least 1")
    (folder / AUTHORITY).mkdir(parents=True, exist_ok=True)
    (folder / AUTHORITY).chmod(0o700)
    description = {"host": host, "port": port, "valid_days": valid_days, "clients": list(names)}
    _provision(folder, description, [SERVER, *names])
    _write(folder / AUTHORITY / FEDERATION, description)


def add(folder: Path, name: str) -> Path:
    """A kit for one more client, under the same authority."""
    description = _read(folder)
    _check_name(name, [*description["clients"], *revoked(folder / SERVER)])
    description["clients"].append(name)
    _provision(folder, description, [name])
    _write(folder / AUTHORITY / FEDERATION, description)
    return folder / CLIENTS / name


def renew(folder: Path, name: str) -> Path:
    """A new key and certificate in a party's kit, for the server or a client; what else is there stays."""
    description = _read(folder)
    _check_known(name, [SERVER, *description["clients"]])
    _provision(folder, description, [name], renewed=name)
    return _place(folder, name)


def revoke(folder: Path, name: str) -> Path:
    """Shut a client out for good. The server looks at the list that this writes whenever it hears from somebody."""
    description = _read(folder)
    _check_known(name, description["clients"])
    description["clients"].remove(name)
    listed = folder / SERVER / "local" / REVOKED
    _write(listed, sorted({*revoked(folder / SERVER), name}))
    _write(folder / AUTHORITY / FEDERATION, description)
    return listed


def revoked(kit: Path) -> list[str]:
    """Names that the server whose kit this is does not listen to."""
    listed = kit / "local" / REVOKED
    if not listed.exists():
        return []
    try:
        return [str(name) for name in json.loads(listed.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise ProvisionError(f"{listed} cannot be read ({error}); it must be a list of names, as JSON") from error


def kits(folder: Path) -> Iterator[Kit]:
    """Everybody's, as far as they are in the folder; the only one, if the folder is a kit itself."""
    if (folder / "startup").exists():
        yield open_kit(folder)
        return
    known = _read(folder)["clients"]
    for path in (folder / SERVER, *(folder / CLIENTS / name for name in known)):
        if (path / "startup").exists():
            yield open_kit(path)


@contextmanager
def in_use(kit: Kit) -> Iterator[None]:
    """Nobody else uses the kit within the block."""
    with (kit.path / "in-use").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ProvisionError(f"{kit.path} is in use by another process; a party runs once") from error
        yield


def open_kit(path: Path) -> Kit:
    """A party's kit, or a ProvisionError that says why it is none."""
    startup = path / "startup"
    try:
        if (startup / "fed_server.json").exists():
            target = _json(startup / "fed_server.json")["servers"][0]["service"]["target"]
            certificate = startup / "server.crt"
        else:
            target = _json(startup / "fed_client.json")["servers"][0]["service"]["target"]
            certificate = startup / "client.crt"
        loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
        (subject,) = loaded.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ProvisionError(
            f"{path} is not a start-up kit ({error}); make one with 'quafl federation init'"
        ) from error
    host, _, port = target.rpartition(":")
    return Kit(path.resolve(), str(subject.value), host, int(port), loaded.not_valid_after_utc)


def settle(kit: Kit) -> None:
    """Keep FLARE's own files in the server's kit, wherever that has come to be, and not in a folder that all users of
    the machine share."""
    path = kit.path / "local" / "resources.json"
    resources = _json(path)
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(kit.path / "engine" / "snapshots")
    jobs = next(part for part in resources["components"] if part["id"] == "job_manager")
    jobs["args"]["uri_root"] = str(kit.path / "engine" / "jobs")
    _write(path, resources)


def _provision(folder: Path, description: dict[str, Any], wanted: Sequence[str], renewed: str | None = None) -> None:
    """Have FLARE make the kits, and put those that are wanted into the folder, over what is there."""
    server = {
        "name": SERVER,
        "type": "server",
        "org": PROJECT,
        "host_names": [description["host"], "localhost", "127.0.0.1"],
        "default_host": description["host"],
        "fed_learn_port": description["port"],
    }
    clients = [{"name": name, "type": "client", "org": PROJECT} for name in description["clients"]]
    project = {"api_version": 3, "name": PROJECT, "description": "", "participants": [server, *clients]}
    builders = [
        WorkspaceBuilder(),
        StaticFileBuilder(config_folder="config", scheme="grpc"),
        CertBuilder(root_valid_days=description["valid_days"]),
        SignatureBuilder(),
    ]
    kept = folder / AUTHORITY / "state"
    with TemporaryDirectory(dir=folder / AUTHORITY) as scratch:
        root = Path(scratch)
        if kept.exists():
            shutil.copytree(kept, root / PROJECT / "state")
        if renewed is not None:
            known = root / PROJECT / "state" / "cert.json"
            _write(known, {name: value for name, value in _json(known).items() if name != renewed})
        try:
            context = Provisioner(str(root), builders).provision(prepare_project(project), logger=_Quiet())
        except (ValueError, RuntimeError, OSError) as error:
            raise ProvisionError(f"the start-up kits could not be made: {error}") from error
        if context.get("build_error"):
            raise ProvisionError("the start-up kits could not be made")
        made = next((root / PROJECT).glob("prod_*"))
        for name in wanted:
            _finish(made / name, description)
            shutil.copytree(made / name, _place(folder, name), dirs_exist_ok=True)
        shutil.copytree(root / PROJECT / "state", kept, dirs_exist_ok=True)
    _close_to_others(folder / AUTHORITY)


def _place(folder: Path, name: str) -> Path:
    return folder / SERVER if name == SERVER else folder / CLIENTS / name


def _finish(kit: Path, description: dict[str, Any]) -> None:
    """What FLARE leaves to its user: our component, nobody's right to anything, limits, a readable log."""
    local, is_server = kit / "local", kit.name == SERVER
    resources = _json(local / "resources.json.default")
    bridge = {"id": PROJECT, "path": "quafl.deploy.flare.Bridge", "args": {}}
    if is_server:
        limits = resources["servers"][0]
        limits["max_num_clients"], limits["heart_beat_timeout"] = 10_000, 60
        _listen_only_where_asked(kit / "startup" / "fed_server.json", description)
    resources["components"].append(bridge)
    resources["class_allow_list"] = []  # of code that a job may bring along or name
    if not is_server:
        resources["allow_log_streaming"] = False
        resources["components"] = [part for part in resources["components"] if part["id"] != "site_log_streamer"]
    _write(local / "resources.json", resources)
    nobody = {role: dict.fromkeys(RIGHTS, "none") for role in ROLES}
    _write(local / "authorization.json", {"format_version": "1.0", "permissions": nobody})
    options = [[f"grpc.max_{way}_message_length", LARGEST_FRAME] for way in ("send", "receive")]
    _write(local / "comm_config.json", {"allow_adhoc_conns": False, "grpc": {"options": options}})
    _write(local / "log_config.json", _LOG)
    for unused in ("start.sh", "stop_fl.sh", "sub_start.sh"):
        (kit / "startup" / unused).unlink(missing_ok=True)
    (kit / "readme.txt").unlink(missing_ok=True)
    _close_to_others(kit)


def _listen_only_where_asked(configuration: Path, description: dict[str, Any]) -> None:
    """On loopback if that is the address, else on all interfaces."""
    content = _json(configuration)
    content["servers"][0]["service"]["target"] = f"{description['host']}:{description['port']}"
    _write(configuration, content)


_LOG = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {
        "console": {"class": "quafl.deploy.flare.ToStderr", "formatter": "line"},
        "file": {
            "class": "logging.handlers.RotatingFileHandler",
            "formatter": "line",
            "filename": "log.txt",
            "maxBytes": 10_000_000,
            "backupCount": 3,
        },
    },
    "loggers": {
        "root": {"level": "ERROR", "handlers": ["console", "file"]},
        "quafl": {"level": "INFO"},
    },
}


class _Quiet:
    """FLARE's words about provisioning: only those about what went wrong."""

    def debug(self, message: str) -> None:
        """Nothing."""

    info = warning = debug

    def error(self, message: str) -> None:
        """Why it failed."""
        raise ProvisionError(f"the start-up kits could not be made: {message}")


def _address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if (
        not colon
        or not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host)
        or not port.isdigit()
        or not 0 < int(port) < 65536
    ):
        raise ProvisionError(f"--server {address}: must look like host.example.org:8002")
    return host, int(port)


def _check_name(name: str, taken: Sequence[str]) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name) or name in (SERVER, AUTHORITY, CLIENTS):
        raise ProvisionError(f"client {name!r}: a name has letters, digits, - and _, and is not {SERVER!r}")
    if name in taken:
        raise ProvisionError(f"client {name!r}: there is or was one of that name; choose another")


def _check_known(name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ProvisionError(f"there is no {name!r} in this federation; there are {', '.join(known) or 'none'}")


def _read(folder: Path) -> dict[str, Any]:
    try:
        return _json(folder / AUTHORITY / FEDERATION)
    except (OSError, ValueError) as error:
        raise ProvisionError(f"{folder} holds no federation; make one with 'quafl federation init'") from error


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _write(path: Path, content: Any) -> None:
    with write_atomically(path) as stream:
        json.dump(content, stream, indent=2)
    path.chmod(0o600)


def _close_to_others(folder: Path) -> None:
    """Readable by its owner only."""
    folder.chmod(0o700)
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
