"""The main task, as a user runs it: in single precision, through the command line; then its parts."""

import csv
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import fedbilevel as fb
from fedbilevel.data import corrupt
from fedbilevel.report import terminal as report
from fedbilevel.runs.experiment import Experiment
from helpers import real


def _run(folder: Path, seed: int) -> tuple[Path, dict[str, Any]]:
    command = ["run", "data-cleaning", "--seed", str(seed), "--out", str(folder), "--json"]
    output = subprocess.run([sys.executable, "-m", "fedbilevel", *command], capture_output=True, text=True, check=True)
    return folder, json.loads(output.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The first command of the README."""
    return _run(tmp_path_factory.mktemp("runs") / "seed0", 0)


def _recovers(summaries: list[dict[str, Any]]) -> None:
    mean = {
        key: np.mean([summary[key] for summary in summaries])
        for key in ("accuracy", "accuracy_noisy", "accuracy_clean", "auc")
    }
    assert mean["accuracy_clean"] > mean["accuracy_noisy"] + 0.03  # there is something to recover
    gap = mean["accuracy_clean"] - mean["accuracy_noisy"]
    assert mean["accuracy"] - mean["accuracy_noisy"] >= 0.5 * gap - 1e-9
    assert mean["auc"] >= 0.9
    for summary in summaries:
        assert {"rounds", "megabytes", "seconds"} <= set(summary)


def test_cleaning_recovers_most_of_the_gap(done: tuple[Path, dict[str, Any]]) -> None:
    _recovers([done[1]])


@pytest.mark.slow
def test_cleaning_recovers_most_of_the_gap_on_other_seeds(tmp_path: Path) -> None:
    _recovers([_run(tmp_path / f"seed{seed}", seed)[1] for seed in (1, 2)])


def test_everything_is_in_the_folder(done: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = done
    names = {path.name for path in folder.glob("[!.]*")}
    assert names == {
        "config.toml",
        "records.jsonl",
        "suspects.csv",
        "details.csv",
        "solution.safetensors",
        "checkpoints",
        "run.json",
        "curves.png",
        "picture.png",
    }
    config = tomllib.loads((folder / "config.toml").read_text())
    assert config["task"]["corruption"] == 0.4
    assert config["algorithm"]["name"] == "fedbioacc"
    assert {"rounds": 200, "seed": 0, "sample": "everyone"}.items() <= config["run"].items()
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert {row["run"] for row in rows} == {"noisy", "clean", "fedbioacc", "folds"}
    assert rows[-1]["auc"] == summary["auc_folds"] > summary["auc"]  # better than by the weights
    assert [row for row in rows if row["run"] == "fedbioacc"][-1]["accuracy"] == summary["accuracy"]
    assert load_file(folder / "solution.safetensors")["x"].shape == (10, 110)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_suspects_are_mostly_wrong_labels(done: tuple[Path, dict[str, Any]]) -> None:
    with (done[0] / "suspects.csv").open() as file:
        suspects = list(csv.DictReader(file))
    wrong = [row["really_wrong"] == "yes" for row in suspects]
    assert np.mean(wrong) > 0.9
    assert np.sum(wrong) > 0.9 * 0.4 * 1097
    for client in range(10):
        quality = [float(row["label_quality"]) for row in suspects if row["client"] == str(client)]
        assert quality == sorted(quality)
    weights = np.array([float(row["weight"]) for row in suspects])
    assert np.mean(weights) < 0.2  # the weights of the papers agree


# The task itself, on small pieces ----------------------------------------------------------------------------------


def test_no_client_can_clean_alone() -> None:
    """Every client's validation images are of one class, and of different classes."""
    task = fb.tasks.data_cleaning()
    classes = [set(client["val"]["label"].tolist()) for client in task.clients]
    assert classes == [{k} for k in range(10)]


@pytest.mark.parametrize("options", [{}, {"partition": "shards"}, {"validation_classes": "own"}])
def test_no_image_serves_twice(options: Any) -> None:
    task = fb.tasks.data_cleaning(test=500, **options)
    seen = np.concatenate([client[split]["image"].index for client in task.clients for split in ("train", "val")])
    assert len(np.unique(seen)) == len(seen) == 1797 - 500
    assert len({id(client[split]["image"].table) for client in task.clients for split in ("train", "val")}) == 1


def test_parts_by_shards_have_few_classes_and_validation_images_follow_them() -> None:
    labels = fb.data.load("digits").train.labels
    task = fb.tasks.data_cleaning(partition="shards", validation_classes="own", validation=30, samples=60, clients=5)
    for client in task.clients:
        train, val = (labels[client[split]["image"].index] for split in ("train", "val"))
        assert len(set(train)) <= 6  # a shard is as large as a class, and may lie across borders
        assert set(val) <= set(train)
        assert (len(train), len(val)) == (60, 30)
        assert (client["val"]["label"] == val).all()
        assert np.sum(client["train"]["label"] != train) == 24  # 0.4 of them


def test_uniform_corruption_leaves_some_labels_right() -> None:
    labels = fb.data.load("digits").train.labels
    ranges: Any = {"wrong": (0.8, 0.8), "uniform": (0.68, 0.76)}
    for reading, (least, most) in ranges.items():
        task = fb.tasks.data_cleaning(corruption=0.8, reading=reading, clients=2, seed=3)
        rows = [client["train"] for client in task.clients]
        wrong = np.mean(np.concatenate([one["label"] != labels[one["image"].index] for one in rows]))
        assert least - 0.005 <= wrong <= most + 0.005


@pytest.mark.parametrize("weights", ["sigmoid", "raw"])
def test_losses_are_those_of_the_papers(weights: str) -> None:
    """Against numpy, on all rows of one client: its mean with sigmoids, or its sum with x itself."""
    task = fb.tasks.data_cleaning(weights=weights, hidden=5, layers=3, l2=0.1, clients=8)
    rng = np.random.default_rng(0)
    rows, val = task.clients[7]["train"], task.clients[7]["val"]
    size = len(rows["label"])
    x0, y = task.problem.init(jax.random.key(0))
    full = 1.0 if weights == "sigmoid" else 1 / len(x0)
    np.testing.assert_allclose(jax.nn.sigmoid(x0) if weights == "sigmoid" else x0, full / 2)
    x = rng.normal(size=len(x0))

    def losses(part: Any) -> np.ndarray:
        hidden = part["image"][:].reshape(len(part["label"]), 64)
        for layer in y[:-1]:
            hidden = np.maximum(hidden @ np.asarray(layer["w"]) + np.asarray(layer["b"]), 0)
        logits = hidden @ np.asarray(y[-1]["w"]) + np.asarray(y[-1]["b"])
        return np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), part["label"]]

    assert [layer["w"].shape for layer in y] == [(64, 5), (5, 5), (5, 10)]
    decay = 0.05 * sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(y))
    own = x[:size]
    expected = np.mean(losses(rows) / (1 + np.exp(-own))) if weights == "sigmoid" else np.sum(own * losses(rows))
    batch = {name: column[:] for name, column in rows.items()}
    np.testing.assert_allclose(task.problem.lower(x, y, batch), expected + decay, rtol=1e-5)
    batch = {name: column[:] for name, column in val.items()}
    np.testing.assert_allclose(task.problem.upper(x, y, batch), losses(val).mean(), rtol=1e-5)


