"""A federation in one process to which anything may happen: messages are lost, late, doubled or damaged, clients and
servers are killed before or after anything they write."""

import copy
import dataclasses
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import fedbilevel as fb
from fedbilevel.engines.messaging import kept, protocol
from fedbilevel.engines.messaging.local import Local
from fedbilevel.engines.messaging.party import Party
from fedbilevel.engines.messaging.protocol import Join
from fedbilevel.engines.messaging.server import Messaging
from fedbilevel.engines.participation import Participation
from fedbilevel.errors import NoQuorum
from fedbilevel.storage import checkpoints
from fedbilevel.storage.arrays import decode

Case = tuple[fb.Task, fb.Algorithm, Participation]
Place = tuple[Any, ...]
"""Which message, or which write: the same in every run, whatever happened before."""

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
    """Something that happens once at each of these places."""

    def __init__(self, what: str = "", places: Collection[Place] = ()) -> None:
        self.what, self.places = what, set(places)
        self.messages: dict[Place, None] = {}  # all there were, in their order
        self.writes: dict[Place, None] = {}

    def at_message(self, client: int, message: protocol.Message) -> str:
        """What happens to this message."""
        facts = dataclasses.asdict(message)
        place = (client, message.action, facts.get("slot"), facts.get("round"), facts.get("committed"))
        self.messages[place] = None
        return self._now(place, TO_MESSAGES)

    def at_write(self, path: Path, content: bytes) -> str:
        """What happens at this write."""
        place = (path.parent.name, path.name, decode(content)[0].get("slot"))
        self.writes[place] = None
        return self._now(place, AT_WRITES)

    def _now(self, place: Place, kinds: tuple[str, ...]) -> str:
        if self.what not in kinds or place not in self.places:
            return ""
        self.places.remove(place)
        return self.what


class Accidents(Fault):
    """Random faults, one after the other, in this share of messages and writes."""

    def __init__(self, seed: int, share: float) -> None:
        super().__init__()
        self.random, self.share, self.list = random.Random(seed), share, []

    def _now(self, place: Place, kinds: tuple[str, ...]) -> str:
        if self.random.random() > self.share:
            return ""
        self.list.append(self.random.choice(kinds))
        return self.list[-1]


PRISTINE: dict[int, Local] = {}
"""By the id of the task, which is kept. Programs and plans do not change, and would take most of the time."""


def pristine(case: Case) -> Local:
    """Server and clients as they are when their processes start."""
    if id(case[0]) not in PRISTINE:
        PRISTINE[id(case[0])] = Local(*case)
    return PRISTINE[id(case[0])]


def started(party: Party, folder: Path) -> Party:
    """A new process for a client: it has nothing but what is on disk."""
    new = copy.copy(party)
    vars(new).update({name: copy.copy(own) for name, own in vars(party).items() if isinstance(own, list | dict | set)})
    new.vault = kept.Vault(folder if party.program.holds else None, party.plan.by_name)
    return new


class Fragile(Local):
    """Server and clients, to whose messages a fault happens. Clients that are killed are started again, as a site does
    with its worker: the new one hears what the one before was told, and gets the message once more."""

    def __init__(self, case: Case, folder: Path, fault: Fault) -> None:
        whole = pristine(case)
        Messaging.__init__(self, whole.program, whole.plan, whole.weights, self, whole.server_data)
        self.task, self.folder, self.fault, self.whole = whole.task, folder, fault, whole
        self.parties = [started(party, self._place(party.id)) for party in whole.parties]
        self.joins: dict[int, bytes] = {}
        self.late: dict[int, bytes] = {}
        self.before: Callable[[int, protocol.Message], object] = lambda client, message: None

    def _place(self, client: int) -> Path:
        return self.folder / f"client {client}"

    def ask(self, messages: Any, kind: str) -> dict[int, bytes | str]:
        return {client: self._deliver(client, message, kind) for client, message in messages.items()}

    def _deliver(self, client: int, message: bytes, kind: str) -> bytes | str:
        plain = protocol.unpack(message)[0]
        self.before(client, plain)
        what = self.fault.at_message(client, plain)
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
                self.parties[client] = started(self.whole.parties[client], self._place(client))
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
        def written(path: Path, content: bytes, *more: Any) -> None:
            what = fault.at_write(path, content)
            if what == "killed before the write":
                raise Killed
            write(path, content, *more)
            if what == "killed after the write":
                raise Killed

        return written

    with (
        mock.patch.object(kept, "write_atomically", fragile(kept.write_atomically)),
        mock.patch.object(checkpoints, "write_atomically", fragile(checkpoints.write_atomically)),
    ):
        yield


def once(case: Case, folder: Path, rounds: int, every: int = 2, server: Fragile | None = None) -> fb.Result:
    """One server, which may not come to the end."""
    engine: Any = server or Fragile(case, folder / "clients", Fault())
    checkpoint = fb.Checkpoints(folder / "server", seconds=0)
    return fb.solve(*case[:2], rounds, 3, case[2], every=every, engine=engine, metrics=False, checkpoint=checkpoint)


def run(
    case: Case,
    folder: Path,
    fault: Fault,
    rounds: int = 2,
    servers: int = 3,
    every: int = 2,
    prepare: Callable[[Fragile], object] = lambda server: None,
) -> tuple[fb.Result, list[Fragile]]:
    """A run to its end, whatever happens: a server that is killed, or has too few clients, is followed by another one,
    which goes on from its checkpoint. Returns the result, and all servers."""
    made: list[Fragile] = []
    with writes(fault):
        for _ in range(servers):
            made.append(Fragile(case, folder / "clients", fault))
            prepare(made[-1])
            try:
                return once(case, folder, rounds, every, made[-1]), made
            except (Killed, NoQuorum):
                continue
    raise AssertionError("it did not come to its end")
