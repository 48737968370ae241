"""Client weighting on images: the data, the losses, the records; and every algorithm where nobody active counts."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.data import load
from fedbilevel.report import terminal as report
from fedbilevel.runs.execute import run
from fedbilevel.runs.experiment import Experiment
from fedbilevel.tasks import WeightedQuadratics, client_weighting
from fedbilevel.tasks.client_weighting import LABELS
from helpers import real

SMALL = {"data": "digits", "hidden": 4, "batch_size": 8}


def index(rows: Any) -> np.ndarray:
    return np.asarray(rows["image"].index)


def parts(task: fb.Task) -> list[np.ndarray]:
    return [index(client["train"]) for client in task.clients]


def check_labels(task: fb.Task, labels: np.ndarray, random: int) -> None:
    """Three clients with all images of their classes but the server's; the others have random labels."""
    *good, server = *parts(task)[:3], index(task.server)
    np.testing.assert_array_equal(np.sort(np.concatenate([*good, server])), np.arange(len(labels)))
    np.testing.assert_array_equal(np.bincount(labels[server]), np.full(10, 20))
    np.testing.assert_array_equal(task.server["label"], labels[server])
    for client, part, group in zip(task.clients, good, LABELS, strict=False):
        np.testing.assert_array_equal(client["train"]["label"], labels[part])
        assert set(labels[part].tolist()) == set(group)
    assert len(task.clients) == 10
    for client, part in zip(task.clients[3:], parts(task)[3:], strict=True):
        assert len(np.unique(part)) == len(part) == random
        assert not np.isin(part, server).any()
        # The labels do not depend on the image: right for a tenth, and all classes are as frequent.
        agree = np.mean(client["train"]["label"] == labels[part])
        assert abs(agree - 0.1) < 5 * np.sqrt(0.09 / random)
        shares = np.bincount(client["train"]["label"], minlength=10) / random
        assert np.all(np.abs(shares - 0.1) < 5 * np.sqrt(0.09 / random))
    tables = {id(client["train"]["image"].table) for client in task.clients} | {id(task.server["image"].table)}
    assert len(tables) == 1


@real
def test_the_clients_of_the_paper() -> None:
    labels = load("mnist").train.labels
    task = client_weighting()
    check_labels(task, labels, 5000)
    assert [len(part) for part in parts(task)[:3]] == [np.isin(labels, g).sum() - 20 * len(g) for g in LABELS]
    assert task.clients[0]["train"]["image"].table.dtype == np.uint8
    mixed = client_weighting(data="fashion-mnist", partition="iid")
    assert [len(part) for part in parts(mixed)] == [9000] * 10
    assert len(np.unique(np.concatenate([*parts(mixed)[:5], index(mixed.server)]))) == 5 * 9000 + 200


def test_the_clients_of_a_small_set() -> None:
    digits = load("digits").train
    task = client_weighting(data="digits", seed=3)
    table = task.server["image"].table
    assert table.shape == (1297, 8, 8, 1)
    assert table.max() == 255
    # Which digit an image is, found by its pixels: what is trained with and what is tested are different images.
    known = {image.tobytes(): label for image, label in zip(digits.inputs, digits.labels, strict=True)}
    labels = np.array([known[np.rint(image[..., 0] / (255 / 16)).astype(np.uint8).tobytes()] for image in table])
    check_labels(task, labels, 108)
    mixed = client_weighting(data="digits", partition="iid", noisy=2, samples=50)
    assert [len(part) for part in parts(mixed)] == [50] * 7
    assert len(np.unique(np.concatenate(parts(mixed)[:5]))) == 250
    np.testing.assert_allclose(mixed.shown.references[2].x, [0.2] * 5 + [0] * 2)
    np.testing.assert_allclose(client_weighting(**SMALL).shown.references[2].x, [0.5, 0.3, 0.2] + [0] * 7)
    assert client_weighting(**SMALL).problem is client_weighting(**SMALL, seed=4).problem
    other = client_weighting(data="digits", seed=4)
    assert not np.array_equal(other.clients[5]["train"]["label"], task.clients[5]["train"]["label"])


