"""Hyper-representation: the losses, who has what, the references, and the default run."""

import csv
import dataclasses
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
from fedbilevel.report import terminal as report
from fedbilevel.runs.execute import run
from fedbilevel.runs.experiment import Experiment
from fedbilevel.tasks.hyper_representation import Jointly, hyper_representation
from helpers import real

TINY: dict[str, Any] = {"data": "digits", "clients": 6, "hidden": 8, "batch_size": 16}


def indices(task: fb.Task) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(client["train"]["image"].index, client["val"]["image"].index) for client in task.clients]


def test_losses_are_those_of_the_paper() -> None:
    task = hyper_representation(**TINY)
    x, y = (v.tree for v in task.problem.start(jax.random.key(0)))
    table = task.clients[0]["train"]["image"].table
    assert table.dtype == np.uint8
    assert all(c[split]["image"].table is table for c in task.clients for split in ("train", "val"))
    batch = {"image": table[:5], "label": np.array([3, 1, 4, 1, 5])}
    pixels = table[:5].reshape(5, 64) / 255
    pixels = (pixels - table.mean() / 255) / (table.std() / 255)
    hidden = np.maximum(pixels @ np.asarray(x[0]["w"]) + np.asarray(x[0]["b"]), 0)
    logits = hidden @ np.asarray(y["w"]) + np.asarray(y["b"])
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(5), batch["label"]]
    norm = sum(float(np.sum(np.square(a))) for a in y.values())
    assert task.problem.upper(x, y, batch) == pytest.approx(losses.mean(), rel=1e-9)
    assert task.problem.lower(x, y, batch) == pytest.approx(losses.mean() + 0.05 * norm, rel=1e-9)


@pytest.mark.parametrize("partition", ["iid", "non-iid"])
def test_every_image_serves_once(partition: str) -> None:
    task = hyper_representation(**TINY, partition=partition, validation=0.25)
    parts = indices(task)
    everything = np.concatenate([index for part in parts for index in part])
    assert sorted(everything) == list(range(1797 - 500))
    for train, val in parts:
        assert len(val) == pytest.approx(0.25 * (len(train) + len(val)), abs=1)
    classes = [len(set(client["train"]["label"].tolist())) for client in task.clients]
    assert min(classes) == 10 if partition == "iid" else max(classes) < 8


@real
def test_the_partitions_of_mnist_are_fednests() -> None:
    for partition, classes in (("iid", 10), ("non-iid", 4)):
        task = hyper_representation(partition=partition)
        assert {(len(train), len(val)) for train, val in indices(task)} == {(300, 300)}
        assert len(np.unique(np.concatenate([np.concatenate(part) for part in indices(task)]))) == 60_000
        kinds = [len(np.unique(client["train"]["label"])) for client in task.clients]
        assert max(kinds) <= classes
        assert (min(kinds) == 10) == (partition == "iid")


@pytest.mark.slow
def test_joint_training_steps_on_the_mean_of_all_rows() -> None:
    task = dataclasses.replace(hyper_representation(**TINY, rc=0.0, validation=0.25), batch_size=None)
    start = tuple(v.tree for v in task.problem.start(jax.random.key(3)))
    done = fb.solve(task, Jointly(0.5, 1, validation=0.25), 1, 0, x=start[0], y=start[1])

    def mean(z: Any) -> jax.Array:
        rows = [{k: v[:] for k, v in c[s].items()} for c in task.clients for s in ("train", "val")]
        share = np.tile([0.75, 0.25], len(task.clients)) / len(task.clients)
        return sum(jnp.asarray(w) * task.problem.upper(*z, r) for w, r in zip(share, rows, strict=True))  # pyright: ignore

    expected = jax.tree.map(lambda a, slope: a - 0.5 * slope, start, jax.grad(mean)(start))
    for got, want in zip(jax.tree.leaves((done.x, done.y)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-10)


def test_a_run_leaves_everything(tmp_path: Path) -> None:
    settings = {k: str(v) for k, v in TINY.items()}
    finished = run(Experiment("hyper-representation", rounds=2, settings=settings), out=tmp_path / "run")
    report.pictures(finished)
    assert (tmp_path / "run/picture.png").read_bytes().startswith(b"\x89PNG")
    assert report.table(finished).row_count == 3
    assert report.details(finished).row_count == 10
    with (tmp_path / "run/details.csv").open() as file:
        rows = list(csv.DictReader(file))
    shares = [float(row["this run"]) * int(row["test images"]) for row in rows]
    assert sum(shares) / 500 == pytest.approx(finished.summary["accuracy"])
    # The representation stays as it was in the reference without one, and the run starts from the same.
    assert finished.references["random"].history[0]["loss"] == finished.result.history[0]["loss"]
    changed = lambda result: np.max(np.abs(result.x[0]["w"] - finished.references["random"].x[0]["w"]))
    assert changed(finished.references["joint"]) > 0
    assert changed(finished.result) > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"data": "minst"}, "data set for hyper-representation.*did you mean 'mnist'"),
        ({"partition": "noniid"}, "partition for hyper-representation.*did you mean 'non-iid'"),
        ({"validation": 1.0}, "validation is a share"),
        ({"clients": 0}, "at least 1"),
        ({"layers": 1}, "layers at least 2"),
        ({"rc": -1.0}, "not negative"),
        ({"clients": 2000}, "too few for 2000 clients"),
    ],
)
def test_impossible_options_are_refused(options: Any, sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=sentence):
        hyper_representation(**{"data": "digits", **options})


@real
@pytest.mark.slow
def test_the_default_run(tmp_path: Path) -> None:
    """On seed 0: MeFBO 0.965, both layers jointly 0.960, the head alone 0.805."""
    command = [
        sys.executable,
        "-m",
        "fedbilevel",
        "run",
        "hyper-representation",
        "--json",
        "--out",
        str(tmp_path / "run"),
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True)
    summary = json.loads(output.stdout.splitlines()[-1])
    assert summary["accuracy"] > 0.955
    assert summary["accuracy"] > summary["accuracy_random"] + 0.1
    assert summary["accuracy"] > summary["accuracy_joint"] - 0.01
