"""Tuning: by the validation loss alone, from the suggested setting on, through interruptions."""

import csv
import fcntl
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core import Lookup
from fedbilevel.errors import Names
from fedbilevel.runs import plugins, search_memory
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.search_space import Choice, Range, search_space
from fedbilevel.runs.tuning import Tuning, tune
from fedbilevel.runs.validation import hold_out, validation_loss
from fedbilevel.tasks import Quadratic, WeightedQuadratics

QUICK = {"p": "2", "d": "2", "clients": "2"}


def ask(trials: int, **options: Any) -> Tuning:
    settings = {**QUICK, **options.pop("settings", {})}
    vary = options.pop("vary", {})
    return Tuning(
        Experiment("quadratic", **{"algorithm": "fedbio", "rounds": 18, **options}, settings=settings), trials, vary
    )


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "trials.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quadratic task with metrics, a picture and references that must not be looked at."""

    def metrics(x: Any, y: Any) -> Any:
        raise AssertionError("the metrics were evaluated")

    make = fb.TASKS["quadratic"]

    def spoiled(clients: int = 2, p: int = 2, d: int = 2, seed: int = 0) -> fb.Task:
        return replace(make(clients=clients, p=p, d=d, seed=seed), metrics=metrics)

    monkeypatch.setitem(plugins.OURS, "task", Names("task", {"quadratic": spoiled}))


@pytest.mark.usefixtures("never_measured")
def test_tuning_looks_at_the_validation_loss_only(tmp_path: Path) -> None:
    seen: list[tuple[int, int, float | None]] = []
    tuned = tune(ask(9), tmp_path / "t", lambda *now: seen.append(now))
    assert [now[:2] for now in seen] == [(n, 9) for n in range(10)]
    with pytest.raises(AssertionError, match="were evaluated"):
        fb.solve(Experiment("quadratic", "fedbio", settings=QUICK).build().task, fb.FedBiO(), rounds=1)

    # The first trial is the suggested setting, and the best is not worse.
    table = rows(tuned.folder)
    assert len(table) == len(tuned.trials) == 9
    assert (table[0]["state"], float(table[0]["lr_upper"]), float(table[0]["lr_lower"])) == ("complete", 0.1, 0.2)
    assert tuned.best.value <= tuned.suggested.value
    assert {trial.state for trial in tuned.trials} <= {"complete", "pruned", "diverged"}
    assert all(t.rounds < 18 for t in tuned.trials if t.state == "pruned")
    assert tuned.summary["complete"] + tuned.summary["pruned"] + tuned.summary["diverged"] == 9
    assert sum(tuned.importance.values()) == pytest.approx(1)
    assert (tuned.folder / "importance.png").stat().st_size > 1000

    # The best setting is a whole experiment, with the loss that was found.
    config = tomllib.loads((tuned.folder / "best.toml").read_text())
    assert config["task"] | {"name": "quadratic", "clients": 2} == config["task"]
    assert {"rounds": 18, "seed": 0, "sample": "everyone"}.items() <= config["run"].items()
    hyper = {k: v for k, v in config["algorithm"].items() if k != "name"}
    task = Quadratic.random(clients=2, p=2, d=2, seed=0).task()
    result = fb.solve(task, fb.FedBiO(**hyper), rounds=18, diagnostics=["upper_loss"], metrics=False)
    assert result.metrics["upper_loss"] == pytest.approx(tuned.best.value, rel=1e-9)


def test_a_search_goes_on_where_it_was(tmp_path: Path) -> None:
    """Three trials and then three more are six at once; other questions are refused."""
    tune(ask(3), tmp_path / "a")
    tune(ask(6), tmp_path / "a")
    tune(ask(6), tmp_path / "b")
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert rows(tmp_path / "a") != rows(tune(ask(6, seed=1), tmp_path / "c").folder)
    with pytest.raises(fb.FedbilevelError, match="contains another search"):
        tune(ask(6, rounds=20), tmp_path / "a")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing").touch()
    with pytest.raises(fb.FedbilevelError, match="is not empty"):
        tune(ask(1), tmp_path / "full")


