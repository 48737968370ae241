"""Shares of wrong labels with intervals, per client and per class, and which labels are taken for which."""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

Z = 1.96  # standard deviations: an interval of 95 %


class Share(NamedTuple):
    """How many labels of a group are probably wrong.

    Args:
        name: of the group.
        rows: how many it has.
        trusted: how many of these are trusted.
        issues: how many are label issues: wrong with a probability above one half.
        share: the expected share of wrong labels among the rows that are not trusted.
        low, high: an interval of 95 % around it.
    """

    name: Hashable
    rows: int
    trusted: int
    issues: int
    share: float
    low: float
    high: float


def wilson(wrong: float, rows: float) -> tuple[float, float]:
    """The interval of Wilson (1927) for a share. It is never empty, not even around 0 or with a single row.

    >>> low, high = wilson(10, 100)
    >>> round(low, 3), round(high, 3), wilson(0, 0)
    (0.055, 0.174, (0.0, 1.0))
    """
    if rows <= 0:
        return 0.0, 1.0
    share = min(max(wrong / rows, 0.0), 1.0)
    middle = (share + Z**2 / (2 * rows)) / (1 + Z**2 / rows)
    half = Z / (1 + Z**2 / rows) * float(np.sqrt(share * (1 - share) / rows + Z**2 / (4 * rows**2)))
    return max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share))


def share_of(probability: np.ndarray) -> tuple[float, float, float]:
    """The share of wrong labels among rows that are wrong with these probabilities, and its interval.

    Where each row is certain, this is Wilson's interval. Where models are unsure, rows say less about the share: n rows
    with probabilities p of mean e count as sum((p - e)^2) / (e (1 - e)) rows, by the Fisher information about e. A
    quarter is added above and, divided by n, below, so that rows that are right beyond doubt count fully.

    >>> [round(value, 2) for value in share_of(np.array([1.0] * 20 + [0.0] * 80))]
    [0.2, 0.13, 0.29]
    >>> [round(value, 2) for value in share_of(np.full(100, 0.2))]
    [0.2, 0.01, 0.81]
    """
    rows = len(probability)
    if not rows:
        return 0.0, 0.0, 1.0
    share = float(np.clip(probability.mean(dtype=float), 0, 1))
    sure = float(np.sum((probability - share) ** 2, dtype=float))
    count = rows * (sure + 0.25) / (rows * share * (1 - share) + 0.25)
    return share, *wilson(share * count, count)


def shares(suspects: "pd.DataFrame", by: str, order: Sequence[Hashable] | None = None) -> list[Share]:
    """The shares of all groups of a table of suspects.

    Args:
        suspects: the table, as ``Found.suspects``.
        by: the column that names the groups: "client" or "given_label".
        order: the names of the groups in their order, those without a row included; None: as they come.
    """
    groups = dict(list(suspects.groupby(by, sort=False, dropna=False, observed=True)))
    found = []
    for name in groups if order is None else order:
        rows = groups.get(name)  # pyright: ignore[reportArgumentType]
        if rows is None:
            found.append(Share(name, 0, 0, 0, 0.0, 0.0, 1.0))
            continue
        open_ = ~rows["trusted"].to_numpy(bool)
        issues = int(rows["is_label_issue"].to_numpy(bool).sum())
        share = share_of(rows["probability_wrong"].to_numpy(float)[open_])
        found.append(Share(name, len(rows), len(rows) - int(open_.sum()), issues, *share))
    return found


class Confusion(NamedTuple):
    """Which labels are given where others are likely: ``counts[i, j]`` rows with label i are likely j.

    Rows that are no label issue count for the label they have.
    """

    classes: Sequence[Hashable]
    counts: np.ndarray

    def pairs(self, most: int) -> list[tuple[Hashable, Hashable, int]]:
        """The most frequent confusions: given, likely, how often."""
        off = self.counts.copy()
        np.fill_diagonal(off, 0)
        order = np.argsort(-off, axis=None, kind="stable")[:most]
        found = [(*np.unravel_index(n, off.shape), int(off.flat[n])) for n in order]
        return [(self.classes[int(i)], self.classes[int(j)], count) for i, j, count in found if count]


def confusion(suspects: "pd.DataFrame", classes: Sequence[Hashable]) -> Confusion:
    """Count given and likely labels."""
    number = {name: n for n, name in enumerate(classes)}
    given, likely = (
        np.array([number[name] for name in suspects[column]], int) for column in ("given_label", "predicted_label")
    )
    likely = np.where(suspects["is_label_issue"].to_numpy(bool), likely, given)
    counts = np.zeros((len(classes), len(classes)), int)
    np.add.at(counts, (given, likely), 1)
    return Confusion(classes, counts)
