"""Loss tuning: the losses, the long tail, the balance, and the default run."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.report import terminal as report
from fedbilevel.runs.execute import run
from fedbilevel.runs.experiment import Experiment
from fedbilevel.tasks.loss_tuning import loss_tuning
from helpers import real

TINY: dict[str, Any] = {"data": "digits", "clients": 4, "hidden": 8, "layers": 2, "ratio": 0.2, "batch_size": 16}


def labels(task: fb.Task, split: str) -> np.ndarray:
    return np.concatenate([client[split]["label"] for client in task.clients])


def test_losses_are_those_of_the_paper() -> None:
    task = loss_tuning(**TINY, rc=0.01)
    _, y = (v.tree for v in task.problem.start(jax.random.key(0)))
    rng = np.random.default_rng(0)
    x = {"omega": rng.uniform(0, 2, 10), "delta": rng.uniform(0, 2, 10), "tau": rng.normal(size=10)}
    table = task.clients[0]["train"]["image"].table
    label = np.array([3, 1, 4, 1, 5])
    batch = {"image": table[:5], "label": label}
    pixels = (table[:5].reshape(5, 64) - table.mean()) / table.std()
    hidden = np.maximum(pixels @ np.asarray(y[0]["w"]) + np.asarray(y[0]["b"]), 0)
    h = hidden @ np.asarray(y[1]["w"]) + np.asarray(y[1]["b"])
    counted = np.bincount(labels(task, "val"), minlength=10)
    weight = counted.sum() / (10 * counted)

    def scaled(omega: Any, delta: Any, tau: Any) -> float:
        share = np.exp(delta * h + tau)
        share /= share.sum(1, keepdims=True)
        return float(np.mean(-omega[label] * np.log(share[np.arange(5), label])))

    norm = sum(float(np.sum(np.square(a))) for a in jax.tree.leaves(y))
    assert task.problem.lower(x, y, batch) == pytest.approx(scaled(**x) + 0.01 * norm, rel=1e-9)
    assert task.problem.upper(x, y, batch) == pytest.approx(scaled(weight, 1, 0), rel=1e-9)


def test_at_the_start_the_loss_is_the_plain_one() -> None:
    task = loss_tuning(**TINY)
    x, _ = task.problem.start(jax.random.key(0))
    plain = task.shown.references[0].x
    assert {name: value.tolist() for name, value in x.tree.items()} == {k: v.tolist() for k, v in plain.items()}
    low = task.problem.nearest(fb.vectors.Vector({k: v - 3 for k, v in x.tree.items()}, "x")).tree
    assert (low["omega"].max(), low["delta"].max(), low["tau"].max()) == (0, 0, -3)


@pytest.mark.parametrize("partition", ["iid", "non-iid"])
def test_the_tail_is_long_and_no_image_serves_twice(partition: str) -> None:
    task = loss_tuning(**TINY, partition=partition)
    index = [client[split]["image"].index for client in task.clients for split in ("train", "val")]
    assert len(np.unique(np.concatenate(index))) == sum(map(len, index))
    sizes = np.bincount(np.concatenate([labels(task, "train"), labels(task, "val")]), minlength=10)
    every = np.bincount(task.clients[0]["train"]["label"], minlength=10)
    assert sizes[9] / sizes[0] == pytest.approx(0.2, rel=0.3)  # classes of the digits differ a little in size
    assert (every > 0).all() == (partition == "iid")
    share = np.bincount(labels(task, "train"), minlength=10) / len(labels(task, "train"))
    weights, prior = (reference.x for reference in task.shown.references[1:])
    np.testing.assert_allclose(weights["omega"] * share, 0.1)
    np.testing.assert_allclose(np.exp(prior["tau"]), share)


@real
def test_the_long_tail_of_mnist_is_fednests() -> None:
    """About 6000 images of class 0 and 60 of class 9, a fifth of them for validation."""
    task = loss_tuning(partition="non-iid")
    sizes = np.bincount(np.concatenate([labels(task, "train"), labels(task, "val")]), minlength=10)
    expected = np.array([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]) * 0.01 ** (np.arange(10) / 9)
    np.testing.assert_allclose(sizes, expected, atol=0.51)
    assert len(labels(task, "val")) == pytest.approx(0.2 * sizes.sum(), rel=0.03)


def test_a_run_leaves_everything(tmp_path: Path) -> None:
    settings = {k: str(v) for k, v in TINY.items()}
    finished = run(Experiment("loss-tuning", rounds=2, settings=settings), out=tmp_path / "run")
    report.pictures(finished)
    assert (tmp_path / "run/picture.png").read_bytes().startswith(b"\x89PNG")
    assert report.table(finished).row_count == 4
    assert report.details(finished).row_count == 10
    with (tmp_path / "run/details.csv").open() as file:
        rows = list(csv.DictReader(file))
    tuned = [float(row["tuned"]) for row in rows]
    assert np.mean(tuned) == pytest.approx(finished.summary["accuracy"])
    assert np.min(tuned) == pytest.approx(finished.summary["worst"])
    assert [float(row["omega"]) for row in rows] == pytest.approx(finished.result.x["omega"].tolist())
    assert np.any(finished.result.x["tau"] != 0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"data": "digit"}, "data set for loss-tuning.*did you mean 'digits'"),
        ({"partition": "shards"}, "partition for loss-tuning"),
        ({"ratio": 0.0}, "ratio of a long tail"),
        ({"ratio": 0.001}, "no validation image: take a larger ratio|no training image: take a larger ratio"),
        ({"validation": 0.0}, "validation is a share"),
        ({"clients": 0}, "at least 1"),
        ({"rc": -1.0}, "not negative"),
    ],
)
def test_impossible_options_are_refused(options: Any, sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=sentence):
        loss_tuning(**{**TINY, **options})


@real
@pytest.mark.slow
def test_the_default_run(tmp_path: Path) -> None:
    """On seed 0: balanced accuracy 0.918 with the tuned loss, 0.887 with the plain one; the tail is favoured."""
    command = [sys.executable, "-m", "fedbilevel", "run", "loss-tuning", "--json", "--out", str(tmp_path / "run")]
    output = subprocess.run(command, capture_output=True, text=True, check=True)
    summary = json.loads(output.stdout.splitlines()[-1])
    assert summary["accuracy"] > 0.9
    assert summary["accuracy"] > summary["accuracy_plain"] + 0.015
    with (tmp_path / "run/details.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[9]["omega"]) > 1 > float(rows[0]["omega"])
    assert float(rows[9]["tau"]) < 0 < float(rows[0]["tau"])
