"""Finding planted label errors, and saying so where they cannot be found."""

from functools import cache

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.cleaning import Findings, clean_arrays
from fedbilevel.cleaning.effort import DEFAULT, FEDAVG_ROUNDS, THOROUGH, design_of, folds_of
from fedbilevel.cleaning.judgement import Interval, halfway, interval, noise_of
from fedbilevel.cleaning.scaling import Scale, Sums
from fedbilevel.tasks.label_errors import SHARPER, SHIFTS, Said, in_chunks, summed
from fedbilevel.tasks.scores import auc


def planted(share: float, seed: int = 0) -> dict[str, np.ndarray]:
    """Breast cancer at four clients, of whose rows twenty each are trusted."""
    data, rng = fb.data.breast_cancer().train, np.random.default_rng(seed)
    clients = rng.integers(0, 4, len(data.labels))
    trusted = np.zeros(len(clients), bool)
    for m in range(4):
        trusted[rng.permutation(np.flatnonzero(clients == m))[:20]] = True
    wrong = (rng.random(len(clients)) < share) & ~trusted
    labels = np.where(wrong, 1 - data.labels, data.labels)
    return {"inputs": data.inputs, "labels": labels, "clients": clients, "trusted": trusted, "wrong": wrong}


@cache
def found(share: float, with_trusted: bool) -> Findings:
    p = planted(share)
    return clean_arrays(p["inputs"], p["labels"], p["clients"], p["trusted"] if with_trusted else None)


def test_planted_errors_are_found() -> None:
    p, findings = planted(0.3), found(0.3, True)
    suspicious = ~p["trusted"]
    assert auc(p["wrong"][suspicious], -findings.quality[suspicious]) > 0.98
    assert findings.identified
    assert not findings.warning
    hits = p["wrong"][findings.issue]
    assert hits.mean() > 0.9
    assert hits.sum() > 0.8 * p["wrong"].sum()
    for noise in findings.noise:
        rows = suspicious & (p["clients"] == noise.client)
        assert noise.rows == rows.sum()
        assert noise.low <= p["wrong"][rows].mean() <= noise.high
        assert abs(noise.level - p["wrong"][rows].mean()) < 0.06
        assert noise.confusion.sum() == pytest.approx(noise.rows, rel=1e-4)
        np.testing.assert_allclose(noise.matrix.sum(1), 1, rtol=1e-5)
    assert findings.given is not None
    assert findings.cleaned is not None
    assert findings.cleaned.loss < findings.given.loss
    assert not findings.issue[p["trusted"]].any()
    right = np.where(p["wrong"], 1 - p["labels"], p["labels"])
    assert (findings.model.predict(p["inputs"]) == right).mean() > 0.94
    np.testing.assert_allclose(findings.model.predict_proba(p["inputs"]).sum(1), 1, rtol=1e-6)
    assert findings.exchanged.fedavg_runs <= DEFAULT.most


def test_without_trusted_rows_there_is_a_warning_and_unclear_labels_are_only_ranked() -> None:
    p, findings = planted(0.4), found(0.4, False)
    assert "No rows are trusted" in findings.warning
    assert "cannot be told" in findings.warning
    assert not findings.identified
    assert not findings.issue.any()
    assert auc(p["wrong"], -findings.quality) > 0.9
    assert findings.given is None
    few = found(0.1, False)
    assert few.identified
    assert few.issue.any()
    assert "cannot be told" not in few.warning


