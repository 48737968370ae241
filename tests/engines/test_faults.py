"""Whatever happens to a message or to a process, the run ends with the simulator's numbers, or says what was lost."""

import shutil
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb
from contract import CONTRACT, noisy
from faults import AT_WRITES, TO_MESSAGES, Accidents, Case, Fault, Fragile, run
from fedbilevel.engines.messaging.protocol import Run
from fedbilevel.engines.participation import Everyone, Uniform
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import FedbilevelWarning, NoQuorum
from helpers import largest_difference, sample_weights

KINDS = ["fedbioacc", "fedbioacc-local", "fedmsa", "private", "primal-dual", "commfedbio"]
"""Memories of a round and of the run, blocks of a private x, weights and rows on the server, error feedback."""
TOLERANCE = 1e-10


@cache
def case(kind: str, few: bool = True) -> Case:
    """Two clients that take part in every round, or four of which two do."""
    if kind == "private":
        task, algorithm = sample_weights(clients=2 if few else 4, samples=4), CONTRACT["fedbioacc"].small
    else:
        algorithm = CONTRACT[kind].small
        task = noisy(algorithm.lower_level, algorithm.weighting)
        if few and not algorithm.weighting:
            task = replace(task, clients=task.clients[:2], weights=[1, 2])
    return task, algorithm, Everyone() if few else Uniform(2)


@cache
def simulated(kind: str, rounds: int, few: bool = True) -> Any:
    engine = Simulation(*case(kind, few))
    return engine.solution(engine.advance(engine.start(3), rounds))


def in_turn(kind: str, folder: Path, few: bool = True, faults: tuple[str, ...] = (*TO_MESSAGES, *AT_WRITES)) -> int:
    """Every fault at every message and at every write; returns how many runs that were."""
    without = Fault()
    run(case(kind, few), folder / "without", without)
    counts = {**dict.fromkeys(TO_MESSAGES, without.messages), **dict.fromkeys(AT_WRITES, without.writes)}
    places = [(what, number) for what in faults for number in range(counts[what])]
    for what, number in places:
        place, fault = folder / what / str(number), Fault(what, number)
        result, servers = run(case(kind, few), place, fault)
        where = f"{what}, number {number}"
        assert fault.happened, where
        assert largest_difference((result.x, result.y), simulated(kind, 2, few)) < TOLERANCE, where
        assert not [failure for server in servers for failure in server.failures], where
        shutil.rmtree(place)
    return len(places)


@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_at_every_message_and_every_write(kind: str, tmp_path: Path) -> None:
    assert in_turn(kind, tmp_path) > 50


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_where_some_clients_take_part(kind: str, tmp_path: Path) -> None:
    """Commits then have no next message to travel with."""
    assert in_turn(kind, tmp_path, few=False) > 50


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 40))])
@pytest.mark.parametrize("kind", KINDS)
def test_many_faults_one_after_the_other(kind: str, seed: int, tmp_path: Path) -> None:
    """A fault in one of eight messages and writes. Who is hit twice in an exchange is left out of it, and that is said:
    then, and only then, the numbers differ."""
    few = bool(seed % 2)
    accidents = Accidents(seed, 1 / 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedbilevelWarning)
        result, servers = run(case(kind, few), tmp_path, accidents, rounds=4, servers=60)
    assert accidents.list
    failures = [failure for server in servers for failure in server.failures]
    difference = largest_difference((result.x, result.y), simulated(kind, 4, few))
    assert difference < TOLERANCE or failures
    assert result.metrics["round"] == 4


LASTING = ["fedbioacc-local", "fedmsa", "private"]


