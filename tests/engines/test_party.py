"""Clients that are started again, servers that go back: what is kept, and that nothing else changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb
from contract import CONTRACT, noisy
from fedbilevel.engines.messaging.local import Local
from fedbilevel.engines.messaging.server import NoQuorum
from fedbilevel.engines.participation import Everyone, Participation, Uniform
from fedbilevel.storage.arrays import decode, encode
from helpers import identical, sample_weights

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


class Flaky(Local):
    """Loses messages: "down" before the client, "up" after it; or ends the client's process."""

    accidents: dict[tuple[int, str, int], str]

    def ask(self, messages: Any, kind: str) -> Any:
        answers: dict[int, bytes | str] = {}
        for client, message in messages.items():
            header = decode(message)[0]
            round = header.get("round", header.get("committed", -1) + 1)
            accident = self.accidents.pop((round, header["action"], client), "")
            if accident == "restart":
                old = self.parties[client]
                fresh = Local(self.task, old.program.algorithm, self.program.participation, self.folder)
                self.parties[client] = fresh.parties[client]
                self.parties[client].handle(
                    encode({**self.joined, "committed": round - 1}, {"key": self.start_key})
                )  # what a site does when its worker is back
            if accident == "down":
                answers[client] = "it could not be reached."
                continue
            answer = self.parties[client].handle(message)
            answers[client] = "its answer was lost." if accident == "up" else answer
        return answers


def flaky(case: tuple[fb.Task, fb.Algorithm, Participation], folder: Path, accidents: dict[Any, str]) -> Flaky:
    import jax

    task, algorithm, cohort = case
    engine = Flaky(task, algorithm, cohort, folder)
    engine.task, engine.folder, engine.accidents = task, folder, accidents  # pyright: ignore
    engine.joined = {"action": "join", "run": engine.run, "given_x": False, "given_y": False}  # pyright: ignore
    engine.start_key = np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.key(3), 0)))  # pyright: ignore
    return engine


@pytest.mark.parametrize("name", MEMORIES[:-1])
def test_a_commit_that_is_lost_comes_with_the_next_message(name: str, tmp_path: Path) -> None:
    whole = case(name)
    without = Local(*whole)
    expected = without.solution(without.advance(without.start(3), 4))
    engine = flaky(whole, tmp_path, {(2, "commit", 0): "down", (3, "commit", 1): "up"})
    found = engine.solution(engine.advance(engine.start(3), 4))
    assert not engine.accidents
    assert identical(found, expected)


def test_a_round_whose_end_reaches_nobody_is_made_again(tmp_path: Path) -> None:
    """Otherwise the server would go on from memories that the clients never kept."""
    whole = case("fedbioacc-local")
    without = Local(*whole)
    expected = without.solution(without.advance(without.start(3), 4))
    everybody = range(len(whole[0].clients))
    engine = flaky(whole, tmp_path, {(3, "commit", client): "down" for client in everybody})
    saved = engine.arrays(state := engine.advance(engine.start(3), 2))
    with pytest.raises(NoQuorum, match="round 3: too few clients acknowledged its end; client 0: it could not be"):
        engine.advance(state, 1)
    again = Local(*whole, tmp_path)
    assert identical(again.solution(again.advance(again.restore(saved), 2)), expected)


@pytest.mark.parametrize("name", MEMORIES[:-1])
def test_a_worker_that_is_started_again_costs_at_most_its_answers(name: str, tmp_path: Path) -> None:
    """Between rounds, it costs nothing."""
    whole = case(name)
    without = Local(*whole)
    expected = without.solution(without.advance(without.start(3), 4))
    engine = flaky(whole, tmp_path, {(3, "run", 0): "restart"})
    found = engine.solution(engine.advance(engine.start(3), 4))
    assert identical(found, expected)
    assert not engine.failures


def test_answers_that_are_lost_are_left_out(tmp_path: Path) -> None:
    """As if the client had not taken part: the rest of the round goes on, and so does the client afterwards."""
    whole = case("fedbioacc-local")
    engine = flaky(whole, tmp_path, {(2, "run", 0): "up"})
    end = engine.advance(engine.start(3), 4)
    assert [(f.round, f.client) for f in engine.failures] == [(2, 0)]
    assert end.finite
    assert end.round == 4


