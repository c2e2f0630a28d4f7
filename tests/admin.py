"""An administrator of the engine who tries everything: `python admin.py NAME KIT JOB`. Prints the refusals, as JSON."""

import json
import sys
from collections.abc import Callable

from nvflare.fuel.flare_api.flare_api import new_secure_session


def main(name: str, kit: str, job: str) -> None:
    session = new_secure_session(name, kit, timeout=30.0)
    attempts: dict[str, Callable[[], object]] = {
        "submit a job with code": lambda: session.submit_job(job),
        "ls at the server": lambda: session.ls_target("server"),
        "cat at the server": lambda: session.cat_target("server", file="log.txt"),
        "ls at a client": lambda: session.ls_target("client-1"),
        "cat at a client": lambda: session.cat_target("client-1", file="log.txt"),
        "grep at a client": lambda: session.grep_target("client-1", pattern="a", file="log.txt"),
        "pwd at a client": lambda: session.get_working_directory("client-1"),
        "shut down": lambda: session.shutdown("all"),
        "see who is there": session.get_system_info,
    }
    results = {}
    for attempt, act in attempts.items():
        try:
            results[attempt] = f"done: {act()}"
        except Exception as error:
            results[attempt] = f"{type(error).__name__}: {error}"
    print("TRIED", json.dumps(results), flush=True)
    session.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