def lose(folder: Path, pattern: str, how: str) -> int:
    """The files of a client are gone, torn or damaged."""
    files = sorted(folder.glob(pattern))
    for path in files:
        if how == "gone":
            path.unlink()
        else:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 4
            path.write_bytes(content[: len(content) // 2] if how == "torn" else content)
    return len(files)


@pytest.mark.parametrize("how", ["gone", "torn", "damaged"])
@pytest.mark.parametrize("kind", LASTING)
def test_a_client_that_loses_what_it_computed_sends_everybody_back(kind: str, how: str, tmp_path: Path) -> None:
    """The server learns of it with the next message, goes back to the round before, and the numbers are the same."""
    lost: list[int] = []

    def prepare(server: Fragile) -> None:
        def before(client: int, message: Any) -> None:
            commit = getattr(message, "commit", None)
            if not lost and client == 0 and commit is not None and commit.round == 3:
                lost.append(lose(tmp_path / "clients" / "client 0", "answer *", how))
                server.restart(0)

        server.before = before

    result, servers = run(case(kind), tmp_path, Fault(), rounds=5, prepare=prepare)
    assert lost[0] > 0
    assert largest_difference((result.x, result.y), simulated(kind, 5)) < TOLERANCE
    assert not servers[0].failures
    assert servers[0]._sent_back == {(0, 3)}
    assert [row["round"] for row in result.history] == [0, 2, 4, 5]


@pytest.mark.parametrize("how", ["gone", "torn", "damaged"])
@pytest.mark.parametrize("kind", LASTING)
def test_a_client_whose_last_round_cannot_be_read(kind: str, how: str, tmp_path: Path) -> None:
    """It has the one before, and so have all others: nobody is shut out."""
    lost: list[int] = []

    def prepare(server: Fragile) -> None:
        def before(client: int, message: Any) -> None:
            # Round 3 is acknowledged by now, and its answers are removed.
            if not lost and client == 0 and isinstance(message, Run) and message.base == 3 and message.answers == 1:
                lost.append(lose(tmp_path / "clients" / "client 0", "round 3", how))
                server.restart(0)

        server.before = before

    result, servers = run(case(kind), tmp_path, Fault(), rounds=5, prepare=prepare)
    assert lost == [1]
    assert largest_difference((result.x, result.y), simulated(kind, 5)) < TOLERANCE
    assert not servers[0].failures


def test_a_client_whose_disk_is_wiped_is_left_out_with_a_sentence(tmp_path: Path) -> None:
    lost: list[str] = []

    def prepare(server: Fragile) -> None:
        def before(client: int, message: Any) -> None:
            if not lost and client == 0 and isinstance(message, Run) and message.base == 2:
                lost.append("once")
                shutil.rmtree(tmp_path / "clients" / "client 0")
                server.restart(0)

        server.before = before

    result, servers = run(case("fedbioacc-local"), tmp_path, Fault(), rounds=4, prepare=prepare)
    assert result.metrics["round"] == 4
    assert {failure.client for failure in servers[0].failures} == {0}
    assert servers[0].failures[0].method == "join"
    assert servers[0].failures[0].reason == "its saved state of this run is lost: it should have round 0."


def test_an_older_checkpoint_than_the_clients_ends_with_a_sentence(tmp_path: Path) -> None:
    """Such as one from a backup: the clients keep two rounds. It would not help to try again."""
    whole = case("fedbioacc-local")
    run(whole, tmp_path, Fault(), rounds=2)
    shutil.copytree(tmp_path / "server", tmp_path / "backup")
    run(whole, tmp_path, Fault(), rounds=6)
    shutil.rmtree(tmp_path / "server")
    shutil.copytree(tmp_path / "backup", tmp_path / "server")
    with pytest.warns(FedbilevelWarning), pytest.raises(fb.FedbilevelError, match="the server is at round") as caught:
        run(whole, tmp_path, Fault(), rounds=6)
    assert not isinstance(caught.value, NoQuorum)


@pytest.mark.parametrize("kind", ["fedbioacc", "commfedbio", *LASTING])
def test_a_client_that_comes_later_joins_where_the_others_are(kind: str, tmp_path: Path) -> None:
    """It starts from the first point, as if it had not moved; the run does not wait for it."""
    task, algorithm, _ = case(kind, few=False)
    there = {0, 1, 2}

    def server() -> Fragile:
        made = Fragile(task, algorithm, Everyone(), tmp_path, Fault())
        usual, made.quorum = made._deliver, 1
        made._deliver = lambda client, message, kind: (  # pyright: ignore
            usual(client, message, kind) if client in there else "it is offline."
        )
        return made

    first = server()
    state = first.advance(first.start(3), 3)
    assert {failure.client for failure in first.failures} == {3}
    assert not (tmp_path / "client 3").exists()
    there.add(3)
    second = server()
    state = second.advance(second.restore(first.arrays(state)), 3)
    x, _ = second.solution(state)
    assert not second.failures
    if second.program.lasting:
        assert [party.kept[-1].round for party in second.parties] == [6] * 4
    if kind == "private":  # it moved as far from the start, which is 0, as three rounds take it
        moved = [np.abs(np.asarray(block)).max() for block in x]
        assert 0 < moved[3] < max(moved[:3])
