"""Commands on a base installation, without any of the extras: one sentence says what to install."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedbilevel.errors import FedbilevelError, needs
from fedbilevel.federation.cli import app

FEDERATION = [str(command.name or command.callback.__name__) for command in app.registered_commands if command.callback]
BARE = """
import importlib.abc, io, contextlib, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("nvflare", "optuna", "tensorboardX", "mlflow"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from fedbilevel.cli import main

found = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["fedbilevel", *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            found.append((end.code, said.getvalue()))
print(json.dumps(found))
"""


def bare(*commands: list[str], cwd: Path) -> list[tuple[int, str]]:
    """The exit code of each command without the extras, and what it says of errors."""
    process = [sys.executable, "-c", BARE, json.dumps(commands)]
    done = subprocess.run(process, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [(code, said) for code, said in json.loads(done.stdout)]


def test_every_command_of_a_federation(tmp_path: Path) -> None:
    assert {"create", "start", "run", "status", "stop", "add", "revoke", "join", "log", "demo"} <= set(FEDERATION)
    sentence = "fedbilevel: a federation needs NVIDIA FLARE: pip install 'fedbilevel[federation]'.\n"
    answers = bare(*(["federation", name] for name in FEDERATION), cwd=tmp_path)
    assert dict(zip(FEDERATION, answers, strict=True)) == dict.fromkeys(FEDERATION, (2, sentence))
    helped = bare(["federation", "--help"], *(["federation", name, "--help"] for name in FEDERATION), cwd=tmp_path)
    assert {code for code, _ in helped} == {0}


def test_other_commands(tmp_path: Path) -> None:
    run = ["run", "quadratic", "--rounds", "1", "--track"]
    tuning, board, mlflow = bare(["tune", "quadratic"], [*run, "tensorboard"], [*run, "mlflow"], cwd=tmp_path)
    assert tuning == (2, "fedbilevel: tuning needs Optuna: pip install 'fedbilevel[tune]'.\n")
    assert board == (2, "fedbilevel: TensorBoard needs tensorboardX: pip install 'fedbilevel[tensorboard]'.\n")
    assert mlflow == (2, "fedbilevel: MLflow needs its client: pip install 'fedbilevel[mlflow]'.\n")


def test_a_broken_extra_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_extra.py").write_text("import its_own_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FedbilevelError, match=r"'fedbilevel\[some\]' \(No module named 'its_own_dependency'\)\.$"):
        needs("broken_extra", "some", "this needs that")
    assert needs("os.path", "some", "this needs that") is os.path
