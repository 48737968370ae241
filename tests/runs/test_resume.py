"""A run that was killed, at whatever moment, goes on to the result that it would have had without a break."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.errors import FedbilevelWarning
from fedbilevel.storage import records
from fedbilevel.storage.arrays import decode, encode
from fedbilevel.tasks.quadratic import Quadratic
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
    return [{k: v for k, v in row.items() if k != "seconds"} for row in records.read(folder)]


def _start(arguments: list[str], cwd: Path) -> subprocess.Popen[str]:
    command = [*INTERRUPTIBLE, *arguments, "--json"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, stdout=pipe, stderr=pipe, text=True, env=QUICK)


def _lines(folder: Path) -> int:
    path = folder / records.RECORDS
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
        if code in (130, 143) and (run / records.CONFIG).exists():
            assert "fedbilevel: interrupted. Continue with: fedbilevel resume run" in errors
            assert "Traceback" not in errors
        if not (run / records.CONFIG).exists():  # nothing was written yet
            process = _start([*RUN, *OFTEN, "--out", "run"], folder)
        else:
            process = _start(["resume", "run"], folder)
    else:
        process.communicate(timeout=300)
    if process.returncode != 0:
        done = _command("resume", "run", cwd=folder)
        assert done.returncode == 0, done.stderr
    _same_end(whole, run)
    assert json.loads((run / records.INFO).read_text())["status"] == "finished"


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
    assert "was begun for 400 rounds" in done.stderr


def test_two_processes_do_not_work_in_one_folder(tmp_path: Path) -> None:
    process = _start(["run", "quadratic", "--rounds", "100000000", "--out", "run"], tmp_path)
    try:
        while _lines(tmp_path / "run") == 0 and process.poll() is None:
            time.sleep(0.05)
        done = _command("resume", "run", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr == "fedbilevel: another process is at work in run: wait for its end, or end it.\n"
        assert records.runs(tmp_path / "run")[0].status == "running"
    finally:
        process.kill()
        process.communicate()
    assert records.runs(tmp_path / "run")[0].status == "killed"


def _solve(folder: Path | None, rounds: int = 20, **changes: Any) -> fb.Result:
    algorithm = fb.FedBiO(0.1, 0.2, 0.2, **changes)
    checkpoint = None if folder is None else fb.Checkpoints(folder, seconds=0, keep=3)
    return fb.solve(Quadratic.random().task(), algorithm, rounds=rounds, every=2, checkpoint=checkpoint)


def _same(a: fb.Result, b: fb.Result) -> bool:
    same = jax.tree.map(lambda p, q: bool(np.array_equal(p, q)), (a.x, a.y), (b.x, b.y))
    return all(jax.tree.leaves(same))


def test_from_python(tmp_path: Path) -> None:
    whole = _solve(None, 30)
    _solve(tmp_path / "here", 14)
    assert len(list((tmp_path / "here").iterdir())) <= 3  # only the last ones are kept
    parts = _solve(tmp_path / "here", 30)
    assert _same(whole, parts)
    strip = lambda rows: [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    assert strip(whole.history) == strip(parts.history)
    assert parts.seconds > parts.history[7]["seconds"]
    again = _solve(tmp_path / "here", 30)  # nothing is left to do
    assert _same(whole, again)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda raw: raw[: len(raw) // 2], "this is no message of fedbilevel"),
        (lambda raw: b"", "this is no message of fedbilevel"),
        (lambda raw: raw[:-4] + bytes(4), "its contents are damaged"),
        (lambda raw: encode({"method": "descend"}, {"a": np.zeros(2)}), "it is no checkpoint of fedbilevel"),
        (lambda raw: encode({**decode(raw)[0], "run": "other"}, decode(raw)[1]), "another configuration or other data"),
    ],
)
def test_a_bad_checkpoint_is_refused_and_the_one_before_used(damage: Any, why: str, tmp_path: Path) -> None:
    whole = _solve(None)
    _solve(tmp_path, 12)
    newest, *others = fb.Checkpoints(tmp_path).files()
    newest.write_bytes(damage(newest.read_bytes()))
    with pytest.warns(FedbilevelWarning, match=why):
        assert _same(whole, _solve(tmp_path))
    for path in fb.Checkpoints(tmp_path).files():
        path.write_bytes(b"nothing")
    with pytest.warns(FedbilevelWarning), pytest.raises(fb.FedbilevelError, match="There is no other one: remove"):
        _solve(tmp_path)
    assert others


def test_the_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """Another step size, and the same step size on other data."""
    _solve(tmp_path, 4)
    with pytest.warns(FedbilevelWarning, match="another configuration"), pytest.raises(fb.FedbilevelError):
        _solve(tmp_path, 4, local_steps=2)
    other = Quadratic.random(seed=1).task()
    with pytest.warns(FedbilevelWarning, match="other data"), pytest.raises(fb.FedbilevelError):
        fb.solve(other, fb.FedBiO(0.1, 0.2, 0.2), rounds=4, every=2, checkpoint=tmp_path)


def test_the_local_engine_says_that_it_has_none(tmp_path: Path) -> None:
    with pytest.raises(fb.FedbilevelError, match="checkpoints need engine='simulation'"):
        fb.solve(Quadratic.random().task(), fb.FedBiO(0.1, 0.2, 0.2), 2, engine="local", checkpoint=tmp_path)


def test_a_torn_line_is_not_read(tmp_path: Path) -> None:
    with records.Appender(tmp_path) as file:
        file.append({"run": "a", "round": 0, "loss": float("nan")})
    with (tmp_path / records.RECORDS).open("a") as torn:
        torn.write('{"run": "a", "round": 1, "lo')
    assert [row["round"] for row in records.read(tmp_path)] == [0]
    with records.Appender(tmp_path) as file:
        file.append({"run": "a", "round": 1, "loss": 2.0})
        file.append({"run": "a", "round": 0, "loss": 3.0})  # a run that went on from before
    assert [(row["round"], row["loss"]) for row in records.read(tmp_path)] == [(0, 3.0), (1, 2.0)]


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    records.write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        records.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
