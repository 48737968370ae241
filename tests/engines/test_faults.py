"""Whatever happens to a message or to a process, the run ends with the simulator's numbers, or says what was lost."""

import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb
from contract import CONTRACT
from faults import AT_WRITES, TO_MESSAGES, Accidents, Case, Fault, Fragile, Killed, once, run
from fedbilevel.engines.messaging.protocol import Run
from fedbilevel.engines.participation import Everyone, Uniform
from fedbilevel.engines.simulation import Simulation
from fedbilevel.errors import FedbilevelWarning, NoQuorum
from fedbilevel.testing import largest_difference, noisy
from helpers import sample_weights, small_disk

KINDS = [
    "fedbioacc-local",
    "fedmsa",
    "private",
    "primal-dual",
    "commfedbio",
    pytest.param("fedbioacc", marks=pytest.mark.slow),
]
"""Memories of the run and of a round, blocks of a private x, weights and rows on the server, error feedback."""
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


def in_turn(kind: str, folder: Path, apart: int, few: bool = True) -> int:
    """Every fault at every message and at every write, in runs with faults at places so far apart. Returns how many
    faults there were."""
    without = Fault()
    run(case(kind, few), folder / "without", without)
    happened = 0
    for what in (*TO_MESSAGES, *AT_WRITES):
        places = list(without.messages if what in TO_MESSAGES else without.writes)
        for first in range(min(apart, len(places))):
            place, fault = folder / what / str(first), Fault(what, places[first::apart])
            result, servers = run(case(kind, few), place, fault, servers=len(places) + 1)
            where = f"{what}: {places[first::apart]}"
            assert not fault.places, where
            assert largest_difference((result.x, result.y), simulated(kind, 2, few)) < TOLERANCE, where
            assert not [failure for server in servers for failure in server.failures], where
            happened += len(places[first::apart])
            shutil.rmtree(place)
    return happened


