"""Shares of wrong labels: their intervals, and which labels are taken for which."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.cleaning.shares import confusion, share_of, shares, wilson


def table(**columns: list) -> pd.DataFrame:
    return pd.DataFrame(columns)


@given(rows=st.integers(1, 10**6), share=st.floats(0, 1))
def test_an_interval_is_around_its_share_and_within_0_and_1(rows: int, share: float) -> None:
    low, high = wilson(share * rows, rows)
    assert 0 <= low <= share <= high <= 1
    assert low < high


def test_the_interval_solves_its_equation() -> None:
    """Wilson's ends are the shares p whose distance to the observed one is z standard deviations of p."""
    for wrong, rows in ((3, 20), (50, 400), (199, 200)):
        for end in wilson(wrong, rows):
            assert abs(wrong / rows - end) == pytest.approx(1.96 * np.sqrt(end * (1 - end) / rows), rel=1e-9)


def test_intervals_cover_the_number_of_wrong_labels() -> None:
    """Rows that are wrong with known probabilities: the interval around the expected share has 95 % or more."""
    rng = np.random.default_rng(0)
    inside = []
    for _ in range(400):
        probability = rng.beta(0.4, 1.6, size=80)
        _, low, high = share_of(probability)
        inside.append(low <= (rng.random(80) < probability).mean() <= high)
    assert np.mean(inside) >= 0.95


def test_the_interval_is_longer_where_models_are_unsure() -> None:
    """A mixture of two groups whose scores overlap: the interval has the true share, wherever the overlap."""
    rng = np.random.default_rng(1)
    for apart in (0.5, 1.5, 4.0):
        inside, lengths = [], []
        for _ in range(200):
            wrong = rng.random(150) < 0.3
            score = rng.normal(size=150) + apart * wrong
            odds = np.exp(apart * score - apart**2 / 2)
            share = 0.3
            for _ in range(100):  # the maximum of the likelihood
                share = float(np.mean(share * odds / (share * odds + 1 - share)))
            found, low, high = share_of(share * odds / (share * odds + 1 - share))
            assert found == pytest.approx(share, abs=0.02)
            inside.append(low <= 0.3 <= high)
            lengths.append(high - low)
        assert np.mean(inside) > 0.9, apart
        assert (np.mean(lengths) > 0.3) == (apart < 1)


def test_rows_that_are_right_beyond_doubt_count_fully() -> None:
    share, low, high = share_of(np.full(200, 1e-6))
    assert (share, low) == (pytest.approx(1e-6), pytest.approx(0, abs=1e-8))
    assert high == pytest.approx(wilson(0, 200)[1], rel=0.01)


def test_shares_are_of_rows_that_are_not_trusted() -> None:
    suspects = table(
        client=["a", "a", "a", "b", "c"],
        trusted=[False, False, True, False, True],
        probability_wrong=[0.9, 0.3, 0.0, 0.25, 0.0],
        is_label_issue=[True, False, False, False, False],
    )
    a, b, c, d = shares(suspects, "client", ["a", "b", "c", "d"])
    assert (a.rows, a.trusted, a.issues, a.share) == (3, 1, 1, pytest.approx(0.6))
    assert b[4:] == share_of(np.array([0.25]))
    assert (c.rows, c.trusted, c.low, c.high) == (1, 1, 0, 1)
    assert d.rows == 0


def test_only_label_issues_are_confusions() -> None:
    suspects = table(
        given_label=["x", "x", "y", "y", "z"],
        predicted_label=["y", "y", "x", "x", "z"],
        is_label_issue=[True, True, True, False, False],
    )
    found = confusion(suspects, ["x", "y", "z"])
    assert found.counts.tolist() == [[0, 2, 0], [1, 1, 0], [0, 0, 1]]
    assert found.pairs(5) == [("x", "y", 2), ("y", "x", 1)]
    assert found.pairs(1) == [("x", "y", 2)]
