"""Calls in processes: what comes back, what happens to those that die, fail or are interrupted."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import fedbilevel as fb
from fedbilevel.errors import UnknownName
from fedbilevel.runs import processes
from fedbilevel.runs.processes import DIED


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


def _raise(kind: str) -> None:
    if kind == "name":
        raise UnknownName("fruit", "aple", ["apple"])
    if kind == "diverged":
        raise fb.Diverged("round 3: NaN.", 3, ("x",))
    raise Strange("odd", 1)


class Strange(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one: str, two: int) -> None:
        super().__init__(one)


@pytest.mark.parametrize(
    ("kind", "error", "sentence"),
    [
        ("name", UnknownName, "there is no fruit called 'aple': did you mean 'apple'?"),
        ("diverged", fb.Diverged, "round 3: NaN."),
        ("strange", fb.FedbilevelError, "Strange: odd"),
    ],
)
def test_errors_come_through_as_they_were(kind: str, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as caught:
        list(processes.calls(_raise, [(kind,)], workers=1))
    assert str(caught.value) == sentence
    if isinstance(caught.value, fb.Diverged):
        assert (caught.value.round, caught.value.variables) == (3, ("x",))


def _wait_until_interrupted(folder: Path) -> None:
    try:
        (folder / "begun").write_text(str(os.getpid()))
        time.sleep(60)
    except KeyboardInterrupt:
        (folder / "saved").touch()
        raise


def test_nobody_outlives_a_parent_that_was_killed(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from fedbilevel.runs import processes
from test_processes import _wait_until_interrupted
if __name__ == "__main__":
    list(processes.calls(_wait_until_interrupted, [(Path({str(tmp_path)!r}),)], workers=1))
"""
    (tmp_path / "parent.py").write_text(code)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py")])
    begun = tmp_path / "begun"
    wait_for(lambda: begun.exists() and begun.read_text())
    child = int(begun.read_text())
    parent.kill()
    parent.wait()
    wait_for(lambda: (tmp_path / "saved").exists())
    wait_for(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text())


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen")