def test_what_is_searched() -> None:
    def space(task: str, algorithm: str, vary: Any = {}, **settings: str) -> Any:  # noqa: B006
        return search_space(Experiment(task, algorithm, settings=settings).build(), settings, vary)

    found = space("quadratic", "fedbioacc", {"local_steps": "1, 4", "shared_batch": "yes"}, lr_adjoint="0.3")
    assert found["lr_upper"] == Range(pytest.approx(0.1 / 30), pytest.approx(3), 0.1)  # suggested
    assert found["c_upper"] == Range(0.001, 1, 0.2)  # the algorithm's own
    assert "lr_adjoint" not in found  # fixed
    assert "radius" not in found
    assert found["local_steps"] == Choice((1, 4), 1)
    assert found["shared_batch"] == Choice((False, True), False)
    assert "c_upper" not in space("regularization", "fedbioacc")  # suggested as 0
    assert isinstance(space("quadratic", "mefbo")["lr_lower"], Range)  # the scale of a schedule
    with pytest.raises(fb.FedbilevelError, match="there is no hyper-parameter of fedbio called 'local_step'"):
        space("quadratic", "fedbio", {"local_step": "1"})
    with pytest.raises(fb.FedbilevelError, match="local_steps must be at least 1"):
        space("quadratic", "fedbio", {"local_steps": "0"})


def test_a_search_may_begin_elsewhere_and_go_over_given_ranges(tmp_path: Path) -> None:
    ranges = {"lr_upper": (0.02, 0.05), "of_other_algorithms": (0.1, 1.0)}
    asked = replace(ask(5, rounds=9), ranges=ranges, start={"lr_upper": 0.03, "lr_lower": 0.11})
    tuned = tune(asked, tmp_path / "t")
    assert tuned.suggested.settings == {**tuned.suggested.settings, "lr_upper": 0.03, "lr_lower": 0.11}
    assert len({trial.settings["lr_upper"] for trial in tuned.trials}) == 5
    assert all(0.02 <= trial.settings["lr_upper"] <= 0.05 for trial in tuned.trials)
    assert tuned.space["lr_lower"] == Range(pytest.approx(0.11 / 30), pytest.approx(0.11 * 30), 0.11)
    outside = tune(replace(asked, start={"lr_upper": 0.5}), tmp_path / "u")  # the range reaches to its start
    assert outside.space["lr_upper"] == Range(0.02, 0.5, 0.5)
    with pytest.raises(fb.FedbilevelError, match="there is no hyper-parameter of fedbio called 'lr'"):
        tune(replace(asked, start={"lr": 0.5}), tmp_path / "v")


def test_a_grid_is_tried_at_every_point_to_its_end(tmp_path: Path) -> None:
    grid = {"lr_upper": [0.1, 0.001], "lr_lower": [0.05, 0.5]}
    experiment = Experiment("quadratic", "mefbo", rounds=18, settings=QUICK)  # whose steps are schedules
    tuned = tune(Tuning.on_grid(experiment, grid), tmp_path / "t")
    whole = tune(replace(ask(9), prune=False), tmp_path / "all")  # without a grid, too; some would be given up else
    assert {trial.state for trial in whole.trials} == {"complete"}
    assert "pruned" in {trial.state for trial in tune(ask(9), tmp_path / "some").trials}
    points = [(trial.settings["lr_upper"].scale, trial.settings["lr_lower"].scale) for trial in tuned.trials]
    assert sorted(points) == [(0.001, 0.05), (0.001, 0.5), (0.1, 0.05), (0.1, 0.5)]
    assert all(set(trial.settings) == set(grid) for trial in tuned.trials)
    assert not any(trial.state == "pruned" for trial in tuned.trials)
    with pytest.raises(fb.FedbilevelError, match="there is no hyper-parameter of mefbo called 'lr'"):
        tune(Tuning.on_grid(experiment, {"lr": [1.0]}), tmp_path / "u")


def test_settings_that_diverge_or_make_no_sense_are_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbilevel.runs.search_space.AROUND", 1e30)
    tuned = tune(ask(6, rounds=200), tmp_path / "t")
    wild = [trial for trial in tuned.trials if trial.state == "diverged"]
    assert wild
    assert all("became NaN or infinite" in trial.failure and math.isnan(trial.value) for trial in wild)
    assert math.isfinite(tuned.best.value)
    with pytest.raises(fb.FedbilevelError, match=r"no trial finished; the first one failed with: round \d+"):
        tune(ask(2, rounds=400, settings={"lr_lower": "1e6"}), tmp_path / "none")


def test_choices_and_schedules_are_tuned(tmp_path: Path) -> None:
    tuned = tune(ask(5, algorithm="mefbo", rounds=9, vary={"local_steps": "1,2"}), tmp_path / "t")
    assert {row["local_steps"] for row in rows(tuned.folder)} == {"1", "2"}
    config = tomllib.loads((tuned.folder / "best.toml").read_text())["algorithm"]
    assert fb.schedules.parse(config["lr_upper"]) == tuned.best.settings["lr_upper"]


def test_a_y_that_belongs_to_a_batch_has_no_validation_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Quadratic.random(clients=2, p=2, d=2).local().task()
    task = replace(made, problem=replace(made.problem, needs=(("restart", True),)))
    monkeypatch.setitem(plugins.OURS, "task", Names("task", {"own": lambda: task}))
    with pytest.raises(fb.FedbilevelError, match="in own, y belongs to a batch"):
        tune(Tuning(Experiment("own", "fedbio-local", settings={"restart": "yes", "shared_batch": "yes"})))


