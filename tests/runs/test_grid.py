"""Many experiments, each in a folder of its own: what is kept of those that fail, and that they can be tried again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedbilevel as fb
from fedbilevel.errors import Names
from fedbilevel.runs import grid
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.grid import PlannedRun
from fedbilevel.runs.plugins import OURS
from fedbilevel.storage.run_folder import RunFolder


def _missing(*_: Any) -> Any:
    return {}["x"]


@pytest.mark.parametrize(
    ("make", "failure"),
    [
        (lambda: replace(fb.tasks.quadratic(), metrics=_missing), "KeyError: 'x'"),
        (_missing, "it could not be started: wrong failed: KeyError: 'x' (test_grid.py, line 19)."),
    ],
)
def test_a_programming_error_of_a_member_is_kept_with_its_type_and_traceback(
    make: Any, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [PlannedRun(tmp_path / name, Experiment(name, "fedbio", 2)) for name in ("wrong", "quadratic")]
    tasks = {"wrong": make, "quadratic": fb.tasks.quadratic}
    monkeypatch.setitem(OURS, "task", Names("task", tasks))
    grid.run([places], jobs=1)
    wrong, right = (RunFolder(place.folder) for place in places)
    assert right.info()["status"] == "finished"  # the other one does not mind
    assert (wrong.info()["status"], wrong.info()["failure"]) == ("failed", failure)
    text = (wrong.path / "failure.txt").read_text()
    assert text.startswith("Traceback")
    assert 'return {}["x"]' in text
    assert not places[0].settled
    monkeypatch.setitem(OURS, "task", Names("task", {"wrong": fb.tasks.quadratic}))
    before = (right.path / "run.json").read_bytes()
    grid.run([places], jobs=1)  # the error is fixed
    assert wrong.info()["status"] == "finished"
    assert not (wrong.path / "failure.txt").exists()
    assert (right.path / "run.json").read_bytes() == before


def test_a_run_that_finished_elsewhere_is_not_said_to_have_failed(tmp_path: Path) -> None:
    place = PlannedRun(tmp_path / "run", Experiment("quadratic", "fedbio", 2))
    RunFolder(place.folder).enter("finished")
    assert not RunFolder(place.folder).fail("its process died (out of memory?).")
    assert place.settled


def test_an_error_after_the_last_round_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {"wrong": lambda: replace(fb.tasks.quadratic(), shown=fb.Presentation(details=_missing))}
    monkeypatch.setitem(OURS, "task", Names("task", tasks))
    with pytest.raises(KeyError):
        Experiment("wrong", "fedbio", 2).run(tmp_path / "run")
    info = RunFolder(tmp_path / "run").info()
    assert (info["status"], info["failure"]) == ("failed", "KeyError: 'x'")
