"""Run a module of FLARE as a child that ends with its parent, even if that is killed.

``python -m fedbilevel.federation.process MODULE ARGUMENTS...``: standard input is a pipe from the parent; when it
closes, this process ends. So do the jobs that FLARE starts from here: their standard input is a pipe from this process.
"""

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PASSPHRASE = "FEDBILEVEL_PASSPHRASE"
SITE_FOLDER = "FEDBILEVEL_SITE"
"""The environment variable with the folder of a site, for its processes."""
NOT_PASSED_ON = ("NVFLARE_", "NVFL_", "FL_LOG_LEVEL", PASSPHRASE)


def start(
    module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a module as a child of this process; its output goes into a log.

    Variables by which FLARE would take other settings than those of its files are not passed on, nor is the passphrase
    of an authority. Modules are not looked for in the folder in which it is started.
    """
    command = [sys.executable, "-u", "-m", "fedbilevel.federation.process", module, *arguments]
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(NOT_PASSED_ON)}
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**kept, "PYTHONSAFEPATH": "1", **(environment or {})},
            start_new_session=True,  # Ctrl-C is for the parent, which ends it in order
        )


def end(*children: "subprocess.Popen[bytes]", seconds: float = 10.0) -> None:
    """End children, all at once; those that do not end in time are killed, with everything they started."""
    for child in children:
        if child.poll() is None:
            child.terminate()
    limit = time.monotonic() + seconds
    for child in children:
        try:
            child.wait(max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        if child.stdin is not None:
            child.stdin.close()


def _keep_jobs() -> None:
    """Start FLARE's jobs through this module. FLARE's own look at their parent comes seconds after their start: if the
    parent is gone by then, they stay for good.
    """
    from nvflare.app_common.job_launcher import process_launcher

    spawn = process_launcher.spawn_process

    def through_here(command: list[str], environment: dict[str, str]) -> Any:
        python, option, *rest = command
        assert option == "-m"
        return spawn([python, "-u", "-m", "fedbilevel.federation.process", *rest], environment)

    process_launcher.spawn_process = through_here


def main() -> None:
    """Run the module; end when the parent does."""
    parent = os.dup(0)
    from_here, _ = os.pipe()  # the other end stays open as long as this process lives
    os.dup2(from_here, 0)

    def watch() -> None:
        while os.read(parent, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    module, sys.argv = sys.argv[1], sys.argv[1:]
    if module != "fedbilevel":  # FLARE
        _keep_jobs()
        if place := os.environ.get(SITE_FOLDER):
            from fedbilevel.federation import site

            site.guard(Path(place))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
