"""``fedbilevel new``: what it writes works, outside of this repository, and its test can fail."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedbilevel as fb
from fedbilevel import testing
from fedbilevel.runs import plugins
from fedbilevel.testing import Broken, Limit, check_engines, check_limit, noisy
from helpers import here


def own_pytest(folder: Path) -> subprocess.CompletedProcess[str]:
    """The test of a folder, as somebody else runs it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=clean)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("algorithm", "MyMethod"), ("task", "my-task")])
def test_the_skeletons_pass_their_tests(kind: str, name: str, tmp_path: Path) -> None:
    assert here("new", kind, name, "--out", str(tmp_path), cwd=tmp_path) == (0, "")
    done = own_pytest(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_task_runs(tmp_path: Path) -> None:
    assert here("new", "task", "MyTask", cwd=tmp_path) == (0, "")
    ast.parse((tmp_path / "test_my_task.py").read_text())
    asked = ("run", "./my_task.py:my_task", "--set", "clients=2", "--rounds", "2", "--out", "out", "--json")
    assert here(*asked, cwd=tmp_path) == (0, "")
    assert (tmp_path / "out" / "solution.safetensors").exists()
    code, said = here("new", "task", "MyTask", cwd=tmp_path)
    assert code == 2
    assert "already exists" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("method", "Mine"), "did you mean"),
        (("task", "3x"), "cannot be a name"),
        (("task", "../x"), "cannot be a name"),
        (("task", "class"), "cannot be a name"),
    ],
)
def test_bad_names_are_one_sentence(arguments: tuple[str, str], sentence: str, tmp_path: Path) -> None:
    code, said = here("new", *arguments, cwd=tmp_path)
    assert code == 2
    assert sentence in said or "known: algorithm, task" in said
    assert not list(tmp_path.iterdir())


def test_the_contract_can_be_broken(tmp_path: Path) -> None:
    """An algorithm that ends elsewhere; one whose clients count on more than their arguments; one without a bound."""
    assert here("new", "algorithm", "Mine", cwd=tmp_path) == (0, "")
    mine = plugins.algorithm(f"{tmp_path}/mine.py:Mine")
    with pytest.raises(Broken, match=r"ends .* from where it should after 5 rounds"):
        check_limit(Limit(mine(), rounds=5))
    text = (
        (tmp_path / "mine.py").read_text().replace("jax.random.split(key, 5)", "jax.random.split(jax.random.key(0), 5)")
    )
    (tmp_path / "mine.py").write_text(text)
    fixed = plugins.algorithm(f"{tmp_path}/mine.py:Mine")
    with pytest.raises(Broken, match="another seed gives Mine the same results"):
        check_engines(noisy("global", False), fixed(), fb.Uniform(4))
    (tmp_path / "mine.py").write_text(text.replace("above=0", "above=None"))
    assert testing.check_bounds(plugins.algorithm(f"{tmp_path}/mine.py:Mine")) == 0
