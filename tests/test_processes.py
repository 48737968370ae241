"""Calls in processes: what comes back, what happens to those that die, fail or are interrupted."""

import os
import signal
import time
from pathlib import Path

import pytest

from fedbilevel import processes
from fedbilevel.processes import DIED


def _square(number: int) -> tuple[int, int]:
    return number**2, os.getpid()


def test_results_come_from_a_few_processes_that_are_used_again() -> None:
    results = dict(processes.calls(_square, [(n,) for n in range(9)], workers=2))
    assert {n: square for n, (square, _) in results.items()} == {n: n**2 for n in range(9)}
    used = {process for _, process in results.values()}
    assert len(used) <= 2
    assert os.getpid() not in used


def _die(number: int, folder: Path) -> int:
    (folder / f"begun-{number}").touch()
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_process_that_dies_takes_one_call_with_it(tmp_path: Path) -> None:
    results = dict(processes.calls(_die, [(n, tmp_path) for n in range(4)], workers=2))
    assert results == {0: 0, 1: DIED, 2: 2, 3: 3}


def _fail_or_wait(number: int, folder: Path) -> None:
    try:
        (folder / f"begun-{number}").touch()
        while number == 0:
            time.sleep(0.01)
        while not (folder / "begun-0").exists():
            time.sleep(0.01)
        raise ValueError("this one")
    except KeyboardInterrupt:
        (folder / f"saved-{number}").touch()
        raise


def test_an_error_is_raised_and_the_others_save_what_they_have(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="this one"):
        list(processes.calls(_fail_or_wait, [(n, tmp_path) for n in range(3)], workers=2))
    assert {path.name for path in tmp_path.iterdir()} == {"begun-0", "begun-1", "saved-0"}  # the third did not begin


def test_the_watcher_is_told_while_calls_last(tmp_path: Path) -> None:
    told = []
    list(processes.calls(time.sleep, [(1.2,)], workers=1, tell=lambda: told.append(1)))
    assert len(told) >= 2
