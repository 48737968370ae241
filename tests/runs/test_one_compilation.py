"""Numbers are arguments of the compiled program: other step sizes compile nothing, whichever way they come."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

import fedbilevel as fb
from fedbilevel.engines.messaging.local import Local
from fedbilevel.engines.messaging.party import TRACED
from fedbilevel.engines.simulation import traces
from fedbilevel.runs import comparison, tuning
from fedbilevel.runs.experiment import Experiment

ONCE = ["start", "advance"]


def test_solve_with_other_numbers_compiles_nothing() -> None:
    """Steps, radii, the numbers of schedules; a whole number, or a radius that becomes infinite, is another program."""
    task = fb.tasks.quadratic("T2")
    first = fb.FedBiOAcc(0.1, 0.2, 0.2, rate="cube_root(1, 8)", local_steps=2, radius=3.0)
    before = len(traces)
    fb.solve(task, first, rounds=3)
    assert traces[before:] == ONCE
    others: list[dict[str, Any]] = [
        {"lr_upper": 0.05},
        {"rate": "cube_root(0.5, 20)"},
        {"radius": 1e-3},
        {"c_upper": 0.1},
    ]
    results = [fb.solve(task, replace(first, **other), rounds=3, seed=seed) for seed, other in enumerate(others)]
    assert traces[before:] == ONCE
    assert len({float(result.x[0]) for result in results}) == len(others)
    for other in ({"local_steps": 3}, {"radius": float("inf")}, {"rate": "power(1, -0.5, 8)"}):
        count = len(traces)
        fb.solve(task, replace(first, **other), rounds=3)
        assert traces[count:] == ONCE, other


def test_clients_of_messages_compile_nothing_either() -> None:
    task = fb.tasks.quadratic("T2")
    for lr in (0.1, 0.05):
        before = sum(TRACED.values())
        engine = Local(task, fb.FedBiO(lr_upper=lr, lr_lower=0.2, lr_adjoint=0.2, local_steps=1))
        engine.advance(engine.start(seed=0), 2)
        compiled = sum(TRACED.values()) - before
    assert compiled == 0


def test_tune_compiles_once(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    before = len(traces)
    experiment = Experiment("quadratic", "fedbio", rounds=6, settings={"d": 3, "local_steps": 1})
    tuned = tuning.tune(tuning.Tuning(experiment, trials=4), tmp_path / "tuned")
    assert len({trial.settings["lr_upper"] for trial in tuned.trials}) == 4
    assert traces[before:] == ONCE


def test_compare_compiles_once_for_all_seeds(tmp_path: Path) -> None:
    before = len(traces)
    asked = comparison.plan("quadratic", "simfbo", 6, range(3), settings={"d": "5"})
    done = comparison.run(asked, tmp_path / "compared", jobs=1)
    assert [member.done for member in done.members] == [True] * 3
    assert traces[before:] == ONCE


def test_an_algorithm_is_a_tree_of_its_numbers() -> None:
    algorithm = fb.FedBiOAcc(rate="cube_root(3, 40)", radius=7.0)
    assert sorted(jax.tree.leaves(algorithm)) == sorted([20.0, 0.5, 0.02, 3.0, 40.0, 0.2, 0.2, 0.2, 7.0])
    assert jax.tree.map(lambda number: number, algorithm) == algorithm
    assert jax.tree.structure(algorithm) == jax.tree.structure(replace(algorithm, lr_upper=1.0))
    assert jax.tree.structure(algorithm) != jax.tree.structure(replace(algorithm, local_steps=2))
    assert len(jax.tree.leaves(replace(algorithm, radius=float("inf")))) == 8
