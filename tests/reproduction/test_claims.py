"""Claims hold, fail or stay undecided by the numbers alone."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.reproduction.claims import Judge
from fedbilevel.reproduction.curves import Curve
from fedbilevel.reproduction.decisions import Outcome
from fedbilevel.reproduction.files import Claim, Method, Panel, ResultColumn
from made_up import judge, reproduced

HOLDS, UNDECIDED, FAILS, NOT_RUN = Outcome.HOLDS, Outcome.UNDECIDED, Outcome.FAILS, Outcome.NOT_RUN
NAN = math.nan


def test_the_number_of_a_run_is_the_mean_of_the_last_tenth_of_its_curve() -> None:
    history = [{"round": n, "exchanges": 3 * n, "error": n} for n in (0, 2, 4, 10)]
    curve = Curve(Panel("all"), Method("FedBiO", "fedbio"), 0, history)
    number = lambda share=0.1, **column: curve.mean(ResultColumn("moment", "error", **column), "round", share)
    assert number() == pytest.approx(9.5)
    assert number(at=4) == pytest.approx(3.8)
    assert number(at=4, scale=2.0) == pytest.approx(7.6)
    assert number(at=12, along="exchanges") == pytest.approx(3.8)
    assert number(1.0) == pytest.approx(5.0)  # the whole way
    assert number(1.0, at=3) == pytest.approx(1.5)
    assert number(0.5, at=8) == pytest.approx(6.0)
    with pytest.raises(fb.FedbilevelError, match="ends at 10, before 'moment'"):
        number(at=11)
    fewer = Curve(curve.panel, Method("FedBiO", "fedbio", communications=2), 0, history)  # as a paper counts them
    assert fewer.mean(ResultColumn("", "error", at=8), "communications", 0.1) == pytest.approx(3.8)


def test_a_column_may_have_a_power_a_share_and_a_bound_to_reach() -> None:
    history = [{"round": n, "samples": 8 * n, "error": 10 - n} for n in range(11)]
    curve = Curve(Panel("all"), Method("FedBiO", "fedbio"), 0, history)
    number = lambda share=0.5, **column: curve.mean(ResultColumn("", "error", **column), "round", share)
    assert number(power=2.0) == pytest.approx((0.5 * 25 + 16 + 9 + 4 + 1) / 5)  # squares, then their mean
    assert number(until=4.5) == 6
    assert number(until=4.5, along="samples") == 48
    assert math.isnan(number(until=-1.0))


def test_one_bad_evaluation_at_the_end_is_a_part_of_the_number_only() -> None:
    history = [{"round": n, "error": 1.0} for n in range(0, 40, 2)] + [{"round": 40, "error": 9.0}]
    curve = Curve(Panel("all"), Method("FedBiO", "fedbio"), 0, history)
    assert curve.mean(ResultColumn("", "error"), "round", 0.1) == pytest.approx(3.0)  # a quarter of it


def test_order_and_ahead_are_decided_by_the_interval_of_paired_differences() -> None:
    # Seeds differ much more than methods do.
    done = reproduced({"one": [10.0, 20.0, 30.0], "two": [9.0, 19.1, 28.9], "three": [9.9, 20.1, 29.9]})
    assert judge(done, "order", "one", "two").outcome == HOLDS
    assert judge(done, "order", "two", "one").outcome == FAILS
    assert judge(done, "order", "one", "three").outcome == UNDECIDED
    assert judge(done, "order", "one", "two", points=0.9).outcome == UNDECIDED
    assert judge(done, "order", "one", "two", points=2.0).outcome == FAILS
    assert judge(done, "order", "two", "one", points=-2.0).outcome == HOLDS  # at most two points behind
    assert judge(done, "ahead", "one", "two", "three").outcome == UNDECIDED
    assert judge(done, "order", "one", "two", "three").outcome == FAILS
    assert "against three" in judge(done, "ahead", "one", "two", "three").numbers
    lower = reproduced({"one": [10.0, 20.0, 30.0], "two": [9.0, 19.1, 28.9]}, better="lower")
    assert judge(lower, "order", "two", "one").outcome == HOLDS


def test_one_seed_decides_nothing_but_divergence() -> None:
    done = reproduced({"one": [90.0], "two": [10.0], "wild": [NAN]})
    assert judge(done, "order", "one", "two").outcome == UNDECIDED
    assert "one seed" in judge(done, "order", "one", "two").numbers
    assert judge(done, "order", "one", "wild").outcome == HOLDS
    assert judge(done, "order", "wild", "one").outcome == FAILS
    assert judge(done, "bound", "one", least=0.0).outcome == UNDECIDED


def test_the_numbers_say_who_diverged_and_what_the_others_have() -> None:
    done = reproduced({"one": [5.0, 5.1, 5.2], "two": [1.0, 2.0, NAN]})
    shown = judge(done, "order", "one", "two")
    assert shown.outcome == HOLDS
    assert "two diverged in 1 of 3 seeds (1.50 else)" in shown.numbers


def test_near_is_within_the_papers_deviation_or_so_many_points() -> None:
    paper = {"one": {"paper": {"A": ["10.0 ± 0.5"]}}}
    near = lambda ends, points=0.0: judge(reproduced({"one": ends}, **paper), "near", "one", points=points).outcome
    assert near([10.2, 10.3, 10.25]) == HOLDS
    assert near([9.0, 10.0, 11.0]) == UNDECIDED
    assert near([9.0, 9.1, 8.9]) == FAILS
    assert near([9.0, 9.1, 8.9], 2.0) == HOLDS
    assert near([10.0, 10.0, NAN]) == FAILS
    assert judge(reproduced({"one": [1.0, 1.0]}), "near", "one", points=1e9).outcome == FAILS  # nothing to compare with


def test_level_and_bound_are_two_sided() -> None:
    done = reproduced({"one": [1.0, 2.0, 3.0], "two": [1.1, 2.1, 3.05], "wild": [1.0, 2.0, NAN]})
    for pair in (("one", "two"), ("two", "one")):
        assert judge(done, "level", *pair, points=0.5).outcome == HOLDS
        assert judge(done, "level", *pair, points=0.1).outcome == UNDECIDED
        assert judge(done, "level", *pair, points=0.001).outcome == FAILS
    assert judge(done, "level", "one", "wild", points=1e9).outcome == FAILS
    assert judge(done, "bound", "one", least=-1.0, most=5.0).outcome == HOLDS
    assert judge(done, "bound", "one", least=1.9).outcome == UNDECIDED
    assert judge(done, "bound", "one", most=-1.0).outcome == FAILS
    assert judge(done, "bound", "wild", least=-math.inf).outcome == FAILS


def test_steady_compares_deviations_over_seeds() -> None:
    many = {"calm": [1.0, 1.01, 0.99], "noisy": [1.0, 2.0, 3.0], "so-so": [1.0, 1.02, 0.98], "wild": [1.0, NAN, 1.2]}
    done = reproduced(many)
    assert judge(done, "steady", "calm", "noisy").outcome == HOLDS
    assert judge(done, "steady", "noisy", "calm").outcome == FAILS
    assert judge(done, "steady", "calm", "so-so").outcome == UNDECIDED
    assert judge(done, "steady", "calm", "noisy", "so-so").outcome == UNDECIDED
    assert judge(done, "steady", "calm", "wild").outcome == HOLDS  # what diverges varies most
    assert judge(done, "steady", "wild", "calm").outcome == FAILS
    assert judge(reproduced({"one": [1.0, 2.0], "two": [1.0]}), "steady", "one", "two").outcome == UNDECIDED


def test_a_target_is_better_the_closer_a_number_is() -> None:
    done = reproduced({"near": [0.4, 0.6, 0.45], "far": [0.2, 0.9, 0.15]})
    target: dict[str, Any] = {"target": {"the end": 0.5}}
    assert judge(done, "order", "near", "far", **target).outcome == HOLDS
    assert judge(done, "order", "far", "near", **target).outcome == FAILS
    assert "near 0.08" in judge(done, "order", "near", "far", **target).numbers


def test_best_is_over_panels() -> None:
    done = reproduced({"one": [3.0, 4.0, 5.0]}, {"one": [2.0, 3.1, 3.9]}, {"one": [3.1, 3.9, 5.0]})
    assert judge(done, "best", "one", panels=["A", "B"]).outcome == HOLDS
    assert judge(done, "best", "one").outcome == UNDECIDED
    worst = reproduced({"one": [2.0, 3.1, 3.9]}, {"one": [3.0, 4.0, 5.0]})
    assert judge(worst, "best", "one").outcome == FAILS


def test_spreads_are_over_panels_and_compared_by_their_ratio() -> None:
    narrow, wide = [[1.0, 1.0, 1.0], [1.1, 1.2, 0.9]], [[1.0, 1.0, 1.0], [3.0, 5.0, 31.0]]
    done = reproduced(*({"narrow": a, "wide": b} for a, b in zip(narrow, wide, strict=True)))
    assert judge(done, "spread", "narrow", "wide").outcome == HOLDS  # though the spreads of the other differ tenfold
    assert judge(done, "spread", "wide", "narrow").outcome == FAILS
    same = reproduced(*({"one": a, "two": b} for a, b in zip(narrow, [narrow[0], [1.2, 0.9, 1.1]], strict=True)))
    assert judge(same, "spread", "one", "two").outcome == UNDECIDED
    wild = reproduced({"one": [1.0, 1.0], "wild": [1.0, 1.0]}, {"one": [2.0, 2.1], "wild": [NAN, NAN]})
    assert judge(wild, "spread", "one", "wild").outcome == HOLDS
    assert judge(wild, "spread", "wild", "one").outcome == FAILS


def test_a_trend_is_one_from_each_panel_to_the_next() -> None:
    done = reproduced({"one": [1.0, 11.0]}, {"one": [2.0, 12.01]}, {"one": [3.0, 13.0]})
    assert judge(done, "trend", "one").outcome == HOLDS
    assert judge(done, "trend", "one", direction="falling").outcome == FAILS
    back = reproduced({"one": [1.0, 11.0]}, {"one": [2.0, 12.01]}, {"one": [1.0, 11.0]})
    assert judge(back, "trend", "one").outcome == FAILS
    unclear = reproduced({"one": [1.0, 11.0]}, {"one": [2.0, 11.1]})
    assert judge(unclear, "trend", "one").outcome == UNDECIDED
    gap = reproduced({"one": [1.0, 5.0], "two": [0.0, 4.0]}, {"one": [9.0, 3.0], "two": [7.0, 1.01]})
    assert judge(gap, "trend", "one", "two").outcome == HOLDS
    lost = reproduced({"one": [1.0, 5.0], "two": [0.0, 4.0]}, {"one": [9.0, 3.0], "two": [7.0, NAN]})
    assert judge(lost, "trend", "one", "two").outcome == UNDECIDED
    assert judge(lost, "trend", "two", "one").outcome == FAILS


def test_to_approach_is_to_come_closer_from_either_side() -> None:
    done = reproduced({"one": [1.0, 1.0], "two": [4.0, -2.0]}, {"one": [1.0, 1.0], "two": [0.0, 2.01]})
    assert judge(done, "approach", "one", "two").outcome == HOLDS
    assert judge(done, "approach", "one", "two", panels=["B", "A"]).outcome == HOLDS  # in the order of the file
    # Seeds to both sides are not close in the mean.
    apart = reproduced({"one": [1.0, 1.1], "two": [0.0, 0.0]}, {"one": [5.0, -5.1], "two": [0.0, 0.0]})
    assert judge(apart, "approach", "one", "two").outcome == FAILS


def test_a_claim_is_judged_under_each_condition() -> None:
    good, bad = {"one": [2.0, 2.1], "two": [1.0, 1.1]}, {"one": [1.0, 1.1], "two": [2.0, 2.1]}
    done = reproduced(good, bad, {"one": [1.0, 1.1]}, good)
    judged = judge(done, "order", "one", "two")
    assert [each.outcome for each in judged.statements] == [HOLDS, FAILS, NOT_RUN, HOLDS]
    assert judged.outcome == FAILS
    assert judged.word == "holds under 2 of 4 conditions, does not hold under 1, not run under 1"
    assert judged.under(HOLDS) == "A, D"
    assert judged.numbers.startswith("A (holds): one 2.05, two 1.05 (+1.00 [1.00, 1.00]); B (does not hold): ")
    assert "C (not run)" in judged.numbers
    same = judge(reproduced(good, good), "order", "one", "two")
    assert (same.word, same.under(HOLDS)) == ("holds", "")
    assert same.numbers.startswith("A: one 2.05")


def test_a_claim_about_certain_parameters_is_judged_by_them_alone() -> None:
    done = reproduced({"one": [1.0, 1.1]})
    assert judge(done, "bound", "one", parameters="found", most=2.0).outcome == HOLDS  # there are no others
    assert "one (the paper's) 1.05" in judge(done, "bound", "one", parameters="found", most=2.0).numbers
    claim = Claim("", "bound", ["one"], most=2.0, parameters="printed")
    assert "one 1.05" in Judge(done, "found").claim(claim).numbers


def test_a_slope_is_that_of_a_line_for_every_seed() -> None:
    """Numbers like 3 M^-1, off by factors that differ from seed to seed; and one that stays where it is."""
    across, off = (4.0, 16.0, 64.0), ((1.0, 1.1, 0.95), (1.05, 0.9, 1.0), (0.97, 1.0, 1.02))
    ends = [
        {"like 1 / M": [3 / M * each[n] for each in off], "flat": [2.0 * each[n] for each in off]}
        for n, M in enumerate(across)
    ]
    done = reproduced(*ends)
    panels = [replace(panel, number=M) for panel, M in zip(done.reproduction.panels, across, strict=True)]
    done = replace(done, reproduction=replace(done.reproduction, panels=panels))
    expected = [np.polyfit(np.log(across), np.log([of["like 1 / M"][seed] for of in ends]), 1)[0] for seed in range(3)]
    slope = lambda *methods, **bounds: judge(done, "slope", *methods, **bounds)
    found = slope("like 1 / M", least=-1.2, most=-0.8)
    assert found.outcome == HOLDS
    half = 4.303 * np.std(expected, ddof=1) / math.sqrt(3)  # the t interval of three seeds
    words = (f"{number:.2f}" for number in (np.mean(expected), np.mean(expected) - half, np.mean(expected) + half))
    assert found.numbers == "like 1 / M {} [{}, {}]".format(*words)
    assert slope("flat", most=-0.5).outcome == FAILS
    assert slope("like 1 / M", "flat", most=-0.5).outcome == FAILS
    assert slope("flat", least=0.0).outcome == UNDECIDED
    wild = reproduced({"a": [1.0, 2.0]}, {"a": [1.0, NAN]})
    panels = [replace(panel, number=M) for panel, M in zip(wild.reproduction.panels, across, strict=False)]
    wild = replace(wild, reproduction=replace(wild.reproduction, panels=panels))
    assert judge(wild, "slope", "a", most=9.0).outcome == FAILS
