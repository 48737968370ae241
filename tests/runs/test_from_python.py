"""``fb.compare``, ``fb.tune`` and ``fb.solve(out=...)``: the same run folders as the commands write."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.errors import FedbilevelWarning
from fedbilevel.runs import grid
from fedbilevel.runs.execute import resume
from fedbilevel.runs.fair_search import Found
from fedbilevel.runs.given import obstacle, word_of
from fedbilevel.runs.settings import plain
from fedbilevel.storage.run_folder import RunFolder
from fedbilevel.tasks import Quadratic, quadratic
from helpers import here

FEDBIO = fb.FedBiO(0.1, 0.1, 0.1, local_steps=1)


def test_solve_writes_a_run_folder(tmp_path: Path) -> None:
    """The same result as without it; the same call continues; other settings, and a command, are told why not."""
    task = Quadratic.random(clients=2, p=2, d=3).task()
    result = fb.solve(task, FEDBIO, rounds=4, out=tmp_path / "mine")
    assert np.array_equal(result.x, fb.solve(task, FEDBIO, rounds=4).x)
    info = RunFolder(tmp_path / "mine").info()
    assert (info["status"], info["algorithm"], info["only_python"]) == ("finished", "fedbio", ["the task"])
    assert len(fb.load(tmp_path / "mine")) == len(result.history)
    assert np.array_equal(fb.solve(task, FEDBIO, rounds=4, out=tmp_path / "mine").x, result.x)
    with pytest.raises(fb.FedbilevelError, match="has another run, with other settings"):
        fb.solve(task, FEDBIO, rounds=5, out=tmp_path / "mine")
    with pytest.raises(fb.FedbilevelError, match="no file leads to the task: continue it with the same call and out="):
        resume(tmp_path / "mine")
    assert here("report", str(tmp_path / "mine"), cwd=tmp_path)[0] == 0


def test_compare_members_of_one_algorithm(tmp_path: Path) -> None:
    made = partial(quadratic, clients=2, p=2, d=3)
    small, large = fb.FedBiO(0.01, 0.1, 0.1, local_steps=1), FEDBIO
    compared = fb.compare(made, [small, large], rounds=3, seeds=range(2), out=tmp_path / "both", jobs=1)
    assert [(m.algorithm, m.seed) for m in compared.members] == [
        ("FedBiO", 0), ("FedBiO", 1), ("FedBiO-2", 0), ("FedBiO-2", 1),
    ]  # fmt: skip
    for member, algorithm in ((compared.members[0], small), (compared.members[3], large)):
        alone = fb.solve(made(seed=member.seed), algorithm, rounds=3, seed=member.seed, every=1)
        assert member.history[-1]["error"] == pytest.approx(alone.metrics["error"], rel=1e-6)
    assert {m.run.info["title"] for m in compared.members} == {"FedBiO", "FedBiO-2"}
    assert here("resume", str(tmp_path / "both"), "--json", cwd=tmp_path) == (0, "")


def test_what_cannot_travel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = fb.Task(
        fb.Problem(lambda x, y, b: ((y - b) ** 2).mean(), lambda x, y, b: ((y - x) ** 2).sum(), lambda k: (0.0, 0.0)),
        [{"train": np.ones(2), "val": np.ones(2)}],
        batch_size=None,
    )
    line = test_what_cannot_travel_is_named.__code__.co_firstlineno + 2
    said = f"the lambda in line {line} of test_from_python.py cannot be sent to another process"
    assert obstacle(task) == said
    assert obstacle((quadratic, fb.FedBiO, Quadratic.scalar())) == ""
    assert word_of("task", quadratic) == "quadratic"
    assert word_of("task", lambda: task) is None
    monkeypatch.setattr(grid, "cores", lambda: 2)
    names = [FEDBIO, fb.FedAvg(lr_lower=0.1)]
    with pytest.raises(fb.FedbilevelError, match=r"the lambda in line .*: give it a name at the top level of a file"):
        fb.compare(task, names, rounds=2, out=tmp_path / "two", jobs=2)
    with pytest.warns(FedbilevelWarning, match=r"the lambda in line .*: all runs share this one"):
        compared = fb.compare(task, names, rounds=2, out=tmp_path / "one")
    assert all(member.done for member in compared.members)


def test_what_was_tuned_is_compared(tmp_path: Path) -> None:
    """The settings of a search reach the members of a comparison; another task, or algorithm, is refused."""
    found = 'task = "quadratic"\nrounds = 2\ntrials = 1\nheld_out = 0.0\nseeds = [0]\n'
    found += '[settings]\n"task.clients" = 2\n[best.fedbio]\nlr_upper = 0.03\n'
    (tmp_path / "tuned.toml").write_text(found)
    assert Found.read(tmp_path).best["fedbio"] == {"lr_upper": 0.03}
    compared = fb.compare("quadratic", tuned=tmp_path, out=tmp_path / "out", jobs=1)
    (member,) = compared.members
    assert member.run.config["algorithm"]["lr_upper"] == plain(0.03)
    assert (member.run.config["task"]["clients"], member.run.config["run"]["rounds"]) == (2, 2)
    with pytest.raises(fb.FedbilevelError, match="has no search for fedavg: it has fedbio"):
        fb.compare("quadratic", ["fedavg"], tuned=tmp_path)
    with pytest.raises(fb.FedbilevelError, match="is about the task quadratic, not data-cleaning"):
        fb.compare("data-cleaning", ["fedbio"], tuned=tmp_path)
