"""QuAFL as a job of NVIDIA FLARE: docs/flare.md."""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quafl.deploy import flare
from quafl.deploy.carrier import Hears
from quafl.deploy.client import Driver
from quafl.protocol.carrier import Octets
from quafl.record.summary import RunError
from quafl.run.parties import ServerRun, make_client
from quafl.settings.base import SettingsError
from quafl.settings.federation import FederationSettings
from quafl.settings.reading import load_federation

ALLOWED = "quafl.run.flare."  # what a site that does not take any code from jobs must have in its class_allow_list


class QuAFLController(flare.FlareServer):
    """The server. FLARE makes it at the server's site, of the settings' text."""

    def __init__(self, settings: str) -> None:
        super().__init__()
        self.settings = settings  # by this name FLARE finds it when it writes the job
        self._run: ServerRun

    def prepare(self, folder: Path) -> Hears:
        """The run, as the settings want it."""
        settings = FederationSettings.model_validate(tomllib.loads(self.settings))
        self._run = ServerRun(self, self.loop, settings, folder, self.stop)
        return self._run.service

    def run(self) -> bool:
        """Until the end, which is True, or until asked to stop."""
        return self._run.run()


class QuAFLExecutor(flare.FlareClient):
    """A client. FLARE makes it at the client's site."""

    def __init__(self, task: str, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.task, self.options = task, options
        self._driver: Driver

    def take_part(self, name: str, folder: Path) -> bool:
        """Until the end, or until asked to stop; whether all went well."""
        self._driver = make_client(self.task, name, folder, self.ask, options=self.options)
        return self._driver.run(self.stop)

    def hear(self, octets: Octets) -> bytes:
        """The answer to a message from the server."""
        return self._driver.hear(octets)


def make_job(settings: FederationSettings | str | Path, task: str | None = None, name: str = "quafl") -> Any:
    """A job (`nvflare.job_config.api.FedJob`) to simulate, to export or to submit.

    `settings` are a federation's, or the file that has them. `task` is the function that makes the clients' model and
    data, 'package.module:function'; by default it is the server's. Both are given what [task] says beside `make`, and
    must be importable where they are used.
    """
    made = settings if isinstance(settings, FederationSettings) else load_federation(str(settings))
    text = made.to_toml()
    if "{" in text or "}" in text:
        raise SettingsError("the settings have a curly bracket, which FLARE would replace; choose another label")
    return flare.make_job(
        name,
        QuAFLController(text),
        QuAFLExecutor(task or made.task.make, made.task.options() or None),
        min_clients=made.clients.start_with,
    )


def simulate(job: Any, workspace: Path, clients: Sequence[str]) -> Path:
    """Run a job in FLARE's simulator, all clients at the same time, a process each; gives the server's run folder.

    A workspace without `local/resources.json` gets one that lets QuAFL's classes in.
    """
    policy = workspace.resolve() / "local" / "resources.json"
    if not policy.exists():
        policy.parent.mkdir(parents=True, exist_ok=True)
        policy.write_text(json.dumps({"format_version": 2, "class_allow_list": [ALLOWED]}), encoding="utf-8")
    code = job.simulator_run(str(workspace.resolve()), clients=list(clients), threads=len(clients))
    if code:
        raise RunError(f"FLARE's simulator ended with {code}; why is in {workspace / 'server' / 'log.txt'}")
    return workspace / "server" / "simulate_job" / flare.FOLDER
