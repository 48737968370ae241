"""Run a module of FLARE as a child that ends with its parent, even if that is killed.

``python -m fedbilevel.federation.process MODULE ARGUMENTS...``: standard input is a pipe from the parent; when it
closes, this process ends, and with it (``site.end_with_parent``) the processes that it started.
"""

import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def start(module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> "subprocess.Popen[Any]":
    """Start a module as a child of this process; what it prints goes into a log."""
    command = [sys.executable, "-u", "-m", "fedbilevel.federation.process", module, *arguments]
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C is for the parent, which ends it in order
        )


def end(process: "subprocess.Popen[Any]", seconds: float = 10.0) -> None:
    """End a child: politely, then not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdin is not None:
        process.stdin.close()


def main() -> None:
    """Run the module; end when the parent does."""

    def watch() -> None:
        while os.read(0, 1):  # not through sys.stdin, whose lock would be in the way of an ordinary end
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    module, sys.argv = sys.argv[1], sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
