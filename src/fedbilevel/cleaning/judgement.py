"""What clients conclude about their rows after a run, each by itself, and what sums over clients add to it."""

from typing import Any, NamedTuple

import numpy as np

from fedbilevel.cleaning.findings import Noise, Score
from fedbilevel.tasks.label_errors import SHIFTS, Said

Array = np.ndarray
WIDEST, WIDEST_UNTRUSTED = 0.25, 0.1
"""The widest 95 % interval of the share of wrong labels with which labels are called wrong, with trusted rows and
without; with a wider one they are only ranked. Without trusted rows the interval is too narrow, because errors of the
models count only as far as these are too sure or not sure enough."""
HARD = 0.25
"""The largest share of labels that models neither predict nor explain by noise, with which labels are called wrong
without trusted rows: where some classes are mistaken for certain others, wrong labels look like a hard question."""
HALF = 1.92  # half of the 95 % quantile of chi-squared with one degree of freedom


class Interval(NamedTuple):
    """A 95 % interval of the share of wrong labels of all clients together."""

    low: float
    high: float

    def identified(self, trusted: bool) -> bool:
        """Whether the share can be told from the data, in which some rows are trusted or none."""
        return self.high - self.low <= (WIDEST if trusted else WIDEST_UNTRUSTED)

    def or_hard(self, disagreement: float) -> "Interval":
        """Without trusted rows: up to the share of labels that models do not predict, if that is far more."""
        return Interval(self.low, disagreement) if disagreement > self.high + HARD else self


def interval(profile: Array, level: float) -> Interval:
    """The shares of wrong labels that explain the labels nearly as well as the best one, if the models may be more or
    less sure than they are.

    Args:
        profile: the sum over clients of :func:`fedbilevel.tasks.label_errors.profile`.
        level: the estimated share.
    """
    best = profile.max(1)
    # The likelihood is a smooth curve: the ends of the interval lie between the points where it is known.
    fine = np.linspace(SHIFTS[0], SHIFTS[-1], 50 * (len(SHIFTS) - 1) + 1)
    likelihood = np.interp(fine, SHIFTS, best)
    near = fine[likelihood >= likelihood.max() - HALF]
    odds = level / max(1 - level, 1e-9) * np.exp([min(near.min(), 0.0), max(near.max(), 0.0)])
    low, high = odds / (1 + odds)
    return Interval(float(low), float(high))


def noise_of(name: Any, said: Said, labels: Array, trusted: Array, matrix: Array) -> Noise:
    """How the labels of a client go wrong."""
    classes = len(matrix)
    wrong = 1 - at(said.posterior, labels)[~trusted].astype(float)
    confusion = np.zeros((classes, classes))
    np.add.at(confusion.T, labels[~trusted], said.posterior[~trusted])
    level = float(wrong.mean()) if len(wrong) else 0.0
    # The score of a row is (P(wrong) - e) / (e (1 - e)), and the information the sum of its squares.
    spread = float(np.sum((wrong - level) ** 2)) ** 0.5
    error = 1.96 * level * (1 - level) / spread if spread > 1e-6 else 0.0
    low, high = max(0.0, level - error), min(1.0, level + error)
    return Noise(name, len(wrong), level, low, high, matrix, confusion, int(np.sum(wrong > 0.5)))


def with_interval(noise: Noise, overall: Interval, level: float) -> Noise:
    """The noise of a client, with the uncertainty of the models in its interval, which all clients share."""
    below = np.hypot(noise.level - noise.low, level - overall.low)
    above = np.hypot(noise.high - noise.level, overall.high - level)
    return noise._replace(low=float(max(0.0, noise.level - below)), high=float(min(1.0, noise.level + above)))


def score(probabilities: Array, labels: Array) -> Score:
    """How well probabilities predict labels that are right."""
    right = at(probabilities, labels)
    return Score(float(np.mean(probabilities.argmax(1) == labels)), float(-np.mean(np.log(np.maximum(right, 1e-12)))))


def at(table: Array, labels: Array) -> Array:
    """The entry of every row at its label."""
    return np.take_along_axis(table, labels[:, None].astype(int), 1)[:, 0]


def halfway(one: Array, other: Array) -> Array:
    """The probabilities whose odds are the geometric means of those of two others: what the inputs say of the label,
    and what the noise model adds. Each ranks better where the other one errs.
    """
    odds = lambda p: np.clip(p, 1e-7, 1 - 1e-7) / (1 - np.clip(p, 1e-7, 1 - 1e-7))
    both = np.sqrt(odds(np.asarray(one, float)) * odds(np.asarray(other, float)))
    return both / (1 + both)
