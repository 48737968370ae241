"""A federation in one process to which anything may happen: messages are lost, late, doubled or damaged, clients and
servers are killed before or after anything they write."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import fedbilevel as fb
from fedbilevel.engines.messaging import kept, protocol
from fedbilevel.engines.messaging.local import Local
from fedbilevel.engines.messaging.protocol import Join
from fedbilevel.engines.participation import Participation
from fedbilevel.errors import NoQuorum
from fedbilevel.storage import checkpoints

Case = tuple[fb.Task, fb.Algorithm, Participation]

TO_MESSAGES = (
    "lost on the way down",
    "lost on the way up",
    "late",
    "doubled",
    "doubled and late",
    "damaged on the way down",
    "damaged on the way up",
    "client killed before",
    "client killed after",
    "server killed before",
    "server killed after",
)
AT_WRITES = ("killed before the write", "killed after the write")


class Killed(BaseException):
    """A process was killed: nobody can catch it."""


class Fault:
    """Something that happens once: to the message, or at the write, of this number."""

    def __init__(self, what: str = "", number: int = -1) -> None:
        self.what, self.number, self.happened = what, number, False
        self.messages = self.writes = 0

    def at_message(self) -> str:
        """What happens to the next message."""
        self.messages += 1
        return self._now(self.messages, TO_MESSAGES)

    def at_write(self) -> str:
        """What happens at the next write."""
        self.writes += 1
        return self._now(self.writes, AT_WRITES)

    def _now(self, count: int, kinds: tuple[str, ...]) -> str:
        if self.happened or self.what not in kinds or count - 1 != self.number:
            return ""
        self.happened = True
        return self.what


class Accidents(Fault):
    """Random faults, one after the other, in this share of messages and writes."""

    def __init__(self, seed: int, share: float) -> None:
        super().__init__()
        self.random, self.share, self.list = random.Random(seed), share, []

    def _now(self, count: int, kinds: tuple[str, ...]) -> str:
        if self.random.random() > self.share:
            return ""
        self.list.append(self.random.choice(kinds))
        return self.list[-1]


class Fragile(Local):
    """Server and clients, to whose messages a fault happens. Clients that are killed are started again, as a site does
    with its worker: the new one hears what the one before was told, and gets the message once more."""

    def __init__(
        self, task: fb.Task, algorithm: fb.Algorithm, cohort: Participation, folder: Path, fault: Fault
    ) -> None:
        super().__init__(task, algorithm, cohort, folder)
        self.made_of, self.folder, self.fault = (task, algorithm, cohort), folder, fault
        self.joins: dict[int, bytes] = {}
        self.late: dict[int, bytes] = {}
        self.before: Callable[[int, protocol.Message], object] = lambda client, message: None

    def ask(self, messages: Any, kind: str) -> dict[int, bytes | str]:
        return {client: self._deliver(client, message, kind) for client, message in messages.items()}

    def _deliver(self, client: int, message: bytes, kind: str) -> bytes | str:
        self.before(client, protocol.unpack(message)[0])
        what = self.fault.at_message()
        if what == "server killed before":
            raise Killed
        earlier = self.late.pop(client, None)
        if what in ("late", "doubled and late"):
            self.late[client] = message
        if what in ("lost on the way down", "late"):
            return "it did not answer."
        if what == "client killed before":
            self.restart(client)
        answer = self._handled(client, damaged(message) if what == "damaged on the way down" else message, kind)
        if what == "doubled":
            answer = self._handled(client, message, kind)
        if earlier is not None:
            self._handled(client, earlier, "")
        if what == "client killed after":
            self.restart(client)
        if what == "server killed after":
            raise Killed
        if what in ("lost on the way up", "client killed after"):
            return "it did not answer."
        return damaged(answer) if what == "damaged on the way up" else answer

    def _handled(self, client: int, message: bytes, kind: str) -> bytes:
        for _ in range(20):
            try:
                answer = self.parties[client].handle(message)
                break
            except Killed:  # at a write
                self.restart(client)
        else:
            raise AssertionError("killed again and again")
        if kind == "join":
            self.joins[client] = message
        return answer

    def restart(self, client: int) -> None:
        """A new process for a client."""
        for _ in range(20):
            try:
                self.parties[client] = Local(*self.made_of, self.folder).parties[client]
                if client in self.joins:
                    join, arrays = protocol.unpack(self.joins[client])
                    assert isinstance(join, Join)
                    self.parties[client].handle(protocol.pack(dataclasses.replace(join, again=True), arrays))
                return
            except Killed:
                pass


def damaged(message: bytes) -> bytes:
    """One bit is wrong, another one for every message."""
    place = random.Random(message).randrange(len(message) * 8)
    changed = bytearray(message)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


@contextmanager
def writes(fault: Fault) -> Iterator[None]:
    """Whoever writes may be killed."""

    def fragile(write: Callable[..., None]) -> Callable[..., None]:
        def written(*arguments: Any) -> None:
            what = fault.at_write()
            if what == "killed before the write":
                raise Killed
            write(*arguments)
            if what == "killed after the write":
                raise Killed

        return written

    with (
        mock.patch.object(kept, "write_atomically", fragile(kept.write_atomically)),
        mock.patch.object(checkpoints, "write_atomically", fragile(checkpoints.write_atomically)),
    ):
        yield


def run(
    case: Case,
    folder: Path,
    fault: Fault,
    rounds: int = 2,
    servers: int = 3,
    every: int = 2,
    metrics: bool = True,
    prepare: Callable[[Fragile], object] = lambda server: None,
) -> tuple[fb.Result, list[Fragile]]:
    """A run to its end, whatever happens: a server that is killed, or has too few clients, is followed by another one,
    which goes on from its checkpoint. Returns the result, and all servers."""
    made: list[Fragile] = []
    with writes(fault):
        for _ in range(servers):
            made.append(Fragile(*case, folder / "clients", fault))
            prepare(made[-1])
            options: Any = {"every": every, "engine": made[-1], "metrics": metrics}
            options["checkpoint"] = fb.Checkpoints(folder / "server", seconds=0)
            try:
                return fb.solve(*case[:2], rounds, 3, case[2], **options), made
            except (Killed, NoQuorum):
                continue
    raise AssertionError("it did not come to its end")
