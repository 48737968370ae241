"""What every algorithm must keep, driven by the list in tests/contract.py."""

from dataclasses import fields, replace
from typing import Any

import jax
import numpy as np
import pytest

import fedbilevel as fb
from contract import CONTRACT, T3, Cost, D, Entry, P
from fedbilevel import testing
from fedbilevel.engines.messaging.local import Local
from fedbilevel.engines.participation import Everyone, Uniform
from fedbilevel.engines.simulation import Simulation
from fedbilevel.tasks import Quadratic, WeightedQuadratics
from fedbilevel.testing import largest_difference, noisy, problem_of
from helpers import sample_weights

FAST = {"fedbio", "primal-dual", "fedbio-local"}


# One of every kind of memory, loop and momentum.
MORE = {"simfbo", "fedbio-local", "fedbioacc", "mefbo"}


def entry_of(name: str, fast: set[str] = FAST) -> Any:
    """For tests of which CI runs a part, and -m slow the rest."""
    return pytest.param(CONTRACT[name], id=name, marks=() if name in fast else pytest.mark.slow)


EVERY = pytest.mark.parametrize("entry", CONTRACT.values(), ids=CONTRACT.keys())


def test_every_algorithm_is_in_the_contract() -> None:
    assert set(CONTRACT) == set(fb.ALGORITHMS)
    for name, entry in CONTRACT.items():
        assert type(entry.small) is fb.ALGORITHMS[name]
        assert entry.limits
        assert len(entry.costs) >= 2


COSTS = [(entry, cost) for entry in CONTRACT.values() for cost in entry.costs]


@pytest.mark.parametrize(("entry", "cost"), COSTS, ids=[type(cost.algorithm).__name__ for _, cost in COSTS])
def test_the_traced_plan_is_the_formula(entry: Entry, cost: Cost) -> None:
    kind = type(cost.algorithm)
    if kind.weighting:
        task = WeightedQuadratics.random(clients=P, d=D).task()
    else:
        task = problem_of(kind, Quadratic.random(clients=2, p=P, d=D)).task()
    plan, newcomer = (fb.plan(task, cost.algorithm, who).at(cost.repeats) for who in (Everyone(), Uniform(1)))
    assert (plan.exchanges, plan.down, plan.up) == (cost.exchanges, cost.down, cost.up)
    assert plan.oracles == cost.oracles
    assert newcomer.down - plan.down == entry.missed


def noisy_task(algorithm: fb.Algorithm, dtype: Any = np.float64) -> fb.Task:
    return noisy(algorithm.lower_level, algorithm.weighting, dtype)


@pytest.mark.parametrize("entry", [entry_of(name, MORE) for name in CONTRACT])
def test_engines_seeds_and_traces(entry: Entry) -> None:
    """Mini-batches, three of four clients: both engines give the same numbers and counts, the same seed the same bits;
    the structure of the state does not change, and nothing is traced twice."""
    testing.check_engines(noisy_task(entry.small), entry.small, Uniform(3))


@pytest.mark.parametrize("entry", [entry_of(name, {"fedbio"}) for name in CONTRACT])
def test_the_whole_contract(entry: Entry) -> None:
    """As somebody else would check an algorithm."""
    fb.testing.check_algorithm(entry.small)


@pytest.mark.parametrize("entry", [entry_of(name, {"fedbio-local"}) for name in CONTRACT])
def test_every_step_may_be_a_schedule(entry: Entry) -> None:
    """With power(v, -0.5) for every number v, rounds are those with v, then with v / sqrt(2), in both engines."""
    algorithm, cohort = entry.small, Uniform(3)
    steps = {f.name: getattr(algorithm, f.name) for f in fields(algorithm) if f.name.startswith(("lr_", "local_lr_"))}
    steps = {name: value for name, value in steps.items() if isinstance(value, float) and value > 0}
    falling = replace(algorithm, **{name: f"power({value}, -0.5)" for name, value in steps.items()})
    later = replace(algorithm, **{name: value / 2**0.5 for name, value in steps.items()})
    task = noisy_task(algorithm)
    one, two, both = (Simulation(task, a, cohort) for a in (algorithm, later, falling))
    expected = two.solution(two.advance(one.advance(one.start(3), 1), 1))
    found = both.solution(both.advance(both.start(3), 2))
    assert largest_difference(found, expected) < 1e-12
    assert largest_difference(found, one.solution(one.advance(one.start(3), 2))) > 1e-6 or not steps
    local = Local(task, falling, cohort)
    assert largest_difference(found, local.solution(local.advance(local.start(3), 2))) < 1e-10
    assert not local.failures


