"""Regularisation of each feature: the losses, the split, the bilevel optimum against numpy, and a run."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms import FedBiO
from fedbilevel.report import terminal as report
from fedbilevel.runs.execute import run
from fedbilevel.runs.experiment import Experiment
from fedbilevel.tasks import regularization
from fedbilevel.tasks.regularization import GRID

SMALL: dict[str, Any] = {"data": "breast-cancer", "clients": 3, "noise_features": 2}


def stacked(task: fb.Task, part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows of all clients with a column of ones, their labels, and their weights in the mean over clients."""
    rows = [client[part] for client in task.clients]
    inputs = np.concatenate([each["features"] for each in rows]).astype(float)
    weights = np.concatenate([np.full(len(each["label"]), 1 / len(each["label"]) / len(rows)) for each in rows])
    return np.c_[inputs, np.ones(len(inputs))], np.concatenate([each["label"] for each in rows]), weights


def newton(task: fb.Task, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lower solution (the bias last) and the Hessian there."""
    inputs, labels, weights = stacked(task, "train")
    strength = np.diag(np.append(2 * np.exp(x), 0))
    w, hessian = np.zeros(inputs.shape[1]), strength
    for _ in range(30):
        p = 1 / (1 + np.exp(-inputs @ w))
        hessian = (inputs.T * (weights * p * (1 - p))) @ inputs + strength
        w = w - np.linalg.solve(hessian, inputs.T @ (weights * (p - labels)) + strength @ w)
    return w, hessian


def hypergradient(task: fb.Task, x: np.ndarray) -> np.ndarray:
    w, hessian = newton(task, x)
    inputs, labels, weights = stacked(task, "val")
    u = np.linalg.solve(hessian, inputs.T @ (weights * (1 / (1 + np.exp(-inputs @ w)) - labels)))
    return -2 * np.exp(x) * w[:-1] * u[:-1]


def test_losses_are_those_of_the_formulas() -> None:
    task = regularization(**SMALL)
    rng = np.random.default_rng(0)
    x, w, b = rng.normal(size=32) - 3, rng.normal(size=32), 0.3
    rows = {name: column[:5] for name, column in task.clients[1]["train"].items()}
    y = {"weights": w, "bias": np.array(b)}
    z = rows["features"] @ w + b
    loss = np.mean([np.log(1 + np.exp(-v if label else v)) for v, label in zip(z, rows["label"], strict=True)])
    assert float(task.problem.upper(x, y, rows)) == pytest.approx(loss)
    assert float(task.problem.lower(x, y, rows)) == pytest.approx(loss + sum(np.exp(x) * w**2))


def test_the_run_ends_at_the_bilevel_optimum() -> None:
    """Lower level by Newton's method, hypergradient by implicit differentiation, both in numpy."""
    task = regularization(**SMALL, weakest=0.01, untuned=0.01)  # the weaker, the worse the condition, the slower
    low, high = np.log(0.01), np.log(1.0)
    start = np.full(32, np.log(0.03))
    expected = hypergradient(task, start)
    found = jax.tree.leaves(fb.diagnostics.hypergradient(task, start))[0]
    np.testing.assert_allclose(found, expected, atol=1e-9)
    result = fb.solve(task, FedBiO(lr_upper=5.0, lr_lower=0.6, lr_adjoint=0.6, local_steps=1), 5000, every=5000)
    x = np.asarray(result.x)
    moved = lambda x: np.abs(x - np.clip(x - hypergradient(task, x), low, high)).max()
    assert moved(x) < 1e-4 < 0.1 * moved(start)
    np.testing.assert_allclose(result.y["weights"], newton(task, x)[0][:-1], atol=0.02)
    assert result.metrics["validation_loss"] < fb.diagnostics.objective(task, start)


def test_split_is_stratified_and_nothing_serves_twice() -> None:
    tasks = [regularization(data="breast-cancer", clients=5, seed=seed) for seed in (0, 1)]
    task = tasks[0]
    rows = np.concatenate([client[part]["features"] for client in task.clients for part in ("train", "val")])
    assert len(np.unique(rows, axis=0)) == len(rows) < 569
    for client in task.clients:
        sizes = [len(client[part]["label"]) for part in ("train", "val")]
        assert abs(sizes[0] - 57) <= 2
        assert abs(sizes[1] - 28) <= 2
        assert abs(client["train"]["label"].mean() - client["val"]["label"].mean()) < 0.05
    train = np.concatenate([client["train"]["features"] for client in task.clients])
    np.testing.assert_allclose(train.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(train.std(0), 1, atol=1e-5)
    assert not np.array_equal(task.clients[0]["train"]["features"], tasks[1].clients[0]["train"]["features"])


def test_hospitals() -> None:
    task = regularization()
    sizes = [[len(client[part]["label"]) for part in ("train", "val")] for client in task.clients]
    assert sizes == [[152, 75], [147, 74], [62, 30], [100, 50]]
    assert int((task.clients[2]["val"]["label"] == 0).sum()) == 2  # of the 8 healthy patients of Switzerland
    assert task.clients[0]["train"]["features"].shape[1] == 22
    for client in task.clients:
        assert np.isfinite(client["train"]["features"]).all()
    metrics = task.metrics
    assert metrics is not None
    seen = metrics(None, {"weights": np.zeros(22), "bias": 0.0})
    assert seen["auc"] == seen["auc_va"] == seen["auc_cleveland"] == 0.5
    assert seen["validation_loss"] == pytest.approx(np.log(2))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"data": "heart"}, "did you mean 'heart-disease'"),
        ({"clients": 5}, "4 hospitals, not 5"),
        ({**SMALL, "train": 0.8}, "leave a rest"),
        ({**SMALL, "weakest": 0.1}, "between weakest and strongest"),
        ({**SMALL, "noise_features": -1}, "not be negative"),
        ({**SMALL, "clients": 0}, "at least one client"),
        ({**SMALL, "clients": 200}, "too few to split"),
    ],
)
def test_impossible_options_are_refused(options: Any, sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=sentence):
        regularization(**options)


