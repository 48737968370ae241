"""The messages between a server and its clients: one frozen dataclass each, one way to read, answer and ask.

A message is a header of plain values (the fields of its dataclass) and named arrays, in the safetensors format, which
cannot execute code. Both ends check a header field by field before they use it.
"""

import dataclasses
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np

from fedbilevel.errors import FedbilevelError, readable
from fedbilevel.storage.arrays import decode, encode

Arrays = Mapping[str, Any]
LARGEST = 10**15
"""Of numbers in headers: rounds, counts, factors."""
LONGEST = 1 << 17
"""Of texts in headers, in characters; a study is shorter."""
MOST_HEADER = 1 << 22
"""Bytes of a header."""
MOST_ERROR = 500
Checked = TypeVar("Checked")
Terms = dict[str, float]
"""A block of a private x as a combination of others: names and factors."""


@dataclass(frozen=True)
class Message:
    """Something that is sent. ``down`` and ``up`` say in words which arrays travel with it and with its answer."""

    action: ClassVar[str]
    when: ClassVar[str] = ""
    down: ClassVar[str] = "nothing"
    up: ClassVar[str] = "nothing"

    @property
    def kind(self) -> str:
        """Messages of one kind are answered by the same compiled program."""
        return f"{self.action} {self.program}".strip()

    @property
    def program(self) -> str:
        """Which one, if there are several for this message."""
        return ""


@dataclass(frozen=True)
class Hello(Message):
    """The study to take part in. Answered with :class:`Facts`."""

    action = "hello"
    when = "once"
    down = "the experiment, the version and a hash of the code"
    up = "how many rows the site has, and sums over them"

    run: str
    study: str
    copy: dict[str, str]
    clients: int


@dataclass(frozen=True)
class Prepare(Message):
    """The sums over all sites. Answered with :class:`Prepared`."""

    action = "prepare"
    when = "once"
    down = "the sums over all sites, the site's number and weight"
    up = "a hash of everything that will be exchanged"

    id: int
    weight: float
    clients: int


@dataclass(frozen=True)
class Commit(Message):
    """The end of a round: keep what the server's state refers to, forget the rest. It travels with the next message, or
    by itself where there is none.
    """

    action = "commit"
    when = "at the end of a round, with the next message"
    down = "the names of what to keep"

    session: str
    attempt: int
    round: int
    answers: int  # how often this client answered in this round
    blocks: dict[str, Terms]
    projections: dict[str, Terms]
    held: list[str]


@dataclass(frozen=True)
class Join(Message):
    """Set up memory and blocks, or continue with those of a committed round."""

    action = "join"
    when = "once"
    down = (
        "a key for random numbers; x and y if the run starts from given ones; after a break, the last committed round"
    )

    run: str
    session: str
    given_x: bool
    given_y: bool
    committed: int | None = None
    base: int = -1  # what this client has acknowledged
    again: bool = False  # another worker got this before, and has saved something since


@dataclass(frozen=True)
class Run(Message):
    """One exchange: run a method on the client's own data."""

    action = "run"
    when = "for each exchange"
    down = (
        "a key, and those arrays of the broadcast that this client does not hold already; for a private x, names and "
        "factors of its own blocks"
    )
    up = "the arrays of the reply"

    exchange: str
    method: str
    slot: str
    scope: str
    session: str
    attempt: int  # at a round; a later one has a larger number
    base: int  # the round whose memory the client starts from
    answers: int  # how often it answered in this attempt
    projections: dict[str, Terms]
    blocks: dict[str, Terms]
    serials: dict[str, str]
    commit: Commit | None = None
    time: int = 0  # the round, from 0, in which step sizes may change

    @property
    def program(self) -> str:
        """There is one for each exchange of a round."""
        return self.exchange


@dataclass(frozen=True)
class Evaluate(Message):
    """How good is the current solution on the client's own rows?"""

    action = "evaluate"
    when = "at evaluations"
    down = "the current x and y"
    up = "the site's metrics"

    round: int
    commit: Commit | None = None


@dataclass(frozen=True)
class Reveal(Message):
    """Send blocks and memory: only where one person runs all parties."""

    action = "reveal"
    when = "never between real parties"
    up = "private blocks and memory; a site refuses"

    round: int
    blocks: dict[str, Terms]
    commit: Commit | None = None


@dataclass(frozen=True)
class Finish(Message):
    """The end of a run: the site keeps the result."""

    action = "finish"
    when = "once"
    down = "the result"
    up = (
        "nothing; in a study that finds wrong labels, how many there are of each class, if the site allows it and they "
        "are not too few"
    )

    round: int
    commit: Commit | None = None


@dataclass(frozen=True)
class Echo(Message):
    """Arrays to send back, to measure the network."""

    action = "echo"
    when = "only to measure the network"
    down = "random numbers"
    up = "the same numbers"


@dataclass(frozen=True)
class Done(Message):
    """An answer: it is done, and here are the arrays. ``finite``: so are the numbers that stay at the client."""

    action = "done"

    finite: bool = True


@dataclass(frozen=True)
class Facts(Message):
    """The answer to :class:`Hello`."""

    action = "facts"

    rows: int


@dataclass(frozen=True)
class Prepared(Message):
    """The answer to :class:`Prepare`: a hash of everything that will be exchanged."""

    action = "prepared"

    plan: str


@dataclass(frozen=True)
class Failed(Message):
    """The answer that something went wrong. "lost": the client was restarted and does not hold what it was sent before;
    "stale": it no longer has the memory that the server counts on, only that of an older ``round``; "unread": a message
    or its answer did not arrive, or cannot be read; "unable": not now, but perhaps later.
    """

    action = "failed"

    error: str
    reason: Literal["failed", "lost", "stale", "unread", "unable"] = "failed"
    round: int | None = None

    def __post_init__(self) -> None:
        # People read it at the other end, on a terminal and in a log.
        object.__setattr__(self, "error", readable(" ".join(self.error[: 2 * MOST_ERROR].split()), MOST_ERROR))


