"""Questions and answers of any size between cells of NVIDIA FLARE, as plain frames.

FLARE's own remote calls pass through streams, which cost more than a small message does, and leave a thread behind for
a minute. Here a message is one frame, or several if it is large: these are under way on all legs at the same time.
"""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message

CHANNEL = HEADER = "fedbilevel"
QUESTION, ANSWER, GOT = "question", "answer", "got"
PART = 4 << 20  # bytes of a frame
WINDOW = 4  # frames under way to one cell: what a slow one keeps waiting in the server's memory
MOST_PARTS = 1 << 9  # of a message: 2 GB
AT_ONCE = 4  # messages of which parts are kept, from one cell
PATIENCE = 60.0  # seconds without progress, before a message is given up


class Packet(NamedTuple):
    """What is sent: a word that says what it is, a small head, and a body."""

    kind: str
    head: bytes = b""
    body: bytes | bytearray | memoryview = b""


@dataclass
class _Arriving:
    """A message of which not all parts are here."""

    packet: Packet
    parts: list[Any]
    here: int = 0

    def add(self, place: int, part: Any) -> Packet | None:
        """Add a part. Returns the message, if it is complete."""
        self.here += self.parts[place] is None
        self.parts[place] = part
        if self.here < len(self.parts):
            return None
        return self.packet._replace(body=bytes(part) if len(self.parts) == 1 else b"".join(self.parts))


@dataclass
class _Leaving:
    """A message of which not all parts are sent."""

    target: str
    topic: str
    packet: Packet
    number: str
    sent: int = 0
    got: int = 0  # parts that the other side has
    until: float = 0.0

    @property
    def count(self) -> int:
        """How many parts it has."""
        return max(1, -(-len(self.packet.body) // PART))

    @property
    def ready(self) -> bool:
        """Whether the next part may leave."""
        return self.sent < min(self.count, self.got + WINDOW)


@dataclass
class _Asked:
    """A question."""

    number: str
    until: float
    answer: Packet | str | None = None
    arriving: dict[str, _Arriving] = field(default_factory=dict)


class Channel:
    """The end of a cell.

    Args:
        cell: FLARE's.
        asker: the cell that may ask this one, if any.
        answer: answers its questions, one at a time, in a thread of its own.
    """

    def __init__(self, cell: Any, asker: str = "", answer: Callable[[Packet], Packet] | None = None) -> None:
        self.cell, self.asker, self.answer = getattr(cell, "core_cell", cell), asker, answer
        self.news = threading.Condition()
        self.asked: dict[str, _Asked] = {}  # by cell
        self.leaving: dict[tuple[str, str], _Leaving] = {}
        self.arriving: dict[str, _Arriving] = {}  # questions
        self.questions: queue.SimpleQueue[tuple[str, Packet]] = queue.SimpleQueue()
        self.cell.register_request_cb(CHANNEL, "*", self._frame)
        if answer is not None:
            threading.Thread(target=self._serve, name="fedbilevel answers", daemon=True).start()

    def ask(
        self, questions: Mapping[str, Packet], seconds: Mapping[str, float], ended: Callable[[], bool] = lambda: False
    ) -> dict[str, Packet | str]:
        """Ask cells, all at the same time. Returns their answers, or why there is none."""
        number, now = secrets.token_hex(8), time.monotonic()
        asked = {target: _Asked(number, now + seconds[target]) for target in questions}
        with self.news:
            self.asked |= asked
        try:
            self._send([_Leaving(target, QUESTION, packet, number) for target, packet in questions.items()])
            with self.news:
                while waiting := [each for each in asked.values() if each.answer is None]:
                    now = time.monotonic()
                    for each in waiting:
                        if each.until <= now:
                            each.answer = "it did not answer in time."
                    if ended():
                        break
                    self.news.wait(max(0.0, min(0.5, min(each.until for each in waiting) - now)))
        finally:
            with self.news:
                for target in asked:
                    del self.asked[target]
        return {target: each.answer or "it did not answer." for target, each in asked.items()}

    def _send(self, messages: list[_Leaving]) -> None:
        """Send messages, a part of each in turn, as fast as the other sides take them."""
        now = time.monotonic()
        left = {(each.target, each.number): each for each in messages}
        for each in messages:
            each.until = now + PATIENCE
        with self.news:
            self.leaving |= left
        try:
            while left:
                for each in [each for each in left.values() if each.ready]:
                    if error := self._part(each):
                        self._unreachable(each, error)
                with self.news:
                    now = time.monotonic()
                    left = {k: each for k, each in left.items() if each.sent < each.count and now < each.until}
                    if left and not any(each.ready for each in left.values()):
                        self.news.wait(1.0)
        finally:
            with self.news:
                for each in messages:
                    del self.leaving[each.target, each.number]

    def _part(self, each: _Leaving) -> str:
        """Send the next part. Returns an error, if it did not even leave."""
        about = [each.number, each.packet.kind, each.packet.head, each.sent, each.count]
        body = memoryview(each.packet.body)[each.sent * PART : (each.sent + 1) * PART]
        each.sent += 1
        return self._to(each.target, each.topic, about, body)

    def _unreachable(self, each: _Leaving, error: str) -> None:
        each.sent = each.count
        with self.news:
            if asked := self.asked.get(each.target):
                asked.answer = f"it cannot be reached ({error})."

    def _to(self, target: str, topic: str, about: list[Any], body: Any = None) -> str:
        message = Message({HEADER: about}, body)
        return (self.cell.fire_and_forget(CHANNEL, topic, target, message, optional=True) or {}).get(target) or ""

    def _frame(self, message: Message) -> Message | None:
        """A frame has arrived, in one of FLARE's threads: put it where it belongs, and be quick."""
        origin, topic = str(message.get_header(MessageHeaderKey.ORIGIN)), message.get_header(MessageHeaderKey.TOPIC)
        about: Any = message.get_header(HEADER)
        if topic == GOT:
            self._got(origin, *about)
            return None
        number, kind, head, place, count = about
        part = message.payload or b""
        with self.news:
            asked = self.asked.get(origin) if topic == ANSWER else None
            if asked is not None and asked.number == number and asked.answer is None:
                known = asked.arriving
            elif topic == QUESTION and self.answer is not None and origin == self.asker:
                known = self.arriving
            else:  # nobody waits for it, or nobody may ask it
                return make_reply(ReturnCode.INVALID_REQUEST)
            if not 0 <= place < count <= MOST_PARTS or len(part) > PART:
                return make_reply(ReturnCode.INVALID_REQUEST)
            if number not in known and len(known) >= AT_ONCE:
                del known[next(iter(known))]
            each = known.setdefault(number, _Arriving(Packet(kind, head), [None] * count))
            if len(each.parts) != count:
                return make_reply(ReturnCode.INVALID_REQUEST)
            whole, here = each.add(place, part), each.here
            if whole is not None:
                del known[number]
            if whole is not None and asked is not None:
                asked.answer = whole
                self.news.notify_all()
            elif whole is not None:
                self.questions.put((number, whole))
        if here <= count - WINDOW:  # the sender waits for it
            self._to(origin, GOT, [number, here])
        return None

    def _got(self, origin: str, number: str, here: int) -> None:
        with self.news:
            if each := self.leaving.get((origin, number)):
                each.got, each.until = max(each.got, here), time.monotonic() + PATIENCE
                self.news.notify_all()

    def _serve(self) -> None:
        assert self.answer is not None
        while True:
            number, packet = self.questions.get()
            self._send([_Leaving(self.asker, ANSWER, self.answer(packet), number)])
