"""The folder of a run: concurrent writers lose nothing, what ended stays so, other versions, failures."""

import json
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fedbilevel as fb
from fedbilevel.storage.files import write_atomically
from fedbilevel.storage.load import runs
from fedbilevel.storage.run_folder import FORMAT, INFO, NEXT, RECORDS, UNDER_WAY, RunFolder
from helpers import here


def test_a_torn_line_is_not_read(tmp_path: Path) -> None:
    with RunFolder(tmp_path).records() as file:
        file.append({"run": "a", "round": 0, "loss": float("nan")})
    with (tmp_path / RECORDS).open("a") as torn:
        torn.write('{"run": "a", "round": 1, "lo')
    assert [row["round"] for row in RunFolder(tmp_path).rows()] == [0]
    with RunFolder(tmp_path).records() as file:
        file.append({"run": "a", "round": 1, "loss": 2.0})
        file.append({"run": "a", "round": 0, "loss": 3.0})  # a run that went on from before
    assert [(row["round"], row["loss"]) for row in RunFolder(tmp_path).rows()] == [(0, 3.0), (1, 2.0)]


def _race(times: int, folder: Path, stop: Callable[[Path], Any], note: Callable[[Path, int], Any]) -> Iterator[str]:
    """The status after a run was stopped while two others wrote, many times over."""
    for number in range(times):
        place, ready = folder / str(number), threading.Barrier(3)
        RunFolder(place).enter("running")

        def other(place: Path = place, ready: threading.Barrier = ready) -> None:
            ready.wait()
            for round in range(2):
                note(place, round)

        def stopper(place: Path = place, ready: threading.Barrier = ready) -> None:
            ready.wait()
            stop(place)

        threads = [threading.Thread(target=function) for function in (other, other, stopper)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield json.loads((place / INFO).read_text())["status"]


def test_a_run_that_was_stopped_stays_so_whoever_writes_at_the_same_time(tmp_path: Path) -> None:
    """200 of 200 times. The way it was done before, read and then write, loses some, so this test would notice."""

    def note(place: Path, round: int) -> None:
        folder = RunFolder(place)
        folder.note(round=round)
        folder.enter("running" if round % 2 else "waiting", seen=float(round))

    ends = _race(200, tmp_path / "now", lambda place: RunFolder(place).enter("stopped"), note)
    assert list(ends) == ["stopped"] * 200

    def before(place: Path, **facts: Any) -> None:
        known = json.loads((place / INFO).read_text())
        write_atomically(place / INFO, json.dumps({**known, **facts}).encode())

    ends = _race(
        2000,  # it takes a few
        tmp_path / "before",
        lambda place: before(place, status="stopped"),
        lambda place, round: before(place, round=round),
    )
    assert any(end == "running" for end in ends)


def _write_often(folder: Path, fact: str, times: int) -> None:
    for number in range(times):
        facts: Any = {fact: number}
        RunFolder(folder).note(**facts)


def test_processes_do_not_lose_what_others_write(tmp_path: Path) -> None:
    RunFolder(tmp_path).enter("running")
    spawn = multiprocessing.get_context("spawn")
    facts = ("bytes_down", "bytes_up")
    writers = [spawn.Process(target=_write_often, args=(tmp_path, fact, 50)) for fact in facts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    info = RunFolder(tmp_path).info()
    assert {fact: info[fact] for fact in facts} == dict.fromkeys(facts, 49)
    assert info["status"] == "running"


ENDED = ("failed", "stopped", "finished")


@pytest.mark.parametrize("ended", ENDED)
@pytest.mark.parametrize("after", [*UNDER_WAY, "interrupted"])
def test_what_ended_stays_so(ended: Any, after: Any, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.enter("running", seed=1)
    assert folder.enter(ended)
    assert not folder.enter(after, seed=2)
    assert (folder.info()["status"], folder.info()["seed"]) == (ended, 1)
    folder.note(round=3)  # facts can be added
    assert (folder.info()["status"], folder.info()["round"]) == (ended, 3)


def test_only_a_stopped_run_may_turn_out_to_be_finished(tmp_path: Path) -> None:
    assert set(NEXT) == {"", *UNDER_WAY, "interrupted", *ENDED}
    for before in ENDED:
        for after in ENDED:
            folder = RunFolder(tmp_path / f"{before}-{after}")
            folder.enter(before)
            assert folder.enter(after) == (before == after or (before, after) == ("stopped", "finished"))


def test_a_run_begins_again_only_when_somebody_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.enter("running", sites=["a"])
    assert not folder.want_again()  # it has not ended
    folder.fail(KeyError("x"))
    assert (tmp_path / "failure.txt").exists()
    assert folder.want_again()
    info = folder.info()
    assert (info["status"], info["failure"], info["sites"]) == ("wanted", "", ["a"])
    assert not (tmp_path / "failure.txt").exists()
    folder.enter("finished")
    assert not folder.want_again()
    folder.forget_failure()  # there is none
    folder.begin(seed=3)
    assert folder.info() == {"format": FORMAT, "status": "running", "seed": 3}
    folder.fail("the disk is full.")
    folder.forget_failure()
    assert folder.info() == {}
    assert folder.read() is None


def test_an_error_that_nobody_expected_is_kept_with_its_type_and_traceback(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.enter("running")
    try:
        _ = {}["x"]
    except KeyError as error:
        folder.fail(error, "it could not be started: ")
    assert folder.info()["failure"] == "it could not be started: KeyError: 'x'"
    text = (tmp_path / "failure.txt").read_text()
    assert "Traceback" in text
    assert '_ = {}["x"]' in text
    assert text.endswith("KeyError: 'x'\n")


def test_an_error_with_a_sentence_is_that_sentence(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.fail(fb.Diverged("round 3: x became NaN.", 3, ("x",)))
    assert (folder.info()["failure"], folder.info()["diverged"]) == ("round 3: x became NaN.", True)
    assert not (tmp_path / "failure.txt").exists()


def test_a_folder_of_an_older_version_opens(tmp_path: Path) -> None:
    (tmp_path / INFO).write_text(json.dumps({"status": "finished", "task": "quadratic", "seed": 4}))
    with RunFolder(tmp_path).records() as records:
        records.append({"run": "fedbio", "round": 0, "loss": 1.0})
    (run,) = runs(tmp_path)
    assert (run.status, run.info["seed"]) == ("finished", 4)
    assert fb.load(tmp_path)["seed"].tolist() == [4]
    RunFolder(tmp_path).note(round=1)
    assert RunFolder(tmp_path).info()["format"] == FORMAT


def test_a_folder_of_a_newer_version_gets_a_sentence(tmp_path: Path) -> None:
    code, _ = here("run", "quadratic", "--algorithm", "fedbio", "--rounds", "2", "--out", "run", cwd=tmp_path)
    assert code == 0
    path = tmp_path / "run" / INFO
    info = json.loads(path.read_text())
    assert info["format"] == FORMAT
    path.write_text(json.dumps({**info, "format": FORMAT + 1}))
    before = path.read_bytes()
    for command in (["resume", "run"], ["report", "run"], ["watch", "run"]):
        code, said = here(*command, cwd=tmp_path)
        assert code == 2, command
        assert said == (
            "fedbilevel: a newer version of fedbilevel wrote run (format 2, this one reads up to 1): "
            "upgrade fedbilevel.\n"
        )
    with pytest.raises(fb.FedbilevelError, match="upgrade fedbilevel"):
        fb.load(tmp_path / "run")
    with pytest.raises(fb.FedbilevelError, match="upgrade fedbilevel"):
        fb.resume(tmp_path / "run")
    assert path.read_bytes() == before
