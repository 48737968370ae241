"""A run that was killed, at whatever moment, goes on to the result that it would have had without a break."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from fedbilevel.storage.load import runs
from fedbilevel.storage.run_folder import CONFIG, INFO, RECORDS, RunFolder
from helpers import INTERRUPTIBLE

# A private x, client memories, partial participation and random batches: all that a state can have.
TASK = ["--set", "hidden=0", "--set", "clients=6"]
RUN = ["run", "data-cleaning", *TASK, "--algorithm", "fedmsa", "--sample", "3", "--rounds", "400", "--seed", "3"]
OFTEN = ["--set", "checkpoint_seconds=0", "--set", "every=7", "--set", "references=false"]


# Compiled with little optimisation: that is most of the time, and the same for all.
QUICK = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=1"}


def _command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    process = _start(list(arguments), cwd)
    output, errors = process.communicate(timeout=300)
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def _numbers(folder: Path) -> list[dict[str, Any]]:
    """All records but the seconds."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in RunFolder(folder).rows()]


def _start(arguments: list[str], cwd: Path) -> subprocess.Popen[str]:
    command = [*INTERRUPTIBLE, *arguments, "--json"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, stdout=pipe, stderr=pipe, text=True, env=QUICK)


def _lines(folder: Path) -> int:
    path = folder / RECORDS
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _stop(process: subprocess.Popen[str], folder: Path, lines: int, how: signal.Signals) -> tuple[int, str]:
    """Let the run write some more lines, then end it."""
    goal = _lines(folder) + lines
    while process.poll() is None and _lines(folder) < goal:
        time.sleep(0.002)
    time.sleep(random.Random(lines).random() * 0.05)
    process.send_signal(how)
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def _same_end(a: Path, b: Path) -> None:
    assert _numbers(a) == _numbers(b)
    assert (a / "solution.safetensors").read_bytes() == (b / "solution.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a break."""
    folder = tmp_path_factory.mktemp("whole")
    done = _command(*RUN, *OFTEN, "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def _break_often(whole: Path, folder: Path, times: int, luck: random.Random) -> None:
    run = folder / "run"
    process = _start([*RUN, *OFTEN, "--out", "run"], folder)
    for _ in range(times):
        how = luck.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
        code, errors = _stop(process, run, luck.choice([0, 1, 3, 10, 25]), how)
        rows = _numbers(run)
        assert [row["round"] for row in rows if row["run"] == "fedmsa"] == sorted(
            {row["round"] for row in rows if row["run"] == "fedmsa"}
        )
        if code == 0:
            break  # it was faster
        # Before everything is imported, nobody listens to SIGINT and SIGTERM yet, and nothing was begun.
        assert code in (-signal.SIGKILL, 130, 143, -signal.SIGINT, -signal.SIGTERM, 1), errors
        assert code != 1 or "KeyboardInterrupt" in errors, errors
        if code in (130, 143) and (run / CONFIG).exists():
            assert "fedbilevel: interrupted. Continue with: fedbilevel resume run" in errors
            assert "Traceback" not in errors
        if not (run / CONFIG).exists():  # nothing was written yet
            process = _start([*RUN, *OFTEN, "--out", "run"], folder)
        else:
            process = _start(["resume", "run"], folder)
    else:
        process.communicate(timeout=300)
    if process.returncode != 0:
        done = _command("resume", "run", cwd=folder)
        assert done.returncode == 0, done.stderr
    _same_end(whole, run)
    assert json.loads((run / INFO).read_text())["status"] == "finished"


@pytest.mark.slow
def test_killed_at_random_moments(whole: Path, tmp_path: Path) -> None:
    _break_often(whole, tmp_path, 3, random.Random(0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
def test_killed_at_many_random_moments(whole: Path, tmp_path: Path, seed: int) -> None:
    _break_often(whole, tmp_path, 6, random.Random(seed))


@pytest.mark.slow
def test_more_rounds(whole: Path, tmp_path: Path) -> None:
    """A finished run goes on to more rounds; it ends as the longer run does."""
    short = [part if part != "400" else "203" for part in RUN]  # 203 is a multiple of 7
    assert _command(*short, *OFTEN, "--out", "run", cwd=tmp_path).returncode == 0
    done = _command("resume", "run", "--rounds", "400", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    _same_end(whole, tmp_path / "run")
    done = _command("resume", "run", "--rounds", "10", cwd=tmp_path)
    assert done.returncode == 2
    assert "was started with 400 rounds" in done.stderr


def test_two_processes_do_not_work_in_one_folder(tmp_path: Path) -> None:
    process = _start(["run", "quadratic", "--rounds", "100000000", "--out", "run"], tmp_path)
    try:
        while _lines(tmp_path / "run") == 0 and process.poll() is None:
            time.sleep(0.05)
        done = _command("resume", "run", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr == "fedbilevel: another process is using run: wait until it ends, or end it.\n"
        assert runs(tmp_path / "run")[0].status == "running"
    finally:
        process.kill()
        process.communicate()
    assert runs(tmp_path / "run")[0].status == "killed"
