"""The pipe between a site's process, which talks to the network, and its worker, which computes.

A frame is a small header, then a message. A process that does not answer in time is noticed without another thread.
"""

import json
import os
import select
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import IO, BinaryIO

HEAD = struct.Struct("<IQ")  # the lengths of the header and of the message


@dataclass(frozen=True)
class Frame:
    """A message for the worker: who sent it, and for which run. With a reason in ``refused``, it is only noted."""

    message: bytes = b""
    caller: str = "server"
    run: str = ""
    refused: str = ""
    size: int = 0  # of a message that was refused

    def parts(self) -> list[bytes]:
        """What is written."""
        about = {name: value for name, value in asdict(self).items() if name != "message"}
        header = json.dumps(about).encode()
        return [HEAD.pack(len(header), len(self.message)) + header, self.message]


def receive(stream: BinaryIO) -> Frame | None:
    """The next frame; None at the end."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    header, length = HEAD.unpack(head)
    about, message = stream.read(header), stream.read(length)
    return Frame(message, **json.loads(about)) if len(message) == length else None


def send(stream: BinaryIO, answer: bytes) -> None:
    """Write an answer, preceded by its length."""
    stream.write(struct.pack("<Q", len(answer)))
    stream.write(answer)
    stream.flush()


def write(pipe: IO[bytes], parts: Sequence[bytes], until: float) -> None:
    """Write to a process that may not read; a TimeoutError at that time of ``time.monotonic``."""
    place, poll = pipe.fileno(), select.poll()
    os.set_blocking(place, False)
    poll.register(place, select.POLLOUT)
    for part in parts:
        left = memoryview(part)
        while left:
            _wait(poll, until)
            left = left[os.write(place, left) :]


def read(pipe: IO[bytes], until: float) -> bytearray:
    """The answer of a process that may not answer."""
    (length,) = struct.unpack("<Q", _exactly(pipe.fileno(), 8, until))
    return _exactly(pipe.fileno(), length, until)


def _exactly(place: int, length: int, until: float) -> bytearray:
    found, poll = bytearray(length), select.poll()
    poll.register(place, select.POLLIN)
    left = memoryview(found)
    while left:
        _wait(poll, until)
        count = os.readv(place, [left])
        if not count:
            raise EOFError("the process has ended.")
        left = left[count:]
    return found


def _wait(poll: select.poll, until: float) -> None:
    if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
        raise TimeoutError