def test_raw_weights_stay_between_none_and_full(tmp_path: Path) -> None:
    """A tiny run through the command line's path, with everything that is drawn and written."""
    settings = {"weights": "raw", "hidden": "0", "clients": "22", "validation": "2", "lr_upper": "1"}
    finished = Experiment("data-cleaning", "fedbio", 2, settings=settings).run(tmp_path / "run")
    x = np.asarray(finished.result.x)
    assert x.min() == 0
    np.testing.assert_allclose(x.max(), 1 / x.shape[1])
    report.pictures(finished)
    shown = report.details(finished)
    assert "first 20 clients" in str(shown.title)
    assert shown.row_count == 20
    assert report.table(finished).row_count == 4
    assert {"picture.png", "curves.png", "details.csv", "suspects.csv"} <= {
        p.name for p in (tmp_path / "run").iterdir()
    }
    with (tmp_path / "run" / "suspects.csv").open() as file:
        suspects = list(csv.DictReader(file))
    labels = fb.data.load("digits").train.labels
    for row in suspects[:20]:
        assert (row["really_wrong"] == "yes") == (int(row["given_label"]) != labels[int(row["index"])])


@real
@pytest.mark.parametrize(
    ("data", "model", "samples", "inputs"),
    [("mnist", "mlp", 4500, 784), ("fashion-mnist", "mlp", 80, 784), ("cifar-10", "cnn", 80, 75)],
)
def test_other_images(data: str, model: str, samples: int, inputs: int) -> None:
    task = fb.tasks.data_cleaning(data=data, model=model, samples=samples, test=50)
    rows, val = task.clients[3]["train"], task.clients[3]["val"]
    assert rows["image"].table.dtype == np.uint8
    assert len(rows["label"]) == samples
    assert set(val["label"].tolist()) == {3}
    assert len(val["label"]) == 50
    x, y = jax.eval_shape(task.problem.init, jax.random.key(0))
    assert x.shape == (samples,)
    first = y["conv"][0]["w"] if model == "cnn" else y[0]["w"]
    assert first.size / first.shape[-1] == inputs


@real
@pytest.mark.slow
def test_cleaning_mnist(tmp_path: Path) -> None:
    """What the page says of 80 % wrong labels, in single precision, with some room."""
    command = ["run", "data-cleaning", "--data", "mnist", "--out", str(tmp_path / "run"), "--json"]
    output = subprocess.run([sys.executable, "-m", "fedbilevel", *command], capture_output=True, text=True, check=True)
    summary = json.loads(output.stdout.splitlines()[-1])
    assert summary["auc"] > 0.93  # the page: 0.943
    assert summary["accuracy"] > summary["accuracy_noisy"] + 0.03  # 0.888 and 0.835
    assert summary["accuracy"] < summary["accuracy_clean"]


def test_corruption_is_exact_and_always_wrong() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 1000)
    given, wrong = corrupt(labels, 0.4, 10, np.random.default_rng(1))
    assert wrong.sum() == 400
    assert ((given != labels) == wrong).all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"data": "digit"}, "did you mean 'digits'"),
        ({"corruption": 1.0}, "corruption is a share"),
        ({"clients": 500}, "too few for 500 clients"),
        ({"clients": 0}, "at least 1"),
        ({"test": 1797}, "test below 1797"),
        ({"weights": "rows"}, "weights is 'sigmoid' or 'raw', not 'rows'"),
        ({"partition": "dirichlet"}, "partition is 'iid' or 'shards', not 'dirichlet'"),
        ({"validation_classes": "all"}, "validation_classes is 'one' or 'own'"),
        ({"validation_classes": "own", "validation": 130}, "too few for 10 clients with 130 validation images"),
        ({"model": "cnn"}, r"28 x 28 or 32 x 32.*not \(8, 8, 1\)"),
    ],
)
def test_impossible_options_are_refused(options: Any, sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=sentence):
        fb.tasks.data_cleaning(**options)
