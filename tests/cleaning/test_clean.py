"""``fb.clean``: data frames in, data frames out; arrays; what was dropped or given another label."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

import fedbilevel as fb
from fedbilevel.cleaning.findings import FinalModel
from fedbilevel.cleaning.model import _shift
from fedbilevel.cleaning.scaling import Scale, Sums
from fedbilevel.data.encoding import Encoding
from fedbilevel.errors import FedbilevelWarning
from fedbilevel.tasks.classifier import Classifier, standardising
from fedbilevel.tasks.label_errors import Design
from planted import HOSPITALS, patients

ROLES: dict[str, Any] = {"label": "outcome", "client": "hospital", "trusted": "checked", "id": "patient"}


@pytest.fixture(scope="module")
def data() -> tuple[pd.DataFrame, np.ndarray]:
    return patients()


@pytest.fixture(scope="module")
def found(data: tuple[pd.DataFrame, np.ndarray]) -> fb.Found:
    return fb.clean(data[0], **ROLES)


def test_planted_errors_come_first(found: fb.Found, data: Any) -> None:
    frame, wrong = data
    suspects = found.suspects
    assert sorted(suspects.index) == list(range(240))
    assert not suspects["is_label_issue"].isna().any()
    open_ = suspects[~suspects["trusted"]]
    assert roc_auc_score(wrong[open_.index], -open_["label_quality"]) > 0.95
    assert (np.diff(open_["label_quality"]) >= 0).all()
    assert wrong[suspects.index[suspects["is_label_issue"]]].mean() > 0.8
    assert suspects["trusted"].to_numpy().tolist() == sorted(suspects["trusted"])  # they come last
    assert not suspects.loc[suspects["trusted"], "is_label_issue"].any()
    assert (suspects["given_label"] == frame["outcome"][suspects.index]).all()
    assert (suspects["client"] == frame["hospital"][suspects.index]).all()
    assert (suspects["row"] == frame["patient"][suspects.index]).all()
    assert list(suspects.columns[:7]) == [
        "client", "row", "is_label_issue", "label_quality", "given_label", "predicted_label", "probability_wrong",
    ]  # fmt: skip


def test_every_client_has_its_noise(found: fb.Found, data: Any) -> None:
    frame, wrong = data
    noise = found.noise.set_index("client")
    assert set(noise.index) == set(HOSPITALS)
    for name in HOSPITALS:
        mine = (frame["hospital"] == name) & (frame["checked"] == "no")
        assert noise["low"][name] <= wrong[mine].mean() <= noise["high"][name]
        assert noise["rows"][name] == 60
    assert noise["label_issues"].sum() == found.suspects["is_label_issue"].sum()
    assert noise["trusted"].sum() == 40


def test_what_is_left_has_no_label_issue(found: fb.Found, data: Any) -> None:
    frame, wrong = data
    issues = found.suspects.index[found.suspects["is_label_issue"]]
    pd.testing.assert_frame_equal(found.cleaned, frame.drop(index=issues))
    assert wrong[found.cleaned.index].mean() < wrong.mean() / 3


def test_the_frame_keeps_its_index_and_its_types_and_is_not_changed(data: Any) -> None:
    frame = data[0].copy()
    frame["outcome"] = (frame["outcome"] == "yes").astype(int)
    frame["hospital"] = frame["hospital"].map({name: 10 * n for n, name in enumerate(HOSPITALS)})
    frame.index = pd.Index([f"row {n}" for n in range(240)])
    before = frame.copy()
    found = fb.clean(frame, **ROLES, relabel=True)
    pd.testing.assert_frame_equal(frame, before)
    assert set(found.suspects.index) == set(frame.index)
    assert found.suspects["given_label"].dtype == frame["outcome"].dtype
    assert set(found.suspects["client"]) == {0, 10, 20, 30}
    assert found.cleaned.dtypes.equals(frame.dtypes)
    issues = found.suspects.index[found.suspects["is_label_issue"]]
    assert len(issues) > 10
    changed = found.cleaned["outcome"] != frame["outcome"]
    assert set(frame.index[changed]) == set(issues)
    assert (found.cleaned["outcome"][issues] == found.suspects["predicted_label"][issues]).all()
    pd.testing.assert_frame_equal(found.cleaned.drop(columns="outcome"), frame.drop(columns="outcome"))


def test_the_same_seed_gives_the_same_suspects(found: fb.Found, data: Any) -> None:
    pd.testing.assert_frame_equal(fb.clean(data[0], **ROLES).suspects, found.suspects)
    assert not fb.clean(data[0], **ROLES, seed=1).suspects.equals(found.suspects)


def test_the_order_of_the_rows_does_not_matter_much(found: fb.Found, data: Any) -> None:
    mixed = data[0].sample(frac=1, random_state=3)
    again = fb.clean(mixed, **ROLES)
    both = found.suspects["probability_wrong"].corr(again.suspects["probability_wrong"])
    assert both > 0.9


def test_arrays(data: Any) -> None:
    frame, wrong = data
    numbers = frame[["age", "weight", "pulse", "dose"]].to_numpy()
    features = np.column_stack([numbers, frame["ward"] == "007", frame["ward"] == "7"])
    labels, checked = (frame["outcome"] == "yes").to_numpy(), (frame["checked"] == "yes").to_numpy()
    found = fb.clean(features, labels, clients=frame["hospital"].to_numpy(), trusted=checked)
    assert found.suspects["given_label"].dtype == bool
    open_ = found.suspects[~found.suspects["trusted"]]
    order = found.order[: len(open_)]
    assert roc_auc_score(wrong[order], -open_["label_quality"]) > 0.95
    left, kept = found.cleaned
    issues = np.zeros(240, bool)
    issues[found.order] = found.suspects["is_label_issue"]
    np.testing.assert_array_equal(left, features[~issues])
    np.testing.assert_array_equal(kept, labels[~issues])


def test_the_model_knows_new_rows_by_their_columns(found: fb.Found, data: Any) -> None:
    """Also rare categories and constant columns, which the search scales in its own way."""
    inputs = found.data.inputs
    expected = found.findings.model.predict_proba(inputs)
    mixed = data[0][data[0].columns[::-1]].assign(more="unknown")
    np.testing.assert_allclose(found.model.predict_proba(mixed), expected, atol=1e-4)
    assert (found.model.predict(mixed) == np.array(["no", "yes"])[expected.argmax(1)]).all()
    assert found.model.classes == ("no", "yes")


def test_rare_values_are_scaled_as_in_the_search() -> None:
    rng = np.random.default_rng(0)
    rare = (np.arange(1000) < 3).astype(np.float32)  # standardised, 18 deviations from the mean
    inputs = np.column_stack([rng.normal(size=1000), rare, np.ones(1000)]).astype(np.float32)
    design = Design(3, 2, (), ())
    final = FinalModel(design, design.model.init(jax.random.key(0)), Scale.fit([Sums.of(inputs)], images=False))
    layers = standardising(final.parameters, *_shift(final, inputs))
    found = Classifier(Encoding(), ("a", "b"), [layers]).probabilities(inputs)
    np.testing.assert_allclose(found, final.predict_proba(inputs), atol=1e-5)


def test_arrays_are_saved_with_their_labels(data: Any, tmp_path: Path) -> None:
    frame = data[0]
    numbers = frame[["age", "weight", "pulse", "dose"]].to_numpy()
    features = np.column_stack([numbers, frame["ward"] == "007", frame["ward"] == "7"])
    labels, checked = (frame["outcome"] == "yes").to_numpy(int), (frame["checked"] == "yes").to_numpy()
    found = fb.clean(features, labels, clients=frame["hospital"].to_numpy(), trusted=checked, relabel=True)
    found.save(tmp_path)
    kept, given = found.cleaned
    np.testing.assert_array_equal(np.load(tmp_path / "cleaned-features.npy"), kept)
    assert pd.read_csv(tmp_path / "cleaned.csv")["label"].tolist() == given.tolist()
    assert (given != labels).sum() == found.suspects["is_label_issue"].sum() > 10
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_every_row_may_be_trusted(data: Any) -> None:
    found = fb.clean(data[0].assign(checked="yes"), **ROLES)
    assert not found.suspects["is_label_issue"].any()
    assert len(found.cleaned) == 240
    assert found.plot()._repr_png_()


def test_without_trusted_rows_there_is_a_loud_warning(data: Any) -> None:
    frame = data[0].drop(columns="checked")
    with pytest.warns(FedbilevelWarning, match="No rows are trusted"):
        found = fb.clean(frame, label="outcome", client="hospital", id="patient")
    assert any("No rows are trusted" in sentence for sentence in found.warnings)
    assert found.gain is None
    assert not found.suspects["trusted"].any()


def test_cleaning_helps_where_it_can_be_seen(found: fb.Found) -> None:
    assert found.gain is not None
    assert found.gain.rows == 40
    assert found.gain.cleaned.loss < found.gain.given.loss
    assert "40 trusted rows" in found.gain.sentence


def test_the_picture(found: fb.Found) -> None:
    figure = found.plot()
    left, middle, _ = figure.axes
    most = found.noise.sort_values("noise")["client"].iloc[-1]
    assert left.get_yticklabels()[-1].get_text() == most
    assert "given" in middle.get_ylabel()
    assert figure._repr_png_()[:4] == b"\x89PNG"


def test_an_interrupted_search_continues_to_the_same_result(found: fb.Found, data: Any, tmp_path: Path) -> None:
    def stop(done: int, rounds: int) -> None:
        if done > rounds / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fb.clean(data[0], **ROLES, checkpoint=tmp_path, progress=stop)
    seen: list[int] = []
    again = fb.clean(data[0], **ROLES, checkpoint=tmp_path, progress=lambda done, rounds: seen.append(done))
    assert min(seen) > found.findings.exchanged.rounds / 3
    pd.testing.assert_frame_equal(again.suspects, found.suspects)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"label": "outcom"}, "did you mean 'outcome'?"),
        ({"label": "outcome", "client": "hospitl"}, "did you mean 'hospital'?"),
        ({"label": "outcome", "drop": ["dose", "doze"]}, "no column 'doze'"),
        ({"labels": np.zeros(240), "label": "outcome"}, "not both"),
        ({"label": "outcome", "client": "hospital", "clients": np.zeros(240)}, "not both"),
        ({"label": "outcome", "seed": -1}, "seed must be a whole number"),
        ({"label": "patient"}, "patient"),
    ],
)  # fmt: skip
def test_mistakes_are_sentences(data: Any, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError) as error:
        fb.clean(data[0], **arguments)
    assert sentence in str(error.value)
    assert str(error.value).endswith(("?", "."))
