"""The command line in processes of its own, as people use it."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from helpers import INTERRUPTIBLE, fedbilevel, here


def test_run_shows_a_table_and_says_where(tmp_path: Path) -> None:
    done = fedbilevel("run", "quadratic", "--rounds", "300", "--algorithm", "fedbio", "--sample", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "|x - x*|" in done.stdout
    folder = re.search(
        r"Results in (runs/quadratic-fedbio-seed0-[\d-]+): checkpoints, config.toml, curves.png", done.stdout
    )
    assert folder is not None
    assert (tmp_path / folder[1] / "curves.png").exists()


@pytest.mark.slow
def test_the_same_command_gives_the_same_numbers(tmp_path: Path) -> None:
    command = ["run", "quadratic", "--sample", "3", "--rounds", "6", "--seed", "3", "--json"]
    a, b = (json.loads(fedbilevel(*command, cwd=tmp_path).stdout.splitlines()[-1]) for _ in range(2))
    assert a.pop("folder") != b.pop("folder")
    for summary in (a, b):
        summary.pop("seconds")
    assert a == b


def test_settings_reach_algorithm_and_task(tmp_path: Path) -> None:
    settings = [
        "algorithm.lr_upper=0.05",
        "rate=cube_root(2, 100)",
        "c_lower=0.1",
        "heterogeneity=0.5",
        "task.d=3",
        "shared_batch=yes",
    ]
    pairs = [part for pair in settings for part in ("--set", pair)]
    done = fedbilevel(
        "run", "quadratic", "--rounds", "2", "--clients", "3", *pairs, "--out", "here", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    config = (tmp_path / "here" / "config.toml").read_text()
    for line in (
        "lr_upper = 0.05",
        'rate = "cube_root(2.0, 100.0)"',
        "heterogeneity = 0.5",
        "d = 3",
        "shared_batch = true",
        "clients = 3",
    ):
        assert line in config


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "data-clening"], "there is no task called 'data-clening': did you mean 'data-cleaning'?"),
        (["run", "quadratic", "--algorithm", "fedbioac"], "did you mean 'fedbioacc'?"),
        (["run", "quadratic", "--set", "lr_uper=1"], "did you mean 'lr_upper'?"),
        (["run", "quadratic", "--set", "lr_upper=fast"], "lr_upper must be a number, not 'fast'."),
        (["run", "quadratic", "--set", "clients=2.5"], "clients must be a whole number"),
        (["run", "quadratic", "--set", "shared_batch=maybe"], "shared_batch must be true or false"),
        (["run", "quadratic", "--set", "lr_upper"], "--set needs KEY=VALUE"),
        (["run", "quadratic", "--sample", "9"], "cannot draw 9 of 5 clients"),
        (["run", "quadratic", "--sample", "some"], "neither a number of clients"),
        (["run", "quadratic", "--sample", "1.5"], "a probability must be above 0 and at most 1, not 1.5"),
        (["run", "quadratic", "--rounds", "0"], "rounds must be at least 1"),
        (["run", "quadratic", "--set", "variant=T9"], "variant is T1, T2, T3, T4 or T5"),
        (["run", "quadratic", "--set", "variant=T4"], "is for problems with a global lower level"),
        (["run", "data-cleaning", "--clients", "1000"], "too few for 1000 clients"),
        (["plan", "fedbi"], "did you mean 'fedbio'?"),
    ],
)
def test_errors_are_one_sentence_and_exit_code_2(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    code, said = here(*arguments, cwd=tmp_path)
    assert code == 2
    assert said.startswith("fedbilevel: ")
    assert len(said.strip().splitlines()) == 1
    assert sentence in said
    assert not (tmp_path / "runs").exists()  # nothing half-made is left behind


def test_a_folder_that_holds_something_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("keep")
    done = fedbilevel("run", "quadratic", "--out", "mine", cwd=tmp_path)
    assert done.returncode == 2
    assert "is not empty" in done.stderr
    (tmp_path / "file").write_text("")
    done = fedbilevel("run", "quadratic", "--out", "file/inside", cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot write to file/inside" in done.stderr


def test_a_diverging_run_saves_what_it_had(tmp_path: Path) -> None:
    done = fedbilevel("run", "quadratic", "--set", "lr_upper=90", "--out", "here", "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert re.search(r"round \d+: .* became NaN or infinite: try a smaller lr_upper \(now 90\)", done.stderr)
    assert "The records so far are in here" in done.stderr
    assert (tmp_path / "here" / "solution.safetensors").exists()
    assert json.loads((tmp_path / "here" / "run.json").read_text())["status"] == "failed"
    assert (tmp_path / "here" / "records.jsonl").read_text().count("\n") > 1


def test_an_interrupted_run_saves_what_it_had(tmp_path: Path) -> None:
    command = [*INTERRUPTIBLE, "run", "quadratic", "--rounds", "100000000", "--out", "here", "--json"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        records = tmp_path / "here" / "records.jsonl"
        for _ in range(600):
            if records.exists() and records.read_text().count("\n") >= 1:
                break
            time.sleep(0.1)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Continue with: fedbilevel resume here" in errors
    assert (tmp_path / "here" / "solution.safetensors").exists()
    assert json.loads((tmp_path / "here" / "run.json").read_text())["status"] == "interrupted"
    assert "Traceback" not in errors


def test_plan_shows_the_costs(tmp_path: Path) -> None:
    done = fedbilevel("plan", "fedbioacc", "--task", "data-cleaning", cwd=tmp_path)
    assert done.returncode == 0
    assert "descend" in done.stdout
    assert "x is private" in done.stdout
    done = fedbilevel("plan", "fedbio", "--task", "quadratic", "--set", "local_steps=3", "--json", cwd=tmp_path)
    assert json.loads(done.stdout) == {
        "exchanges": 1,
        "down": 16,
        "up": 16,
        "p": 4,
        "d": 6,
        "Gf": 6,
        "Gg": 3,
        "J": 3,
        "H": 3,
        "samples": 15,
    }


def test_lists(tmp_path: Path) -> None:
    for command, names in (
        ("algorithms", ("fedbio", "fedbioacc", "fedavg")),
        ("tasks", ("data-cleaning", "quadratic")),
    ):
        shown = fedbilevel(command, cwd=tmp_path).stdout
        assert all(name in shown for name in names)
