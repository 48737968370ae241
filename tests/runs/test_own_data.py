"""Tasks on your own table, from Python, from files and from the command line; and predictions for new rows."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedbilevel as fb
from fedbilevel.cli import main
from fedbilevel.data.encoding import Column
from fedbilevel.errors import FedbilevelWarning
from fedbilevel.runs.experiment import Experiment
from fedbilevel.runs.prediction import load_classifier, predict, save_classifier
from fedbilevel.storage.models import MODEL
from fedbilevel.tasks import OWN_TASKS
from fedbilevel.tasks.classifier import Classifier, standardising
from helpers import fedbilevel

ROWS = 160
ROLES = {"label": "outcome", "client": "hospital", "drop": "sex"}


def people(rows: int = ROWS, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    age, dose = rng.normal(50, 10, rows), rng.normal(5, 2, rows)
    ill = (age - 50) / 10 + (dose - 5) / 2 + rng.normal(size=rows) / 4 > 0
    return pd.DataFrame(
        {
            "age": age.round(2),
            "dose": np.where(rng.random(rows) < 0.1, np.nan, dose.round(3)),
            "town": rng.choice(["Oslo", "Kiel"], rows),
            "sex": rng.choice(["f", "m"], rows),
            "hospital": rng.choice(["north", "south", "east"], rows),
            "outcome": np.where(ill, "ill", "well"),
        }
    )


@pytest.fixture(scope="module")
def patients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "patients.csv"
    people().to_csv(path, index=False)
    return path


def built(task: str, patients: Path, **settings: Any) -> Any:
    return Experiment(task, settings={"data": str(patients), **ROLES, **settings}).build()


@pytest.mark.parametrize("name", sorted(OWN_TASKS))
def test_the_stored_model_predicts_what_the_task_measures(name: str, patients: Path, tmp_path: Path) -> None:
    """The layers, their standardisation and the encoding are stored such that nothing is lost."""
    more = {"group": "sex", "drop": ""} if name == "fairness" else {}
    task = built(name, patients, **more).task
    assert len(task.clients) == 3
    import jax

    x, y = task.problem.start(jax.random.key(1))
    shaken = lambda v: jax.tree.map(lambda a: a + 0.3 * np.random.default_rng(a.size).normal(size=a.shape), v.tree)
    x, y = shaken(x), shaken(y)
    found = task.measured(x, y)
    save_classifier(tmp_path, task.classifier(x, y))
    table = predict(tmp_path, patients)
    assert table.columns.tolist() == ["row", "predicted_label", "probability", "p(ill)", "p(well)"]
    tested = _tested(name, task, patients)
    right = table.predicted_label[tested] == people().outcome[tested]
    wanted = "accuracy" if "accuracy" in found else "auc"
    if wanted == "accuracy":
        np.testing.assert_allclose(right.mean(), found["accuracy"], atol=1e-6)
    else:
        from sklearn.metrics import roc_auc_score

        auc = roc_auc_score(people().outcome[tested] == "well", table["p(well)"][tested])
        np.testing.assert_allclose(auc, found["auc"], atol=1e-3)  # probabilities have six digits


def _tested(name: str, task: fb.Task, patients: Path) -> np.ndarray:
    """The rows that are neither for training nor for validation, by their inputs."""
    from fedbilevel.core.rows import columns

    used = sum(len(columns(client[split])[0][0]) for client in task.clients for split in ("train", "val"))
    from fedbilevel.tasks.own import TEST, _divided

    roles = {"label": "outcome", "client": "hospital", "group": "sex"} if name == "fairness" else {**ROLES}
    table = fb.data.table(patients, **roles)  # pyright: ignore[reportArgumentType]
    import inspect

    given = {k: p.default for k, p in inspect.signature(OWN_TASKS[name].task).parameters.items()}
    parts = _divided(table, given)
    assert (parts != TEST).sum() == used
    return np.flatnonzero(parts == TEST)


def test_trusted_rows_validate_and_test(patients: Path, tmp_path: Path) -> None:
    frame = people().assign(checked=np.arange(ROWS) % 4 == 0)
    frame.to_csv(tmp_path / "a.csv", index=False)
    task = built("loss-tuning", tmp_path / "a.csv", trusted="checked").task
    train = sum(len(client["train"]["label"]) for client in task.clients)
    val = sum(len(client["val"]["label"]) for client in task.clients)
    assert train == ROWS * 3 // 4
    assert abs(val - ROWS // 8) <= 3
    frame.loc[frame.hospital == "east", "checked"] = False
    frame.to_csv(tmp_path / "a.csv", index=False)
    with pytest.warns(FedbilevelWarning, match="1 clients have too few trusted rows, .*: east"):
        built("loss-tuning", tmp_path / "a.csv", trusted="checked")


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.FedbilevelWarning")
def test_classes_without_validation_rows_are_called_by_their_names(tmp_path: Path) -> None:
    """A table has no sites and no schema."""
    frame = people().assign(checked=np.arange(ROWS) % 20 == 0)
    frame.loc[3:4, "outcome"] = "unclear"  # none of them is checked
    frame.to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(
        fb.FedbilevelError, match=r"no validation rows with the label unclear: .* more trusted rows of it"
    ):
        built("loss-tuning", tmp_path / "a.csv", trusted="checked")
    people().assign(sex=np.where(people().outcome == "well", "m", "f")).to_csv(tmp_path / "b.csv", index=False)
    with pytest.raises(fb.FedbilevelError, match="no validation rows of both groups with the label well: "):
        Experiment(
            "fairness", settings={"data": str(tmp_path / "b.csv"), **ROLES, "drop": "town", "group": "sex"}
        ).build()


def test_clients_with_very_few_rows_are_left_out_and_told(tmp_path: Path) -> None:
    frame = people()
    frame.loc[0:1, "hospital"] = "tiny"
    frame.loc[2:5, "hospital"] = "small"
    frame.to_csv(tmp_path / "a.csv", index=False)
    with pytest.warns(FedbilevelWarning, match="fewer than") as said:
        task = built("regularization", tmp_path / "a.csv").task
    assert "1 clients have fewer than 3 rows" in " ".join(str(each.message) for each in said)
    assert [len(client["train"]["label"]) for client in task.clients][-2] == 2  # north, small, south without tiny
    assert len(task.clients) == 4


def test_one_judge(patients: Path) -> None:
    task = built("client-weighting", patients, judge="north").task
    shares = [client["val"]["share"] for client in task.clients]
    assert [np.unique(share).tolist() for share in shares] == [[0.0], [3.0], [0.0]]
    with pytest.raises(fb.FedbilevelError, match="no client called 'nrth': did you mean 'north'"):
        built("client-weighting", patients, judge="nrth")


def test_weights_by_size(patients: Path) -> None:
    weights = built("hyper-representation", patients, weights="size").task.normalised_weights
    sizes = people().hospital.value_counts(normalize=True).sort_index()
    np.testing.assert_allclose(weights, sizes, atol=0.02)
    with pytest.raises(fb.FedbilevelError, match="finds the weights of the clients"):
        built("client-weighting", patients, weights="size")


def test_a_file_and_its_copy_give_the_same_run(patients: Path, tmp_path: Path) -> None:
    """An experiment file, what config.toml keeps of it, and resuming."""
    (tmp_path / "own.toml").write_text(
        f'[task]\nname = "loss-tuning"\ndata = ["{patients}"]\nlabel = "outcome"\nclient = "hospital"\n'
        'drop = ["sex"]\nhidden = 4\n\n[run]\nrounds = 4\n'
    )
    first = Experiment.read(tmp_path / "own.toml").run(tmp_path / "a")
    again = Experiment.read(tmp_path / "a" / "config.toml").run(tmp_path / "b")
    strip = lambda done: {k: v for k, v in done.summary.items() if k not in ("seconds", "folder")}
    assert strip(first) == strip(again)
    more = fb.resume(tmp_path / "a", rounds=6)
    assert more.summary["rounds"] == 6
    assert load_classifier(tmp_path / "a").classes == ("ill", "well")


def test_a_classifier_averages_its_members() -> None:
    encoding = fb.data.Encoding((Column("0", "number"),), "features")
    one = [{"w": np.array([[0.0]]), "b": np.array([np.log(3)])}]
    two = [{"w": np.array([[2.0, 0.0]]), "b": np.zeros(2)}]
    made = Classifier(encoding, ("no", "yes"), [one, two], (0.25, 0.75))
    rows = np.array([[1.0]], np.float32)
    expected = 0.25 * 0.75 + 0.75 / (1 + np.exp(2))
    np.testing.assert_allclose(made.probabilities(rows), [[1 - expected, expected]], rtol=1e-6)
    again = Classifier.restore(*made.packed())
    np.testing.assert_array_equal(again.probabilities(rows), made.probabilities(rows))


def test_standardising_is_folded_into_the_first_layer() -> None:
    rng = np.random.default_rng(0)
    rows, mean, deviation = rng.normal(size=(5, 3)), rng.normal(size=3), np.array([2.0, 0.0, 0.5])
    layers = [{"w": rng.normal(size=(3, 4)), "b": rng.normal(size=4)}]
    folded = standardising(layers, mean, deviation)
    scaled = (rows - mean) / np.where(deviation > 0, deviation, np.inf)
    np.testing.assert_allclose(rows @ folded[0]["w"] + folded[0]["b"], scaled @ layers[0]["w"] + layers[0]["b"])


def test_the_command_line(
    patients: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run, then predict; then everything that goes wrong is one sentence, exit code 2, and nothing written."""
    roles = ["--label", "outcome", "--client", "hospital", "--drop", "sex"]
    run = ["run", "loss-tuning", "--data", str(patients), *roles, "--set", "hidden=4", "--rounds", "5", "--out", "done"]
    done = fedbilevel(*run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for said in ("160 rows, 3 clients, 2 classes", "age ", "number: mean", "sex ", "left out: dropped", "omega"):
        assert said in done.stdout, said
    assert (tmp_path / "done" / MODEL).exists()
    people(20, seed=5).drop(columns=["outcome", "hospital"]).to_csv(tmp_path / "new.csv", index=False)
    done = fedbilevel("predict", "done", "new.csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "predictions.csv")
    assert table.row.tolist() == list(range(2, 22))
    assert set(table.predicted_label) <= {"ill", "well"}
    np.testing.assert_allclose(table["p(ill)"] + table["p(well)"], 1, atol=2e-6)

    monkeypatch.setattr("fedbilevel.runs.interrupts.listen", lambda: None)  # as a process of its own would
    monkeypatch.setattr("fedbilevel.storage.compiled.enable", lambda: None)
    monkeypatch.setattr("warnings.showwarning", warnings.showwarning)
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    for arguments, sentence in (
        (["predict", "done", "new.csv"], "predictions.csv already exists"),
        (["predict", "new.csv", "new.csv", "--out", "p.csv"], "cannot be read"),
        (["predict", ".", "new.csv", "--out", "p.csv"], "has no trained model"),
        (["predict", "done", "none.csv", "--out", "p.csv"], "there is no file none.csv"),
        ([*run[:-4], "--drop", "agee", "--out", "other"], "has no column 'agee' (--drop): did you mean 'age'?"),
        (["run", "regularization", "--data", str(patients)], "is the label? It has age, dose"),
        (["run", "data-cleaning", "--data", str(patients), *roles], "fedbilevel clean"),
        (["run", "few-shot", "--data", str(patients), *roles], "there is no task for your own table called 'few-shot'"),
        (["run", "regularization", *roles], "which table? Give its file with --data."),
        (["run", "fairness", "--data", str(patients), *roles], "fairness needs a column with two groups"),
    ):
        monkeypatch.setattr("sys.argv", ["fedbilevel", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert (ended.value.code, said.out) == (2, ""), arguments
        assert sentence in said.err, (arguments, said.err)
        assert said.err.count("\n") == 1, said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_from_python(patients: Path) -> None:
    task = fb.tasks.on_table("regularization", fb.data.table(patients, **ROLES))  # pyright: ignore[reportArgumentType]
    result = fb.solve(task, fb.FedBiO(lr_upper=20.0, lr_lower=0.6, lr_adjoint=0.6, local_steps=1), rounds=60)
    assert result.metrics["auc"] > 0.9
    (_, probabilities), *_ = task.classifier(result.x, result.y).predict(patients)  # pyright: ignore[reportOptionalCall]
    assert ((probabilities[:, 1] > 0.5) == (people().outcome == "well")).mean() > 0.85
    with pytest.raises(fb.FedbilevelError, match="no option of regularization called 'hiden'"):
        fb.tasks.on_table("regularization", fb.data.table(patients, label="outcome"), hiden=3)
