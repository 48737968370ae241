"""The sites of a job, as a transport of messages."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from nvflare.collab import collab
from nvflare.fuel.f3.cellnet.fqcn import FQCN

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation.wire.channel import Channel, Packet
from fedbilevel.federation.wire.signing import Party, ServersEnd

FEDERATION_FOLDER = "FEDBILEVEL_FEDERATION"
"""The environment variable with the folder of the federation."""
OFFLINE = "it is offline."
SETUP = ("hello", "prepare", "join")
"""The messages that every new worker of a site gets first."""
BRIEFLY = 10.0  # seconds for what needs no computation


class Sites:
    """Sends messages to the sites of a job, sealed, and accepts answers with the seal of the site.

    Args:
        sites: the names of all sites, in the order of their numbers.
        sessions: with those that are in the job.
        cells: FLARE's names for these.
        channel: that of the server's cell.
        deadline: seconds to answer.
        setup_deadline: seconds to answer the first message of a kind, which is compiled before.
        ended: whether the job has ended.
    """

    def __init__(
        self,
        sites: list[str],
        sessions: Mapping[str, ServersEnd],
        cells: Mapping[str, str],
        channel: Channel,
        deadline: float = 60.0,
        setup_deadline: float = 600.0,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self.sites, self.sessions, self.cells, self.channel = sites, sessions, cells, channel
        self.deadline, self.setup_deadline, self.ended = deadline, setup_deadline, ended
        self.compiled: set[tuple[int, str]] = set()  # what a site has answered once is compiled there
        self.silent: dict[str, float] = {}  # who did not answer, and when to try again
        self.there = set(cells)
        self.refused: dict[str, str] = {}  # why there is no session with a site
        self._begin(list(cells), BRIEFLY)

    @staticmethod
    def of_job(run: str, sites: list[str], deadline: float, setup_deadline: float) -> "Sites":
        """Those of the job that FLARE runs in this process."""
        engine, job = collab.fl_ctx.get_engine(), collab.fl_ctx.get_job_id()
        cells = {client.name: FQCN.join([client.get_fqcn(), job]) for client in engine.get_clients()}
        party = Party(Path(os.environ[FEDERATION_FOLDER]) / "server" / "startup", "server")
        sessions = {name: ServersEnd(party, run, job, name) for name in cells}
        channel = Channel(engine.get_cell())
        return Sites(sites, sessions, cells, channel, deadline, setup_deadline, lambda: collab.is_aborted)

    def _begin(self, names: list[str], seconds: float) -> None:
        """Begin the sessions with some sites."""
        self.refused |= dict.fromkeys(names, OFFLINE)
        statements = {}
        for name, greeting in self._ask({name: Packet("greet") for name in names}, seconds).items():
            try:
                statement = self.sessions[name].statement_for(_body(greeting, "greeting"))
                statements[name] = Packet("session", body=statement)
            except FedbilevelError as error:
                self.refused[name] = str(error)
        for name, answer in self._ask(statements, seconds).items():
            try:
                self.sessions[name].accept(_body(answer, "session"))
                del self.refused[name]
            except FedbilevelError as error:
                self.refused[name] = str(error)
        self.silent |= dict.fromkeys(self.refused.keys() & set(names), time.monotonic() + 10.0)

    def ask(self, messages: Mapping[int, bytes], kind: str) -> dict[int, bytes | str]:
        """Send each site its message at the same time."""
        answers: dict[int, bytes | str] = {}
        questions, seconds, numbers = {}, {}, {}
        for number, message in messages.items():
            name = self.sites[number]
            if name not in self.there or not self._reachable(name):
                answers[number] = self.refused.get(name, OFFLINE)
                continue
            fast = kind not in SETUP and (number, kind) in self.compiled
            seconds[name] = self.deadline if fast else self.setup_deadline
            about = {"seconds": seconds[name], "setup": kind in SETUP}
            questions[name] = Packet("message", self.sessions[name].question(message, about), message)
            numbers[name] = self.sessions[name].seal.number
        for name, packet in self._ask(questions, {name: limit + 5.0 for name, limit in seconds.items()}).items():
            number = self.sites.index(name)
            try:
                answers[number] = self._checked(name, numbers[name], packet)
                self.compiled.add((number, kind))
            except FedbilevelError as error:
                answers[number] = str(error)
                self.silent[name] = 0.0
        if self.ended():  # nobody's fault
            raise RuntimeError("the job was ended; the run continues with the next one.")
        return answers

    def _checked(self, name: str, number: int, packet: Packet | str) -> bytes:
        body = _body(packet, "answer")
        assert isinstance(packet, Packet)
        self.sessions[name].check(number, packet.head, body)
        return body

    def _ask(self, questions: Mapping[str, Packet], seconds: dict[str, float] | float) -> dict[str, Packet | str]:
        limits: dict[str, float] = seconds if isinstance(seconds, dict) else dict.fromkeys(questions, seconds)
        cells = {self.cells[name]: name for name in questions}
        asked = {cell: questions[name] for cell, name in cells.items()}
        found = self.channel.ask(asked, {cell: limits[name] for cell, name in cells.items()}, self.ended)
        return {cells[cell]: answer for cell, answer in found.items()}

    def _reachable(self, name: str) -> bool:
        """Whether a site that did not answer is back; this does not keep the others waiting long."""
        if name in self.silent and time.monotonic() >= self.silent[name]:
            self.silent[name] = time.monotonic() + 10.0
            if name in self.refused:
                self._begin([name], 1.0)
            back = name not in self.refused and isinstance(self._ask({name: Packet("ping")}, 1.0)[name], Packet)
            if back:
                del self.silent[name]
        return name not in self.silent


def _body(answer: Packet | str, kind: str) -> bytes:
    """The body of an answer of this kind; an error if it is another, or none."""
    if isinstance(answer, str):
        raise FedbilevelError(answer)
    if answer.kind != kind:
        raise FedbilevelError(bytes(answer.body[:300]).decode(errors="replace") or "it answered something else.")
    return bytes(answer.body)