def test_the_losses_and_metrics() -> None:
    task = client_weighting(**SMALL)
    x, y = (vector.tree for vector in task.problem.start(jax.random.key(0)))
    np.testing.assert_allclose(x, np.full(10, 0.1), rtol=1e-6)
    (first, last), (b, c) = ([np.asarray(layer[name]) for layer in y] for name in "wb")
    images, labels = load("digits").train[:2]

    def scores(pixels: np.ndarray) -> np.ndarray:
        return np.maximum(pixels.reshape(len(pixels), -1) @ first + b, 0) @ last + c

    for rows, loss in ((task.clients[4]["train"], task.problem.lower), (task.server, task.problem.upper)):
        few = {"image": rows["image"][:7], "label": rows["label"][:7]}
        z = scores(few["image"] / 255)
        expected = np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(7), few["label"]])
        np.testing.assert_allclose(loss(x, y, jax.tree.map(jnp.asarray, few)), expected, rtol=1e-6)
    # The test images are those that are not in the table of the training images.
    seen = {image.tobytes() for image in task.server["image"].table[..., 0]}
    scaled = np.rint(images * (255 / 16)).astype(np.uint8)
    tested = [n for n, image in enumerate(scaled) if image.tobytes() not in seen]
    assert len(tested) == 500
    says = scores(scaled[tested] / 255).argmax(1)
    weights = np.linspace(0, 0.2, 10)
    assert task.metrics is not None
    measured = task.metrics(weights, y)
    np.testing.assert_allclose(measured["accuracy"], np.mean(says == labels[tested]), atol=1e-9)
    np.testing.assert_allclose(measured["noise_weight"], weights[3:].sum())
    np.testing.assert_allclose([measured[f"weight_{m}"] for m in range(10)], weights)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"data": "mnits"}, "no data set for client-weighting called 'mnits': did you mean 'mnist'"),
        ({"partition": "label"}, "no partition for client-weighting called 'label': did you mean 'labels'"),
        ({"data": "digits", "model": "lenet"}, "no model for client-weighting called 'lenet'"),
        ({"data": "digits", "model": "lenet5"}, "lenet5: images must be 28 x 28 or 32 x 32"),
        ({"noisy": -1}, "noisy, samples, test and seed not negative"),
        ({"validation": 0}, "must be at least 1"),
        ({"data": "digits", "validation": 200}, "validation must be below 1.., the images of the rarest class"),
        ({"data": "digits", "samples": 1200}, "1097 images are too few for a client with 1200"),
        ({"data": "digits", "partition": "iid", "samples": 300}, "1097 images are too few for 5 clients with 300"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=sentence):
        client_weighting(**options)


def test_a_small_run_and_its_records(tmp_path: Path) -> None:
    settings = {name: str(value) for name, value in SMALL.items()}
    finished = run(Experiment("client-weighting", rounds=2, sample="0.5", settings=settings), out=tmp_path / "run")
    report.pictures(finished)
    assert {path.name for path in finished.folder.iterdir()} >= {"picture.png", "curves.png", "details.csv"}
    assert list(finished.references) == ["val", "avg", "opt", "afl"]
    weights = np.asarray(finished.result.x)
    assert abs(weights.sum() - 1) < 1e-6
    assert weights.min() >= 0
    np.testing.assert_allclose(finished.references["opt"].x, [0.5, 0.3, 0.2] + [0] * 7, atol=1e-7)
    np.testing.assert_allclose(finished.references["avg"].x, np.full(10, 0.1), atol=1e-7)
    assert finished.references["val"].metrics["megabytes"] == 0  # the server trains alone
    with (finished.folder / "details.csv").open() as file:
        rows = list(csv.DictReader(file))
    np.testing.assert_allclose([float(row["weight"]) for row in rows], weights, rtol=1e-6)
    assert [row["data"] for row in rows[:4]] == ["classes 0-4", "classes 5-7", "classes 8-9", "random labels"]
    assert report.table(finished).row_count == 5
    assert report.details(finished).row_count == 10


# Everybody who is active has weight 0: there is nothing to train with and no Hessian to invert.

QUADRATICS = WeightedQuadratics.random(clients=4, d=2, seed=0)
GLOBAL = [name for name, kind in ALGORITHMS.items() if kind.lower_level == "global"]
QUICK = ("primal-dual", "afl")  # the others take a while to compile
CASES = [
    *((name, {}) for name in GLOBAL),
    ("gd", {"solver": "dense"}),
    ("rfho", {"mode": "forward"}),
    ("fednest", {"full_series": True}),
    ("sustain", {"full_series": True}),
]


@pytest.fixture(scope="module")
def quadratics() -> fb.Task:
    return QUADRATICS.task()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(*case, marks=() if case[0] in QUICK or case[1].get("solver") else pytest.mark.slow)
        for case in CASES
    ],
    ids=str,
)
def test_nobody_active_has_weight(name: str, options: dict[str, Any], quadratics: fb.Task) -> None:
    start = np.array([1.0, 0, 0, 0])
    result = fb.solve(quadratics, ALGORITHMS[name](**options), rounds=3, sample=[1, 2, 3], x=start)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((result.x, result.y)))
    np.testing.assert_allclose(np.sum(result.x), 1, rtol=1e-9)
    assert np.min(result.x) >= 0
    if name in ("fedavg", "gd", "primal-dual"):  # without a Hessian there is no adjoint, and no step of x
        np.testing.assert_allclose(result.x, start, atol=1e-12)


@real
@pytest.mark.slow
def test_the_default_run(tmp_path: Path) -> None:
    """In single precision, as users run it. Seen with seed 0: weights 0.46, 0.31, 0.23 and 0.003 for the noise; test
    accuracies 0.95 (val 0.86, avg 0.68, opt 0.95), of which the last rounds change one or two hundredths.
    """
    command = [sys.executable, "-m", "fedbilevel", "run", "client-weighting", "--out", str(tmp_path / "run"), "--json"]
    output = subprocess.run(command, capture_output=True, text=True, check=True)
    summary = json.loads(output.stdout.splitlines()[-1])
    assert summary["noise_weight"] < 0.05
    np.testing.assert_allclose([summary[f"weight_{m}"] for m in range(3)], [0.5, 0.3, 0.2], atol=0.08)
    assert summary["accuracy"] > summary["accuracy_val"] + 0.03
    assert summary["accuracy"] > summary["accuracy_avg"] + 0.05
    assert summary["accuracy_opt"] - summary["accuracy"] < 0.05
    assert summary["noise_weight_afl"] > 0.8
