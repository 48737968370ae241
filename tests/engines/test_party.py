"""Clients that are started again, servers that go back: what is kept, and that nothing else changes."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import fedbilevel as fb
from contract import CONTRACT
from fedbilevel.engines.messaging import kept
from fedbilevel.engines.messaging.local import Local
from fedbilevel.engines.messaging.protocol import Run, unpack
from fedbilevel.engines.messaging.server import NoQuorum
from fedbilevel.engines.participation import Everyone, Participation, Uniform
from fedbilevel.storage.arrays import decode, encode
from fedbilevel.testing import identical, largest_difference, noisy
from helpers import sample_weights

MEMORIES = ["fedbioacc", "fedbioacc-local", "primal-dual", "commfedbio", "private"]


def case(name: str) -> tuple[fb.Task, fb.Algorithm, Participation]:
    """FedBiOAcc has a memory in a round, FedBiOAcc-Local and CommFedBiO one of the run; "private" has blocks of x."""
    if name == "private":
        return sample_weights(), CONTRACT["fedbioacc"].small, Everyone()
    algorithm = CONTRACT[name].small
    return noisy(algorithm.lower_level, algorithm.weighting, np.float64), algorithm, Everyone()


# Of every kind of memory one: of the run, and blocks of a private x.
FAST = [pytest.param(n, marks=() if n in ("fedbioacc-local", "private") else pytest.mark.slow) for n in MEMORIES]


@pytest.mark.parametrize("name", FAST)
def test_everybody_is_started_again(name: str, tmp_path: Path) -> None:
    """The server saves after round 2, clients have committed round 3: they go back to 2, and all ends as without a
    break, bit for bit."""
    task, algorithm, cohort = case(name)
    without = Local(task, algorithm, cohort)
    expected = without.solution(without.advance(without.start(3), 5))
    first = Local(task, algorithm, cohort, tmp_path)
    state = first.advance(first.start(3), 2)
    saved = first.arrays(state)
    first.advance(state, 1)
    again = Local(task, algorithm, cohort, tmp_path)
    found = again.solution(again.advance(again.restore(saved), 3))
    assert identical(found, expected)
    assert not again.failures


def losing(whole: tuple[fb.Task, fb.Algorithm, Participation], lost: dict[tuple[int, int], str]) -> Local:
    """A server whose messages to a client in a round are lost: "down" before the client, "up" after it, every time."""
    engine = Local(*whole)

    class Transport:
        def ask(self, messages: Any, kind: str) -> Any:
            answers: dict[int, bytes | str] = {}
            for client, data in messages.items():
                message, _ = unpack(data)
                how = lost.get((int(message.slot.partition(".")[0]), client)) if isinstance(message, Run) else ""
                answer = "" if how == "down" else engine.parties[client].handle(data)
                answers[client] = "it did not answer." if how else answer
            return answers

    engine.post.transport = Transport()
    return engine


@pytest.mark.parametrize("how", ["down", "up"])
def test_who_does_not_answer_is_left_out(how: str) -> None:
    """As if the client had not taken part: the rest of the round goes on, and so does the client afterwards."""
    whole = case("fedbioacc-local")
    engine = losing(whole, {(2, 0): how})
    end = engine.advance(engine.start(3), 4)
    assert {(f.round, f.client) for f in engine.failures} == {(2, 0)}
    assert end.finite
    assert end.round == 4
    assert engine.parties[0].kept[-1].round == 3  # the commit of round 4 travels with the next message
    assert engine.parties[0].kept[0].round == 1


def test_a_commit_travels_with_the_next_message() -> None:
    """No message is for it alone, if the client gets another one in the next round."""
    engine = Local(*case("fedbioacc-local"))
    kinds: list[str] = []
    usual = engine.ask
    engine.ask = lambda messages, kind: (kinds.append(kind), usual(messages, kind))[1]  # pyright: ignore
    state = engine.advance(engine.start(3), 3)
    assert "commit" not in kinds
    assert [commit.round for commit in state.commits.pending.values()] == [3] * 4
    assert set(state.commits.acknowledged.values()) == {2}
    assert {party.kept[-1].round for party in engine.parties} == {2}
    engine.solution(state)
    assert {party.kept[-1].round for party in engine.parties} == {3}


def test_a_round_whose_end_reaches_too_few_has_not_ended() -> None:
    """Otherwise the server would go on from memories that the clients never kept. Only two of four take part in a
    round, so that commits travel by themselves."""
    task, algorithm, _ = case("fedbioacc-local")
    engine = Local(task, algorithm, Uniform(2))
    engine.quorum = 2
    state = engine.advance(engine.start(3), 2)
    usual = engine.ask
    deaf = lambda messages, kind: usual(messages, kind) if kind != "commit" else {}
    engine.ask = deaf  # pyright: ignore
    with pytest.raises(NoQuorum, match=r"round \d: too few clients acknowledged its end; client \d: it did not"):
        engine.advance(state, 6)
    engine.ask = usual  # pyright: ignore
    assert engine.advance(state, 1).round == state.round + 1


def test_nan_is_refused_with_the_name_of_the_party() -> None:
    task, algorithm, cohort = case("fedbioacc")
    engine = Local(task, algorithm, cohort)
    state = engine.advance(engine.start(3), 1)
    honest = engine.parties[1].handle

    def broken(message: bytes) -> bytes:
        header, arrays = decode(honest(message))
        wrong = {k: np.full_like(a, np.nan) if a.dtype.kind == "f" else a for k, a in arrays.items()}
        return encode(header, wrong)

    engine.parties[1].handle = broken  # pyright: ignore
    state = engine.advance(state, 1)
    assert state.finite
    assert {f.client for f in engine.failures} == {1}
    assert "NaN" in engine.failures[0].reason


@pytest.mark.parametrize("liars", [1, 5])
def test_who_says_that_its_own_numbers_are_not_finite(liars: int) -> None:
    """That is this client's failure, and nobody else's; the run diverges if it is true of all."""
    engine = Local(*case("private"))
    state = engine.advance(engine.start(3), 1)
    for party in engine.parties[:liars]:

        def broken(message: bytes, honest: Any = party.handle) -> bytes:
            header, arrays = decode(honest(message))
            return encode({**header, "finite": False} if header["action"] == "done" else header, arrays)

        party.handle = broken  # pyright: ignore
    state = engine.advance(state, 1)
    assert state.finite == (liars == 1)
    assert {f.client for f in engine.failures} == ({0} if liars == 1 else set())


def test_too_few_answers_stop_the_round() -> None:
    task, algorithm, cohort = case("fedbioacc")
    engine = Local(task, algorithm, cohort)
    engine.quorum = 4
    state = engine.advance(engine.start(3), 1)
    engine.parties[2].handle = lambda message: b"nonsense"  # pyright: ignore
    with pytest.raises(NoQuorum, match="round 2: only 3 of 4 clients"):
        engine.advance(state, 1)


def test_answers_larger_than_the_plan_are_not_read() -> None:
    engine = Local(*case("fedbioacc"))
    state = engine.advance(engine.start(3), 1)
    honest = engine.parties[1].handle

    def large(message: bytes) -> bytes:
        header, arrays = decode(honest(message))
        return encode(header, {**arrays, "more": np.zeros(100_000)})

    engine.parties[1].handle = large  # pyright: ignore
    engine.advance(state, 1)
    assert {f.client for f in engine.failures} == {1}
    assert "bytes, where at most" in engine.failures[0].reason


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_message_of_an_earlier_attempt_changes_nothing(kind: str) -> None:
    """Whoever keeps a message, and sends it again much later."""
    engine = Local(*case(kind))
    recorded: list[bytes] = []
    honest = engine.parties[0].handle

    def spy(message: bytes) -> bytes:
        recorded.append(message)
        return honest(message)

    engine.parties[0].handle = spy  # pyright: ignore
    state = engine.advance(engine.start(3), 3)
    party, old = engine.parties[0], list(recorded)
    before = (list(party.kept), list(party.answers))
    for message in old[:-1]:
        honest(message)
    assert [kept.round for kept in party.kept] == [kept.round for kept in before[0]]
    assert identical(party.kept[-1].memory, before[0][-1].memory)
    state = engine.advance(state, 2)
    without = Local(*case(kind))
    expected = without.solution(without.advance(without.start(3), 5))
    assert largest_difference(engine.solution(state), expected) < 1e-12
    assert not engine.failures


def test_a_client_that_cannot_save_says_so_and_does_not_answer(tmp_path: Path) -> None:
    """What it would remember of the answer could be lost."""
    task, algorithm, cohort = case("fedbioacc-local")
    engine = Local(task, algorithm, cohort, tmp_path)
    state = engine.advance(engine.start(3), 1)
    full = OSError(28, "No space left on device")
    with (
        mock.patch.object(kept, "write_atomically", side_effect=full),
        pytest.raises(NoQuorum, match=r"no client answered .*it cannot use its files \(No space left on device\)"),
    ):
        engine.advance(state, 1)
    without = Local(task, algorithm, cohort)
    expected = without.solution(without.advance(without.start(3), 3))
    assert identical(engine.solution(engine.advance(state, 2)), expected)  # it goes on when it can


@pytest.mark.parametrize("quorum", [0, 3])
def test_a_cohort_smaller_than_the_quorum_has_to_answer_as_a_whole(quorum: int) -> None:
    task, algorithm, _ = case("fedbioacc")
    engine = Local(task, algorithm, Uniform(1))
    engine.quorum = quorum
    state = engine.advance(engine.start(3), 4)
    assert state.round == 4
    for party in engine.parties:
        party.handle = lambda message: b"nonsense"  # pyright: ignore
    with pytest.raises(NoQuorum, match="no client"):
        engine.advance(state, 1)