def test_nan_is_refused_with_the_name_of_the_party(tmp_path: Path) -> None:
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


def test_too_few_answers_stop_the_round(tmp_path: Path) -> None:
    task, algorithm, cohort = case("fedbioacc")
    engine = Local(task, algorithm, cohort)
    engine.quorum = 4
    state = engine.advance(engine.start(3), 1)
    engine.parties[2].handle = lambda message: b"nonsense"  # pyright: ignore
    with pytest.raises(NoQuorum, match="round 2: only 3 of 4 clients"):
        engine.advance(state, 1)


def test_a_replayed_message_does_not_undo_rounds(tmp_path: Path) -> None:
    """A worker that is started again hears what the first one was told, which may be many rounds old."""
    engine = flaky(case("fedbioacc-local"), tmp_path, {})
    engine.advance(engine.start(3), 3)
    join = {**engine.joined, "committed": 0, "again": True}  # pyright: ignore
    answer, _ = decode(engine.parties[0].handle(encode(join, {"key": engine.start_key})))  # pyright: ignore
    assert answer == {"action": "done"}
    assert [kept.round for kept in engine.parties[0].kept] == [2, 3]


def test_a_start_with_private_blocks_needs_everybody() -> None:
    engine = Local(*case("private"))
    assert engine.plan.start
    honest = engine.parties[1].handle
    broken = lambda message: b"nonsense" if decode(message)[0]["action"] == "run" else honest(message)
    engine.parties[1].handle = broken  # pyright: ignore
    with pytest.raises(NoQuorum, match="the start needs all clients, but client 1"):
        engine.start(3)


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


@pytest.mark.parametrize("name", ["fedbioacc", "commfedbio", "private"])
def test_a_worker_that_is_started_again_in_the_middle_of_a_round_sits_it_out(name: str, tmp_path: Path) -> None:
    """What it would answer belongs to a memory it no longer has. The others go on, and so does it, a round later."""
    whole = case(name)
    engine = flaky(whole, tmp_path, {})
    state = engine.advance(engine.start(3), 2)
    seen: list[tuple[int, str]] = []
    usual = engine.ask

    def ask(messages: Any, kind: str) -> Any:
        header = decode(messages[0])[0] if 0 in messages else {}
        if header.get("action") == "run" and header["answers"] == 1 and header["committed"] == 2 and not seen:
            engine.accidents[3, "run", 0] = "restart"
            seen.append((header["committed"], header["method"]))
        return usual(messages, kind)

    engine.ask = ask  # pyright: ignore
    engine.transport = engine
    before = engine.parties[0].kept[-1]
    state = engine.advance(state, 1)
    assert seen
    assert {(f.round, f.client) for f in engine.failures} == {(3, 0)}
    assert "middle of the round" in engine.failures[0].reason
    after = engine.parties[0].kept[-1]
    assert after.round == before.round == 2
    assert identical(after.memory, before.memory)
    assert identical(after.blocks, before.blocks)
    state = engine.advance(state, 2)
    assert state.finite
    assert len(engine.failures) == 1
    assert engine.parties[0].kept[-1].round == 5


@pytest.mark.parametrize("name", ["fedbioacc-local", "private"])
def test_a_worker_that_is_started_again_before_the_commit_keeps_what_it_had(name: str, tmp_path: Path) -> None:
    """It answered, and forgot with what: that is noted, and its memory is that of the round before."""
    engine = flaky(case(name), tmp_path, {(3, "commit", 0): "restart"})
    noted: list[Any] = []
    engine.served = noted.append
    state = engine.advance(engine.start(3), 2)
    before = engine.parties[0].kept[-1]
    state = engine.advance(state, 1)
    assert not engine.accidents
    assert [(each.round, each.method, list(each.failed)) for each in noted if each.failed] == [
        (3, "commit", ["client 0"])
    ]
    after = engine.parties[0].kept[-1]
    assert after.round == 2
    assert identical(after.memory, before.memory)
    assert identical(after.blocks, before.blocks)
    state = engine.advance(state, 2)
    assert state.finite
    assert engine.parties[0].kept[-1].round == 5
    assert not engine.failures