def test_a_task_may_say_what_parameters_are_chosen_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The best trial has the least of it, whatever the upper loss is."""
    made = Quadratic.random(clients=2, p=2, d=2).task()
    task = replace(made, choice=lambda x, y: float(np.sum(np.asarray(x) ** 2)))
    monkeypatch.setitem(plugins.OURS, "task", Names("task", {"own": lambda: task}))
    tuned = tune(Tuning(Experiment("own", "fedbio", 9, settings={"local_steps": "1"}), 5), tmp_path / "found")
    for trial in (t for t in tuned.trials if t.state == "complete"):
        result = fb.solve(task, fb.FedBiO(local_steps=1, **trial.settings), 9, metrics=False)
        assert trial.value == pytest.approx(float(np.sum(np.asarray(result.x) ** 2)), rel=1e-6)
    assert tuned.best.value == min(t.value for t in tuned.trials if t.state == "complete")


@pytest.mark.parametrize("at_server", [False, True])
def test_held_out_rows_are_compared_by_and_not_trained_on(at_server: bool) -> None:
    """Every row is a number of its own: those seen and those held out are all, and the choice is the loss on the
    latter.
    """
    loss = lambda x, y, batch: jnp.mean((batch["a"] - y) ** 2) + 0 * x
    table = np.arange(100.0)
    rows = lambda *index: {"a": Lookup(table, np.array(index))}
    val = [rows(3, 4, 5, 6), rows(7, 8)]
    problem = fb.Problem(loss, loss, lambda key: (0.0, 0.0))
    train = [{"train": rows(0, 1)}, {"train": rows(1, 2, 9)}]
    if at_server:
        task = fb.Task(problem, train, server=val[0], batch_size=1)
        weights, before = [1.0], val[:1]
    else:
        clients = [{**client, "val": some} for client, some in zip(train, val, strict=True)]
        task = fb.Task(problem, clients, weights="size", batch_size=1)
        weights, before = [0.4, 0.6], val
    changed = hold_out(task, 0.5)
    after = [changed.server] if at_server else [client["val"] for client in changed.clients]
    apart = [set(old["a"].index) - set(new["a"].index) for old, new in zip(before, after, strict=True)]
    assert [len(left) for left in apart] == [2, 1][: len(before)]
    assert all(set(new["a"].index) < set(old["a"].index) for old, new in zip(before, after, strict=True))
    assert changed.choice is not None
    expected = sum(w * np.mean((table[list(left)] - 2.0) ** 2) for w, left in zip(weights, apart, strict=True))
    assert changed.choice(0.0, 2.0) == pytest.approx(expected)
    assert [client["train"] for client in changed.clients] == [client["train"] for client in task.clients]
    assert hold_out(changed, 0.9) is changed  # a choice of its own
    assert hold_out(task, 0.0) is task
    with pytest.raises(fb.FedbilevelError, match="share of the validation rows"):
        hold_out(task, 1.0)


def test_what_cannot_be_tuned() -> None:
    with pytest.raises(fb.FedbilevelError, match="nothing to tune"):
        tune(ask(1, algorithm="fedavg", settings={"lr_lower": "0.1"}))
    with pytest.raises(fb.FedbilevelError, match="trials must be at least 1"):
        tune(ask(0))


def test_upper_loss_is_the_weighted_mean_over_all_rows() -> None:
    """Clients of different sizes, with weights; every client's own y; the server's rows."""
    loss = lambda x, y, batch: jnp.mean((batch - y) ** 2) + x
    val = [np.array([1.0, 2.0]), np.array([4.0, 5.0, 9.0])]
    clients = [{"train": rows, "val": rows} for rows in val]
    problem = fb.Problem(loss, loss, lambda key: (0.0, 0.0))
    task = fb.Task(problem, clients, weights=[1, 3], batch_size=1)
    mean = lambda rows, y: np.mean((rows - y) ** 2)
    expected = 0.25 * mean(val[0], 2.0) + 0.75 * mean(val[1], 2.0) + 7
    assert fb.diagnostics.upper_loss(task, 7.0, 2.0) == pytest.approx(expected)
    own = replace(task, problem=replace(problem, lower_level="local"))
    expected = 0.25 * mean(val[0], 2.0) + 0.75 * mean(val[1], 3.0) + 7
    assert fb.diagnostics.upper_loss(own, 7.0, np.array([2.0, 3.0])) == pytest.approx(expected)
    w = WeightedQuadratics.random(clients=3, d=2)
    at_server = fb.Task(problem, [{"train": rows} for rows in val], server=val[1], batch_size=1)
    assert fb.diagnostics.upper_loss(at_server, 7.0, 2.0) == pytest.approx(mean(val[1], 2.0) + 7)
    assert math.isfinite(fb.diagnostics.upper_loss(w.task(), np.full(3, 1 / 3), np.ones(2)))


def command(*arguments: str) -> list[str]:
    settings = [part for key, value in QUICK.items() for part in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "fedbilevel", "tune", "quadratic", "--algorithm", "fedbio", *settings, *arguments]


@pytest.mark.slow
def test_a_killed_search_goes_on(tmp_path: Path) -> None:
    """kill -9 in the middle; the same command then ends with all trials, the suggested one first."""
    search = command("--trials", "2000", "--rounds", "9", "--out", "here")
    killed = subprocess.Popen(search, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def trials() -> int:
        try:
            with sqlite3.connect(f"file:{tmp_path / 'here' / 'study.db'}?mode=ro", uri=True) as database:
                return database.execute("select count(*) from trials").fetchone()[0]
        except sqlite3.OperationalError:  # there is no study yet
            return 0

    end = time.monotonic() + 120
    while trials() < 3 and killed.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    _, said = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, said
    assert trials() >= 3
    before = trials()
    done = subprocess.run(
        command("--trials", str(before + 2), "--rounds", "9", "--out", "here", "--json"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["complete"] + summary["pruned"] + summary["diverged"] == before + 2
    assert summary["validation_loss"] <= summary["validation_loss_suggested"]
    assert float(rows(tmp_path / "here")[0]["lr_upper"]) == 0.1


def test_without_optuna_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "optuna.py").write_text("raise ImportError")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    search = command("--trials", "1")
    done = subprocess.run(search, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 2
    assert done.stderr == "fedbilevel: tuning needs Optuna: pip install 'fedbilevel[tune]'.\n"


def test_what_is_tied_is_a_sum_of_others(tmp_path: Path) -> None:
    tuned = tune(replace(ask(5), tied={"lr_adjoint": {"lr_lower": 0.5, "lr_upper": 0.1}}), tmp_path / "t")
    assert set(tuned.space) == {"lr_upper", "lr_lower"}
    assert len({trial.settings["lr_lower"] for trial in tuned.trials}) > 1
    summed = lambda settings: 0.5 * settings["lr_lower"] + 0.1 * settings["lr_upper"]
    for trial in tuned.trials:
        assert trial.settings["lr_adjoint"] == pytest.approx(summed(trial.settings))
    best = tomllib.loads((tuned.folder / "best.toml").read_text())["algorithm"]
    assert best["lr_adjoint"] == pytest.approx(summed(best))
    # What was measured is what is said: the best setting has this loss.
    experiment, task, algorithm, _ = Experiment.read(tuned.folder / "best.toml").build()
    result = fb.solve(task, algorithm, 18, experiment.seed, metrics=False)
    assert validation_loss(task, result.x, result.y) == pytest.approx(tuned.best.value)
    with pytest.raises(fb.FedbilevelError, match="tied to local_steps, which is not tuned"):
        tune(replace(ask(5), tied={"lr_adjoint": {"local_steps": 1.0}}), tmp_path / "u")


def test_a_setting_that_diverges_late_is_in_nobodys_way(tmp_path: Path) -> None:
    """It counts as worst, and those behind it at the test are not given up for it."""
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study()
    float_ = optuna.distributions.FloatDistribution(0.0, 1.0)
    complete, pruned = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED

    def add(state: Any, at_test: float, value: float | None = None, **attributes: str) -> None:
        made = optuna.trial.create_trial(
            state=state, value=value, params={"a": 0.5}, distributions={"a": float_},
            intermediate_values={6: at_test}, user_attrs=attributes,
        )  # fmt: skip
        study.add_trial(made)

    def behind(at_test: float) -> bool:
        trial = study.ask()
        trial.report(at_test, 6)
        said = search_memory.behind(trial, 6)
        study.tell(trial, state=optuna.trial.TrialState.FAIL)  # so that it does not count for the next one
        return said

    assert not behind(9.0)  # the first one
    add(complete, 0.1, float("inf"), failure="round 8: NaN.")
    add(complete, 0.5, 0.4)
    for value in (0.6, 0.7, 0.8):
        add(pruned, value)
    assert not behind(0.4)
    assert behind(0.55)
    add(pruned, 0.9)
    assert not behind(0.55)  # the second of six


def test_two_processes_do_not_search_in_one_folder(tmp_path: Path) -> None:
    tune(ask(2), tmp_path / "t")
    with (tmp_path / "t" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(fb.FedbilevelError, match="another process is using"):
            tune(ask(3), tmp_path / "t")
