"""The server's end of the wire: messages to clients, and what becomes of their answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fedbilevel.engines.messaging.protocol import ANSWERS, Arrays, Failed, Message, pack, unpack
from fedbilevel.errors import FedbilevelError

Answers = dict[int, tuple[Message, dict[str, np.ndarray]]]
"""The answer of each client, with its arrays."""
HEADER = 1 << 16
"""The most bytes of an answer besides the numbers that it should have."""


class Transport(Protocol):
    """How a server reaches its clients."""

    def ask(self, messages: Mapping[int, bytes], kind: str) -> dict[int, bytes | str]:
        """Send each client its message, all at the same time. Returns each answer, or why there is none. Messages of
        one kind are answered by the same program.
        """
        ...


@dataclass
class Post:
    """Sends messages of one kind to clients and reads their answers. Every error is a :class:`Failed`."""

    transport: Transport
    bytes_down: int = 0
    bytes_up: int = 0
    traffic: dict[int, tuple[int, int]] = field(default_factory=dict)  # bytes down and up, by client
    absent: set[int] = field(default_factory=set)  # who gave no answer to the last question, or cannot do it now

    def ask(self, messages: Mapping[int, tuple[Message, Arrays]], most: int = 0) -> Answers:
        """Ask clients, and return an answer for each. ``most`` is how many bytes of arrays an answer may have.

        Who gives no answer that can be read is asked once more; who has answered before gives the same answer again.
        """
        self.absent = set()
        packed = {client: pack(*message) for client, message in messages.items()}
        kind = next((message.kind for message, _ in messages.values()), "")
        answers = self._ask(packed, kind, most)
        unread = {m: packed[m] for m, (answer, _) in answers.items() if _failed(answer, "unread")}
        return {**answers, **self._ask(unread, kind, most)} if unread else answers

    def _ask(self, packed: Mapping[int, bytes], kind: str, most: int) -> Answers:
        given = self.transport.ask(packed, kind)
        for client, message in packed.items():
            answer, (down, up) = given.get(client), self.traffic.get(client, (0, 0))
            size = len(answer) if isinstance(answer, bytes) else 0
            self.traffic[client] = (down + len(message), up + size)
            self.bytes_down += len(message)
            self.bytes_up += size
        answers = {client: _read(given.get(client, "it did not answer."), most + HEADER) for client in packed}
        now = {m for m in packed if not isinstance(given.get(m), bytes) or _failed(answers[m][0], "unable")}
        self.absent = (self.absent - packed.keys()) | now
        return answers


def _failed(answer: Message, reason: str) -> bool:
    return isinstance(answer, Failed) and answer.reason == reason


def _read(answer: bytes | str, most: int) -> tuple[Message, dict[str, np.ndarray]]:
    if isinstance(answer, str):
        return Failed(answer, "unread"), {}
    if len(answer) > most:
        return Failed(f"its answer has {len(answer)} bytes, where at most {most} are expected."), {}
    try:
        message, arrays = unpack(answer)
    except FedbilevelError as error:
        return Failed(str(error), "unread"), {}
    if not isinstance(message, ANSWERS):
        return Failed("it sent a request instead of an answer."), {}
    return message, arrays