def test_the_same_seed_gives_the_same_findings_and_progress_is_told() -> None:
    p, told = planted(0.3), []
    again = clean_arrays(
        p["inputs"], p["labels"], p["clients"], p["trusted"], progress=lambda done, all: told.append((done, all))
    )
    np.testing.assert_array_equal(again.wrong, found(0.3, True).wrong)
    assert told[0] == (0, DEFAULT.rounds)
    assert told[-1] == (DEFAULT.rounds, DEFAULT.rounds)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"labels": np.array([0, 1])}, "different lengths"),
        ({"labels": np.array([0.5] * 6)}, "whole numbers"),
        ({"labels": np.array([-1, 0, 1, 0, 1, 0])}, "whole numbers"),
        ({"classes": 1}, "does not fit 1 classes"),
        ({"inputs": np.full((6, 2), np.nan)}, "finite"),
        ({"trusted": np.array([True, False, True, False, True, False])}, "all trusted rows have the label 0"),
        ({name: np.array([], int) for name in ("inputs", "labels", "clients")} | {"trusted": None}, "no rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_one_sentence(change: dict[str, np.ndarray], sentence: str) -> None:
    good = {"inputs": np.zeros((6, 2)), "labels": np.arange(6) % 2, "clients": np.arange(6) // 3, "trusted": None}
    with pytest.raises(fb.FedbilevelError, match=sentence):
        clean_arrays(**{**good, **change})


def test_the_cost_stays_below_its_limit() -> None:
    """Whatever the numbers of columns and classes; more is tried where it costs less."""
    for effort in (DEFAULT, THOROUGH):
        for features, classes in ((4, 2), (30, 2), (64, 10), (784, 10), (784, 26), (50, 100)):
            design = design_of(features, classes, True, effort)
            assert design.cost * effort.rounds / FEDAVG_ROUNDS <= effort.most, (features, classes)
    assert len(design_of(64, 10, True, THOROUGH).candidates) > len(design_of(64, 10, True, DEFAULT).candidates)


def test_folds_have_equally_many_rows_of_every_label() -> None:
    rng = np.random.default_rng(0)
    labels, trusted = rng.integers(0, 3, 200), rng.random(200) < 0.2
    fold = folds_of(labels, trusted, 5, rng)
    for label in range(3):
        for sure in (True, False):
            counts = np.bincount(fold[(labels == label) & (trusted == sure)], minlength=5)
            assert np.ptp(counts) <= 1


@pytest.mark.parametrize("rows", [1, 63, 100, 2048, 5000])
def test_chunks_are_filled_up_and_nothing_counts_twice(rows: int) -> None:
    values = np.arange(rows, dtype=np.float32)
    assert summed(lambda counts, some: counts @ some, values) == values.sum(dtype=float)
    np.testing.assert_array_equal(in_chunks(lambda some: (2 * some,), values)[0], 2 * values)


def test_scaling_by_sums_is_scaling_by_all_rows() -> None:
    rng = np.random.default_rng(0)
    table = np.column_stack([rng.normal(3, 2, 90), rng.normal(-1, 0.1, 90), np.full(90, 7.0)])
    scale = Scale.fit([Sums.of(table[:30]), Sums.of(table[30:])], images=False)
    expected = (table - table.mean(0)) / np.where(table.std(0) > 1e-9, table.std(0), np.inf)
    np.testing.assert_allclose(scale(table), expected, atol=1e-5)
    images = Scale.fit([Sums.of(table)], images=True)
    assert np.ptp(images.deviation) == 0


def test_the_interval_of_a_known_likelihood() -> None:
    """Where the log-likelihood of the logit is -a (shift - sharper)^2, sharper models can explain any noise."""
    level = 0.3
    sure = -8.0 * (SHIFTS[:, None] ** 2 + SHARPER[None] ** 2)
    half = np.sqrt(1.92 / 8)
    logit = np.log(level / (1 - level)) + np.array([-half, half])
    np.testing.assert_allclose(interval(sure, level), 1 / (1 + np.exp(-logit)), atol=0.01)
    unsure = -8.0 * (SHIFTS[:, None] - 2 * SHARPER[None]) ** 2
    low, high = interval(unsure, level)
    assert low < 0.05
    assert high > 0.8


def test_without_trusted_rows_mistakes_for_a_certain_class_are_not_called_identified() -> None:
    """Two in five labels are the next class: models that predict both classes explain them without any noise."""
    rng = np.random.default_rng(0)
    right = rng.integers(0, 3, 600)
    inputs = 4 * np.eye(3)[right] + rng.normal(size=(600, 3))
    labels = (right + (rng.random(600) < 0.4)) % 3
    findings = clean_arrays(inputs, labels, np.arange(600) % 3)
    assert not findings.identified
    assert not findings.issue.any()
    assert "cannot be told" in findings.warning
    assert findings.noise[0].high > 0.3
    assert Interval(0.1, 0.2).or_hard(0.4) == (0.1, 0.2)


def test_the_noise_of_a_client_by_hand() -> None:
    """Two of four rows are certainly wrong: a level of a half, with the binomial error."""
    posterior = np.eye(2)[[0, 0, 1, 1, 0]]
    noise = noise_of("a", Said(posterior, posterior), np.array([0, 0, 0, 0, 0]), np.arange(5) == 4, np.eye(2))
    assert (noise.level, noise.rows, noise.issues) == (0.5, 4, 2)
    assert noise.confusion.tolist() == [[2, 0], [2, 0]]
    assert noise.high - noise.level == pytest.approx(1.96 * 0.5 / 2)
    np.testing.assert_allclose(halfway(np.array([0.5, 0.8]), np.array([0.5, 0.2])), 0.5)