@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_at_every_message_and_every_write(
    kind: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """In runs with several: one fault has been dealt with when the next one happens."""
    faults = in_turn(kind, tmp_path, apart=2)
    assert faults > 150
    record_property("faults", faults)


@pytest.mark.slow
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_alone(
    kind: str, few: bool, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Also where some clients take part: commits then have no next message to travel with."""
    faults = in_turn(kind, tmp_path, apart=1000, few=few)
    assert faults > 150
    record_property("faults", faults)


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 40))])
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
    assert servers[0].returns.before == {0: {3}}
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


def later(answer: Any, number: int) -> bool:
    """Whether this is the first message of a round after this one."""
    return isinstance(answer, Run) and answer.slot == f"{number + 1}.0"


@pytest.mark.parametrize("lost", ["answer *", "round 3"])
@pytest.mark.parametrize("kind", LASTING)
def test_a_server_killed_while_a_round_is_acknowledged(kind: str, lost: str, tmp_path: Path) -> None:
    """After checkpoint 3. Some clients have round 3; one has only round 2, and lost what it computed since, or it had
    round 3 and lost that."""
    done: list[int] = []

    def prepare(server: Fragile) -> None:
        def before(client: int, message: Any) -> None:
            if not done and client == 1 and later(message, 3):
                if lost == "round 3":
                    server.parties[1].commit(message.commit)
                done.append(lose(tmp_path / "clients" / "client 1", lost, "torn"))
                assert [party.kept[-1].round for party in server.parties] == [3, 3 if lost == "round 3" else 2]
                raise Killed

        server.before = before

    result, servers = run(case(kind), tmp_path, Fault(), rounds=5, prepare=prepare)
    assert done[0] > 0
    assert largest_difference((result.x, result.y), simulated(kind, 5)) < TOLERANCE
    assert len(servers) == 2
    assert not [failure for server in servers for failure in server.failures]


@pytest.mark.parametrize("how", ["torn", "damaged"])
@pytest.mark.parametrize("kind", LASTING)
def test_a_server_whose_newest_checkpoint_cannot_be_read(kind: str, how: str, tmp_path: Path) -> None:
    """It has the one before, and so has every client."""
    done: list[int] = []

    def prepare(server: Fragile) -> None:
        def before(client: int, message: Any) -> None:
            if not done and client == 1 and later(message, 3):
                done.append(lose(tmp_path / "server", "*3.safetensors", how))
                raise Killed

        server.before = before

    with pytest.warns(FedbilevelWarning, match="Trying the one before"):
        result, servers = run(case(kind), tmp_path, Fault(), rounds=5, prepare=prepare)
    assert done == [1]
    assert largest_difference((result.x, result.y), simulated(kind, 5)) < TOLERANCE
    assert not servers[1].failures


@pytest.mark.parametrize("lost", ["answer *", "round 3"])
@pytest.mark.parametrize("kind", LASTING)
def test_who_comes_back_without_its_last_round_when_the_others_have_gone_on(
    kind: str, lost: str, tmp_path: Path
) -> None:
    """Such as a machine without power for a while. It is not shut out: it continues from what it has, and that is
    said."""
    task, algorithm, cohort = case(kind)
    engine, away = Fragile((task, algorithm, cohort), tmp_path / "clients", Fault()), [False]
    usual, engine.quorum = engine._deliver, 1
    engine._deliver = lambda client, message, of: (  # pyright: ignore
        "it is offline." if away[0] and client == 1 else usual(client, message, of)
    )
    state = engine.advance(engine.start(3), 3)
    if lost == "round 3":
        engine.parties[1].commit(state.commits.pending[1])
        state = state._replace(commits=state.commits.done(1))
    away[0] = True
    state = engine.advance(state, 3)
    assert lose(tmp_path / "clients" / "client 1", lost, "torn")
    away[0] = False
    engine.restart(1)
    engine.failures.clear()
    state = engine.advance(state, 3)
    (failure,) = engine.failures
    assert failure.client == 1
    assert failure.reason.startswith("it has lost ")
    assert failure.reason.endswith("It continues from round 2.")
    engine.solution(state)  # with which the last commit travels
    assert [party.kept[-1].round for party in engine.parties] == [9, 9]


def test_a_client_makes_the_others_go_back_only_so_often(tmp_path: Path) -> None:
    """One that always says that it has lost the last round cannot keep the run from its end."""
    whole = case("fedbioacc-local")

    def prepare(server: Fragile) -> None:
        def before(client: int, message: Any) -> None:
            if client == 0 and isinstance(message, Run) and message.commit is not None:
                lose(tmp_path / "clients" / "client 0", "answer *", "gone")
                server.restart(0)

        server.before, server.quorum = before, 1

    result, (server,) = run(whole, tmp_path, Fault(), rounds=8, prepare=prepare)
    assert result.metrics["round"] == 8
    assert len(server.returns.before[0]) == 3
    assert {failure.client for failure in server.failures} == {0}


def test_a_client_whose_disk_is_wiped_is_left_out_with_a_sentence(tmp_path: Path) -> None:
    """It must not begin again in the middle of a run, neither now nor with a later server."""
    whole = case("fedbioacc-local")
    engine = Fragile(whole, tmp_path, Fault())
    engine.quorum = 1
    state = engine.advance(engine.start(3), 3)
    shutil.rmtree(tmp_path / "client 0")
    engine.restart(0)
    state = engine.advance(state, 2)
    assert state.round == 5
    assert {failure.client for failure in engine.failures} == {0}
    assert "its saved state of this run is lost (it should have round 2): restore" in engine.failures[0].reason
    later = Fragile(whole, tmp_path, Fault())
    later.quorum = 1
    later.restore(engine.arrays(state))
    assert [(failure.client, failure.method) for failure in later.failures] == [(0, "join")]


@pytest.mark.parametrize("how", ["fill", "read_only"])
@pytest.mark.parametrize("whose", ["server", "clients"])
def test_a_disk_that_is_full_for_a_while(whose: str, how: str, tmp_path: Path) -> None:
    """A sentence says so, and the run goes on when there is space, to the same numbers."""
    whole = case("fedbioacc-local")
    with small_disk(tmp_path / whose) as disk:
        run(whole, tmp_path, Fault(), rounds=2)
        getattr(disk, how)()
        if whose == "clients":
            with pytest.raises(NoQuorum, match=r"it cannot use its files \((No space left|Read-only)"):
                once(whole, tmp_path, 5)
        else:
            with pytest.raises(OSError, match=r"No space left on device|Read-only"):
                once(whole, tmp_path, 5)
        disk.free()
        result, servers = run(whole, tmp_path, Fault(), rounds=5)
        assert largest_difference((result.x, result.y), simulated("fedbioacc-local", 5)) < TOLERANCE
        assert not servers[0].failures


@pytest.mark.parametrize("kind", LASTING)
def test_a_client_that_cannot_join_joins_later(kind: str, tmp_path: Path) -> None:
    """Its disk is full when the others begin. It takes part when there is space."""
    with small_disk(tmp_path / "client 1") as disk:
        task, algorithm, cohort = case(kind)
        engine = Fragile((task, algorithm, cohort), tmp_path, Fault())
        engine.quorum = 1
        disk.fill()
        state = engine.advance(engine.start(3), 2)
        assert {failure.client for failure in engine.failures} == {1}
        disk.free()
        engine.failures.clear()
        state = engine.advance(state, 3)
        assert not engine.failures
        engine.solution(state)
        assert [party.kept[-1].round for party in engine.parties] == [5, 5]


def test_one_client_whose_disk_is_full_for_a_while(tmp_path: Path) -> None:
    """It does not answer what it could not remember, and takes part again when it can."""
    with small_disk(tmp_path / "clients") as disk:
        (tmp_path / "client 0").mkdir()
        (disk.folder / "client 0").symlink_to(tmp_path / "client 0")
        engine = Fragile(case("fedbioacc-local"), disk.folder, Fault())
        engine.quorum = 1
        state = engine.advance(engine.start(3), 2)
        disk.fill()
        state = engine.advance(state, 2)
        assert {failure.client for failure in engine.failures} == {1}
        assert {failure.reason for failure in engine.failures} == {"it cannot use its files (No space left on device)."}
        disk.free()
        engine.failures.clear()
        engine.solution(engine.advance(state, 3))
        assert not engine.failures
        assert [party.kept[-1].round for party in engine.parties] == [7, 7]


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
        made = Fragile((task, algorithm, Everyone()), tmp_path, Fault())
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
