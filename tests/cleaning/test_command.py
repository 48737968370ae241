"""``fedbilevel clean``: what is written, resumed, refused."""

import csv
import json
import signal
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from helpers import INTERRUPTIBLE, fedbilevel, here
from planted import HOSPITALS, as_csv

OPTIONS = ("--label", "outcome", "--client", "hospital", "--trusted", "checked", "--id", "patient")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished search."""
    folder = tmp_path_factory.mktemp("search")
    as_csv(folder)
    assert here("clean", "patients.csv", *OPTIONS, "--out", "found", cwd=folder) == (0, "")
    return folder


def test_the_folder_has_everything(cleaned: Path) -> None:
    found = cleaned / "found"
    visible = {path.name for path in found.glob("[!.]*")}
    assert visible == {
        "suspects.csv", "cleaned.csv", "clients.csv", "config.toml", "model.safetensors", "report.html", "summary.json",
    }  # fmt: skip
    asked = tomllib.loads((found / "config.toml").read_text())["clean"]
    assert (asked["label"], asked["client"], asked["seed"]) == ("outcome", "hospital", 0)
    suspects, given = rows(found / "suspects.csv"), rows(cleaned / "patients.csv")
    assert len(suspects) == len(given) == 240
    quality = [float(row["label_quality"]) for row in suspects if row["trusted"] == "False"]
    assert quality == sorted(quality)
    assert {row["client"] for row in suspects} == set(HOSPITALS)
    labels = {row["patient"]: row["outcome"] for row in given}
    assert all(row["given_label"] == labels[row["row"]] for row in suspects)
    summary = json.loads((found / "summary.json").read_text())
    issues = [row["row"] for row in suspects if row["is_label_issue"] == "True"]
    assert summary["label_issues"] == len(issues) > 10
    assert [row["client"] for row in rows(found / "clients.csv")] == [each["client"] for each in summary["clients"]]


def test_cleaned_is_the_file_without_suspects_letter_by_letter(cleaned: Path) -> None:
    issues = {row["row"] for row in rows(cleaned / "found" / "suspects.csv") if row["is_label_issue"] == "True"}
    lines = (cleaned / "patients.csv").read_text().splitlines()
    kept = [line for line in lines if line.partition(",")[0] not in issues]
    assert len(kept) == 241 - len(issues)
    assert (cleaned / "found" / "cleaned.csv").read_text().splitlines() == kept
    assert any(",007," in line for line in kept)  # it is not the number 7


def test_the_model_predicts_new_rows(cleaned: Path) -> None:
    new = pd.read_csv(cleaned / "patients.csv", dtype=str).drop(columns=["outcome", "checked", "hospital"])
    new.iloc[::-1].to_csv(cleaned / "new.csv", index=False)
    arguments = ("found", "new.csv", "--id", "patient", "--out", "predictions.csv")
    assert here("predict", *arguments, cwd=cleaned) == (0, "")
    predicted = {row["row"]: row["predicted_label"] for row in rows(cleaned / "predictions.csv")}
    suspects = {row["row"]: row for row in rows(cleaned / "found" / "suspects.csv")}
    assert set(predicted) == set(suspects)
    same = [predicted[name] == row["predicted_label"] for name, row in suspects.items()]
    assert np.mean(same) > 0.9  # these are from models that were not trained on the row
    kept = [predicted[name] == row["given_label"] for name, row in suspects.items() if row["is_label_issue"] == "False"]
    assert np.mean(kept) > 0.9


def test_a_search_that_has_finished_is_not_overwritten(cleaned: Path) -> None:
    before = (cleaned / "found" / "suspects.csv").read_bytes()
    code, said = here("clean", "patients.csv", *OPTIONS, "--out", "found", cwd=cleaned)
    assert (code, said) == (
        2, "fedbilevel: found has the results of this search: choose another folder with --out.\n",
    )  # fmt: skip
    code, said = here("clean", "patients.csv", *OPTIONS, "--seed", "1", "--out", "found", cwd=cleaned)
    assert code == 2
    assert "another search" in said
    code, said = here("resume", "found", cwd=cleaned)
    assert code == 2
    assert "has finished" in said
    assert (cleaned / "found" / "suspects.csv").read_bytes() == before


def test_relabel_changes_labels_and_drops_nothing(cleaned: Path) -> None:
    assert here("clean", "patients.csv", *OPTIONS, "--relabel", "--out", "relabelled", cwd=cleaned) == (0, "")
    suspects = {row["row"]: row for row in rows(cleaned / "relabelled" / "suspects.csv")}
    before, after = rows(cleaned / "patients.csv"), rows(cleaned / "relabelled" / "cleaned.csv")
    assert len(after) == 240
    for old, new in zip(before, after, strict=True):
        suspect = suspects[old["patient"]]
        wanted = suspect["predicted_label"] if suspect["is_label_issue"] == "True" else old["outcome"]
        assert new == {**old, "outcome": wanted}
    assert sum(a != b for a, b in zip(before, after, strict=True)) > 10


def test_a_file_for_each_client(cleaned: Path) -> None:
    """CSV, TSV and Parquet side by side: every one gets its cleaned copy, of the same kind."""
    frame = pd.read_csv(cleaned / "patients.csv", dtype={"ward": str})
    parts = {name: frame[frame["hospital"] == name].drop(columns="hospital") for name in HOSPITALS}
    names = ["north.csv", "south.tsv", "east.parquet", "west.csv"]
    parts["north"].to_csv(cleaned / names[0], index=False)
    parts["south"].to_csv(cleaned / names[1], index=False, sep="\t")
    parts["east"].to_parquet(cleaned / names[2])
    parts["west"].to_csv(cleaned / names[3], index=False)
    options = ("--label", "outcome", "--trusted", "checked", "--id", "patient", "--out", "files")
    assert here("clean", *names, *options, cwd=cleaned) == (0, "")
    found = cleaned / "files"
    suspects = pd.read_csv(found / "suspects.csv")
    issues = set(suspects["row"][suspects["is_label_issue"]])
    assert set(suspects["client"]) == set(HOSPITALS)
    copies = [found / f"cleaned-{name}" for name in names]
    read = [
        pd.read_csv(copies[0]),
        pd.read_csv(copies[1], sep="\t"),
        pd.read_parquet(copies[2]),
        pd.read_csv(copies[3]),
    ]
    for name, copy in zip(HOSPITALS, read, strict=True):
        assert set(copy["patient"]) == set(parts[name]["patient"]) - issues
    assert read[2]["age"].dtype == float
    assert sum(map(len, read)) == 240 - len(issues) < 235


def test_own_features(cleaned: Path) -> None:
    """The columns are not looked at; what is left of the features belongs to what is left of the table."""
    frame = pd.read_csv(cleaned / "patients.csv")
    matrix = np.column_stack([frame[["age", "weight", "pulse", "dose"]], frame["ward"] == 7, np.arange(240) % 2])
    np.save(cleaned / "numbers.npy", matrix)
    frame[["patient", "outcome", "hospital", "checked"]].to_csv(cleaned / "labels.csv", index=False)
    assert here("clean", "labels.csv", *OPTIONS, "--features", "numbers.npy", "--out", "features", cwd=cleaned) == (
        0,
        "",
    )
    left, copy = (
        np.load(cleaned / "features" / "cleaned-features.npy"),
        pd.read_csv(cleaned / "features" / "cleaned.csv"),
    )
    assert len(left) == len(copy) < 235
    place = {name: n for n, name in enumerate(frame["patient"])}
    np.testing.assert_array_equal(left, matrix[[place[name] for name in copy["patient"]]])


def photos(folder: Path) -> None:
    """Pictures that are bright at the top or at the bottom, in folders of two clients; some are in the wrong one."""
    rng = np.random.default_rng(0)
    for n in range(80):
        kind = n % 2
        picture = rng.integers(0, 90, (6, 6))
        picture[3 * kind : 3 * kind + 3] += 120
        shown = 1 - kind if n in (7, 24, 41) else kind
        place = folder / f"camera {n % 4 // 2}" / ("top", "bottom")[shown]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture.astype(np.uint8)).save(place / f"{n:02}.png")


@pytest.mark.filterwarnings("default::fedbilevel.errors.FedbilevelWarning")
def test_pictures(tmp_path: Path) -> None:
    photos(tmp_path / "photos")
    code, said = here("clean", "photos", "--client-from", "folder", "--out", "found", cwd=tmp_path)
    assert (code, said) == (0, "")  # the warning is told once, with the results
    assert "No rows are trusted" in json.loads((tmp_path / "found" / "summary.json").read_text())["warnings"][0]
    suspects = rows(tmp_path / "found" / "suspects.csv")
    assert {Path(row["row"]).stem for row in suspects[:3]} == {"07", "24", "41"}
    assert {row["client"] for row in suspects} == {"camera 0", "camera 1"}
    left = rows(tmp_path / "found" / "labels.csv")
    kept = {row["row"] for row in suspects if row["is_label_issue"] == "False"}
    assert len(left) == len(kept)
    assert all((tmp_path / "found" / row["file"]).is_file() for row in left)
    page = (tmp_path / "found" / "report.html").read_text()
    assert page.count('<img src="data:image/') == 12
    assert "cannot be shown" not in page


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["patients.csv"], "which column"),
        (["patients.csv", "--label", "outcme"], "did you mean 'outcome'?"),
        (["patient.csv", "--label", "outcome"], "there is no file patient.csv"),
        (["patients.csv", "--label", "outcome", "--trusted", "check"], "did you mean 'checked'?"),
        (["patients.csv", "--label", "outcome", "--numeric", "hospital"], "column 'hospital'"),
        (["patients.csv", "--label", "outcome", "--client-from", "floor"], "folder"),
        (["patients.csv", "--label", "age"], "age"),
        (["patients.csv", "--label", "outcome", "--seed", "-1"], "seed must be a whole number"),
        (["empty.csv", "--label", "outcome"], "empty.csv is empty"),
    ],
)
def test_mistakes_are_sentences_and_nothing_is_written(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    as_csv(tmp_path)
    (tmp_path / "empty.csv").write_text("")
    before = sorted(tmp_path.rglob("*"))
    code, said = here("clean", *arguments, cwd=tmp_path)
    assert code == 2
    assert sentence in said
    assert said.startswith("fedbilevel: ")
    assert said.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_people_see_what_was_understood_and_what_was_found(tmp_path: Path) -> None:
    """In a process of its own, as people use it; and as JSON."""
    as_csv(tmp_path)
    done = fedbilevel("clean", "patients.csv", *OPTIONS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split("Labels that are probably wrong")
    for words in ("240 rows", "4 clients", "4 x number", "age, weight, pulse, dose", "category", "40 rows"):
        assert words in before
    for words in (
        "95 % interval",
        "The most suspicious rows",
        "After cleaning, a model gets",
        "Results in runs/clean-patients-seed0-",
    ):
        assert words in after
    assert done.stderr == ""


@pytest.mark.slow
def test_an_interrupted_search_continues(tmp_path: Path) -> None:
    as_csv(tmp_path)
    command = [*INTERRUPTIBLE, "clean", "patients.csv", *OPTIONS, "--thorough", "--out", "here"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        while "round" not in process.stdout.readline():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert errors == "fedbilevel: interrupted. Continue with: fedbilevel resume here\n"
    assert any((tmp_path / "here" / "checkpoints").iterdir())
    continued = fedbilevel("resume", "here", "--json", cwd=tmp_path)
    assert continued.returncode == 0, continued.stderr
    whole = fedbilevel("clean", "patients.csv", *OPTIONS, "--thorough", "--out", "whole", "--json", cwd=tmp_path)
    ends: list[dict[str, Any]] = [json.loads(done.stdout) for done in (continued, whole)]
    assert ends[0] == {**ends[1], "folder": "here"}
    assert (tmp_path / "here" / "suspects.csv").read_bytes() == (tmp_path / "whole" / "suspects.csv").read_bytes()
