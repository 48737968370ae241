"""What a few seeds can decide."""

import math

import numpy as np
import pytest

from fedbilevel.reproduction import decisions
from fedbilevel.reproduction.decisions import Interval, Outcome, better, together

HOLDS, UNDECIDED, FAILS = Outcome.HOLDS, Outcome.UNDECIDED, Outcome.FAILS


def test_the_interval_of_a_mean_is_that_of_students_table() -> None:
    made = decisions.mean([1.0, 2.0, 3.0])
    assert made.number == 2.0
    assert made.high - 2.0 == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)  # t of 97.5 %, two degrees of freedom
    assert decisions.mean([1.0, 2.0]).high - 1.5 == pytest.approx(12.7062 * 0.5, rel=1e-4)
    assert decisions.mean([5.0]) == Interval(5.0, -math.inf, math.inf)


def test_95_of_100_intervals_contain_the_mean() -> None:
    draws = np.random.default_rng(0).normal(size=(4000, 3))
    hits = [(made := decisions.mean(row)).low <= 0 <= made.high for row in draws]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.01)


def test_95_of_100_intervals_contain_the_ratio_of_deviations() -> None:
    draws = np.random.default_rng(1).normal(size=(4000, 7))
    made = [decisions.deviations(row[:3], 2 * row[3:]) for row in draws]
    assert np.mean([each.low <= 2 <= each.high for each in made]) == pytest.approx(0.95, abs=0.01)
    assert math.isnan(decisions.deviations([1.0], [1.0, 2.0]).number)


def test_a_number_inside_the_interval_decides_nothing() -> None:
    made = Interval(2.0, 1.0, 3.0)
    assert made.within(least=0.9) == HOLDS
    assert made.within(least=1.1) == UNDECIDED
    assert made.within(least=3.1) == FAILS
    assert made.within(most=3.1) == HOLDS
    assert made.within(most=2.9) == UNDECIDED
    assert made.within(most=0.9) == FAILS
    assert Interval(2.0).within(least=-1e9) == UNDECIDED
    assert Interval(math.nan).within(least=-1e9) == FAILS


def test_a_claim_with_parts_is_as_good_as_its_worst_part() -> None:
    assert together([HOLDS, HOLDS]) == HOLDS
    assert together([HOLDS, UNDECIDED]) == UNDECIDED
    assert together([HOLDS, UNDECIDED, FAILS]) == FAILS


def test_methods_are_compared_by_the_seeds_that_both_have() -> None:
    first, second = {0: 9.0, 1: 5.0, 2: 6.0}, {1: 4.0, 2: 4.9, 3: 100.0}
    outcome, lead = better(first, second, 1, 0.0)
    assert lead.number == pytest.approx(1.05)
    assert outcome == HOLDS
    assert better(first, second, -1, 0.0)[0] == FAILS
    assert better(first, second, 1, 1.0)[0] == UNDECIDED
    assert better(first, {7: 0.0}, 1, 0.0)[0] == UNDECIDED


def test_what_diverges_is_behind_unless_it_is_ahead_where_it_comes_to_its_end() -> None:
    nan = math.nan
    good, bad, mixed = {0: 5.0, 1: 5.0, 2: 5.0}, {0: 1.0, 1: 2.0, 2: nan}, {0: 9.0, 1: 9.0, 2: nan}
    assert better(good, bad, 1, 0.0)[0] == HOLDS
    assert better(good, mixed, 1, 0.0)[0] == UNDECIDED
    assert better(good, {0: nan, 1: nan, 2: nan}, 1, 0.0)[0] == HOLDS
    assert better(bad, good, 1, 0.0)[0] == FAILS
    assert better(mixed, good, 1, 0.0)[0] == FAILS
    assert better(mixed, bad, 1, 0.0)[0] == FAILS  # neither is ahead of anybody
