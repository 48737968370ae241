"""The main task, as a user runs it: in single precision, through the command line."""

import csv
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import fedbilevel as fb
from fedbilevel.data import corrupt


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, dict[str, Any]]]:
    """Seeds 0, 1, 2."""
    done = []
    for seed in range(3):
        folder = tmp_path_factory.mktemp("runs") / f"seed{seed}"
        command = [
            sys.executable,
            "-m",
            "fedbilevel",
            "run",
            "data-cleaning",
            "--seed",
            str(seed),
            "--out",
            str(folder),
            "--json",
        ]
        output = subprocess.run(command, capture_output=True, text=True, check=True)
        done.append((folder, json.loads(output.stdout.splitlines()[-1])))
    return done


def test_cleaning_recovers_most_of_the_gap(runs: list[tuple[Path, dict[str, Any]]]) -> None:
    mean = {
        key: np.mean([summary[key] for _, summary in runs])
        for key in ("accuracy", "accuracy_noisy", "accuracy_clean", "auc")
    }
    assert mean["accuracy_clean"] > mean["accuracy_noisy"] + 0.03  # there is something to recover
    assert mean["accuracy"] - mean["accuracy_noisy"] >= 0.5 * (mean["accuracy_clean"] - mean["accuracy_noisy"])
    assert mean["auc"] >= 0.9
    for _, summary in runs:
        assert {"rounds", "megabytes", "seconds"} <= set(summary)


def test_everything_is_in_the_folder(runs: list[tuple[Path, dict[str, Any]]]) -> None:
    folder, summary = runs[0]
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.toml", "metrics.jsonl", "suspects.csv", "state.safetensors", "curves.png"}
    config = tomllib.loads((folder / "config.toml").read_text())
    assert config["task"]["corruption"] == 0.4
    assert config["algorithm"]["name"] == "fedbioacc"
    assert config["run"] == {"rounds": 200, "seed": 0, "sample": "everyone"}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {row["run"] for row in rows} == {"noisy", "clean", "fedbioacc"}
    assert rows[-1]["accuracy"] == summary["accuracy"]
    state = load_file(folder / "state.safetensors")
    assert state["x"].shape == (10, 110)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_suspects_are_mostly_wrong_labels(runs: list[tuple[Path, dict[str, Any]]]) -> None:
    with (runs[0][0] / "suspects.csv").open() as file:
        suspects = list(csv.DictReader(file))
    wrong = [row["really_wrong"] == "yes" for row in suspects]
    assert np.mean(wrong) > 0.9
    assert np.sum(wrong) > 0.9 * 0.4 * 1097
    for client in range(10):
        weights = [float(row["weight"]) for row in suspects if row["client"] == str(client)]
        assert weights == sorted(weights)


def test_no_client_can_clean_alone() -> None:
    """Every client's validation images are of one class, and of different classes."""
    task = fb.tasks.data_cleaning()
    classes = [set(client["val"]["label"].tolist()) for client in task.clients]
    assert classes == [{k} for k in range(10)]


def test_no_image_serves_twice() -> None:
    task = fb.tasks.data_cleaning(test=500)
    seen = np.concatenate([client[split]["image"] for client in task.clients for split in ("train", "val")])
    assert len(np.unique(seen, axis=0)) == len(seen) == 1797 - 500


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
    ],
)
def test_impossible_options_are_refused(options: Any, sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=sentence):
        fb.tasks.data_cleaning(**options)