def test_run_folder(tmp_path: Path) -> None:
    settings = {name: str(value) for name, value in SMALL.items()}
    finished = run(Experiment("regularization", rounds=2, settings=settings), out=tmp_path / "run")
    report.pictures(finished)
    assert report.table(finished).row_count == 3
    assert report.details(finished).row_count == 4
    names = {path.name for path in finished.folder.iterdir()}
    assert {"picture.png", "curves.png", "details.csv", "features.csv"} <= names
    lines = (finished.folder / "features.csv").read_text().splitlines()
    assert len(lines) == 33
    assert lines[1].startswith("mean radius,")
    assert lines[-1].startswith("noise 2,")
    grid = finished.references["grid"]
    assert min(abs(np.exp(float(grid.x[0])) - strength) for strength in GRID) < 1e-6


@pytest.mark.slow
def test_noise_is_regularised_away(tmp_path: Path) -> None:
    """With 20 columns of noise, one strength for each feature does better than a shared one, on the mean of 5 seeds."""
    better, stronger = [], []
    for seed in range(5):
        finished = run(
            Experiment("regularization", seed=seed, settings={"noise_features": "20"}), out=tmp_path / str(seed)
        )
        better.append(finished.result.metrics["auc"] - finished.references["grid"].metrics["auc"])
        strength = np.exp(np.asarray(finished.result.x))
        stronger.append(np.median(strength[22:]) / np.median(strength[:22]))
        assert (
            finished.result.metrics["validation_loss"] < finished.references["grid"].metrics["validation_loss"] - 0.02
        )
    assert np.mean(better) > 0.01
    assert np.median(stronger) > 3  # not on every split: noise can fit the validation rows by chance
