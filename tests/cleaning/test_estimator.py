"""``CleanClassifier``: what scikit-learn expects of a classifier, and what it finds."""

import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

import fedbilevel as fb
from planted import patients

FASTER = {  # those that fit nothing, or rows of one shape only
    "check_estimator_cloneable", "check_estimator_tags_renamed", "check_valid_tag_types", "check_estimator_repr",
    "check_no_attributes_set_in_init", "check_estimators_unfitted", "check_mixin_order",
    "check_do_not_raise_errors_in_init_or_set_params", "check_complex_data", "check_estimators_empty_data_messages",
    "check_estimator_sparse_tag", "check_estimator_sparse_array", "check_classifiers_one_label",
    "check_classifiers_regression_target", "check_parameters_default_constructible", "check_get_params_invariance",
    "check_set_params", "check_fit2d_1sample", "check_fit1d", "check_supervised_y_no_nan", "check_requires_y_none",
}  # fmt: skip


def checks() -> list[Any]:
    """All of scikit-learn's checks; those of one name as one parameter each."""
    found = []
    for estimator, check in estimator_checks_generator(fb.CleanClassifier()):
        name = getattr(check, "func", check).__name__
        marks = () if name in FASTER else pytest.mark.slow
        found.append(pytest.param(estimator, check, marks=marks, id=f"{len(found)}-{name}"))
    return found


@pytest.mark.parametrize(("estimator", "check"), checks())
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    """All apply; that of array libraries skips itself, unless SCIPY_ARRAY_API is set."""
    check(estimator)


@pytest.fixture(scope="module")
def rows() -> dict[str, np.ndarray]:
    """The small table as arrays."""
    frame, wrong = patients()
    numbers = frame[["age", "weight", "pulse", "dose"]].to_numpy()
    return {
        "X": np.column_stack([numbers, frame["ward"] == "007", frame["ward"] == "7"]),
        "y": frame["outcome"].to_numpy(str),
        "clients": frame["hospital"].to_numpy(str),
        "trusted": (frame["checked"] == "yes").to_numpy(),
        "wrong": wrong,
    }


@pytest.fixture(scope="module")
def fitted(rows: dict[str, np.ndarray]) -> Any:
    return fb.CleanClassifier().fit(rows["X"], rows["y"], clients=rows["clients"], trusted=rows["trusted"])


def test_it_finds_planted_errors_and_learns_what_is_right(fitted: Any, rows: dict[str, np.ndarray]) -> None:
    wrong, issues = rows["wrong"], fitted.label_issues_
    assert issues.dtype == bool
    assert (issues & wrong).sum() > 0.7 * wrong.sum()
    assert wrong[issues].mean() > 0.8
    right = np.where(wrong, np.where(rows["y"] == "yes", "no", "yes"), rows["y"])
    assert fitted.score(rows["X"], right) > 0.93
    assert set(fitted.predicted_labels_) == set(fitted.classes_) == {"no", "yes"}
    assert [noise.client for noise in fitted.noise_] == ["north", "south", "east", "west"]
    assert not fitted.label_issues_[rows["trusted"]].any()
    np.testing.assert_allclose(fitted.predict_proba(rows["X"]).sum(1), 1)


def test_a_label_has_no_say_about_itself(fitted: Any, rows: dict[str, np.ndarray]) -> None:
    """To change the label of a row changes what is predicted for it by less than it changes its quality."""
    row = int(np.argmax(np.where(rows["trusted"], 0, fitted.label_quality_)))
    other = rows["y"].copy()
    other[row] = "no" if other[row] == "yes" else "yes"
    again = fb.CleanClassifier().fit(rows["X"], other, clients=rows["clients"], trusted=rows["trusted"])
    assert again.predicted_labels_[row] == fitted.predicted_labels_[row]
    assert again.label_issues_[row]
    assert not fitted.label_issues_[row]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedbio", fb.FedBiO(lr_upper=1.0, lr_lower=0.1, lr_adjoint=0.02, local_steps=5)])
def test_other_algorithms_find_them_too(algorithm: Any, fitted: Any, rows: dict[str, np.ndarray]) -> None:
    other = fb.CleanClassifier(algorithm).fit(rows["X"], rows["y"], clients=rows["clients"], trusted=rows["trusted"])
    assert np.mean(other.label_issues_ == fitted.label_issues_) > 0.95


def test_it_works_in_pipelines_and_survives_pickling(fitted: Any, rows: dict[str, np.ndarray]) -> None:
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict(rows["X"]), fitted.predict(rows["X"]))
    pipeline = make_pipeline(StandardScaler(), clone(fitted))
    given = {f"cleanclassifier__{name}": rows[name] for name in ("clients", "trusted")}
    assert pipeline.fit(rows["X"], rows["y"], **given).score(rows["X"], rows["y"]) > 0.7


@pytest.mark.slow
def test_cross_validation(rows: dict[str, np.ndarray]) -> None:
    """What scikit-learn does not know of is divided with the rows."""
    params = {"clients": rows["clients"], "trusted": rows["trusted"]}
    scores = cross_val_score(fb.CleanClassifier(), rows["X"], rows["y"], cv=2, params=params)
    assert scores.min() > 0.7


def test_mistakes(rows: dict[str, np.ndarray]) -> None:
    with pytest.raises(NotFittedError):
        fb.CleanClassifier().predict(rows["X"])
    with pytest.raises(fb.FedbilevelError, match="did you mean 'fedbio'"):
        fb.CleanClassifier("fedbi").fit(rows["X"], rows["y"])
    with pytest.raises(ValueError, match="clients has 3 values, but there are 240 rows"):
        fb.CleanClassifier().fit(rows["X"], rows["y"], clients=[1, 2, 3])
    with pytest.raises(AttributeError, match="has no attribute 'CleanClasifier'"):
        fb.CleanClasifier  # noqa: B018  # pyright: ignore
