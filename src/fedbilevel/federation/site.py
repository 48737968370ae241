"""A site's end of the wire: what FLARE's job process runs. It hands messages to the worker and restarts it."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from nvflare.collab import collab

from fedbilevel.federation.worker import receive, send

SITE_FOLDER = "FEDBILEVEL_SITE"
"""The environment variable with the folder of the site."""


class Site:
    """What the server can call: ``ping``, and ``setup`` and ``handle`` with a message that the worker checks, and the
    seconds it has to answer. A worker that takes longer is ended and restarted.
    """

    def __init__(self) -> None:
        self.folder = Path(os.environ[SITE_FOLDER])
        self.lock = threading.Lock()  # FLARE may call from several threads
        self.process: subprocess.Popen[bytes] | None = None
        self.first: list[tuple[bytes, float]] = []  # what sets a worker up
        end_with_parent()

    @collab.publish
    def ping(self) -> bool:
        """Reply that this site is connected."""
        return True

    @collab.publish
    def setup(self, message: bytes, seconds: float) -> bytes:
        """Answer a message that every new worker gets first."""
        with self.lock:
            self._set_up()
            answer = self._ask(message, seconds)
            self.first.append((message, seconds))
            return answer

    @collab.publish
    def handle(self, message: bytes, seconds: float) -> bytes:
        """Answer a message of a round."""
        with self.lock:
            return self._ask(message, max(seconds, self._set_up()))

    def _set_up(self) -> float:
        """Set up a new worker as the one before. Returns how long a message may take now, as it compiles again."""
        if self.process is not None and self.process.poll() is None:
            return 0.0
        for message, seconds in self.first:
            self._ask(message, seconds)
        return max((seconds for _, seconds in self.first), default=0.0)

    def _ask(self, message: bytes, deadline: float) -> bytes:
        if self.process is None or self.process.poll() is not None:
            self._start()
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(deadline, process.kill)  # writing blocks when a pipe is full and nobody reads it
        late.start()
        began = time.monotonic()
        try:
            send(process.stdin, message)  # pyright: ignore[reportArgumentType]
            answer = receive(process.stdout)  # pyright: ignore[reportArgumentType]
        except OSError:
            answer = None
        finally:
            late.cancel()
        if answer is None:
            process.kill()
            process.wait()
            took = time.monotonic() - began
            raise RuntimeError(
                f"its program took longer than {deadline:g} seconds."
                if took >= deadline
                else "its program ended unexpectedly; see worker.log at the site."
            )
        return answer

    def _start(self) -> None:
        again = ["again"] if self.process is not None else []
        command = [sys.executable, "-m", "fedbilevel.federation.worker", str(self.folder), *again]
        with (self.folder / "worker.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, pipesize=1 << 20
            )  # where pipes have a size, a message of usual size goes through at once
        (self.folder / "worker.pid").write_text(str(self.process.pid))


def end_with_parent() -> None:
    """End this process when the one that started it is gone: nothing is left behind, whatever happens."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