QUESTIONS = (Hello, Prepare, Join, Run, Commit, Evaluate, Reveal, Finish, Echo)
ANSWERS = (Done, Facts, Prepared, Failed)
_BY_ACTION: dict[str, type[Message]] = {kind.action: kind for kind in (*QUESTIONS, *ANSWERS)}


def pack(message: Message, arrays: Arrays) -> bytes:
    """A message and its arrays as bytes."""
    fields = {name: value for name, value in dataclasses.asdict(message).items() if value is not None}
    return encode({"action": message.action, **fields}, arrays)


def unpack(data: bytes) -> tuple[Message, dict[str, np.ndarray]]:
    """A message and its arrays from bytes; refuses anything else."""
    header, arrays = decode(data, MOST_HEADER)
    kind = _BY_ACTION.get(str(header.pop("action", "")))
    if kind is None:
        raise FedbilevelError("this is not a known kind of message.")
    return checked(kind, header), arrays


def checked(kind: type[Checked], header: Mapping[str, Any]) -> Checked:
    """A header as its dataclass, every field of the right type."""
    hints, what = _hints(kind), getattr(kind, "action", kind.__name__)
    fields: Any = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    missing = [f.name for f in fields if f.name not in header and f.default is dataclasses.MISSING]
    strange = [name for name in header if name not in hints]
    if missing or strange:
        more = f"{len(strange)} fields such as {strange[0][:40]!r}" if strange else "nothing"
        raise FedbilevelError(f"the message '{what}' lacks {missing}, or has {more}, which it should not.")
    values = {name: _value(f"{what}.{name}", value, hints[name]) for name, value in header.items()}
    return kind(**values)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _value(name: str, value: Any, hint: Any) -> Any:
    """A plain value as its type hint says; refuses others."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict and isinstance(value, dict):
        return {key: _value(name, entry, arguments[1]) for key, entry in value.items()}
    if origin is list and isinstance(value, list):
        return [_value(name, entry, arguments[0]) for entry in value]
    if origin is types.UnionType:
        return None if value is None else _value(name, value, arguments[0])
    if origin is Literal and value in arguments:
        return value
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return checked(hint, value)  # pyright: ignore[reportArgumentType]
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST:
        return float(value)
    if hint is int and isinstance(value, int) and abs(value) > LARGEST:
        raise FedbilevelError(f"the field '{name}' of a message is too large a number.")
    if hint is str and isinstance(value, str) and len(value) > LONGEST:
        raise FedbilevelError(f"the field '{name}' of a message is too long a text.")
    if isinstance(hint, type) and isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
        return value
    raise FedbilevelError(f"the field '{name}' of a message has the wrong type.")


# The client's end.

Handler = Callable[[Any, dict[str, np.ndarray]], tuple[Message, Arrays]]


class Lost(Exception):
    """The client was restarted, and does not hold what it was sent before."""


class Stale(Exception):
    """The client no longer has the memory that the server counts on, only that of an older ``round``."""

    def __init__(self, message: str, round: int) -> None:
        super().__init__(message)
        self.round = round


class Private(Exception):
    """Why the client does not take part: for the client's users, not for the server."""


class Handled(NamedTuple):
    """A message and its answer, also as bytes; ``problem`` is the full error, which only the client may know."""

    message: Message | None
    answer: Message
    arrays: Arrays
    packed: bytes
    problem: str = ""


def handle(data: bytes, handlers: Mapping[type[Message], Handler], open_book: bool = False) -> Handled:
    """Answer a message: read it, call its handler, and turn every error into an answer.

    The text of an unexpected error may be about rows, so only its type is sent, and the rest goes to the client's own
    log; unless the client is an ``open_book``, whose data are not private.
    """
    message = None
    try:
        message, arrays = unpack(data)
    except FedbilevelError as error:
        return failed(None, Failed(str(error), "unread"))
    try:
        if type(message) not in handlers:
            raise FedbilevelError(f"it cannot answer '{message.action}' now.")
        answer, reply = handlers[type(message)](message, arrays)
        sent = {name: np.asarray(array) for name, array in reply.items()}
        return Handled(message, answer, sent, pack(answer, sent))
    except Lost as error:
        return failed(message, Failed(str(error), "lost"))
    except Stale as error:
        return failed(message, Failed(str(error), "stale", error.round))
    except FedbilevelError as error:
        return failed(message, Failed(str(error)))
    except OSError as error:  # a full disk, a folder that became read-only
        said = f"it cannot use its files ({error.strerror or type(error).__name__})."
        return failed(message, Failed(said, "unable"), f"{said[:-1]}: {error.filename or error}")
    except Private as error:
        return failed(message, Failed("it does not take part in this study."), str(error))
    except Exception as error:  # a client must answer, whatever its code or data do
        said = f"{type(error).__name__}: {error}"
        if open_book:
            return failed(message, Failed(said))
        traceback.print_exc()
        return failed(message, Failed(f"{type(error).__name__}; see its own log."), said)


def failed(message: Message | None, answer: Failed, problem: str = "") -> Handled:
    """An answer that says what went wrong; ``problem`` is what only the client may know of it, if that is more."""
    return Handled(message, answer, {}, pack(answer, {}), problem or answer.error)


def table() -> str:
    """All messages and what they carry, as the table of docs/federation.md."""
    rows = [f"| {kind.action}, {kind.when} | {kind.down} | {kind.up} |" for kind in QUESTIONS]
    return "\n".join(["| message | down | up |", "|---|---|---|", *rows])
