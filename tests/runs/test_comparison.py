"""Comparisons: who takes part, what is shown, what happens to those who fail; and the catalogue of algorithms."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.report import catalogue
from fedbilevel.runs import comparison, grid
from fedbilevel.storage.load import runs
from helpers import INTERRUPTIBLE, fedbilevel, here

GLOBAL = {
    "aggitd", "alternating", "commfedbio", "commfedbio-sketch", "f2sa", "fedbio", "fedbioacc", "fedmbo", "fedmsa",
    "fednest", "gd", "lfednest", "local-bsgvrm", "mefbo", "mrbo", "rfho", "shrofbo", "simfbo", "stocbio", "sustain",
    "adafbio", "local-bsgm", "mefbo-storm", "meha", "saba", "soba",
}  # fmt: skip
LOCAL = {"distbio", "distbioacc", "fedbio-local", "fedbioacc-local"}
WEIGHTING = {"afl", "primal-dual"}


def test_who_fits() -> None:
    assert {*GLOBAL, *LOCAL, *WEIGHTING, "fedavg"} == set(fb.ALGORITHMS)
    assert set(comparison.fitting(fb.tasks.quadratic())) == GLOBAL
    assert set(comparison.fitting(fb.tasks.quadratic("T4"))) == LOCAL
    assert set(comparison.fitting(fb.tasks.quadratic("T5", clients=2))) == GLOBAL | WEIGHTING
    assert comparison.plan("quadratic", "all").algorithms == comparison.plan("quadratic").algorithms


def test_compare_shows_a_table_and_curves(tmp_path: Path) -> None:
    """One member diverges, which the others do not mind; a setting may be for one algorithm only."""
    done = fedbilevel(
        "compare", "quadratic", "--algorithms", "fedbio,simfbo,lfednest", "--rounds", "300", "--set",
        "fedbio.lr_upper=1000", "--set", "lr_adjoint=0.15", "--seeds", "0..1", "--out", "here", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if line.startswith("│")}
    assert set(lines) == {"fedbio", "simfbo", "lfednest"}
    assert "e-0" in lines["simfbo"].split("│")[2]
    assert lines["fedbio"].split("│")[2].strip() == "-"
    assert "fedbio (seed 0)" in done.stdout
    assert "try a smaller lr_upper (now 1000)" in " ".join(done.stdout.split())
    table = fb.load(tmp_path / "here")
    ends = table[table["round"] == 300]
    assert {*zip(ends["algorithm"], ends["seed"], strict=True)} == {
        (a, s) for a in ("simfbo", "lfednest") for s in (0, 1)
    }
    simfbo = table[table["algorithm"] == "simfbo"]
    assert (simfbo["floats"] == 5 * simfbo["round"] * 2 * 16).all()
    assert (tmp_path / "here" / "curves.png").stat().st_size > 10_000
    assert 'lr_adjoint = "0.15"' in (tmp_path / "here" / "compare.toml").read_text()
    assert "lr_adjoint = 0.15" in (tmp_path / "here" / "simfbo-seed1" / "config.toml").read_text()


def test_compare_prints_json(tmp_path: Path) -> None:
    done = fedbilevel("compare", "quadratic", "--algorithms", "fedbio", "--rounds", "50", "--json", cwd=tmp_path)
    shown = json.loads(done.stdout.splitlines()[-1])
    assert [row["algorithm"] for row in shown["rows"]] == ["fedbio"]
    assert shown["rows"][0]["error"] < 1
    assert Path(tmp_path / shown["folder"] / "curves.png").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["quadratic", "--algorithms", "fedboi"], "there is no algorithm called 'fedboi'"),
        (["quadrat"], "did you mean 'quadratic'"),
        (["quadratic", "--seeds", "four"], "seeds must be written like 0..4 or 0,3,7, not 'four'."),
        (["quadratic", "--set", "lr_uper=1"], "did you mean 'lr_upper'"),
        (["quadratic", "--algorithms", "fedbio", "--set", "fednest.terms=1"], "algorithm of this comparison"),
        (["quadratic", "--algorithms", "fedbio-local", "--rounds", "2"], "local lower level"),
        (["quadratic", "--algorithms", "fedbio", "--set", "lr_upper=1e9", "--rounds", "50"], "every run failed"),
    ],
)
def test_bad_comparisons_are_one_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    code, said = here("compare", *arguments, cwd=tmp_path)
    assert code == 2
    assert sentence in said
    assert said.count("\n") == 1


def test_the_catalogue_is_up_to_date() -> None:
    """docs/algorithms.md is what 'fedbilevel algorithms --markdown' prints."""
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    assert text == catalogue.markdown()
    for name in fb.ALGORITHMS:
        assert f"## {name}\n" in text
    assert not [line for line in text.splitlines() if line.startswith("|") and "|  |" in line]  # nothing is missing


def test_bands_are_over_seeds(tmp_path: Path) -> None:
    runs = comparison.plan("quadratic", "fedbio", 10, (0, 1))
    members = comparison.run(runs, tmp_path / "here").members
    mean, deviation = grid.band([m.history for m in members], "error")
    each = np.array([[row["error"] for row in m.history] for m in members])
    np.testing.assert_allclose(mean, each.mean(axis=0))
    np.testing.assert_allclose(deviation, np.abs(each[0] - each[1]) / np.sqrt(2))


def _without_times(folder: Path) -> list[dict]:
    return [
        {k: v for k, v in row.items() if k not in ("seconds", "folder")} for row in fb.load(folder).to_dict("records")
    ]


def test_a_comparison_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """In processes or not, at once or in parts: the same numbers."""
    compare = ["compare", "quadratic", "--algorithms", "fedbio,simfbo", "--rounds", "30", "--seeds", "0..1", "--json"]
    assert fedbilevel(*compare, "--jobs", "1", "--out", "a", cwd=tmp_path).returncode == 0
    assert fedbilevel(*compare, "--jobs", "2", "--out", "b", cwd=tmp_path).returncode == 0
    assert _without_times(tmp_path / "a") == _without_times(tmp_path / "b")
    kept = (tmp_path / "b" / "simfbo-seed0" / "run.json").read_bytes()
    shutil.rmtree(tmp_path / "b" / "fedbio-seed1")
    done = fedbilevel("resume", "b", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert _without_times(tmp_path / "a") == _without_times(tmp_path / "b")
    assert (tmp_path / "b" / "simfbo-seed0" / "run.json").read_bytes() == kept  # not run again
    done = fedbilevel(*compare[:5], "31", *compare[6:], "--out", "b", cwd=tmp_path)
    assert done.returncode == 2
    assert "contains another comparison" in done.stderr


def _wait_for_running(folder: Path, name: str) -> int:
    """The process of a member that has begun."""
    for _ in range(1200):
        path, records = folder / name / "run.json", folder / name / "records.jsonl"
        if path.exists() and records.exists() and records.stat().st_size:
            return json.loads(path.read_text())["process"]
        time.sleep(0.05)
    raise AssertionError(f"{name} did not begin")


def _compare(folder: Path, rounds: int, algorithms: str = "fedbio,simfbo") -> subprocess.Popen[str]:
    command = [*INTERRUPTIBLE, "compare", "quadratic", "--algorithms", algorithms, "--seeds"]
    command += ["0..1", "--jobs", "2", "--out", "here", "--json", "--rounds", str(rounds)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
def test_a_member_whose_process_dies_does_not_stop_the_others(tmp_path: Path) -> None:
    process = _compare(tmp_path, 60_000)
    os.kill(_wait_for_running(tmp_path / "here", "fedbio-seed0"), signal.SIGKILL)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    rows = {row["algorithm"]: row for row in json.loads(output.splitlines()[-1])["rows"]}
    assert rows["simfbo"]["runs"] == 2
    assert rows["simfbo"]["failures"] == []
    assert rows["fedbio"]["runs"] == 1  # the other seed
    assert rows["fedbio"]["failures"] == ["its process died (out of memory?)."]


def test_an_interrupted_comparison_says_how_to_go_on(tmp_path: Path) -> None:
    # More groups than processes: the others must not be begun any more.
    process = _compare(tmp_path, 100_000_000, "fedbio,simfbo,mefbo,fedavg,fednest")
    members = [_wait_for_running(tmp_path / "here", f"{name}-seed0") for name in ("fedbio", "simfbo")]
    time.sleep(1)
    try:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    finally:
        for number in (process.pid, *members) if process.poll() is None else ():
            os.kill(number, signal.SIGKILL)
    assert process.returncode == 130
    assert errors == "fedbilevel: interrupted. Continue with: fedbilevel resume here\n"
    for name, member in zip(("fedbio", "simfbo"), members, strict=True):
        (run,) = runs(tmp_path / "here" / f"{name}-seed0")
        assert run.status == "interrupted"
        assert list((run.folder / "checkpoints" / name).iterdir())
        with pytest.raises(ProcessLookupError):
            os.kill(member, 0)  # no process is left behind
    assert not list((tmp_path / "here").glob("mefbo*"))


def test_compare_until_shows_what_it_costs_to_get_there(tmp_path: Path) -> None:
    """A run ends at the first evaluation that is there; counts are those of its rounds, per client."""
    done = fedbilevel(
        "compare", "quadratic", "--algorithms", "fedbio,fedmbo", "--rounds", "200", "--until", "hypergradient=0.01",
        "--seeds", "0..1", "--json", "--out", "here", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    there, lost = json.loads(done.stdout)["rows"]
    assert (there["there"], lost["there"], lost["runs"]) == (2, 0, 2)
    table = fb.load(tmp_path / "here")
    curves = [each["hypergradient"].to_numpy() for _, each in table[table["algorithm"] == "fedbio"].groupby("seed")]
    assert all(curve[-1] <= 0.01 < curve[-2] for curve in curves)
    rounds = np.mean([len(curve) - 1 for curve in curves])
    assert there["rounds"] == rounds < 200
    assert there["floats"] == rounds * 2 * (4 + 2 * 6)
    assert there["samples"] == there["Gf"] + there["Gg"] + there["J"] + there["H"] == 5 * rounds
    assert 1e3 < there["memory"] < 1e6


def test_until_needs_a_column_and_a_number() -> None:
    with pytest.raises(fb.FedbilevelError, match="like hypergradient=1e-3"):
        comparison.plan("quadratic", "fedbio", until="hypergradient")
    with pytest.raises(fb.FedbilevelError, match="no column 'speed'"):
        fb.solve(fb.tasks.quadratic(), fb.FedBiO(), rounds=1, until={"speed": 1.0})
