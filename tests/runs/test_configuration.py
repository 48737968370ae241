"""Experiment files: what they say is what is run, and what they cannot say is refused with its line."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.runs import configuration
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.settings import convert
from helpers import REAL, here

NEEDS_FILES = {"fairness", "few-shot", "hyper-representation", "loss-tuning", "client-weighting"}


def _write(folder: Path, text: str) -> Path:
    path = folder / "my.toml"
    path.write_text(text)
    return path


def test_a_file_and_a_command_are_the_same(tmp_path: Path) -> None:
    _write(
        tmp_path,
        """
        [task]
        name = "quadratic"
        heterogeneity = 0.5
        [algorithm]
        name = "fedbio"
        lr_upper = 0.05  # replaced below
        [run]
        rounds = 20
        sample = 3
        diagnostics = ["hypergradient"]
        """,
    )
    by_file = ["run", "my.toml", "--set", "algorithm.lr_upper=0.2", "--seed", "4", "--out", "a", "--json"]
    by_name = ["run", "quadratic", "--algorithm", "fedbio", "--set", "heterogeneity=0.5", "--set", "lr_upper=0.2"]
    by_name += ["--rounds", "20", "--sample", "3", "--set", "diagnostics=hypergradient", "--seed", "4"]
    again = ["run", "a/config.toml", "--out", "c", "--json"]
    for command in (by_file, [*by_name, "--out", "b", "--json"], again):
        assert here(*command, cwd=tmp_path) == (0, "")
    a, b, c = (
        [
            {k: v for k, v in row.items() if k not in ("seconds", "folder")}
            for row in fb.load(tmp_path / n).to_dict("records")
        ]
        for n in "abc"
    )
    assert a == b == c
    assert (tmp_path / "a/config.toml").read_bytes() == (tmp_path / "b/config.toml").read_bytes()
    assert (tmp_path / "a/config.toml").read_bytes() == (tmp_path / "c/config.toml").read_bytes()
    assert (tmp_path / "a/solution.safetensors").read_bytes() == (tmp_path / "c/solution.safetensors").read_bytes()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "few-shot" else ()) for n in sorted(fb.TASKS)]
)
def test_the_configuration_of_a_run_makes_the_same_task(name: str, tmp_path: Path) -> None:
    if name in NEEDS_FILES and not REAL:
        pytest.skip("needs the data sets")
    options = {"seed": 3} if name != "few-shot" else {"seed": 3, "settings": {"tasks": 5}}
    built = Experiment(name, **options).build()  # pyright: ignore[reportArgumentType]
    path = _write(tmp_path, configuration.write(built.config()))
    again = Experiment.read(path).build()
    assert again.algorithm == built.algorithm
    assert again.config() == built.config()
    assert again.task.options == built.task.options
    for mine, other in zip(built.task.clients, again.task.clients, strict=True):
        for rows, others in zip(fb.core.columns(mine)[0], fb.core.columns(other)[0], strict=True):
            np.testing.assert_array_equal(rows[:2], others[:2])


Q = '[task]\nname = "quadratic"\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            Q + "[algorithm]\nlr_uper = 1",
            "line 4: there is no setting of fedbioacc called 'lr_uper': did you mean 'lr_upper'?",
        ),
        (Q + "clints = 3", "line 3: there is no setting of quadratic called 'clints': did you mean 'clients'?"),
        (Q + "[run]\nround = 3", "line 4: there is no setting of [run] called 'round': did you mean 'rounds'?"),
        ('[tusk]\nname = "quadratic"', "line 1: there is no table called 'tusk': did you mean 'task'?"),
        ('[task]\nname = "quadratc"', "line 2: there is no task called 'quadratc': did you mean 'quadratic'?"),
        (Q + '\n[algorithm]\nname = "fedbi"', "line 5: there is no algorithm called 'fedbi'"),
        (Q + 'clients = "many"', "line 3: task.clients must be a whole number, not 'many'."),
        (Q + "clients = 2.5", "line 3: task.clients must be a whole number, not 2.5."),
        (Q + "clients = true", "line 3: task.clients must be a whole number, not True."),
        (Q + "variant = 3", "line 3: task.variant must be text, not 3."),
        (Q + '[algorithm]\nrate = "often"', "line 4: algorithm.rate: 'often' is not a schedule"),
        (Q + "[run]\nrounds = 0", "line 4: rounds must be at least 1"),
        (Q + '[run]\nsample = "some"', "line 4: sample 'some' is neither"),
        (Q + "[run]\ndiagnostics = 3", "line 4: run.diagnostics must be a list of names, not 3."),
        (Q + '[run]\nengine = "locl"', "line 4: there is no engine called 'locl': did you mean 'local'?"),
        (Q + "[run]\nevery = -1", "every must be a whole number of at least 1"),
        (Q + "[run]\ncheckpoints = 0", "the number to keep must be at least 1"),
        (Q + '[run]\ntrackers = ["tensorbord"]', "did you mean 'tensorboard'?"),
        (Q + '[run]\ndiagnostics = ["hypergradiant"]', "did you mean 'hypergradient'?"),
        ('[task]\nname = "quadratic', "is not valid TOML"),
        ("[algorithm]\nname = 'fedbio'", "does not name a task"),
        ('task = "quadratic"', "line 1: task must be a table: write [task]"),
        (Q + "[task.more]\na = 1", "line 3: there is no table called 'task.more'"),
    ],
)
def test_mistakes_are_named_with_their_line(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(fb.FedbilevelError) as caught:
        Experiment.read(_write(tmp_path, text)).build().check()
    assert sentence in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    said = "fedbilevel: the experiment file mine.toml cannot be read: No such file or directory.\n"
    assert here("run", "mine.toml", cwd=tmp_path) == (2, said)


@pytest.mark.parametrize("task", ["quadratic", "data-cleaning"])
def test_init_writes_what_can_be_run(task: str, tmp_path: Path) -> None:
    """The file has every setting with its meaning, and its values are those of the run without it."""
    assert here("init", task, cwd=tmp_path)[0] == 0
    text = (tmp_path / f"{task}.toml").read_text()
    written, usual = Experiment.read(tmp_path / f"{task}.toml").build(), Experiment(task).build()
    assert written.config() == usual.config()
    for table, keys in written.config().items():
        for key in keys:
            before, found, _ = text.partition(f"\n{'# ' if key == 'every' else ''}{key} = ")
            assert found, (table, key)
            assert before.splitlines()[-1].startswith("# "), key
    code, said = here("init", task, cwd=tmp_path)
    assert code == 2
    assert "already exists: choose another file with --out" in said


@pytest.mark.parametrize(
    ("value", "default", "read"),
    [
        ("yes", False, True),
        (True, False, True),
        ("3", 1, 3),
        (3, 1.0, 3.0),
        ("1e-3", 1.0, 1e-3),
        ("1,3", (), (1, 3)),
        ([1, 2.5], (), (1, 2.5)),
        ("a", "b", "a"),
        ("power(2, 0.5)", fb.schedules.constant(1.0), fb.schedules.power(2.0, 0.5)),
        (0.5, fb.schedules.constant(1.0), fb.schedules.constant(0.5)),
    ],
)
def test_values_and_text_are_read_as_what_their_default_is(value: Any, default: Any, read: Any) -> None:
    assert convert("key", value, default) == read


def test_later_settings_win() -> None:
    first = Experiment("quadratic", "fedbio").changed({"lr_upper": "0.1", "rounds": 5, "sample": [0, 2]})
    assert (first.rounds, first.sample) == (5, "0,2")
    assert first.participation() == [0, 2]
    assert first.changed({"sample": [4]}).participation() == [4]
    second = first.changed({"algorithm.lr_upper": 0.3, "run.seed": 2, "algorithm": "simfbo"})
    assert second.seed == 2
    assert second.algorithm == "simfbo"
    assert dict(second.settings) == {"algorithm.lr_upper": 0.3}
    assert dataclasses.replace(second, settings={}) != second


def test_the_info_of_a_run(tmp_path: Path) -> None:
    finished = Experiment("quadratic", "fedbio", rounds=3).run(tmp_path / "run")
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["status"] == "finished"
    assert info["labels"] == {"fedbio": "FedBiO"}
    assert info["summary"]["error"] == finished.summary["error"]
    assert info["environment"]["fedbilevel"] == fb.__version__
