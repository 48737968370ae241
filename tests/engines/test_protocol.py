"""Messages: what goes in comes out, and what is not a message is refused with a sentence before anybody looks at it."""

import dataclasses
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.engines.messaging import protocol
from fedbilevel.engines.messaging.post import Post
from fedbilevel.engines.messaging.protocol import ANSWERS, QUESTIONS, Commit, Done, Failed, Run, pack, unpack
from fedbilevel.storage.arrays import encode

TERMS = {"0": {"state.0": 1.0, "3.1.0": -0.5}}
COMMIT = Commit("a", 7, 3, 1, TERMS, {}, ["4", "7"])
EXAMPLES: list[protocol.Message] = [
    protocol.Hello("r", "text", {"jax": "1"}, 3),
    protocol.Prepare(1, 0.25, 3),
    protocol.Join("r", "a", given_x=False, given_y=True, committed=4, base=3),
    COMMIT,
    Run("round.1.0", "descend", "3.1", "round", "a", 7, 2, 1, {}, TERMS, {"0.tree": "5"}, commit=COMMIT),
    protocol.Evaluate(3, COMMIT),
    protocol.Reveal(3, TERMS),
    protocol.Finish(9),
    protocol.Echo(),
    Done(),
    protocol.Facts(20),
    protocol.Prepared("hash"),
    Failed("why", "stale"),
]


def test_every_message_has_an_example() -> None:
    assert {type(message) for message in EXAMPLES} == {*QUESTIONS, *ANSWERS}


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.action)
def test_messages_come_out_as_they_went_in(message: protocol.Message) -> None:
    read, arrays = unpack(pack(message, {"a": np.arange(3.0)}))
    assert read == message
    assert arrays["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.action)
def test_every_field_is_checked(message: protocol.Message) -> None:
    header = {"action": message.action, **dataclasses.asdict(message)}
    for field in dataclasses.fields(message):
        for wrong in ([["x"]], {"x": {"y": "z"}}, "1" if field.type is float else 1.5):
            with pytest.raises(fb.FedbilevelError, match=r"of a message has the wrong type|lacks"):
                unpack(encode({**header, field.name: wrong}, {}))
        if field.default is dataclasses.MISSING:
            with pytest.raises(fb.FedbilevelError, match="lacks"):
                unpack(encode({name: value for name, value in header.items() if name != field.name}, {}))
    with pytest.raises(fb.FedbilevelError, match="should not"):
        unpack(encode({**header, "strange": 1}, {}))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from([kind.action for kind in (*QUESTIONS, *ANSWERS)]), st.dictionaries(st.text(max_size=8), PLAIN))
def test_junk_is_a_sentence(action: str, fields: dict[str, Any]) -> None:
    handled = protocol.handle(encode({**fields, "action": action}, {}), {})
    assert isinstance(handled.answer, Failed)
    assert "\n" not in handled.answer.error
    assert handled.message is None or {f.name for f in dataclasses.fields(handled.message)} >= set(fields) - {"action"}


@given(st.binary(max_size=64))
def test_bytes_that_are_no_message(data: bytes) -> None:
    handled = protocol.handle(data, {})
    assert isinstance(handled.answer, Failed)
    assert handled.message is None


def test_an_unexpected_error_tells_its_type_only(capsys: pytest.CaptureFixture[str]) -> None:
    """What it says may be about rows: it is for the client's own log."""

    def fails(message: Any, arrays: Any) -> Any:
        raise ValueError("the patient called Smith")

    handled = protocol.handle(pack(protocol.Echo(), {}), {protocol.Echo: fails})
    assert handled.answer == Failed("ValueError; see its own log.")
    assert "Smith" in handled.problem
    assert "Smith" in capsys.readouterr().err
    open_book = protocol.handle(pack(protocol.Echo(), {}), {protocol.Echo: fails}, open_book=True)
    assert "Smith" in open_book.answer.error  # pyright: ignore


def test_an_answer_that_cannot_be_sent_is_a_failure() -> None:
    """At every client, whoever hands the bytes on."""
    words = {protocol.Echo: lambda message, arrays: (Done(), {"names": np.array(["a", "b"])})}
    handled = protocol.handle(pack(protocol.Echo(), {}), words)
    assert isinstance(handled.answer, Failed)
    assert "names" in handled.answer.error
    assert not handled.arrays
    assert unpack(handled.packed) == (handled.answer, {})


class Broken:
    """Answers of all kinds that are none."""

    def ask(self, messages: Any, kind: str) -> Any:
        return {0: b"nonsense", 1: "it is offline.", 2: pack(protocol.Echo(), {}), 3: pack(Done(), {})}


def test_what_is_no_answer_is_a_failure_of_that_client_alone() -> None:
    post = Post(Broken())
    answers = post.ask(dict.fromkeys(range(5), (protocol.Evaluate(1), {})))
    assert [type(answer) for answer, _ in answers.values()] == [Failed, Failed, Failed, Done, Failed]
    assert answers[1][0] == Failed("it is offline.", "unread")
    assert "request instead of an answer" in answers[2][0].error  # pyright: ignore
    assert post.absent == {1, 4}
    assert post.bytes_down > 0


@pytest.mark.parametrize("deep", [b"[" * 100_000, b'{"a":' * 100_000])
def test_deeply_nested_headers_are_a_sentence(deep: bytes) -> None:
    metadata = json.dumps({"__metadata__": {"header": f"{zlib.crc32(deep):08x} {deep.decode()}"}}).encode()
    data = struct.pack("<Q", len(metadata)) + metadata
    with pytest.raises(fb.FedbilevelError, match="this is not a message of fedbilevel"):
        unpack(data)


@pytest.mark.parametrize("rows", [10**18, 10**400, -(10**400)])
def test_numbers_beyond_all_bounds_are_refused(rows: int) -> None:
    with pytest.raises(fb.FedbilevelError, match=r"too large a number|wrong type"):
        unpack(encode({"action": "facts", "rows": rows}, {}))
    with pytest.raises(fb.FedbilevelError, match=r"too large a number|wrong type"):
        unpack(encode({"action": "prepare", "id": 1, "weight": rows, "clients": 3}, {}))


def test_who_gives_no_answer_is_asked_once_more() -> None:
    asked: list[list[int]] = []

    class Shaky:
        def ask(self, messages: Any, kind: str) -> Any:
            asked.append(list(messages))
            return {m: pack(Done(), {}) if m == 0 or (m == 1 and len(asked) > 1) else "it is busy." for m in messages}

    answers = Post(Shaky()).ask(dict.fromkeys(range(3), (protocol.Evaluate(1), {})))
    assert asked == [[0, 1, 2], [1, 2]]
    assert [type(answer) for answer, _ in answers.values()] == [Done, Done, Failed]


def test_the_table_of_messages_in_the_documentation() -> None:
    """Make it with: python -c "from fedbilevel.engines.messaging import protocol; print(protocol.table())"."""
    page = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()
    assert protocol.table() in page
