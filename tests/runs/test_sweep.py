"""Many settings, few compilations: every setting gives what it gives alone."""

from typing import Any

import jax
import numpy as np
import pytest

import fedbilevel as fb
from contract import CONTRACT, Entry
from fedbilevel.engines.lanes import Lanes
from fedbilevel.engines.participation import Uniform
from fedbilevel.engines.simulation import Simulation, traces
from fedbilevel.testing import largest_difference, noisy
from helpers import assert_same_counts

FAST = {"fedbio"}


def fast(name: str) -> Any:
    return pytest.param(CONTRACT[name], id=name, marks=() if name in FAST else pytest.mark.slow)


@pytest.mark.parametrize("entry", [fast(name) for name in CONTRACT])
def test_all_numbers_of_every_algorithm_are_arguments(entry: Entry) -> None:
    """All of them but an infinite radius; with mini-batches and three of four clients."""
    task, cohort = noisy(entry.small.lower_level, entry.small.weighting), Uniform(3)
    half = jax.tree.map(lambda number: 0.5 * number, entry.small)
    before = len(traces)
    one, other = (Simulation(task, algorithm, cohort) for algorithm in (entry.small, half))
    ends = [engine.advance(engine.advance(engine.start(seed=3), 1), 2) for engine in (one, other)]
    assert traces[before:] == ["start", "advance"]
    lanes = Lanes([one, other])
    together = lanes.advance(lanes.advance(lanes.start([3, 3]), 1), 2)
    alone = Simulation(task, half, cohort)
    expected = alone.advance(alone.start(seed=3), 3)
    for state in (ends[1], lanes.lane(together, 1)):
        assert largest_difference(alone.solution(state), alone.solution(expected)) < 1e-10
        assert_same_counts(state.served, expected.served)
    assert largest_difference(one.solution(ends[0]), one.solution(lanes.lane(together, 0))) < 1e-10
    assert largest_difference(one.solution(ends[0]), alone.solution(expected)) > 1e-6


STEPS: dict[str, Any] = {"lr_lower": 0.2, "lr_adjoint": 0.2, "local_steps": 1}


@pytest.mark.parametrize("way", ["each", "lanes"])
def test_a_sweep_gives_what_solve_gives(way: Any) -> None:
    """Two settings and two seeds: rows, traffic and diagnostics as alone, from one compiled program."""
    settings = [fb.FedBiO(lr_upper=lr, **STEPS) for lr in (0.1, 0.05)]
    task, how = fb.tasks.quadratic("T2"), {"rounds": 25, "sample": 1, "every": 10, "diagnostics": ["adjoint_gap"]}
    before = len(traces)
    found = fb.sweep(task, settings, seeds=[0, 7], way=way, workers=2, **how)
    assert traces[before:] == ["start", "advance"]
    members = [(algorithm, seed) for algorithm in settings for seed in (0, 7)]
    for outcome, (algorithm, seed) in zip(found, members, strict=True):
        assert isinstance(outcome, fb.Result)
        expected = fb.solve(task, algorithm, seed=seed, **how)
        assert [row["round"] for row in outcome.history] == [0, 10, 20, 25]
        for row, other in zip(outcome.history, expected.history, strict=True):
            assert set(row) == set(other)
            for name in set(row) - {"seconds"}:
                assert row[name] == pytest.approx(other[name], rel=1e-9, abs=1e-12), name
        assert largest_difference((outcome.x, outcome.y), (expected.x, expected.y)) < 1e-10
    assert len({outcome.metrics["error"] for outcome in found if isinstance(outcome, fb.Result)}) == 4


@pytest.mark.parametrize("way", ["each", "lanes"])
def test_one_that_diverges_does_not_stop_the_others(way: Any) -> None:
    task, settings = fb.tasks.quadratic("T2"), [fb.FedBiO(lr_upper=lr, **STEPS) for lr in (1e6, 0.1)]
    wild, tame = fb.sweep(task, settings, rounds=200, every=50, way=way)
    assert isinstance(tame, fb.Result)
    assert tame.metrics["round"] == 200
    assert isinstance(wild, fb.Diverged)
    with pytest.raises(fb.Diverged) as alone:
        fb.solve(task, settings[0], rounds=200, every=50)
    assert str(wild) == str(alone.value)
    rows = [row["round"] for row in alone.value.result.history]
    assert [row["round"] for row in wild.result.history] == rows
    assert 0 < rows[-1] < 200


def test_groups_and_fallbacks() -> None:
    """What cannot be an argument is compiled for each setting, whatever is asked for; results keep their order."""
    task = fb.tasks.quadratic("T2")
    settings = [
        fb.FedBiO(lr_upper=0.1, radius=float("inf"), **STEPS),
        fb.FedBiO(lr_upper=0.1, **{**STEPS, "local_steps": 2}),
        fb.FedBiO(lr_upper=0.1, radius=1e-3, **STEPS),
    ]
    for way in ("each", "lanes"):
        found = fb.sweep(task, settings, rounds=5, way=way)  # pyright: ignore
        for outcome, algorithm in zip(found, settings, strict=True):
            expected = fb.solve(task, algorithm, rounds=5)
            assert largest_difference((outcome.x, outcome.y), (expected.x, expected.y)) < 1e-12  # pyright: ignore


def test_numbers_do_not_change_the_precision() -> None:
    """Arguments are as weak as Python's numbers: vectors in single precision stay so."""
    task, algorithm = noisy("global", False, np.float32), CONTRACT["fedbio"].small
    shared = Simulation(task, algorithm)
    lanes = Lanes([shared, shared])
    for state in (shared.advance(shared.start(seed=0), 2), lanes.advance(lanes.start([0, 1]), 2)):
        assert {leaf.dtype for leaf in jax.tree.leaves(shared.solution(state))} == {np.dtype(np.float32)}


def test_what_a_sweep_refuses() -> None:
    task = fb.tasks.quadratic("T2")
    with pytest.raises(fb.FedbilevelError, match="at least one algorithm, one seed and one worker"):
        fb.sweep(task, [])
    with pytest.raises(fb.FedbilevelError, match="for instance FedBiO"):
        fb.sweep(task, [fb.FedBiO])  # pyright: ignore
    with pytest.raises(fb.FedbilevelError, match="no way called 'line': did you mean 'lanes'"):
        fb.sweep(task, fb.FedBiO(), way="line")  # pyright: ignore
    with pytest.raises(fb.FedbilevelError, match="every must be"):
        fb.sweep(task, fb.FedBiO(), every=0, way="lanes")
    with pytest.raises(fb.FedbilevelError, match="seed must be"):
        fb.sweep(task, fb.FedBiO(), seeds=[-1])
