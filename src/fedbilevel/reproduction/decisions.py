"""What numbers of a few seeds can decide: 95 % intervals, and the outcome that follows from them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from scipy.special import fdtri, stdtrit

from fedbilevel.reproduction.files import ResultColumn

LEVEL = 0.95
"""How often an interval contains the number that infinitely many seeds would give."""


class Outcome(StrEnum):
    """Whether a claim holds under a condition. It is undecided if the interval contains the number in question."""

    HOLDS = "holds"
    UNDECIDED = "undecided"
    FAILS = "does not hold"
    NOT_RUN = "not run"


def together(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcome of a claim that holds if all of its parts hold: the worst of theirs."""
    some = set(outcomes)
    order = (Outcome.FAILS, Outcome.NOT_RUN, Outcome.UNDECIDED, Outcome.HOLDS)
    return next(outcome for outcome in order if outcome in some)


@dataclass(frozen=True)
class Interval:
    """A number and its interval, which is infinite where there are not enough seeds."""

    number: float
    low: float = -math.inf
    high: float = math.inf

    def within(self, least: float = -math.inf, most: float = math.inf) -> Outcome:
        """Whether the whole interval is between two bounds, or outside, or neither."""
        if math.isnan(self.number):
            return Outcome.FAILS
        if self.low > least and self.high < most:
            return Outcome.HOLDS
        return Outcome.FAILS if self.high < least or self.low > most else Outcome.UNDECIDED

    def shown(self, column: ResultColumn) -> str:
        if math.isinf(self.high):
            return f"{self.number:+.{column.digits}f}, one seed"
        return f"{self.number:+.{column.digits}f} [{column.shown(self.low)}, {column.shown(self.high)}]"


def mean(values: Sequence[float] | np.ndarray) -> Interval:
    """The mean over seeds and its t interval."""
    count = len(values)
    number = float(np.mean(values)) if count else math.nan
    if count < 2 or math.isnan(number):
        return Interval(number)
    half = stdtrit(count - 1, (1 + LEVEL) / 2) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Interval(number, number - half, number + half)


def deviations(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> Interval:
    """The standard deviation over seeds of the second divided by that of the first, and its F interval."""
    sizes = len(first) - 1, len(second) - 1
    if min(sizes) < 1:
        return Interval(math.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = float(np.std(second, ddof=1) / np.std(first, ddof=1))
    low, high = (math.sqrt(fdtri(sizes[1], sizes[0], share)) for share in ((1 + LEVEL) / 2, (1 - LEVEL) / 2))
    return Interval(ratio, ratio / low, ratio / high)


def finished(numbers: Mapping[int, float]) -> dict[int, float]:
    """The numbers, by seed, of the runs that came to their end."""
    return {seed: number for seed, number in numbers.items() if not math.isnan(number)}


def better(
    first: Mapping[int, float], second: Mapping[int, float], sign: int, margin: float
) -> tuple[Outcome, Interval]:
    """Whether the first is better than the second by more than a margin, and by how much, on the seeds of both.

    What diverges with any seed is behind what comes to its end with all of them; but where it is ahead with the
    seeds with which it does come to its end, nothing is decided.
    """
    common = sorted(finished(first).keys() & finished(second).keys())
    lead = mean([sign * (first[seed] - second[seed]) for seed in common])
    if len(finished(first)) < len(first):
        return Outcome.FAILS, lead
    if len(finished(second)) < len(second):
        return Outcome.UNDECIDED if lead.number <= margin else Outcome.HOLDS, lead
    return (lead.within(least=margin) if common else Outcome.UNDECIDED), lead
