"""A site's end of the wire: what FLARE's job process runs. It lets messages of the server through to the worker, and
restarts it.
"""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from nvflare.collab import collab
from nvflare.fuel.f3.cellnet.fqcn import FQCN

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation.process import SITE_FOLDER
from fedbilevel.federation.wire import callers
from fedbilevel.federation.wire.channel import Channel, Packet
from fedbilevel.federation.wire.pipes import Frame, read, write
from fedbilevel.federation.wire.signing import Party, SitesEnd

MOST_REFUSED = 100
"""Refused calls that a job notes in the site's log."""


class Site:
    """Answers the server of this job and nobody else. Messages go to the worker with the seconds that it has to answer;
    a worker that takes longer is ended and restarted, and gets again what the server said to set it up.
    """

    def __init__(self) -> None:
        self.folder = Path(os.environ[SITE_FOLDER])
        self.lock = threading.Lock()  # refusals come from other threads
        self.process: subprocess.Popen[bytes] | None = None
        self.first: list[tuple[Frame, float]] = []  # what sets a worker up
        self.refusals: list[Frame] = []
        self.refused = 0
        end_with_parent()

    @collab.init
    def start(self) -> None:
        """Listen to the server of FLARE's job in this process."""
        from fedbilevel.federation import join

        context, known = collab.fl_ctx, join.about(self.folder)
        job, party = context.get_job_id(), Party(self.folder / "startup", "client")
        session = SitesEnd(party, known["host"], known["party"], job)
        self.listen(context.get_engine().get_cell().core_cell, FQCN.join([FQCN.ROOT_SERVER, job]), session)

    def listen(self, cell: Any, server: str, session: SitesEnd) -> None:
        """Answer the cell of the server, and refuse whatever comes from other sites, on any channel of FLARE."""
        self.session = session
        callers.strangers_refused(cell, self.refuse)
        self.channel = Channel(cell, server, self.answer)

    def answer(self, packet: Packet) -> Packet:
        """Answer the server: one message at a time."""
        try:
            if packet.kind == "ping":
                return Packet("here")
            if packet.kind == "greet":
                return Packet("greeting", body=self.session.greeting())
            if packet.kind == "session":
                return Packet("session", body=self.session.accept(bytes(packet.body)))
            number, about = self.session.question(packet.head, packet.body)
        except FedbilevelError as error:
            self.refuse(FQCN.ROOT_SERVER, str(error), len(packet.body))
            return Packet("refused", body=str(error).encode())
        try:
            answer = self.handle(bytes(packet.body), float(about["seconds"]), bool(about["setup"]))
        except Exception as error:  # the server must not wait, whatever happens here
            logging.getLogger(__name__).exception("a message was not answered")
            return Packet("refused", body=str(error).encode())
        return Packet("answer", self.session.answer(number, answer), answer)

    def handle(self, message: bytes, seconds: float, setup: bool) -> bytes | bytearray:
        """The worker's answer. Every new worker first gets the messages that set it up."""
        frame = Frame(message, run=self.session.run)
        with self.lock:
            longer = self._set_up()
            answer = self._ask(frame, seconds if setup else max(seconds, longer))
            if setup:
                self.first.append((frame, seconds))
            return answer

    def refuse(self, caller: str, reason: str, size: int) -> None:
        """Note in the log of the site that a call was refused: now if the worker has nothing to do, or later."""
        self.refused += 1
        if self.refused > MOST_REFUSED:
            return
        more = " Further refused calls of this job are not noted." if self.refused == MOST_REFUSED else ""
        self.refusals.append(Frame(caller=caller, run=self.session.run, refused=reason + more, size=size))
        if self.lock.acquire(blocking=False):
            try:
                self._started()
            finally:
                self.lock.release()

    def _set_up(self) -> float:
        """Set up a new worker as the one before. Returns how long a message may take now, as it compiles again."""
        if self.process is not None and self.process.poll() is None:
            return 0.0
        for frame, seconds in self.first:
            self._ask(frame, seconds)
        return max((seconds for _, seconds in self.first), default=0.0)

    def _started(self) -> "subprocess.Popen[bytes]":
        """The worker, which knows of all refused calls."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        process: Any = self.process
        while self.refusals:
            write(process.stdin, self.refusals[0].parts(), time.monotonic() + 1.0)
            self.refusals.pop(0)
        return process

    def _ask(self, frame: Frame, seconds: float) -> bytes | bytearray:
        try:
            process: Any = self._started()
            until = time.monotonic() + seconds
            write(process.stdin, frame.parts(), until)
            return read(process.stdout, until)
        except (OSError, EOFError) as error:
            self.end_worker()
            raise RuntimeError(
                f"its program took longer than {seconds:g} seconds."
                if isinstance(error, TimeoutError)
                else "its program ended unexpectedly; see worker.log at the site."
            ) from None

    def end_worker(self) -> None:
        """End the worker; the next message starts another."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()  # what it wrote last is of no use

    def _start(self) -> None:
        self.end_worker()
        again = ["again"] if self.process is not None else []
        command = [sys.executable, "-m", "fedbilevel.federation.worker", str(self.folder), *again]
        with (self.folder / "worker.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0, pipesize=1 << 20
            )  # where pipes have a size, a message of usual size goes through at once
        (self.folder / "worker.pid").write_text(str(self.process.pid))


def guard(folder: Path) -> None:
    """Make all cells of this process refuse other sites: FLARE's own client, too, which would obey their commands. The
    site's ledger has who called.
    """
    from fedbilevel.federation import join
    from fedbilevel.federation.ledger import LEDGER, Ledger, owner

    ledger = Ledger(folder / LEDGER, owner(folder, join.about(folder)["party"]))

    def note(caller: str, reason: str, size: int) -> None:
        entry = {"run": "", "action": "", "method": "", "round": -1, "bytes_in": size, "bytes_out": 0, "left": {}}
        with contextlib.suppress(OSError):
            ledger.note({**entry, "error": reason}, caller, refused=True)

    callers.install_at_site(note)


def end_with_parent() -> None:
    """End this process when the one that started it is gone: nothing is left behind, whatever happens."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