@pytest.mark.parametrize("entry", [entry_of(n) for n in CONTRACT])
def test_single_precision(entry: Entry) -> None:
    """The same numbers up to rounding, and nothing becomes double on the way."""
    ends = []
    for dtype in (np.float64, np.float32):
        simulation = Simulation(noisy_task(entry.small, dtype), entry.small, Uniform(3))
        state = simulation.advance(simulation.start(3), 3)
        ends.append(simulation.solution(state))
        assert {leaf.dtype for leaf in jax.tree.leaves(ends[-1])} == {np.dtype(dtype)}
    assert largest_difference(*ends) < 1e-4


# The weights of identical clients are not determined.
@pytest.mark.parametrize("entry", [entry_of(n) for n, e in CONTRACT.items() if not e.small.weighting])
def test_identical_clients_are_one_client(entry: Entry) -> None:
    """With two of three, or all where clients remember: who takes part makes no difference."""
    algorithm = entry.small
    many = problem_of(type(algorithm), T3)
    one = problem_of(type(algorithm), Quadratic(*(getattr(T3, k)[:1] for k in ("A", "B", "b", "P", "s", "R", "t"))))
    # What clients draw for themselves would make them differ.
    alike: dict[str, Any] = {"movers": 1, "common_length": True, "blocks": 1}
    algorithm = replace(algorithm, **{name: value for name, value in alike.items() if hasattr(algorithm, name)})
    expected = fb.solve(one.task(), algorithm, rounds=10, every=10)
    sample = None if algorithm.remembers == "run" else 2
    found = fb.solve(many.task(), algorithm, rounds=10, every=10, sample=sample)
    assert largest_difference(found.x, expected.x) < 1e-10
    assert np.max(np.abs(np.asarray(found.y) - np.asarray(expected.y))) < 1e-10  # every row of it, if it is local
    assert np.max(np.abs(expected.y)) > 1e-3


@pytest.mark.parametrize(
    "entry",
    [entry_of(n) for n, e in CONTRACT.items() if e.small.lower_level == "global" and not e.small.weighting],
)
def test_a_private_upper_variable(entry: Entry) -> None:
    """Engines agree where every client owns a block of x, and clients differ in size."""
    algorithm = entry.small
    task, cohort = sample_weights(), Everyone() if algorithm.remembers == "run" else Uniform(3)
    simulation, local = Simulation(task, algorithm, cohort), Local(task, algorithm, cohort)
    a, b = (engine.advance(engine.start(seed=3), 2) for engine in (simulation, local))
    assert largest_difference(simulation.solution(a), local.solution(b)) < 1e-10
    assert not local.failures


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("gd", "stocbio") else pytest.mark.slow)
        for n, e in CONTRACT.items()
        if e.small.upper_at == "either"
    ],
)
def test_the_upper_loss_on_the_server(name: str) -> None:
    """Engines agree on client weights with validation rows that only the server has."""
    algorithm = CONTRACT[name].small
    task, cohort = noisy("global", weighting=True), Uniform(3)
    simulation, local = Simulation(task, algorithm, cohort), Local(task, algorithm, cohort)
    a, b = (engine.advance(engine.start(seed=3), 3) for engine in (simulation, local))
    assert not np.any(local.parties[0].data.val.arrays["H"])
    assert largest_difference(simulation.solution(a), local.solution(b)) < 1e-10
    assert not local.failures
    assert fb.plan(task, algorithm).oracles["Gf"] == 0


@pytest.mark.parametrize("name", sorted(fb.ALGORITHMS))
def test_bounds_of_hyper_parameters(name: str) -> None:
    """Every field with a bound refuses what lies outside with one sentence that names it."""
    assert testing.check_bounds(fb.ALGORITHMS[name])
