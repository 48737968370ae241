"""``fedbilevel reproduce``: what is run, what is said about it, and that nothing but the runs decides."""

import csv
import fcntl
import inspect
import json
import os
import re
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import reproduction
from fedbilevel.reproduction import files, judged, table, verdict
from fedbilevel.reproduction.curves import Curve
from fedbilevel.reproduction.files import Claim, Method, Panel, Reproduction, ResultColumn, Search, check
from fedbilevel.runs.settings import convert
from helpers import fedbilevel

IDS = {
    "mefbo-table2", "mefbo-fig1", "mefbo-fig2", "mefbo-fig3", "mefbo-fig14", "fedbioacc-fig1", "fedbioacc-fig2",
    "fedbioacc-fig3", "fedbioacc-fig4", "primaldual-fig1", "primaldual-fig2", "primaldual-table1", "primaldual-fig4",
    "theory-speedup", "theory-speedup-mefbo", "theory-rates", "theory-rates-mefbo", "theory-primal-dual",
    "theory-nonconvex",
}  # fmt: skip

SMALL = Reproduction(
    id="small",
    title="a small one",
    paper="A paper",
    where="Table 1",
    claim="It is said that it works.",
    task={"name": "quadratic", "clients": 4},
    run={"rounds": 40, "every": 10},
    seeds=2,
    columns=[
        ResultColumn("20 rounds", "error", at=20, digits=4, better="lower"),
        ResultColumn("the end", "error", digits=4, better="lower"),
    ],
    panels=[Panel("all"), Panel("half", run={"sample": "2"})],
    methods=[
        Method("FedBiO", "fedbio", settings={"lr_upper": 0.1}, paper={"all": ["0.5 ± 0.1", "0.2"]}),
        Method("SimFBO", "simfbo", settings={"lr_upper": 0.07}, by_panel={"half": {"lr_upper": 0.05}}),
        Method("wild", "fedbio", settings={"lr_upper": 1e9, "lr_lower": 1e9}, panels=["all"]),
        Method("FedBiO", "fedbio", "ours", settings={"lr_upper": 0.01}),
    ],
    claims=[],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def done(folder: Path) -> reproduction.Reproduced:
    return reproduction.run(SMALL, folder)


def errors(done: reproduction.Reproduced, panel: int, method: int, round: int) -> list[float]:
    members = done.of(SMALL.panels[panel], SMALL.methods[method])
    return [row["error"] for m in members for row in m.history if row["round"] == round]


def test_all_experiments_are_there_and_say_what_they_are(tmp_path: Path) -> None:
    assert set(reproduction.names()) == IDS
    listed = fedbilevel("reproduce", "--list", cwd=tmp_path).stdout
    for id in IDS:
        made = reproduction.read(id)
        assert made.claims
        assert made.claim
        assert made.where
        assert id in listed.replace("\n", "")


def known_cases(made: Reproduction) -> list[tuple[Panel, Method]]:
    return [
        (p, m) for p, m in made.cases() if m.parameters != "found" or any(m.label == label for label, _ in made.found)
    ]


@pytest.mark.parametrize("id", sorted(IDS))
def test_every_setting_of_an_experiment_is_one_that_exists(id: str) -> None:
    made = reproduction.read(id)
    for panel, method in known_cases(made):
        experiment = made.experiment(panel, method, 0)
        options = {name: p.default for name, p in inspect.signature(fb.TASKS[experiment.task]).parameters.items()}
        _, hyper = experiment._check_settings(method.algorithm, options)
        for key, value in experiment.settings.items():
            table, _, name = key.rpartition(".")
            convert(key, value, (options if table == "task" else hyper)[name])


@pytest.mark.slow
@pytest.mark.parametrize("id", sorted(IDS))
def test_every_experiment_fits_its_task(id: str) -> None:
    made = reproduction.read(id)
    for panel, method in known_cases(made):
        made.experiment(panel, method, 0).build().check()


def test_rows_and_columns_are_those_of_the_runs(done: reproduction.Reproduced) -> None:
    headings, *rows = table(done)
    assert headings[2:] == ["seeds", "20 rounds, paper", "20 rounds, ours", "the end, paper", "the end, ours"]
    assert len(rows) == 7
    first = rows[0]
    at_20, at_end = errors(done, 0, 0, 20), errors(done, 0, 0, 40)
    before_20, before_end = errors(done, 0, 0, 10), errors(done, 0, 0, 30)
    at_20 = [0.1 * a + 0.9 * b for a, b in zip(before_20, at_20, strict=True)]  # the mean over the rounds 18 to 20
    at_end = [0.2 * a + 0.8 * b for a, b in zip(before_end, at_end, strict=True)]  # and 36 to 40
    assert first[:4] == ["all", "FedBiO (the paper's)", "2", "0.5 ± 0.1"]
    assert first[4] == f"{np.mean(at_20):.4f} ± {np.std(at_20, ddof=1):.4f}"
    assert first[6] == f"{np.mean(at_end):.4f} ± {np.std(at_end, ddof=1):.4f}"
    wild = next(row for row in rows if row[1].startswith("wild"))
    assert wild[4].startswith("diverged in 2 of 2 seeds, from its round ")


@pytest.mark.parametrize("id", sorted(IDS))
def test_a_smoke_run_can_be_judged(id: str) -> None:
    """By claims about what was run only. It leaves out no method."""
    made = reproduction.read(id).shortened()
    assert {method.label for method in made.methods} == {method.label for method in reproduction.read(id).methods}
    row = {"round": 1, "exchanges": 2, "seconds": 0.1} | {column.metric: 0.5 for column in made.columns}
    start = row | {"round": 0, "exchanges": 0}
    curves = [Curve(p, m, s, [start, row]) for p, m in made.cases() for s in made.seeds_of(p, m)]
    smoke = reproduction.Reproduced(made, curves)
    assert "smoke" in verdict(smoke)
    assert table(smoke)
    for claims in judged(smoke).values():
        assert all(each.numbers for each in claims)


def test_a_second_call_runs_nothing_again_and_refuses_other_runs(
    done: reproduction.Reproduced, folder: Path, tmp_path: Path
) -> None:
    changed = lambda: {path: path.stat().st_mtime_ns for path in folder.rglob("run.json")}
    before = changed()
    assert len(before) == len(done.curves)
    again = reproduction.run(SMALL, folder)
    assert changed() == before
    assert again == done
    other = replace(SMALL, run={**SMALL.run, "rounds": 50})
    with pytest.raises(fb.FedbilevelError, match=r"run\.rounds differ"):
        reproduction.run(other, folder)
    shutil.copytree(folder, tmp_path / "copy")  # also where only another seed is there, and not finished
    for path in (tmp_path / "copy").glob("*-seed0"):
        shutil.rmtree(path)
    for path in (tmp_path / "copy").rglob("run.json"):
        path.write_text(path.read_text().replace('"finished"', '"interrupted"'))
    with pytest.raises(fb.FedbilevelError, match=r"run\.rounds differ"):
        reproduction.run(other, tmp_path / "copy")


def test_the_page_has_the_numbers_and_every_curve_is_kept(done: reproduction.Reproduced, tmp_path: Path) -> None:
    claimed = replace(
        SMALL, claims=[Claim("FedBiO is small", "bound", ["FedBiO"], panels=["all"], column="the end", most=1e9)]
    )
    path = reproduction.write(replace(done, reproduction=claimed), tmp_path, "fedbilevel reproduce small")
    text = path.read_text()
    for row in table(done)[1:]:
        assert all(cell in text for cell in row)
    assert "**Verdict: reproduced.**" in text
    assert "**holds**" in text
    assert "- **Holds**: FedBiO is small." in text
    assert "fedbilevel reproduce small" in text
    assert (tmp_path / "small.png").stat().st_size > 5000
    with (tmp_path / "small.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(c.history) for c in done.curves)
    seed1 = [float(r["error"]) for r in rows if (r["condition"], r["method"], r["parameters"], r["seed"]) == ("half", "SimFBO", "printed", "1")]  # fmt: skip # noqa: E501
    curve = next(c for c in done.curves if (c.panel.title, c.method.label, c.seed) == ("half", "SimFBO", 1))
    np.testing.assert_allclose(seed1, [row["error"] for row in curve.history], rtol=1e-5)

    # The curves are enough to write the same page again.
    again = reproduction.read_curves(claimed, tmp_path / "small.csv")
    assert reproduction.write(again, tmp_path / "again", "fedbilevel reproduce small").read_text() == text
    assert (tmp_path / "again" / "small.csv").read_text() == (tmp_path / "small.csv").read_text()
    for other in (replace(claimed, methods=SMALL.methods[:1]), replace(claimed, curves=["accuracy"])):
        with pytest.raises(fb.FedbilevelError, match=r"small\.csv"):
            reproduction.read_curves(other, tmp_path / "small.csv")


def test_a_page_is_written_from_the_curves_that_are_kept(tmp_path: Path) -> None:
    """Also where the last digits, which are not kept, would be rounded to another number."""
    row = lambda end: [
        {"round": n, "exchanges": n, "seconds": 1.0, "error": error} for n, error in ((0, 9.0), (20, 1.0), (40, end))
    ]
    made = replace(SMALL, methods=SMALL.methods[:1], panels=SMALL.panels[:1], seeds=1)
    curve = Curve(made.panels[0], made.methods[0], 0, row(0.12355000004))  # 0.1236, but 0.12355 is kept
    path = reproduction.write(reproduction.Reproduced(made, [curve]), tmp_path, "fedbilevel reproduce small")
    again = reproduction.read_curves(made, tmp_path / "small.csv")
    assert again.curves[0].history[-1]["error"] == 0.12355
    assert f"{0.12355:.4f}" != f"{0.12355000004:.4f}"
    assert all(cell in path.read_text() for cell in table(again)[1])
    assert reproduction.write(again, tmp_path / "again", "fedbilevel reproduce small").read_text() == path.read_text()


def test_what_another_search_found_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(str(files.EXPERIMENTS), tmp_path / "experiments")
    monkeypatch.setattr(files, "EXPERIMENTS", tmp_path / "experiments")
    assert reproduction.read("mefbo-fig1").found == reproduction.read("mefbo-table2").found != {}
    path = tmp_path / "experiments" / "mefbo-table2.toml"
    text = path.read_text()
    path.write_text(re.sub(r"trials = \d+", "trials = 7", text))
    assert reproduction.read("mefbo-fig1").found == reproduction.read("mefbo-table2").found == {}
    # Nor what was found for a method that has become another one, or began elsewhere.
    labels = lambda: {label for label, _ in reproduction.read("mefbo-table2").found}
    path.write_text(text.replace("settings = { hessian_steps = 5 }", "settings = { hessian_steps = 4 }"))
    assert labels() == {"FedNest", "SimFBO", "MeFBO"}
    path.write_text(text.replace("lr_upper = 0.2, lr_lower = 0.1,", "lr_upper = 0.3, lr_lower = 0.1,"))
    assert labels() == {"FedNest", "L-FedNest", "MeFBO"}
    path.write_text(text.replace("dropout = 0.5", "dropout = 0.4"))
    assert labels() == set()


def test_curves_of_other_settings_are_refused(done: reproduction.Reproduced, tmp_path: Path) -> None:
    reproduction.write(done, tmp_path, "fedbilevel reproduce small")
    kept = tmp_path / "small.csv"
    assert len(reproduction.read_curves(SMALL, kept).curves) == len(done.curves)
    shorter = replace(SMALL, run={**SMALL.run, "rounds": 30})
    other = replace(SMALL, methods=[replace(SMALL.methods[0], settings={"lr_upper": 0.2}), *SMALL.methods[1:]])
    for changed in (shorter, other):
        with pytest.raises(fb.FedbilevelError, match=r"other settings than small has now \(all, FedBiO, printed\)"):
            reproduction.read_curves(changed, kept)


def test_the_page_names_the_seeds_that_were_run(done: reproduction.Reproduced, tmp_path: Path) -> None:
    one = replace(done, curves=[curve for curve in done.curves if curve.seed == 1])
    text = reproduction.write(one, tmp_path, "fedbilevel reproduce small").read_text()
    assert "small.toml`: seed 1, 7 runs" in text
    assert "small.toml`: seeds 0 to 1, 14 runs" in reproduction.write(done, tmp_path, "").read_text()


def test_runs_without_a_result_are_no_result(folder: Path, tmp_path: Path, done: reproduction.Reproduced) -> None:
    """What another process is at, or what failed by other reasons than that it diverged; the latter is tried again."""
    shutil.copytree(folder, tmp_path / "runs")
    places = sorted((tmp_path / "runs").glob("half-*-seed0"))
    info = json.loads((places[0] / "run.json").read_text())
    (places[0] / "run.json").write_text(json.dumps({**info, "status": "failed", "failure": "the disk is full."}))
    shutil.rmtree(places[1])
    places[1].mkdir()
    (places[1] / ".lock").touch()  # a process was killed before it began
    again = reproduction.run(SMALL, tmp_path / "runs")
    strip = lambda curves: [[{**row, "seconds": 0} for row in c.history] for c in curves]
    assert strip(again.curves) == strip(done.curves)
    (places[2] / "run.json").write_text(json.dumps({**info, "status": "running", "process": os.getpid()}))
    with (places[2] / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(fb.FedbilevelError, match=r"1 of 14 runs have no result.*another process is using it"):
            reproduction.run(SMALL, tmp_path / "runs")


def test_a_search_has_the_same_budget_for_all_and_looks_at_another_seed(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    methods = [Method(label, name, "found") for label, name in (("FedBiO", "fedbio"), ("SimFBO", "simfbo"))]
    fixed = {"FedBiO": {"lr_adjoint": 0.05}}
    made = replace(SMALL, methods=methods, search=Search(["all"], trials=4, rounds=9, seed=100, fixed=fixed))
    with pytest.raises(fb.FedbilevelError, match="--search"):
        made.experiment(made.panels[0], methods[0], 0)
    found = reproduction.search(made, tmp_path / "search")
    assert found.found["FedBiO", "all"]["lr_adjoint"] == 0.05
    for label in ("FedBiO", "SimFBO"):
        folder = tmp_path / "search" / f"all-{label.lower()}"
        assert "seed = 100" in (folder / "best.toml").read_text()
        with (folder / "trials.csv").open() as file:
            trials = list(csv.DictReader(file))
        assert len(trials) == 4
        complete = [t for t in trials if t["state"] == "complete"]
        least = min(complete, key=lambda t: float(t["validation_loss"]))
        assert float(least["lr_upper"]) == pytest.approx(found.found[label, "all"]["lr_upper"])
    for panel in found.panels:  # also where it was not searched
        experiment = found.experiment(panel, found.methods[0], 0)
        assert experiment.settings["algorithm.lr_adjoint"] == 0.05
    with pytest.raises(fb.FedbilevelError, match="nothing to search"):
        reproduction.search(SMALL, tmp_path / "other")


@pytest.mark.slow
def test_a_search_on_a_grid_takes_the_mean_over_its_seeds(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    grid = {"lr_upper": [0.1, 0.03, 0.01]}
    methods = [Method("FedBiO", "fedbio", "found", settings={"lr_lower": 0.2})]
    made = replace(SMALL, methods=methods, search=Search(["half"], rounds=9, seed=50, seeds=3, grid=grid))
    found = reproduction.search(made, tmp_path / "search")
    losses: dict[float, list[float]] = {}
    for seed in (50, 51, 52):
        with (tmp_path / "search" / f"half-fedbio-seed{seed}" / "trials.csv").open() as file:
            for row in csv.DictReader(file):
                losses.setdefault(float(row["lr_upper"]), []).append(float(row["validation_loss"]))
    assert {len(some) for some in losses.values()} == {3}
    best = min(losses, key=lambda step: np.mean(losses[step]))
    assert found.found == {("FedBiO", "half"): {"lr_upper": best}}
    said = tomllib.loads((tmp_path / "search" / "found.toml").read_text())
    assert said["found"][0]["loss"] == pytest.approx(np.mean(losses[best]))
    assert said["search"] == {"panels": ["half"], "rounds": 9, "seed": 50, "seeds": 3, "grid": grid}
    with pytest.raises(fb.FedbilevelError, match="only a search on a grid"):
        check(replace(made, search=Search(["half"], trials=2, seeds=2)))


def test_files_that_name_what_is_not_there_are_refused(tmp_path: Path) -> None:
    claim = Claim("x", "order", ["FedBiO", "nobody"])
    for wrong in (
        replace(SMALL, claims=[claim]),
        replace(SMALL, claims=[Claim("x", "hope", ["FedBiO"])]),
        replace(SMALL, claims=[Claim("x", "bound", ["FedBiO"], about="ours", most=1)]),
        replace(SMALL, claims=[Claim("x", "bound", ["FedBiO"], column="none", most=1)]),
        replace(SMALL, claims=[Claim("x", "bound", ["FedBiO"], target={"none": 1.0}, most=1)]),
        replace(SMALL, claims=[Claim("x", "bound", ["FedBiO"], about="nothing", most=1)]),
        replace(SMALL, claims=[Claim("x", "best", ["FedBiO", "SimFBO"])]),
        replace(SMALL, methods=[replace(SMALL.methods[0], panels=["nowhere"])]),
        replace(SMALL, methods=[replace(SMALL.methods[0], paper={"all": ["1"]})]),
        replace(SMALL, methods=[SMALL.methods[0]] * 2),
        replace(SMALL, claims=[Claim("x", "order", ["FedBiO"])]),
        replace(SMALL, claims=[Claim("x", "bound", ["FedBiO"])]),
        replace(SMALL, claims=[Claim("x", "bound", ["FedBiO"], most=1)], search=Search(seed=1)),
        replace(
            SMALL,
            claims=[Claim("x", "bound", ["FedBiO"], most=1)],
            search=Search(seed=3),
            seeds=4,
            methods=[replace(SMALL.methods[0], seeds=1), SMALL.methods[1]],
        ),
    ):
        with pytest.raises(fb.FedbilevelError):
            check(wrong)
    said = fedbilevel("reproduce", "mefbo-tabel2", cwd=tmp_path)
    assert said.returncode == 2
    assert "mefbo-table2" in said.stderr


@pytest.mark.slow
def test_a_smoke_run_takes_the_same_way_and_says_that_it_is_one(tmp_path: Path) -> None:
    said = fedbilevel("reproduce", "primaldual-fig1", "--quick", "--out", "here", cwd=tmp_path).stdout
    assert "none, this was a smoke run" in said
    page = tmp_path / "here" / "primaldual-fig1.md"
    assert page.exists()
    assert not (tmp_path / "reproduction").exists()
    made = reproduction.read("primaldual-fig1").shortened()
    runs = [json.loads(path.read_text()) for path in (tmp_path / "here").rglob("run.json")]
    assert len(runs) == len(made.cases())
    assert {run["status"] for run in runs} == {"finished"}


@pytest.mark.slow
def test_the_toy_shows_what_its_first_figure_claims() -> None:
    """K = 1, without noise: the primal-dual method ends where GD does, the truncated methods do not; K = 10 brings
    them closer."""
    made = reproduction.read("primaldual-fig1")
    ends = {}
    for panel in (made.panels[0], made.panels[2]):
        for method in made.methods:
            experiment, task, algorithm, _ = made.experiment(panel, method, 0).build()
            result = fb.solve(task, algorithm, 400, 0, experiment.participation())
            ends[method.label, panel.title] = result.metrics["value"]
    least = ends["GD", "K = 10"]
    for K in ("K = 1", "K = 10"):
        assert ends["primal-dual", K] == pytest.approx(least, abs=2e-3)
    for name in ("FedNest", "RFHO", "SUSTAIN"):
        assert ends[name, "K = 1"] - least > 0.005
        assert abs(ends[name, "K = 10"] - least) < 0.8 * (ends[name, "K = 1"] - least)


def test_the_summary_says_what_the_pages_say() -> None:
    """Every experiment is in the table, with the verdict of its page."""
    root = Path(__file__).parents[2]
    summary = (root / "docs" / "reproduction.md").read_text()
    rows = {
        row[1].strip("[] ").split("]")[0]: row
        for row in (line.split("|") for line in summary.splitlines())
        if len(row) > 4
    }
    for id in reproduction.names():
        page = root / "reproduction" / f"{id}.md"
        said = rows[id][4].strip()
        if page.exists():
            assert f"**Verdict: {said}.**" in page.read_text(), id
            assert f"({'../reproduction/' + id}.md)" in rows[id][1]
        else:
            assert said == "not run yet", id


PAGES = Path(__file__).parents[2] / "reproduction"


@pytest.mark.parametrize("id", sorted(path.stem for path in PAGES.glob("*.csv")))
def test_a_page_says_what_its_curves_and_its_file_say(id: str) -> None:
    made = reproduction.read(id)
    done = reproduction.read_curves(made, PAGES / f"{id}.csv")
    page = (PAGES / f"{id}.md").read_text()
    assert f"**Verdict: {verdict(done)}.**" in page
    assert all(f"| {' | '.join(row)} |" in page for row in table(done))
    for claims in judged(done).values():
        assert all(f"**{each.word}**: {each.numbers}" in page for each in claims)
    for text in (made.claim, made.differences, made.remarks):
        assert text.strip() in page
    asked = {(p.title, m.title): len(made.seeds_of(p, m)) for p, m in made.cases()}
    ran = {(p.title, m.title): len(done.of(p, m)) for p, m in made.cases()}
    assert ran == asked


def test_judging_again_writes_the_page_beside_the_curves(tmp_path: Path) -> None:
    shutil.copy(PAGES / "primaldual-fig1.csv", tmp_path)
    said = fedbilevel("reproduce", "primaldual-fig1", "--judge", "--to", ".", cwd=tmp_path).stdout
    assert "Verdict: " in said
    assert "## Claims" in (tmp_path / "primaldual-fig1.md").read_text()
    assert not (tmp_path / "runs").exists()
    wrong = fedbilevel("reproduce", "primaldual-fig1", "--judge", "--quick", "--to", ".", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "--judge and --quick cannot be combined" in wrong.stderr
    missing = fedbilevel("reproduce", "primaldual-fig2", "--judge", "--to", ".", cwd=tmp_path)
    assert missing.returncode == 2
    assert "does not contain the curves of primaldual-fig2" in missing.stderr


def test_a_condition_may_have_fewer_seeds() -> None:
    made = reproduction.read("fedbioacc-fig4")
    assert {panel.title: len(made.seeds_of(panel, made.methods[-1])) for panel in made.panels} == {
        "5-way, 1-shot": 2,
        "5-way, 5-shot": 2,
        "20-way, 1-shot": 1,
        "20-way, 5-shot": 1,
    }
    assert len(replace(made, seeds=1).seeds_of(made.panels[0], made.methods[0])) == 1
